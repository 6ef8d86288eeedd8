"""The voice on tiny models, float32, with a codec that shows what it was given: however it is served, it says the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.arbiter import DeviceArbiter
from motet.engine.errors import ContextLengthExceeded, DuplicateRequest, InvalidRequest
from motet.engine.speech_engine import SpeechEngine, mixed_seed
from motet.engine.speech_params import phase_mask, phase_params, voice_params
from motet.engine.types import (
    TERMINAL,
    Aborted,
    AnyEvent,
    Audio,
    Done,
    Failed,
    ModelInfo,
    Request,
    SamplingParams,
    SpeechRequest,
)
from motet.models.speech_format import load_format

from .. import tiny

FRAME = 2048
TEXTS = ["hello there.", "what?", "a bird in the hand is worth two in the bush.", "yes, no."]
_ids = itertools.count()


@dataclass
class Piece:
    id: str
    pcm: np.ndarray[Any, Any]
    done: bool


@dataclass
class FakeCodec:
    """Each frame becomes 2048 samples of one level that its codes give, two frames late. `streams` are those open."""

    late: int = 2
    streams: dict[str, list[Any]] = field(default_factory=dict)  # id -> [seed, frames not out yet, last came]
    frames: dict[str, list[list[int]]] = field(default_factory=dict)  # all that came, by id and seed
    batches: list[int] = field(default_factory=list)
    fails: str = ""

    def open(self, id: str, seed: int = 0) -> None:
        assert id not in self.streams
        self.streams[id] = [seed, [], False]

    def push(self, id: str, frames: Any, last: bool) -> None:
        stream = self.streams[id]
        assert not stream[2], "pushed after the last"
        stream[1] += frames.tolist()
        stream[2] = last
        self.frames.setdefault(f"{id}:{stream[0]}", []).extend(frames.tolist())

    def step(self, ids: Sequence[str] | None = None) -> list[Piece]:
        assert ids is not None and len(set(ids)) == len(ids)
        self.batches.append(len(ids))
        if self.fails in ids:
            raise RuntimeError("no such code")
        out = []
        for id in ids:
            seed, waiting, last = self.streams[id]
            ready = len(waiting) if last else max(0, len(waiting) - self.late)
            levels = [np.float32(np.sin(1 + np.dot(frame, range(1, len(frame) + 1)))) / 2 for frame in waiting[:ready]]
            del waiting[:ready]
            out.append(Piece(id=id, pcm=np.repeat(np.array(levels, np.float32), FRAME), done=last))
        return out

    def close(self, id: str) -> None:
        del self.streams[id]


class Clock:
    """Stands still, but for what a test adds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def voice(path: Path | None = None, *, clock: Clock | None = None, **more: Any) -> SpeechEngine:
    path = path or tiny.voice()
    clock = clock or Clock()
    lm = tiny.engine(path, clock=clock, **({"num_blocks": 2049, "max_num_seqs": 8} | more.pop("lm", {})))
    info = ModelInfo(
        model="tiny", kind="tts", source=str(path), max_model_len=lm.info.max_model_len, vocab_size=lm.info.vocab_size,
        hidden_size=64,
    )  # fmt: skip
    return SpeechEngine(info=info, lm=lm, codec=FakeCodec(), format=load_format(path), clock=clock, **more)


def request(*texts: str, engine: SpeechEngine, name: str = "", **more: Any) -> SpeechRequest:
    prompts = [engine.format.prompt(text) for text in texts]
    return SpeechRequest(request_id=name or f"s{next(_ids)}", model="tiny", utterances=prompts, **more)


def seeded(seed: int, **asked: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_k=50, seed=seed, **asked)


def drain(engine: SpeechEngine, *, each: Callable[[], None] = lambda: None, most: int = 20_000) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    for _ in range(most):
        if not engine.has_work():
            return events
        events += engine.step()
        each()
    raise AssertionError("it never ends")


