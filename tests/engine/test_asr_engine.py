"""The recogniser's engine on a scripted model: files, streams, abort in every state, backpressure, bad input."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from motet.engine.asr_engine import ASREngine
from motet.engine.errors import DuplicateRequest, InvalidRequest, Overloaded
from motet.engine.types import (
    Aborted,
    AnyEvent,
    AudioRequest,
    Done,
    Failed,
    ModelInfo,
    Partial,
    Recognized,
    Request,
    Segment,
    Speech,
    TranscribeOptions,
)

from .scripted_whisper import LoudnessDetector, ScriptedWhisper, at

RATE = 16_000
_ids = itertools.count()


def engine(scripts: dict[int, list[list[int]]], **changes: Any) -> ASREngine:
    clock = itertools.count()
    info = ModelInfo(model="m", kind="asr", source="", max_model_len=448, vocab_size=51864, hidden_size=4)
    detector = LoudnessDetector()
    values: dict[str, Any] = {
        "info": info,
        "model": ScriptedWhisper(scripts),
        "vad": detector,
        "streams": detector,
        "clock": lambda: next(clock) / 1000,
        "num_slots": 4,
    }
    return ASREngine(**{**values, **changes})


def audio(*parts: tuple[int, float]) -> bytes:
    """Parts of (window number or 0 for silence, seconds); multiples of 512 samples, so that windows begin where said."""
    return np.concatenate([np.full(round(s * RATE / 512) * 512, w / 1000, "<f4") for w, s in parts]).tobytes()


def request(pcm: bytes, *, live: bool = False, **options: Any) -> AudioRequest:
    # Without padding a span begins with its own first sample, by which the script knows it.
    chosen = TranscribeOptions(**{"speech_pad_s": 0.0, **options})
    return AudioRequest(request_id=f"r{next(_ids)}", model="m", pcm=pcm, options=chosen, open=live)


def run(running: ASREngine, limit: int = 20_000) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    for _ in range(limit):
        if not running.has_work():
            return events
        events += running.step()
    raise AssertionError("no end")


def segments(events: list[AnyEvent], request_id: str) -> list[Segment]:
    return [s for e in events if isinstance(e, Recognized) and e.request_id == request_id for s in e.segments]


def idle(running: ASREngine) -> bool:
    stats = running.stats()
    return (
        not running.num_requests()
        and not running.has_work()
        and stats["free_slots"] == stats["free_audio_slots"] == 4
        and len(running._free_streams) == 4
    )


SCRIPTS = {
    1: [[at(0), 10, 11, at(1)]],
    2: [[at(0), 20, 21, at(0.8), at(1.0), 22, at(1.9)]],
    3: [[at(0), 30, at(0.5)]],
}
TALK = audio((0, 2), (1, 1.5), (0, 3), (2, 2), (0, 2.5), (3, 1), (0, 1))


def test_a_file_is_told_in_order_with_exact_times() -> None:
    running = engine(SCRIPTS)
    asked = request(TALK, word_timestamps=True)
    running.submit(asked)
    events = run(running)
    found = segments(events, asked.request_id)
    assert [s.text for s in found] == [" w10 w11", " w20 w21", " w22", " w30"]
    assert [s.id for s in found] == [0, 1, 2, 3]
    starts = [round(2 * RATE / 512) * 512 / RATE, round(2 * RATE / 512) * 512 / RATE + 4.5]
    assert found[0].start == pytest.approx(starts[0], abs=0.05)
    assert found[1].start == pytest.approx(starts[1], abs=0.1)
    assert found[1].end <= found[2].start
    times = [t for s in found for w in s.words or [] for t in (w.start, w.end)]
    assert times == sorted(times) and len(times) == 12 and times[-1] <= 13.0
    done = events[-1]
    assert isinstance(done, Done) and done.audio_s == len(TALK) / 4 / RATE and done.usage.num_output_tokens == 14
    assert [e.seq for e in events] == list(range(len(events)))
    assert idle(running)


class Labelling:
    """Puts a name on segments after some steps. Reads the recording as the diarizer does."""

    def __init__(self, read: Any, found: list[Segment], options: TranscribeOptions) -> None:
        self.read, self.found, self.steps = read, found, 0

    def step(self) -> list[Segment] | None:
        self.steps += 1
        if self.steps < 50:
            assert len(self.read(16_000 * (self.steps % 10), 16_000 * (self.steps % 10 + 1))) == 16_000
            return None
        return [msgspec.structs.replace(segment, speaker="Ann") for segment in self.found]


def test_others_are_served_while_speakers_are_told_apart() -> None:
    opened: list[Labelling] = []

    def diarize(*arguments: Any) -> Labelling:
        opened.append(Labelling(*arguments))
        return opened[-1]

    running = engine(SCRIPTS, diarize=diarize)
    long, short = request(TALK, diarize=True), request(audio((0, 1), (3, 1), (0, 1)))
    running.submit(long)
    while not opened:
        assert not running.step()  # nothing is told before speakers are known
    running.submit(short)
    events = []
    while not any(isinstance(event, Done) for event in events):
        events += running.step()
    assert [s.text for s in segments(events, short.request_id)] == [" w30"]
    assert opened[0].steps < 50  # the file's speakers are not known yet
    events = run(running)
    assert [(s.text, s.speaker) for s in segments(events, long.request_id)] == [
        (text, "Ann") for text in (" w10 w11", " w20 w21", " w22", " w30")
    ]
    assert isinstance(events[-1], Done) and opened[0].steps == 50 and idle(running)


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_while_speakers_are_told_apart_frees_everything(fails: bool) -> None:
    opened: list[Labelling] = []

    class Failing(Labelling):
        def step(self) -> list[Segment] | None:
            if fails and self.steps == 5:
                raise RuntimeError("broken")
            return super().step()

    def diarize(*arguments: Any) -> Labelling:
        opened.append(Failing(*arguments))
        return opened[-1]

    running = engine(SCRIPTS, diarize=diarize)
    asked = request(TALK, diarize=True)
    running.submit(asked)
    recording = weakref.ref(running._requests[asked.request_id].recording)
    while not (opened and opened[0].steps == 5):
        running.step()
    events = run(running) if fails else running.abort(asked.request_id, "client")
    assert [type(event) for event in events] == [Failed if fails else Aborted] and idle(running)
    opened.clear()
    gc.collect()
    running.last_error = None
    assert recording() is None and running.stats()["audio_bytes"] == 0


@pytest.mark.parametrize("size", [7 * 4, 16_000 * 4, 70 * 16_000 * 4, 1 << 30])
@pytest.mark.parametrize("vad", [True, False])
def test_a_file_in_pieces_is_the_same_file(size: int, vad: bool) -> None:
    talk = TALK + audio((0, 130 if size > 100 else 0), (1, 1.5), (0, 1)) if vad else audio((2, 2))
    running = engine(SCRIPTS)
    whole, pieces = request(talk, vad=vad), request(b"", vad=vad)
    running.submit(whole)
    expected = segments(run(running), whole.request_id)
    pieces.in_pieces = True
    running.submit(pieces)
    assert not running.has_work() and running.stats()["waiting_for_input"] == 1
    events = []
    for start in range(0, len(talk), size):
        running.append(pieces.request_id, [], pcm=talk[start : start + size])
        while running.has_work():  # what has come is heard while the rest is on its way
            events += running.step()
    assert not events
    running.append(pieces.request_id, [], last=True)
    events = run(running)
    assert segments(events, pieces.request_id) == expected and len(expected) >= 2
    assert isinstance(events[-1], Done) and events[-1].audio_s == len(talk) / 4 / RATE and idle(running)
    with pytest.raises(InvalidRequest):
        running.append(pieces.request_id, [], pcm=b"")


@pytest.mark.parametrize("diarize", [False, True])
def test_a_file_is_let_go_of_while_it_is_told(diarize: bool) -> None:
    talk = audio((0, 1), *[(1, 1.5), (0, 20)] * 40)
    running = engine(SCRIPTS, diarize=Labelling)
    asked = request(b"", diarize=diarize)
    asked.in_pieces = True
    running.submit(asked)
    for start in range(0, len(talk), 1 << 16):
        running.append(asked.request_id, [], pcm=talk[start : start + (1 << 16)])
    running.append(asked.request_id, [], last=True)
    held: list[int] = []  # bytes, when each segment was told
    events: list[AnyEvent] = []
    while running.has_work():
        before = running.stats()["audio_bytes"]
        new = running.step()
        events += new
        held += [before for event in new if isinstance(event, Recognized)]
    assert len(segments(events, asked.request_id)) == 40 and idle(running)
    if diarize:
        assert held == [len(talk)]  # the diarizer hears all of it once more
    else:
        assert held == sorted(held, reverse=True) and held[0] > 0.9 * len(talk) and held[20] < 0.6 * len(talk)
        assert held[-1] < 0.15 * len(talk)  # the last windows were decoded together


def test_a_file_that_never_comes_ends() -> None:
    running = engine(SCRIPTS, input_timeout_s=0.05)
    asked = request(b"")
    asked.in_pieces = True
    running.submit(asked)
    running.append(asked.request_id, [], pcm=TALK)
    assert running.next_timer() is not None
    events: list[AnyEvent] = []
    while not events:
        events += running.step()
    assert isinstance(events[0], Aborted) and events[0].reason == "input_timeout" and idle(running)
    both = request(b"", live=True)
    both.in_pieces = True
    with pytest.raises(InvalidRequest):
        running.submit(both)


def test_requests_share_the_batch_and_get_their_own_text() -> None:
    running = engine(SCRIPTS)
    asked = [request(audio((0, 1), (w, 1.2), (0, 1))) for w in (1, 2, 3, 1, 2, 3)]
    for item in asked:
        running.submit(item)
    events = run(running)
    texts = ["".join(s.text for s in segments(events, item.request_id)) for item in asked]
    assert texts == [" w10 w11", " w20 w21 w22", " w30"] * 2
    assert idle(running)
    # s16 is the same as f32.
    pcm = (np.frombuffer(asked[0].pcm or audio((0, 1), (1, 1.2), (0, 1)), "<f4") * 32768).round().astype("<i2")
    short = request(b"")
    short.pcm, short.encoding = pcm.tobytes(), "s16"
    running.submit(short)
    assert [s.text for s in segments(run(running), short.request_id)] == [" w10 w11"]


@pytest.mark.parametrize("pieces", [(1 << 30,), (512,), (100, 7, 999), (16_000, 1)])
def test_a_stream_gives_the_same_in_any_pieces(pieces: tuple[int, ...]) -> None:
    running = engine(SCRIPTS)
    asked = request(b"", live=True, end_silence_s=0.5)
    running.submit(asked)
    events: list[AnyEvent] = []
    position, sizes = 0, itertools.cycle(pieces)
    while position < len(TALK):
        size = 4 * next(sizes)
        running.append(asked.request_id, [], pcm=TALK[position : position + size], last=position + size >= len(TALK))
        position += size
        events += run(running)
    assert [s.text for s in segments(events, asked.request_id)] == [" w10 w11", " w20 w21", " w22", " w30"]
    marks = [(e.what, e.sample) for e in events if isinstance(e, Speech)]
    assert [what for what, _ in marks] == ["started", "stopped"] * 3
    assert [sample for _, sample in marks] == sorted(sample for _, sample in marks)
    assert isinstance(events[-1], Done) and idle(running)


def test_a_long_stream_forgets_its_past() -> None:
    running = engine(SCRIPTS)
    asked = request(b"", live=True)
    running.submit(asked)
    block = audio((0, 1), (1, 1.5), (0, 1.5))
    held = []
    for _ in range(40):
        running.append(asked.request_id, [], pcm=block)
        run(running)
        held.append(running.stats()["audio_bytes"])
    assert max(held) <= 2 * len(block) and running.stats()["active_streams"] == 1
    running.append(asked.request_id, [], last=True)
    assert isinstance(run(running)[-1], Done) and idle(running)


def test_partials_only_grow_and_end_as_the_final_text() -> None:
    grown = {
        1: [
            [at(0), 10, 19],
            [at(0), 10, 11, 18],
            [at(0), 10, 11, 12, 17],
            [at(0), 10, 11, 12, 13, at(3)],
        ]
    }
    running = engine(grown)
    asked = request(b"", live=True, partial_s=0.9)
    running.submit(asked)
    pcm = audio((0, 1), (1, 3), (0, 2))
    events: list[AnyEvent] = []
    for position in range(0, len(pcm), 4 * 1600):
        running.append(asked.request_id, [], pcm=pcm[position : position + 6400], last=position + 6400 >= len(pcm))
        events += run(running)
    partials = [e for e in events if isinstance(e, Partial)]
    final = "".join(s.text for s in segments(events, asked.request_id))
    assert final == " w10 w11 w12 w13"
    assert "".join(p.committed for p in partials) == final
    assert sum(bool(p.tentative) for p in partials) >= 2 and partials[-1].tentative == ""
    assert idle(running)


def test_an_early_end_is_heard_again() -> None:
    """The decoder closes a segment long before speech ends: the rest is decoded from there (vllm#58029)."""
    scripts = {1: [[at(0), 10, 11, at(2.0)]], 2: [[at(0), 20, at(1.0)]]}
    running = engine(scripts)
    # One stretch of speech whose second half, from 2.048 s on, sounds like window 2.
    asked = request(np.concatenate([np.full(32_000, 0.001, "<f4"), np.full(24_000, 0.002, "<f4")]).tobytes())
    running.submit(asked)
    found = segments(run(running), asked.request_id)
    assert [s.text for s in found] == [" w10 w11", " w20"]
    assert found[1].start == pytest.approx(2.0, abs=0.02)


def test_without_detector_the_whole_is_read_window_by_window() -> None:
    scripts = {1: [[at(0), 10, at(20.0), at(20.0), 99]], 2: [[at(0), 20, at(9.0)]]}
    running = engine(scripts)
    pcm = np.concatenate([np.full(20 * RATE, 0.001, "<f4"), np.full(15 * RATE, 0.002, "<f4")])
    asked = request(pcm.tobytes(), vad=False)
    running.submit(asked)
    found = segments(run(running), asked.request_id)
    assert [(s.text, s.start) for s in found] == [(" w10", 0.0), (" w20", 20.0)]


@pytest.mark.parametrize(
    "pcm",
    [b"", audio((0, 0.05)), audio((1, 0.05)), audio((0, 40))],
    ids=["empty", "50 ms of silence", "50 ms of sound", "silence"],
)
@pytest.mark.parametrize("live", [False, True])
def test_nothing_said_is_no_text(pcm: bytes, live: bool) -> None:
    running = engine(SCRIPTS)
    asked = request(pcm, live=live, min_silence_s=0.16)
    running.submit(asked)
    if live:
        running.append(asked.request_id, [], last=True)
    events = run(running)
    if len(pcm) and live and pcm == audio((1, 0.05)):
        assert all(s.end <= 0.07 for s in segments(events, asked.request_id))
    else:
        assert not segments(events, asked.request_id)
    assert isinstance(events[-1], Done) and idle(running)


def test_segments_beyond_the_audio_are_dropped() -> None:
    running = engine({1: [[at(0), 10, at(0.9), at(6.0), 66, at(8.0)]]})
    asked = request(audio((0, 1), (1, 1.0), (0, 1)))
    running.submit(asked)
    found = segments(run(running), asked.request_id)
    assert [s.text for s in found] == [" w10"] and found[0].end <= 3.0


@pytest.mark.parametrize("num_steps", range(0, 12))
@pytest.mark.parametrize("live", [False, True])
def test_abort_in_every_state(num_steps: int, live: bool) -> None:
    running = engine(SCRIPTS)
    asked, other = request(TALK, live=live, partial_s=0.4 if live else 0.0), request(TALK)
    running.submit(asked)
    running.submit(other)
    events: list[AnyEvent] = []
    for _ in range(num_steps):
        events += running.step()
    ended = running.abort(asked.request_id, "client")
    assert [type(e) for e in ended] in ([Aborted], [])
    assert running.abort(asked.request_id, "client") == []
    after = run(running)
    assert not [e for e in after if e.request_id == asked.request_id]
    assert [s.text for s in segments(events + after, other.request_id)] == [" w10 w11", " w20 w21", " w22", " w30"]
    assert idle(running)


def test_errors_end_one_request_alone() -> None:
    running = engine(SCRIPTS)
    running.model.fail_on = 2
    bad, good = request(audio((2, 1), (0, 1))), request(audio((1, 1), (0, 1)))
    running.submit(bad)
    running.submit(good)
    events = run(running)
    failed = [e for e in events if isinstance(e, Failed)]
    assert [e.request_id for e in failed] == [bad.request_id] and failed[0].error.code == "internal_error"
    assert [s.text for s in segments(events, good.request_id)] == [" w10 w11"]
    assert idle(running)


def test_too_fast_and_too_many() -> None:
    running = engine(SCRIPTS, max_behind_s=5.0)
    asked = request(b"", live=True)
    running.submit(asked)
    running.append(asked.request_id, [], pcm=audio((1, 4)))
    with pytest.raises(InvalidRequest) as caught:
        running.append(asked.request_id, [], pcm=audio((1, 4)))
    assert caught.value.code == "too_fast"
    running.abort(asked.request_id, "bad_input")
    streams = [request(b"", live=True) for _ in range(5)]
    for item in streams[:4]:
        running.submit(item)
    with pytest.raises(Overloaded):
        running.submit(streams[4])
    with pytest.raises(DuplicateRequest):
        running.submit(streams[0])
    for item in streams[:4]:
        running.abort(item.request_id, "client")
    assert idle(running)


def test_a_silent_client_is_let_go() -> None:
    running = engine(SCRIPTS, input_timeout_s=0.05)
    asked = request(b"", live=True)
    running.submit(asked)
    timer = running.next_timer()
    assert timer is not None
    events: list[AnyEvent] = []
    for _ in range(100):
        events += running.step()
    assert [e.reason for e in events if isinstance(e, Aborted)] == ["input_timeout"] and idle(running)


@pytest.mark.parametrize(
    "options",
    [
        {"task": "translate"},
        {"language": "de"},
        {"temperatures": ()},
        {"temperatures": (-1.0,)},
        {"beam_size": 5},
        {"best_of": 0},
        {"patience": 0.0},
        {"vad_threshold": 0.0},
        {"max_segment_s": 31.0},
        {"logprob_threshold": float("nan")},
        {"suppress_tokens": (999_999,)},
        {"diarize": True},
        {"prompt": "x" * 20_001},
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any]) -> None:
    running = engine(SCRIPTS)
    with pytest.raises(InvalidRequest):
        running.submit(request(TALK, **options))
    assert idle(running)


def test_bad_audio_and_wrong_requests_are_refused() -> None:
    running = engine(SCRIPTS)
    with pytest.raises(InvalidRequest):
        running.submit(request(b"123"))
    with pytest.raises(InvalidRequest) as caught:
        running.submit(request(np.array([0.0, np.nan], "<f4").tobytes()))
    assert caught.value.code == "invalid_audio"
    with pytest.raises(InvalidRequest):
        running.submit(Request(request_id="x", model="m", prompt=[1]))
    with pytest.raises(InvalidRequest):
        running.append("unknown", [], pcm=b"")
    closed = request(TALK)
    running.submit(closed)
    with pytest.raises(InvalidRequest):
        running.append(closed.request_id, [], pcm=b"")
    run(running)
    assert idle(running)


def test_deadlines_are_told_to_the_arbiter() -> None:
    running = engine(SCRIPTS)
    assert running.next_deadline() is None
    asked = request(b"", live=True)
    running.submit(asked)
    assert running.next_deadline() is None and not running.has_work()
    running.append(asked.request_id, [], pcm=audio((1, 1)))
    assert running.has_work() and running.next_deadline() is not None
    running.abort(asked.request_id, "client")
    assert running.next_deadline() is None
