"""Triton: the gated activations, act(gate) * up, in fp32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rounding import narrow

BLOCK = 1024  # features of one program: 8 to each thread of four warps


@triton.jit
def _gated_kernel(x_ptr, out_ptr, row_stride, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = features < SIZE
    gate = tl.load(x_ptr + row * row_stride + features, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + SIZE + features, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # 0.5 * (1 + tanh(y)) is the logistic function of 2y
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # exp runs to infinity where the function goes to 0, and gate / infinity is 0.
    value = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + row * SIZE + features, narrow(value, out_ptr.dtype.element_ty), mask=mask)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if out.numel():
        _gated_kernel[(num_rows, triton.cdiv(size, BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=size, GELU=gelu, BLOCK=BLOCK, num_warps=4
        )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`kernels.activation.silu_mul`."""
    return _launch(gate_up, False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`kernels.activation.gelu_tanh_mul`."""
    return _launch(gate_up, True)
