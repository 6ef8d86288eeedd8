"""The speech side of the fake engine: what is loud is speech, and every half second of it is one word.

"one two three" is a second and a half. Live streams get Speech events, committed partials and a Recognized per stretch
of speech that ends with `end_silence_s` of quiet; without `vad` everything is one stretch up to the last append.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from motet.engine.types import Aborted, AnyEvent, AudioRequest, Done, Partial, Recognized, Segment, Speech, Word

RATE = 16_000
WINDOW = 512
WORD = RATE // 2  # samples
LOUD = 0.05
NUMBERS = "one two three four five six seven eight nine ten".split()


def sound(speech_s: float, *, silence_s: float = 0.0, rate: int = RATE) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tone, then silence: float32 at `rate`."""
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(speech_s * rate)) / rate)
    return np.concatenate([tone, np.zeros(int(silence_s * rate))]).astype(np.float32)


def s16(samples: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def words(start: int, stop: int) -> list[Word]:
    """The words of a stretch of speech, in seconds of the whole."""
    count = max(round((stop - start) / WORD), 1)
    return [
        Word(
            word=f" {NUMBERS[i % 10]}",
            start=(start + i * WORD) / RATE,
            end=(start + (i + 1) * WORD) / RATE,
            probability=0.9,
        )
        for i in range(count)
    ]


class FakeRecogniser:
    """One request's work."""

    def __init__(
        self, request: AudioRequest, inbox: asyncio.Queue[tuple[bytes, bool]], stopped: Callable[[], str]
    ) -> None:
        self.request = request
        self.inbox = inbox
        self.stopped = stopped
        self.options = request.options
        self.num_segments = 0
        self.num_samples = 0

    def ids(self) -> dict[str, Any]:
        return {"request_id": self.request.request_id}

    def segment(self, start: int, stop: int) -> Segment:
        said = words(start, stop)
        self.num_segments += 1
        return Segment(
            id=self.num_segments - 1,
            start=start / RATE,
            end=stop / RATE,
            text="".join(word.word for word in said),
            tokens=[1, 2],
            avg_logprob=-0.25,
            words=said if self.options.word_timestamps else None,
            speaker="AB"[self.num_segments % 2] if self.options.diarize else None,
        )

    async def events(self) -> AsyncIterator[AnyEvent]:
        heard = self._live() if self.request.open else self._file()
        async for event in heard:
            yield event
        if reason := self.stopped():
            yield Aborted(**self.ids(), reason=reason)
        else:
            yield Done(**self.ids(), finish_reason="stop", audio_s=self.num_samples / RATE)

    async def _file(self) -> AsyncIterator[AnyEvent]:
        pcm, last = self.request.pcm, not self.request.in_pieces
        while not last and not self.stopped():
            piece, last = await self.inbox.get()
            pcm += piece
        samples = np.frombuffer(pcm, "<f4" if self.request.encoding == "f32" else "<i2").astype(np.float32)
        samples = samples if self.request.encoding == "f32" else samples / 32768
        self.num_samples = len(samples)
        for start, stop in stretches(samples):
            await asyncio.sleep(0)
            language = self.options.language or "en"
            yield Recognized(**self.ids(), segments=[self.segment(start, stop)], language=language)

    async def _live(self) -> AsyncIterator[AnyEvent]:
        rest = np.zeros(0, np.float32)
        quiet, last = 0, False
        start: int | None = None if self.options.vad else 0
        told = 0
        while not last and not self.stopped():
            data, last = await self.inbox.get()
            rest = np.concatenate([rest, np.frombuffer(data, "<f4")])
            while len(rest) >= WINDOW or (last and len(rest)):
                window, rest = rest[:WINDOW], rest[WINDOW:]
                loud = float(np.abs(window).max()) > LOUD
                at = self.num_samples
                self.num_samples += len(window)
                quiet = 0 if loud else quiet + len(window)
                if start is None and loud:
                    start, told = at, 0
                    yield Speech(**self.ids(), what="started", sample=at, upto=at / RATE)
                elif start is not None and self.options.vad and quiet >= self.options.end_silence_s * RATE:
                    stop = self.num_samples - quiet
                    yield Speech(**self.ids(), what="stopped", sample=stop, upto=start / RATE)
                    said = [self.segment(start, stop)]
                    if self.options.prompt == "in two":  # the text comes in two events, long before the end of speech
                        said = [self.segment(start, start + WORD), self.segment(start + WORD, start + 2 * WORD)]
                        yield Recognized(**self.ids(), segments=said[:1], language="en", upto=start / RATE)
                    elif self.options.prompt == "no words":
                        said = []
                    yield Recognized(**self.ids(), segments=said[-1:], language="en", upto=stop / RATE)
                    start = None
                elif start is not None and loud and self.options.partial_s:
                    full = (self.num_samples - start) // WORD
                    if full > told + 1:  # the last word but one is sure
                        said = words(start, start + full * WORD)
                        new = "".join(word.word for word in said[told : full - 1])
                        yield Partial(**self.ids(), committed=new, tentative=said[-1].word, start=start / RATE)
                        told = full - 1
        if start is not None and not self.stopped():
            if self.options.vad:
                yield Speech(**self.ids(), what="stopped", sample=self.num_samples - quiet, upto=start / RATE)
            segments = [self.segment(start, self.num_samples - quiet)] if self.num_samples - quiet > start else []
            yield Recognized(**self.ids(), segments=segments, language="en", upto=self.num_samples / RATE)


def stretches(samples: np.ndarray[Any, np.dtype[np.float32]]) -> list[tuple[int, int]]:
    """Loud parts (start, stop) with at least 0.2 s of quiet between them."""
    loud = [i for i in range(0, len(samples), WINDOW) if np.abs(samples[i : i + WINDOW]).max() > LOUD]
    found: list[list[int]] = []
    for at in loud:
        if found and at - found[-1][1] < 0.2 * RATE:
            found[-1][1] = at + WINDOW
        else:
            found.append([at, at + WINDOW])
    return [(start, min(stop, len(samples))) for start, stop in found]
