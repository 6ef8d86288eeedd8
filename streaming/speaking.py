"""From a request's words to a voice and back: parameters, events, usage, metrics, and the sound in the format asked for.

Shared by POST /v1/audio/speech and the speech socket. Does not know how an answer looks on the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from ..engine.errors import from_info
from ..engine.frontend.speech import IDLE_S, SpeakRequest, SpeechEvent, SpokenAudio
from ..engine.types import Aborted, Done, Failed
from ..pipelines.sound_file import RATE, SoundFormat, sound_encoder
from .config import ServedModel
from .exchange import new_id, stopped_error
from .service import Service
from .speech_words import SpeechUsage

_SEED_RANGE = 2**62
_PIECE = RATE // 5  # samples that are encoded at once: 0.2 s


class Speaking:
    """One request to a voice, and what has come of it so far."""

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        text: str | AsyncIterator[str],
        *,
        voice: str | None,
        seed: int | None,
        temperature: float | None,
        started: float,
        idle_s: float = IDLE_S,
    ) -> None:
        self.service = service
        self.model = model
        self.started = started  # perf_counter when it was asked for
        self.done: Done | None = None
        self.request = SpeakRequest(
            request_id=new_id("tts"),
            model=model.id,
            text=text,
            voice=voice,
            seed=None if seed is None else seed % _SEED_RANGE,
            temperature=temperature,
            idle_s=idle_s,
        )

    async def pieces(
        self, stop_reason: Callable[[], str], on_silence: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[SpokenAudio, None]:
        """The sound as it is made. Leaving early, or being cancelled, ends the request in the engine.

        `stop_reason` says why a cancellation came; `on_silence` is called now and then before the first piece. Raises
        InvalidRequest before the first piece for what cannot be spoken, and MotetError for what failed in the engine.
        """
        metrics, model = self.service.metrics, self.model.id
        meters = metrics.meters(model)
        events = self.service.speech.speak(self.request)
        metrics.observe_submitted(model, n=1, max_tokens=None)
        heard = False
        try:
            while True:
                event = await (anext(events, None) if heard or on_silence is None else self._first(events, on_silence))
                if event is None:
                    return
                if isinstance(event, SpokenAudio):
                    if not heard:
                        heard = True
                        meters.first_token.observe(time.perf_counter() - self.started)
                    yield event
                elif isinstance(event, Done):
                    self.done = event
                    latency_s = time.perf_counter() - self.started
                    metrics.observe_done(model, event.finish_reason, event.usage, event.timing, latency_s)
                elif isinstance(event, Failed):
                    metrics.observe_failed(model, event.error.code)
                    raise from_info(event.error)
                elif isinstance(event, Aborted):
                    metrics.observe_aborted(model, event.reason)
                    raise stopped_error(event.reason)
        except (asyncio.CancelledError, GeneratorExit):
            if self.done is None:
                metrics.observe_aborted(model, stop_reason())
            raise
        finally:
            await events.aclose()

    @property
    def usage(self) -> SpeechUsage:
        if self.done is None:
            return SpeechUsage()
        usage = self.done.usage
        return SpeechUsage(
            input_tokens=usage.num_prompt_tokens,
            output_tokens=usage.num_output_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )

    async def _first(
        self, events: AsyncGenerator[SpeechEvent, None], on_silence: Callable[[], Awaitable[None]]
    ) -> SpeechEvent | None:
        """The first of them, while silence is broken now and then. The wait itself is never cancelled by the clock."""
        pending = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({pending}, timeout=self.service.config.sse_keep_alive_s))[0]:
                await on_silence()
            return pending.result()
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})


class Sound:
    """PCM becomes a file of the format asked for, at the speed asked for, piece by piece. Not for several tasks at once.

    It may be left at any time, but not closed: a thread could still be at work on the piece that was cancelled.
    """

    def __init__(self, kind: SoundFormat, speed: float) -> None:
        self._encoder = sound_encoder(kind, speed=speed)
        self._plain = speed == 1 and kind in ("pcm", "wav")  # costs nothing

    async def push(self, pcm: bytes) -> bytes:
        """What can be told of the file with this much more of the sound."""
        if self._plain:
            return self._encoder.feed(pcm)
        return b"".join(
            [
                await asyncio.to_thread(self._encoder.feed, pcm[start : start + 2 * _PIECE])
                for start in range(0, len(pcm), 2 * _PIECE)
            ]
        )

    async def finish(self) -> bytes:
        return self._encoder.finish() if self._plain else await asyncio.to_thread(self._encoder.finish)
