"""Paged attention on a GPU: which tiles, how many splits, and the launches of attention_kernel.py.

All choices are tables and arithmetic on shapes, none is measured at run time: an autotuner would run inside CUDA graph
capture, and would let two runs choose differently. Figures are for Hopper (132 multiprocessors, 227 KiB of shared
memory each); smaller GPUs get fewer stages. Not run on a GPU yet: the figures are estimates from bytes and registers.

Under CUDA graphs a captured launch is right for other lengths too: splits are shares of each row's own context, cut on
the device. What is decided on the host is the number of splits (from the batch size and `max_kv_len`; speed only) and,
in a batch that is neither "decode" nor without `row_starts_list`, which kinds of sequences there are: capture those
without the list.
"""

from __future__ import annotations

import functools

import torch
import triton

from ..attention import PagedBatch
from . import libraries
from .attention_kernel import BY_ROW, BY_SEQUENCE, BY_TILE, attention_kernel, merge_kernel
from .cache import is_quantized
from .rounding import INTERPRETED, dot_dtype

# Lines (rows times heads of a kv head) of a tile that holds all rows of a sequence: decode and verification. Such tiles
# are bound by memory, so the unused lines of a half-empty tile cost nothing that counts.
SHORT_LINES = 64
# A split shorter than this costs more in merging than it saves.
MIN_SPLIT = 256
MAX_SPLITS = 64


