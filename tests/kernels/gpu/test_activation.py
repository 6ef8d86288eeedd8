"""Gated activations in Triton against their definition."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.activation import gated_reference, gelu_tanh_mul, silu_mul

DOORS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@pytest.mark.parametrize("kind", list(DOORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 123), (2, 1536), (0, 8)])
def test_gated(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    out = DOORS[kind](x)
    assert out.dtype == dtype and out.shape == shape
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out, gated_reference(x, kind), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", list(DOORS))
def test_extremes_and_views(kind: str) -> None:
    wide = torch.tensor([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, 1.0] * 2 + [torch.nan] * 3] * 2)
    x = wide[:, :16]
    torch.testing.assert_close(DOORS[kind](x), gated_reference(x, kind), atol=1e-6, rtol=2e-6)
