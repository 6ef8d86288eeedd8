"""The pace of prompts beside decodes, on scripted step times."""

from __future__ import annotations

import pytest

from motet.engine import scheduler
from motet.engine.llm_engine import LLMEngine
from motet.engine.prefill_pace import CREDIT_S, LEAST, PART, PrefillPace
from motet.engine.types import StepPlan, StepResult, Tokens
from motet.kernels.dispatch import cpu_ops

from .. import tiny

CONTEXT = 3000  # that the decodes see together


def taught(slowdown: float = 1.8, decode_s: float = 0.010, num_decodes: int = 15) -> PrefillPace:
    pace = PrefillPace(slowdown)
    for _ in range(30):
        pace.observe(num_decodes, CONTEXT, [], decode_s)
    pace._credit_s = 0.0  # spent; the tests of it fill it anew
    return pace


def test_alone_a_prompt_has_no_limit() -> None:
    assert taught().limit(0) is None
    assert PrefillPace(1.8).limit(0) is None


def test_without_experience_there_is_no_pace_to_keep() -> None:
    pace = PrefillPace(1.8)
    assert pace.limit(4, CONTEXT) is None
    pace.observe(4, CONTEXT, [(0, 100, 1.0)], 0.5)
    assert pace.limit(4, CONTEXT) is None
    pace.observe(4, CONTEXT, [], 0.01)
    assert pace.limit(4, CONTEXT) is not None


def test_steps_come_to_the_wanted_length() -> None:
    pace = taught(1.8, 0.010)
    seconds = 0.0
    for _ in range(20):
        chunk = pace.limit(15, CONTEXT)
        assert chunk is not None
        seconds = 0.010 + chunk * 0.0001
        pace.observe(15, CONTEXT, [(0, chunk, 1.0)], seconds)
    assert pace.limit(15, CONTEXT) == pytest.approx(80, abs=1)
    assert seconds == pytest.approx(0.018, rel=0.02)


def test_chunks_shrink_while_contexts_make_them_dearer() -> None:
    pace = taught(2.0, 0.010)
    for _ in range(3):  # prompts; what the first has taught holds for the others
        done, context, slow = 0, CONTEXT, 0
        while done < 6000:
            chunk = pace.limit(15, context, [done])
            assert chunk is not None
            chunk = min(chunk, 6000 - done)
            seconds = 0.010 + chunk * (0.0001 + done * 5e-8) + done * 5e-7 + (context - CONTEXT) * 4e-7
            slow += seconds > 0.021
            pace.observe(15, context, [(done, chunk, 1.0)], seconds)
            done, context = done + chunk, context + 15
    assert slow == 0


def test_a_slow_step_in_between_changes_little() -> None:
    pace = taught(2.0, 0.010)
    for _ in range(60):
        pace.observe(15, CONTEXT, [(2000, 50, 1.0)], 0.020)
    before = pace.limit(15, CONTEXT, [2000])
    pace.observe(15, CONTEXT, [(2000, 50, 1.0)], 0.5)
    after = pace.limit(15, CONTEXT, [2000])
    assert before == pytest.approx(50, abs=1) and after is not None and after >= 0.7 * 50


def test_one_lucky_measurement_makes_no_giant() -> None:
    pace = taught(1.8, 0.010)
    pace.observe(15, CONTEXT, [(0, LEAST, 1.0)], 0.010 + 1e-9)
    limit = pace.limit(15, CONTEXT)
    assert limit == pytest.approx(
        0.008 / (0.010 / 15 / 4), abs=1
    )  # a quarter of what was feared, however little it took


def test_what_was_learnt_to_be_free_is_soon_learnt_to_cost() -> None:
    pace = taught(2.0, 0.010)
    for _ in range(100):
        pace.observe(15, CONTEXT, [(0, 50, 1.0)], 0.010 + 1e-9)
    seconds = []
    for _ in range(8):
        chunk = pace.limit(15, CONTEXT)
        assert chunk is not None
        seconds.append(0.010 + min(chunk, 512) * 0.0002)
        pace.observe(15, CONTEXT, [(0, min(chunk, 512), 1.0)], seconds[-1])
    assert seconds[-1] < 0.025


def test_a_prompt_gets_on_however_slow_it_is() -> None:
    pace = taught(1.1, 0.001, 1)
    pace.observe(1, CONTEXT, [(0, 64, 1.0)], 5.0)
    assert pace.limit(1, CONTEXT) == LEAST


def test_a_faster_step_than_any_decode_teaches_nothing() -> None:
    pace = taught(1.8, 0.010)
    pace.observe(15, CONTEXT, [(0, 40, 1.0)], 0.014)
    before = pace.limit(15, CONTEXT)
    pace.observe(15, CONTEXT, [(0, 40, 1.0)], 0.002)
    assert pace.limit(15, CONTEXT) == before


