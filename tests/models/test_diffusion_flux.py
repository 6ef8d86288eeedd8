"""Flux's denoiser: what diffusers computes, row by row the same in any company, and the same in parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from motet.engine.painter import Rows
from motet.engine.step_cache import CacheConfig, RowCache, cached_forward
from motet.kernels.dispatch import cpu_ops
from motet.kernels.fp8 import quantize_linears, rules_of
from motet.models.diffusion_flux import FluxDenoiser, pack, unpack

from ..tiny import lively
from . import picture_rows
from .picture_rows import pick

SIDE = 32  # pixels; latents 8 x 8


both_ways = pytest.mark.parametrize(
    "heads", [2, 4], ids=["layers", "joint"]
)  # 4: in one call where the C++ kernels are


def network(*, heads: int = 2, guided: bool = False, seed: int = 0) -> Any:
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=guided, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    lively(model, seed=seed)
    return model.eval()


def denoiser(**options: Any) -> FluxDenoiser:
    return FluxDenoiser(network(**options), scale=4)


rows = functools.partial(picture_rows.rows, side=(8, 8))


def theirs(model: Any, row: Rows) -> torch.Tensor:
    """diffusers' own forward of one row."""
    caption = row.conds[0]
    ids = torch.zeros(4, 4, 3)
    ids[..., 1] += torch.arange(4)[:, None]
    ids[..., 2] += torch.arange(4)
    made = model(
        hidden_states=pack(row.latents),
        encoder_hidden_states=caption.embeds[None],
        pooled_projections=caption.pooled[None],
        timestep=row.times,
        guidance=row.guidance if model.config.guidance_embeds else None,
        img_ids=ids.flatten(0, 1),
        txt_ids=torch.zeros(len(caption.embeds), 3),
        return_dict=False,
    )[0]
    return unpack(made, (4, 4))


def test_packing_is_undone() -> None:
    latents = torch.arange(2 * 4 * 6 * 8).view(2, 4, 6, 8)
    assert torch.equal(unpack(pack(latents), (3, 4)), latents)
    assert pack(latents)[0, 1, :4].tolist() == [
        latents[0, 0, 0, 2],
        latents[0, 0, 0, 3],
        latents[0, 0, 1, 2],
        latents[0, 0, 1, 3],
    ]


@both_ways
@pytest.mark.parametrize("guided", [False, True])
@torch.no_grad()
def test_one_row_is_what_diffusers_computes(guided: bool, heads: int) -> None:
    ours = denoiser(guided=guided, heads=heads)
    assert (ours._joint is not None) is (heads == 4 and cpu_ops() is not None)
    row = rows((5,))
    torch.testing.assert_close(ours.forward(row), theirs(ours.model, row), rtol=1e-5, atol=1e-5)


@both_ways
@pytest.mark.parametrize("guided", [False, True])
def test_a_batch_of_different_rows_is_each_of_them_alone(guided: bool, heads: int) -> None:
    ours = denoiser(guided=guided, heads=heads)
    batch = rows()
    together = ours.forward(batch)
    for row in range(4):
        torch.testing.assert_close(together[row], ours.forward(pick(batch, [row]))[0], rtol=1e-5, atol=1e-5)


@both_ways
def test_a_neighbour_changes_nothing(heads: int) -> None:
    ours = denoiser(heads=heads)
    batch, other = rows(), rows(seed=1)
    mixed = Rows(
        latents=torch.cat([batch.latents[:1], other.latents[1:]]), times=torch.cat([batch.times[:1], other.times[1:]]),
        guidance=batch.guidance, conds=[batch.conds[0], *other.conds[1:]], width=SIDE, height=SIDE,
    )  # fmt: skip
    torch.testing.assert_close(ours.forward(mixed)[0], ours.forward(batch)[0], rtol=1e-6, atol=1e-6)


@both_ways
def test_a_row_that_breaks_breaks_alone(heads: int) -> None:
    """Numbers that are none come out as such, for the engine to see, and nowhere else."""
    ours = denoiser(heads=heads)
    batch = rows()
    whole = ours.forward(batch)
    batch.latents[1, 0, 0, 0] = float("nan")
    broken = ours.forward(batch)
    assert not broken[1].isfinite().all()
    torch.testing.assert_close(broken[[0, 2, 3]], whole[[0, 2, 3]], rtol=1e-6, atol=1e-6)


