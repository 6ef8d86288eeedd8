"""The scheduler against a fake model, without torch: a state machine over submits, aborts, appends, steps and shortages."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.engine import scheduler as scheduler_module
from motet.engine.cache.block_pool import BlockPool
from motet.engine.cache.manager import CacheManager, KVGroup
from motet.engine.prefill_pace import PrefillPace
from motet.engine.scheduler import Output, Scheduler
from motet.engine.sequence import Sequence, State
from motet.engine.speculation.proposer import Drafts, View
from motet.engine.types import Request, SamplingParams, SequenceResult, StepPlan, StepResult

VOCAB = 50


def make_scheduler(*, num_blocks: int = 64, windows: tuple[int, ...] = (0,), **limits: float) -> Scheduler:
    groups = [KVGroup(layers=(index,), window=window) for index, window in enumerate(windows)]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 200, "input_lease_s": 5.0} | limits
    return Scheduler(CacheManager(BlockPool(num_blocks), groups, 4), **settings)  # type: ignore[arg-type]


class Sequences:
    """Makes sequences in arrival order."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, scheduler: Scheduler, length: int, output: int, *, priority: int = 0, **fields: object
    ) -> Sequence:
        self.count += 1
        ids = [(self.count * 7 + i * i) % VOCAB for i in range(length)]
        is_open = bool(fields.pop("open", False))
        request = Request(request_id=f"r{self.count}", model="m", prompt=ids, params=SamplingParams(**fields))  # type: ignore[arg-type]
        return Sequence(
            request=request, seed=0, order=self.count, arrival=0.0, priority=priority, token_ids=list(ids),
            num_prompt=length, max_output=output, stop_ids=frozenset(request.params.stop_token_ids), root=b"root",
            tables=scheduler.cache.new_tables(), embeddings=[], input_open=is_open,
        )  # fmt: skip


def next_token(seq_len: int) -> int:
    return (seq_len * 31 + 7) % VOCAB


def fake_result(plan: StepPlan) -> StepResult:
    """The fake model: a token that depends on its position alone."""
    return StepResult(
        step=plan.step,
        results=[
            SequenceResult(slot=s.slot, token_ids=[next_token(s.start + s.num_tokens)] if s.sample else [])
            for s in plan.steps
        ],
    )


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[StepPlan | None, list[Output]]:
    plan = scheduler.schedule(now)
    return plan, scheduler.land(plan, fake_result(plan), now) if plan is not None else []


def finish_all(scheduler: Scheduler, limit: int = 2000) -> list[Output]:
    outputs = []
    for _ in range(limit):
        if not scheduler.has_work():
            return outputs
        outputs += step(scheduler)[1]
    raise AssertionError("no end")


def test_long_prefill_never_stalls_a_later_decode() -> None:
    scheduler, make = make_scheduler(), Sequences()
    long, short = make(scheduler, 100, 4), make(scheduler, 3, 30)
    scheduler.add(short)
    step(scheduler)
    scheduler.reprioritize(short, 5)  # now behind the long one in order
    scheduler.add(long)
    for _ in range(6):
        plan, _ = step(scheduler)
        assert plan is not None
        assert {s.slot for s in plan.steps} == {long.slot, short.slot}
        assert sum(s.num_tokens for s in plan.steps) <= 16