def speak(engine: SpeechEngine, requests: list[SpeechRequest]) -> list[list[AnyEvent]]:
    """Submit together, drain; every request ends in exactly one terminal event, events are numbered, audio is in order."""
    for one in requests:
        engine.submit(one)
    events = drain(engine)
    mine = [[event for event in events if event.request_id == one.request_id] for one in requests]
    assert sum(map(len, mine)) == len(events)
    for told in mine:
        assert [isinstance(event, TERMINAL) for event in told] == [False] * (len(told) - 1) + [True]
        assert [event.seq for event in told] == list(range(len(told)))
        spoken = [event for event in told if isinstance(event, Audio)]
        assert [event.utterance for event in spoken] == sorted(event.utterance for event in spoken)
        ends = [event.utterance for event in spoken if event.last]
        assert ends == sorted(set(ends))
    assert is_free(engine)
    return mine


def pcm(events: list[AnyEvent]) -> bytes:
    return b"".join(event.pcm for event in events if isinstance(event, Audio))


def is_free(engine: SpeechEngine) -> bool:
    """No block, sequence, slot or stream is left, and nobody is remembered."""
    assert isinstance(engine.codec, FakeCodec)
    return tiny.all_free(engine.lm) and not engine.codec.streams and not engine.num_requests() and not engine.has_work()


# ------------------------------------------------------------------------------------------------------------ speaking


@pytest.mark.parametrize("path", [tiny.voice, tiny.orpheus, tiny.neutts], ids=["motet-voice", "orpheus", "neutts"])
def test_what_is_heard_is_what_the_model_said(path: Callable[[], Path]) -> None:
    """Against a plain loop: phases one after the other on another engine, codes cut into frames by hand."""
    engine = voice(path())
    format = engine.format
    (told,) = speak(engine, [request(TEXTS[0], engine=engine, params=seeded(7))])
    done = told[-1]
    assert isinstance(done, Done)
    codec = engine.codec
    assert isinstance(codec, FakeCodec)
    (frames,) = codec.frames.values()
    lm = tiny.engine(path(), num_blocks=2049)
    prompt, outputs = format.prompt(TEXTS[0]), []
    for index, phase in enumerate(format.phases):
        ids = format.phase_prompt(prompt, outputs)
        limit = min(format.max_tokens(prompt, index), lm.info.max_model_len - len(ids))
        seed = mixed_seed(7, 0, index)
        params = phase_params(phase, phase_mask(phase), seeded(7), max_tokens=limit, seed=seed)
        outputs.append(tiny.one(lm, Request(request_id=f"l{index}", model="", prompt=ids, params=params)))
    codes, places = outputs[-1], format.num_places
    order = {1: [0], 3: [0, 1, 2], 7: [0, 1, 4, 2, 3, 5, 6]}[places]
    by_hand = [
        [codes[at + place] - format.first - place * format.size for place in order]
        for at in range(0, len(codes) - places + 1, places)
    ]
    assert frames == by_hand and len(frames) > 0
    assert done.usage.num_output_tokens == sum(map(len, outputs)) and done.usage.num_prompt_tokens == len(prompt)
    if format.trim_below == 0:
        assert len(pcm(told)) == 2 * FRAME * len(frames) and done.audio_s == pytest.approx(FRAME * len(frames) / 24000)


def test_together_is_as_alone_and_a_seed_is_kept() -> None:
    alone = [pcm(speak(engine, [request(text, "no.", engine=engine, params=seeded(at))])[0])
             for at, text in enumerate(TEXTS) for engine in [voice()]]  # fmt: skip
    engine = voice()
    together = speak(engine, [request(text, "no.", engine=engine, params=seeded(at)) for at, text in enumerate(TEXTS)])
    assert [pcm(told) for told in together] == alone
    assert max(engine.codec.batches) > 1  # type: ignore[attr-defined]
    other = voice()
    assert pcm(speak(other, [request(TEXTS[0], "no.", engine=other, params=seeded(9))])[0]) != alone[0]


def test_utterances_of_one_request_sound_different() -> None:
    """Each has noise of its own, though their positions are the same."""
    engine = voice()
    (told,) = speak(engine, [request("yes.", "yes.", engine=engine, params=seeded(3))])
    by_utterance = [[event.pcm for event in told if isinstance(event, Audio) and event.utterance == n] for n in (0, 1)]
    assert by_utterance[0] != by_utterance[1]


