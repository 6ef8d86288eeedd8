"""Stable Diffusion 3's denoiser: what diffusers computes, row by row the same in any company, and the same in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from motet.engine.errors import ModelLoadError
from motet.engine.painter import Rows
from motet.engine.step_cache import CacheConfig, RowCache, cached_forward
from motet.models.diffusion import Caption
from motet.models.diffusion_folder import load_picture
from motet.models.diffusion_sd3 import Sd3Denoiser

from ..tiny import lively
from .picture_encoders import sd3_pipeline
from .picture_rows import pick, rows

WIDTH, HEIGHT = 48, 32  # pixels; latents 12 x 8, tokens 6 x 4
KINDS = ("sd3", "sd3.5")


def network(kind: str = "sd3") -> Any:
    newer: dict[str, Any] = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"} if kind == "sd3.5" else {}
    model = SD3Transformer2DModel(
        sample_size=12, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20,
        pos_embed_max_size=8, **newer,
    )  # fmt: skip
    with torch.no_grad():
        lively(model)
    return model.eval()


def denoiser(kind: str = "sd3", **options: Any) -> Sd3Denoiser:
    return Sd3Denoiser(network(kind), scale=4, **options)


def theirs(model: Any, row: Rows) -> torch.Tensor:
    """diffusers' own forward of one row."""
    caption = row.conds[0]
    made: torch.Tensor = model(
        hidden_states=row.latents,
        encoder_hidden_states=caption.embeds[None],
        pooled_projections=caption.pooled[None],
        timestep=row.times * 1000,
        return_dict=False,
    )[0]
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [(8, 12), (10, 6), (2, 2)])
@torch.inference_mode()
def test_one_row_is_what_diffusers_computes(kind: str, side: tuple[int, int]) -> None:
    row = rows((5,), side=side)
    expected = theirs(network(kind), row)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(denoiser(kind).forward(row), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(3, 7, 1, 5), (4, 4, 4, 4)])
def test_a_batch_of_different_rows_is_each_of_them_alone(kind: str, lengths: tuple[int, ...]) -> None:
    ours = denoiser(kind)
    batch = rows(lengths)
    together = ours.forward(batch)
    for row in range(4):
        torch.testing.assert_close(together[row], ours.forward(pick(batch, [row]))[0], rtol=1e-5, atol=1e-5)


def test_a_neighbour_changes_nothing() -> None:
    ours = denoiser("sd3.5")
    batch, other = rows(), rows(seed=1)
    other.conds[1].embeds.fill_(float("nan"))
    mixed = Rows(
        latents=torch.cat([batch.latents[:1], other.latents[1:]]), times=torch.cat([batch.times[:1], other.times[1:]]),
        guidance=batch.guidance, conds=[batch.conds[0], *other.conds[1:]], width=WIDTH, height=HEIGHT,
    )  # fmt: skip
    made = ours.forward(mixed)
    torch.testing.assert_close(made[0], ours.forward(batch)[0], rtol=1e-6, atol=1e-6)
    assert made[1].isnan().all() and made[[0, 2, 3]].isfinite().all()


def test_quantized_attention_stays_near_and_is_guarded_layer_by_layer() -> None:
    exact, near = denoiser("sd3.5"), denoiser("sd3.5", attention="sage")
    batch = rows()
    expected = exact.forward(batch)
    error = (near.forward(batch) - expected).abs().mean() / expected.abs().mean()
    assert 0 < error < 0.05
    blocks = near.model.transformer_blocks
    attentions = [block.attn.processor.attention for block in blocks]
    attentions += [block.attn2.processor.attention for block in blocks if block.attn2 is not None]
    assert len({one.number for one in attentions}) == 4
    assert attentions[3].layer == "sd3 block 0, the picture alone"


@pytest.mark.parametrize("kind", KINDS)
def test_its_parts_make_the_whole(kind: str) -> None:
    ours = denoiser(kind)
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
    assert len(ours.select(parts, [1]).picture) == 1  # behind the last block there are no words


@pytest.mark.parametrize("policy", ["first_block", "teacache"])
def test_a_step_cache_that_computes_everything_changes_nothing(policy: Any) -> None:
    ours = denoiser("sd3.5")
    batch = rows()
    config = CacheConfig(policy=policy, threshold=1e-9, coefficients=(0.0, 0.0, 0.0, 1.0, 1.0))
    caches = [RowCache(config, 20) for _ in range(4)]
    whole = ours.forward(batch)
    torch.testing.assert_close(cached_forward(ours, batch, caches), whole, rtol=1e-5, atol=1e-5)
    assert [cache.decisions for cache in caches] == [[True]] * 4


