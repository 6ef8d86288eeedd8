"""Our recogniser as the benchmarks drive it: the engine in a child process, exactly as the server has it, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

from motet.benchmarks.motet_engine import EngineError
from motet.engine.config import EngineConfig, HostConfig
from motet.engine.process_client import ProcessClient
from motet.engine.types import (
    Aborted,
    AnyEvent,
    AudioRequest,
    Done,
    Failed,
    ModelInfo,
    Recognized,
    Segment,
    TranscribeOptions,
)
from motet.pipelines.live_pace import LivePace
from motet.pipelines.media import SAMPLE_RATE, to_s16

Samples = NDArray[np.float32]
_PIECE = 1 << 17  # samples of a message
_AHEAD_S = 30.0  # of a simulated stream, in its pauses


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One transcript as its reader saw it. Seconds since submit."""

    segments: list[Segment]
    seconds: float

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


class MotetRecogniser:
    """A loaded recogniser behind a ProcessClient, called from plain code. Use as a context manager."""

    def __init__(self, model: str, engine: EngineConfig, *, threads: int) -> None:
        self.model = model
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._numbers = itertools.count()
        try:
            self._client = self._runner.run(
                ProcessClient.start(HostConfig(models=(model,), threads=threads, engine=engine))
            )
        except BaseException:
            self._runner.close()
            raise
        try:
            self.info: ModelInfo = self._runner.run(self._client.load(model))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MotetRecogniser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Dtype and how the weights lie in memory."""
        return f"motet {self.info.model} {self.info.dtype}, weights {self.info.weight_format or 'as loaded'}"

    def rss_gb(self) -> float:
        """GiB of memory that the engine's process holds now."""
        return resident_gb(self._client.pid or 0)

    def transcribe(self, samples: Samples, options: TranscribeOptions) -> Answer:
        """One audio alone."""
        return self._runner.run(self._one(samples, options))

    def together(self, many: Sequence[Samples], options: TranscribeOptions) -> tuple[list[Answer], float]:
        """All audios at the same time; their answers and the seconds until the last one."""
        began = time.perf_counter()
        answers = self._runner.run(self._all(many, options))
        return answers, time.perf_counter() - began

    def simulate_stream(
        self, samples: Samples, seconds: float, options: TranscribeOptions, mark_s: Sequence[float]
    ) -> list[float]:
        """Repeat audio as a live stream of `seconds`, as fast as it is heard. GiB at the marks and at the end."""
        return self._runner.run(self._stream(samples, seconds, options, mark_s))

    def file_memory(self, samples: Samples, options: TranscribeOptions, mark_s: Sequence[float]) -> list[float]:
        """One long audio; GiB when the text has come to each mark, and at the end."""
        return self._runner.run(self._watched(samples, options, mark_s))

    def close(self) -> None:
        try:
            self._runner.run(self._client.close())
        finally:
            self._runner.close()

    async def _all(self, many: Sequence[Samples], options: TranscribeOptions) -> list[Answer]:
        return await asyncio.gather(*(self._one(samples, options) for samples in many))

    async def _one(self, samples: Samples, options: TranscribeOptions) -> Answer:
        request = self._request(samples.tobytes(), options, "f32")
        began = time.perf_counter()
        segments: list[Segment] = []
        async for event in self._client.submit(request):
            if isinstance(event, Recognized):
                segments += event.segments
            elif isinstance(event, Done):
                return Answer(segments=segments, seconds=time.perf_counter() - began)
            else:
                raise EngineError(str(event)[:300])
        raise EngineError("the transcript ended without its end")

    async def _watched(self, samples: Samples, options: TranscribeOptions, mark_s: Sequence[float]) -> list[float]:
        marks = list(mark_s)
        seen: list[float] = []
        # As the server sends long files: 16 bits, in pieces.
        request = self._request(b"", options, "s16")
        request.in_pieces = True
        events = self._client.submit(request)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # the request leaves before its audio
        for start in range(0, len(samples), _PIECE):
            piece = to_s16(samples[start : start + _PIECE])
            await self._client.append(request.request_id, [], pcm=piece, last=start + _PIECE >= len(samples))
        event: AnyEvent | None = await first
        while event is not None:
            if isinstance(event, Recognized) and event.segments:
                while marks and event.segments[-1].end >= marks[0]:
                    marks.pop(0)
                    seen.append(self.rss_gb())
            elif isinstance(event, Done):
                return [*seen, *(self.rss_gb() for _ in marks), self.rss_gb()]
            elif not isinstance(event, Recognized):
                raise EngineError(str(event)[:300])
            event = await anext(events, None)
        raise EngineError("the transcript ended without its end")

    async def _stream(
        self, samples: Samples, seconds: float, options: TranscribeOptions, mark_s: Sequence[float]
    ) -> list[float]:
        request = self._request(b"", options, "f32")
        request.open = True
        pace = LivePace()
        seen: list[float] = []
        before_s = await self._heard_s()

        async def speak() -> None:
            marks = list(mark_s)
            num_samples, sent = round(seconds * SAMPLE_RATE), 0
            while sent < num_samples and not pace.ended:
                start = sent % len(samples)
                piece = samples[start : start + min(SAMPLE_RATE, num_samples - sent)]
                sent += len(piece)
                while pace.quiet and sent / SAMPLE_RATE - pace.heard_s > _AHEAD_S and not pace.ended:
                    # In a pause no event tells how far the engine has come. Its answer follows all events of what it heard.
                    heard_s = await self._heard_s() - before_s
                    if pace.quiet:
                        pace.heard_s = max(pace.heard_s, heard_s)
                await pace.wait(sent / SAMPLE_RATE)
                await self._client.append(request.request_id, [], pcm=piece.tobytes())
                while marks and sent >= marks[0] * SAMPLE_RATE:
                    marks.pop(0)
                    seen.append(self.rss_gb())
            await self._client.append(request.request_id, [], last=True)

        speaking: asyncio.Task[None] | None = None
        try:
            events = self._client.submit(request)
            first = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)  # the request leaves before its first audio
            speaking = asyncio.create_task(speak())
            event: AnyEvent | None = await first
            while event is not None:
                pace.note(event)
                if isinstance(event, Done):
                    await speaking
                    return [*seen, self.rss_gb()]
                if isinstance(event, (Failed, Aborted)):
                    raise EngineError(str(event)[:300])
                event = await anext(events, None)
        finally:
            pace.end()
            if speaking is not None:
                speaking.cancel()
        raise EngineError("the stream ended without its end")

    async def _heard_s(self) -> float:
        """Seconds of audio that the engine has heard so far, of all requests."""
        return float((await self._client.stats())["models"][self.model]["audio_seconds"])

    def _request(self, pcm: bytes, options: TranscribeOptions, encoding: str) -> AudioRequest:
        return AudioRequest(
            request_id=f"bench-{next(self._numbers)}",
            model=self.model,
            options=options,
            pcm=pcm,
            encoding=encoding,  # type: ignore[arg-type]
        )


def resident_gb(pid: int) -> float:
    """GiB of resident memory of a process; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return 0.0
