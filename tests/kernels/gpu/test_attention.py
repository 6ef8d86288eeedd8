"""Paged attention in Triton against the definition: tiles, splits, windows, trees, poison, quantized caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from motet.kernels.attention import PagedBatch, merge_lse, paged_attention, paged_attention_reference
from motet.kernels.gpu import attention as gpu

FP8 = torch.float8_e4m3fn


def paged(
    spans: Sequence[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    block: int = 8,
    dtype: torch.dtype = torch.float32,
    mark: Any = "mixed",
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """q, kv and batch of sequences given as (first row's position, rows); what no row may see holds NaN."""
    lengths = [first + rows for first, rows in spans]
    blocks = [-(-length // block) for length in lengths]
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    order = torch.randperm(sum(blocks), generator=generator) + 1
    kv = torch.full((1 + sum(blocks), 2, kv_heads, block, dim), torch.nan, dtype=dtype)
    table = torch.zeros(len(spans), max([*blocks, 1]), dtype=torch.int32)
    used = 0
    for seq, length in enumerate(lengths):
        pages = order[used : used + blocks[seq]]
        table[seq, : blocks[seq]], used = pages, used + blocks[seq]
        at = torch.arange(length)
        content = torch.randn(length, 2, kv_heads, dim, generator=generator).to(dtype)
        kv[pages[at // block], :, :, at % block] = content
    counts = torch.tensor([rows for _, rows in spans])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    position = torch.cat([torch.arange(first, first + rows) for first, rows in spans])
    q = torch.randn(len(position), heads, dim, generator=generator).to(dtype)
    batch = PagedBatch(
        seq=torch.arange(len(spans)).repeat_interleave(counts),
        position=position,
        slots=(torch.zeros_like(position),),
        num_visible=position + 1,
        block_tables=(table,),
        kv_lens=torch.tensor(lengths),
        row_starts=starts,
        mark=mark,
        max_kv_len=max(lengths),
        block_size=block,
        row_starts_list=tuple(starts.tolist()),
        kv_lens_list=tuple(lengths),
    )
    return q, kv, batch


def agrees(
    q: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, tolerance: float = 2e-5, splits: int = 0, **options: Any
) -> None:
    options = {"scale": q.shape[-1] ** -0.5} | options
    if splits:
        out, lse = gpu.paged_attention(q, kv, batch, 0, num_splits=splits, return_lse=True, **options)
    else:
        out, lse = paged_attention(q, kv, batch, 0, return_lse=True, **options)
    expected, expected_lse = paged_attention_reference(q, kv, batch, 0, **options)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


RAGGED = [(0, 1), (17, 1), (40, 5), (0, 3), (130, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(9, 3, 64, 16), (4, 4, 80, 8), (4, 1, 96, 32), (8, 2, 128, 64), (2, 2, 256, 128), (7, 1, 40, 4)],
)
def test_shapes(heads: int, kv_heads: int, dim: int, block: int) -> None:
    agrees(*paged(RAGGED, heads=heads, kv_heads=kv_heads, dim=dim, block=block))


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("options", [{}, {"window": 40, "soft_cap": 3.0}])
def test_decode_splits(splits: int, options: dict[str, Any]) -> None:
    """More splits than blocks leave some of them empty; a row may see nothing at all."""
    q, kv, batch = paged([(299, 1), (0, 1), (63, 1), (170, 1)], dim=64, block=16, mark="decode")
    batch = replace(batch, num_visible=torch.tensor([300, 1, 64, 0]))
    agrees(q, kv, batch, splits=splits, **options)
    agrees(q, kv, batch, splits=splits, sinks=torch.linspace(-2, 6, 6), **options)


def test_a_batch_of_one_is_split_by_itself() -> None:
    q, kv, batch = paged([(799, 1)], heads=2, kv_heads=1, dim=64, block=32, mark="decode")
    assert gpu.choose_splits(1, batch.max_kv_len, 132) == 2
    agrees(q, kv, batch)


LONG = [(3, 75), (20, 1), (0, 40), (64, 3), (0, 1)]


@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"window": 5}, {"window": 64}, {"soft_cap": 3.0, "window": 30}, {"scale": 1.7}]
)
def test_tiles_of_long_sequences_among_short_ones(options: dict[str, Any]) -> None:
    """Some sequences fill several tiles and start at any row; single rows and triples go with a launch of their own."""
    agrees(*paged(LONG, heads=4, kv_heads=2, dim=64), **options)


def test_sinks_in_tiles() -> None:
    agrees(*paged(LONG, heads=4, kv_heads=2, dim=64), sinks=torch.linspace(-2, 6, 4), window=30)


def test_without_lists_of_the_host() -> None:
    """As captured in a CUDA graph: which sequences are short is then found on the device."""
    q, kv, batch = paged(LONG, heads=4, kv_heads=2, dim=64)
    agrees(q, kv, replace(batch, row_starts_list=(), kv_lens_list=()))


def test_one_long_sequence() -> None:
    agrees(*paged([(10, 200)], heads=2, kv_heads=1, dim=32, block=128, mark="prefill"))


def test_window_blocks_may_be_gone() -> None:
    """Blocks that lie wholly behind the window point at the null block, which holds NaN here."""
    q, kv, batch = paged([(200, 3), (190, 1)])
    table = batch.block_tables[0].clone()
    table[0, : (200 - 8 + 1) // 8] = 0
    table[1, : (190 - 8 + 1) // 8] = 0
    agrees(q, kv, replace(batch, block_tables=(table,)), window=8)


def tree_batch() -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """One row at 9, and five draft rows on top of 133 kv indices: a -> (b -> d, c -> e)."""
    q, kv, batch = paged([(9, 1), (133, 5)])
    parents = [-1, 0, 0, 1, 2]
    mask, position = torch.zeros(6, 1, dtype=torch.int64), batch.position.clone()
    for node in range(5):
        bits, depth, at = 0, 0, node
        while at >= 0:
            bits, depth, at = bits | 1 << at, depth + 1, parents[at]
        mask[1 + node, 0] = bits
        position[1 + node] = 133 + depth - 1
    visible = torch.tensor([10, 133, 133, 133, 133, 133])
    starts = torch.tensor([0, 133])
    return q, kv, replace(batch, ancestor_mask=mask, tree_starts=starts, num_visible=visible, position=position)


@pytest.mark.parametrize("splits", [0, 4])
def test_tree(splits: int) -> None:
    for window in (0, 4, 2):
        agrees(*tree_batch(), splits=splits, window=window)


def test_tree_words_and_sign_bit() -> None:
    q, kv, batch = paged([(3, 130)], heads=2, kv_heads=1)
    mask = torch.zeros(130, 3, dtype=torch.int64)
    mask[5, 0] = torch.iinfo(torch.int64).min  # bit 63
    mask[129, :] = torch.tensor([5, -1, 2])
    agrees(q, kv, replace(batch, ancestor_mask=mask, tree_starts=torch.tensor([3]), num_visible=torch.full((130,), 3)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_slot_reaches_only_the_rows_that_see_it(value: float) -> None:
    q, kv, batch = tree_batch()
    clean = paged_attention(q, kv, batch, 0, scale=0.25)
    block = batch.block_tables[0][1, 136 // 8].long()
    kv[block, 1, :, 136 % 8] = value  # v of node d
    dirty = paged_attention(q, kv, batch, 0, scale=0.25)
    assert torch.equal(dirty[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])
    assert not bool(dirty[4].isfinite().any())
    kv[block, :, :, 136 % 8] = value
    assert torch.equal(paged_attention(q, kv, batch, 0, scale=0.25)[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("mark", ["decode", "mixed"])
@pytest.mark.parametrize("lists", [True, False])
def test_poisoned_padding_rows(mark: Any, lists: bool) -> None:
    """Padding after the last row holds NaN and nonsense; real rows stay bit-equal, padding comes out as zeros."""
    spans = [(30, 1), (4, 1), (90, 1)] if mark == "decode" else [(30, 1), (4, 40), (90, 2)]
    q, kv, batch = paged(spans, mark=mark)
    if not lists:
        batch = replace(batch, row_starts_list=(), kv_lens_list=())
    expected, expected_lse = paged_attention(q, kv, batch, 0, scale=0.25, return_lse=True)
    num_pad = 5
    nonsense = torch.full((num_pad,), 1 << 40)
    padded = replace(
        batch,
        seq=torch.cat([batch.seq, nonsense]),
        position=torch.cat([batch.position, -nonsense]),
        num_visible=torch.cat([batch.num_visible, nonsense]),
    )
    dirty = torch.cat([q, torch.full((num_pad, *q.shape[1:]), torch.nan)])
    out, lse = paged_attention(dirty, kv, padded, 0, scale=0.25, return_lse=True)
    assert torch.equal(out[: len(q)], expected) and torch.equal(lse[: len(q)], expected_lse)
    assert torch.equal(out[len(q) :], torch.zeros(num_pad, *q.shape[1:]))
    assert bool((lse[len(q) :] == -torch.inf).all())


def test_padding_sequences() -> None:
    """A padded batch may instead hold empty sequences, and sequences that see nothing."""
    q, kv, batch = paged([(30, 1), (4, 3)])
    more = replace(
        batch,
        seq=torch.cat([batch.seq, torch.tensor([2])]),
        position=torch.cat([batch.position, torch.tensor([0])]),
        num_visible=torch.cat([batch.num_visible, torch.tensor([0])]),
        block_tables=(torch.cat([batch.block_tables[0], torch.zeros(2, 4, dtype=torch.int32)]),),
        kv_lens=torch.tensor([31, 7, 0, 0]),
        row_starts=torch.tensor([0, 1, 4, 5, 5]),
        row_starts_list=(0, 1, 4, 5, 5),
        kv_lens_list=(31, 7, 0, 0),
    )
    out = paged_attention(torch.cat([q, q[:1] * torch.nan]), kv, more, 0, scale=0.25)
    assert torch.equal(out[:4], paged_attention(q, kv, batch, 0, scale=0.25))
    assert torch.equal(out[4], torch.zeros(6, 16))


def test_a_fixed_number_of_splits_knows_no_batch() -> None:
    spans = [(200, 1), (0, 1), (330, 1), (64, 1)]
    q, kv, batch = paged(spans, dim=64, block=16, mark="decode")
    together = gpu.paged_attention(q, kv, batch, 0, scale=0.125, num_splits=4)
    for seq in range(len(spans)):
        alone = replace(
            batch,
            seq=torch.zeros(1, dtype=torch.int64),
            position=batch.position[seq : seq + 1],
            num_visible=batch.num_visible[seq : seq + 1],
            block_tables=(batch.block_tables[0][seq : seq + 1],),
            kv_lens=batch.kv_lens[seq : seq + 1],
            row_starts=torch.tensor([0, 1]),
        )
        out = gpu.paged_attention(q[seq : seq + 1], kv, alone, 0, scale=0.125, num_splits=4)
        assert torch.equal(out[0], together[seq])


def test_strided_queries_and_three_axes() -> None:
    q, kv, batch = paged([(30, 1), (4, 2)])
    fused = torch.full((3, 10, 16), torch.nan)
    fused[:, :6] = q
    wide = replace(batch, position=torch.stack([batch.position, batch.position * 0, batch.position * 0]))
    options: dict[str, Any] = {"scale": 0.25, "window": 6}
    out = paged_attention(fused[:, :6], kv, wide, 0, **options)
    assert torch.equal(out, paged_attention(q, kv, batch, 0, **options))


def test_parts_of_a_context_merge() -> None:
    q, kv, batch = paged([(40, 3)])
    whole = paged_attention(q, kv, batch, 0, scale=0.25, return_lse=True)
    first = paged_attention(q, kv, replace(batch, num_visible=torch.full((3,), 24)), 0, scale=0.25, return_lse=True)
    rest = replace(
        batch,
        num_visible=batch.num_visible - 24,
        block_tables=(batch.block_tables[0][:, 3:],),
        kv_lens=batch.kv_lens - 24,
        max_kv_len=19,
    )
    merged = merge_lse(*first, *paged_attention(q, kv, rest, 0, scale=0.25, return_lse=True))
    for ours, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(ours, expected)


def test_no_rows() -> None:
    q, kv, batch = paged([(3, 1)])
    nothing = replace(batch, num_visible=batch.num_visible[:0], row_starts=torch.tensor([0, 0]))
    assert paged_attention(q[:0], kv, nothing, 0, scale=1.0).shape == (0, 6, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_plain_torch(dtype: torch.dtype) -> None:
    q, kv, batch = paged([(200, 1), (0, 20), (150, 2)], heads=9, kv_heads=3, dim=64, block=16, dtype=dtype)
    exact, _ = paged_attention_reference(q, kv, batch, 0, scale=0.125)
    ours = paged_attention(q, kv, batch, 0, scale=0.125)
    assert ours.dtype == dtype
    plain = torch.empty_like(q)
    for row in range(len(q)):
        seen = torch.arange(int(batch.num_visible[row]))
        blocks = batch.block_tables[0][batch.seq[row], seen // 16].long()
        k, v = kv[blocks, :, :, seen % 16].unbind(1)
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        weights = (torch.einsum("hd,lhd->hl", q[row], k) * 0.125).softmax(-1)
        plain[row] = torch.einsum("hl,lhd->hd", weights, v)
    assert (ours.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


def test_mixed_types() -> None:
    q, kv, batch = paged([(30, 2)], dtype=torch.bfloat16)
    agrees(q.float(), kv, batch)


# --------------------------------------------------------------------------------------------------- quantized caches


def quantized(kv: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """A cache of codes and scales with the same content; slots that hold nothing get codes and scales that are NaN."""
    top = kv.abs().amax(-1, keepdim=True)
    cache = torch.full((*kv.shape[:-1], width), -1, dtype=torch.int8)  # four such bytes are a NaN
    codes = (kv * (127 / top)).round().to(dtype) if dtype == torch.int8 else (kv * (448 / top)).to(dtype)
    filled = top[..., 0] == top[..., 0]
    cache[..., : kv.shape[-1]][filled] = codes.view(torch.int8)[filled]
    cache[..., -4:][filled] = (top / (127 if dtype == torch.int8 else 448)).view(torch.int8)[filled]
    return cache.view(dtype)


def dequantized(cache: torch.Tensor, dim: int) -> torch.Tensor:
    scale = cache.view(torch.int8)[..., -4:].contiguous().view(torch.float32)
    return cache[..., :dim].float() * scale


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize(("dim", "width"), [(64, 68), (80, 96)])
def test_quantized_cache(dtype: torch.dtype, dim: int, width: int) -> None:
    q, kv, batch = paged([(40, 1), (130, 2), (3, 20), (0, 1)], heads=6, kv_heads=2, dim=dim)
    cache = quantized(kv, dtype, width)
    values = dequantized(cache, dim)
    for window, splits in ((0, 2), (9, 0)):
        options: dict[str, Any] = {"scale": dim**-0.5, "window": window}
        out, lse = gpu.paged_attention(q, cache, batch, 0, num_splits=splits, return_lse=True, **options)
        expected, expected_lse = paged_attention_reference(q, values, batch, 0, **options)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=2e-5)
        # Against the cache before quantization: a scale for each token and head costs little.
        exact, _ = paged_attention_reference(q, kv, batch, 0, **options)
        assert (out.double() - exact).norm() / exact.norm() < (0.01 if dtype == torch.int8 else 0.04)


def test_quantized_cache_by_decode_and_bf16_queries() -> None:
    q, kv, batch = paged([(40, 1), (130, 1)], dim=64, mark="decode")
    q = q.bfloat16()
    cache = quantized(kv, torch.int8, 80)
    out = paged_attention(q, cache, batch, 0, scale=0.125)
    expected, _ = paged_attention_reference(q, dequantized(cache, 64), batch, 0, scale=0.125)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=8e-3)


# ------------------------------------------------------------------------------------------------------------ choices


def test_tiles_fit_the_shared_memory() -> None:
    for shared in (99 * 1024, 163 * 1024, 227 * 1024):
        for block_d in (16, 64, 128, 256):
            for q_bytes, kv_bytes in ((2, 2), (2, 1), (4, 4), (4, 1)):
                for lines in (16, 64, 128):
                    block_m, block_n, warps, stages = gpu.tile_shape(lines, block_d, q_bytes, kv_bytes, shared)
                    in_flight = stages // 2
                    assert block_m <= lines and 16 <= block_n <= 128 and warps in (4, 8) and stages in (3, 5)
                    needed = block_m * block_d * q_bytes + (in_flight + 1) * 2 * block_n * block_d * kv_bytes
                    assert needed <= shared


def test_splits_fill_the_machine_and_no_more() -> None:
    assert gpu.choose_splits(8, 32768, 132) == 32  # one sequence of 8 kv heads
    assert gpu.choose_splits(8, 600, 132) == 2  # short: merging would cost more
    assert gpu.choose_splits(512, 32768, 132) == 1
    for programs in range(1, 400, 7):
        splits = gpu.choose_splits(programs, 1 << 17, 132)
        assert splits & (splits - 1) == 0 and (splits == 1 or programs * splits <= 264)