def test_the_nearest_number_of_decodes_stands_in() -> None:
    pace = taught(2.0, 0.004, 2)
    for _ in range(30):
        pace.observe(30, CONTEXT, [], 0.020)
    for _ in range(60):
        pace.observe(30, CONTEXT, [(0, 100, 1.0)], 0.030)
    pace._credit_s = 0.0
    assert pace.limit(28, CONTEXT) == pytest.approx(200, abs=4)
    assert pace.limit(3, CONTEXT) == pytest.approx(
        53, abs=2
    )  # 4 ms, and a third more: a prompt weighs as much as four streams


def test_many_prompts_beside_few_streams_may_take_longer() -> None:
    pace = taught(1.8, 0.010, 4)
    for _ in range(60):
        pace.observe(4, CONTEXT, [(0, 50, 1.0)], 0.015)
    pace._credit_s = 0.0
    assert pace.limit(4, CONTEXT) == pytest.approx(80, abs=1)
    assert pace.limit(4, CONTEXT, [0, 0, 0]) == pytest.approx(240, abs=1)
    pace = taught(1.8, 0.010, 15)
    assert pace.limit(15, CONTEXT) == pace.limit(15, CONTEXT, [0, 0, 0])


def test_a_rare_prompt_is_not_cut() -> None:
    pace = PrefillPace(1.8)
    for _ in range(400):
        pace.observe(15, CONTEXT, [], 0.010)
    for _ in range(60):
        pace.limit(15, CONTEXT)
        pace.observe(15, CONTEXT, [(0, 80, 1.0)], 0.018)  # 0.1 ms a token, within its pace: no credit is spent
    assert pace.limit(15, CONTEXT) == pytest.approx(80, abs=1)
    assert pace.credit() == pytest.approx(CREDIT_S / 0.0001, rel=0.02)
    pace.observe(15, CONTEXT, [(0, 1580, 1.0)], 0.010 + 0.158)
    assert pace.limit(15, CONTEXT) == pytest.approx(80, abs=1) and pace.credit() <= 1  # the credit is spent
    for _ in range(100):
        pace.observe(15, CONTEXT, [], 0.010)
    assert pace.credit() == pytest.approx(0.05 * 1.0 / 0.0001, rel=0.02)  # a twentieth of a second in a second


def test_a_chunk_within_its_limit_costs_no_credit_however_long_it_takes() -> None:
    pace = taught()
    pace._credit_s = CREDIT_S
    chunk = pace.limit(15, CONTEXT)
    assert chunk is not None
    pace.observe(15, CONTEXT, [(0, chunk, 1.0)], 0.5)
    assert pace._credit_s == CREDIT_S


def test_a_part_is_the_share_of_the_layers_that_fits() -> None:
    pace = taught(2.0, 0.010)
    pace._cost = [0.0001 * 64, 0.0, 1e-6 * 4096, 0.0]  # 0.1 ms a token, 1 us for each that its step looks back on
    pace.limit(15, CONTEXT, [7000])
    assert pace.part(7000, 130, 1) == pytest.approx(0.010 / 0.020, rel=0.01)
    assert pace.part(7000, 130, 2) == pytest.approx(0.005 / 0.020, rel=0.01)
    assert pace.part(7000, 30, 1) == pytest.approx(1.0)
    assert pace.part(70_000, 130, 1) == pytest.approx(0.010 / 0.083, rel=0.01)
    assert pace.part(700_000, 130, 1) == pytest.approx(LEAST / 130)  # a prompt gets on, whatever it costs


def test_a_part_pays_for_the_streams_growth() -> None:
    pace = taught(2.0, 0.010)
    pace._cost = [0.0001 * 64, 0.0, 0.0, 1e-6 * 4096]
    pace.limit(15, CONTEXT + 4000, [7000])
    assert pace.part(7000, 120, 1) == pytest.approx(0.006 / 0.012, rel=0.01)


def test_parts_fill_their_steps() -> None:
    pace = taught(2.0, 0.010)
    pace._cost = [0.001 * 64, 0.0, 0.0, 0.0]
    pace.limit(15, CONTEXT, [7000])
    count = pace.part_tokens(7000, 1)  # 32 tokens are 3.2 steps, four hold 40
    assert count == 40 and 1 / pace.part(7000, count, 1) == pytest.approx(4)


@pytest.mark.parametrize("slowdown", [1.0, 0.5, -2.0, float("nan")])
def test_a_slowdown_is_above_one(slowdown: float) -> None:
    with pytest.raises(ValueError, match="more than 1"):
        PrefillPace(slowdown)


# ------------------------------------------------------------------------------------------------ in the scheduler


