"""The scheduler: who computes which positions next. One token budget, no phases, plain Python.

A sequence has `num_computed` and `num_tokens`; each step hands out positions so that the first catches up with the second.
Chunked prefill, prefix hits, resume after preemption, verification of drafts and mixed batches are this one rule.
`schedule()` makes a plan and advances `num_computed`; `land()` takes a plan's results and takes back what was rejected.
Knows no tensors, no clocks (times are handed in) and no text.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .cache.hashing import extend_chain
from .cache.manager import CacheManager
from .errors import ErrorInfo
from .prefill_pace import PART, PART_FROM, PrefillPace, PromptShare
from .sequence import Sequence, State
from .speculation.proposer import Proposer, View
from .types import (
    Blob,
    EmbeddingSpan,
    FinishReason,
    NewSequence,
    SequenceResult,
    SequenceStep,
    SideIds,
    StepPlan,
    StepResult,
    TokenLogprob,
)


@dataclass(kw_only=True)
class Output:
    """What one landed step means for one sequence. `finish_reason` or `error` set = the sequence is finished."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    pooled: Blob | None = None
    side_ids: list[list[int]] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: ErrorInfo | None = None


@dataclass(kw_only=True)
class Counters:
    """Totals since start, for metrics."""

    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens looked up
    num_prefix_hits: int = 0  # tokens found
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0


@dataclass(kw_only=True)
class _Launched:
    """A sequence's part in a plan that is in flight."""

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    num_drafts: int
    samples: bool
    layers: tuple[int, int] | None  # that its positions pass, where not all
    complete: bool  # whether they are computed then
    preemption: int  # the sequence's num_preemptions then: tells a stale num_computed


