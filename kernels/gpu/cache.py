"""Triton: writing K and V rows into a paged cache, and moving them between its slots.

A quantized cache is [N, 2, K, T, W] of int8 or FP8 (e4m3): D codes, then anything, and in the last four bytes of a row
its scale in fp32 (value = code * scale). W = D + 4 is the CPU kernels' layout; W = D + 16 keeps rows on 16 bytes, which
a GPU loads faster. W % 4 == 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .rounding import narrow, to_e4m3

QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def is_quantized(kv: torch.Tensor) -> bool:
    """Whether a cache's rows hold codes and a scale."""
    return kv.dtype in QUANTIZED


@triton.jit
def largest_code(dtype: tl.constexpr):
    return 127.0 if dtype == tl.int8 else 448.0


@triton.jit
def encode(x, inverse, dtype: tl.constexpr):
    """Codes of x [.., D] fp32 for 1 / scale `inverse`, which broadcasts; or x itself rounded to a plain dtype."""
    if dtype == tl.int8:
        # Adding and taking 1.5 * 2^23 rounds to the nearest even integer. NaN has no code: its row's scale is NaN.
        code = (x * inverse + 12582912.0) - 12582912.0
        return tl.where(code == code, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0).to(tl.int8)
    elif dtype == tl.float8e4nv:
        code = x * inverse
        return to_e4m3(tl.where(code == code, tl.minimum(tl.maximum(code, -448.0), 448.0), 0.0))
    else:
        return narrow(x, dtype)


@triton.jit
def put_scale(rows, largest, broken, mask, WIDTH: tl.constexpr):
    """Writes the scale of rows whose largest magnitude is `largest`, and returns 1 / scale.

    `broken` is NaN for a row that is not finite, else 0: such a row gets scale NaN and codes of 0, so whoever sees it
    gets NaN. Rows below 1e-36, where 1 / scale would overflow, count as zeros. kernels/cpu/rows.h does the same.
    """
    LARGEST: tl.constexpr = largest_code(rows.dtype.element_ty)
    counts = (largest > 1e-36) & (broken == 0.0)
    scale = tl.where(counts, largest / LARGEST, 0.0) + broken
    tl.store((rows + (WIDTH - 4)).to(tl.pointer_type(tl.float32)), scale, mask=mask)
    return tl.where(counts, LARGEST / largest, 0.0)


@triton.jit
def store_heads(x, rows, heads_mask, dims, mask, WIDTH: tl.constexpr, QUANTIZED: tl.constexpr):
    """Writes x [heads, D] fp32 (0 outside `mask`) to the cache rows that `rows` [heads] points at."""
    inverse = 1.0
    if QUANTIZED:
        inverse = put_scale(rows, tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), heads_mask, WIDTH)[:, None]
    tl.store(rows[:, None] + dims[None, :], encode(x, inverse, rows.dtype.element_ty), mask=mask)


@triton.jit
def _store_kernel(
    k_ptr, v_ptr, kv_ptr, slots_ptr, k_row, k_head, v_row, v_head, stride_n, stride_kv, stride_h, stride_t,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, NUM_TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: k or v of one row, BLOCK_H heads."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads[:, None] < NUM_HEADS) & (dims[None, :] < DIM)
    if which == 0:
        x = tl.load(k_ptr + row * k_row + heads[:, None] * k_head + dims[None, :], mask=mask, other=0.0)
    else:
        x = tl.load(v_ptr + row * v_row + heads[:, None] * v_head + dims[None, :], mask=mask, other=0.0)
    base = (slot // NUM_TOKENS) * stride_n + (slot % NUM_TOKENS) * stride_t + which * stride_kv
    rows = kv_ptr + base + heads * stride_h
    store_heads(x.to(tl.float32), rows, heads < NUM_HEADS, dims, mask, WIDTH, QUANTIZED)


def heads_at_once(num_heads: int, dim: int) -> tuple[int, int]:
    """(heads, dims) of one program's tile: powers of two, about 2048 numbers, so that four warps load 16 bytes each."""
    block_d = triton.next_power_of_2(dim)
    return min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d)), block_d


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """`kernels.attention.store_kv`. Rows of slot < 0 are not even read."""
    num_rows, num_heads, dim = k.shape
    if not num_rows:
        return
    block_h, block_d = heads_at_once(num_heads, dim)
    _store_kernel[(num_rows, 2, triton.cdiv(num_heads, block_h))](
        k, v, kv, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *kv.stride()[:4],
        NUM_HEADS=num_heads, DIM=dim, NUM_TOKENS=kv.shape[3], WIDTH=kv.shape[4], QUANTIZED=is_quantized(kv),
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- copy


@triton.jit
def _copy_kernel(
    layers_ptr, buffer_ptr, slots_ptr, num_moves,
    PARTS: tl.constexpr, NUM_TOKENS: tl.constexpr, WORDS: tl.constexpr, READ: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program: one slot of one layer, all k and v heads (PARTS), from the cache to the buffer (READ) or back."""
    move, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + move)
    if slot < 0:
        return
    cache = tl.load(layers_ptr + layer).to(buffer_ptr.dtype)
    cache += (slot // NUM_TOKENS) * (PARTS * NUM_TOKENS * WORDS) + (slot % NUM_TOKENS) * WORDS
    buffer = buffer_ptr + (layer.to(tl.int64) * num_moves + move) * (PARTS * WORDS)
    words = tl.arange(0, BLOCK_W)
    for first in range(0, PARTS, BLOCK_P):
        parts = first + tl.arange(0, BLOCK_P)
        mask = (parts[:, None] < PARTS) & (words[None, :] < WORDS)
        there = cache + parts[:, None] * (NUM_TOKENS * WORDS) + words[None, :]
        here = buffer + parts[:, None] * WORDS + words[None, :]
        if READ:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask), mask=mask)


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The layers' addresses on the device, so that one launch serves all layers."""
    return torch.tensor(pointers, dtype=torch.int64).to(device)


def copy_slots(kvs: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, block_size: int) -> None:
    """`kernels.attention.copy_slots` for contiguous caches of one shape and dtype; moves with a slot < 0 are skipped.

    Two launches, through a buffer: the end of the first is what guarantees that everything is read before a write.
    """
    if not len(kvs) or not src.numel():
        return
    kv, num_moves = kvs[0], src.numel()
    num_bytes = kv.shape[4] * kv.element_size()
    word = next(w for w in (torch.int64, torch.int32, torch.int16, torch.int8) if num_bytes % w.itemsize == 0)
    parts, words = 2 * kv.shape[2], num_bytes // word.itemsize
    buffer = torch.empty(len(kvs), num_moves, parts, words, dtype=word, device=kv.device)
    layers = _addresses(tuple(layer.data_ptr() for layer in kvs), kv.device)
    block_w = triton.next_power_of_2(words)
    for slots, read in ((src, True), (dst, False)):
        _copy_kernel[(num_moves, len(kvs))](
            layers, buffer, slots, num_moves, PARTS=parts, NUM_TOKENS=block_size, WORDS=words, READ=read,
            BLOCK_P=min(triton.next_power_of_2(parts), max(1, 1024 // block_w)), BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip
