"""SageAttention in plain torch against float64, with bounds on its error; exact attention; the door, its guard and its op."""

from __future__ import annotations

import copy
import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.kernels import dispatch
from motet.kernels import sage_attention as door
from motet.kernels.sage_attention import (
    Attention,
    attention_reference,
    exact_attention,
    quantize_int8,
    sage_attention,
    sage_reference,
)


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "gpu_ops", lambda device_type: None)


def inputs(
    num_tokens: int = 1024, dim: int = 64, *, heads: int = 2, rows: int = 1, k_bias: float = 0.0, q_bias: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gaussian q, k, v [rows, T, heads, dim]; the biases are what all tokens share, channel by channel.

    v has a small mean, as values have: else the exact output of 1,024 like weights is next to nothing to compare with.
    """
    generator = torch.Generator().manual_seed(num_tokens + dim)
    q, k, v = (torch.randn(rows, num_tokens, heads, dim, generator=generator) for _ in range(3))
    k = k + k_bias * torch.randn(1, 1, heads, dim, generator=generator)
    v = v + 0.2 * torch.randn(1, 1, heads, dim, generator=generator)
    return q + q_bias * torch.randn(1, 1, heads, dim, generator=generator), k, v


def rel_l1(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().sum() / expected.abs().sum())


# --------------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    ("scales", "product", "k_bias", "q_bias", "most"),
    [
        ("block", "fp16", 0, 0, 0.0042),
        ("thread", "fp16", 0, 0, 0.0035),
        ("thread", "fp8", 0, 0, 0.009),
        ("block", "fp16", 8, 0, 0.0039),
        ("block", "fp16", 8, 2, 0.0130),
    ],
)
def test_error_is_bounded(scales: Any, product: Any, k_bias: float, q_bias: float, most: float) -> None:
    q, k, v = inputs(k_bias=k_bias, q_bias=q_bias)
    expected, _ = attention_reference(q, k, v)
    out, _ = sage_reference(q, k, v, scale=64**-0.5, scales=scales, product=product)
    assert rel_l1(out, expected) <= most
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), expected.flatten(), dim=0)
    assert cosine >= 0.999


def test_smoothing_is_what_keeps_shared_outliers_harmless() -> None:
    q, k, v = inputs(k_bias=8, q_bias=2)
    expected, _ = attention_reference(q, k, v)
    errors = []
    for smooth in (True, False):
        out, _ = sage_reference(q, k, v, scale=64**-0.5, scales="block", smooth=smooth)
        errors.append(rel_l1(out, expected))
    assert errors[0] <= 0.0130 and errors[1] > 3 * errors[0]


def test_scales_of_threads_lie_in_the_rows_that_a_thread_holds() -> None:
    x = torch.ones(1, 1, 64, 4)
    x[0, 0, 8 * 3 + 5] = 100.0  # query 29: rows 5, 13, 21, 29 of the first tile
    _, scale = quantize_int8(x, "q", "thread")
    assert (scale[0, 0, :, 0] > 0.5).nonzero()[:, 0].tolist() == [5, 13, 21, 29]
    _, scale = quantize_int8(x, "k", "thread")  # key 29 = 8 * 3 + 2 * 2 + 1: pairs 4 and 5 of every eight
    assert (scale[0, 0, :, 0] > 0.5).nonzero()[:, 0].tolist() == [i + j for i in range(0, 64, 8) for j in (4, 5)]


def test_halves_round_away_from_zero_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[127.0, 0.5, -0.5, 1.5, -2.5]])[None, None]
    quantized, _ = quantize_int8(x, "q", "thread")
    assert quantized[0, 0, 0].tolist() == [127, 1, -1, 2, -3]
    quantized, scale = quantize_int8(torch.zeros(1, 1, 70, 8), "k", "block")
    assert not quantized.any() and scale.isfinite().all()
    q, _, v = inputs(70, 32)
    out, lse = sage_attention(q, torch.zeros_like(q), v, return_lse=True)
    torch.testing.assert_close(out.double(), attention_reference(q, torch.zeros_like(q), v)[0], atol=1e-3, rtol=1e-2)
    assert lse.isfinite().all()


@pytest.mark.parametrize("product", ["fp16", "fp8"])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_rows_and_their_lse(product: Any, dim: int, causal: bool) -> None:
    q, k, v = inputs(150, dim, heads=4, rows=3, k_bias=4)
    k, v = k[:, :, :2], v[:, :, :2]  # two query heads a kv head
    lens = torch.tensor([100, 150, 0])
    expected, expected_lse = attention_reference(q, k, v, lens, causal=causal)
    out, lse = sage_attention(q, k, v, lens, causal=causal, product=product, return_lse=True)
    assert rel_l1(out, expected) < (0.04 if product == "fp8" else 0.012)
    assert not out[2].any() and (lse[2] == -torch.inf).all()
    assert float((lse[:2].double() - expected_lse[:2]).abs().max()) < 0.06


def test_shares_of_the_keys_merge_by_their_lse() -> None:
    q, k, v = inputs(192, 64, k_bias=6)
    halves = [sage_attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 90), (90, 192))]
    lses = torch.stack([lse for _, lse in halves])
    shares = (lses - lses.logsumexp(0)).exp().transpose(2, 3)[..., None]
    merged = sum(share * out for share, (out, _) in zip(shares, halves))
    assert isinstance(merged, Tensor)
    assert rel_l1(merged, attention_reference(q, k, v)[0]) < 0.012


def test_neighbours_and_padding_never_reach_a_row() -> None:
    q, k, v = inputs(140, 64, rows=2)
    lens = torch.tensor([30, 50])
    alone, _ = sage_attention(q[:1], k[:1], v[:1], lens[:1], tail=60)
    dirty = [t.clone() for t in (k, v)]
    for t in dirty:
        t[0, 30:80] = torch.nan
        t[1] = 1e4
    together, _ = sage_attention(q, dirty[0], dirty[1], lens, tail=60)
    torch.testing.assert_close(together[:1], alone, atol=1e-6, rtol=0)
    assert rel_l1(alone, attention_reference(q[:1], k[:1], v[:1], lens[:1], tail=60)[0]) < 0.012


# ------------------------------------------------------------------------------------------------------- exact attention


@pytest.mark.parametrize("tail", [0, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_by_rows_and_by_mask(tail: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(100, 32, heads=4, rows=3)
    k, v = k[:, :, :2].contiguous(), v[:, :, :2].contiguous()
    lens = torch.tensor([7, 60, 0])
    expected, _ = attention_reference(q, k, v, lens, tail=tail, causal=causal)
    k[0, 7:60], v[0, 7:60] = torch.nan, torch.inf
    by_rows = exact_attention(q, k, v, lens, tail=tail, causal=causal)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    by_mask = exact_attention(q, k, v, lens, tail=tail, causal=causal)
    for out in (by_rows, by_mask):
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


def test_full_lengths_are_no_lengths() -> None:
    q, k, v = inputs(50, 32, rows=2)
    assert torch.equal(exact_attention(q, k, v, torch.tensor([50, 50])), exact_attention(q, k, v))


# ------------------------------------------------------------------------------------------------------------- the door


def test_auto_is_exact_on_a_cpu_and_sage_does_what_it_says() -> None:
    q, k, v = inputs(80, 64)
    assert torch.equal(Attention()(q, k, v), exact_attention(q, k, v))
    assert torch.equal(Attention("sdpa")(q, k, v), exact_attention(q, k, v))
    assert torch.equal(Attention("sage", product="fp8")(q, k, v), sage_attention(q, k, v, product="fp8")[0])
    wide = torch.randn(1, 20, 1, 160)  # no INT8 for such heads
    assert torch.equal(Attention("sage")(wide, wide, wide), exact_attention(wide, wide, wide))


def test_a_layer_that_leaves_its_range_is_exact_from_then_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = inputs(80, 64)
    layer, other = Attention("sage", layer="blocks.3"), Attention("sage", layer="blocks.4")
    with caplog.at_level(logging.WARNING, logger="motet.kernels"):
        for _ in range(2):
            assert torch.equal(layer(q, k, v * 1e5), exact_attention(q, k, v * 1e5))
        assert torch.equal(layer(q, k, v), exact_attention(q, k, v))
    assert layer.fell_back and not other.fell_back
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["attention of blocks.3"]
    assert not torch.equal(other(q, k, v), exact_attention(q, k, v))
    copied = copy.deepcopy(layer)
    assert not copied.fell_back and copied.number != layer.number and copied.layer == "blocks.3"
    other(q * torch.nan, k, v)  # broken input is not the layer's fault
    assert not other.fell_back


def test_the_op_has_shapes_for_torch_compile() -> None:
    q, k, v = inputs(40, 32)
    lens = torch.tensor([30])
    for return_lse in (False, True):
        arguments = (q, k, v, lens, 0, 0.2, False, "thread", "fp16", return_lse, None)
        torch.library.opcheck(
            torch.ops.motet.sage_attention.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
    layer = Attention("sage")
    compiled = torch.compile(lambda *t: layer(*t) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, lens), layer(q, k, v, lens) * 2)


def test_layers_and_tails_share_a_graph() -> None:
    """Blocks differ in nothing but their layer, sizes in nothing but their tokens: neither is a reason to compile again."""
    layers = [Attention("sage", layer=f"block {block}") for block in range(3)]
    holders = [types.SimpleNamespace(layer=layer) for layer in layers]
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(holder: types.SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, lens: Tensor, picture: Tensor) -> Tensor:
        out: Tensor = holder.layer(q, k, v, lens, tail=picture.shape[0])
        return out

    for holder in holders:
        for tokens, tail in ((40, 17), (56, 30)):
            q, k, v = inputs(tokens, 32)
            lens = torch.tensor([5])
            expected = holder.layer(q, k, v, lens, tail=tail)
            assert torch.equal(attend(holder, q, k, v, lens, torch.zeros(tail)), expected)
    assert len(graphs) == 1


def test_xformers_is_asked_where_it_can_and_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(30, 32)
    door._xformers.cache_clear()
    with pytest.raises(RuntimeError, match="xformers: it is not installed"):
        Attention("xformers")
    calls = []

    def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
        calls.append(query.shape)
        return exact_attention(query, key, value, scale=scale)

    package, ops = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    package.__spec__ = types.SimpleNamespace(name="xformers")  # type: ignore[assignment]
    ops.memory_efficient_attention = memory_efficient_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    layer = Attention("xformers")
    assert torch.equal(layer(q, k, v), exact_attention(q, k, v)) and len(calls) == 1
    layer(q, k, v, torch.tensor([3]))
    assert len(calls) == 1  # lengths it does not take
    door._xformers.cache_clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "flash"}, "backend: expected one of auto, sdpa, sage, xformers, got 'flash'"),
        ({"product": "fp4"}, "product: expected one of fp16, fp8"),
    ],
)
def test_unknown_words_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(**change)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(10, 32)
    layer = Attention()
    for arguments, options, words in [
        ((q, k[:, :, :, :16], v[:, :, :, :16]), {}, "do not fit"),
        ((q[0], k, v), {}, "expected q"),
        ((q, k, v, torch.tensor([1, 2])), {}, r"kv_lens: expected \[1\]"),
        ((q, k, v), {"tail": 11}, "tail"),
        ((q, k[:, :5], v[:, :5]), {"causal": True}, "causal"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer(*arguments, **options)  # type: ignore[arg-type]
    wide = torch.randn(1, 4, 1, 160)
    with pytest.raises(ValueError, match="at most 128"):
        sage_attention(wide, wide, wide)


def test_the_doors_choice_is_the_dispatchers() -> None:
    assert dispatch.gpu_ops("cpu") is None or dispatch.backend("cpu") == "triton"