class Scheduler:
    """Owns the queue, the running set and the slots. `cache` owns the blocks."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        input_lease_s: float = 30.0,
        proposer: Proposer | None = None,
        pace: PrefillPace | None = None,
        part_layers: int = 0,
    ) -> None:
        """`part_layers`: how many layers the model has, if rows can pass some of them in a step (`SequenceStep.layers`)."""
        self.cache = cache
        self.pace = pace
        self.part_layers = part_layers
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.input_lease_s = input_lease_s
        self.proposer = proposer
        self.counters = Counters()
        self.waiting: list[Sequence] = []  # sorted by sort_key; parked ones stand among the others
        self.running: list[Sequence] = []  # sorted by sort_key
        self.hungry: list[Sequence] = []  # open requests out of input, with slot and blocks under a lease
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: dict[int, list[_Launched]] = {}
        self._next_step = 0

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller made sure that it can ever fit (`fits`)."""
        if seq.num_pending <= 0 and seq.input_open:
            seq.state = State.WAITING_FOR_INPUT
        self._enqueue(seq)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of this length can run at all, alone."""
        return self.cache.num_blocks_for(num_tokens) <= self.cache.pool.num_usable

    def longest(self) -> int:
        """Tokens of the longest sequence that fits the cache, alone."""
        return self.cache.pool.num_usable // max(1, len(self.cache.groups)) * self.cache.block_size

    def append(self, seq: Sequence, token_ids: Iterable[int], embeddings: list[EmbeddingSpan], *, last: bool) -> None:
        """More input for an open sequence; `last` closes it."""
        ids = list(token_ids)
        assert seq.input_open and seq.state is not State.FINISHED
        seq.token_ids.extend(ids)
        seq.num_prompt += len(ids)
        seq.embeddings.extend(embeddings)
        if seq.slot >= 0:
            seq.unsent_ids.extend(ids)
            seq.unsent_embeddings.extend(embeddings)
        seq.input_open = not last
        if seq.num_pending <= 0:
            return
        if seq in self.hungry:
            self.hungry.remove(seq)
            seq.state = State.RUNNING
            bisect.insort(self.running, seq, key=_key)
        elif seq.state is State.WAITING_FOR_INPUT:
            seq.state = State.PREEMPTED if seq.num_preemptions else State.WAITING

    def reprioritize(self, seq: Sequence, priority: int) -> None:
        """A new priority takes effect at the next step."""
        for queue in (self.waiting, self.running):
            if seq in queue:
                queue.remove(seq)
                seq.priority = priority
                bisect.insort(queue, seq, key=_key)
                return
        seq.priority = priority

    def finish(self, seq: Sequence) -> None:
        """End a sequence in whatever state it is. Idempotent; blocks and slot go back once no plan names it."""
        if seq.state is State.FINISHED:
            return
        for queue in (self.waiting, self.running, self.hungry):
            if seq in queue:
                queue.remove(seq)
        seq.state = State.FINISHED
        self._retire(seq)

    @property
    def num_in_flight(self) -> int:
        """Plans launched and not landed."""
        return len(self._in_flight)

    def has_work(self) -> bool:
        """Whether `schedule` could give a plan, now or after a landing."""
        return bool(self.running) or bool(self._released) or any(seq.ready for seq in self.waiting)

    def next_lease_end(self) -> float | None:
        return min((seq.input_since + self.input_lease_s for seq in self.hungry), default=None)

    # ---------------------------------------------------------------------------------------------------- plans

    def schedule(self, now: float, budget: int | None = None) -> StepPlan | None:
        """The next plan, or None when there is nothing to do. `budget` may lower the token budget for this step."""
        left = self.max_num_batched_tokens if budget is None else max(1, min(budget, self.max_num_batched_tokens))
        self._end_leases(now)
        self._make_way_for_priority()
        plan = StepPlan(step=self._next_step)
        launched: list[_Launched] = []

        num_preempted = self.counters.num_preemptions
        prompts = self._prompt_share(left)
        index = 0
        while index < len(self.running) and left > 0:
            seq = self.running[index]
            # Everyone behind gets at least one token: a long prefill never stalls somebody else's decode.
            share = max(1, left - (len(self.running) - index - 1))
            count = min(seq.num_pending, share)
            is_prompt, layers, cost = seq.num_pending > 1, None, count
            if is_prompt:
                cost = prompts.bound(count, seq.num_pending)
                count, layers = self._part(seq, cost, prompts)
            if count > 0:
                drafts, parents = self._drafts(seq, count, share - count) if layers is None else ([], [])
                new_blocks = self._room_for(seq, seq.num_computed + count + len(drafts))
                if new_blocks is None:
                    # Either `seq` itself was preempted (then the next one took its index), or frees wait for a landing.
                    index += seq.state is State.RUNNING
                    continue
                left -= cost + len(drafts)
                launched.append(self._launch(plan, seq, count, new_blocks, drafts, parents, layers))
            if is_prompt:
                prompts.took(cost)
            index += 1

        if self.counters.num_preemptions == num_preempted:
            self._admit(plan, launched, left, prompts, now)
        plan.release, self._released = self._released, []
        if not (plan.steps or plan.new or plan.release):
            return None
        self._in_flight[plan.step] = launched
        self._next_step += 1
        self.counters.num_steps += 1
        self.counters.num_step_tokens += sum(item.num_tokens + item.num_drafts for item in launched if item.complete)
        self._park_hungry()
        return plan

    def _prompt_share(self, left: int) -> PromptShare:
        """Prompt tokens that the next plan may hold at most, and how many prompts want them, queued ones included."""
        everything = PromptShare(left=left, credit=0, num_prompts=1)  # 1: first come, first served
        if self.pace is None:
            return everything
        positions = [seq.num_computed for seq in self.running if seq.num_pending > 1]
        positions += [0] * min(len(self._free_slots), sum(seq.ready for seq in self.waiting))
        decodes = [seq.num_computed + 1 for seq in self.running if seq.num_pending == 1]
        most = self.pace.limit(len(decodes), sum(decodes), positions) if positions else None
        if most is None:
            return everything
        num = len(positions)
        return PromptShare(left=min(left, most), credit=self.pace.credit(), num_prompts=num, num_sharing=num)

    def _part(self, seq: Sequence, count: int, prompts: PromptShare) -> tuple[int, tuple[int, int] | None]:
        """Tokens of a prompt, and which layers they pass, None = all. A chunk between two layers goes on, and one that would
        be small for its context gives way to a larger one in parts.
        """
        paced = self.pace is not None and prompts.num_sharing > 0
        deep = paced and self.part_layers > 1 and seq.in_parts and seq.num_computed >= PART_FROM
        if not (seq.num_part or (deep and 0 < count < min(PART, seq.num_pending))):
            return count, None
        chunk = seq.num_part
        if self.pace is not None and paced:
            chunk = chunk or min(self.pace.part_tokens(seq.num_computed, prompts.num_sharing), seq.num_pending)
            fits = self.pace.part(seq.num_computed, chunk, prompts.num_sharing) * self.part_layers
        else:
            fits = self.part_layers
        num_left = self.part_layers - seq.part_layers
        num_parts = max(1, math.ceil(num_left / fits - 0.2))  # even ones; a fifth of one more is not worth a step
        return chunk, (seq.part_layers, seq.part_layers + math.ceil(num_left / num_parts))

    def land(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Take a plan's results. Results for sequences that ended meanwhile are dropped."""
        by_slot = {item.slot: item for item in result.results}
        outputs = []
        in_flight = self._in_flight.pop(plan.step)
        if self.pace is not None:
            decodes = [item.start + 1 for item in in_flight if item.num_tokens == 1]
            chunks = [(item.start, item.num_tokens, self._share(item)) for item in in_flight if item.num_tokens > 1]
            self.pace.observe(len(decodes), sum(decodes), chunks, result.seconds)
        for launched in in_flight:
            seq = launched.sequence
            seq.num_in_flight -= 1
            if launched.samples:
                seq.num_unknown -= 1
            if seq.state is not State.FINISHED:
                output = self._land_one(launched, by_slot.get(launched.slot), now)
                if output is not None:
                    outputs.append(output)
            if seq.leaving:
                self._retire(seq)
        return outputs

    def _share(self, launched: _Launched) -> float:
        """Of the layers, that its rows pass."""
        return (launched.layers[1] - launched.layers[0]) / self.part_layers if launched.layers is not None else 1.0

    def fail_in_flight(self) -> list[Sequence]:
        """After a failed launch: forget all plans in flight; the sequences that they named are finished and returned."""
        named = {id(item.sequence): item.sequence for items in self._in_flight.values() for item in items}
        self._in_flight.clear()
        for seq in named.values():
            seq.num_in_flight = seq.num_unknown = 0
            self.finish(seq)
            self._retire(seq)
        return list(named.values())

    # ------------------------------------------------------------------------------------------------- the walk

    def _launch(
        self,
        plan: StepPlan,
        seq: Sequence,
        count: int,
        new_blocks: list[list[int]],
        drafts: list[int],
        parents: list[int],
        layers: tuple[int, int] | None = None,
    ) -> _Launched:
        start = seq.num_computed
        complete = layers is None or layers[1] == self.part_layers
        samples = complete and seq.wants_sample and start + count == seq.num_tokens
        step = SequenceStep(
            slot=seq.slot, start=start, num_tokens=count, sample=samples, layers=layers, drafts=drafts,
            parents=parents,
        )  # fmt: skip
        if any(new_blocks):
            step.new_blocks = new_blocks
        if seq.unsent_ids:
            step.append_ids, seq.unsent_ids = seq.unsent_ids, []
        if seq.unsent_embeddings:
            step.append_embeddings, seq.unsent_embeddings = seq.unsent_embeddings, []
        plan.steps.append(step)
        if complete:
            seq.num_computed += count + len(drafts)
            seq.num_part = seq.part_layers = 0
        elif layers is not None:
            seq.num_part, seq.part_layers = count, layers[1]
        seq.num_in_flight += 1
        seq.num_unknown += samples
        self.counters.num_drafted += len(drafts)
        return _Launched(
            sequence=seq,
            slot=seq.slot,
            start=start,
            num_tokens=count,
            num_drafts=len(drafts),
            samples=samples,
            layers=layers,
            complete=complete,
            preemption=seq.num_preemptions,
        )

    def _admit(self, plan: StepPlan, launched: list[_Launched], left: int, prompts: PromptShare, now: float) -> None:
        """Move sequences from the queue into the batch, in order, while slots, blocks and budget last."""
        for seq in list(self.waiting):
            if left <= 0 or prompts.left <= 0 or not self._free_slots:
                return
            if not seq.ready:
                continue
            num_hit, hit = self._lookup(seq)
            if not self._whole_fits(seq, hit):
                return
            self.cache.adopt(seq.tables, hit)
            self.cache.allocate(seq.tables, len(seq.token_ids))
            if self.cache.caching and seq.num_preemptions == 0:
                self.counters.num_prefix_queries += len(seq.token_ids)
                self.counters.num_prefix_hits += num_hit
                seq.num_cached = num_hit
            self.waiting.remove(seq)
            bisect.insort(self.running, seq, key=_key)
            seq.state = State.RUNNING
            seq.slot = self._free_slots.pop()
            seq.num_computed = num_hit
            seq.unsent_ids, seq.unsent_embeddings = [], []
            if seq.first_scheduled is None:
                seq.first_scheduled = now
                self.counters.num_prompt_tokens += seq.num_prompt
            plan.new.append(
                NewSequence(
                    slot=seq.slot,
                    token_ids=list(seq.token_ids),
                    num_prompt=seq.num_prompt,
                    block_ids=[list(blocks) for blocks in seq.tables.blocks],
                    params=seq.request.params,
                    seed=seq.seed,
                    pool=seq.request.task == "pool",
                    pooling=seq.request.pooling,
                    embeddings=list(seq.embeddings),
                    side=[SideIds(start=span.start, ids=list(span.ids)) for span in seq.side],
                )
            )
            count = min(left, prompts.whole_or(prompts.left, seq.num_pending))
            if count > 0:
                left -= count
                prompts.took(count)
                launched.append(self._launch(plan, seq, count, [], [], []))

    def _lookup(self, seq: Sequence) -> tuple[int, list[list[int]]]:
        """Cached tokens of the sequence's start, and their blocks per group."""
        extend_chain(seq.tables.keys, seq.root, seq.token_ids, self.cache.block_size, seq.embeddings, seq.side)
        # Logits and hidden rows of cached positions are gone: who asks for all of them computes all of them.
        reads_cache = seq.request.params.prompt_logprobs is None and seq.request.task == "generate"
        spans, hit = self.cache.lookup(seq.tables.keys if reads_cache else [], len(seq.token_ids))
        return sum(span.length for span in spans), hit

    def _whole_fits(self, seq: Sequence, hit: list[list[int]]) -> bool:
        """All known tokens must have a place at admission; one block is left for each running sequence to grow into."""
        need = self.cache.num_blocks_for(len(seq.token_ids)) - sum(len(blocks) for blocks in hit)
        reserve = len(self.cache.groups) * len(self.running)
        num_free = self.cache.pool.num_free - self.cache.num_revived(hit)
        return need + (reserve if self.running else 0) <= num_free

    def _drafts(self, seq: Sequence, count: int, left: int) -> tuple[list[int], list[int]]:
        if self.proposer is None or not seq.wants_sample or seq.num_unknown or left <= 0:
            return [], []
        if seq.num_computed + count != seq.num_tokens or seq.num_output == 0:
            return [], []
        room = min(left, seq.max_output - seq.num_output - 1, self.max_model_len - seq.num_tokens - 1)
        if room <= 0:
            return [], []
        drafts = self.proposer.propose(View(token_ids=seq.token_ids, num_prompt=seq.num_prompt, room=room), None)
        assert len(drafts.ids) <= room and len(drafts.ids) == len(drafts.parents)
        return drafts.ids, drafts.parents

    # ------------------------------------------------------------------------------------------------- shortage

    def _room_for(self, seq: Sequence, num_tokens: int) -> list[list[int]] | None:
        """Blocks for positions < num_tokens, preempting the youngest if they are short; None = not in this step."""
        while True:
            new_blocks = self.cache.allocate(seq.tables, num_tokens)
            if new_blocks is not None:
                return new_blocks
            # Running sequences after `seq` have no work in this plan yet, so that taking one back undoes nothing.
            victim = self.hungry[-1] if self.hungry else self.running[-1]
            num_free = self.cache.pool.num_free
            self._preempt(victim)
            if victim is seq or self.cache.pool.num_free == num_free:
                return None

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue with its seniority; its K and V are computed again later, from the cache where that still holds."""
        self.counters.num_preemptions += 1
        seq.num_preemptions += 1
        if seq in self.hungry:
            self.hungry.remove(seq)  # stays WAITING_FOR_INPUT, now without blocks
        else:
            self.running.remove(seq)
            seq.state = State.PREEMPTED
        seq.num_computed = seq.num_part = seq.part_layers = 0
        self._retire(seq)
        self._enqueue(seq)

    def _make_way_for_priority(self) -> None:
        """A more urgent sequence at the head of the queue takes the place of the least urgent running one."""
        head = next((seq for seq in self.waiting if seq.ready), None)
        while head is not None and self.running and head.priority < self.running[-1].priority:
            if self._free_slots and self._whole_fits(head, self._lookup(head)[1]):
                return
            num_before = (self.cache.pool.num_free, len(self._free_slots))
            self._preempt(self.running[-1])
            if (self.cache.pool.num_free, len(self._free_slots)) == num_before:
                return  # what it held comes free when the plans in flight land

    def _end_leases(self, now: float) -> None:
        for seq in [seq for seq in self.hungry if now - seq.input_since >= self.input_lease_s]:
            self._preempt(seq)

    def _park_hungry(self) -> None:
        """Open requests that ran out of input leave the running set, with slot and blocks."""
        for seq in [seq for seq in self.running if seq.input_open and seq.num_pending <= 0]:
            self.running.remove(seq)
            seq.state = State.WAITING_FOR_INPUT
            self.hungry.append(seq)

    def _enqueue(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_key)

    def _retire(self, seq: Sequence) -> None:
        """Give back blocks and slot, unless a plan in flight still names the sequence."""
        seq.leaving = seq.slot >= 0 and seq.num_in_flight > 0
        if seq.leaving or seq.slot < 0:
            return
        self.cache.release(seq.tables)
        self._released.append(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    # ------------------------------------------------------------------------------------------------- landings

    def _land_one(self, launched: _Launched, result: SequenceResult | None, now: float) -> Output | None:
        seq = launched.sequence
        if result is None or result.error is not None:
            error = result.error if result is not None else None
            self.finish(seq)
            return Output(
                sequence=seq,
                error=error
                or ErrorInfo(kind="InternalError", message="no result for this step", code="internal_error"),
            )
        if not launched.complete:
            return None
        valid = launched.start + launched.num_tokens
        if launched.samples:
            num_accepted = len(result.token_ids) - 1
            assert 0 <= num_accepted <= launched.num_drafts, f"{num_accepted} of {launched.num_drafts} drafts accepted"
            self.counters.num_accepted += num_accepted
            valid += num_accepted
            if self.proposer is not None and launched.num_drafts:
                self.proposer.observe(num_accepted, launched.num_drafts)
        if result.prompt_logprobs is not None:
            known = len(seq.prompt_logprobs)  # a recomputed chunk brings nothing new
            seq.prompt_logprobs.extend(result.prompt_logprobs[max(0, known - launched.start - 1) :])
        output = self._take_tokens(seq, result, now)
        if launched.preemption == seq.num_preemptions and seq.state is not State.FINISHED:
            if launched.num_drafts:
                seq.num_computed = valid
            valid = min(valid, len(seq.token_ids))
            extend_chain(seq.tables.keys, seq.root, seq.token_ids, self.cache.block_size, seq.embeddings, seq.side)
            self.cache.publish(seq.tables, valid)
            self.cache.trim(seq.tables, valid)
        if output is not None and output.finish_reason is not None:
            self.finish(seq)
        elif output is None and self._is_computed(seq, launched):
            output = Output(
                sequence=seq, pooled=result.pooled, finish_reason="length" if result.pooled is None else "stop"
            )
            self.finish(seq)
        return output

    def _is_computed(self, seq: Sequence, launched: _Launched) -> bool:
        """A request without output tokens (pooling, max_tokens=0) ends when its whole prompt is computed."""
        if seq.input_open or (seq.request.task == "generate" and seq.max_output > 0):
            return False
        return launched.start + launched.num_tokens >= seq.num_prompt and launched.preemption == seq.num_preemptions

    def _take_tokens(self, seq: Sequence, result: SequenceResult, now: float) -> Output | None:
        """Append sampled tokens one by one, up to the first that ends the sequence. A stop token is not kept."""
        if not result.token_ids:
            return None
        output = Output(sequence=seq)
        params = seq.request.params
        for token_id in result.token_ids:
            if token_id in seq.stop_ids and seq.num_output >= params.min_tokens:
                output.finish_reason, output.stop_token = "stop", token_id
                break
            seq.token_ids.append(token_id)
            output.token_ids.append(token_id)
            if seq.num_output >= seq.max_output or len(seq.token_ids) >= self.max_model_len:
                output.finish_reason = "length"
                break
        if result.side_ids is not None:
            output.side_ids = result.side_ids[: len(output.token_ids)]
            seq.side_ids.extend(output.side_ids)
        if seq.first_token is None:
            seq.first_token = now
        self.counters.num_output_tokens += len(output.token_ids)
        if result.logprobs is not None:
            output.logprobs = result.logprobs[: len(output.token_ids)]
        return output


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.sort_key
