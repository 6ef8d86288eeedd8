"""Live audio on its way to the engine: bytes of any encoding, rate and cut become one open engine request.

Shared by the WebSocket protocols. Knows nothing of their messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, TypeAlias

import numpy as np

from ..engine.client import EngineClient
from ..engine.errors import InvalidRequest
from ..engine.types import AnyEvent, AudioRequest, Partial, Recognized, Speech, TranscribeOptions
from ..pipelines.pcm import LivePCM
from .exchange import new_id

RATE = 16_000  # of everything the engine hears
Encoding: TypeAlias = Literal["s16", "f32", "ulaw", "alaw"]
_LAST_S = 2.0  # for the engine to take notice of the end of a request that is being left


class PCMInput:
    """Bytes as a client sends them, in pieces of any size -> float32 at 16 kHz; a sample cut in two is carried over."""

    def __init__(self, encoding: Encoding, rate: int) -> None:
        self.encoding = encoding
        self.width = {"s16": 2, "f32": 4, "ulaw": 1, "alaw": 1}[encoding]
        self.rate = rate
        self._cut = b""
        self._resampled = LivePCM(rate)

    @property
    def cut(self) -> int:
        """Bytes of a sample whose rest has not come."""
        return len(self._cut)

    def push(self, data: bytes) -> list[bytes]:
        """Raises InvalidRequest for samples that are not finite."""
        data = self._cut + data if self._cut else data
        whole = len(data) - len(data) % self.width
        data, self._cut = data[:whole], data[whole:]
        if not data:
            return []
        if self.encoding == "f32":
            return list(self._resampled.push(np.frombuffer(data, dtype="<f4")))
        if self.encoding == "s16":
            return list(self._resampled.push(data))
        low, high = G711[self.encoding]
        wide = bytearray(2 * len(data))
        wide[0::2], wide[1::2] = data.translate(low), data.translate(high)
        return list(self._resampled.push(bytes(wide)))

    def finish(self) -> bytes:
        """What the resampler still holds; half a sample at the end is dropped. Audio after it starts anew."""
        rest = self._resampled.finish()
        self._cut = b""
        self._resampled = LivePCM(self.rate)
        return rest


class LiveStream:
    """One open request. `start` once, then `push` and at last `finish`; its events come from `events`."""

    def __init__(self, client: EngineClient, model: str, options: TranscribeOptions, *, max_ahead_s: float) -> None:
        self.client = client
        self.num_samples = 0  # sent to the engine
        self.finished = False
        self.request = AudioRequest(request_id=new_id("asr"), model=model, options=options, open=True)
        self._heard = 0  # samples known to be dealt with
        self._max_ahead = int(max_ahead_s * RATE)
        self._started = 0.0  # loop time
        self._progress = asyncio.Event()
        self._events: AsyncIterator[AnyEvent] | None = None
        self._first: asyncio.Future[AnyEvent] | None = None

    async def start(self) -> None:
        """Submit, with the model loaded before: what is appended from now on finds the request. Raises MotetError."""
        await self.client.load(self.request.model)
        self._started = asyncio.get_running_loop().time()
        self._events = self.client.submit(self.request)
        self._first = asyncio.ensure_future(_next(self._events))
        await asyncio.sleep(0)  # the submission goes out

    async def push(self, pcm: bytes) -> None:
        """Append float32 audio. Waits while too much of what was sent has not been heard yet.

        Heard is what events tell of, and in any case as much as has been said since the start at normal speed.
        """
        loop = asyncio.get_running_loop()
        while True:
            behind = self.num_samples - max(self._heard, int((loop.time() - self._started) * RATE))
            if behind <= self._max_ahead or self.finished:
                break
            self._progress.clear()
            try:
                async with asyncio.timeout(0.1):
                    await self._progress.wait()
            except TimeoutError:
                pass
        if not self.finished:
            self.num_samples += len(pcm) // 4
            await self.client.append(self.request.request_id, [], pcm=pcm)

    async def finish(self, pcm: bytes = b"") -> None:
        """The audio has ended, with `pcm` as its last piece."""
        if not self.finished:
            self.finished = True
            self._progress.set()
            self.num_samples += len(pcm) // 4
            await self.client.append(self.request.request_id, [], pcm=pcm, last=True)

    async def abort(self, reason: str = "client") -> None:
        self.finished = True
        self._progress.set()
        await self.client.abort(self.request.request_id, reason)

    async def events(self) -> AsyncIterator[AnyEvent]:
        """The engine's events up to the terminal one. Leaving early aborts the request."""
        assert self._events is not None and self._first is not None
        try:
            event: AnyEvent | None = await self._first
            while event is not None:
                self._note(event)
                yield event
                event = await anext(self._events, None)
        finally:
            self.finished = True
            self._progress.set()
            if not self._first.done():
                self._first.cancel()
                await asyncio.wait({self._first}, timeout=_LAST_S)
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    def _note(self, event: AnyEvent) -> None:
        heard = 0
        if isinstance(event, Speech | Recognized):
            # Not the mark itself: speech before it may still wait to be decoded, and counts against the engine's limit.
            heard = int(event.upto * RATE)
        elif isinstance(event, Partial):
            heard = int(event.start * RATE)
        if heard > self._heard:
            self._heard = heard
            self._progress.set()


async def _next(events: AsyncIterator[AnyEvent]) -> AnyEvent:
    return await anext(events)


def check_rate(rate: float) -> int:
    """Raises InvalidRequest for a sample rate that is no whole number of 8000 to 48000."""
    if rate != int(rate) or not 8000 <= rate <= 48000:
        raise InvalidRequest(f"rate: expected 8000 to 48000 samples per second, got {rate:g}", param="rate")
    return int(rate)


def _g711_tables() -> dict[str, tuple[bytes, bytes]]:
    """G.711: for each law the low and the high byte of the 16-bit sample that each byte stands for."""
    tables = {}
    for law in ("ulaw", "alaw"):
        samples = []
        for byte in range(256):
            if law == "ulaw":
                code = byte ^ 0xFF
                size = (((code & 0x0F) << 3) + 0x84 << (code >> 4 & 7)) - 0x84
                samples.append(-size if code & 0x80 else size)
            else:
                code = byte ^ 0x55
                step, fine = code >> 4 & 7, (code & 0x0F) << 4
                size = fine + 8 if step == 0 else fine + 0x108 << step - 1
                samples.append(size if code & 0x80 else -size)
        wide = np.array(samples, dtype="<i2").view(np.uint8).reshape(256, 2)
        tables[law] = (wide[:, 0].tobytes(), wide[:, 1].tobytes())
    return tables


G711 = _g711_tables()
