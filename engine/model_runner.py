"""The runner: turns a plan into tensors, runs the model, samples. Mechanism without queues; it decides nothing.

It keeps, per slot, the tokens, the block tables and the sampling state, and owns the KV cache. A token that it samples is
written to its own token table at once, so that the next plan can be launched before anybody has seen this one's result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from ..kernels.attention import Mark, PagedBatch, copy_slots, row_width
from ..kernels.sampling import sample, token_logprobs
from .allocator import BlocksAhead
from .batch_builder import DecodeInputs, Rows, accept, build_rows, depths, is_plain_decode
from .blobs import from_blob, to_blob
from .cache.manager import KVGroup
from .errors import ErrorInfo, InvalidRequest
from .graphs import PaddedInputs, StepGraphs, as_it_is, padded_sizes
from .logit_rows import RowParameters, SlotState, edit_logits, edit_together
from .side_ids import MultiCodebook, SideTable
from .transfers import CudaTransfers, Readback, StagedInputs
from .types import Blob, NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult, TokenLogprob


class Model(Protocol):
    """What the runner asks of a network. R rows, n logit rows, E hidden size, V vocabulary."""

    def embed(self, ids: torch.Tensor, side: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor: ...
    def forward(
        self, hidden: torch.Tensor, batch: PagedBatch, kvs: Sequence[torch.Tensor], groups: Sequence[int]
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class PartModel(Protocol):
    """A network through which rows can pass a few layers at a time."""

    @property
    def part_layers(self) -> int: ...
    def forward_part(
        self,
        hidden: torch.Tensor,
        batch: PagedBatch,
        kvs: Sequence[torch.Tensor],
        groups: Sequence[int],
        *,
        layers: tuple[int, int],
        stream: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(kw_only=True)
class _Sampled:
    """Where a sequence's sampled rows lie: `first` is the row of its last known token, drafts follow."""

    step: SequenceStep
    state: SlotState
    first: int  # index among the sampled rows
    num_rows: int


