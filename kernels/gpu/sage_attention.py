"""Triton: SageAttention (kernels/sage_attention.py says what it computes) in four launches.

    reduce_kernel    sums of k over the keys a row sees, or the largest |v| of each channel, chunk by chunk
    quantize_kernel  q, or k less its mean, to INT8 with a scale for each block or each thread's rows
    values_kernel    v to FP8, turned over: [B, K, D, S], as tensor cores want the second factor of an FP8 product
    sage_kernel      the attention; a program is a block of 128 queries of one head

The copies are padded with zeros to whole blocks, so that the loop over keys reads q and k without masks.

Not run on a GPU yet: checked under Triton's interpreter and by compiling for sm_90. Block sizes, warps and stages are those
the paper's authors report, not tuned here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sage_attention import (
    KEYS,
    LARGEST_E4M3,
    LARGEST_INT8,
    LOG2E,
    QUERIES,
    TILES,
    TINY,
    Product,
    Scales,
    put_back,
)
from .rounding import INTERPRETED, narrow, to_e4m3

CHUNK = 512  # keys that one program of reduce_kernel adds up
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LARGEST_INT8: tl.constexpr = tl.constexpr(LARGEST_INT8)
_LARGEST_E4M3: tl.constexpr = tl.constexpr(LARGEST_E4M3)
_LOG2_448: tl.constexpr = tl.constexpr(8.807354922057604)
_TINY: tl.constexpr = tl.constexpr(TINY)


@triton.jit
def _sees(index, length, num_keys, tail):
    """Whether a row of this length sees the keys `index`."""
    return (index < num_keys) & ((index < length) | (index >= num_keys - tail))


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, lens_ptr, num_keys, tail, x_row, x_key, x_head, HEADS: tl.constexpr, DIM: tl.constexpr,
    LENGTHS: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [B * HEADS, chunks, BLOCK_D] fp32: sum, or with LARGEST the largest magnitude. Grid (B * HEADS, chunks)."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    length = num_keys
    if LENGTHS:
        length = tl.load(lens_ptr + row).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    base = x_ptr + row.to(tl.int64) * x_row + head * x_head
    result = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(0, CHUNK, BLOCK):
        index = tl.program_id(1) * CHUNK + begin + tl.arange(0, BLOCK)
        mask = _sees(index, length, num_keys, tail)[:, None] & (dims[None, :] < DIM)
        x = tl.load(base + index[:, None].to(tl.int64) * x_key + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if LARGEST:
            result = tl.maximum(result, tl.max(tl.abs(x), 0))
        else:
            result += tl.sum(x, 0)
    where = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out_ptr + where * BLOCK_D + dims, result)


@triton.jit
def quantize_kernel(
    x_ptr, mean_ptr, out_ptr, scale_ptr, lens_ptr, num_tokens, tail, factor, x_row, x_token, x_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, LENGTHS: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, OUTER: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x [B, T, HEADS, DIM] -> int8 [B, HEADS, T padded, BLOCK_D], scale * factor fp32 [B, HEADS, tiles * GROUPS].

    Grid (blocks of ROWS = TILES * OUTER * GROUPS * INNER tokens, B * HEADS).
    """
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = num_tokens
    if LENGTHS:
        length = tl.load(lens_ptr + row).to(tl.int32)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    real = _sees(index, length, num_tokens, tail)[:, None] & (dims[None, :] < DIM)
    base = x_ptr + row.to(tl.int64) * x_row + head * x_head
    x = tl.load(base + index[:, None].to(tl.int64) * x_token + dims[None, :], mask=real, other=0.0).to(tl.float32)
    if SMOOTH:
        mean = tl.load(mean_ptr + tl.program_id(1) * DIM + dims, mask=dims < DIM, other=0.0)
        x = tl.where(real, x - mean[None, :], 0.0)
    top = tl.reshape(tl.max(tl.abs(x), 1), (TILES, OUTER, GROUPS, INNER))
    top = tl.max(tl.max(top, 3), 1)  # [TILES, GROUPS]
    # A maximum may pass over NaN, and integers have none: a sum keeps it, and the scale tells.
    broken = tl.sum(tl.sum(tl.reshape(tl.sum(x * 0.0, 1), (TILES, OUTER, GROUPS, INNER)), 3), 1)
    scale = tl.maximum(top / _LARGEST_INT8, _TINY) + broken
    each = tl.broadcast_to(scale[:, None, :, None], (TILES, OUTER, GROUPS, INNER))
    steps = x / tl.reshape(each, (ROWS,))[:, None]
    # Halves away from zero: a cast to an integer cuts.
    steps = tl.where(steps < 0, steps - 0.5, steps + 0.5)
    steps = tl.minimum(tl.maximum(steps, -_LARGEST_INT8), _LARGEST_INT8)
    steps = tl.where(steps == steps, steps, 0.0)
    padded = tl.num_programs(0) * ROWS
    rows = tl.program_id(1).to(tl.int64) * padded + index
    tl.store(out_ptr + rows[:, None] * BLOCK_D + dims[None, :], steps.to(tl.int8))
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    spots = tl.program_id(1) * (tl.num_programs(0) * TILES * GROUPS) + tiles[:, None] * GROUPS
    tl.store(scale_ptr + spots + tl.arange(0, GROUPS)[None, :], scale * factor)


