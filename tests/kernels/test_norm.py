"""Norms against their definition: odd shapes, mixed types, views, and rows that do not depend on their mates."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.norm import layer_norm, rms_norm, rms_norm_reference, rms_norm_residual

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*TYPES, (torch.float16, torch.float16)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (16, 576), (3, 64), (700, 40), (0, 8), (4, 3, 20)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(
    backend: str, dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, ...], offset: float
) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(weight_dtype)
    out = rms_norm(x, weight, 1e-5, offset=offset)
    assert out.dtype == dtype and out.shape == x.shape
    wide = exact(x, weight, 1e-5, offset)
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), wide, atol=1e-5, rtol=1e-5)
    else:  # not worse than twice the fp32 definition rounded once
        plain = rms_norm_reference(x, weight, 1e-5, offset=offset)
        assert (out.double() - wide).abs().sum() <= 2 * (plain.double() - wide).abs().sum()


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("shape", [(5, 123), (16, 576), (1, 33)])
def test_rms_norm_residual(backend: str, dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape)
    weight = torch.randn(shape[1]).to(weight_dtype)
    total = x.float() + residual
    out, new = rms_norm_residual(x, residual.clone(), weight, 1e-6)
    assert torch.equal(new, total)
    torch.testing.assert_close(
        out, rms_norm_reference(total, weight, 1e-6).to(dtype), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3
    )


def test_heads_as_views_of_fused_rows(backend: str) -> None:
    fused, weight = torch.randn(6, 9, 32), torch.randn(32)
    torch.testing.assert_close(rms_norm(fused[:, 2:5], weight, 1e-6), rms_norm(fused[:, 2:5].clone(), weight, 1e-6))


def test_batched_equals_alone_bit_for_bit(backend: str) -> None:
    x, weight = torch.randn(64, 576), torch.randn(576)
    together = rms_norm(x, weight, 1e-5)
    for row in (0, 1, 31, 63):
        assert torch.equal(together[row], rms_norm(x[row : row + 1], weight, 1e-5)[0])


def test_nan_stays_in_its_row(backend: str) -> None:
    x, weight = torch.randn(4, 20), torch.ones(20)
    clean = rms_norm(x, weight, 1e-5)
    x[2, 3] = torch.nan
    assert torch.equal(rms_norm(x, weight, 1e-5)[[0, 1, 3]], clean[[0, 1, 3]])


def test_layer_norm() -> None:
    x = torch.randn(3, 50)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5), expected)
    torch.testing.assert_close(layer_norm(x, torch.full((50,), 2.0), torch.ones(50), 1e-5), 2 * expected + 1)
