"""The attention doors: rows over a paged KV cache, and whole windows without one. They know rows, not phases.

Letters: R rows, S sequences, H query heads, K kv heads, D head dim, B blocks per table, T tokens per block, N pool
blocks.

A layer's cache is one tensor `kv` [N, 2, K, T, D] (k then v) of a float type; or int8 [N, 2, K, T, D + 4], each row D
integers and then the fp32 scale that turns them back. A row carries its scale, so whoever copies or ships rows, slots or
blocks need not know of it. (Rows padded to whole cache lines would cost what int8 saves.)

A *kv index* is an index into a sequence's cache slots;
its flat slot is block_table[kv_index // T] * T + kv_index % T. For ordinary rows kv index equals position; in a draft
tree several rows share a position but never a kv index. Block 0 is the null block: padding and skipped window blocks
point there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.nn.functional as F

from .dispatch import cpu_ops, gpu_ops

Mark = Literal["decode", "prefill", "mixed"]


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """Rows of one step. All tensors live on the model's device; index tensors are int64 unless said otherwise.

    seq          [R] index of the row's sequence in this batch
    position     [R], or [3, R] for models with three rotary axes
    slots        per group [R]: flat slot that receives the row's K and V; -1 = store nothing (padding)
    num_visible  [R] the row sees kv indices [0, num_visible) of its sequence (itself included unless a tree row)
    block_tables per group [S, B] int32
    kv_lens      [S] number of kv indices in use after this step, draft rows included
    row_starts   [S + 1] rows of sequence s are row_starts[s]..row_starts[s+1] (rows of a sequence are adjacent)
    ancestor_mask  optional [R, W] int64: bit j (of word j // 64) set = the row also sees kv index tree_starts[seq] + j
    tree_starts  optional [S]
    lora_slot    optional [R]
    mark         "decode": every sequence has one row and no tree; "prefill": one sequence; else "mixed"
    max_kv_len   largest of kv_lens, as an int, so that no kernel has to ask the device
    """

    seq: torch.Tensor
    position: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    num_visible: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    kv_lens: torch.Tensor
    row_starts: torch.Tensor
    mark: Mark
    max_kv_len: int
    block_size: int
    ancestor_mask: torch.Tensor | None = None
    tree_starts: torch.Tensor | None = None
    lora_slot: torch.Tensor | None = None
    row_starts_list: tuple[int, ...] = ()  # row_starts and kv_lens as ints, for kernels that loop on the host
    kv_lens_list: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------------------------------- cache

SCALE_BYTES = 4


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one cached row: an int8 row ends with the bytes of its fp32 scale."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [.., D] -> int8 [.., D + 4]: round(x * 127 / max |x|), halves to even, then the scale max |x| / 127 as fp32.

    A row with NaN or an infinity gets the scale NaN. Rows whose largest is below 1e-36 count as zeros.
    """
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    finite = top.isfinite()
    some = finite & (top > 1e-36)
    inverse = torch.where(some, torch.full_like(top, 127.0) / top, 0.0)  # 127.0 / top would multiply by a reciprocal
    scale = torch.where(some, top / 127.0, torch.where(finite, 0.0, torch.nan))
    integers = torch.where(finite, x * inverse, 0.0).round().to(torch.int8)
    return torch.cat([integers, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """Cached rows of any dtype as fp32 [.., D]."""
    if rows.dtype is not torch.int8:
        return rows.float()
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows[..., :-SCALE_BYTES] * scale


# ------------------------------------------------------------------------------------------------------------- store


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes k, v [R, K, D] into kv [N, 2, K, T, D] at flat slots [R] int64; a slot < 0 stores nothing.

    Two rows of one call never name the same slot (>= 0). k and v are cast to the cache's dtype, or quantized row by row
    where that is int8.
    """
    if k.is_cpu and (ops := cpu_ops()) is not None and ops.can_store(k, v, kv):
        ops.store_kv(k, v, kv, slots)
        return
    if (gpu := gpu_ops(k.device.type)) is not None and gpu.can_store(k, v, kv):
        gpu.store_kv(k, v, kv, slots)
        return
    if k.is_cpu and bool((slots < 0).any()):
        keep = (slots >= 0).nonzero()[:, 0]
        k, v, slots = k[keep], v[keep], slots[keep]
    elif not k.is_cpu:
        # Without a sync we cannot drop rows, so padding rows write into the null block, which is never read.
        slots = slots.clamp(min=0)
    num_tokens = kv.shape[3]
    block, token = slots // num_tokens, slots % num_tokens
    kv[block, 0, :, token] = quantize_rows(k) if kv.dtype is torch.int8 else k.to(kv.dtype)
    kv[block, 1, :, token] = quantize_rows(v) if kv.dtype is torch.int8 else v.to(kv.dtype)


def copy_slots(kvs: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, block_size: int) -> None:
    """Copies flat slots src [M] to dst [M] (int64) in every layer's kv [N, 2, K, T, D].

    All sources are read before the first write, so src and dst may overlap (a tree's accepted path is compacted so).
    """
    if len(kvs) and (gpu := gpu_ops(src.device.type)) is not None and gpu.can_copy(kvs):
        gpu.copy_slots(kvs, src, dst, block_size)
        return
    src_block, src_token = src // block_size, src % block_size
    dst_block, dst_token = dst // block_size, dst % block_size
    for kv in kvs:
        kv[dst_block, :, :, dst_token] = kv[src_block, :, :, src_token]


# --------------------------------------------------------------------------------------------------------- attention


@overload
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
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
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
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of rows q [R, H, D] over kv [N, 2, K, T, D]; query head h reads kv head h // (H / K).

    A row sees kv index i iff i < num_visible (and i > position - window where window > 0), plus its ancestor bits,
    which no window hides. `soft_cap` c > 0 turns a score s into c * tanh(s / c). `sinks` [H] fp32 join the softmax's
    denominator. A row that sees nothing gives 0. Slots that a row does not see never reach its output, not even NaN.

    Returns out [R, H, D] in q's dtype, and with `return_lse` also lse [R, H] fp32: the log of the softmax's
    denominator, sink included, -inf where there is nothing.
    """
    if q.is_cpu and (ops := cpu_ops()) is not None and ops.can_attend(q, kv):
        out, lse = ops.paged_attention(
            q,
            kv,
            batch.block_tables[group],
            batch.position,
            batch.num_visible,
            batch.row_starts,
            batch.ancestor_mask,
            batch.tree_starts,
            sinks,
            scale,
            window,
            soft_cap,
            return_lse,
        )
        return (out, lse) if return_lse else out
    if (gpu := gpu_ops(q.device.type)) is not None and gpu.can_attend(q, kv):
        return gpu.paged_attention(  # type: ignore[no-any-return]
            q,
            kv,
            batch,
            group,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            return_lse=return_lse,
        )
    out, lse = _attention_by_sequence(q, kv, batch, group, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return (out, lse) if return_lse else out


ROWS_AT_ONCE = 256  # bounds the score matrix of the torch path to H * 256 * kv_len fp32


def _attention_by_sequence(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    group: int,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch: gathers one sequence at a time, so that a row's numbers never depend on its batch mates."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads, num_tokens = kv.shape[2], kv.shape[3]
    per_kv = num_heads // num_kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((num_rows, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    starts = batch.row_starts_list or tuple(batch.row_starts.tolist())
    lengths = batch.kv_lens_list or tuple(batch.kv_lens.tolist())
    table = batch.block_tables[group]
    for seq, kv_len in enumerate(lengths):
        if kv_len == 0:
            continue
        num_blocks = (kv_len + num_tokens - 1) // num_tokens
        pages = dequantize_rows(kv[table[seq, :num_blocks].long()])  # [B, 2, K, T, D]
        pages = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, num_blocks * num_tokens, dim)
        keys, values = pages[:, :, :kv_len]  # each [K, L, D]
        for lo in range(starts[seq], starts[seq + 1], ROWS_AT_ONCE):
            rows = slice(lo, min(lo + ROWS_AT_ONCE, starts[seq + 1]))
            sees = _visible(batch, rows, kv_len, window)  # [n, L]
            n = sees.shape[0]
            queries = q[rows].float().view(n, num_kv_heads, per_kv, dim).transpose(0, 1)  # [K, n, G, D]
            scores = torch.matmul(queries.reshape(num_kv_heads, n * per_kv, dim), keys.transpose(1, 2))
            scores = scores.view(num_kv_heads, n, per_kv, kv_len) * scale
            if soft_cap:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            scores = scores.masked_fill(~sees[:, None, :], -torch.inf)
            if sinks is not None:
                sink = sinks.float().view(num_kv_heads, 1, per_kv, 1).expand(num_kv_heads, n, per_kv, 1)
                scores = torch.cat([scores, sink], dim=-1)
            part_lse = torch.logsumexp(scores, dim=-1)  # [K, n, G]
            # A row that sees nothing has lse -inf; -inf - -inf would be NaN, so such rows are shifted by 0 instead.
            shift = part_lse.masked_fill(part_lse == -torch.inf, 0.0)
            weights = torch.exp(scores[..., :kv_len] - shift[..., None])
            seen_values = values.masked_fill(~sees.any(0)[:, None], 0.0)  # 0 * NaN would leak
            mixed = torch.matmul(weights.view(num_kv_heads, n * per_kv, kv_len), seen_values)
            out[rows] = mixed.view(num_kv_heads, n, per_kv, dim).transpose(0, 1).reshape(n, num_heads, dim).to(q.dtype)
            lse[rows] = part_lse.transpose(0, 1).reshape(n, num_heads)
    return out, lse


def _visible(batch: PagedBatch, rows: slice, kv_len: int, window: int) -> torch.Tensor:
    """[n, kv_len] bool: which kv indices the rows see."""
    index = torch.arange(kv_len, device=batch.num_visible.device)
    sees = index < batch.num_visible[rows, None]
    if window > 0:
        position = batch.position if batch.position.dim() == 1 else batch.position[0]
        sees &= index > position[rows, None] - window
    if batch.ancestor_mask is not None and batch.tree_starts is not None:
        words = batch.ancestor_mask[rows]  # [n, W]
        bit = index - batch.tree_starts[batch.seq[rows]][:, None]  # [n, L]
        inside = (bit >= 0) & (bit < words.shape[1] * 64)
        bit = bit.clamp(0, words.shape[1] * 64 - 1)
        sees |= inside & ((words.gather(1, bit // 64) >> (bit % 64)) & 1).bool()
    return sees


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    group: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one row at a time in float64: out [R, H, D] and lse [R, H]. For tests."""
    num_rows, num_heads, dim = q.shape
    per_kv = num_heads // kv.shape[2]
    out = torch.zeros(num_rows, num_heads, dim, dtype=torch.float64)
    lse = torch.full((num_rows, num_heads), -torch.inf, dtype=torch.float64)
    for row in range(num_rows):
        seq = int(batch.seq[row])
        position = int(batch.position[row] if batch.position.dim() == 1 else batch.position[0, row])
        seen = {i for i in range(int(batch.num_visible[row])) if window == 0 or i > position - window}
        if batch.ancestor_mask is not None and batch.tree_starts is not None:
            for word, bits in enumerate(batch.ancestor_mask[row].tolist()):
                seen |= {int(batch.tree_starts[seq]) + word * 64 + bit for bit in range(64) if bits >> bit & 1}
        index = torch.tensor(sorted(seen), dtype=torch.int64)
        pages = batch.block_tables[group][seq, index // batch.block_size].long()
        keys, values = (
            dequantize_rows(kv[pages, :, :, index % batch.block_size]).double().repeat_interleave(per_kv, 2).unbind(1)
        )  # [L, H, D]
        scores = scale * torch.einsum("hd,lhd->hl", q[row].double(), keys)
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)  # joins the denominator, has no value
        if scores.shape[1]:
            lse[row] = scores.logsumexp(1)
            out[row] = torch.einsum("hl,lhd->hd", (scores - lse[row, :, None]).exp()[:, : len(index)], values)
    return out, lse


def merge_lse(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over two disjoint sets of kv indices: outs [R, H, D], lses [R, H] fp32. A part may be empty.

    Sinks belong to one part only, else they count twice.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift)[..., None], torch.exp(lse_b - shift)[..., None]
    # An empty part may hold anything in its out rows; 0 * NaN must not leak.
    part_a = torch.where(weight_a > 0, out_a.float() * weight_a, 0.0)
    part_b = torch.where(weight_b > 0, out_b.float() * weight_b, 0.0)
    return (part_a + part_b).to(out_a.dtype), lse


# ------------------------------------------------------------------------------------------------------------- dense


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, length: int | None = None
) -> torch.Tensor:
    """Every row of a window sees every row of it: q, k, v [B, T, H, D], views are welcome -> [B, T, H * D].

    For encoders. Scale is above 0. With `length` only the first `length` rows of each window count: the others are
    never read, not even NaN, and give 0. On a CPU with our kernels a row's numbers depend neither on the other windows
    nor on the number of threads.
    """
    if length is not None and length < q.shape[1]:
        seen = dense_attention(q[:, :length], k[:, :length], v[:, :length], scale=scale)
        return F.pad(seen, (0, 0, 0, q.shape[1] - length))
    num_windows, num_rows, num_heads, dim = q.shape
    ops = cpu_ops() if q.is_cpu and q.numel() else None
    if ops is not None and not _torch_is_faster(q.dtype):
        if ops.can_attend_dense(q, k, v):
            return ops.dense_attention(q, k, v, scale)  # type: ignore[no-any-return]
        kv = torch.stack((k, v), dim=1).transpose(2, 3)  # a window is one block of a cache
        if ops.can_attend(q, kv):
            batch = _whole_windows(num_windows, num_rows)
            return paged_attention(q.flatten(0, 1), kv, batch, 0, scale=scale).view(num_windows, num_rows, -1)
    if q.is_cuda and (gpu := gpu_ops("cuda")) is not None and (found := gpu.dense(q, k, v, scale=scale)) is not None:
        return found.flatten(2)  # type: ignore[no-any-return]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return mixed.transpose(1, 2).reshape(num_windows, num_rows, num_heads * dim)


@functools.cache
def _torch_is_faster(dtype: torch.dtype) -> bool:
    """Where the CPU has matrix tiles (AMX) torch's attention is the faster one, else half as fast as ours, or less."""
    return dtype is torch.bfloat16 and bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


@functools.lru_cache(maxsize=64)
def _whole_windows(num_windows: int, num_rows: int) -> PagedBatch:
    """Windows of one block each, all of whose rows see all of it. On the CPU."""
    visible = torch.full((num_windows * num_rows,), num_rows)
    return PagedBatch(
        seq=torch.arange(num_windows).repeat_interleave(num_rows),
        position=visible - 1,
        slots=(),
        num_visible=visible,
        block_tables=(torch.arange(num_windows, dtype=torch.int32)[:, None],),
        kv_lens=torch.full((num_windows,), num_rows),
        row_starts=torch.arange(num_windows + 1) * num_rows,
        mark="prefill" if num_windows == 1 else "mixed",
        max_kv_len=num_rows,
        block_size=num_rows,
    )


def dense_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """The definition in float64: q, k, v [B, T, H, D] -> [B, T, H * D]. For tests."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).flatten(2)
