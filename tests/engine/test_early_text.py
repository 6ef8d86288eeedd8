"""Text of live streams before it is final: looking ahead in a silence, partials by turn, how far the text is complete."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from motet.engine.asr_engine import ASREngine
from motet.engine.types import AnyEvent, AudioRequest, Done, Partial, Recognized, Speech

from .scripted_whisper import at
from .test_asr_engine import SCRIPTS, audio, engine, idle, request, run, segments

WINDOW = 512 * 4  # bytes


def speak(running: ASREngine, asked: AudioRequest, pcm: bytes, piece: int = WINDOW) -> list[list[AnyEvent]]:
    """The events of each step, the audio coming in pieces."""
    steps: list[list[AnyEvent]] = []
    for start in range(0, len(pcm), piece):
        running.append(asked.request_id, [], pcm=pcm[start : start + piece], last=start + piece >= len(pcm))
        while running.has_work():
            steps.append(running.step())
    return steps


def stream(running: ASREngine, **options: Any) -> AudioRequest:
    asked = request(b"", live=True, **options)
    running.submit(asked)
    return asked


def test_final_text_is_there_when_the_silence_is_certain() -> None:
    running = engine(SCRIPTS)
    asked = stream(running, end_silence_s=0.3)
    steps = speak(running, asked, audio((0, 1), (1, 1.5), (0, 2), (3, 1), (0, 1)))
    stops = [step for step in steps for e in step if isinstance(e, Speech) and e.what == "stopped"]
    assert len(stops) == 2
    for step in stops:  # in the very step
        assert [type(e) for e in step] == [Speech, Recognized]
    assert running.decoder.counters["windows"] == 2  # and nothing was decoded twice
    events = [e for step in steps for e in step]
    assert [s.text for s in segments(events, asked.request_id)] == [" w10 w11", " w30"]
    assert idle(running)


@pytest.mark.parametrize("partial_s", [0.0, 0.4])
@pytest.mark.parametrize("piece", [WINDOW, 5 * WINDOW + 4, 1 << 30])
def test_speech_that_goes_on_is_decoded_whole(partial_s: float, piece: int) -> None:
    """Pauses that are no ends: what was looked at ahead is of no consequence for the final text."""
    talk = audio((0, 1), (1, 1.0), (0, 0.2), (1, 0.5), (0, 0.25), (1, 0.3), (0, 1.5), (3, 1), (0, 0.2))
    running = engine({**SCRIPTS, 1: [[at(0), 10, 11, at(2.2)]]})
    asked = stream(running, end_silence_s=0.3, partial_s=partial_s)
    events = [e for step in speak(running, asked, talk, piece) for e in step]
    assert [s.text for s in segments(events, asked.request_id)] == [" w10 w11", " w30"]
    if partial_s:
        said = "".join(e.committed for e in events if isinstance(e, Partial))
        assert said == " w10 w11 w30"
    assert isinstance(events[-1], Done) and [e.seq for e in events] == list(range(len(events)))
    assert idle(running)


def test_an_end_that_is_not_one_is_told_as_a_partial() -> None:
    running = engine({1: [[at(0), 10, 11, at(1)], [at(0), 10, 11, 12, at(2)]]})
    asked = stream(running, end_silence_s=0.3, partial_s=30.0)  # none is due
    events = [e for step in speak(running, asked, audio((1, 1), (0, 0.25), (1, 1), (0, 1))) for e in step]
    partials = [e for e in events if isinstance(e, Partial)]
    assert partials[0].tentative == " w10 w11"
    assert "".join(e.committed for e in partials) == " w10 w11 w12"
    assert [s.text for s in segments(events, asked.request_id)] == [" w10 w11 w12"]


def test_a_busy_decoder_does_not_look_ahead() -> None:
    running = engine({**SCRIPTS, **{9: [[at(0), *range(200), at(9)]]}}, num_slots=8)
    busy = [request(audio((9, 1))) for _ in range(6)]
    asked = stream(running, end_silence_s=0.3)
    running.append(asked.request_id, [], pcm=audio((1, 1.5)))
    run(running)
    for item in busy:
        running.submit(item)
    for _ in range(20):
        running.step()
    before = running.decoder.counters["windows"]
    running.append(asked.request_id, [], pcm=audio((0, 0.25)))
    for _ in range(3):
        running.step()
    assert running.decoder.counters["windows"] == before and running._requests[asked.request_id].ahead is None  # type: ignore[attr-defined]
    running.append(asked.request_id, [], pcm=audio((0, 1)), last=True)
    assert [s.text for s in segments(run(running), asked.request_id)] == [" w10 w11"]


@pytest.mark.parametrize("num_steps", range(0, 12))
def test_leaving_while_the_end_is_looked_at_frees_everything(num_steps: int) -> None:
    running = engine(SCRIPTS)
    asked = stream(running, end_silence_s=0.3, partial_s=0.3)
    running.append(asked.request_id, [], pcm=audio((1, 1), (0, 0.25)))
    for _ in range(num_steps):
        running.step()
    assert len(running.abort(asked.request_id, "disconnect")) == 1
    assert run(running) == [] and idle(running)


def test_partials_take_turns() -> None:
    """Streams that speak at once each get their partials, and they take less and less to say again."""
    grown = {w: [[at(0), *range(100 * w, 100 * w + n)] for n in range(4, 60, 4)] for w in range(1, 5)}
    running = engine(grown)
    asked = [stream(running, partial_s=0.5) for _ in range(4)]
    told: list[str] = []
    for _ in range(40):
        for number, item in enumerate(asked, start=1):
            running.append(item.request_id, [], pcm=audio((number, 0.1)))
        told += [e.request_id for e in run(running) if isinstance(e, Partial)]
    counts = [told.count(item.request_id) for item in asked]
    assert min(counts) >= 4 and max(counts) - min(counts) <= 1
    choice = running.decoder._choice
    assert choice.num_accepted > 0.6 * choice.num_tokens


def completeness(events: Sequence[AnyEvent]) -> None:
    """What `upto` promises: it never falls, and nothing that begins before it comes later."""
    upto = 0.0
    for event in events:
        if isinstance(event, Recognized | Speech):
            assert event.upto >= upto
            if isinstance(event, Recognized):
                assert all(s.start >= upto - 1e-3 for s in event.segments)
                assert all(s.end <= event.upto + 1e-3 for s in event.segments)
            upto = event.upto


@pytest.mark.parametrize("options", [{}, {"partial_s": 0.5}, {"end_silence_s": 0.3}, {"max_segment_s": 2.0}])
def test_how_far_the_text_is_complete(options: dict[str, Any]) -> None:
    talk = audio((0, 1), (1, 1.5), (0, 2), (2, 2), (0, 1), (3, 1), (0, 1))
    running = engine({**SCRIPTS, 1: [[at(0), 10, 11, at(1)]]})
    asked = stream(running, **options)
    events = [e for step in speak(running, asked, talk, 16_00 * 4) for e in step]
    completeness(events)
    stops = [e.sample for e in events if isinstance(e, Speech) and e.what == "stopped"]
    final = [e.upto for e in events if isinstance(e, Recognized)]
    # Each end of speech is covered as soon as its own text has been told, and not before.
    for sample, before in zip(stops, itertools.accumulate(final, max)):
        assert any(upto * 16_000 >= sample for upto in final) and before > 0


def test_marks_of_speech_do_not_count_as_told() -> None:
    """Speech that was heard all at once: its marks come before any text, and `upto` stays behind them."""
    running = engine(SCRIPTS)
    asked = stream(running)
    running.append(asked.request_id, [], pcm=audio((0, 0.5), (1, 0.4), (0, 0.6), (2, 0.2)), last=False)
    marks = [e for e in running.step() if isinstance(e, Speech)]
    assert [e.what for e in marks] == ["started", "stopped", "started"]
    assert all(e.upto * 16_000 == marks[0].sample for e in marks)


def test_a_file_is_complete_to_its_end() -> None:
    running = engine(SCRIPTS)
    asked = request(audio((0, 1), (1, 1.5), (0, 3), (3, 1), (0, 1)))
    running.submit(asked)
    events = run(running)
    completeness(events)
    assert [e for e in events if isinstance(e, Recognized)][-1].upto == pytest.approx(7.5, abs=0.1)
