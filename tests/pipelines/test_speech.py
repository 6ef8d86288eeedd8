"""The Speech pipeline over a scripted engine: whole and streamed, sync and async, text that is still being written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from motet import Speech
from motet.engine.config import HostConfig
from motet.engine.errors import ErrorInfo, InvalidRequest, ModelNotFound, Unavailable
from motet.pipelines.hub import Hub
from motet.pipelines.media import decode_audio

from .. import tiny
from .scripted_voice import MODEL, RATE, SECONDS_PER_ID, ScriptedVoice

TEXT = "The river was wide that year. Nobody crossed it."
SPOKEN = ["the river was wide that year.", "nobody crossed it."]
LONG = "The river was wide and slow that year. " * 60


@pytest.fixture
def client(tmp_path: Path) -> ScriptedVoice:
    return ScriptedVoice(tmp_path / "voice")


@pytest.fixture
def speech(client: ScriptedVoice) -> Iterator[Speech]:
    with Hub(HostConfig(), client=client) as hub, Speech(MODEL, hub=hub) as speech:
        yield speech


def seconds_of(client: ScriptedVoice, number: int = 0) -> float:
    given = client.utterances[client.requests[number].request_id]
    return sum(map(len, given)) * SECONDS_PER_ID + 0.15 * (len(given) - 1)


def test_a_text(speech: Speech, client: ScriptedVoice, tmp_path: Path) -> None:
    result = speech(TEXT, seed=5, priority=2)
    assert result.text == " ".join(SPOKEN) and client.texts() == SPOKEN
    assert result.duration == pytest.approx(seconds_of(client), abs=0.01)
    assert result.samples.dtype == np.float32 and result.samples.shape == (len(result.pcm) // 2,)
    assert np.abs(result.samples).max() == pytest.approx(8000 / 32768, rel=0.01)
    assert (result.samples_int16 == np.frombuffer(result.pcm, "<i2")).all()
    assert result.sample_rate == RATE and result.finish_reason == "stop" and result.usage.num_output_tokens > 0
    assert 0 < result.timing.first_audio_s <= result.timing.total_s and result.timing.rtf > 0
    assert "pcm" not in repr(result), "a result is printed without its samples"
    request = client.requests[0]
    assert request.priority == 2 and request.params is not None and request.params.seed == 5
    for name in ("a.wav", "a.mp3"):
        result.save(tmp_path / name)
        assert len(decode_audio(tmp_path / name)) / 16_000 == pytest.approx(result.duration, abs=0.001)
    result.save(tmp_path / "b.bin", "pcm")
    assert (tmp_path / "b.bin").read_bytes() == result.pcm == result.encode("pcm")
    with pytest.raises(InvalidRequest, match="ends in"):
        result.save(tmp_path / "c.txt")


def test_voices_and_models(speech: Speech, client: ScriptedVoice) -> None:
    assert speech.voices == ("ada",) and speech.info.kind == "tts"
    assert speech("Hello there.", voice="ada").text == "hello there."
    with pytest.raises(InvalidRequest) as caught:
        speech("Hello there.", voice="bob")
    assert caught.value.param == "voice"
    with pytest.raises(ModelNotFound):
        Speech("other", hub=speech.hub)
    client.kind = "llm"
    with pytest.raises(InvalidRequest, match="does not speak"):
        Speech(MODEL, hub=speech.hub)


def test_many_texts_in_order(speech: Speech, client: ScriptedVoice) -> None:
    client.together = 4  # one after another, the first would never answer
    results = speech([f"This is number {number}." for number in range(1, 5)])
    assert [result.text.split()[-1] for result in results] == ["one.", "two.", "three.", "four."]
    assert client.most_running == 4
    with pytest.raises(InvalidRequest, match="nothing in the text"):
        speech(["fine so far", "..."])


def test_speed(speech: Speech, client: ScriptedVoice) -> None:
    slow, fast = speech(TEXT, speed=0.5), speech(TEXT, speed=2)
    plain = seconds_of(client)
    assert slow.duration == pytest.approx(2 * plain, abs=0.01) and fast.duration == pytest.approx(plain / 2, abs=0.01)
    pieces = list(stream := speech.stream(TEXT, speed=1.5))
    assert b"".join(piece.pcm for piece in pieces) == stream.result.pcm
    assert stream.result.duration == pytest.approx(plain / 1.5, abs=0.01)
    with pytest.raises(InvalidRequest) as caught:
        speech.stream(TEXT, speed=float("nan"))
    assert caught.value.param == "speed"


def test_a_stream(speech: Speech, client: ScriptedVoice) -> None:
    client.delay_s = 0.001
    stream = speech.stream(TEXT)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.result
    pieces = list(stream)
    assert len(pieces) > 2
    assert [piece.text for piece in pieces if piece.text] == SPOKEN
    assert sum(piece.duration for piece in pieces) == pytest.approx(stream.result.duration)
    assert b"".join(piece.pcm for piece in pieces) == stream.result.pcm
    assert (np.concatenate([piece.samples for piece in pieces]) == stream.result.samples).all()


def test_text_that_is_still_being_written(speech: Speech, client: ScriptedVoice) -> None:
    def words() -> Iterator[str]:
        for word in TEXT.split(" "):
            time.sleep(0.001)
            yield word + " "

    with speech.stream(words()) as stream:
        pieces = list(stream)
    assert client.texts() == SPOKEN and pieces[0].text == SPOKEN[0]
    assert stream.result.text == " ".join(SPOKEN)


def test_an_iterator_that_breaks(speech: Speech, client: ScriptedVoice) -> None:
    def broken() -> Iterator[str]:
        yield TEXT + " "
        raise LookupError("the writer broke")

    with pytest.raises(LookupError):
        list(speech.stream(broken()))
    for wrong in (7, None, [7]):
        with pytest.raises(InvalidRequest) as caught:
            list(speech.stream(wrong))  # type: ignore[arg-type]
        assert caught.value.param == "input"
    with pytest.raises(InvalidRequest, match="pieces go to `stream`"):
        speech(7)  # type: ignore[call-overload]
    wait_until(lambda: not client.num_running)


def test_a_slow_reader_holds_the_voice_up(speech: Speech, client: ScriptedVoice) -> None:
    stream = speech.stream(LONG)
    first = next(stream)
    time.sleep(0.1)
    given = client.utterances[client.requests[0].request_id]
    assert len(given) < 20, "no more than was read, and twenty seconds twice"
    assert first.duration + sum(piece.duration for piece in stream) == pytest.approx(stream.result.duration)
    assert len(given) == 60


def test_leaving_early_aborts(speech: Speech, client: ScriptedVoice) -> None:
    for _ in range(10):
        with speech.stream(LONG) as stream:
            next(stream)
    wait_until(lambda: client.num_running == 0 and len(client.ended) == 10)


def test_errors_of_the_engine(speech: Speech, client: ScriptedVoice) -> None:
    client.fail = ErrorInfo(kind="Unavailable", message="gone", code="unavailable")
    with pytest.raises(Unavailable, match="gone"):
        speech(TEXT)
    with pytest.raises(Unavailable, match="gone"):
        list(speech.stream(TEXT))


def test_unknown_options(speech: Speech) -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'voice'"):
        speech(TEXT, voise="ada")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="unknown option 'volume'"):
        speech.stream(TEXT, volume=1)  # type: ignore[call-arg]


def test_async(speech: Speech, client: ScriptedVoice) -> None:
    async def words() -> AsyncIterator[str]:
        for word in TEXT.split(" "):
            await asyncio.sleep(0.001)
            yield word + " "

    async def broken() -> AsyncIterator[str]:
        yield TEXT + " "
        raise LookupError("the writer broke")

    async def run() -> None:
        assert (await speech.call_async(TEXT)).text == " ".join(SPOKEN)
        for text in (TEXT, words(), iter([TEXT])):
            async with speech.stream_async(text) as stream:
                pcm = [piece.pcm async for piece in stream]
            assert b"".join(pcm) == stream.result.pcm and stream.result.text == " ".join(SPOKEN)
        with pytest.raises(LookupError):
            async for _ in speech.stream_async(broken()):
                pass
        stream = speech.stream_async(LONG)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidRequest):
            await anext(speech.stream_async(""))
        call = asyncio.create_task(speech.call_async(LONG))
        while len(client.requests) < 7:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(run())
    wait_until(lambda: client.num_running == 0)


def test_an_endless_async_text_is_held_up(speech: Speech, client: ScriptedVoice) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal pulled
        while True:
            pulled += 1
            yield "The river was wide and slow that year. "

    async def run() -> None:
        stream = speech.stream_async(endless())
        await anext(stream)
        await asyncio.sleep(0.1)
        assert pulled < 30
        await stream.aclose()

    asyncio.run(run())
    wait_until(lambda: client.num_running == 0)


def wait_until(what: object, timeout_s: float = 10.0) -> None:
    """Until `what()` is true; what the hub's thread does takes a moment."""
    assert callable(what)
    done = threading.Event()
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        done.wait(0.005)


def test_the_real_engine_speaks() -> None:
    """Random weights, all the way from text to samples: a seed is kept, whole or streamed."""
    with Speech(str(tiny.voice()), threads=1) as speech:
        result = speech("We go. They stay here.", seed=3)
        assert result.text == "we go. they stay here." and result.duration > 0.3
        assert np.isfinite(result.samples).all()
        pieces = list(stream := speech.stream(iter(["We go. ", "They stay here."]), seed=3))
        assert stream.result.pcm == result.pcm == b"".join(piece.pcm for piece in pieces)
        assert speech("We go. They stay here.", seed=4).pcm != result.pcm
