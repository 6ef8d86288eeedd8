"""SageAttention in Triton, under its interpreter: against the same in plain torch, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from motet.kernels import dispatch
from motet.kernels.gpu import sage_attention as gpu
from motet.kernels.sage_attention import Attention, attention_reference, quantize_int8, sage_attention, sage_reference


def inputs(num_queries: int, num_keys: int, dim: int, *, heads: int = 2, kv_heads: int = 1, rows: int = 1) -> Any:
    """Like those of tests/kernels/test_sage_attention.py: keys share a large bias, values a small one."""
    generator = torch.Generator().manual_seed(num_queries + dim)
    q = torch.randn(rows, num_queries, heads, dim, generator=generator)
    k, v = (torch.randn(rows, num_keys, kv_heads, dim, generator=generator) for _ in range(2))
    k = k + 8 * torch.randn(1, 1, kv_heads, dim, generator=generator)
    return q, k, v + 0.2 * torch.randn(1, 1, kv_heads, dim, generator=generator)


def rel_l1(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().sum() / expected.abs().sum())


@pytest.mark.parametrize(
    ("scales", "product", "dim", "most"),
    [("block", "fp16", 64, 0.0042), ("thread", "fp16", 64, 0.0035), ("thread", "fp8", 64, 0.010)],
)
def test_error_is_bounded(scales: Any, product: Any, dim: int, most: float) -> None:
    q, k, v = inputs(128, 1024, dim, heads=1)
    expected, expected_lse = attention_reference(q, k, v)
    out, lse = sage_attention(q, k, v, scales=scales, product=product, return_lse=True)
    assert rel_l1(out, expected) <= most
    assert float((lse.double() - expected_lse).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("scales", "product", "dim", "causal", "tail", "dtype"),
    [
        ("thread", "fp16", 64, False, 0, torch.float32),
        ("block", "fp16", 40, False, 33, torch.float32),
        ("block", "fp8", 80, True, 0, torch.float32),
        ("thread", "fp8", 64, False, 70, torch.bfloat16),
        ("thread", "fp16", 128, True, 0, torch.bfloat16),
    ],
)
def test_ragged_rows_equal_plain_torch(
    scales: Any, product: Any, dim: int, causal: bool, tail: int, dtype: torch.dtype
) -> None:
    q, k, v = (t.to(dtype) for t in inputs(150, 150, dim, kv_heads=1, rows=3))
    lens = torch.tensor([10, 150 - tail, 0])
    for t in (k, v):
        t[0, 10 : 150 - tail] = torch.nan
    options: dict[str, Any] = {"tail": tail, "scale": dim**-0.5, "causal": causal, "scales": scales, "product": product}
    expected, expected_lse = sage_reference(q, k, v, lens, **options, return_lse=True)
    out, lse = sage_attention(q, k, v, lens, **options, return_lse=True)
    assert out.isfinite().all() and out.is_contiguous()
    if not tail:
        assert not out[2].any() and (lse[2] == -torch.inf).all()
    assert rel_l1(out, expected.double()) < (2e-2 if product == "fp8" else 2e-3)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=0)


@pytest.mark.parametrize("scales", ["block", "thread"])
@pytest.mark.parametrize("side", ["q", "k"])
def test_the_same_integers_as_plain_torch(scales: Any, side: Any) -> None:
    x, _, _ = inputs(150, 8, 40, heads=3, rows=2)
    x[:, 64:128] = 0.0  # a whole block of keys
    quantized, _ = gpu._quantize(x, None, None, 0, 64, side, scales, factor=1.0)
    expected, _ = quantize_int8(x.transpose(1, 2), side, scales)
    assert torch.equal(quantized[:, :, :150, :40], expected)
    assert not quantized[:, :, 150:].any() and not quantized[..., 40:].any()


def test_views_and_blocks_of_zeros() -> None:
    qkv = torch.randn(1, 70, 3, 2, 64)
    q, k, v = qkv.unbind(2)
    k.zero_()
    out, lse = sage_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out.double(), attention_reference(q, k, v)[0], atol=1e-3, rtol=1e-2)
    assert lse.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, inside the interpreter
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_is_not_rounded_away(which: str) -> None:
    t = dict(zip("qkv", inputs(40, 70, 64)))
    t[which][0, 20, 0, 5] = torch.nan
    out, _ = sage_attention(t["q"], t["k"], t["v"])
    assert out[0, 20, 0].isnan().any()


def test_the_guard_sees_values_beyond_fp16() -> None:
    ops = dispatch.gpu_ops("cpu")
    q, k, v = inputs(40, 70, 64)
    assert ops is not None and ops.can_attend_dense(q, k, v)
    layer = Attention("sage")
    out = layer(q, k, v * 1e6)
    assert layer.fell_back and out.isfinite().all()
