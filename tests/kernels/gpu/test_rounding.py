"""Conversions spelled out in Triton give torch's bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from motet.kernels.gpu.rounding import narrow, to_e4m3

FP8 = torch.float8_e4m3fn


@triton.jit
def _convert(x_ptr, out_ptr, FP8: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, to_e4m3(x) if FP8 else narrow(x, out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
def test_nearest_even(dtype: torch.dtype) -> None:
    halves = torch.arange(0, 448, 0.25)  # with every tie of the larger codes
    parts = [torch.linspace(-448, 448, 20001), torch.linspace(-0.03, 0.03, 20001), halves, torch.randn(5000) * 40]
    x = torch.zeros(1 << 16)
    values = torch.cat(parts)
    x[: len(values)] = values.clamp(-448, 448)
    out = torch.zeros(1 << 16, dtype=dtype)
    _convert[(1,)](x, out, FP8=dtype == FP8, SIZE=1 << 16)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_nan_stays_nan() -> None:
    x, out = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]), torch.zeros(4, dtype=torch.bfloat16)
    _convert[(1,)](x, out, FP8=False, SIZE=4)
    assert out.isnan().tolist() == [True, True, False, False] and out[2:].tolist() == [torch.inf, -torch.inf]