def test_more_requests_than_streams_wait_and_none_fails() -> None:
    engine = voice(max_streams=2, lm={"max_num_seqs": 2})
    requests = [request(text, engine=engine, params=seeded(1)) for text in TEXTS * 2]
    for one in requests:
        engine.submit(one)
    assert engine.stats()["running"] == 2 and engine.stats()["waiting"] == len(requests) - 2
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(engine.codec.streams))  # type: ignore[attr-defined]

    events = drain(engine, each=look)
    assert sum(isinstance(event, Done) for event in events) == len(requests) and most <= 2 and is_free(engine)
    ends = [event.request_id for event in events if isinstance(event, Done)]
    assert set(ends[:2]) <= {one.request_id for one in requests[:3]}  # first come, first served


def test_an_utterance_that_finds_no_end_is_cut() -> None:
    engine = voice()
    endless = seeded(1, logit_bias={engine.format.end: -100.0})
    (told,) = speak(engine, [request("no.", engine=engine, params=endless)])
    done = told[-1]
    assert isinstance(done, Done) and done.finish_reason == "length"
    limit = engine.format.max_tokens(engine.format.prompt("no."))
    assert len(pcm(told)) == 2 * FRAME * (limit // engine.format.num_places)
    assert engine.stats()["cut_utterances"] == 1


def test_the_voices_own_words_cannot_be_changed() -> None:
    engine = voice()
    asked = SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=(96,), min_tokens=1, logprobs=2)
    (told,) = speak(engine, [request("hello.", engine=engine, params=asked)])
    assert isinstance(told[-1], Done) and len(pcm(told)) >= 2 * FRAME


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_illegal_id_ever_comes_through(data: st.DataObject) -> None:
    engine = _MASKED.setdefault("lm", tiny.engine(tiny.voice(), num_blocks=513, max_num_seqs=4))
    format = load_format(tiny.voice())
    phase = format.codes_phase
    requests = []
    for row in range(3):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 100.0])),
            top_k=data.draw(st.sampled_from([0, 1, 50])),
            top_p=data.draw(st.sampled_from([0.01, 0.9, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([0.1, 1.0, 100.0])),
            presence_penalty=data.draw(st.sampled_from([-100.0, 0.0, 100.0])),
            penalty_window=data.draw(st.sampled_from([0, 1, 7])),
            logit_bias=data.draw(st.dictionaries(st.integers(0, 143), st.sampled_from([-100.0, 100.0]), max_size=144)),
        )
        params = phase_params(phase, phase_mask(phase), params, max_tokens=24, seed=row)
        requests.append(Request(request_id=f"m{next(_ids)}", model="", prompt=format.prompt("hello."), params=params))
    for ids in tiny.answers(engine, requests):
        assert len(ids) >= 3 and len(ids) % 3 == 0
        format.frames(ids)  # raises for an id of another place
    assert tiny.all_free(engine)


_MASKED: dict[str, Any] = {}


def test_a_window_bounds_what_a_penalty_sees() -> None:
    """Only the last N ids are penalized: with a window of one id, an id may come again after another."""
    lm = tiny.engine(tiny.voice(), num_blocks=513)
    prompt = load_format(tiny.voice()).prompt("hello.")
    allowed = phase_mask(load_format(tiny.voice()).codes_phase)

    def said(window: int) -> list[int]:
        params = SamplingParams(
            temperature=0.0, presence_penalty=100.0, penalty_window=window, max_tokens=60, ignore_eos=True,
            allowed=type(allowed)(steps=(((96, 112),),), cycle=True),
        )  # fmt: skip
        return tiny.one(lm, Request(request_id=f"w{next(_ids)}", model="", prompt=prompt, params=params))

    everything, window = said(0), said(4)
    assert len(set(everything[:16])) == 16  # each of the 16 ids once before any comes again
    assert all(len(set(window[at : at + 5])) == 5 for at in range(len(window) - 5))
    assert len(set(window[:16])) < 16


# ------------------------------------------------------------------------------------------------- open requests, aborts


def test_utterances_may_come_later() -> None:
    whole = voice()
    (told,) = speak(whole, [request(*TEXTS[:3], engine=whole, name="x", params=seeded(5))])
    engine = voice()
    engine.submit(request(TEXTS[0], engine=engine, name="x", params=seeded(5), open=True))
    first = drain(engine)
    assert [event.last for event in first if isinstance(event, Audio)][-1] and not isinstance(first[-1], Done)
    assert engine.stats()["running"] == 0 and not engine.codec.streams  # type: ignore[attr-defined]
    engine.append("x", engine.format.prompt(TEXTS[1]))
    engine.append("x", engine.format.prompt(TEXTS[2]))
    engine.append("x", [], last=True)
    rest = drain(engine)
    assert pcm([*first, *rest]) == pcm(told) and isinstance(rest[-1], Done) and is_free(engine)
    with pytest.raises(InvalidRequest):
        engine.append("x", [], last=True)


def test_an_open_request_may_end_without_a_word() -> None:
    engine = voice()
    engine.submit(SpeechRequest(request_id="x", model="", open=True))
    assert not engine.has_work()
    engine.append("x", [], last=True)
    (done,) = drain(engine)
    assert isinstance(done, Done) and done.audio_s == 0 and is_free(engine)


def test_who_sends_nothing_more_is_ended() -> None:
    clock = Clock()
    engine = voice(clock=clock, input_timeout_s=10.0)
    engine.submit(request("no.", engine=engine, name="x", open=True))
    drain(engine)
    assert engine.next_timer() == pytest.approx(110.0)
    clock.now = 109.0
    assert engine.step() == []
    clock.now = 110.0
    (event,) = engine.step()
    assert isinstance(event, Aborted) and event.reason == "input_timeout" and is_free(engine)
    assert engine.next_timer() is None


@pytest.mark.parametrize("path", [tiny.voice, tiny.orpheus], ids=["motet-voice", "orpheus"])
def test_an_abort_at_any_time_frees_everything(path: Callable[[], Path]) -> None:
    engine = voice(path(), max_streams=2)
    others = 0
    for num_steps in [*range(0, 30, 3), 50, 90, 150]:
        mine = request(*TEXTS[:2], engine=engine, params=seeded(2), open=bool(num_steps % 2))
        other = request("no.", engine=engine, params=seeded(4))
        engine.submit(mine)
        engine.submit(other)
        told: list[AnyEvent] = []
        for _ in range(num_steps):
            told += engine.step() if engine.has_work() else []
        told += engine.abort(mine.request_id, "client")
        assert engine.abort(mine.request_id, "client") == []
        told += drain(engine)
        mine_told = [event for event in told if event.request_id == mine.request_id]
        assert [isinstance(event, TERMINAL) for event in mine_told].count(True) == 1
        others += isinstance(told[-1], Done) or any(isinstance(e, Done) for e in told)
        assert is_free(engine)
    assert others == 13


def test_close_ends_everything() -> None:
    engine = voice(max_streams=1)
    for _ in range(3):
        engine.submit(request(TEXTS[2], engine=engine))
    for _ in range(20):
        engine.step()
    engine.close()
    engine.lm.step()  # the executor hears of freed slots with the next plan
    assert is_free(engine)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda e: Request(request_id="x", model="", prompt=[1]), InvalidRequest),
        (lambda e: SpeechRequest(request_id="x", model=""), InvalidRequest),
        (lambda e: SpeechRequest(request_id="x", model="", utterances=[[]]), InvalidRequest),
        (lambda e: SpeechRequest(request_id="x", model="", utterances=[[1, 144]]), InvalidRequest),
        (lambda e: SpeechRequest(request_id="x", model="", utterances=[[-1]]), InvalidRequest),
        (lambda e: SpeechRequest(request_id="x", model="", utterances=[[6] * 400]), ContextLengthExceeded),
        (lambda e: SpeechRequest(request_id="x", model="", utterances=[[6]] * 5000), InvalidRequest),
        (lambda e: request("a", engine=e, params=SamplingParams(temperature=float("nan"))), InvalidRequest),
    ],
)
def test_what_can_never_be_spoken_is_refused(made: Callable[[SpeechEngine], Any], error: type[Exception]) -> None:
    engine = voice()
    with pytest.raises(error):
        engine.submit(made(engine))
    assert is_free(engine)


