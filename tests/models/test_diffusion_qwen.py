"""Qwen-Image's denoiser: what diffusers computes, row by row the same in any company, and the same in parts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

from motet.engine.errors import ModelLoadError
from motet.engine.painter import Rows
from motet.engine.step_cache import CacheConfig, RowCache, cached_forward
from motet.models.diffusion import Caption
from motet.models.diffusion_flux import pack, unpack
from motet.models.diffusion_folder import load_picture
from motet.models.diffusion_qwen import JointAttention, QwenDenoiser

from ..tiny import lively
from . import picture_rows
from .picture_encoders import qwen_pipeline
from .picture_rows import pick

WIDTH, HEIGHT = 48, 32  # pixels; latents 12 x 8, tokens 6 x 4


def network(**more: Any) -> Any:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6), **more,
    )  # fmt: skip
    with torch.no_grad():
        lively(model)
    return model.eval()


def denoiser(**options: Any) -> QwenDenoiser:
    return QwenDenoiser(network(), scale=4, **options)


rows = functools.partial(picture_rows.rows, pooled=False)


def theirs(model: Any, row: Rows, mask: torch.Tensor | None = None) -> torch.Tensor:
    """diffusers' own forward of one row."""
    grid = (row.latents.shape[2] // 2, row.latents.shape[3] // 2)
    made = model(
        hidden_states=pack(row.latents),
        encoder_hidden_states=row.conds[0].embeds[None],
        encoder_hidden_states_mask=mask,
        timestep=row.times,
        img_shapes=[[(1, *grid)]],
        return_dict=False,
    )[0]
    return unpack(made, grid)


@pytest.mark.parametrize("side", [(8, 12), (10, 6), (2, 2)])
@torch.inference_mode()
def test_one_row_is_what_diffusers_computes(side: tuple[int, int]) -> None:
    row = rows((5,), side=side)
    expected = theirs(network(), row)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(denoiser().forward(row), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_padded_row_is_what_diffusers_computes_with_a_mask() -> None:
    row = rows((7, 3))
    padded = pick(row, [1])
    padded.conds[0] = Caption(torch.cat([padded.conds[0].embeds, torch.zeros(4, 24)]))  # type: ignore[index]
    expected = theirs(network(), padded, torch.tensor([[1, 1, 1, 0, 0, 0, 0]]))
    torch.testing.assert_close(denoiser().forward(row)[1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_batch_of_different_rows_is_each_of_them_alone(attention: str) -> None:
    ours = denoiser(attention=attention)
    batch = rows()
    together = ours.forward(batch)
    for row in range(4):
        torch.testing.assert_close(together[row], ours.forward(pick(batch, [row]))[0], rtol=1e-5, atol=1e-5)


def test_a_neighbour_changes_nothing() -> None:
    ours = denoiser()
    batch, other = rows(), rows(seed=1)
    other.conds[1].embeds.fill_(float("nan"))
    mixed = Rows(
        latents=torch.cat([batch.latents[:1], other.latents[1:]]), times=torch.cat([batch.times[:1], other.times[1:]]),
        guidance=batch.guidance, conds=[batch.conds[0], *other.conds[1:]], width=WIDTH, height=HEIGHT,
    )  # fmt: skip
    made = ours.forward(mixed)
    torch.testing.assert_close(made[0], ours.forward(batch)[0], rtol=1e-6, atol=1e-6)
    assert made[1].isnan().all() and made[[0, 2, 3]].isfinite().all()


def test_quantized_attention_stays_near_and_is_guarded_block_by_block() -> None:
    exact, near = denoiser(), denoiser(attention="sage")
    batch = rows()
    expected = exact.forward(batch)
    error = (near.forward(batch) - expected).abs().mean() / expected.abs().mean()
    assert 0 < error < 0.05
    attentions = [block.attn.processor.attention for block in near.model.transformer_blocks]
    assert len({one.number for one in attentions}) == 3
    assert attentions[2].layer == "qwen-image block 2"


def test_its_parts_make_the_whole() -> None:
    ours = denoiser()
    batch = rows()
    whole = ours.forward(batch)
    trunk = ours.begin(batch)
    parts = trunk
    for block in range(3):
        parts = ours.blocks(parts, block, block + 1)
    assert torch.equal(ours.finish(trunk, ours.hidden(parts)), whole)
    some = ours.select(trunk, [2, 0])
    made = ours.finish(some, ours.hidden(ours.blocks(some, 0, None)))
    torch.testing.assert_close(made, whole[[2, 0]], rtol=1e-5, atol=1e-5)
    assert ours.indicator(trunk).shape == ours.hidden(trunk).shape == (4, 24, 32)


@pytest.mark.parametrize("policy", ["first_block", "teacache"])
def test_a_step_cache_that_computes_everything_changes_nothing(policy: Any) -> None:
    ours = denoiser()
    batch = rows()
    config = CacheConfig(policy=policy, threshold=1e-9, coefficients=(0.0, 0.0, 0.0, 1.0, 1.0))
    caches = [RowCache(config, 20) for _ in range(4)]
    whole = ours.forward(batch)
    torch.testing.assert_close(cached_forward(ours, batch, caches), whole, rtol=1e-5, atol=1e-5)
    assert [cache.decisions for cache in caches] == [[True]] * 4


@pytest.mark.parametrize("scale", [1.0, 4.0])
@torch.inference_mode()
def test_a_picture_is_the_pipelines(scale: float) -> None:
    """Equal seed, captions of different lengths, guidance as rows: the latents of QwenImagePipeline."""
    steps, (width, height) = 4, (96, 64)
    shifts = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192}
    scheduler = FlowMatchEulerDiscreteScheduler(**shifts, shift_terminal=0.02)
    conds = rows((7, 3)).conds
    pipeline = QwenImagePipeline(
        scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=network()
    )
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt_embeds=conds[0].embeds[None],
        prompt_embeds_mask=torch.ones(1, 7),
        negative_prompt_embeds=conds[1].embeds[None] if scale > 1 else None,
        negative_prompt_embeds_mask=torch.ones(1, 3) if scale > 1 else None,
        true_cfg_scale=scale,
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).images
    ours = QwenDenoiser(network(), scale=8)
    shape = ours.latent_shape(width, height)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    again = FlowMatchEulerDiscreteScheduler(**shifts, shift_terminal=0.02)
    slope = (0.9 - 0.5) / (8192 - 256)
    again.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=0.5 + slope * (24 - 256))
    for time in again.timesteps:
        used = conds if scale > 1 else conds[:1]
        predicted = ours.forward(
            Rows(
                latents=torch.stack([latents] * len(used)),
                times=torch.stack([time / 1000] * len(used)),
                guidance=torch.ones(len(used)),
                conds=used,
                width=width,
                height=height,
            )
        )
        guided = ours.guide(predicted[0], predicted[1], scale) if scale > 1 else predicted[0]
        latents = again.step(guided, time, latents, return_dict=False)[0]
    torch.testing.assert_close(pack(latents[None]), expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_folder_of_the_pipeline_makes_its_picture(tmp_path: Path) -> None:
    """model_index.json and all that it names, from the prompt to the pixels."""
    pipeline = qwen_pipeline(tmp_path / "tiny")
    cpu = torch.device("cpu")
    loaded = load_picture(tmp_path / "tiny", dtype=torch.float32, devices=(cpu, cpu, cpu))
    assert (loaded.family, loaded.card["guidance"], loaded.card["scheduler"]["shift_terminal"]) == (
        "qwen-image",
        "cfg",
        0.02,
    )
    steps, (width, height), prompt, negative = 3, (48, 32), "a red apple", "blurry"
    shown = pipeline(
        prompt=prompt,
        negative_prompt=negative,
        true_cfg_scale=3.0,
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images
    painter: Any = loaded.painter
    conds = painter.encode([prompt, negative])
    assert len(conds[0].embeds) > len(conds[1].embeds)
    latents = torch.randn(painter.latent_shape(width, height), generator=torch.Generator().manual_seed(5))
    slope = (0.9 - 0.5) / (8192 - 256)
    pipeline.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=0.5 + slope * (24 - 256))
    pipeline.scheduler.set_begin_index(0)
    for time in pipeline.scheduler.timesteps:
        predicted = painter.forward(
            Rows(
                latents=torch.stack([latents] * 2),
                times=torch.stack([time / 1000] * 2),
                guidance=torch.ones(2),
                conds=conds,
                width=width,
                height=height,
            )
        )
        guided = painter.denoiser.guide(predicted[0], predicted[1], 3.0)
        latents = pipeline.scheduler.step(guided, time, latents, return_dict=False)[0]
    made = painter.decode(latents[None])
    expected = torch.from_numpy((shown * 255).round().astype("uint8"))
    assert expected.float().std() > 5  # a picture with something on it
    assert (made.int() - expected.int()).abs().max() <= 1


def test_guidance_keeps_each_tokens_length() -> None:
    ours = denoiser()
    pair = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    guided = ours.guide(pair[0], pair[1], 5.0)
    torch.testing.assert_close(pack(guided[None]).norm(dim=-1), pack(pair[:1]).norm(dim=-1))
    torch.testing.assert_close(ours.guide(pair[0], pair[1], 1.0), pair[0])
    assert ours.guide(torch.zeros(4, 8, 12), torch.zeros(4, 8, 12), 5.0).isfinite().all()


@pytest.mark.parametrize("word", ["guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"])
def test_variants_that_want_more_than_a_prompt_are_refused(word: str) -> None:
    with pytest.raises(ModelLoadError, match=f"Qwen-Image with {word} is not supported"):
        QwenDenoiser(network(**{word: True}), scale=4)


def test_sizes_and_work() -> None:
    ours = denoiser()
    assert ours.latent_shape(64, 32) == (4, 8, 16)
    assert ours.batch_key(64, 32) != ours.batch_key(32, 64)
    assert ours.cost(64, 64, 8) > ours.cost(64, 64, 4) > 0
    assert ours.cost(64, 64, 8) > 3 * ours.cost(32, 32, 8)
    assert ours.device == torch.device("cpu")


def test_half_precision_stays_near() -> None:
    batch = rows()
    exact = denoiser().forward(batch)
    near = QwenDenoiser(network().to(torch.bfloat16), scale=4).forward(batch)
    assert (near.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_one_compiled_block_serves_all_blocks_sizes_and_captions() -> None:
    ours, plain = denoiser(attention="sage"), denoiser(attention="sage")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours.compile("eager")
    for case in (rows((3, 7)), rows((2, 9, 2), side=(6, 6)), rows((4, 4)), rows((5,)), rows((9,), side=(4, 6))):
        torch.testing.assert_close(ours.forward(case), plain.forward(case), rtol=1e-5, atol=1e-5)
    found = torch._dynamo.utils.counters
    assert found["stats"]["unique_graphs"] == 2 and not found["graph_break"]  # one for a lone row
    torch._dynamo.reset()


def test_masks_are_not_taken_silently() -> None:
    attention = denoiser().model.transformer_blocks[0].attn.processor
    assert isinstance(attention, JointAttention)
    with pytest.raises(ValueError, match="got a mask"):
        attention(None, torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 2))  # type: ignore[arg-type]
