"""Triton: RMS norm, alone and after a residual sum. A row's tile depends on E alone, so its numbers know no batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rounding import narrow

MAX_FEATURES = 32768  # one program holds whole rows


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, num_inner, x_outer, x_inner, residual_row, eps, offset,
    SIZE: tl.constexpr, ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows. A row's address is outer * x_outer + inner * x_inner (heads as views of fused rows)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    features = tl.arange(0, BLOCK_E)
    mask = (rows[:, None] < num_rows) & (features[None, :] < SIZE)
    base = (rows // num_inner) * x_outer + (rows % num_inner) * x_inner
    x = tl.load(x_ptr + base[:, None] + features[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        there = residual_ptr + rows[:, None] * residual_row + features[None, :]
        x += tl.load(there, mask=mask, other=0.0)
        tl.store(there, x, mask=mask)
    weight = tl.load(weight_ptr + features, mask=features < SIZE, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
    out = narrow(x * scale[:, None] * weight[None, :], out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * SIZE + features[None, :], out, mask=mask)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    num_rows = x.numel() // size if size else 0
    if not num_rows:
        return out
    num_inner, inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    block_e = triton.next_power_of_2(size)
    # Small rows (heads) share a program, 1024 numbers to four warps; long rows get a warp for every 512 numbers.
    block_r = max(1, 1024 // block_e)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_r),)](
        x, x if residual is None else residual, weight, out, num_rows, num_inner, x.stride(0), inner,
        0 if residual is None else residual.stride(0), eps, offset,
        SIZE=size, ADD=residual is not None, BLOCK_R=block_r, BLOCK_E=block_e,
        num_warps=min(16, max(4, block_e // 512)),
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """`kernels.norm.rms_norm` for x [R, E] or [R, H, E], views included."""
    return _launch(x, None, weight, eps, offset)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.norm.rms_norm_residual`: the residual is summed in place."""
    return _launch(x, residual, weight, eps, offset), residual