def test_guidance_is_heard_where_it_is_embedded() -> None:
    batch = rows((3,))
    louder = Rows(
        latents=batch.latents,
        times=batch.times,
        guidance=batch.guidance + 3,
        conds=batch.conds,
        width=SIDE,
        height=SIDE,
    )
    deaf, hears = denoiser(), denoiser(guided=True)
    assert torch.equal(deaf.forward(batch), deaf.forward(louder))
    assert not torch.allclose(hears.forward(batch), hears.forward(louder), atol=1e-3)


@both_ways
@torch.no_grad()
def test_its_parts_make_the_whole(heads: int) -> None:
    ours = denoiser(heads=heads)
    batch = rows()
    whole = ours.forward(batch)
    trunk = ours.begin(batch)
    parts = trunk
    for block in range(4):
        parts = ours.blocks(parts, block, block + 1)
    assert torch.equal(ours.finish(trunk, ours.hidden(parts)), whole)
    some = ours.select(trunk, [2, 0])
    made = ours.finish(some, ours.hidden(ours.blocks(some, 0, None)))
    torch.testing.assert_close(made, whole[[2, 0]], rtol=1e-5, atol=1e-5)
    assert ours.indicator(trunk).shape == ours.hidden(trunk).shape == (4, 16, 16 * heads)
    block = ours.model.transformer_blocks[0]
    shift, scale = (part[:, None] for part in block.norm1.linear(trunk.steer).chunk(6, 1)[:2])
    expected = torch.nn.functional.layer_norm(ours.hidden(trunk), (16 * heads,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(ours.indicator(trunk), expected, rtol=1e-5, atol=1e-5)


@both_ways
@pytest.mark.parametrize("policy", ["first_block", "teacache"])
def test_a_step_cache_that_computes_everything_changes_nothing(policy: Any, heads: int) -> None:
    ours = denoiser(heads=heads)
    batch = rows()
    config = CacheConfig(policy=policy, threshold=1e-9, coefficients=(0.0, 0.0, 0.0, 1.0, 1.0))
    caches = [RowCache(config, 20) for _ in range(4)]
    whole = ours.forward(batch)
    torch.testing.assert_close(cached_forward(ours, batch, caches), whole, rtol=1e-5, atol=1e-5)
    assert [cache.decisions for cache in caches] == [[True]] * 4


def test_sizes_and_work() -> None:
    ours = denoiser()
    assert ours.latent_shape(64, 32) == (4, 8, 16)
    assert ours.batch_key(64, 32) != ours.batch_key(32, 64)
    assert ours.cost(64, 64, 8) > ours.cost(64, 64, 4) > 0
    assert ours.cost(64, 64, 8) > 3 * ours.cost(32, 32, 8)


@both_ways
def test_half_precision_stays_near(heads: int) -> None:
    batch = rows()
    exact = denoiser(heads=heads).forward(batch)
    near = FluxDenoiser(torch.nn.Module.to(network(heads=heads), torch.bfloat16), scale=4).forward(batch)
    assert (near.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_what_is_asked_for_keeps_layers_apart() -> None:
    """Attention that is not exact, and weights that are not plain, go layer by layer."""
    model = network(heads=4)
    exact = FluxDenoiser(model, scale=4).forward(rows())
    sage = FluxDenoiser(model, scale=4, attention="sage")
    assert sage._joint is None
    assert 0 < (sage.forward(rows()) - exact).abs().mean() < 0.02 * exact.abs().mean()
    quantize_linears(model, rules_of("flux"))
    quantized = FluxDenoiser(model, scale=4)
    assert quantized._joint is None
    assert 0 < (quantized.forward(rows()) - exact).abs().mean() < 0.2 * exact.abs().mean()


def test_compiled_once_for_each_kind_of_block() -> None:
    """Graphs, not code: what is between attentions is traced once, whatever the block, the rows and the words."""
    traced: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(str(len(inputs)))
        return graph.forward

    ours = denoiser()
    batch, other = rows(), rows((2, 9, 4, 4, 1), seed=1)
    expected = [ours.forward(one) for one in (batch, other)]
    ours.compile(backend=backend)
    try:
        for one, made in zip((batch, other), expected):
            torch.testing.assert_close(ours.forward(one), made, rtol=1e-5, atol=1e-5)
        for lengths in ((3, 3), (1, 8, 2), (6, 2, 2, 2, 5, 5)):
            ours.forward(rows(lengths))
        assert len(traced) == 4
        for lengths in ((3,), (8,)):  # a single row is a case of its own to torch.compile
            ours.forward(rows(lengths))
        assert len(traced) == 8
    finally:
        torch._dynamo.reset()
