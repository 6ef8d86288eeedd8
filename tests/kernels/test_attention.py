"""Paged attention against its definition: shapes, types, windows, trees, poison, batching, chunking, merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from motet.kernels import attention
from motet.kernels.attention import (
    PagedBatch,
    copy_slots,
    dense_attention,
    dense_attention_reference,
    dequantize_rows,
    merge_lse,
    paged_attention,
    paged_attention_reference,
    quantize_rows,
    row_width,
    store_kv,
)


def paged(
    spans: Sequence[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    block: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """q, kv and batch of sequences given as (first row's position, rows); what no row may see holds NaN.

    A sequence's numbers depend on its span and the seed alone.
    """
    per_seq = [blocks_of(first + rows, block) for first, rows in spans]
    kv = torch.full((1 + sum(per_seq), 2, kv_heads, block, dim), torch.nan if poison else 0.0, dtype=dtype)
    order = torch.randperm(sum(per_seq), generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(spans), max(per_seq) + 1, dtype=torch.int32)
    queries, used = [], 0
    for seq, (first, rows) in enumerate(spans):
        generator = torch.Generator().manual_seed(1000 * seed + first * 7 + rows)
        blocks = order[used : used + per_seq[seq]]
        used += per_seq[seq]
        table[seq, : len(blocks)] = blocks
        content = torch.randn(2, kv_heads, first + rows, dim, generator=generator).to(dtype)
        for index in range(first + rows):
            kv[blocks[index // block], :, :, index % block] = content[:, :, index]
        queries.append(torch.randn(rows, heads, dim, generator=generator).to(dtype))
    position = torch.cat([torch.arange(first, first + rows) for first, rows in spans])
    starts = torch.tensor([0, *(rows for _, rows in spans)]).cumsum(0)
    lens = [first + rows for first, rows in spans]
    batch = PagedBatch(
        seq=torch.cat([torch.full((rows,), seq) for seq, (_, rows) in enumerate(spans)]),
        position=position,
        slots=(torch.zeros_like(position),),
        num_visible=position + 1,
        block_tables=(table,),
        kv_lens=torch.tensor(lens),
        row_starts=starts,
        mark="mixed",
        max_kv_len=max(lens),
        block_size=block,
    )
    return torch.cat(queries), kv, batch


def blocks_of(length: int, block: int) -> int:
    return (length + block - 1) // block


def changed(batch: PagedBatch, **fields: Any) -> PagedBatch:
    from dataclasses import replace

    return replace(batch, **fields)


def agrees(q: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, tolerance: float = 2e-5, **options: Any) -> None:
    options = {"scale": q.shape[-1] ** -0.5} | options
    out, lse = paged_attention(q, kv, batch, 0, return_lse=True, **options)
    expected, expected_lse = paged_attention_reference(q, kv, batch, 0, **options)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=max(tolerance, 2e-5), rtol=max(tolerance, 2e-5))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(9, 3, 64, 16), (4, 4, 80, 8), (8, 1, 40, 5), (5, 5, 33, 4), (2, 1, 128, 32), (1, 1, 1, 1), (14, 2, 256, 16)],
)
def test_shapes(backend: str, heads: int, kv_heads: int, dim: int, block: int) -> None:
    agrees(*paged([(0, 3), (17, 1), (40, 9), (0, 1)], heads=heads, kv_heads=kv_heads, dim=dim, block=block))


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 5}, {"window": 64}, {"soft_cap": 3.0}, {"scale": 1.7}])
def test_options(backend: str, options: dict[str, Any]) -> None:
    agrees(*paged([(70, 4), (0, 11), (3, 1)]), **options)


def test_sinks(backend: str) -> None:
    agrees(*paged([(20, 2), (0, 3)]), sinks=torch.linspace(-2, 6, 6), window=3)


def test_long_context_crosses_chunks(backend: str) -> None:
    q, kv, batch = paged([(600, 2), (255, 2), (511, 1), (1000, 1)], heads=2, kv_heads=1)
    agrees(q, kv, batch)
    agrees(q, kv, batch, window=300)


def test_window_blocks_may_be_gone(backend: str) -> None:
    """Blocks that lie wholly behind the window point at the null block, which holds NaN here."""
    q, kv, batch = paged([(61, 3)])
    table = batch.block_tables[0].clone()
    table[0, : (61 - 8 + 1) // 4] = 0
    kv[0] = torch.nan
    agrees(q, kv, changed(batch, block_tables=(table,)), window=8)


KINDS = pytest.mark.parametrize("kind", ["plain", "int8"])


def cached(kv: torch.Tensor, kind: str) -> torch.Tensor:
    """The cache as it is, or quantized; NaN rows become rows whose scale is NaN."""
    return quantize_rows(kv) if kind == "int8" else kv


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(9, 3, 64, 16), (6, 6, 80, 8), (7, 1, 96, 128), (8, 2, 128, 32), (2, 1, 256, 64), (10, 1, 33, 16), (5, 1, 64, 8)],
)
def test_every_cache(
    backend: str, kind: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block: int
) -> None:
    """Lengths 0, 1 and ragged, few rows and many, over more than a chunk; unused slots hold NaN."""
    spans = [(0, 1), (0, 0), (17, 1), (299, 1), (0, 21), (250, 9)]
    q, kv, batch = paged(spans, heads=heads, kv_heads=kv_heads, dim=dim, block=block, dtype=dtype)
    tolerance = 2e-5 if dtype is torch.float32 else 1.6e-2
    agrees(q, cached(kv, kind), batch, tolerance)
    agrees(q, cached(kv, kind), batch, tolerance, window=40, soft_cap=4.0)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_rows(backend: str, kind: str, dtype: torch.dtype) -> None:
    q, kv, batch = paged([(0, 1000)], heads=3, kv_heads=1, dim=64, block=32, dtype=dtype)
    agrees(q, cached(kv, kind), batch, 2e-5 if dtype is torch.float32 else 1.6e-2)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [0, 1], ids=["k", "v"])
def test_nan_that_a_row_sees_is_its_sequences_alone(backend: str, kind: str, dtype: torch.dtype, part: int) -> None:
    q, kv, batch = paged([(20, 1), (30, 1)], dtype=dtype)
    clean = paged_attention(q, cached(kv, kind), batch, 0, scale=0.25)
    kv[batch.block_tables[0][0, 2], part, :, 1, 3] = torch.nan
    out, lse = paged_attention(q, cached(kv, kind), batch, 0, scale=0.25, return_lse=True)
    assert bool(out[0].isnan().any(-1).all()) and torch.equal(out[1], clean[1])
    assert bool(lse[0].isnan().all()) == (part == 0) and bool(lse[1].isfinite().all())


def test_int8_error_is_what_rounding_to_127_steps_costs(backend: str) -> None:
    q, kv, batch = paged([(300, 1), (0, 20)], heads=9, kv_heads=3, dim=64, block=16, dtype=torch.bfloat16)
    exact, _ = paged_attention_reference(q, kv, batch, 0, scale=0.125)
    ours = paged_attention(q, quantize_rows(kv), batch, 0, scale=0.125)
    assert 0 < (ours.double() - exact).abs().max() < 0.05


def test_low_precision_error_is_at_most_twice_plain_torch(backend: str) -> None:
    q, kv, batch = paged([(200, 1), (0, 20), (300, 2)], heads=9, kv_heads=3, dim=64, block=16, dtype=torch.bfloat16)
    exact, _ = paged_attention_reference(q, kv, batch, 0, scale=0.125)
    ours = paged_attention(q, kv, batch, 0, scale=0.125)
    plain = torch.empty_like(q)
    for row in range(len(q)):
        seen = torch.arange(int(batch.num_visible[row]))
        blocks = batch.block_tables[0][batch.seq[row], seen // 16].long()
        k, v = kv[blocks, :, :, seen % 16].unbind(1)  # [L, K, D]
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        weights = (torch.einsum("hd,lhd->hl", q[row], k) * 0.125).softmax(-1)
        plain[row] = torch.einsum("hl,lhd->hd", weights, v)
    assert (ours.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


def tree_batch() -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Two sequences: one row at 9, and five draft rows on top of 13 kv indices: a -> (b -> d, c -> e)."""
    q, kv, batch = paged([(9, 1), (13, 5)])
    parents = [-1, 0, 0, 1, 2]
    mask, position = torch.zeros(6, 1, dtype=torch.int64), batch.position.clone()
    for node in range(5):
        bits, depth, at = 0, 0, node
        while at >= 0:
            bits, depth, at = bits | 1 << at, depth + 1, parents[at]
        mask[1 + node, 0] = bits
        position[1 + node] = 13 + depth - 1
    num_visible = torch.tensor([10, 13, 13, 13, 13, 13])
    starts = torch.tensor([0, 13])
    return q, kv, changed(batch, ancestor_mask=mask, tree_starts=starts, num_visible=num_visible, position=position)


def test_tree(backend: str) -> None:
    q, kv, batch = tree_batch()
    agrees(q, kv, batch)
    agrees(q, kv, batch, window=4)
    agrees(q, kv, batch, window=2)


def test_tree_words_and_sign_bit(backend: str) -> None:
    q, kv, batch = paged([(3, 130)], heads=2, kv_heads=1)
    mask = torch.zeros(130, 3, dtype=torch.int64)
    mask[5, 0] = torch.iinfo(torch.int64).min  # bit 63
    mask[129, :] = torch.tensor([5, -1, 2])
    agrees(q, kv, changed(batch, ancestor_mask=mask, tree_starts=torch.tensor([3]), num_visible=torch.full((130,), 3)))


def test_slots_that_nobody_sees_never_leak(backend: str) -> None:
    q, kv, batch = tree_batch()
    clean = paged_attention(q, kv, batch, 0, scale=0.25)
    blocks = batch.block_tables[0][1].long()
    kv[blocks[16 // 4], :, :, 16 % 4] = torch.nan  # node d, seen by row d only
    dirty = paged_attention(q[[0, 1, 2, 3, 5]], kv, without_row(batch, 4), 0, scale=0.25)
    assert torch.equal(clean[[0, 1, 2, 3, 5]], dirty)


def without_row(batch: PagedBatch, row: int) -> PagedBatch:
    keep = torch.tensor([i for i in range(len(batch.seq)) if i != row])
    assert batch.ancestor_mask is not None
    return changed(
        batch,
        seq=batch.seq[keep],
        position=batch.position[keep],
        num_visible=batch.num_visible[keep],
        ancestor_mask=batch.ancestor_mask[keep],
        row_starts=torch.tensor([0, 1, 5]),
    )


def test_row_that_sees_nothing(backend: str) -> None:
    q, kv, batch = paged([(5, 2), (0, 1)])
    batch = changed(batch, num_visible=torch.tensor([6, 0, 0]))
    out, lse = paged_attention(q, kv, batch, 0, scale=0.25, return_lse=True)
    assert torch.equal(out[1:], torch.zeros_like(out[1:])) and bool((lse[1:] == -torch.inf).all())
    assert bool(out[0].isfinite().all())
    agrees(q, kv, batch, sinks=torch.arange(6.0))


def test_three_axis_positions_use_the_first(backend: str) -> None:
    q, kv, batch = paged([(20, 4)])
    wide = changed(batch, position=torch.stack([batch.position, batch.position * 0, batch.position * 0]))
    options: dict[str, Any] = {"scale": 0.25, "window": 6}
    assert torch.equal(paged_attention(q, kv, wide, 0, **options), paged_attention(q, kv, batch, 0, **options))


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 300, "soft_cap": 5.0}])
def test_batched_equals_alone_bit_for_bit(backend: str, options: dict[str, Any]) -> None:
    spans = [(200, 1), (0, 7), (0, 1), (530, 3), (64, 1), (255, 1)]
    q, kv, batch = paged(spans, heads=9, kv_heads=3, dim=64, block=16)
    together = paged_attention(q, kv, batch, 0, scale=0.125, **options)
    for seq, (first, rows) in enumerate(spans):
        here = slice(int(batch.row_starts[seq]), int(batch.row_starts[seq + 1]))
        alone = changed(
            batch,
            seq=torch.zeros(rows, dtype=torch.int64),
            position=batch.position[here],
            num_visible=batch.num_visible[here],
            block_tables=(batch.block_tables[0][seq : seq + 1, : blocks_of(first + rows, 16)],),
            kv_lens=batch.kv_lens[seq : seq + 1],
            row_starts=torch.tensor([0, rows]),
        )
        assert torch.equal(together[here], paged_attention(q[here], kv, alone, 0, scale=0.125, **options))


