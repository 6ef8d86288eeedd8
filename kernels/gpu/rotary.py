"""Triton: rotary position embedding of q and k in place, or fused with the write of k and v into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache import encode, heads_at_once, is_quantized, put_scale, store_heads
from .rounding import narrow


@triton.jit
def _turn(x, low_dims, high_dims, mask, cos, sin):
    """Both halves [heads, P / 2] fp32 of rotated heads whose rows `x` [heads] points at."""
    low = tl.load(x[:, None] + low_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x[:, None] + high_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _turn_in_place(x, low_dims, high_dims, mask, cos, sin):
    low, high = _turn(x, low_dims, high_dims, mask, cos, sin)
    tl.store(x[:, None] + low_dims[None, :], narrow(low, x.dtype.element_ty), mask=mask)
    tl.store(x[:, None] + high_dims[None, :], narrow(high, x.dtype.element_ty), mask=mask)


@triton.jit
def _turn_and_store(
    x, rows, exist, low_dims, high_dims, mask, cos, sin,
    DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Heads `x` [heads] of k, rotated, into cache rows `rows` [heads]. Dims from 2 * HALF on are not rotated."""
    dtype: tl.constexpr = rows.dtype.element_ty
    low, high = _turn(x, low_dims, high_dims, mask, cos, sin)
    rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)
    rest_mask = exist[:, None] & (rest_dims[None, :] < DIM)
    rest = tl.load(x[:, None] + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    inverse = 1.0
    if QUANTIZED:
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        broken = tl.sum(low * 0.0 + high * 0.0, 1) + tl.sum(rest * 0.0, 1)
        inverse = put_scale(rows, largest, broken, exist, WIDTH)[:, None]
    tl.store(rows[:, None] + low_dims[None, :], encode(low, inverse, dtype), mask=mask)
    tl.store(rows[:, None] + high_dims[None, :], encode(high, inverse, dtype), mask=mask)
    if DIM > 2 * HALF:
        tl.store(rows[:, None] + rest_dims[None, :], encode(rest, inverse, dtype), mask=rest_mask)


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, kv_ptr, slots_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row, stride_n, stride_kv, stride_h, stride_t,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr, NUM_TOKENS: tl.constexpr, WIDTH: tl.constexpr, QUANTIZED: tl.constexpr,
    Q_PROGRAMS: tl.constexpr, K_PROGRAMS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one row's q, k or v (in this order along the second axis of the grid)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_H)
    pairs = tl.arange(0, BLOCK_HALF)
    low_dims, high_dims = pairs, pairs + HALF
    if INTERLEAVED:
        low_dims, high_dims = 2 * pairs, 2 * pairs + 1
    cos = tl.load(cos_ptr + row * table_row + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * table_row + pairs, mask=pairs < HALF, other=0.0)[None, :]
    if part < Q_PROGRAMS:
        heads = part * BLOCK_H + lanes
        mask = (heads[:, None] < Q_HEADS) & (pairs[None, :] < HALF)
        _turn_in_place(q_ptr + row * q_row + heads * q_head, low_dims, high_dims, mask, cos, sin)
    else:
        heads = (part - Q_PROGRAMS) % K_PROGRAMS * BLOCK_H + lanes
        exist = heads < KV_HEADS
        mask = exist[:, None] & (pairs[None, :] < HALF)
        k = k_ptr + row * k_row + heads * k_head
        if not STORE:
            _turn_in_place(k, low_dims, high_dims, mask, cos, sin)
        else:
            slot = tl.load(slots_ptr + row)
            rows = kv_ptr + (slot // NUM_TOKENS) * stride_n + (slot % NUM_TOKENS) * stride_t + heads * stride_h
            if slot >= 0:
                if part < Q_PROGRAMS + K_PROGRAMS:
                    _turn_and_store(
                        k, rows, exist, low_dims, high_dims, mask, cos, sin, DIM, HALF, WIDTH, QUANTIZED, BLOCK_REST
                    )
                else:
                    dims = tl.arange(0, BLOCK_D)
                    whole = exist[:, None] & (dims[None, :] < DIM)
                    v = tl.load(v_ptr + row * v_row + heads[:, None] * v_head + dims[None, :], mask=whole, other=0.0)
                    store_heads(v.to(tl.float32), rows + stride_kv, exist, dims, whole, WIDTH, QUANTIZED)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor | None,
    slots: torch.Tensor | None,
    interleaved: bool,
) -> None:
    num_rows, q_heads, dim = q.shape
    kv_heads, half = k.shape[1], cos.shape[1]
    if not num_rows:
        return
    block_h, block_d = heads_at_once(max(q_heads, kv_heads), dim)
    q_programs, k_programs = triton.cdiv(q_heads, block_h), triton.cdiv(kv_heads, block_h)
    store = kv is not None
    # Arguments that a launch does not use still want a tensor.
    cache, rows, values = (k if kv is None else kv), (cos if slots is None else slots), (k if v is None else v)
    strides = cache.stride()[:4] if store else (0, 0, 0, 0)
    _rotary_kernel[(num_rows, q_programs + k_programs * (2 if store else 1))](
        q, k, values, cos, sin, cache, rows, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        values.stride(0), values.stride(1), cos.stride(0), *strides,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, INTERLEAVED=interleaved, STORE=store,
        NUM_TOKENS=cache.shape[3] if store else 1, WIDTH=cache.shape[-1], QUANTIZED=store and is_quantized(cache),
        Q_PROGRAMS=q_programs, K_PROGRAMS=k_programs, BLOCK_H=block_h, BLOCK_D=block_d,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_REST=triton.next_power_of_2(max(dim - 2 * half, 1)), num_warps=4,
    )  # fmt: skip


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.rotary.apply_rotary`, in place."""
    _launch(q, k, None, cos, sin, None, None, interleaved)
    return q, k


def rotary_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """`kernels.rotary.rotary_store_kv`: q rotated in place, k (left as it was) and v into the cache."""
    _launch(q, k, v, cos, sin, kv, slots, interleaved)
    return q
