"""Gated activations against their definition: odd sizes, extreme values, views, and rows that stand alone."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.activation import gated_reference, gelu, gelu_tanh_mul, silu_mul

DOORS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@pytest.mark.parametrize("kind", list(DOORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (16, 1536), (700, 40), (0, 8)])
def test_gated(backend: str, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    out = DOORS[kind](x)
    assert out.dtype == dtype and out.shape == shape
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out, gated_reference(x, kind), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", list(DOORS))
def test_extremes(backend: str, kind: str) -> None:
    x = torch.tensor([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, 1.0] * 2])
    torch.testing.assert_close(DOORS[kind](x), gated_reference(x, kind), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", list(DOORS))
def test_batched_equals_alone_bit_for_bit(backend: str, kind: str) -> None:
    x = torch.randn(33, 2 * 96)
    together = DOORS[kind](x)
    for row in (0, 7, 32):
        assert torch.equal(together[row], DOORS[kind](x[row : row + 1])[0])


def test_rows_of_a_wider_tensor(backend: str) -> None:
    wide = torch.randn(4, 100)
    torch.testing.assert_close(silu_mul(wide[:, :60]), silu_mul(wide[:, :60].clone()))


def test_gelu() -> None:
    x = torch.linspace(-5, 5, 50)
    torch.testing.assert_close(gelu(x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    assert (gelu(x, tanh=True) - gelu(x)).abs().max() < 1e-3
