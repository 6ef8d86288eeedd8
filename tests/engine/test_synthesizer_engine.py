"""A direct synthesizer as an engine: every utterance in order, the loop never waits, one terminal event each."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.errors import ContextLengthExceeded, DuplicateRequest, InvalidRequest, ModelLoadError
from motet.engine.frontend.speech import SpeakRequest, SpeechFrontend, SpokenAudio
from motet.engine.load import build_engine
from motet.engine.synthesizer_engine import SynthesizerEngine
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

from ..models.piper_voice import PER_ID, RATE, SYMBOLS, samples, write_voice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A synthesizer at 24 kHz that answers when it may: the second id of a prompt tells how many tenths of a second."""

    sample_rate = 24_000

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: list[tuple[list[int], float]] = []
        self.error: Exception | None = None

    def synthesize(self, prompt: Sequence[int], *, noise: float = 1.0) -> np.ndarray[Any, Any]:
        self.asked.append((list(prompt), noise))
        assert self.may_answer.wait(10)
        if self.error is not None:
            raise self.error
        return np.full(prompt[1] * 2400, 0.25, np.float32)


class Stage:
    """An engine with a scripted synthesizer and clock."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.voice = Clock(), Scripted()
        format = load_format(write_voice(folder, speakers=2, graph=False))
        info = ModelInfo(model="v", kind="tts", source="", max_model_len=64, vocab_size=len(SYMBOLS), hidden_size=0)
        self.engine = SynthesizerEngine(info=info, synthesizer=self.voice, format=format, clock=self.clock)

    def run(self) -> list[AnyEvent]:
        """Step until nothing is to be done, waiting for the worker where it has a job."""
        events: list[AnyEvent] = []
        for _ in range(2000):
            if self.engine.has_work():
                events += self.engine.step()
            elif self.engine._job is None:
                return events
            else:
                time.sleep(0.001)
        raise AssertionError("the worker never answers")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.voice.may_answer.set()
    made.engine.close()


def ask(name: str, *utterances: list[int], **more: Any) -> SpeechRequest:
    return SpeechRequest(request_id=name, model="v", utterances=list(utterances), **more)


def check(events: list[AnyEvent]) -> list[int]:
    """One terminal event, numbered events, pieces of a second at most; gives milliseconds of each utterance."""
    assert [isinstance(event, TERMINAL) for event in events] == [False] * (len(events) - 1) + [True]
    assert [event.seq for event in events] == list(range(len(events)))
    spoken: list[int] = []
    last = True
    for event in events:
        if isinstance(event, Audio):
            if last:
                spoken.append(0)
            assert event.utterance == len(spoken) - 1 and len(event.pcm) <= 48_000
            spoken[-1] += len(event.pcm) // 48
            last = event.last
    assert last
    return spoken


def test_utterances_are_spoken_in_order_and_whole(stage: Stage) -> None:
    stage.engine.submit(ask("r", [0, 23], [1, 5], [0, 10]))
    events = stage.run()
    assert check(events) == [2300, 500, 1000]
    done = events[-1]
    assert isinstance(done, Done) and done.audio_s == pytest.approx(3.8) and done.usage.num_prompt_tokens == 6
    assert np.frombuffer(events[0].pcm, "<i2")[7] == round(0.25 * 32767)
    assert stage.engine.num_requests() == 0 and not stage.engine.has_work()
    stats = stage.engine.stats()
    assert (stats["speech_seconds"], stats["utterances"]) == (pytest.approx(3.8), 3)
    assert stats["first_audio"]["buckets"][-1] == [None, 1]


def test_the_loop_does_not_wait_for_the_worker(stage: Stage) -> None:
    stage.voice.may_answer.clear()
    stage.engine.submit(ask("r", [0, 5]))
    assert stage.engine.has_work() and stage.engine.next_timer() is None
    assert stage.engine.step() == []
    assert not stage.engine.has_work()  # others' steps go on
    assert stage.engine.next_timer() == pytest.approx(
        stage.clock.now + 0.004
    )  # and if there are none, it is looked after
    assert stage.engine.next_deadline() == pytest.approx(stage.clock.now + 0.15)
    stage.voice.may_answer.set()
    assert check(stage.run()) == [500]
    assert stage.engine.next_deadline() is None and stage.engine.next_timer() is None


def test_who_runs_out_first_is_next(stage: Stage) -> None:
    stage.voice.may_answer.clear()
    stage.engine.submit(ask("long", *([0, 20] for _ in range(3))))
    stage.engine.step()
    stage.engine.submit(ask("late", [1, 7], deadline=0.5))
    stage.engine.submit(ask("soon", [1, 6], deadline=0.1, priority=9))
    stage.voice.may_answer.set()
    stage.run()
    # `long` has two seconds to play after its first utterance: the others' first audio goes before its second one.
    assert [prompt[1] for prompt, _ in stage.voice.asked] == [20, 6, 7, 20, 20]


def test_with_time_left_the_better_priority_is_next(stage: Stage) -> None:
    stage.engine.submit(ask("plain", *([0, 25] for _ in range(2)), priority=1))
    stage.engine.submit(ask("better", *([1, 26] for _ in range(2)), priority=0))
    stage.run()
    assert [prompt[1] for prompt, _ in stage.voice.asked] == [25, 26, 26, 25]


def test_an_open_request_grows_and_is_closed(stage: Stage) -> None:
    engine = stage.engine
    engine.submit(ask("r", open=True))
    assert not engine.has_work() and engine.next_deadline() is None
    engine.append("r", [0, 5])
    events = stage.run()
    stage.clock.now += 60.0  # what was sent has long been played: a pause is no underrun
    engine.append("r", [0, 3])
    assert engine.next_deadline() == pytest.approx(stage.clock.now + 0.15)
    events += stage.run()
    engine.append("r", [], last=True)
    events += stage.run()
    assert check(events) == [500, 300] and engine.stats()["underruns"] == 0
    with pytest.raises(InvalidRequest, match="takes no more input"):
        engine.append("r", [0, 3])


def test_audio_that_comes_late_is_counted(stage: Stage) -> None:
    stage.engine.submit(ask("r", [0, 5], [0, 5]))
    while stage.engine.stats()["utterances"] == 0:
        stage.engine.step()
    stage.clock.now += 2.0
    events = stage.run()
    stats = stage.engine.stats()
    assert stats["underruns"] == 1 and stats["underrun_seconds"] == pytest.approx(1.5)
    assert isinstance(events[-1], Done)


def test_input_that_never_comes_ends_the_request(stage: Stage) -> None:
    stage.engine.submit(ask("r", open=True))
    timer = stage.engine.next_timer()
    assert timer == pytest.approx(stage.clock.now + 300)
    stage.clock.now = timer
    (event,) = stage.engine.step()
    assert isinstance(event, Aborted) and event.reason == "input_timeout"


def test_an_aborted_utterance_is_dropped(stage: Stage) -> None:
    stage.voice.may_answer.clear()
    stage.engine.submit(ask("r", [0, 5], [0, 6]))
    stage.engine.submit(ask("other", [0, 7]))
    stage.engine.step()
    (event,) = stage.engine.abort("r", "client")
    assert isinstance(event, Aborted) and event.usage.num_prompt_tokens == 4
    assert stage.engine.abort("r", "client") == []
    stage.engine.submit(ask("r", [0, 9]))  # the id is free again, and the old answer is not the new one's
    stage.voice.may_answer.set()
    events = stage.run()
    assert check([event for event in events if event.request_id == "other"]) == [700]
    assert check([event for event in events if event.request_id == "r"]) == [900]


def test_a_failure_ends_its_own_request_only(stage: Stage) -> None:
    stage.voice.error = RuntimeError("secret words")
    stage.engine.submit(ask("bad", [0, 5], [0, 5]))
    (failed,) = stage.run()
    assert isinstance(failed, Failed) and "secret" not in failed.error.message
    assert str(stage.engine.last_error) == "secret words"
    stage.voice.error = None
    stage.engine.submit(ask("good", [0, 5]))
    assert check(stage.run()) == [500]


def test_speech_without_an_end_is_cut(stage: Stage) -> None:
    stage.voice.synthesize = lambda prompt, noise: np.zeros(24_000 * 60, np.float32)  # type: ignore[method-assign]
    stage.engine.submit(ask("r", [0, 5]))
    assert check(stage.run()) == [4400]  # 4 s, and 0.2 s for each id
    assert stage.engine.stats()["cut_utterances"] == 1


def test_requests_that_can_never_work_are_refused(stage: Stage) -> None:
    engine = stage.engine
    bad: list[tuple[Any, type[Exception], str]] = [
        (Request(request_id="r", model="v", prompt=[1]), InvalidRequest, "speech requests"),
        (ask("r"), InvalidRequest, "got none"),
        (ask("r", [0]), InvalidRequest, "a speaker and ids"),
        (ask("r", [2, 1]), InvalidRequest, r"a speaker in \[0, 2\)"),
        (ask("r", [0, len(SYMBOLS)]), InvalidRequest, "ids of sounds"),
        (ask("r", [0, -1]), InvalidRequest, "ids of sounds"),
        (ask("r", [0] * 65), ContextLengthExceeded, "at most 64"),
        (ask("r", [0, 1], params=SamplingParams(temperature=-1)), InvalidRequest, "temperature"),
    ]
    for request, kind, words in bad:
        with pytest.raises(kind, match=words):
            engine.submit(request)
    assert engine.num_requests() == 0
    engine.submit(ask("r", open=True))
    with pytest.raises(DuplicateRequest):
        engine.submit(ask("r", [0, 1]))
    for more, words in (({"pcm": b"1"}, "ids of one utterance"), ({}, "got none")):
        with pytest.raises(InvalidRequest, match=words):
            engine.append("r", [], **more)


def test_a_voice_on_disk_is_loaded_and_speaks_at_24_khz(tmp_path: Path) -> None:
    path = write_voice(tmp_path)
    phases: list[str] = []
    engine = build_engine(str(path), HostConfig(threads=2), phases.append)
    try:
        assert (engine.kind, engine.info.source, phases[-1]) == ("tts", str(path), "ready")
        assert engine.info.extra["voices"] == ["tiny"] and engine.info.extra["threads"] == 1
        prompt = load_format(path).prompt("hello there.")
        asked = SpeechRequest(
            request_id="r", model="v", utterances=[prompt, prompt], params=SamplingParams(temperature=0.0)
        )
        engine.submit(asked)
        events: list[AnyEvent] = []
        while engine.num_requests():
            events += engine.step() if engine.has_work() else time.sleep(0.001) or []
        milliseconds = (len(prompt) - 1) * PER_ID * 1000 // RATE
        assert check(events) == [milliseconds, milliseconds]
        pcm = b"".join(event.pcm for event in events if isinstance(event, Audio) and event.utterance == 0)
        assert pcm == b"".join(event.pcm for event in events if isinstance(event, Audio) and event.utterance == 1)
        heard = np.frombuffer(pcm, "<i2") / 32767
        middles = heard[300::600]  # PER_ID samples at 16 kHz are 600 at 24 kHz
        np.testing.assert_allclose(middles, samples(prompt)[200::PER_ID], atol=0.02)
    finally:
        engine.close()


def test_a_language_that_espeak_does_not_know_is_found_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "espeak-ng"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    path = write_voice(tmp_path, phoneme_type="espeak", espeak={"voice": "nonsense"})
    with pytest.raises(ModelLoadError, match=r"tiny\.onnx: espeak-ng failed with status 1"):
        build_engine(str(path), HostConfig(threads=2), lambda phase: None)


@pytest.mark.parametrize("pieces", [False, True])
def test_text_is_spoken_through_a_host(tmp_path: Path, pieces: bool) -> None:
    """The frontend's text, the host's loop asleep between two utterances, the worker: all that was said comes out."""
    path = write_voice(tmp_path)
    text = "Hello there my friend. How are you today? I am quite well, thank you very much."

    async def streamed() -> AsyncIterator[str]:
        for word in text.split(" "):
            yield word + " "
            await asyncio.sleep(0)

    async def scenario() -> list[SpokenAudio | Done | Aborted | Failed]:
        client = InlineClient(HostConfig(threads=1))
        try:
            speech = SpeechFrontend(client)
            asked = SpeakRequest(model=str(path), text=streamed() if pieces else text, temperature=0.0)
            return [event async for event in speech.speak(asked)]
        finally:
            await client.close()

    events = asyncio.run(scenario())
    done = events[-1]
    assert isinstance(done, Done)
    spoken = [event for event in events if isinstance(event, SpokenAudio)]
    assert sum(event.last for event in spoken) >= 3
    # At 25 ms for each id: begin, pad, two ids for each character, end.
    assert done.audio_s > 0.9 * 2 * len(text) * PER_ID / RATE
    assert sum(event.seconds for event in spoken) == pytest.approx(done.audio_s)
