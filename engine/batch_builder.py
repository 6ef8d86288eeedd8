"""From a plan's integers to the index arrays of a `PagedBatch`: positions, cache slots, visibility, draft masks.

Mechanism without queues. Works on numpy arrays; the runner moves them to its device in one go. A step in which every
sequence has one row (`is_plain_decode`) is filled into tensors that are kept for it: `DecodeInputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.attention import PagedBatch
from .types import SequenceStep

Ints = npt.NDArray[np.int64]


@dataclass(kw_only=True)
class Rows:
    """One step's rows. Letters as in kernels/attention.py; `kv_index` is the row's index among its sequence's cache slots."""

    slot: Ints  # [S] batch slot of each sequence
    seq: Ints  # [R]
    kv_index: Ints  # [R]
    position: Ints  # [R]
    num_visible: Ints  # [R]
    kv_lens: Ints  # [S]
    row_starts: Ints  # [S + 1]
    ancestor_mask: Ints | None = None  # [R, W]
    tree_starts: Ints | None = None  # [S]


def is_plain_decode(steps: Sequence[SequenceStep]) -> bool:
    """Whether every sequence has one row and no drafts."""
    return all(step.num_tokens == 1 and not step.drafts for step in steps)


class DecodeInputs:
    """Ids and batch of plain decode steps on a CPU, in tensors that the next such step overwrites.

    `tables` (per group, [slots, blocks] int32) and `tokens` ([slots, positions] int64) are the runner's own, read here.
    """

    def __init__(self, tables: Sequence[npt.NDArray[np.int32]], tokens: torch.Tensor, block_size: int) -> None:
        num_slots = len(tokens)
        self.tokens: Ints = tokens.numpy()  # the same memory
        self._tables = tables
        self._block_size = block_size
        # One row per index array: ids, kv index (= position), kv index + 1, then the cache slots of each group.
        self._rows = torch.zeros(3 + len(tables), num_slots, dtype=torch.int64)
        self._numpy: Ints = self._rows.numpy()
        self._counting = torch.arange(num_slots + 1)
        self._starts = tuple(range(num_slots + 1))

    def fill(self, slots: list[int], starts: list[int]) -> tuple[torch.Tensor, PagedBatch]:
        """Ids [S] and the batch for one row at `starts` of each of `slots`. Valid until the next call."""
        n, size = len(slots), self._block_size
        rows = self._numpy[:, :n]
        slot, kv_index = np.array(slots, np.int64), np.array(starts, np.int64)
        rows[0] = self.tokens[slot, kv_index]
        rows[1] = kv_index
        np.add(kv_index, 1, out=rows[2])
        block = kv_index // size
        offset = kv_index - block * size
        longest = max(starts) + 1
        width = -(-longest // size)
        tables = []
        for group, table in enumerate(self._tables):
            np.multiply(table[slot, block], size, out=rows[3 + group], dtype=np.int64)
            rows[3 + group] += offset
            own = table[slots[0] : slots[0] + 1, :width] if n == 1 else table[slot, :width]
            tables.append(torch.from_numpy(own))
        ids, kv_indices, visible, *cache_slots = self._rows[:, :n].unbind(0)
        batch = PagedBatch(
            seq=self._counting[:n],
            position=kv_indices,
            slots=tuple(cache_slots),
            num_visible=visible,
            block_tables=tuple(tables),
            kv_lens=visible,
            row_starts=self._counting[: n + 1],
            mark="decode",
            max_kv_len=longest,
            block_size=size,
            row_starts_list=self._starts[: n + 1],
            kv_lens_list=tuple(start + 1 for start in starts),
        )
        return ids, batch


def is_chain(parents: Sequence[int]) -> bool:
    """A chain needs no mask: its rows see just what came before them."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each draft below the last known token (1 = its child). Parents come before children."""
    result: list[int] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise ValueError(f"draft {index}: expected a parent in -1..{index - 1}, got {parent}")
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def build_rows(steps: Sequence[SequenceStep]) -> Rows:
    """Rows of a step's sequences, in the steps' order; a sequence's known tokens first, its drafts after them."""
    num_seqs = len(steps)
    slot = np.fromiter((step.slot for step in steps), np.int64, num_seqs)
    start = np.fromiter((step.start for step in steps), np.int64, num_seqs)
    count = np.fromiter((step.num_tokens + len(step.drafts) for step in steps), np.int64, num_seqs)
    row_starts = np.zeros(num_seqs + 1, np.int64)
    np.cumsum(count, out=row_starts[1:])
    seq = np.repeat(np.arange(num_seqs), count)
    kv_index = np.arange(row_starts[-1]) - np.repeat(row_starts[:-1] - start, count)
    rows = Rows(
        slot=slot,
        seq=seq,
        kv_index=kv_index,
        position=kv_index,
        num_visible=kv_index + 1,
        kv_lens=start + count,
        row_starts=row_starts,
    )
    trees = [index for index, step in enumerate(steps) if step.drafts and not is_chain(step.parents)]
    if trees:
        _add_trees(rows, steps, trees)
    return rows


def _add_trees(rows: Rows, steps: Sequence[SequenceStep], trees: Sequence[int]) -> None:
    """Draft rows of a tree sit at their depth, see the known tokens and, by mask, their ancestors and themselves."""
    num_words = max(-(-len(steps[index].drafts) // 64) for index in trees)
    mask = np.zeros((len(rows.seq), num_words), np.uint64)
    rows.position = rows.kv_index.copy()
    rows.tree_starts = np.fromiter((step.start + step.num_tokens for step in steps), np.int64, len(steps))
    for index in trees:
        step = steps[index]
        base = int(rows.row_starts[index]) + step.num_tokens
        known = step.start + step.num_tokens
        for draft, (parent, depth) in enumerate(zip(step.parents, depths(step.parents), strict=True)):
            row = base + draft
            rows.position[row] = known - 1 + depth
            rows.num_visible[row] = known
            if parent >= 0:
                mask[row] = mask[base + parent]
            mask[row, draft // 64] |= np.uint64(1 << (draft % 64))
    rows.ancestor_mask = mask.view(np.int64)


def accept(drafts: Sequence[int], parents: Sequence[int], samples: Sequence[int]) -> list[int]:
    """The nodes whose samples are emitted: 0 is the last known token, i + 1 is draft i.

    `samples[node]` is the target's own sample after that node. From the root, go on while a child equals the sample.
    """
    path = [0]
    while True:
        node, wanted = path[-1], samples[path[-1]]
        child = next((i for i, p in enumerate(parents) if p == node - 1 and drafts[i] == wanted), None)
        if child is None:
            return path
        path.append(child + 1)