def test_preempted_sequence_keeps_its_seniority() -> None:
    scheduler, make = make_scheduler(num_blocks=12), Sequences()
    sequences = [make(scheduler, 8, 24) for _ in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    finished = [output.sequence.order for output in finish_all(scheduler) if output.finish_reason]
    assert scheduler.counters.num_preemptions > 0
    assert finished == [1, 2, 3]
    assert all(seq.token_ids[8:] == [next_token(8 + i) for i in range(24)] for seq in sequences)


def test_priority_acts_when_all_slots_are_taken() -> None:
    scheduler, make = make_scheduler(max_num_seqs=2), Sequences()
    for _ in range(2):
        scheduler.add(make(scheduler, 4, 50))
    step(scheduler)
    urgent = make(scheduler, 4, 3, priority=-1)
    scheduler.add(urgent)
    plan, _ = step(scheduler)
    assert plan is not None and urgent.slot in {s.slot for s in plan.steps}
    assert [seq.order for seq in scheduler.waiting] == [2]


def test_parked_head_does_not_block_the_queue() -> None:
    scheduler, make = make_scheduler(max_num_seqs=1), Sequences()
    parked = make(scheduler, 1, 5, open=True)
    scheduler.add(parked)
    scheduler.add(make(scheduler, 4, 2))
    assert parked.state is State.WAITING_FOR_INPUT
    assert [o.sequence.order for o in finish_all(scheduler) if o.finish_reason] == [2]


def test_lease_ends_and_open_request_resumes() -> None:
    scheduler, make = make_scheduler(), Sequences()
    seq = make(scheduler, 9, 4, open=True)
    scheduler.add(seq)
    step(scheduler, now=0.0)
    assert seq.state is State.WAITING_FOR_INPUT and scheduler.cache.pool.num_free < 63
    assert not scheduler.has_work()
    step(scheduler, now=6.0)
    assert scheduler.cache.pool.num_free == 63 and seq.state is State.WAITING_FOR_INPUT
    scheduler.append(seq, [1, 2, 3], [], last=True)
    outputs = finish_all(scheduler)
    assert outputs[-1].finish_reason == "length"
    assert seq.token_ids[12:] == [next_token(12 + i) for i in range(4)]


def test_hungry_requests_are_preempted_first() -> None:
    scheduler, make = make_scheduler(num_blocks=10), Sequences()
    hungry = make(scheduler, 17, 2, open=True)
    scheduler.add(hungry)
    while scheduler.has_work():
        step(scheduler)
    assert hungry in scheduler.hungry
    scheduler.add(make(scheduler, 4, 20))
    finish_all(scheduler)
    assert hungry.num_preemptions == 1 and scheduler.counters.num_preemptions == 1


def test_min_tokens_and_stop_ids() -> None:
    scheduler, make = make_scheduler(), Sequences()
    stop = next_token(6)  # what follows after position 5: output token 3 of a 4-token prompt
    early = make(scheduler, 4, 10, stop_token_ids=(stop,))
    late = make(scheduler, 4, 10, stop_token_ids=(stop,), min_tokens=5)
    for seq in (early, late):
        scheduler.add(seq)
    outputs = [output for output in finish_all(scheduler) if output.finish_reason]
    assert [(o.sequence.order, o.finish_reason, o.stop_token) for o in outputs] == [
        (1, "stop", stop),
        (2, "length", None),
    ]
    assert early.num_output == 2


class Erratic(PrefillPace):
    """A pace without reason, which every chunk must bear."""

    def __init__(self) -> None:
        super().__init__(2.0)
        self.draw = random.Random(0)

    def limit(self, *args: object) -> int | None:
        return self.draw.choice([1, 2, 4, None])

    def part(self, *args: object) -> float:
        return self.draw.choice([0.05, 0.3, 0.6, 1.0])

    def part_tokens(self, *args: object) -> int:
        return self.draw.choice([2, 3, 7])


class Eager:
    """Drafts that nobody accepts."""

    def propose(self, view: View, hidden: object) -> Drafts:
        count = min(2, view.room)
        return Drafts(ids=[1, 2][:count], parents=[-1, 0][:count])

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        assert num_accepted == 0


def check_parts(plan: StepPlan, between: dict[int, tuple[int, int, int]]) -> None:
    """A chunk under way goes on where it stopped, unless its slot was given back, and nothing is sampled before its end.

    `between`: slot -> start, tokens and next layer (of 5) of a chunk under way; kept up to date.
    """
    for slot in plan.release:
        between.pop(slot, None)
    for s in plan.steps:
        start, count, layer = between.pop(s.slot, (s.start, s.num_tokens, 0))
        first, end = s.layers or (0, 5)
        assert (s.start, s.num_tokens, first) == (start, count, layer) and first < end <= 5
        if end < 5:
            assert not (s.sample or s.drafts)
            between[s.slot] = (start, count, end)


@pytest.mark.parametrize("depth", [0, 2])
def test_prompts_in_parts_survive_shortage(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(scheduler_module, "PART_FROM", 3)
    monkeypatch.setattr(scheduler_module, "PART", 8)
    between: dict[int, tuple[int, int, int]] = {}
    num_cut = 0  # chunks that lost their blocks between two layers
    for seed in range(30):
        draw, make = random.Random(seed), Sequences()
        scheduler = make_scheduler(num_blocks=18, part_layers=5, pace=Erratic(), proposer=Eager())  # type: ignore[arg-type]
        sequences: list[Sequence] = []
        flying: list[StepPlan] = []
        between.clear()
        for _ in range(400):
            if len(sequences) < 12 and draw.random() < 0.5:
                sequences.append(
                    make(scheduler, draw.randrange(1, 30), draw.randrange(1, 30), priority=draw.randrange(2))
                )
                scheduler.add(sequences[-1])
            if sequences and draw.random() < 0.02:
                scheduler.finish(draw.choice(sequences))
            half_way = [(seq, seq.num_preemptions) for seq in scheduler.running if seq.num_part]
            plan = scheduler.schedule(0.0)
            num_cut += sum(seq.num_preemptions > before for seq, before in half_way)
            if plan is not None:
                check_parts(plan, between)
                flying.append(plan)
            while len(flying) > depth or (flying and plan is None):
                oldest = flying.pop(0)
                scheduler.land(oldest, fake_result(oldest), 0.0)
        assert len(sequences) == 12 and all(seq.state is State.FINISHED for seq in sequences)
        for seq in sequences:
            assert seq.token_ids[seq.num_prompt :] == [next_token(seq.num_prompt + i) for i in range(seq.num_output)]
        assert sum(seq.num_output == seq.max_output for seq in sequences) >= 6
        assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable
    assert num_cut >= 5


class Machine(RuleBasedStateMachine):
    """Random lives of requests under shortage; plans land late by up to two steps, and whoever wants to may leave."""

    @initialize(
        num_blocks=st.integers(14, 40), windows=st.sampled_from([(0,), (0, 6), (9,)]), depth=st.integers(0, 2),
        part_layers=st.sampled_from([0, 5]),
    )  # fmt: skip
    def start(self, num_blocks: int, windows: tuple[int, ...], depth: int, part_layers: int) -> None:
        self.scheduler = make_scheduler(num_blocks=num_blocks, windows=windows, part_layers=part_layers)
        self.patch = pytest.MonkeyPatch()
        if part_layers:
            self.scheduler.pace = Erratic()
            self.patch.setattr(scheduler_module, "PART_FROM", 3)
            self.patch.setattr(scheduler_module, "PART", 8)
        self.between: dict[int, tuple[int, int, int]] = {}  # slot -> start, tokens and layer of a chunk under way
        self.make = Sequences()
        self.depth = depth
        self.flying: list[StepPlan] = []
        self.alive: list[Sequence] = []
        self.ended: list[int] = []
        self.now = 0.0

    @rule(length=st.integers(1, 20), output=st.integers(0, 12), priority=st.integers(-1, 1), is_open=st.booleans())
    def submit(self, length: int, output: int, priority: int, is_open: bool) -> None:
        if not self.scheduler.fits(length + output):
            return
        seq = self.make(self.scheduler, length, output, priority=priority, open=is_open)
        self.alive.append(seq)
        self.scheduler.add(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.alive))
        self.alive.remove(seq)
        self.ended.append(seq.order)
        self.scheduler.finish(seq)
        self.scheduler.finish(seq)  # twice is once

    @rule(data=st.data(), count=st.integers(0, 6), last=st.booleans())
    def append(self, data: st.DataObject, count: int, last: bool) -> None:
        waiting = [seq for seq in self.alive if seq.input_open]
        if not waiting:
            return
        seq = data.draw(st.sampled_from(waiting))
        if self.scheduler.fits(len(seq.token_ids) + count + seq.max_output):
            self.scheduler.append(seq, [i % VOCAB for i in range(count)], [], last=last)

    @rule()
    def schedule(self) -> None:
        self.now += 0.5
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert sum(s.num_tokens + len(s.drafts) for s in plan.steps if s.layers is None) <= 16
            assert all(s.num_tokens > 0 for s in plan.steps)
            check_parts(plan, self.between)
            self.flying.append(plan)
        if self.flying and (plan is None or len(self.flying) > self.depth):
            self.land_one()

    def land_one(self) -> None:
        plan = self.flying.pop(0)
        for output in self.scheduler.land(plan, fake_result(plan), self.now):
            seq = output.sequence
            assert seq in self.alive, "an ended sequence gave output"
            new = len(output.token_ids)
            assert seq.token_ids[len(seq.token_ids) - new :] == output.token_ids
            if output.finish_reason:
                self.alive.remove(seq)
                self.ended.append(seq.order)
                assert seq.num_output == seq.max_output
                expected = [next_token(seq.num_prompt + i) for i in range(seq.max_output)]
                assert seq.token_ids[seq.num_prompt :] == expected

    @invariant()
    def pool_is_sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.cache.pool.check()
        held: dict[int, int] = {}
        for seq in [*self.scheduler.running, *self.scheduler.hungry]:
            for blocks in seq.tables.blocks:
                for block in blocks:
                    if block:
                        held[block] = held.get(block, 0) + 1
        assert all(not self.scheduler.cache.pool.is_free(block) for block in held)
        assert len(set(self.ended)) == len(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            self.run_out()
        finally:
            self.patch.undo()

    def run_out(self) -> None:
        for seq in self.alive:
            if seq.input_open:
                self.scheduler.append(seq, [1], [], last=True) if self.scheduler.fits(
                    len(seq.token_ids) + 1 + seq.max_output
                ) else self.scheduler.finish(seq)
        self.alive = [seq for seq in self.alive if seq.state is not State.FINISHED]
        for _ in range(3000):
            if not (self.scheduler.has_work() or self.flying):
                break
            self.schedule()
        assert not self.alive and not self.flying
        assert self.scheduler.cache.pool.num_free == self.scheduler.cache.pool.num_usable
        assert len(self.scheduler._free_slots) == 4


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Machine.TestCase


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_two_thousand_random_requests_leave_the_pool_full(windows: tuple[int, ...]) -> None:
    scheduler, make, rng = make_scheduler(num_blocks=60, windows=windows, max_num_seqs=8), Sequences(), random.Random(1)
    alive: list[Sequence] = []
    submitted = finished = 0
    while submitted < 2000 or alive:
        if submitted < 2000 and rng.random() < 0.6:
            seq = make(scheduler, rng.randint(1, 30), rng.randint(0, 20), priority=rng.randint(-1, 1))
            submitted += 1
            alive.append(seq)
            scheduler.add(seq)
        if alive and rng.random() < 0.1:
            scheduler.finish(alive.pop(rng.randrange(len(alive))))
        for output in step(scheduler)[1]:
            if output.finish_reason:
                alive.remove(output.sequence)
                finished += 1
    while scheduler.has_work():
        step(scheduler)
    assert finished > 1000
    scheduler.cache.pool.check()
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable
