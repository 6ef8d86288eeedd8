"""Speech: text in, a voice out; whole or streamed, sync or async, one text or many.

    from motet import Speech

    with Speech("motet-voice") as speech:
        speech("Dr. Lee paid $3.50 for it.").save("lee.mp3")
        for piece in (stream := speech.stream("A longer story. It goes on.")):
            play(piece.samples)                              # float32 [T], 24 kHz
        print(stream.result.timing)
        speech.stream(chat.stream("Tell me a story."))       # text that is still being written
        results = speech(["One text.", "Another one."])      # spoken together, in order

Keywords are those of `SpeechOptions`. Errors are those of engine/errors.py; a reader who is slow holds the voice up, no
further than 20 s ahead of him. Knows no tokens and no codecs.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Unpack, cast, overload

from ..engine.config import EngineConfig
from ..engine.errors import InvalidRequest, Unavailable, from_info
from ..engine.frontend.speech import AHEAD_S, PreparedSpeech, SpeakRequest, SpeechEvent, SpokenAudio
from ..engine.types import Aborted, Done, Failed
from .collected import AsyncCollectedStream, Collected, CollectedStream
from .hub import Hub
from .pipeline import Pipeline, together
from .sound_file import TimeStretch
from .types import SPEECH_RATE, SpeechOptions, SpeechPiece, SpeechResult, SpeechTiming

NUM_TOGETHER = 32  # texts of one call that are with the engine at a time
_OWN_KEYWORDS = ("speed",)


class Speech(Pipeline):
    """A voice. Calls may come from several threads and loops at once; they are batched together."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineConfig | None = None,
        threads: int = 0,
        hub: Hub | None = None,
    ) -> None:
        """Load `model` (None: the first installed voice); blocks until it can speak.

        Pass `hub` to share engines with other pipelines; it is then yours to close, and `engine` and `threads` are its.
        """
        super().__init__("tts", model, engine=engine, threads=threads, hub=hub)

    def _loaded(self) -> None:
        self.voices = self.hub.run(self.hub.speech.format(self.model)).voices

    @overload
    def __call__(self, text: str, **options: Unpack[SpeechOptions]) -> SpeechResult: ...
    @overload
    def __call__(self, text: list[str], **options: Unpack[SpeechOptions]) -> list[SpeechResult]: ...
    def __call__(self, text: str | list[str], **options: Unpack[SpeechOptions]) -> SpeechResult | list[SpeechResult]:
        """The speech of one text, or of each of a list of texts, in order."""
        return self.hub.run(self._speak(text, options))

    @overload
    async def call_async(self, text: str, **options: Unpack[SpeechOptions]) -> SpeechResult: ...
    @overload
    async def call_async(self, text: list[str], **options: Unpack[SpeechOptions]) -> list[SpeechResult]: ...
    async def call_async(
        self, text: str | list[str], **options: Unpack[SpeechOptions]
    ) -> SpeechResult | list[SpeechResult]:
        """`speech(...)` for a caller on an event loop; cancelling it aborts the requests."""
        return await self.hub.run_async(self._speak(text, options))

    def stream(self, text: str | Iterable[str | None], **options: Unpack[SpeechOptions]) -> SpeechStream:
        """Iterate the speech as it is made, while `text` may still be coming piece by piece (None: speak what is there).

        Raises at once what is wrong with the request.
        """
        return SpeechStream(_Run(self.hub, self.model, text, options))

    def stream_async(
        self, text: str | Iterable[str | None] | AsyncIterable[str | None], **options: Unpack[SpeechOptions]
    ) -> AsyncSpeechStream:
        """`stream` for `async for`, whose text may be an async iterable; leaving it early aborts the request."""
        return AsyncSpeechStream(self.hub, self.model, text, options)

    async def _speak(self, text: str | list[str], options: SpeechOptions) -> SpeechResult | list[SpeechResult]:
        """Runs on the hub's loop."""
        if not isinstance(text, (list, tuple)):
            return await _collect(self.hub, self.model, text, options)
        return await together(lambda one: _collect(self.hub, self.model, one, options), text, most=NUM_TOGETHER)


# ------------------------------------------------------------------------------------------------------------- streams


class _Run(Collected[SpeechPiece, SpeechResult]):
    """One text on its way to speech; pieces that nobody took yet join, and the voice waits when they are many."""

    what = "speech"

    def __init__(
        self, hub: Hub, model: str, text: str | Iterable[str | None], options: SpeechOptions, *, pushed: bool = False
    ) -> None:
        """`pushed`: the text comes through `push` and `finish` instead."""
        super().__init__(hub)
        self._model, self._text, self._options = model, text, options
        self._pushed = pushed
        self._texts: _Texts | None = None
        self._unread_s = 0.0
        self._room = asyncio.Event()

    async def _run(self, ready: Future[None]) -> SpeechResult:
        text: str | AsyncIterable[str | None]
        if self._pushed:
            text = self._texts = _Texts()
        elif isinstance(self._text, str):
            text = self._text
        else:
            text = _pulled(_iterator(self._text))
        parts = _Parts(self._options)
        prepared = await self.hub.speech.prepare(_request(self._model, text, self._options))
        ready.set_result(None)
        stream = self.hub.speech.stream(prepared)
        try:
            async for event in stream:
                if (piece := parts.add(event)) is not None:
                    self._unread_s += piece.duration
                    self._put(piece)
                    while self._unread_s > AHEAD_S:
                        self._room.clear()
                        await self._room.wait()
        finally:
            await stream.aclose()
        if (piece := parts.rest()) is not None:
            self._put(piece)
        return parts.result()

    async def take(self) -> list[SpeechPiece]:
        pieces = await super().take()
        self._unread_s = 0.0
        self._room.set()
        return pieces

    async def push(self, text: str | None) -> None:
        """More text; waits until the last one was taken. Runs on the hub's loop."""
        assert self._texts is not None
        await self._texts.put(text)

    async def finish(self) -> None:
        """No more text will come. Runs on the hub's loop."""
        assert self._texts is not None
        await self._texts.end()

    def _join(self, last: SpeechPiece, new: SpeechPiece) -> SpeechPiece:
        return SpeechPiece(pcm=last.pcm + new.pcm, text=f"{last.text} {new.text}".strip())

    def _close(self) -> None:
        if self._texts is not None:
            self._texts.close()


class SpeechStream(CollectedStream[SpeechPiece, SpeechResult]):
    """Pieces of speech, in order. After the last one `result` holds the whole."""


class AsyncSpeechStream(AsyncCollectedStream[SpeechPiece, SpeechResult]):
    """`SpeechStream` for `async for`. The request starts with the first piece asked for."""

    def __init__(
        self,
        hub: Hub,
        model: str,
        text: str | Iterable[str | None] | AsyncIterable[str | None],
        options: SpeechOptions,
    ) -> None:
        # What belongs to the caller's loop is read there.
        self._source: AsyncIterable[str | None] | None = None
        if isinstance(text, AsyncIterable):
            self._source = text
            self._run = _Run(hub, model, "", options, pushed=True)
        else:
            self._run = _Run(hub, model, text, options)
        super().__init__(self._run)
        self._feeder: asyncio.Task[None] | None = None

    async def _begin(self) -> None:
        await super()._begin()
        if self._source is not None:
            self._feeder = asyncio.create_task(self._feed(self._source))

    async def _feed(self, source: AsyncIterable[str | None]) -> None:
        run, hub = self._run, self._run.hub
        try:
            async for text in source:
                await hub.run_async(run.push(text))
            await hub.run_async(run.finish())
        except BaseException:
            run.cancel()
            raise

    def _ending(self) -> None:
        if self._feeder is not None and self._feeder.done() and not self._feeder.cancelled():
            self._feeder.result()  # what the caller's own iterator raised

    async def aclose(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
        await super().aclose()


class _Texts:
    """Pieces of text from another event loop, one at a time. Lives on the hub's loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str | None, bool]] = asyncio.Queue(maxsize=1)
        self._closed = asyncio.Event()

    async def put(self, text: str | None, *, last: bool = False) -> None:
        """Wait for room; once the request is over, what comes is dropped."""
        putting = asyncio.ensure_future(self._queue.put((text, last)))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({putting, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
            closing.cancel()

    async def end(self) -> None:
        await self.put(None, last=True)

    def close(self) -> None:
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[str | None]:
        while True:
            text, last = await self._queue.get()
            if last:
                return
            yield text


async def _pulled(source: Iterator[str | None]) -> AsyncIterator[str | None]:
    """Text of an iterator that may block."""
    end: Any = object()
    while (piece := await asyncio.to_thread(next, source, end)) is not end:
        yield piece


def _iterator(text: object) -> Iterator[str | None]:
    try:
        return iter(cast(Iterable[str | None], text))
    except TypeError:
        raise InvalidRequest(
            f"input: expected text or an iterable of pieces of text, got {type(text).__name__}", param="input"
        ) from None


# --------------------------------------------------------------------------------------------------- requests, results


class _Parts:
    """Events of one request on their way to a SpeechResult."""

    def __init__(self, options: SpeechOptions) -> None:
        self._stretch = TimeStretch(options.get("speed", 1.0))
        self._pcm: list[bytes] = []
        self._texts: list[str] = []
        self._untold = ""  # text whose sound is still in the stretch
        self._done: Done | None = None
        self._began = time.monotonic()
        self._first_audio_s = 0.0

    def add(self, event: SpeechEvent) -> SpeechPiece | None:
        """Take one event; gives the new speech. Raises what ended the request early."""
        match event:
            case SpokenAudio():
                if event.text:
                    self._texts.append(event.text)
                    self._untold = f"{self._untold} {event.text}".strip()
                return self._piece(self._stretch.feed(event.pcm))
            case Done():
                self._done = event
            case Failed():
                raise from_info(event.error)
            case Aborted():
                raise Unavailable(f"the request was aborted: {event.reason}", code="aborted")
        return None

    def rest(self) -> SpeechPiece | None:
        """What the stretch still held."""
        return self._piece(self._stretch.finish())

    def _piece(self, pcm: bytes) -> SpeechPiece | None:
        if not pcm:
            return None
        if not self._pcm:
            self._first_audio_s = time.monotonic() - self._began
        self._pcm.append(pcm)
        text, self._untold = self._untold, ""
        return SpeechPiece(pcm=pcm, text=text)

    def result(self) -> SpeechResult:
        assert self._done is not None, "a request ends in exactly one terminal event"
        pcm = b"".join(self._pcm)
        total_s = time.monotonic() - self._began
        duration = len(pcm) / 2 / SPEECH_RATE
        return SpeechResult(
            text=" ".join(self._texts),
            pcm=pcm,
            finish_reason=self._done.finish_reason,
            usage=self._done.usage,
            timing=SpeechTiming(
                queue_s=self._done.timing.queue_s,
                first_audio_s=self._first_audio_s,
                total_s=total_s,
                rtf=total_s / duration if duration else 0.0,
            ),
        )


async def _collect(hub: Hub, model: str, text: object, options: SpeechOptions) -> SpeechResult:
    if not isinstance(text, str):
        raise InvalidRequest(
            f"input: expected a text or a list of texts, got {type(text).__name__}; pieces go to `stream`",
            param="input",
        )
    parts = _Parts(options)
    prepared: PreparedSpeech = await hub.speech.prepare(_request(model, text, options))
    async for event in hub.speech.stream(prepared):
        parts.add(event)
    parts.rest()
    return parts.result()


def _request(model: str, text: str | AsyncIterable[str | None], options: SpeechOptions) -> SpeakRequest:
    """The frontend's request. Raises InvalidRequest for what cannot be asked."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in _OWN_KEYWORDS}
    for name in given:
        if name not in SpeechOptions.__annotations__:
            near = difflib.get_close_matches(name, SpeechOptions.__annotations__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown option {name!r}{hint}", param=name)
    return SpeakRequest(model=model, text=text, **given)