class Scripted:
    """An executor around the real one whose steps say that they took a scripted time."""

    def __init__(self, inner: object, decode_s: float, token_s: float) -> None:
        self.inner, self.decode_s, self.token_s = inner, decode_s, token_s
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> object:
        self.plans.append(plan)
        result = self.inner.launch(plan).result()  # type: ignore[attr-defined]
        prompt = sum(step.num_tokens for step in plan.steps if step.num_tokens > 1)
        result.seconds = self.decode_s + prompt * self.token_s

        class Handle:
            def result(self) -> StepResult:
                return result  # type: ignore[no-any-return]

        return Handle()

    def close(self) -> None:
        self.inner.close()  # type: ignore[attr-defined]


def paced(slowdown: float = 1.8) -> tuple[tiny.LLMEngine, Scripted]:
    engine = tiny.engine(prefill_slowdown=slowdown, max_num_batched_tokens=256, num_blocks=200)
    if engine.scheduler.pace is not None:
        engine.scheduler.pace._credit_s = -1.0  # nothing but the pace
    script = Scripted(engine.executor, 0.010, 0.00025)
    engine.executor = script  # type: ignore[assignment]
    return engine, script


def prompt_tokens(plan: StepPlan) -> int:
    return sum(step.num_tokens for step in plan.steps if step.num_tokens > 1)


def test_decodes_keep_their_pace_under_a_long_prompt() -> None:
    engine, script = paced()
    streams = [tiny.request(tiny.prompt(4, seed), max_tokens=100, ignore_eos=True) for seed in range(4)]
    for request in streams:
        engine.submit(request)
    for _ in range(20):
        engine.step()
    script.plans.clear()
    long = tiny.request(tiny.prompt(400, 9), max_tokens=2, ignore_eos=True)
    engine.submit(long)
    first = None
    while first is None:
        events = engine.step()
        first = next((e for e in events if isinstance(e, Tokens) and e.request_id == long.request_id), None)
    chunks = [prompt_tokens(plan) for plan in script.plans]
    assert sum(chunks) + sum(len(plan.steps) == 5 for plan in script.plans[-1:]) >= 400
    assert all(len(plan.steps) == 5 for plan in script.plans)  # every stream got its token in every step
    assert max(chunks) <= 33 and len(chunks) >= 400 // 33  # 0.8 * 10 ms at 0.25 ms each is 32
    engine.close()


def test_without_decodes_or_without_a_pace_prompts_take_the_budget() -> None:
    engine, script = paced()
    engine.submit(tiny.request(tiny.prompt(400, 9), max_tokens=1))
    engine.step()
    assert prompt_tokens(script.plans[-1]) == 256
    engine.close()
    engine, script = paced(0)
    engine.submit(tiny.request(tiny.prompt(4), max_tokens=50, ignore_eos=True))
    engine.step()
    engine.submit(tiny.request(tiny.prompt(400, 9), max_tokens=1))
    engine.step()
    assert prompt_tokens(script.plans[-1]) == 255
    engine.close()


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    engine, script = paced()
    engine.submit(tiny.request(tiny.prompt(4), max_tokens=200, ignore_eos=True))
    for _ in range(10):
        engine.step()
    long = tiny.request(tiny.prompt(400, 9), max_tokens=1)
    engine.submit(long)
    engine.step()
    short = tiny.request(tiny.prompt(20, 5), max_tokens=1)
    engine.submit(short)
    answered: list[str] = []
    while len(answered) < 2:
        answered += [
            e.request_id
            for e in engine.step()
            if isinstance(e, Tokens) and e.request_id in (long.request_id, short.request_id)
        ]
    assert answered == [short.request_id, long.request_id]
    engine.close()


def test_the_credit_ends_a_prompt_and_does_not_begin_a_long_one() -> None:
    engine, script = paced()
    pace = engine.scheduler.pace
    assert pace is not None
    engine.submit(tiny.request(tiny.prompt(4), max_tokens=100, ignore_eos=True))
    for _ in range(10):
        engine.step()
    pace._credit_s = 0.025  # a hundred tokens, at 0.25 ms each
    pace._cost = [0.00025 * 64, 0.0, 0.0, 0.0]
    script.plans.clear()
    engine.submit(tiny.request(tiny.prompt(240, 9), max_tokens=1))
    while engine.num_requests() == 2:
        engine.step()
    long, last = ([prompt_tokens(plan) for plan in script.plans][at] for at in (0, -1))
    assert long == 4 * 32 and last == 240 - long  # one prompt weighs as much as four streams
    engine.submit(tiny.request(tiny.prompt(150, 5), max_tokens=1))
    pace._credit_s = 0.025
    engine.step()
    assert prompt_tokens(script.plans[-1]) == 150  # ends with the credit, so it is not cut
    engine.close()