class Pending:
    """A launched step. `result()` waits for it; call it once, in launch order."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish = finish

    def result(self) -> StepResult:
        return self._finish()


class ModelRunner:
    """Runs plans for one model on one device. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: Model,
        *,
        groups: Sequence[KVGroup],
        num_layers: int,
        kv_shape: tuple[int, int],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`kv_shape` is (kv heads of this shard, head dim); `agree` makes sampled ids equal on all ranks.

        `kv_dtype` None is `dtype`; int8 is a cache with scales (kernels/attention.py).
        """
        self.model = model
        self.block_size = block_size
        self.device = device
        self.dtype = dtype
        self.eos_ids = eos_ids
        self._agree = agree
        num_heads, head_dim = kv_shape
        kv_dtype = kv_dtype or dtype
        per_group = max((len(group.layers) for group in groups), default=0)
        pages = [
            # One page more than is ever handed out: padding rows see it, nobody writes it.
            _zeros((num_blocks + 1, 2, num_heads, block_size, row_width(head_dim, kv_dtype)), kv_dtype, device)
            for _ in range(per_group)
        ]
        self.pages = pages
        layer_page: dict[int, tuple[int, int]] = {}  # layer -> (group, page)
        for index, group in enumerate(groups):
            for page, layer in enumerate(group.layers):
                layer_page[layer] = (index, page)
        nothing = torch.empty(0, device=device)  # for layers without a cache
        self.kvs = [pages[layer_page[i][1]] if i in layer_page else nothing for i in range(num_layers)]
        self.layer_groups = [layer_page[i][0] if i in layer_page else 0 for i in range(num_layers)]
        max_blocks = -(-max_model_len // block_size) + 8  # draft trees may reach past the last position
        self._tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in groups]
        self._tokens = torch.zeros(max_num_seqs, max_model_len + 8 * block_size, dtype=torch.int64, device=device)
        self._slots: dict[int, SlotState] = {}
        self._parameters = RowParameters(device)
        self.graphs: StepGraphs | None = None  # made by `pad_steps`
        self.blocks_ahead: BlocksAhead | None = None  # on a CPU, by whoever knows how much memory was taken at first
        self._highest_block = 0
        self._max_model_len = max_model_len
        transfers = CudaTransfers(device) if device.type == "cuda" else None
        self._staged = StagedInputs(transfers) if transfers is not None else None
        self._readback = Readback(transfers) if transfers is not None else None
        self._decode_inputs = DecodeInputs(self._tables, self._tokens, block_size) if device.type == "cpu" else None
        # Of a model with several codebooks alone; everywhere else None, and nothing is done for it.
        self._side_table = SideTable(model, self._tokens, self._to_device) if isinstance(model, MultiCodebook) else None

    # --------------------------------------------------------------------------------------------------- plans

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a plan. On CPU everything is done on return; on CUDA only the queueing is."""
        if self._staged is None:
            return self._launch(plan)
        with self._staged.step():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Pending:
        started = time.perf_counter()
        for slot in plan.release:
            self._slots.pop(slot, None)
        for new in plan.new:
            self._enter(new)
        if not plan.steps:
            return Pending(lambda: StepResult(step=plan.step))
        for step in plan.steps:
            self._extend(step)
        whole = [step for step in plan.steps if step.layers is None]
        hidden, row_starts = self._pass(whole) if whole else (None, (0,))
        for step in plan.steps:
            if step.layers is not None:
                rows = self._pass_part(step, step.layers)
                if step.sample:
                    whole.append(step)
                    hidden = rows if hidden is None else torch.cat((hidden, rows))
                    row_starts = (*row_starts, row_starts[-1] + step.num_tokens)
        finish = self._finish(plan, whole, row_starts, hidden)
        if self.blocks_ahead is not None:
            self.blocks_ahead.used(self._highest_block)

        def result() -> StepResult:
            done = finish()
            done.seconds = time.perf_counter() - started
            return done

        return Pending(result)

    def _pass(self, steps: Sequence[SequenceStep]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Hidden rows [R, E] of steps through all layers, and where each step's begin, R at the end."""
        ids, batch, side = self.inputs(steps)
        hidden = self.graphs.run(ids, batch) if self.graphs is not None and side is None else None
        if hidden is None and self._side_table is not None:
            embedded = self._side_table.embed(ids, side, steps)
            hidden = self.model.forward(embedded, batch, self.kvs, self.layer_groups)
        elif hidden is None:
            hidden = self._forward(ids, batch, side)
        return hidden, batch.row_starts_list

    def _pass_part(self, step: SequenceStep, layers: tuple[int, int]) -> torch.Tensor:
        """Rows [n, E] of one step through some layers; those of the last are hidden rows."""
        model, state = cast(PartModel, self.model), self._slots[step.slot]
        ids, batch, side = self.inputs([step])
        if layers[0] == 0:
            hidden = self.model.embed(ids, side)
            stream = torch.empty(hidden.shape, dtype=torch.float32, device=self.device)
        else:
            assert state.between is not None, f"slot {step.slot}: no rows wait before layer {layers[0]}"
            hidden, stream = state.between
        hidden = model.forward_part(hidden, batch, self.kvs, self.layer_groups, layers=layers, stream=stream)
        state.between = (hidden, stream) if layers[1] < model.part_layers else None
        return hidden

    def _forward(
        self, ids: torch.Tensor, batch: PagedBatch, side: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        return self.model.forward(self.model.embed(ids, side), batch, self.kvs, self.layer_groups)

    @torch.inference_mode()
    def pad_steps(self, *, capture: bool) -> None:
        """From now on pad plain decode steps: see graphs.py. With `capture` they become CUDA graphs, here and now."""
        device, num_seqs = self.device, self._tokens.shape[0]
        if capture:
            from ..kernels.gpu.graph import GraphRecorder

            record = GraphRecorder(device).record
        inputs = PaddedInputs(
            num_seqs,
            num_groups=len(self._tables),
            max_blocks=self._tables[0].shape[1],
            block_size=self.block_size,
            dummy_block=self.pages[0].shape[0] - 1,
            max_kv_len=self._max_model_len,
            device=device,
        )
        self.graphs = StepGraphs(
            self._forward,
            inputs,
            sizes=padded_sizes(num_seqs),
            hidden_size=self.model.embed(inputs.ids[:1]).shape[1],
            dtype=self.dtype,
            device=device,
            record=record if capture else as_it_is,
        )
        self.graphs.capture()

    def run(self, plan: StepPlan) -> StepResult:
        """Launch and wait."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def export_page(self, block: int) -> torch.Tensor:
        """A copy of one block's K and V as a canonical page (engine/cache/layout.py)."""
        return torch.stack([page[block] for page in self.pages])

    @torch.inference_mode()
    def import_page(self, block: int, page: torch.Tensor, *, digest: bytes, expected: bytes) -> None:
        """Write a canonical page into a block. Raises InvalidRequest when it was made under another layout."""
        if digest != expected:
            raise InvalidRequest("a KV page of another layout: its digest is not this cache's")
        for own, layer in zip(self.pages, page, strict=True):
            own[block].copy_(layer)

    # ------------------------------------------------------------------------------------------------- the way in

    def _enter(self, new: NewSequence) -> None:
        stop_ids = () if new.params.ignore_eos else self.eos_ids
        self._slots[new.slot] = SlotState(
            params=new.params,
            seed=new.seed,
            num_prompt=new.num_prompt,
            pool=new.pool,
            pooling=new.pooling,
            embeddings=list(new.embeddings),
            num_blocks=[len(blocks) for blocks in new.block_ids],
            stop_ids=tuple(dict.fromkeys((*stop_ids, *new.params.stop_token_ids))),
        )
        for table, blocks in zip(self._tables, new.block_ids, strict=True):
            table[new.slot, : len(blocks)] = blocks
            self._highest_block = max(self._highest_block, *blocks, 0)
        self._write(new.slot, 0, new.token_ids)
        if self._side_table is not None:
            self._side_table.enter(new.slot, new.side)

    def _extend(self, step: SequenceStep) -> None:
        state = self._slots[step.slot]
        for group, blocks in enumerate(step.new_blocks):
            if blocks:
                have = state.num_blocks[group]
                self._tables[group][step.slot, have : have + len(blocks)] = blocks
                state.num_blocks[group] = have + len(blocks)
                self._highest_block = max(self._highest_block, *blocks)
        if step.append_ids:
            self._write(step.slot, state.num_prompt, step.append_ids)
            state.num_prompt += len(step.append_ids)
        state.embeddings.extend(step.append_embeddings)
        if step.drafts:
            self._write(step.slot, step.start + step.num_tokens, step.drafts)

    def _write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        self._tokens[slot, start : start + len(ids)] = self._to_device(np.array(ids, np.int64))

    def inputs(
        self, steps: Sequence[SequenceStep]
    ) -> tuple[torch.Tensor, PagedBatch, tuple[torch.Tensor, torch.Tensor] | None]:
        """Ids [R] of a step's rows, their batch, and the embeddings that replace some of them (`Model.embed`)."""
        if self._decode_inputs is not None and is_plain_decode(steps):
            ids, batch = self._decode_inputs.fill([step.slot for step in steps], [step.start for step in steps])
        else:
            rows = build_rows(steps)
            batch = self._batch(rows, steps)
            slots = self._to_device(rows.slot)[batch.seq]
            ids = self._tokens[slots, self._to_device(rows.kv_index)]
        return ids, batch, self._side(steps, batch.row_starts_list)

    def _batch(self, rows: Rows, steps: Sequence[SequenceStep]) -> PagedBatch:
        size = self.block_size
        max_len = int(rows.kv_lens.max())
        row_slot = rows.slot[rows.seq]
        block, offset = np.divmod(rows.kv_index, size)
        slots = tuple(
            self._to_device(table[row_slot, block].astype(np.int64) * size + offset) for table in self._tables
        )
        width = -(-max_len // size)
        tables = tuple(self._to_device(table[rows.slot, :width]) for table in self._tables)
        mark: Mark = "mixed"
        if len(rows.seq) == len(steps) and rows.ancestor_mask is None:
            mark = "decode"
        elif len(steps) == 1 and rows.ancestor_mask is None:
            mark = "prefill"
        return PagedBatch(
            seq=self._to_device(rows.seq),
            position=self._to_device(rows.position),
            slots=slots,
            num_visible=self._to_device(rows.num_visible),
            block_tables=tables,
            kv_lens=self._to_device(rows.kv_lens),
            row_starts=self._to_device(rows.row_starts),
            mark=mark,
            max_kv_len=max_len,
            block_size=size,
            ancestor_mask=None if rows.ancestor_mask is None else self._to_device(rows.ancestor_mask),
            tree_starts=None if rows.tree_starts is None else self._to_device(rows.tree_starts),
            row_starts_list=tuple(rows.row_starts.tolist()),
            kv_lens_list=tuple(rows.kv_lens.tolist()),
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """On a CPU the same memory, elsewhere a copy that lives as long as the step does."""
        return torch.from_numpy(np.ascontiguousarray(array)) if self._staged is None else self._staged.put(array)

    def _side(
        self, steps: Sequence[SequenceStep], row_starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows whose embedding comes from the request, and these embeddings."""
        index: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for seq, step in enumerate(steps):
            for span in self._slots[step.slot].embeddings:
                low = max(span.start, step.start)
                high = min(span.start + span.blob.shape[0], step.start + step.num_tokens)
                if low < high:
                    first = row_starts[seq] + low - step.start
                    index.append(torch.arange(first, first + high - low))
                    values.append(from_blob(span.blob)[low - span.start : high - span.start].to(self.dtype))
        if not index:
            return None
        return torch.cat(index).to(self.device), torch.cat(values).to(self.device)

    # ------------------------------------------------------------------------------------------------ the way out

    def _finish(
        self, plan: StepPlan, steps: Sequence[SequenceStep], row_starts: Sequence[int], hidden: torch.Tensor | None
    ) -> Callable[[], StepResult]:
        """Sample what is to be sampled, now; give back what turns it into a result, later.

        `hidden` [R, E] (None where R = 0) holds the rows of `steps`; the plan's others stand between two layers.
        """
        results = {step.slot: SequenceResult(slot=step.slot) for step in plan.steps}
        picked: list[int] = []  # rows of `hidden` that are sampled
        positions: list[int] = []  # of the tokens sampled there
        sampled: list[_Sampled] = []
        for seq, step in enumerate(steps):
            assert hidden is not None
            state = self._slots[step.slot]
            end = row_starts[seq] + step.num_tokens
            if step.sample:
                known = step.start + step.num_tokens
                sampled.append(_Sampled(step=step, state=state, first=len(picked), num_rows=1 + len(step.drafts)))
                picked.extend(range(end - 1, end + len(step.drafts)))
                positions.append(known)
                if step.drafts:
                    positions.extend(known + depth for depth in depths(step.parents))
            if state.params.prompt_logprobs is not None:
                results[step.slot].prompt_logprobs = self._prompt_logprobs(step, state, hidden, end - step.num_tokens)
            if state.pool:
                results[step.slot].pooled = self._pool(step, state, hidden[end - step.num_tokens : end])
        done = StepResult(step=plan.step, results=list(results.values()))
        if not sampled or hidden is None:
            return lambda: done

        everything = len(picked) == hidden.shape[0]
        if not everything:
            hidden = hidden[self._to_device(np.array(picked, np.int64))]
        logits = self.model.logits(hidden)
        raw = logits.clone() if any(s.state.edits and s.state.params.logprobs is not None for s in sampled) else logits
        ids, broken = self.sample_rows(logits, sampled, positions)
        read_side: Callable[[], list[list[int]]] | None = None
        if self._side_table is not None:
            states = [item.state for item in sampled]  # no drafts here: one row each
            rows = self._parameters.at(states, positions)
            full, also = self._side_table.finish([item.step for item in sampled], hidden, ids, rows)
            ids, broken = full[:, 0], broken | also
            read_side = self._read_back_side(full)
        read = self._read_back(ids, broken)

        def finish() -> StepResult:
            chosen, bad = read()
            side_ids = read_side() if read_side is not None else None
            for item in sampled:
                result = results[item.step.slot]
                window = slice(item.first, item.first + item.num_rows)
                if any(bad[window]):
                    result.error = ErrorInfo(
                        kind="InternalError", message="the model computed NaN for this sequence", code="nan_logits"
                    )
                    continue
                path = accept(item.step.drafts, item.step.parents, chosen[window])
                result.token_ids = [chosen[item.first + node] for node in path]
                if side_ids is not None:
                    result.side_ids = [side_ids[item.first]]
                if item.step.drafts:
                    self._keep_accepted(item.step, path, result.token_ids)
                top = item.state.params.logprobs
                if top is not None:
                    index = torch.tensor([item.first + node for node in path], device=self.device)
                    result.logprobs = _logprobs(raw[index], ids[index], top)
            return done

        return finish

    def sample_rows(
        self, logits: torch.Tensor, sampled: Sequence[_Sampled], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [n] of the rows of logits [n, V], which may be changed, and which of the rows [n] hold NaN."""
        states: list[SlotState] = []
        together: list[_Sampled] = []
        for item in sampled:
            states.extend([item.state] * item.num_rows)
            # A mask alone is a few fills: on a CPU 5 us a row, and 8 us together. Penalties are 90 and 15.
            if item.state.joins and not item.step.drafts and (item.state.penalizes or self.device.type != "cpu"):
                together.append(item)
            elif item.state.edits:
                self._edit(logits, item)
        if together:
            edit_together(
                logits,
                [item.first for item in together],
                [item.state for item in together],
                slots=[item.step.slot for item in together],
                known=[item.step.start + item.step.num_tokens for item in together],
                tokens=self._tokens,
            )
        ids = sample(logits, self._parameters.at(states, positions))
        if self._agree is not None:
            ids = self._agree(ids)
        # NaN anywhere in a row makes it the row's maximum, so looking at the chosen logit is enough.
        broken = logits.gather(1, ids[:, None])[:, 0].isnan()
        # The new tokens are written before anybody has seen them: the next plan may already be on its way.
        slots = [item.step.slot for item in sampled]
        ends = [item.step.start + item.step.num_tokens for item in sampled]
        if self._decode_inputs is not None:
            self._decode_inputs.tokens[slots, ends] = ids.numpy()[[item.first for item in sampled]]
        else:
            where = self._to_device(np.array([slots, ends, [item.first for item in sampled]], np.int64))
            self._tokens[where[0], where[1]] = ids[where[2]]
        return ids, broken

    def _read_back(self, ids: torch.Tensor, broken: torch.Tensor) -> Callable[[], tuple[list[int], list[bool]]]:
        """What gives ids and broken as lists, later, without waiting for steps that were launched since."""
        if self._readback is None:
            return lambda: (ids.tolist(), broken.tolist())
        both = self._readback.fetch(torch.stack((ids, broken.long())))

        def read() -> tuple[list[int], list[bool]]:
            chosen, bad = both().tolist()
            return chosen, [bool(flag) for flag in bad]

        return read

    def _read_back_side(self, full: torch.Tensor) -> Callable[[], list[list[int]]]:
        """As `_read_back`, of the side ids in `full` [n, codebooks]."""
        side = full[:, 1:]
        if self._readback is None:
            return lambda: cast(list[list[int]], side.tolist())
        fetched = self._readback.fetch(side.contiguous())
        return lambda: cast(list[list[int]], fetched().tolist())

    def _edit(self, logits: torch.Tensor, item: _Sampled) -> None:
        """Apply the request's processors to every row that is verified, each with the drafts on its own path."""
        step = item.step
        end = step.start + step.num_tokens
        if not (step.drafts or item.state.penalizes):  # masks and bias ask how many ids came before, not which
            edit_logits(logits[item.first], item.state, range(end))
            return
        known = self._tokens[step.slot, :end].tolist()
        paths: list[list[int]] = [[]]
        for draft, parent in zip(step.drafts, step.parents, strict=True):
            paths.append([*paths[parent + 1], draft])
        for row, path in enumerate(paths):
            edit_logits(logits[item.first + row], item.state, known + path)

    def _keep_accepted(self, step: SequenceStep, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Put the accepted path's tokens, K and V where a plain decode would have put them."""
        end = step.start + step.num_tokens
        self._write(step.slot, end, token_ids)
        moves = [(end + node - 1, end + depth) for depth, node in enumerate(path[1:]) if node - 1 != depth]
        if not moves:
            return
        index = np.array(moves, np.int64)
        block, offset = np.divmod(index, self.block_size)
        for group, table in enumerate(self._tables):
            flat = table[step.slot, block].astype(np.int64) * self.block_size + offset
            kvs = [kv for kv, g in zip(self.kvs, self.layer_groups, strict=True) if g == group and kv.numel()]
            copy_slots(kvs, self._to_device(flat[:, 0]), self._to_device(flat[:, 1]), self.block_size)

    def _prompt_logprobs(
        self, step: SequenceStep, state: SlotState, hidden: torch.Tensor, first_row: int
    ) -> list[TokenLogprob]:
        """Log probabilities of the prompt tokens that follow this chunk's rows."""
        count = min(step.start + step.num_tokens, state.num_prompt - 1) - step.start
        if count <= 0:
            return []
        targets = self._tokens[step.slot, step.start + 1 : step.start + 1 + count]
        found: list[TokenLogprob] = []
        for low in range(0, count, 64):  # 64 rows of logits at a time bound the memory
            high = min(low + 64, count)
            logits = self.model.logits(hidden[first_row + low : first_row + high])
            found += _logprobs(logits, targets[low:high], state.params.prompt_logprobs or 0)
        return found

    def _pool(self, step: SequenceStep, state: SlotState, hidden: torch.Tensor) -> Blob | None:
        """The pooled hidden state once the prompt is complete, else None."""
        complete = step.start + step.num_tokens >= state.num_prompt
        if state.pooling == "last":
            return to_blob(hidden[-1].float()) if complete else None
        total = hidden.float().sum(0)
        if state.pooled_sum is not None and step.start > 0:
            total = total + state.pooled_sum
        state.pooled_sum = total
        return to_blob(total / state.num_prompt) if complete else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU memory that is taken when it is first written. (torch.zeros writes all of it at once.)"""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _logprobs(logits: torch.Tensor, ids: torch.Tensor, top: int) -> list[TokenLogprob]:
    logprob, rank, top_ids, top_logprobs = token_logprobs(logits, ids, top)
    columns = zip(ids.tolist(), logprob.tolist(), rank.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [TokenLogprob(*cast(tuple[int, float, int, list[int], list[float]], column)) for column in columns]
