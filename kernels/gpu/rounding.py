"""Conversions that Triton's compiler and its interpreter must agree on: fp32 to bf16 and to FP8 (e4m3).

Compiled, a cast rounds to nearest even. The interpreter (seen in Triton 3.8) truncates to bf16, loses the carry out of
an e4m3 mantissa, and multiplies bf16 matrices by their bit patterns. So rounding is spelled out here where they differ,
and matrix products of bf16 are taken in fp32 where the interpreter runs (`dot_dtype`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

E4M3_MAX = 448.0


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The type in which a kernel multiplies matrices for rows of `dtype`: the tensor cores', or fp32."""
    if INTERPRETED or dtype is torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x fp32 in `dtype` (fp32, bf16 or fp16), to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # Adding to the bits of a NaN could carry into its sign.
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """x fp32 with |x| <= 448 in FP8 e4m3, to nearest even; NaN stays NaN. The last cast is exact."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    # Below 2^-6 the steps are 2^-9; adding and taking 1.5 * 2^14 rounds to them.
    small = (x + 24576.0) - 24576.0
    value = tl.where(tl.abs(x) < 0.015625, small, rounded)
    return tl.where(x == x, value, x).to(tl.float8e4nv)
