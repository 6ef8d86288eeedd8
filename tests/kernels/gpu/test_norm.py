"""RMS norms in Triton against their definition: odd sizes, mixed types, views, rows that stand alone."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.norm import rms_norm, rms_norm_reference, rms_norm_residual

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*TYPES, (torch.float16, torch.float16)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (3, 576), (40, 40), (0, 8), (4, 3, 20), (1, 1, 3000)])
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(weight_dtype)
    out = rms_norm(x, weight, 1e-5, offset=1.0)
    assert out.dtype == dtype and out.shape == x.shape
    expected = rms_norm_reference(x, weight, 1e-5, offset=1.0)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_rms_norm_residual(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 123).to(dtype), torch.randn(5, 123), torch.randn(123).to(weight_dtype)
    total = x.float() + residual
    out, new = rms_norm_residual(x, residual.clone(), weight, 1e-6)
    assert torch.equal(new, total) and out.dtype == dtype
    expected = rms_norm_reference(total, weight, 1e-6).to(dtype)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3)


def test_heads_as_views_of_fused_rows_alone_and_together() -> None:
    fused, weight = torch.randn(6, 9, 32), torch.randn(32)
    together = rms_norm(fused[:, 2:5], weight, 1e-6)
    torch.testing.assert_close(together, rms_norm_reference(fused[:, 2:5], weight, 1e-6))
    assert torch.equal(together[3:4], rms_norm(fused[3:4, 2:5], weight, 1e-6))


def test_nan_stays_in_its_row() -> None:
    x, weight = torch.randn(4, 20), torch.ones(20)
    clean = rms_norm(x, weight, 1e-5)
    x[2, 3] = torch.nan
    dirty = rms_norm(x, weight, 1e-5)
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]]) and bool(dirty[2].isnan().all())
