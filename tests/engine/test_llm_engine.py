"""The engine on tiny models, float32: however a request is served, the tokens are the same."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from motet.engine.errors import ContextLengthExceeded, DuplicateRequest, InvalidRequest, ModelLoadError
from motet.engine.types import Aborted, Done, Failed, Request, SamplingParams, StepMask, Tokens
from motet.kernels.dispatch import cpu_ops

from .. import tiny

MODELS = pytest.mark.parametrize("path", [tiny.llama, tiny.windowed], ids=["full", "windowed"])


def several(count: int = 6) -> list[Request]:
    return [
        tiny.request(
            tiny.prompt(3 + 11 * seed, seed), max_tokens=18, temperature=[0.0, 0.8, 1.2][seed % 3], seed=seed,
            top_k=[0, 20][seed % 2], top_p=[1.0, 0.9][seed % 2], min_p=[0.0, 0.02][seed // 3],
        )
        for seed in range(count)
    ]  # fmt: skip


@MODELS
def test_chunked_equals_whole(path) -> None:  # type: ignore[no-untyped-def]
    whole = tiny.answers(tiny.engine(path(), max_num_batched_tokens=512), several())
    for budget in (1, 7, 16):
        assert tiny.answers(tiny.engine(path(), max_num_batched_tokens=budget), several()) == whole


@MODELS
def test_batched_equals_alone_whatever_the_mates(path) -> None:  # type: ignore[no-untyped-def]
    together = tiny.answers(tiny.engine(path()), several())
    assert [tiny.one(tiny.engine(path()), item) for item in several()] == together
    shuffled = several()
    random.Random(0).shuffle(shuffled)
    mates = [tiny.request(tiny.prompt(40, 99), max_tokens=3), *shuffled]
    by_prompt = dict(zip([tuple(r.prompt) for r in mates], tiny.answers(tiny.engine(path()), mates), strict=True))
    assert [by_prompt[tuple(item.prompt)] for item in several()] == together


@MODELS
def test_cached_equals_uncached(path) -> None:  # type: ignore[no-untyped-def]
    running = tiny.engine(path())
    uncached = tiny.answers(tiny.engine(path(), enable_prefix_caching=False), several())
    assert tiny.answers(running, several()) == uncached
    again = several()
    by_id = tiny.run(running, again)
    assert [tiny.tokens(by_id[item.request_id]) for item in again] == uncached
    done = [by_id[item.request_id][-1] for item in again]
    assert [d.usage.num_cached_tokens for d in done] == [(len(item.prompt) - 1) // 4 * 4 for item in again]
    # A second turn: the first one's answer is part of the prefix.
    turn = tiny.request(again[4].prompt + uncached[4] + tiny.prompt(5, 7))
    expected = tiny.one(tiny.engine(path(), enable_prefix_caching=False), turn)
    events = tiny.run(running, [turn])[turn.request_id]
    assert tiny.tokens(events) == expected
    assert events[-1].usage.num_cached_tokens >= len(again[4].prompt) + 18 - 5


@MODELS
def test_preempted_equals_not(path) -> None:  # type: ignore[no-untyped-def]
    plain = tiny.answers(tiny.engine(path()), several())
    small = tiny.engine(path(), num_blocks=26 if path is tiny.llama else 50)
    assert tiny.answers(small, several()) == plain
    assert small.scheduler.counters.num_preemptions > 0
    assert tiny.all_free(small)


def test_greedy_equals_transformers() -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny.llama())
    running = tiny.engine()
    for seed in range(4):
        ids = tiny.prompt(9 + seed, seed)
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
            )
        item = tiny.request(ids, max_tokens=24, min_tokens=24, ignore_eos=False)
        assert tiny.one(running, item) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_and_third_time_are_equal(dtype: str) -> None:
    running = tiny.engine(dtype=dtype, deterministic=False)
    answers = [tiny.one(running, tiny.request(tiny.prompt(33), max_tokens=40)) for _ in range(3)]
    assert answers[1] == answers[2]


def test_noise_is_the_seeds_alone() -> None:
    hot = {"temperature": 1.5, "max_tokens": 24}
    ids = tiny.prompt(12)
    running = tiny.engine()
    first, other, again = tiny.answers(
        running,
        [tiny.request(ids, seed=1, **hot), tiny.request(ids, seed=2, **hot), tiny.request(ids, seed=1, **hot)],
    )
    assert first == again != other
    unseeded = tiny.answers(running, [tiny.request(ids, **hot), tiny.request(ids, **hot)])
    assert unseeded[0] != unseeded[1]


def test_logprobs_and_prompt_logprobs_equal_transformers() -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny.llama())
    ids = tiny.prompt(41)
    item = tiny.request(ids, max_tokens=10, logprobs=5, prompt_logprobs=2)
    running = tiny.engine(max_num_batched_tokens=16)
    tiny.one(running, tiny.request(ids))  # cached K and V must not hide prompt rows
    events = tiny.run(running, [item])[item.request_id]
    answer = tiny.tokens(events)
    with torch.no_grad():
        expected = reference(torch.tensor([ids + answer])).logits[0].log_softmax(-1)
    assert events[0].prompt_logprobs[0] is None
    rows = [*events[0].prompt_logprobs[1:], *[row for event in events[:-1] for row in event.logprobs]]
    assert [row.token_id for row in rows] == (ids + answer)[1:]
    for position, row in enumerate(rows):
        k = 2 if position < len(ids) - 1 else 5
        assert len(row.top_ids) == k
        assert row.logprob == pytest.approx(expected[position, row.token_id].item(), abs=1e-3)
        assert row.top_logprobs == pytest.approx(expected[position].topk(k).values.tolist(), abs=1e-3)
        assert row.rank == int((expected[position] > expected[position, row.token_id]).sum()) + 1


def test_max_tokens_zero_gives_prompt_logprobs_only() -> None:
    item = tiny.request(tiny.prompt(9), max_tokens=0, prompt_logprobs=0)
    events = tiny.run(tiny.engine(), [item])[item.request_id]
    assert isinstance(events[0], Tokens) and not events[0].token_ids
    assert len(events[0].prompt_logprobs) == 9
    assert isinstance(events[-1], Done) and events[-1].finish_reason == "length"


def test_masks_bias_and_stops() -> None:
    running = tiny.engine()
    ids = tiny.prompt(10)
    frames = StepMask(steps=(((10, 20),), ((30, 33), (50, 51))), cycle=True)
    answer = tiny.one(running, tiny.request(ids, allowed=frames, temperature=1.0, seed=1))
    assert all(10 <= t < 20 if i % 2 == 0 else t in (30, 31, 32, 50) for i, t in enumerate(answer))
    once = tiny.one(running, tiny.request(ids, allowed=StepMask(steps=(((7, 8),),))))
    assert once[0] == 7 and len(set(once)) > 1
    assert set(tiny.one(running, tiny.request(ids, logit_bias={77: 100.0}))) == {77}
    plain = tiny.one(running, tiny.request(ids))
    assert plain[0] not in tiny.one(running, tiny.request(ids, logit_bias={plain[0]: -100.0}))
    stopped = tiny.run(running, [tiny.request(ids, stop_token_ids=(plain[3],), name="s")])["s"]
    assert tiny.tokens(stopped) == plain[: plain.index(plain[3])]
    assert stopped[-1].finish_reason == "stop" and stopped[-1].stop_token == plain[3]
    held = tiny.one(running, tiny.request(ids, stop_token_ids=(plain[0],), min_tokens=12))
    assert len(held) >= 12 and plain[0] not in held[:12]


def test_eos_ends_unless_ignored() -> None:
    running = tiny.engine()
    bias = {tiny.EOS: 100.0}
    ended = tiny.run(running, [tiny.request(tiny.prompt(5), logit_bias=bias, ignore_eos=False, name="e")])["e"]
    assert tiny.tokens(ended) == [] and ended[-1].finish_reason == "stop" and ended[-1].stop_token == tiny.EOS
    assert tiny.one(running, tiny.request(tiny.prompt(5), logit_bias=bias)) == [tiny.EOS] * 16


def test_repetition_is_penalized_within_its_window() -> None:
    running = tiny.engine()
    ids = tiny.prompt(10)
    plain = tiny.one(running, tiny.request(ids, max_tokens=40))
    strong = tiny.one(running, tiny.request(ids, max_tokens=40, presence_penalty=100.0, frequency_penalty=100.0))
    assert len(set(strong)) == 40 > len(set(plain))
    windowed = tiny.one(running, tiny.request(ids, max_tokens=40, presence_penalty=100.0, penalty_window=4))
    assert all(len(set(windowed[i : i + 5])) == 5 for i in range(36))
    assert len(set(windowed)) < 40


def test_abort_in_every_state_ends_once_and_frees_all() -> None:
    for depth in (0, 1):
        for when in range(12):
            running = tiny.engine(depth=depth, num_blocks=40, max_num_batched_tokens=8)
            items = [tiny.request(tiny.prompt(15, s), max_tokens=12) for s in range(4)]
            items.append(tiny.request(tiny.prompt(6), open=True))
            for item in items:
                running.submit(item)
            events = []
            for _ in range(when):
                events += running.step()
            for item in items:
                events += running.abort(item.request_id, "client")
                assert running.abort(item.request_id, "client") == []
            events += tiny.drain(running)
            for item in items:
                ends = [e for e in events if e.request_id == item.request_id and isinstance(e, Done | Aborted | Failed)]
                assert len(ends) == 1
            assert tiny.all_free(running)
            running.close()


def test_a_step_that_raises_fails_its_requests_only() -> None:
    running = tiny.engine(max_num_seqs=2)
    first, second, later = (tiny.request(tiny.prompt(6, s)) for s in range(3))
    for item in (first, second, later):
        running.submit(item)
    running.step()
    model = running.executor.runner.model
    forward = model.forward

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret path /etc/motet")

    model.forward = broken
    events = running.step()
    model.forward = forward
    failed = [event for event in events if isinstance(event, Failed)]
    assert {event.request_id for event in failed} == {first.request_id, second.request_id}
    assert all("secret" not in event.error.message for event in failed)
    expected = tiny.one(tiny.engine(), tiny.request(tiny.prompt(6, 2)))
    assert tiny.tokens(tiny.drain(running)) == expected
    assert tiny.all_free(running)


def test_nan_logits_fail_one_sequence() -> None:
    running = tiny.engine()
    good, bad = tiny.request(tiny.prompt(6)), tiny.request(tiny.prompt(9, 5))
    expected = tiny.one(tiny.engine(), good)
    from motet.engine.blobs import to_blob
    from motet.engine.types import EmbeddingSpan

    poison = torch.full((2, 32), torch.nan)
    bad.embeddings = [EmbeddingSpan(start=3, blob=to_blob(poison))]
    by_id = tiny.run(running, [good, bad])
    assert isinstance(by_id[bad.request_id][-1], Failed)
    assert by_id[bad.request_id][-1].error.code == "nan_logits"
    assert tiny.tokens(by_id[good.request_id]) == expected


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    running = tiny.engine(num_blocks=21)  # room for 80 tokens, which becomes the context length
    assert running.info.max_model_len == 80
    for item, expected in [
        (tiny.request([]), "at least one token"),
        (tiny.request([5, 200]), r"ids in \[0, 128\), got 200"),
        (tiny.request(tiny.prompt(80)), "80 tokens; this model's context is 80"),
        (tiny.request(tiny.prompt(70), max_tokens=11), "at most 10 .* got 11"),
        (tiny.request([5], temperature=-1.0), "temperature"),
        (tiny.request([5], temperature=float("nan")), "temperature"),
        (tiny.request([5], top_p=0.0), "top_p"),
        (tiny.request([5], min_tokens=20, max_tokens=4), "min_tokens"),
        (tiny.request([5], logit_bias={500: 1.0}), "logit_bias"),
        (tiny.request([5], allowed=StepMask(steps=(((500, 600),),))), "allowed"),
        (tiny.request([5], logprobs=101), "logprobs"),
    ]:
        with pytest.raises(InvalidRequest, match=expected):
            running.submit(item)
    kept = tiny.request([5])
    running.submit(kept)
    with pytest.raises(DuplicateRequest):
        running.submit(tiny.request([6], name=kept.request_id))
    with pytest.raises(ContextLengthExceeded):
        running.submit(tiny.request(tiny.prompt(81), max_tokens=None))
    assert len(tiny.tokens(tiny.drain(running))) == 16
    long = tiny.one(running, tiny.request(tiny.prompt(60), max_tokens=None))
    assert len(long) == 20
    assert tiny.all_free(running)


def test_starved_open_request_is_aborted() -> None:
    now = [0.0]
    running = tiny.engine(clock=lambda: now[0], input_timeout_s=60.0, input_lease_s=10.0)
    running.submit(tiny.request(tiny.prompt(9), open=True, name="o"))
    tiny.drain(running)
    assert running.next_timer() == 10.0
    now[0] = 11.0
    running.step()
    assert running.scheduler.cache.pool.num_free == running.scheduler.cache.pool.num_usable
    assert running.next_timer() == 60.0
    now[0] = 61.0
    (event,) = running.step()
    assert isinstance(event, Aborted) and event.reason == "input_timeout"
    assert tiny.all_free(running)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_serve(quantize: str) -> None:
    running = tiny.engine(quantize=quantize, deterministic=False)
    answer = tiny.one(running, tiny.request(tiny.prompt(20)))
    assert answer == tiny.one(
        tiny.engine(quantize=quantize, deterministic=False, max_num_batched_tokens=7), tiny.request(tiny.prompt(20))
    )


def test_refused_configurations() -> None:
    from motet.engine.config import EngineConfig

    with pytest.raises(ValueError, match="deterministic with cuda is refused"):
        EngineConfig(deterministic=True, device="cuda")
    with pytest.raises(ValueError, match="block_size"):
        EngineConfig(block_size=12)
    with pytest.raises(ModelLoadError, match="device"):
        tiny.engine(device="toaster")
    assert SamplingParams().temperature == 1.0


def test_deterministic_numbers_do_not_depend_on_the_batch() -> None:
    """Log probabilities bit for bit: alone, in a batch, in chunks, from the cache."""

    def scores(running: object, items: list[Request]) -> list[list[float]]:
        by_id = tiny.run(running, items)  # type: ignore[arg-type]
        return [[row.logprob for e in by_id[item.request_id][:-1] for row in e.logprobs] for item in items]  # type: ignore

    def wanted() -> list[Request]:
        return [tiny.request(tiny.prompt(5 + 9 * seed, seed), max_tokens=12, logprobs=0) for seed in range(5)]

    if cpu_ops() is None:  # no compiler here: plain torch promises no such thing, and the option says so
        with pytest.raises(ModelLoadError, match=r"needs a CPU and the C\+\+ kernels"):
            tiny.engine(deterministic=True)
        return
    together = scores(tiny.engine(max_num_batched_tokens=512), wanted())
    assert [scores(tiny.engine(), [item])[0] for item in wanted()] == together
    chunked = tiny.engine(max_num_batched_tokens=7)
    assert scores(chunked, wanted()) == together
    assert scores(chunked, wanted()) == together
    assert chunked.scheduler.counters.num_prefix_hits > 0


def test_who_is_held_gets_no_work_and_keeps_what_it_has() -> None:
    expected = tiny.one(tiny.engine(), tiny.request(tiny.prompt(9), name="x"))
    engine = tiny.engine()
    engine.submit(tiny.request(tiny.prompt(9), name="x"))
    told = [*engine.step(), *engine.step()]
    engine.hold("x", True)
    engine.hold("unknown", True)
    num_free = engine.scheduler.cache.pool.num_free
    for _ in range(3):
        assert engine.step() == [] and engine.scheduler.cache.pool.num_free == num_free
    engine.submit(tiny.request(tiny.prompt(5), name="y"))
    while engine.num_requests() > 1:
        assert all(event.request_id == "y" for event in engine.step())
    engine.hold("x", False)
    told += tiny.drain(engine)
    assert tiny.tokens(told) == expected and tiny.all_free(engine)