@triton.jit
def values_kernel(
    v_ptr, scale_ptr, out_ptr, lens_ptr, num_keys, tail, v_row, v_key, v_head, padded, HEADS: tl.constexpr,
    DIM: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """v [B, S, HEADS, DIM] / scale [B * HEADS, BLOCK_D] -> e4m3 [B, HEADS, BLOCK_D, S padded]. Grid (S / BLOCK, B * HEADS)."""
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = num_keys
    if LENGTHS:
        length = tl.load(lens_ptr + row).to(tl.int32)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = _sees(index, length, num_keys, tail)[:, None] & (dims[None, :] < DIM)
    base = v_ptr + row.to(tl.int64) * v_row + head * v_head
    v = tl.load(base + index[:, None].to(tl.int64) * v_key + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    v = v / tl.load(scale_ptr + tl.program_id(1) * BLOCK_D + dims)[None, :]
    # A NaN passes both comparisons' other side: it must stay.
    v = tl.where(v > _LARGEST_E4M3, _LARGEST_E4M3, tl.where(v < -_LARGEST_E4M3, -_LARGEST_E4M3, v))
    spots = (tl.program_id(1).to(tl.int64) * BLOCK_D + dims[:, None]) * padded + index[None, :]
    tl.store(out_ptr + spots, tl.trans(_e4m3(v)))


@triton.jit
def _e4m3(x):
    """x fp32 with |x| <= 448 in e4m3; compiled, the hardware's own cast."""
    if _INTERPRETED:
        return to_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def sage_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, out_ptr, lse_ptr, lens_ptr, num_queries, num_keys, tail,
    q_padded, k_padded, v_row, v_key, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, THREAD: tl.constexpr, FP8: tl.constexpr,
    LENGTHS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_M queries, B * HEADS). q's scale holds the softmax's scale and log2(e)."""
    block_m = tl.program_id(0)
    row = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    kv = row * KV_HEADS + head // (HEADS // KV_HEADS)
    length = num_keys
    if LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + row).to(tl.int32), 0), num_keys)
    queries = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    q_rows = tl.program_id(1).to(tl.int64) * q_padded + queries
    q = tl.load(q_ptr + q_rows[:, None] * BLOCK_D + dims[None, :])
    if THREAD:  # eight scales for 32 queries: queries that are equal modulo 8
        q_scale = tl.load(q_scale_ptr + tl.program_id(1) * (q_padded // 4) + queries // 32 * 8 + queries % 8)
    else:
        q_scale = tl.load(q_scale_ptr + tl.program_id(1) * (q_padded // BLOCK_M) + block_m)
        q_scale = tl.zeros((BLOCK_M,), tl.float32) + q_scale
    k_base = k_ptr + kv.to(tl.int64) * k_padded * BLOCK_D
    if FP8:
        v_base = v_ptr + kv.to(tl.int64) * BLOCK_D * k_padded
    else:
        v_base = v_ptr + row.to(tl.int64) * v_row + (head // (HEADS // KV_HEADS)) * v_head

    # Blocks of the first `length` keys, then those of the last `tail` ones that are not among them.
    first = tl.cdiv(length, BLOCK_N)
    last = tl.cdiv(num_keys, BLOCK_N)
    begin_tail = tl.minimum(tl.maximum((num_keys - tail) // BLOCK_N, first), last)
    if CAUSAL:
        end = tl.minimum(last, tl.cdiv((block_m + 1) * BLOCK_M, BLOCK_N))
        first = tl.minimum(first, end)
        begin_tail = tl.minimum(tl.maximum(begin_tail, first), end)
        last = end
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for step in tl.range(0, first + last - begin_tail, num_stages=STAGES):
        block = tl.where(step < first, step, step - first + begin_tail)
        index = block * BLOCK_N + keys
        k = tl.load(k_base + index[:, None] * BLOCK_D + dims[None, :])
        scores = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * q_scale[:, None]
        if THREAD:  # four scales for 64 keys: pairs of keys, equal modulo 8
            k_scale = tl.load(k_scale_ptr + kv * (k_padded // 16) + index // 64 * 4 + index % 8 // 2)
            scores = scores * k_scale[None, :]
        else:
            scores = scores * tl.load(k_scale_ptr + kv * (k_padded // BLOCK_N) + block)
        if MASKED:
            sees = _sees(index, length, num_keys, tail)[None, :]
            if CAUSAL:
                sees = sees & (index[None, :] <= queries[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - shift)
        top = new_top
        if FP8:
            weights = tl.exp2(scores - shift[:, None] + _LOG2_448)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(v_base + dims[:, None] * k_padded + index[None, :])
            # The sum starts from zero, and goes to fp32 after these keys: FP8 products are summed with 14 bits.
            part = tl.dot(_e4m3(tl.minimum(weights, _LARGEST_E4M3)).to(DOT), tl.trans(v.to(DOT)))
            acc = acc * shrink[:, None] + part
        else:
            weights = tl.exp2(scores - shift[:, None])
            total = total * shrink + tl.sum(weights, 1)
            spots = v_base + index[:, None].to(tl.int64) * v_key + dims[None, :]
            if MASKED:
                mask = _sees(index, length, num_keys, tail)[:, None] & (dims[None, :] < DIM)
                v = tl.load(spots, mask=mask, other=0.0)
            elif BLOCK_D == DIM:
                v = tl.load(spots)
            else:
                v = tl.load(spots, mask=dims[None, :] < DIM, other=0.0)
            acc = tl.dot(weights.to(tl.float16).to(DOT), v.to(tl.float16).to(DOT), acc * shrink[:, None])

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    if FP8:
        acc = acc * tl.load(v_scale_ptr + kv * BLOCK_D + dims)[None, :]
    used = queries < num_queries
    rows = (row.to(tl.int64) * num_queries + queries) * HEADS + head
    spots = out_ptr + rows[:, None] * DIM + dims[None, :]
    tl.store(spots, narrow(acc, out_ptr.dtype.element_ty), mask=used[:, None] & (dims[None, :] < DIM))
    if LSE:
        lse = top + tl.log2(total)
        if FP8:
            lse = lse - _LOG2_448
        lse = tl.where(empty, float("-inf"), lse / _LOG2E)
        tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * num_queries + queries, lse, mask=used)


def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor | None,
    *,
    tail: int,
    scale: float,
    causal: bool,
    scales: Scales,
    product: Product,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the door's `sage_reference`; q, k, v of fp32, bf16 or fp16 with adjacent numbers in a head."""
    num_rows, num_queries, num_heads, dim = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads, num_queries) if return_lse else (0,), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    if not num_keys:
        return out.zero_(), lse.fill_(-torch.inf)
    block_d = 64 if dim <= 64 else 128
    lens = q if kv_lens is None else kv_lens
    lengths = kv_lens is not None
    mean = _reduce(k, kv_lens, tail, block_d, largest=False)[..., :dim]
    if kv_lens is None:
        mean = mean / num_keys
    else:
        seen = (kv_lens.clamp(0, num_keys - tail) + tail).clamp(min=1)
        mean = mean / seen[:, None, None].to(torch.float32)
    mean = mean.contiguous()
    q8, q_scale = _quantize(q, None, None, 0, block_d, "q", scales, factor=scale * LOG2E)
    k8, k_scale = _quantize(k, mean, kv_lens, tail, block_d, "k", scales, factor=1.0)
    fp8 = product == "fp8"
    values, v_scale = v, q_scale
    if fp8:
        v_scale = (_reduce(v, kv_lens, tail, block_d, largest=True) / LARGEST_E4M3).clamp_min_(TINY)
        values = torch.empty(num_rows, num_kv_heads, block_d, k8.shape[2], dtype=torch.float8_e4m3fn, device=q.device)
        values_kernel[(k8.shape[2] // KEYS, num_rows * num_kv_heads)](
            v, v_scale, values, lens, num_keys, tail, v.stride(0), v.stride(1), v.stride(2), k8.shape[2],
            HEADS=num_kv_heads, DIM=dim, LENGTHS=lengths, BLOCK=KEYS, BLOCK_D=block_d,
        )  # fmt: skip
    kind = tl.float8e4nv if fp8 else tl.float16
    sage_kernel[(q8.shape[2] // QUERIES, num_rows * num_heads)](
        q8, q_scale, k8, k_scale, values, v_scale, out, lse, lens, num_queries, num_keys, tail,
        q8.shape[2], k8.shape[2], v.stride(0), v.stride(1), v.stride(2),
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, THREAD=scales == "thread", FP8=fp8, LENGTHS=lengths,
        MASKED=lengths or causal or num_keys % KEYS != 0, CAUSAL=causal, LSE=return_lse,
        DOT=tl.float32 if INTERPRETED else kind,
        BLOCK_M=QUERIES, BLOCK_N=KEYS, BLOCK_D=block_d, STAGES=3 if block_d == 64 else 4,
        num_warps=4 if block_d == 64 else 8,
    )  # fmt: skip
    return out, put_back(lse, q, mean[:, None], scale) if return_lse else lse


def _reduce(x: torch.Tensor, kv_lens: torch.Tensor | None, tail: int, block_d: int, *, largest: bool) -> torch.Tensor:
    """Sum or largest magnitude of x [B, S, K, D] over the keys a row sees: fp32 [B, K, block_d]."""
    num_rows, num_keys, num_heads, dim = x.shape
    chunks = -(-num_keys // CHUNK)
    parts = torch.empty(num_rows * num_heads, chunks, block_d, dtype=torch.float32, device=x.device)
    reduce_kernel[(num_rows * num_heads, chunks)](
        x, parts, x if kv_lens is None else kv_lens, num_keys, tail, x.stride(0), x.stride(1), x.stride(2),
        HEADS=num_heads, DIM=dim, LENGTHS=kv_lens is not None, LARGEST=largest, CHUNK=CHUNK, BLOCK=64, BLOCK_D=block_d,
    )  # fmt: skip
    return (parts.amax(1) if largest else parts.sum(1)).view(num_rows, num_heads, block_d)


def _quantize(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
    tail: int,
    block_d: int,
    side: str,
    scales: Scales,
    *,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, N, D] less its mean [B, N, D] -> int8 [B, N, T padded, block_d], scales times factor [B, N, groups]."""
    num_rows, num_tokens, num_heads, dim = x.shape
    rows = QUERIES if side == "q" else KEYS
    tile, (outer, groups, inner) = TILES[side, scales]
    blocks = -(-num_tokens // rows)
    out = torch.empty(num_rows, num_heads, blocks * rows, block_d, dtype=torch.int8, device=x.device)
    num_groups = blocks * (rows // tile) * groups
    scale = torch.empty(num_rows, num_heads, num_groups, dtype=torch.float32, device=x.device)
    quantize_kernel[(blocks, num_rows * num_heads)](
        x, scale if mean is None else mean, out, scale, x if kv_lens is None else kv_lens, num_tokens, tail, factor,
        x.stride(0), x.stride(1), x.stride(2),
        HEADS=num_heads, DIM=dim, LENGTHS=kv_lens is not None, SMOOTH=mean is not None, ROWS=rows, TILES=rows // tile,
        OUTER=outer, GROUPS=groups, INNER=inner, BLOCK_D=block_d,
    )  # fmt: skip
    return out, scale
