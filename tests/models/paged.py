"""Builds `PagedBatch`es for tests: sequences in pages strewn over the pool, fed in any chunks.

`PagedSequences` plays the engine's part: it hands out blocks at random, knows how far each sequence has come, and runs
a model over chunks of ids. Unused cache slots hold NaN, so that anything that reads them shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from motet.kernels.attention import PagedBatch
from motet.models.spec import KVSpec


class PagedSequences:
    """Caches and block tables for `num_sequences` sequences of at most `max_tokens` tokens, for one model."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_sequences: int,
        max_tokens: int,
        *,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        kinds = list(dict.fromkeys(specs))  # equal specs share a group, as in the engine
        self.groups = [kinds.index(spec) for spec in specs]
        num_blocks = -(-max_tokens // block_size)
        total = num_sequences * num_blocks + 1
        rng = random.Random(seed)
        self.tables = []
        for _ in kinds:
            blocks = rng.sample(range(1, total), num_sequences * num_blocks)
            self.tables.append([blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(num_sequences)])
        self.kvs = [
            torch.full((total, 2, spec.num_kv_heads, block_size, spec.head_dim), float("nan"), dtype=dtype)
            for spec in specs
        ]
        self.num_computed = [0] * num_sequences

    def batch(self, chunks: Sequence[tuple[int, int]]) -> PagedBatch:
        """A batch in which sequence `i` computes its next `n` tokens, for each (i, n) of `chunks`."""
        seq, position, starts, lens = [], [], [0], []
        slots: list[list[int]] = [[] for _ in self.tables]
        for row, (index, count) in enumerate(chunks):
            first = self.num_computed[index]
            for p in range(first, first + count):
                seq.append(row)
                position.append(p)
                for group, table in zip(slots, self.tables, strict=True):
                    group.append(table[index][p // self.block_size] * self.block_size + p % self.block_size)
            starts.append(len(seq))
            lens.append(first + count)
            self.num_computed[index] = first + count
        decode = all(count == 1 for _, count in chunks)
        return PagedBatch(
            seq=torch.tensor(seq),
            position=torch.tensor(position),
            slots=tuple(torch.tensor(group) for group in slots),
            num_visible=torch.tensor(position) + 1,
            block_tables=tuple(torch.tensor([table[i] for i, _ in chunks], dtype=torch.int32) for table in self.tables),
            kv_lens=torch.tensor(lens),
            row_starts=torch.tensor(starts),
            mark="decode" if decode else "prefill" if len(chunks) == 1 else "mixed",
            max_kv_len=max(lens),
            block_size=self.block_size,
            row_starts_list=tuple(starts),
            kv_lens_list=tuple(lens),
        )

    def run(self, model: Any, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Feed the next ids of some sequences in one step; logits [n, V] of every fed row, per chunk."""
        batch = self.batch([(index, len(ids)) for index, ids in chunks])
        with torch.inference_mode():
            hidden = model.embed(torch.tensor([i for _, ids in chunks for i in ids]))
            logits = model.logits(model.forward(hidden, batch, self.kvs, self.groups))
        return list(logits.split([len(ids) for _, ids in chunks]))