@KINDS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_equals_whole(backend: str, threads: int, dtype: torch.dtype, kind: str) -> None:
    q, kv, batch = paged([(0, 300)], heads=3, kv_heads=1, dim=80, block=16, dtype=dtype)
    kv = cached(kv, kind)
    whole = paged_attention(q, kv, batch, 0, scale=0.2, window=270)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for low, high in [(0, 1), (1, 60), (60, 291), (291, 300)]:
            chunk = changed(
                batch,
                seq=batch.seq[low:high],
                position=batch.position[low:high],
                num_visible=batch.num_visible[low:high],
                kv_lens=torch.tensor([high]),
                row_starts=torch.tensor([0, high - low]),
            )
            part = paged_attention(q[low:high], kv, chunk, 0, scale=0.2, window=270)
            if backend == "cpu":  # the C++ rows keep one order of sums whatever the chunk
                assert torch.equal(part, whole[low:high])
            else:
                torch.testing.assert_close(
                    part, whole[low:high], atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
                )
    finally:
        torch.set_num_threads(before)


@KINDS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_few_rows_over_a_long_context_beside_decodes(backend: str, threads: int, kind: str) -> None:
    """Threads share the chunks of the long sequence; its rows, and each row by itself, keep every bit."""
    first, rows = 2600, 16
    spans = [*((90 + 7 * i, 1) for i in range(15)), (first, rows)]
    q, kv, batch = paged(spans, heads=9, kv_heads=3, dim=64, block=16, dtype=torch.bfloat16)
    kv = cached(kv, kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = paged_attention(q, kv, batch, 0, scale=0.125)
        exact, _ = paged_attention_reference(q, kv, batch, 0, scale=0.125)
        torch.testing.assert_close(together.double(), exact, atol=4e-3, rtol=1.6e-2)
        for low, high in [(0, rows), (0, 1), (1, 4), (4, 11), (11, rows)]:
            here = slice(15 + low, 15 + high)
            alone = changed(
                batch,
                seq=torch.zeros(high - low, dtype=torch.int64),
                position=batch.position[here],
                num_visible=batch.num_visible[here],
                block_tables=(batch.block_tables[0][15:],),
                kv_lens=torch.tensor([first + high]),
                row_starts=torch.tensor([0, high - low]),
            )
            part = paged_attention(q[here], kv, alone, 0, scale=0.125)
            if backend == "cpu":
                assert torch.equal(part, together[here])
            else:
                torch.testing.assert_close(part, together[here], atol=4e-3, rtol=1.6e-2)
    finally:
        torch.set_num_threads(before)


@KINDS
@pytest.mark.parametrize("instruction_set", ["plain", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize(("group", "dim"), [(1, 33), (2, 80), (3, 64), (5, 128), (7, 96), (13, 256)])
def test_a_row_among_any_number_of_rows_keeps_every_bit(
    backend: str, group: int, dim: int, instruction_set: str, kind: str
) -> None:
    """From one query to more than are taken together, so that every way through keys and values is met."""
    first, rows = 240, 40
    q, kv, batch = paged([(first, rows)], heads=group, kv_heads=1, dim=dim, block=16, dtype=torch.bfloat16)
    kv = cached(kv, kind)
    ops = attention.cpu_ops()
    before = ops.instruction_set() if ops else ""
    try:
        if ops:
            ops.use_instruction_set(instruction_set)  # one that this CPU lacks leaves the one in use
        agrees(q, kv, batch, 1.6e-2)
        whole = paged_attention(q, kv, batch, 0, scale=0.2, window=250)
        for low, high in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 21), (21, 28), (28, 40)]:
            chunk = changed(
                batch,
                seq=batch.seq[low:high],
                position=batch.position[low:high],
                num_visible=batch.num_visible[low:high],
                kv_lens=torch.tensor([first + high]),
                row_starts=torch.tensor([0, high - low]),
            )
            part = paged_attention(q[low:high], kv, chunk, 0, scale=0.2, window=250)
            if backend == "cpu":
                assert torch.equal(part, whole[low:high])
            else:
                torch.testing.assert_close(part, whole[low:high], atol=1e-2, rtol=1.6e-2)
    finally:
        if ops:
            ops.use_instruction_set(before)


def test_strided_queries_and_padding_rows(backend: str) -> None:
    """q as a view into fused QKV rows; two padding rows after the last sequence come out as zeros."""
    q, kv, batch = paged([(30, 1), (4, 2)])
    expected = paged_attention(q, kv, batch, 0, scale=0.25)
    fused = torch.full((5, 10, 16), torch.nan)
    fused[:3, :6] = q
    pad = torch.zeros(2, dtype=torch.int64)
    padded = changed(
        batch,
        seq=torch.cat([batch.seq, pad]),
        position=torch.cat([batch.position, pad]),
        num_visible=torch.cat([batch.num_visible, pad]),
    )
    out = paged_attention(fused[:, :6], kv, padded, 0, scale=0.25)
    assert torch.equal(out[:3], expected) and torch.equal(out[3:], torch.zeros(2, 6, 16))


def test_mixed_types(backend: str) -> None:
    q, kv, batch = paged([(30, 2)], dtype=torch.bfloat16)
    agrees(q.float(), kv, batch)


def test_merge_joins_disjoint_parts(backend: str) -> None:
    q, kv, batch = paged([(40, 3)])
    whole, whole_lse = paged_attention(q, kv, batch, 0, scale=0.25, return_lse=True)
    low = changed(batch, num_visible=torch.full((3,), 24))
    first = paged_attention(q, kv, low, 0, scale=0.25, return_lse=True)
    rest = changed(
        batch,
        num_visible=batch.num_visible - 24,
        position=batch.position - 24,
        block_tables=(batch.block_tables[0][:, 6:],),
        kv_lens=batch.kv_lens - 24,
        max_kv_len=19,
    )
    second = paged_attention(q, kv, rest, 0, scale=0.25, return_lse=True)
    out, lse = merge_lse(*first, *second)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    assert torch.equal(merge_lse(*first, *nothing)[0], first[0])
    empty, empty_lse = merge_lse(*nothing, *nothing)
    assert torch.equal(empty, torch.zeros_like(empty)) and bool((empty_lse == -torch.inf).all())


# ------------------------------------------------------------------------------------------------------------- dense


def fused_windows(windows: int, rows: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[3, B, T, H, D] as an encoder's projection lays it out: a view of [B, T, 3, H, D]."""
    generator = torch.Generator().manual_seed(rows + dim)
    return (1.5 * torch.randn(windows, rows, 3, heads, dim, generator=generator)).to(dtype).permute(2, 0, 1, 3, 4)


@pytest.mark.parametrize(
    ("windows", "rows", "heads", "dim"),
    [
        (1, 1, 2, 64),
        (2, 17, 3, 32),
        (1, 33, 2, 96),
        (1, 64, 2, 128),
        (2, 129, 1, 40),
        (1, 200, 1, 160),
        (1, 1500, 6, 64),
    ],
)
def test_dense_error_is_at_most_twice_plain_torch(backend: str, windows: int, rows: int, heads: int, dim: int) -> None:
    q, k, v = fused_windows(windows, rows, heads, dim)
    exact = dense_attention_reference(q, k, v, scale=0.2)
    ours = dense_attention(q, k, v, scale=0.2)
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(a, b, c, scale=0.2)
    assert ours.shape == (windows, rows, heads * dim) and ours.dtype == q.dtype
    error = (plain.transpose(1, 2).flatten(2).double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() <= 2 * error


@pytest.mark.parametrize("instruction_set", ["plain", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_on_every_instruction_set(backend: str, instruction_set: str, dtype: torch.dtype) -> None:
    q, k, v = fused_windows(2, 70, 3, 64, dtype)
    ops = attention.cpu_ops()
    before = ops.instruction_set() if ops else ""
    try:
        if ops:
            ops.use_instruction_set(instruction_set)  # one that this CPU lacks leaves the one in use
        out = dense_attention(q, k, v, scale=0.125)
    finally:
        if ops:
            ops.use_instruction_set(before)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    exact = dense_attention_reference(q, k, v, scale=0.125)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


def test_dense_large_scores(backend: str) -> None:
    """Scores in the thousands: one key takes all, later tiles outdo earlier ones, and nothing overflows."""
    q, k, v = fused_windows(1, 300, 2, 64)
    k = k * torch.linspace(1, 40, 300)[:, None, None].to(k.dtype)
    exact = dense_attention_reference(q, k, v, scale=4.0)
    torch.testing.assert_close(dense_attention(q, k, v, scale=4.0).double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_padding_never_leaks(backend: str, dtype: torch.dtype) -> None:
    q, k, v = qkv = fused_windows(2, 100, 2, 64, dtype)
    for length in (1, 63, 64, 99, 100):
        clean = dense_attention(*qkv[:, :, :length], scale=0.125)
        qkv[:, :, length:] = torch.nan
        padded = dense_attention(q, k, v, scale=0.125, length=length)
        assert torch.equal(padded[:, :length], clean) and not padded[:, length:].any()
        qkv[:, :, length:] = 1.0


def test_dense_spreads_nan_of_its_own_rows_only(backend: str) -> None:
    q, k, v = fused_windows(1, 90, 2, 64).clone()
    q[0, 7, 0] = torch.nan
    out = dense_attention(q, k, v, scale=0.125)
    assert bool(out[0, 7, :64].isnan().all()) and not out[0, 7, 64:].isnan().any()
    assert int(out.isnan().sum()) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_alone_equals_batched_on_any_threads(backend: str, dtype: torch.dtype) -> None:
    q, k, v = fused_windows(3, 150, 2, 64, dtype)
    if backend == "torch":  # torch's own sums may depend on the batch
        alone = dense_attention(q[1:2], k[1:2], v[1:2], scale=0.125)
        torch.testing.assert_close(dense_attention(q, k, v, scale=0.125)[1:2], alone, atol=1e-2, rtol=1e-2)
        return
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [dense_attention(*(x[at : at + 1].contiguous() for x in (q, k, v)), scale=0.125) for at in range(3)]
        swapped = dense_attention(q.flip(1), k, v, scale=0.125)  # rows in other tiles
        torch.set_num_threads(2)
        together = dense_attention(q, k, v, scale=0.125)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone)) and torch.equal(together, swapped.flip(1))


def test_dense_nothing(backend: str) -> None:
    q, k, v = fused_windows(1, 8, 2, 64)
    assert not dense_attention(q, k, v, scale=0.125, length=0).any()


# ------------------------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("from_dtype", [torch.float32, torch.bfloat16])
def test_store_kv(backend: str, dtype: torch.dtype, from_dtype: torch.dtype) -> None:
    kv = torch.zeros(6, 2, 3, 4, 20, dtype=dtype)
    fused = torch.randn(5, 9, 20).to(from_dtype)
    k, v = fused[:, :3], fused[:, 6:]
    slots = torch.tensor([5, -1, 23, 8, -1])
    store_kv(k, v, kv, slots)
    expected = torch.zeros_like(kv)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 0, :, slot % 4] = k[row].to(dtype)
            expected[slot // 4, 1, :, slot % 4] = v[row].to(dtype)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("from_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [20, 33])
def test_store_int8(backend: str, from_dtype: torch.dtype, dim: int) -> None:
    kv = torch.zeros(6, 2, 3, 4, row_width(dim, torch.int8), dtype=torch.int8)
    fused = (3.0 * torch.randn(5, 9, dim)).to(from_dtype)
    fused[0, 0] = 0.0
    fused[2, 1, 4] = torch.nan
    fused[3, 7, 0] = -torch.inf
    fused[2, 6] = 1e-38
    slots = torch.tensor([5, -1, 23, 8, 0])
    store_kv(fused[:, :3], fused[:, 6:], kv, slots)
    back = dequantize_rows(kv)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for part, x in enumerate((fused[row, :3], fused[row, 6:])):
                assert torch.equal(kv[slot // 4, part, :, slot % 4], quantize_rows(x))
    assert bool(back[5, 0, 1, 3].isnan().all()) and bool(back[2, 1, 1, 0].isnan().all())
    assert not back[1, 0, 0, 1].any() and not back[5, 1, 0, 3].any()
    assert int(back.isnan().sum()) == 2 * dim and int((back != 0).any(-1).sum()) == 24 - 2
    error = (back[1, 0, 1, 1] - fused[0, 1].float()).abs().max()
    assert error <= fused[0, 1].float().abs().max() / 127 * 0.5001


def test_store_poisoned_padding(backend: str) -> None:
    kv = torch.zeros(2, 2, 1, 4, 8)
    k = torch.full((2, 1, 8), torch.nan)
    store_kv(k, k, kv, torch.tensor([-1, -1]))
    assert torch.equal(kv, torch.zeros_like(kv))


@KINDS
def test_copy_slots_reads_before_it_writes(kind: str) -> None:
    kvs = [cached(torch.randn(4, 2, 3, 5, 8), kind) for _ in range(2)]
    before = [kv.clone() for kv in kvs]
    src, dst = [6, 7, 19, 3], [7, 6, 3, 4]
    copy_slots(kvs, torch.tensor(src), torch.tensor(dst), 5)
    for kv, old in zip(kvs, before, strict=True):
        expected = old.clone()
        for s, d in zip(src, dst, strict=True):
            expected[d // 5, :, :, d % 5] = old[s // 5, :, :, s % 5]
        assert torch.equal(kv, expected)