@pytest.mark.parametrize("scale", [1.0, 4.0])
@torch.inference_mode()
def test_a_picture_is_the_pipelines(scale: float) -> None:
    """Equal seed and captions, guidance as rows: the latents of StableDiffusion3Pipeline."""
    width, height = 64, 48
    conds = rows((5, 5)).conds
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=None, transformer=network(), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    with_prompt, without = conds
    assert with_prompt.pooled is not None and without.pooled is not None
    expected = pipeline(
        prompt_embeds=with_prompt.embeds[None],
        pooled_prompt_embeds=with_prompt.pooled[None],
        negative_prompt_embeds=without.embeds[None],
        negative_pooled_prompt_embeds=without.pooled[None],
        guidance_scale=scale,
        width=width,
        height=height,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).images
    ours = Sd3Denoiser(network(), scale=8)
    latents = torch.randn(ours.latent_shape(width, height), generator=torch.Generator().manual_seed(3))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    for time in scheduler.timesteps:
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
        guided = predicted[1] + scale * (predicted[0] - predicted[1]) if scale > 1 else predicted[0]
        latents = scheduler.step(guided, time, latents, return_dict=False)[0]
    torch.testing.assert_close(latents[None], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_t5", [True, False])
@torch.inference_mode()
def test_a_folder_of_the_pipeline_makes_its_picture(with_t5: bool, tmp_path: Path) -> None:
    """model_index.json and all that it names, from the prompt to the pixels."""
    pipeline = sd3_pipeline(tmp_path / "tiny", with_t5=with_t5)
    cpu = torch.device("cpu")
    loaded = load_picture(tmp_path / "tiny", dtype=torch.float32, devices=(cpu, cpu, cpu))
    assert (loaded.family, loaded.card["guidance"], loaded.card["scheduler"]["shift"]) == ("sd3", "cfg", 3.0)
    (width, height), prompt, negative = (48, 32), "a red apple", "blurry"
    shown = pipeline(
        prompt=prompt,
        negative_prompt=negative,
        guidance_scale=3.0,
        width=width,
        height=height,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images
    painter: Any = loaded.painter
    conds = painter.encode([prompt, negative])
    latents = torch.randn(painter.latent_shape(width, height), generator=torch.Generator().manual_seed(5))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(3)
    for time in scheduler.timesteps:
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
        guided = predicted[1] + 3.0 * (predicted[0] - predicted[1])
        latents = scheduler.step(guided, time, latents, return_dict=False)[0]
    made = painter.decode(latents[None])
    expected = torch.from_numpy((shown * 255).round().astype("uint8"))
    assert expected.float().std() > 5  # a picture with something on it
    assert (made.int() - expected.int()).abs().max() <= 1


def test_a_caption_without_its_vector_is_our_fault() -> None:
    row = rows((3,))
    bare = Rows(
        latents=row.latents, times=row.times, guidance=row.guidance, conds=[Caption(row.conds[0].embeds)],
        width=WIDTH, height=HEIGHT,
    )  # fmt: skip
    with pytest.raises(ValueError, match="without the vector"):
        denoiser().forward(bare)


def test_sizes_and_work() -> None:
    ours = denoiser()
    assert ours.latent_shape(64, 32) == (4, 8, 16)
    with pytest.raises(ModelLoadError, match="up to 64x64, not 96x64"):  # 8 x 8 places of 8 pixels
        ours.latent_shape(96, 64)
    assert ours.batch_key(64, 32) != ours.batch_key(32, 64)
    assert ours.cost(64, 64, 8) > ours.cost(64, 64, 4) > 0
    assert ours.cost(64, 64, 8) > 3 * ours.cost(32, 32, 8)
    assert denoiser("sd3.5").cost(64, 64, 8) > ours.cost(64, 64, 8)
    assert ours.device == torch.device("cpu")


def test_one_compiled_block_of_each_kind_serves_all_sizes() -> None:
    """SD 3.5 medium has three kinds: two attentions, one, and the last, which lets the words be."""
    ours, plain = denoiser("sd3.5"), denoiser("sd3.5")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours.compile("eager")
    for case in (rows((5, 5)), rows((7, 7, 7), side=(6, 6))):
        torch.testing.assert_close(ours.forward(case), plain.forward(case), rtol=1e-5, atol=1e-5)
    found = torch._dynamo.utils.counters
    assert found["stats"]["unique_graphs"] == 3 and not found["graph_break"]
    torch._dynamo.reset()


def test_half_precision_stays_near() -> None:
    batch = rows()
    exact = denoiser().forward(batch)
    near = Sd3Denoiser(network().to(torch.bfloat16), scale=4).forward(batch)
    assert (near.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
