"""The spoken demo's client against a scripted server, and its measures against others'."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve

from motet.deploy import speech_demo
from motet.deploy.speech_demo import Heard, error_rate, final_latency_s, last_sound, stream, word_errors, words_of
from motet.engine.errors import MotetError, Unavailable

RATE = 16_000
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


class ScriptedServer:
    """Says what it heard: a partial after a second, a segment at the end; or refuses; or breaks off."""

    def __init__(self, *, refuse: bool = False, break_off: bool = False) -> None:
        self.refuse = refuse
        self.break_off = break_off
        self.heard = b""
        self.queries: list[dict[str, list[str]]] = []
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedServer]:
        async with serve(self._answer, "127.0.0.1", 0, close_timeout=0.2) as server:
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield self

    async def _answer(self, socket: ServerConnection) -> None:
        async def tell(**message: Any) -> None:
            await socket.send(json.dumps(message))

        assert socket.request is not None
        self.queries.append(parse_qs(urlsplit(socket.request.path).query))
        await tell(type="ready", model="m")
        told = False
        async for message in socket:
            if isinstance(message, str):
                assert json.loads(message) == {"type": "end"}
                break
            self.heard += message
            if self.refuse:
                await tell(type="error", message="no", code="invalid_value", param=None)
                return
            if self.break_off:
                return
            if not told and len(self.heard) >= RATE:
                told = True
                await tell(type="partial", committed=" Half", tentative=" maybe", start=0.0)
        await tell(type="speech", what="stopped", at=1.0)
        await tell(type="segment", id=0, start=0.0, end=1.0, text=" Half a", language="en")
        await tell(type="segment", id=1, start=1.0, end=2.0, text=" minute.", language="en")
        await tell(type="done", audio_s=2.0, dropped_bytes=0)


def heard_of(server: ScriptedServer, samples: np.ndarray, **options: Any) -> Heard:
    async def main() -> Heard:
        async with server.running():
            return await stream(server.url, "m", samples, silence_s=0.3, tail_s=0.5, **options)

    return asyncio.run(main())


def test_a_stream_at_the_speed_of_speech() -> None:
    server = ScriptedServer()
    samples = (0.5 * np.sin(np.arange(RATE // 2))).astype(np.float32)
    started = time.perf_counter()
    heard = heard_of(server, samples, partials_s=0.5, language="en")
    assert time.perf_counter() - started > 0.98  # never sooner; how much later is the machine's affair
    assert heard.text == "Half a minute."
    ((first, partial),) = heard.of("partial")
    assert partial["committed"] == " Half" and 0.45 < first < heard.of("segment")[0][0] < heard.of("done")[0][0]
    sent = np.frombuffer(server.heard, "<i2")
    assert (
        len(sent) == RATE
        and np.array_equal(sent[: RATE // 2], np.rint(samples * 32768))
        and not sent[RATE // 2 :].any()
    )
    (query,) = server.queries
    assert query == {
        "model": ["m"], "encoding": ["s16"], "rate": ["16000"], "silence": ["300"], "partials": ["500"], "language": ["en"],
    }  # fmt: skip


def test_as_fast_as_it_is_read() -> None:
    samples = np.zeros(600 * RATE, np.float32)  # ten minutes: at the speed of speech no test would end
    assert heard_of(ScriptedServer(), samples, pace=0).text == "Half a minute."


def test_what_goes_wrong_is_told() -> None:
    with pytest.raises(MotetError, match="refuses the stream: no"):
        heard_of(ScriptedServer(refuse=True), np.zeros(RATE, np.float32), pace=0)
    with pytest.raises(Unavailable, match="ended without its end|broke off"):
        heard_of(ScriptedServer(break_off=True), np.zeros(RATE, np.float32), pace=0)
    with pytest.raises(Unavailable, match="broke off"):
        asyncio.run(stream("http://127.0.0.1:9", "m", np.zeros(8, np.float32), silence_s=0.3))


def test_the_last_sound_and_the_latency() -> None:
    samples = np.zeros(2 * RATE, np.float32)
    samples[: RATE // 2] = 0.5
    samples[RATE : RATE + 100] = 0.002  # far below
    assert last_sound(samples) == RATE // 2
    assert last_sound(np.zeros(0, np.float32)) == 0
    heard = Heard(log=[(when, {"type": "segment", "text": "x"}) for when in (0.7, 0.9)])
    assert final_latency_s(samples, heard) == pytest.approx(0.4)
    with pytest.raises(Unavailable, match="nothing was heard"):
        final_latency_s(samples, Heard())


@given(WORDS, WORDS)
def test_word_errors_as_jiwer_counts_them(expected: list[str], heard: list[str]) -> None:
    errors, count = word_errors(" ".join(expected), " ".join(heard))
    assert count == len(expected)
    if expected:
        assert errors / count == pytest.approx(jiwer.wer(" ".join(expected), " ".join(heard)))
    else:
        assert errors == len(heard)


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert words_of("I’m sorry -- but, I WAS_unable.") == ["i'm", "sorry", "but", "i", "was", "unable"]
    assert error_rate([("Hello, world!", "hello world"), ("a b", "a c")]) == 0.25
    assert error_rate([]) == 0


def test_the_recordings() -> None:
    clips = speech_demo.clips()
    assert len(clips) == 10
    assert all(1 < clip.seconds < 15 and clip.text and clip.samples.dtype == np.float32 for clip in clips)
    assert all(0.5 < last_sound(clip.samples) / RATE <= clip.seconds for clip in clips)