def in_parts(**config: object) -> LLMEngine:
    """An engine whose prompts pass one of its two layers at a time beside decodes: the pace says that everything is dear."""
    engine = tiny.engine(dtype="bfloat16", deterministic=False, quantize="int8", num_blocks=400, **config)
    pace = engine.scheduler.pace
    assert pace is not None and engine.scheduler.part_layers == 2
    pace.observe = lambda *args: None  # type: ignore[method-assign]
    pace.limit = lambda num_decodes, *args: LEAST if num_decodes else None  # type: ignore[method-assign]
    pace.credit = lambda: 0  # type: ignore[method-assign]
    pace.part = lambda *args: 0.5  # type: ignore[method-assign]
    pace.part_tokens = lambda *args: PART  # type: ignore[method-assign]
    return engine


def parts(engine: LLMEngine) -> list[tuple[int, int, tuple[int, int]]]:
    return [
        (step.start, step.num_tokens, step.layers)
        for plan in tiny.plans(engine)
        for step in plan.steps
        if step.layers is not None
    ]


needs_parts = pytest.mark.skipif(cpu_ops() is None, reason="without the C++ kernels rows pass all layers or none")


@needs_parts
def test_a_deep_prompt_passes_a_few_layers_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PART_FROM", 30)
    requests = [
        tiny.request(tiny.prompt(4, 1), max_tokens=120),
        tiny.request(tiny.prompt(150, 2), max_tokens=9, temperature=0.9, seed=7),
        tiny.request(tiny.prompt(110, 3), max_tokens=5, prompt_logprobs=0),  # its hidden rows are asked for
        tiny.request(tiny.prompt(99, 4), max_tokens=5),
    ]
    engine = in_parts()
    pieces = tiny.answers(engine, requests)
    plain = tiny.engine(dtype="bfloat16", deterministic=False, quantize="int8", num_blocks=400, prefill_slowdown=0)
    assert tiny.answers(plain, requests) == pieces  # bit-equal rows, whatever the chunk
    seen = parts(engine)
    assert len(seen) >= 8 and all(count > 1 for _, count, _ in seen)
    halves = [layers for _, _, layers in seen]
    assert halves.count((0, 1)) == halves.count((1, 2)) == len(halves) // 2
    assert engine.scheduler.counters.num_step_tokens == plain.scheduler.counters.num_step_tokens
    assert tiny.all_free(engine)


@needs_parts
@pytest.mark.parametrize("by", ["abort", "preempt", "stream ends"])
def test_a_prompt_may_end_between_two_layers(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(scheduler, "PART_FROM", 30)
    engine = in_parts()
    stream = tiny.request(tiny.prompt(4, 1), max_tokens=300)
    engine.submit(stream)
    engine.step()
    prompt = tiny.prompt(150, 2)
    request = tiny.request(prompt, max_tokens=6)
    engine.submit(request)
    while not any(seq.num_part for seq in engine.scheduler.running):
        engine.step()
    (seq,) = [seq for seq in engine.scheduler.running if seq.num_part]
    num_known = seq.num_computed
    if by == "abort":
        engine.abort(request.request_id, "left")
    elif by == "preempt":
        engine.scheduler._preempt(seq)
        assert (seq.num_computed, seq.num_part, seq.part_layers) == (0, 0, 0)
    else:
        engine.abort(stream.request_id, "left")
    # What has passed some layers only is in nobody's cache.
    again = tiny.request(prompt, max_tokens=6)
    engine.submit(again)
    found, by_id = engine._sequences[again.request_id], dict[str, list[int]]()
    events = []
    while found.slot < 0:
        events += engine.step()
    assert found.num_cached <= max(num_known, seq.num_computed)
    engine.abort(stream.request_id, "left")
    for event in [*events, *tiny.drain(engine)]:
        if isinstance(event, Tokens):
            by_id.setdefault(event.request_id, []).extend(event.token_ids)
    alone = tiny.engine(dtype="bfloat16", deterministic=False, quantize="int8", num_blocks=400, prefill_slowdown=0)
    right = tiny.one(alone, tiny.request(prompt, max_tokens=6))
    assert by_id[again.request_id] == right
    assert by_id.get(request.request_id) == (None if by == "abort" else right)
    assert tiny.all_free(engine)


def test_the_pace_changes_no_token() -> None:
    requests = [
        tiny.request(tiny.prompt(3 + 40 * seed, seed), max_tokens=18, temperature=0.8, seed=seed) for seed in range(5)
    ]
    plain = tiny.answers(tiny.engine(prefill_slowdown=0), requests)
    assert tiny.answers(tiny.engine(prefill_slowdown=1.01), requests) == plain
