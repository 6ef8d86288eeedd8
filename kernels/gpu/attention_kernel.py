"""Triton: attention of a tile of query rows over a paged cache, and the merge of parts of a context.

One kernel for decode and prefill. A tile is up to QUERIES rows of one sequence times the G query heads of one kv head,
so that every K and V read serves G heads (GQA packing); line m of the tile is row m // G, head m % G. How tiles are
cut is a choice of the launch (`KIND`):

    BY_ROW      a tile is one row; a decode batch
    BY_SEQUENCE a tile is all rows of one sequence, of those with at most QUERIES rows; others are left out
    BY_TILE     sequences are cut into tiles of QUERIES rows; those with at most SKIP rows are left out. Tile t belongs to
                the last sequence s with row_starts[s] // QUERIES + s <= t, which needs nothing from the host

Kv indices that all rows of a tile see are read without masks. At the edges (the diagonal, a window's start, draft trees)
only what some row sees is read, and what a row does not see gets no weight, not even 0 * NaN.

Softmax runs online, in base 2 and fp32 (Milakov and Gimelshein 2018; Dao 2023), and with SPLITS > 1 each program takes
its share of the context and `merge_kernel` joins the shares by their log-sum-exp (Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import narrow

BY_ROW: tl.constexpr = tl.constexpr(0)
BY_SEQUENCE: tl.constexpr = tl.constexpr(1)
BY_TILE: tl.constexpr = tl.constexpr(2)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _block(
    acc, top, total, q, first, kv_rows, table, stride_n, stride_kv, stride_t, visible, low, tree_first, words, used,
    scale, soft_cap,
    MASKED: tl.constexpr, TREE: tl.constexpr, WORDS: tl.constexpr, SOFT_CAP: tl.constexpr, QUANTIZED: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, NUM_TOKENS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Takes kv indices first..first + BLOCK_N into (acc [M, D], top [M], total [M]): weighted sum, maximum, denominator."""
    index = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    wanted = index >= 0
    if MASKED:
        sees = (index[None, :] < visible[:, None]) & (index[None, :] >= low[:, None])
        if TREE:
            bit = index - tree_first
            inside = (bit >= 0) & (bit < 64 * WORDS)
            bit = tl.where(inside, bit, 0)
            word = tl.load(words[:, None] + (bit // 64)[None, :], mask=used[:, None] & inside[None, :], other=0)
            sees = sees | (((word >> (bit % 64).to(tl.int64)[None, :]) & 1) != 0)
        wanted = tl.max(sees.to(tl.int32), 0) > 0
        page = tl.load(table + index // NUM_TOKENS, mask=wanted, other=0)
    else:
        page = tl.load(table + index // NUM_TOKENS)
    rows = kv_rows + page.to(tl.int64) * stride_n + (index % NUM_TOKENS) * stride_t
    spots = rows[:, None] + dims[None, :]
    if MASKED:
        k = tl.load(spots, mask=wanted[:, None] & (dims[None, :] < DIM), other=0.0)
        v = tl.load(spots + stride_kv, mask=wanted[:, None] & (dims[None, :] < DIM), other=0.0)
    elif BLOCK_D == DIM:
        k = tl.load(spots)
        v = tl.load(spots + stride_kv)
    else:
        k = tl.load(spots, mask=dims[None, :] < DIM, other=0.0)
        v = tl.load(spots + stride_kv, mask=dims[None, :] < DIM, other=0.0)

    # "ieee" concerns fp32 alone: TF32 would keep ten bits of an fp32 cache.
    scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
    if QUANTIZED:
        scales = (rows + (WIDTH - 4)).to(tl.pointer_type(tl.float32))
        scores *= tl.load(scales, mask=wanted, other=0.0)[None, :]
    if SOFT_CAP:  # c * tanh(s / c), tanh(x) = 2 / (1 + exp(-2x)) - 1
        scores = soft_cap * (2.0 / (1.0 + tl.exp(scores * (-2.0 * scale / soft_cap))) - 1.0) * LOG2E
    else:
        scores *= scale * LOG2E
    if MASKED:
        scores = tl.where(sees, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, 1)
    if QUANTIZED:
        scales = (rows + stride_kv + (WIDTH - 4)).to(tl.pointer_type(tl.float32))
        weights *= tl.load(scales, mask=wanted, other=0.0)[None, :]
        if MASKED:
            weights = tl.where(sees, weights, 0.0)
    v = v.to(DOT)
    if MASKED:
        # A slot that one row sees and another does not: taken out of the product, told to those who see it.
        finite = v * 0.0 == 0.0
        broken = tl.max((finite == 0).to(tl.int32), 1) > 0
        v = tl.where(finite, v, 0.0).to(DOT)
        total += tl.sum(tl.where(sees & broken[None, :], float("nan"), 0.0), 1)
    acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def attention_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, table_ptr, seq_ptr, position_ptr, visible_ptr, starts_ptr,
    kv_lens_ptr, mask_ptr, tree_starts_ptr, sinks_ptr,
    num_rows, num_seqs, scale, soft_cap, window, skip, q_row, q_head, stride_n, stride_kv, stride_h, stride_t,
    table_row, mask_row,
    KIND: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, NUM_TOKENS: tl.constexpr, QUANTIZED: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, TREE: tl.constexpr, WORDS: tl.constexpr, SINKS: tl.constexpr,
    DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS, SPLITS). Writes rows of out and lse, or with SPLITS > 1 parts for `merge_kernel`."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    num_real = tl.load(starts_ptr + num_seqs).to(tl.int32)  # rows after the last sequence are padding
    if KIND == BY_ROW:
        begin = tile
        count = 1
        seq = tl.load(seq_ptr + tile, mask=tile < num_real, other=0).to(tl.int32)
    elif KIND == BY_SEQUENCE:
        seq = tile
        begin = tl.load(starts_ptr + seq).to(tl.int32)
        count = tl.load(starts_ptr + seq + 1).to(tl.int32) - begin
        if count > QUERIES:
            return
    else:
        seq = 0
        last = num_seqs  # the padding counts as one more sequence
        while seq < last:
            middle = (seq + last + 1) // 2
            start = tl.load(starts_ptr + middle).to(tl.int32)
            fits = start // QUERIES + middle <= tile
            seq = tl.where(fits, middle, seq)
            last = tl.where(fits, last, middle - 1)
        start = tl.load(starts_ptr + seq).to(tl.int32)
        end = tl.load(starts_ptr + seq + 1, mask=seq < num_seqs, other=num_rows).to(tl.int32)
        begin = start + (tile - start // QUERIES - seq) * QUERIES
        count = tl.minimum(end - begin, QUERIES)
        if (seq < num_seqs) & (end - start <= skip):
            return
        seq = tl.where(seq < num_seqs, seq, 0)
    if count <= 0:
        return

    lines = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    query = lines // G
    used = query < count
    real = used & (begin + query < num_real)
    row = (begin + query).to(tl.int64)
    heads = head * G + lines % G
    visible = tl.load(visible_ptr + row, mask=real, other=0).to(tl.int32)
    low = tl.zeros((BLOCK_M,), tl.int32)
    if WINDOW:
        low = tl.maximum(tl.load(position_ptr + row, mask=real, other=0).to(tl.int32) - window + 1, 0)
    first_seen = tl.min(tl.where(real & (low < visible), low, NEVER), 0)
    end_seen = tl.max(tl.where(low < visible, visible, 0), 0)
    tree_first = 0
    words = mask_ptr + row * mask_row
    if TREE:
        tree_first = tl.load(tree_starts_ptr + seq).to(tl.int32)
        if begin < num_real:
            first_seen = tl.minimum(first_seen, tree_first)
            kv_len = tl.load(kv_lens_ptr + seq).to(tl.int32)
            end_seen = tl.maximum(end_seen, tl.minimum(kv_len, tree_first + 64 * WORDS))
    # Whole blocks from..stop of this split; all rows see all of inner_from..inner_to.
    first_block = tl.minimum(first_seen, end_seen) // BLOCK_N
    num_blocks = tl.cdiv(end_seen, BLOCK_N) - first_block
    per_split = tl.cdiv(num_blocks, SPLITS)
    share = tl.maximum(tl.minimum(per_split, num_blocks - split * per_split), 0)
    start_block = first_block + split * per_split
    inner_from = tl.cdiv(tl.max(tl.where(used, low, 0), 0), BLOCK_N)
    inner_to = tl.min(tl.where(used, visible, NEVER), 0) // BLOCK_N
    inner_from = tl.minimum(tl.maximum(inner_from, start_block), start_block + share)
    inner_to = tl.maximum(tl.minimum(inner_to, start_block + share), inner_from)

    q_spots = q_ptr + row[:, None] * q_row + heads[:, None] * q_head + dims[None, :]
    q = tl.load(q_spots, mask=real[:, None] & (dims[None, :] < DIM), other=0.0).to(DOT)
    kv_rows = kv_ptr + head.to(tl.int64) * stride_h
    table = table_ptr + seq.to(tl.int64) * table_row
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in tl.range(inner_from, inner_to, num_stages=STAGES):
        acc, top, total = _block(
            acc, top, total, q, block * BLOCK_N, kv_rows, table, stride_n, stride_kv, stride_t, visible, low,
            tree_first, words, real, scale, soft_cap, False, TREE, WORDS, SOFT_CAP, QUANTIZED, DIM, WIDTH, NUM_TOKENS,
            DOT, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    before = inner_from - start_block
    for edge in tl.range(0, share - (inner_to - inner_from), num_stages=1):
        block = tl.where(edge < before, start_block + edge, inner_to + edge - before)
        acc, top, total = _block(
            acc, top, total, q, block * BLOCK_N, kv_rows, table, stride_n, stride_kv, stride_t, visible, low,
            tree_first, words, real, scale, soft_cap, True, TREE, WORDS, SOFT_CAP, QUANTIZED, DIM, WIDTH, NUM_TOKENS,
            DOT, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    if SINKS and SPLITS == 1:
        sink = tl.load(sinks_ptr + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - shift)
        acc *= shrink[:, None]
        total = total * shrink + tl.exp2(sink - shift)
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc /= total[:, None]
    lse = tl.where(empty, float("-inf"), top + tl.log2(total))
    mask = used[:, None] & (dims[None, :] < DIM)
    if SPLITS == 1:
        spots = (row * (KV_HEADS * G) + heads)[:, None] * DIM + dims[None, :]
        tl.store(out_ptr + spots, narrow(acc, out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + row * (KV_HEADS * G) + heads, lse * LN2, mask=used)
    else:
        part = ((tile.to(tl.int64) * QUERIES + query) * (KV_HEADS * G) + heads) * SPLITS + split
        tl.store(part_ptr + part[:, None] * DIM + dims[None, :], acc, mask=mask)
        tl.store(part_lse_ptr + part, lse, mask=used)


@triton.jit
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, starts_ptr, sinks_ptr,
    KIND: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Joins SPLITS (a power of two) parts of one row and head. Grid (tiles * QUERIES, HEADS)."""
    line = tl.program_id(0)
    head = tl.program_id(1)
    row = line.to(tl.int64)
    if KIND == BY_SEQUENCE:
        begin = tl.load(starts_ptr + line // QUERIES)
        count = tl.load(starts_ptr + line // QUERIES + 1) - begin
        if (count > QUERIES) | (line % QUERIES >= count):
            return
        row = begin.to(tl.int64) + line % QUERIES
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)
    part = (line.to(tl.int64) * HEADS + head) * SPLITS + splits
    lse = tl.load(part_lse_ptr + part)
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - shift)
    acc = tl.load(part_ptr + part[:, None] * DIM + dims[None, :], mask=dims[None, :] < DIM, other=0.0)
    acc = tl.sum(acc * weights[:, None], 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    where = row * HEADS + head
    tl.store(out_ptr + where * DIM + dims, narrow(acc / total, out_ptr.dtype.element_ty), mask=dims < DIM)
    tl.store(lse_ptr + where, tl.where(empty, float("-inf"), top + tl.log2(total)) * LN2)
