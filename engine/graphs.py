"""Decode steps at padded sizes: the same tensors at the same addresses each time, so that a step can be a CUDA graph.

A step in which every sequence has one row is padded to the next size with rows that belong to nobody, and replayed from
a recording of that size. Prefill, mixed and verifying steps, and more rows than the largest size, are run as they come.

What makes padding harmless, each held by a test that poisons it:
- a padding row stores nothing (its slot is -1: every store kernel masks it, so the null block stays clean too),
- it sees one position of a page of its own that nobody writes and that is zero: a softmax over nothing would be NaN,
- rows that a larger step left behind are made padding again before a smaller one runs,
- only the real rows leave, and nothing in a model looks across rows.

`record` turns a call into its replay. On CUDA it captures (kernels/gpu/graph.py); `as_it_is` replays by calling again,
which runs the padded path anywhere, and is how it is tested. What this file does not know: models, plans, requests.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.attention import PagedBatch

log = logging.getLogger("motet.engine")

Step = Callable[[torch.Tensor, PagedBatch], torch.Tensor]
Record = Callable[[Callable[[], object]], Callable[[], object]]


def as_it_is(call: Callable[[], object]) -> Callable[[], object]:
    """No recording: a replay is the call itself."""
    return call


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Row counts that are recorded: 1, 2, 4, then every 8 up to 64, 16 up to 128, 32 beyond; the last is `largest`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, largest + 1, 32)]
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


@dataclass(frozen=True, kw_only=True)
class BatchKey:
    """What a recording is good for."""

    num_rows: int  # padded
    uniform_decode: bool = True  # one row for each sequence; nothing else is recorded


class PaddedInputs:
    """The tensors that recordings read, as long as the largest size; smaller sizes are their first rows."""

    def __init__(
        self,
        largest: int,
        *,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        dummy_block: int,
        max_kv_len: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._max_kv_len = max_kv_len
        self.dummy_block = dummy_block
        make = {"dtype": torch.int64, "device": device}
        self.ids = torch.zeros(largest, **make)  # type: ignore[call-overload]
        self.position = torch.zeros(largest, **make)  # type: ignore[call-overload]
        self.num_visible = torch.ones(largest, **make)  # type: ignore[call-overload]
        self.slots = [torch.full((largest,), -1, **make) for _ in range(num_groups)]  # type: ignore[call-overload]
        self.tables = [
            torch.full((largest, max_blocks), dummy_block, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._counting = torch.arange(largest + 1, device=device)
        self._num_used = 0  # rows beyond are padding

    def batch(self, size: int) -> PagedBatch:
        """The batch of the first `size` rows. Its tensors are views: what `fill` writes, it shows."""
        return PagedBatch(
            seq=self._counting[:size],
            position=self.position[:size],
            slots=tuple(slots[:size] for slots in self.slots),
            num_visible=self.num_visible[:size],
            block_tables=tuple(table[:size] for table in self.tables),
            kv_lens=self.num_visible[:size],  # the same numbers where a sequence has one row
            row_starts=self._counting[: size + 1],
            mark="decode",
            # No ints that a kernel could bake into a recording, but for the longest context there can be.
            max_kv_len=self._max_kv_len,
            block_size=self._block_size,
        )

    def fill(self, ids: torch.Tensor, batch: PagedBatch) -> None:
        """Take the rows of `batch` [R]; rows left by a larger step become padding. Queues copies, waits for nothing."""
        n, used = ids.shape[0], self._num_used
        if used > n:
            for tensor, padding in (
                (self.ids, 0),
                (self.position, 0),
                (self.num_visible, 1),
                *((slots, -1) for slots in self.slots),
                *((table, self.dummy_block) for table in self.tables),
            ):
                tensor[n:used].fill_(padding)
        wide = [self.ids, self.position, self.num_visible, *self.slots]
        given = [ids, batch.position, batch.num_visible, *batch.slots]
        torch._foreach_copy_([tensor[:n] for tensor in wide], given, non_blocking=True)
        for table, blocks in zip(self.tables, batch.block_tables, strict=True):
            table[:n, : blocks.shape[1]].copy_(blocks, non_blocking=True)
        self._num_used = n


class StepGraphs:
    """Replays of padded decode steps. `step(ids [R], batch) -> hidden [R, E]` is what gets recorded; one thread."""

    def __init__(
        self,
        step: Step,
        inputs: PaddedInputs,
        *,
        sizes: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        record: Record,
    ) -> None:
        self.sizes = tuple(sorted(sizes))
        self.why_not = ""  # why steps run eagerly, once recording has failed
        self._step = step
        self._inputs = inputs
        self._record = record
        self._out = torch.zeros(self.sizes[-1], hidden_size, dtype=dtype, device=device)
        self._replays: dict[BatchKey, Callable[[], object]] = {}

    def capture(self) -> None:
        """Record every size, the largest first, so that the smaller ones fit its memory.

        Where that fails nothing is lost but speed: it is said once, and steps run eagerly from then on.
        """
        try:
            for size in reversed(self.sizes):
                self._replays[BatchKey(num_rows=size)] = self._record(self._call(size))
        except Exception as error:  # whatever a driver or a model's code objects to
            self._replays.clear()
            self.why_not = f"{type(error).__name__}: {error}"
            log.warning("decode steps are not recorded as CUDA graphs and run eagerly: %s", self.why_not)

    def key(self, batch: PagedBatch) -> BatchKey | None:
        """The recording that serves this batch; None: run it as it comes."""
        num_rows = batch.seq.shape[0]
        if batch.mark != "decode" or batch.position.dim() != 1 or not 0 < num_rows <= self.sizes[-1]:
            return None
        if batch.lora_slot is not None or batch.ancestor_mask is not None:
            return None
        key = BatchKey(num_rows=self.sizes[bisect.bisect_left(self.sizes, num_rows)])
        return key if key in self._replays else None

    def run(self, ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor | None:
        """Hidden rows [R, E], valid until the next call; None where no recording serves the batch."""
        key = self.key(batch)
        if key is None:
            return None
        self._inputs.fill(ids, batch)
        self._replays[key]()
        return self._out[: ids.shape[0]]

    def _call(self, size: int) -> Callable[[], object]:
        ids, batch, out = self._inputs.ids[:size], self._inputs.batch(size), self._out[:size]
        return lambda: out.copy_(self._step(ids, batch))