def test_an_id_is_taken_once_and_appends_are_checked() -> None:
    engine = voice()
    engine.submit(request("a", engine=engine, name="x", open=True))
    with pytest.raises(DuplicateRequest):
        engine.submit(request("a", engine=engine, name="x"))
    for ids, more in [([], {}), ([999], {}), ([6] * 400, {}), ([6], {"pcm": b"ab"})]:
        with pytest.raises(InvalidRequest):
            engine.append("x", ids, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        engine.append("unknown", [6])
    engine.append("x", engine.format.prompt("b"), last=True)
    assert isinstance(drain(engine)[-1], Done) and is_free(engine)


# --------------------------------------------------------------------------------------------------------- our faults


def test_a_codec_that_fails_ends_only_who_was_in_that_step() -> None:
    engine = voice(max_streams=1)
    bad, good = request("no.", engine=engine, name="bad"), request("no.", engine=engine, name="good")
    engine.codec.fails = "bad"  # type: ignore[attr-defined]
    engine.submit(bad)
    engine.submit(good)
    ends = {event.request_id: event for event in drain(engine) if isinstance(event, TERMINAL)}
    assert isinstance(ends["bad"], Failed) and isinstance(ends["good"], Done) and is_free(engine)
    assert isinstance(engine.last_error, RuntimeError)


def test_a_model_that_fails_fails_the_request() -> None:
    engine = voice()
    engine.submit(request("no.", engine=engine, name="x"))
    engine.lm.executor.launch = lambda plan: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    (event,) = engine.step()
    assert isinstance(event, Failed) and event.request_id == "x" and not engine.num_requests()


# --------------------------------------------------------------------------------------------------- carry, trimming


def test_orpheus_hears_what_it_said_before() -> None:
    engine = voice(tiny.orpheus(), lm={"max_num_seqs": 2})
    prompts: list[list[int]] = []
    submit = engine.lm.submit
    engine.lm.submit = lambda made: (prompts.append(made.prompt), submit(made))[1]  # type: ignore[method-assign, assignment]
    short = seeded(2, logit_bias={engine.format.end: 100.0})  # a frame each
    (told,) = speak(engine, [request("yes.", "no.", "hello.", engine=engine, params=short)])
    assert isinstance(told[-1], Done)
    format = engine.format
    mine = [format.prompt(text) for text in ("yes.", "no.", "hello.")]
    first, second, third = prompts
    assert first == mine[0]
    num_spoken = len(mine[0]) + 7 + 2  # a frame, its end, and what stands between utterances
    assert second[: len(first)] == first and second[num_spoken - 2 : num_spoken] == [format.end, 55]
    assert second[num_spoken:] == mine[1]
    format.frames(second[len(first) : len(first) + 7])  # its codes
    assert third[: len(second)] == second and third[-len(mine[2]) :] == mine[2]
    assert told[-1].usage.num_cached_tokens >= len(first) + len(second) - 8  # the cache knows them: blocks of 4
    assert told[-1].usage.num_prompt_tokens == sum(map(len, mine))


# ------------------------------------------------------------------------------------------------- clocks and turns


def test_who_waits_for_the_first_audio_goes_before_who_has_plenty() -> None:
    clock = Clock()
    engine = voice(clock=clock)
    far = request(TEXTS[2], TEXTS[2], engine=engine, name="far", params=seeded(1, logit_bias={5: -100.0}))
    engine.submit(far)
    assert engine.next_deadline() == pytest.approx(100.15)
    while engine.counters.audio_s < 5:
        engine.step()
    # Time stood still: 5 s are to be played, and the deadline is that much later.
    assert engine.next_deadline() > 104
    engine.submit(request("no.", engine=engine, name="near", params=seeded(2)))
    assert engine.next_deadline() == pytest.approx(100.15)
    before = engine.counters.audio_s
    events: list[AnyEvent] = []
    while not any(event.request_id == "near" and isinstance(event, Audio) for event in events):
        events += engine.step()
    assert all(event.request_id == "near" for event in events if isinstance(event, Audio))
    assert engine.counters.audio_s - before < 0.3
    drain(engine)
    assert is_free(engine) and engine.stats()["underruns"] == 0


def test_an_underrun_is_counted_once_and_the_clock_begins_anew() -> None:
    clock = Clock()
    engine = voice(clock=clock)
    engine.submit(request(TEXTS[2], engine=engine, name="x", params=seeded(1, logit_bias={5: -100.0})))
    while not engine.counters.audio_s:
        engine.step()
    clock.now += engine.counters.audio_s + 2.0
    assert engine.next_deadline() < clock.now
    drain(engine)
    stats = engine.stats()
    assert stats["underruns"] == 1 and stats["underrun_seconds"] == pytest.approx(2.0)
    assert stats["first_audio"]["buckets"][-1] == [None, 1] and stats["speech_seconds"] > 1


def test_the_first_piece_is_small_and_later_ones_are_large() -> None:
    engine = voice(first_frames=3)
    (told,) = speak(engine, [request(TEXTS[2], engine=engine, params=seeded(1, logit_bias={5: -100.0}))])
    sizes = [len(event.pcm) // (2 * FRAME) for event in told if isinstance(event, Audio)]
    assert sizes[0] == 1 and max(sizes[:-1]) <= 12 and max(sizes) > 6 and sizes[:3] == sorted(sizes[:3])


class Painter:
    """Another engine of the device that always has work: a step takes half a second, or the slack it is given."""

    def __init__(self) -> None:
        self.num_steps = 0

    def has_work(self) -> bool:
        return True

    def next_deadline(self) -> float | None:
        return None

    def best_priority(self) -> int:
        return 0


def test_speech_stays_smooth_beside_another_engine() -> None:
    """Three streams, on a device whose time is counted: 15 ms a step of the LM (28 would be too slow), 10 ms one of the codec."""
    clock, painter, arbiter = Clock(), Painter(), DeviceArbiter()
    engine = voice(clock=clock)

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            clock.now += seconds
            return work(*given)

        return timed

    engine.lm.step = taking(0.015, engine.lm.step)  # type: ignore[method-assign]
    engine.codec.step = taking(0.010, engine.codec.step)  # type: ignore[method-assign]
    endless = {5: -100.0}
    for at in range(3):
        engine.submit(request(TEXTS[2], "no.", engine=engine, params=seeded(at, logit_bias=endless)))
    ends = 0
    while ends < 3:
        choice = arbiter.choose({"voice": engine, "painter": painter}, clock.now)
        assert choice is not None
        began = clock.now
        if choice.name == "painter":
            clock.now += 0.5 if choice.slack_s is None else min(0.5, max(0.02, choice.slack_s))
            painter.num_steps += 1
        else:
            ends += sum(isinstance(event, Done) for event in engine.step(choice.slack_s))
        arbiter.charge(choice.name, clock.now - began)
    stats = engine.stats()
    assert stats["underruns"] == 0 and stats["speech_seconds"] > 20 and painter.num_steps >= 5


def test_a_pause_of_the_writer_is_no_underrun() -> None:
    clock = Clock()
    engine = voice(clock=clock)
    engine.submit(request("no.", engine=engine, name="x", open=True))
    drain(engine)
    clock.now += 60.0
    assert engine.next_deadline() is None
    engine.append("x", engine.format.prompt("yes."), last=True)
    assert engine.next_deadline() == pytest.approx(clock.now + 0.15)
    drain(engine)
    assert engine.stats()["underruns"] == 0 and engine.stats()["first_audio"]["buckets"][-1] == [None, 2]


def test_priority_and_deadline_may_change() -> None:
    engine = voice(max_streams=1)
    for name in ("a", "b", "c"):
        engine.submit(request("no.", engine=engine, name=name))
    engine.update("c", priority=-1)
    engine.update("a", deadline=5.0, priority=3)
    engine.update("unknown", priority=1)
    assert engine.best_priority() == -1
    ends = [event.request_id for event in drain(engine) if isinstance(event, Done)]
    assert ends == ["a", "c", "b"]


def test_parameters_of_a_voice_take_what_was_asked() -> None:
    sampling = load_format(tiny.voice()).sampling
    assert voice_params(sampling) == SamplingParams(temperature=0.3, top_k=50)
    assert voice_params(sampling, seed=3, temperature=None, top_p=0.5) == SamplingParams(
        temperature=0.3, top_k=50, top_p=0.5, seed=3
    )