@functools.cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory a program may have)."""
    if INTERPRETED and device.type == "cpu":
        return 132, 227 * 1024
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, int(getattr(found, "shared_memory_per_block_optin", 99 * 1024))


@functools.cache
def tile_shape(lines: int, block_d: int, q_bytes: int, kv_bytes: int, shared: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages) for at least `lines` lines; bytes are those of one number.

    BLOCK_N so that K and V of one block are 32 KiB at 16 bits: two blocks in flight per program more than cover Hopper's
    latency times bandwidth (about 22 KiB a multiprocessor). Two blocks in flight take five stages of Triton's pipeline,
    since the block table is read two stages ahead of K and V. Scores [BLOCK_M, BLOCK_N] and accumulator
    [BLOCK_M, block_d] in fp32 are to leave half of the registers (255 a thread) to the rest: 64 x 128 on four warps,
    128 x 128 on eight. fp32 has no tensor cores behind "ieee" products, so its tiles are small to fit registers.
    """
    wide = q_bytes == 4
    block_n = min(128, max(16, (2048 if wide else 8192) // block_d))
    if kv_bytes == 1 and not wide and lines <= 16:  # as many bytes; larger tiles have no registers for it
        block_n = min(128, 2 * block_n)
    block_m = lines
    if wide:
        block_m = min(lines, max(16, 4096 // block_d))
    elif block_d > 128:
        block_m = min(lines, 64)
    warps = 8 if block_m * max(block_d, block_n) > 64 * 128 else 4
    taken = block_m * block_d * q_bytes
    block_bytes = 2 * block_n * block_d * kv_bytes
    in_flight = max(1, min(2, (shared - taken) // block_bytes - 1))  # one more is in use
    return block_m, block_n, warps, 2 * in_flight + 1


def choose_splits(num_programs: int, max_kv_len: int, multiprocessors: int) -> int:
    """Into how many parts (a power of two) a context is cut so that `num_programs` tiles fill the GPU twice."""
    wanted = min(2 * multiprocessors // max(num_programs, 1), max_kv_len // MIN_SPLIT, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    group: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kernels.attention.paged_attention`; the cache may be FP8 or INT8 (cache.py).

    `num_splits` (a power of two; 0: chosen) cuts the context of rows that come few to a sequence. With a fixed number
    such a row's result does not depend on how many sequences there are.
    """
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if not num_splits:
        found = libraries.decode(q, kv, batch, group, **options, return_lse=return_lse)  # type: ignore[arg-type]
        if found is not None:
            return found
    num_rows, num_heads, dim = q.shape
    per_kv, num_seqs = num_heads // kv.shape[2], batch.kv_lens.shape[0]
    out = torch.empty((num_rows, num_heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
    launch = functools.partial(_launch, q, kv, batch, group, out, lse, **options)  # type: ignore[arg-type]
    if not num_rows:
        pass
    elif batch.mark == "decode":
        launch(KIND=BY_ROW.value, tiles=num_rows, lines=per_kv, num_splits=num_splits)
    else:
        short = max(1, SHORT_LINES // per_kv)  # rows of a sequence that fit one tile
        counts = [end - start for start, end in zip(batch.row_starts_list, batch.row_starts_list[1:], strict=False)]
        few = max((count for count in counts if count <= short), default=0) if counts else short
        many = max(counts) > short if counts else True
        padded = not counts or batch.row_starts_list[-1] < num_rows
        if few:
            launch(KIND=BY_SEQUENCE.value, tiles=num_seqs, lines=few * per_kv, num_splits=num_splits)
        if many or padded:
            launch(KIND=BY_TILE.value, tiles=0, lines=128, num_splits=1, skip=short if few else 0)
    return (out, lse) if return_lse else out


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    group: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    KIND: int,
    tiles: int,
    lines: int,
    num_splits: int,
    skip: int = 0,
) -> None:
    num_rows, num_heads, dim = q.shape
    num_kv_heads = kv.shape[2]
    per_kv, num_seqs = num_heads // num_kv_heads, batch.kv_lens.shape[0]
    multiprocessors, shared = _device_limits(q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    lines = max(16, triton.next_power_of_2(lines))
    block_m, block_n, warps, stages = tile_shape(lines, block_d, q.element_size(), kv.element_size(), shared)
    if KIND != BY_TILE.value:  # such a tile must hold what it was given
        block_m = lines
    block_m = max(block_m, triton.next_power_of_2(per_kv))
    queries = 1 if KIND == BY_ROW.value else block_m // per_kv
    if KIND == BY_TILE.value:
        tiles = num_rows // queries + num_seqs + 1
    splits = num_splits or choose_splits(tiles * num_kv_heads, batch.max_kv_len, multiprocessors)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty((tiles * queries, num_heads, splits, dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((tiles * queries, num_heads, splits), dtype=torch.float32, device=q.device)
    position = batch.position if batch.position.dim() == 1 else batch.position[0]
    table, ancestors = batch.block_tables[group], batch.ancestor_mask
    tree = ancestors is not None and batch.tree_starts is not None
    attention_kernel[(tiles, num_kv_heads, splits)](
        q, kv, out, lse, parts, part_lse, table, batch.seq, position, batch.num_visible, batch.row_starts,
        batch.kv_lens, ancestors if tree else batch.seq, batch.tree_starts if tree else batch.seq,
        lse if sinks is None else sinks,
        num_rows, num_seqs, scale, soft_cap, window, skip, q.stride(0), q.stride(1), *kv.stride()[:4],
        table.stride(0), ancestors.stride(0) if ancestors is not None and tree else 0,
        KIND=KIND, QUERIES=queries, SPLITS=splits, G=per_kv, KV_HEADS=num_kv_heads, DIM=dim, WIDTH=kv.shape[4],
        NUM_TOKENS=kv.shape[3], QUANTIZED=is_quantized(kv), WINDOW=window > 0, SOFT_CAP=soft_cap > 0, TREE=tree,
        WORDS=ancestors.shape[1] if ancestors is not None and tree else 1, SINKS=sinks is not None,
        DOT=dot_dtype(q.dtype), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tiles * queries, num_heads)](
            parts, part_lse, out, lse, batch.row_starts, lse if sinks is None else sinks,
            KIND=KIND, QUERIES=queries, SPLITS=splits, HEADS=num_heads, DIM=dim, SINKS=sinks is not None,
            BLOCK_D=block_d, num_warps=2,
        )  # fmt: skip
