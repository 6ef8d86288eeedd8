"""Triton: x [M, K] times a group-quantized weight [N, K] transposed, the weight unpacked in registers.

One kernel for 4 and 8 bits. Few rows: the weight is what costs, so the tile of rows is small and K is split over
programs until every multiprocessor reads; the last program to arrive at a tile adds up the parts, always in the same
order, so that a result does not change from run to run. More rows: no split, larger tiles.

Where a scale meets the numbers is a choice (`FOLD`). Without it the tensor cores multiply the stored integers, which
bf16 holds exactly, and each group's sum is scaled afterwards: exact weights, one multiply-add per group and output.
With it the weights are scaled and rounded to x's dtype first: cheaper once there are many rows.

Layout of `quants` (made by kernels/gpu/linear.py): 8 bits int8 [tiles, N, GROUP]; 4 bits uint8 [tiles, N, GROUP] where
a tile holds two groups, the first in the low nibbles. `scale`, `minimum`: [groups, N].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import narrow, to_e4m3


@triton.jit
def _add_group(
    acc, integers, group, x_ptr, scale_ptr, minimum_ptr, rows, cols, M, N, K, stride_x, DOT: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, BY_GROUP: tl.constexpr, HAS_MINIMUM: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """acc [BM, BN] fp32 plus the part of one group: `integers` [GROUP, BN] are its weights."""
    inner = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(
        x_ptr + tl.cast(rows, tl.int64)[:, None] * stride_x + inner[None, :],
        mask=(rows[:, None] < M) & (inner[None, :] < K),
        other=0.0,
    )
    at = tl.cast(N, tl.int64) * group + cols
    value = integers.to(tl.float32) - ZERO
    if not BY_GROUP:  # one scale a row: applied to the finished sum
        return acc + tl.dot(x.to(DOT), narrow(value, x.dtype).to(DOT))
    scale = tl.load(scale_ptr + at, mask=cols < N, other=0.0).to(tl.float32)
    if FOLD:
        value = value * scale[None, :]
        if HAS_MINIMUM:
            low = tl.load(minimum_ptr + at, mask=cols < N, other=0.0).to(tl.float32)
            value = value + low[None, :]
        return acc + tl.dot(x.to(DOT), narrow(value, x.dtype).to(DOT))
    acc += tl.dot(x.to(DOT), narrow(value, x.dtype).to(DOT)) * scale[None, :]
    if HAS_MINIMUM:
        low = tl.load(minimum_ptr + at, mask=cols < N, other=0.0).to(tl.float32)
        acc += tl.sum(x.to(tl.float32), axis=1)[:, None] * low[None, :]
    return acc


@triton.jit
def _finish(
    acc, out_ptr, scale_ptr, bias_ptr, rows, cols, M, N, BY_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Scales a finished tile where a row has one scale, adds the bias, stores."""
    if not BY_GROUP:
        acc *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out_ptr + rows[:, None] * tl.cast(N, tl.int64) + cols[None, :]
    tl.store(where, narrow(acc, out_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


# Compiled once for all row counts and depths: a server shall not compile when a batch grows.
@triton.jit(do_not_specialize=["M", "num_tiles", "tiles_each"])
def quantized_matmul_kernel(
    x_ptr, quants_ptr, scale_ptr, minimum_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr,
    M, N, K, stride_x, num_tiles, tiles_each,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, BY_GROUP: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr, FOLD: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, tiles of M, parts of K). With SPLIT, `parts` is fp32 [parts of K, M, N] and `arrived` int32 [tiles
    of M * N], zeros, which it is left at.
    """
    pid_n, pid_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = pid_m * BM + tl.arange(0, BM)
    cols = pid_n * BN + tl.arange(0, BN)
    inner = tl.arange(0, GROUP)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    first = split * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, num_tiles)):
        start = tl.cast(N, tl.int64) * tile * GROUP
        packed = tl.load(
            quants_ptr + start + cols[None, :].to(tl.int64) * GROUP + inner[:, None], mask=cols[None, :] < N, other=0
        )
        if BITS == 4:
            acc = _add_group(
                acc, packed & 0xF, 2 * tile, x_ptr, scale_ptr, minimum_ptr, rows, cols, M, N, K, stride_x, DOT,
                ZERO, GROUP, BY_GROUP, HAS_MINIMUM, FOLD,
            )  # fmt: skip
            acc = _add_group(
                acc, packed >> 4, 2 * tile + 1, x_ptr, scale_ptr, minimum_ptr, rows, cols, M, N, K, stride_x, DOT,
                ZERO, GROUP, BY_GROUP, HAS_MINIMUM, FOLD,
            )  # fmt: skip
        else:
            acc = _add_group(
                acc, packed, tile, x_ptr, scale_ptr, minimum_ptr, rows, cols, M, N, K, stride_x, DOT,
                ZERO, GROUP, BY_GROUP, HAS_MINIMUM, FOLD,
            )  # fmt: skip
    if not SPLIT:
        _finish(acc, out_ptr, scale_ptr, bias_ptr, rows, cols, M, N, BY_GROUP, HAS_BIAS)
    else:
        where = rows[:, None] * tl.cast(N, tl.int64) + cols[None, :]
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        size = tl.cast(M, tl.int64) * N
        tl.store(parts_ptr + split * size + where, acc, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one thread announces it
        ticket = tl.atomic_add(arrived_ptr + pid_m * tl.num_programs(0) + pid_n, 1, sem="acq_rel")
        if ticket == tl.num_programs(2) - 1:
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for part in range(tl.num_programs(2)):
                total += tl.load(parts_ptr + part * size + where, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(total, out_ptr, scale_ptr, bias_ptr, rows, cols, M, N, BY_GROUP, HAS_BIAS)
            tl.store(arrived_ptr + pid_m * tl.num_programs(0) + pid_n, 0)


@triton.jit
def dequantize_kernel(
    quants_ptr, scale_ptr, minimum_ptr, out_ptr, N, K,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, BY_GROUP: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """out [N, K]; grid (tiles of N, tiles of K)."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(1)
    inner = tl.arange(0, GROUP)
    inside = cols[:, None] < N
    start = tl.cast(N, tl.int64) * tile * GROUP
    packed = tl.load(quants_ptr + start + cols[:, None].to(tl.int64) * GROUP + inner[None, :], mask=inside, other=0)
    for half in tl.static_range(2 if BITS == 4 else 1):
        group = tile * (2 if BITS == 4 else 1) + half
        integers = packed
        if BITS == 4:
            integers = (packed >> 4) if half else (packed & 0xF)
        at = cols + (tl.cast(N, tl.int64) * group if BY_GROUP else 0)
        scale = tl.load(scale_ptr + at, mask=cols < N, other=0.0).to(tl.float32)
        value = (integers.to(tl.float32) - ZERO) * scale[:, None]
        if HAS_MINIMUM:
            value += tl.load(minimum_ptr + at, mask=cols < N, other=0.0).to(tl.float32)[:, None]
        k = group * GROUP + inner
        tl.store(
            out_ptr + cols[:, None].to(tl.int64) * K + k[None, :],
            narrow(value, out_ptr.dtype.element_ty),
            mask=inside & (k[None, :] < K),
        )


@triton.jit
def quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, K, stride_x, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Row by row: scale = max |x| / LARGEST, out = x / scale in e4m3. One program a row, BLOCK >= K."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + inner, mask=inner < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, 1e-12)
    value = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    # Maximum and casts may lose a NaN; the row's scale carries it into every output of the row.
    scale = tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), scale)
    tl.store(out_ptr + row * K + inner, to_e4m3(value), mask=inner < K)
    tl.store(scale_ptr + row, scale)
