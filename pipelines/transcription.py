"""Transcription: speech in, text out; whole files or a live stream, sync or async, one or many.

    from motet import Transcription

    with Transcription("whisper-tiny.en") as transcription:
        print(transcription("interview.mp3"))
        result = transcription("film.mkv", word_timestamps=True)
        Path("film.srt").write_text(result.to_srt(max_chars=42))
        results = transcription(["a.wav", "b.ogg"])          # recognised together, in order
        for event in transcription.stream(microphone(), partial_s=1.0):
            print(event)

Audio is a path, the bytes of a file, or samples (float32 in [-1, 1] or int16, mono, 16 kHz or `sample_rate`). Keywords are
those of `TranscriptionOptions`. Errors are those of engine/errors.py. Knows no models, no windows, no tokens.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import uuid
from collections.abc import AsyncIterable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Unpack, cast, overload

import msgspec
import numpy as np

from ..engine.config import EngineConfig
from ..engine.errors import InvalidRequest, Unavailable, from_info
from ..engine.types import (
    Aborted,
    AnyEvent,
    AudioRequest,
    Done,
    Failed,
    Partial,
    Recognized,
    Segment,
    Speech,
    TranscribeOptions,
)
from .collected import AsyncCollectedStream, Collected, CollectedStream
from .hub import Hub
from .live_pace import LivePace
from .pcm import RATE, LivePCM, read_pcm
from .pipeline import Pipeline, together
from .types import (
    PCM,
    Audio,
    PartialText,
    SpeechMark,
    Transcript,
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptTiming,
)

# Files of one call that are in memory at a time, in count and in bytes of samples (about 1.2 hours of float32).
NUM_TOGETHER = 32
BYTES_TOGETHER = 256 << 20
_OWN_KEYWORDS = ("options", "temperature", "known_speakers", "sample_rate", "priority")


class Transcription(Pipeline):
    """A recogniser. Calls may come from several threads and loops at once; they are batched together."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineConfig | None = None,
        threads: int = 0,
        hub: Hub | None = None,
    ) -> None:
        """Load `model` (None: the first installed recogniser); blocks until it can answer.

        Pass `hub` to share engines with other pipelines; it is then yours to close, and `engine` and `threads` are its.
        """
        super().__init__("asr", model, engine=engine, threads=threads, hub=hub)

    def _loaded(self) -> None:
        if self.info.kind != "asr":
            raise InvalidRequest(
                f"model {self.model!r} is of kind {self.info.kind!r}, expected a recogniser of speech", param="model"
            )

    @overload
    def __call__(self, audio: Audio, **options: Unpack[TranscriptionOptions]) -> Transcript: ...
    @overload
    def __call__(self, audio: list[Any], **options: Unpack[TranscriptionOptions]) -> list[Transcript]: ...
    def __call__(
        self, audio: Audio | list[Any], **options: Unpack[TranscriptionOptions]
    ) -> Transcript | list[Transcript]:
        """The transcript of one audio, or those of a list of them, in order."""
        return self.hub.run(self._transcribe(audio, options))

    @overload
    async def call_async(self, audio: Audio, **options: Unpack[TranscriptionOptions]) -> Transcript: ...
    @overload
    async def call_async(self, audio: list[Any], **options: Unpack[TranscriptionOptions]) -> list[Transcript]: ...
    async def call_async(
        self, audio: Audio | list[Any], **options: Unpack[TranscriptionOptions]
    ) -> Transcript | list[Transcript]:
        """`transcription(...)` for a caller on an event loop; cancelling it aborts the requests."""
        return await self.hub.run_async(self._transcribe(audio, options))

    def stream(self, audio: Audio | Iterable[PCM], **options: Unpack[TranscriptionOptions]) -> TranscriptStream:
        """Iterate what is heard as it is heard.

        Of a file: its segments, one after the other. Of an iterable of pieces of live audio: marks of speech, partial texts
        (with `partial_s`) and segments. Raises at once what is wrong with the request.
        """
        return TranscriptStream(_Run(self.hub, self.model, audio, options))

    def stream_async(
        self, audio: Audio | Iterable[PCM] | AsyncIterable[PCM], **options: Unpack[TranscriptionOptions]
    ) -> AsyncTranscriptStream:
        """`stream` for `async for`, whose audio may be an async iterable; leaving it early aborts the request."""
        return AsyncTranscriptStream(self.hub, self.model, audio, options)

    async def _transcribe(
        self, audio: Audio | list[Any], options: TranscriptionOptions
    ) -> Transcript | list[Transcript]:
        """Runs on the hub's loop."""
        if not isinstance(audio, (list, tuple)):
            request = await _request(self.model, audio, options)
            return await _collect(self.hub, request)
        await asyncio.to_thread(_options, options)  # what is wrong with all of them is said before any work
        room = _Room(NUM_TOGETHER, BYTES_TOGETHER)
        reading = asyncio.Semaphore(2)  # more would only take cores from the engine

        async def one(number: int) -> Transcript:
            await room.enter()
            size = 0
            try:
                async with reading:
                    request = await _request(self.model, audio[number], options)
                size = len(request.pcm)
                await room.take(size)
                return await _collect(self.hub, request)
            finally:
                await room.leave(size)

        return await together(one, range(len(audio)))


class _Room:
    """How many audios, and how many bytes of them, may be in memory. One alone may be of any size."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._count = asyncio.Semaphore(count)
        self._limit = num_bytes
        self._taken = 0
        self._change = asyncio.Condition()

    async def enter(self) -> None:
        await self._count.acquire()

    async def take(self, size: int) -> None:
        async with self._change:
            await self._change.wait_for(lambda: not self._taken or self._taken + size <= self._limit)
            self._taken += size

    async def leave(self, size: int) -> None:
        self._taken -= size
        self._count.release()
        async with self._change:
            self._change.notify_all()


# ------------------------------------------------------------------------------------------------------------- streams


class _Run(Collected[TranscriptEvent, Transcript]):
    """One transcription on its way; partial texts that nobody took join."""

    what = "transcript"

    def __init__(
        self,
        hub: Hub,
        model: str,
        audio: Audio | Iterable[PCM] | None,
        options: TranscriptionOptions,
    ) -> None:
        """`audio` None: live audio that comes through `push`."""
        super().__init__(hub)
        self.duration: float | None = None
        self._model = model
        self._audio = audio
        self._options = options
        self._request_id = ""
        self._pcm: LivePCM | None = None
        self._pace = LivePace()
        self._sent_s = 0.0
        self._feeder: asyncio.Task[None] | None = None

    async def _run(self, ready: Future[None]) -> Transcript:
        audio, options = self._audio, self._options
        source = None if audio is None or _is_whole(audio) else _pieces(audio)
        if audio is None or source is not None:
            request = await _live_request(self._model, options)
            self._pcm = LivePCM(options.get("sample_rate", RATE))
        else:
            request = await _request(self._model, cast(Audio, audio), options)
            self.duration = len(request.pcm) / 4 / RATE
        self._request_id = request.request_id
        reader = asyncio.ensure_future(self._read(request))
        try:
            await asyncio.sleep(0)  # the request leaves before its first audio
            ready.set_result(None)
            if source is not None:
                self._feeder = asyncio.create_task(self._pull(source))
                await asyncio.wait({reader, self._feeder}, return_when=asyncio.FIRST_COMPLETED)
                if self._feeder.done():
                    self._feeder.result()  # what the caller's own iterator raised
            return await reader
        finally:
            reader.cancel()

    async def _read(self, request: AudioRequest) -> Transcript:
        parts = _Parts(request.options)
        async for event in self.hub.client.submit(request):
            self._pace.note(event)
            for found in parts.add(event):
                self._put(found)
        return parts.result()

    async def _pull(self, source: Iterator[PCM]) -> None:
        """Take live audio from an iterator that may block."""
        end: Any = object()
        while (piece := await asyncio.to_thread(next, source, end)) is not end:
            await self.push(piece)
        await self.finish()

    async def push(self, piece: PCM) -> None:
        """More live audio; waits while the engine is far behind. Runs on the hub's loop."""
        assert self._pcm is not None
        for pcm in self._pcm.push(piece):
            self._sent_s += len(pcm) / 4 / RATE
            await self._pace.wait(self._sent_s)
            await self.hub.client.append(self._request_id, [], pcm=pcm)
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """No more live audio will come. Runs on the hub's loop."""
        assert self._pcm is not None
        await self.hub.client.append(self._request_id, [], pcm=self._pcm.finish(), last=True)

    def _join(self, last: TranscriptEvent, new: TranscriptEvent) -> TranscriptEvent | None:
        if isinstance(new, PartialText) and isinstance(last, PartialText):
            return PartialText(committed=last.committed + new.committed, tentative=new.tentative, start=last.start)
        return None

    def _close(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
        self._pace.end()


class TranscriptStream(CollectedStream[TranscriptEvent, Transcript]):
    """Events of a transcription, in order. After the last one `result` holds the whole."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run)
        self._run = run

    @property
    def duration(self) -> float | None:
        """Seconds of audio that will be heard; None of live audio."""
        return self._run.duration


class AsyncTranscriptStream(AsyncCollectedStream[TranscriptEvent, Transcript]):
    """`TranscriptStream` for `async for`. The request starts with the first event asked for."""

    def __init__(
        self,
        hub: Hub,
        model: str,
        audio: Audio | Iterable[PCM] | AsyncIterable[PCM],
        options: TranscriptionOptions,
    ) -> None:
        # What belongs to the caller's loop is read there.
        self._source = audio if isinstance(audio, AsyncIterable) else None
        self._run = _Run(hub, model, None if isinstance(audio, AsyncIterable) else audio, options)
        super().__init__(self._run)
        self._feeder: asyncio.Task[None] | None = None

    async def _begin(self) -> None:
        await super()._begin()
        if self._source is not None:
            self._feeder = asyncio.create_task(self._feed(self._source))

    async def _feed(self, source: AsyncIterable[PCM]) -> None:
        run, hub = self._run, self._run.hub
        try:
            async for piece in source:
                await hub.run_async(run.push(piece))
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


# --------------------------------------------------------------------------------------------------- requests, results


class _Parts:
    """Events of one transcription on their way to a Transcript."""

    def __init__(self, options: TranscribeOptions) -> None:
        self._options = options
        self._segments: list[Segment] = []
        self._language = options.language or ""
        self._probability = 1.0
        self._done: Done | None = None

    def add(self, event: AnyEvent) -> list[TranscriptEvent]:
        """Take one event; gives what a reader shall see of it. Raises what ended the request early."""
        match event:
            case Recognized():
                self._segments.extend(event.segments)
                if event.language:
                    self._language, self._probability = event.language, event.language_probability
                return list(event.segments)
            case Partial():
                return [PartialText(committed=event.committed, tentative=event.tentative, start=event.start)]
            case Speech():
                return [SpeechMark(what=event.what, at_s=event.sample / RATE)]
            case Done():
                self._done = event
            case Failed():
                raise from_info(event.error)
            case Aborted():
                raise Unavailable(f"the request was aborted: {event.reason}", code="aborted")
        return []

    def result(self) -> Transcript:
        assert self._done is not None, "a request ends in exactly one terminal event"
        timing = self._done.timing
        return Transcript(
            text="".join(segment.text for segment in self._segments).strip(),
            segments=tuple(self._segments),
            language=self._language,
            language_probability=self._probability,
            duration=self._done.audio_s,
            task=self._options.task,
            timing=TranscriptTiming(
                queue_s=timing.queue_s,
                total_s=timing.total_s,
                speed=self._done.audio_s / timing.total_s if timing.total_s > 0 else 0.0,
            ),
        )


async def _collect(hub: Hub, request: AudioRequest) -> Transcript:
    parts = _Parts(request.options)
    async for event in hub.client.submit(request):
        parts.add(event)
    return parts.result()


async def _request(model: str, audio: Audio, options: TranscriptionOptions) -> AudioRequest:
    """The request for one whole audio; reading it takes a thread. Raises InvalidRequest for what cannot be asked."""
    if not _is_whole(audio):
        raise InvalidRequest(
            f"audio: expected a path, the bytes of a file or samples, got {type(audio).__name__}", param="audio"
        )
    checked = await asyncio.to_thread(_options, options)
    pcm = await asyncio.to_thread(read_pcm, audio, options.get("sample_rate", RATE))
    return AudioRequest(
        request_id=_new_id(),
        model=model,
        options=checked,
        pcm=pcm,
        encoding="f32",
        priority=options.get("priority", 0),
    )


async def _live_request(model: str, options: TranscriptionOptions) -> AudioRequest:
    return AudioRequest(
        request_id=_new_id(),
        model=model,
        options=await asyncio.to_thread(_options, options),
        encoding="f32",
        open=True,
        priority=options.get("priority", 0),
    )


def _new_id() -> str:
    return f"transcription-{uuid.uuid4().hex}"


def _is_whole(audio: object) -> bool:
    """Whether this is one audio rather than an iterable of its pieces."""
    return isinstance(audio, (str, os.PathLike, bytes, bytearray, memoryview, np.ndarray))


def _pieces(audio: object) -> Iterator[PCM]:
    try:
        return iter(cast(Iterable[PCM], audio))
    except TypeError:
        raise InvalidRequest(
            f"audio: expected a path, the bytes of a file, samples or an iterable of them, got {type(audio).__name__}",
            param="audio",
        ) from None


def _options(given: TranscriptionOptions) -> TranscribeOptions:
    """Keywords as the engine's options. Raises InvalidRequest; reads the voices of known speakers."""
    values: dict[str, Any] = {name: value for name, value in given.items() if name not in _OWN_KEYWORDS}
    for name in values:
        if name not in TranscribeOptions.__struct_fields__:
            near = difflib.get_close_matches(name, TranscriptionOptions.__annotations__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequest(f"unknown option {name!r}{hint}", param=name)
    if "temperature" in given:
        if "temperatures" in given:
            raise InvalidRequest("give `temperature` or `temperatures`, not both", param="temperature")
        values["temperatures"] = (given["temperature"],)
    whole = msgspec.structs.asdict(given.get("options") or TranscribeOptions()) | values
    try:
        options = msgspec.convert(whole, TranscribeOptions)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").split("[")[0] or "options"
        raise InvalidRequest(f"{name}: {message[:1].lower()}{message[1:]}", param=name) from None
    known = given.get("known_speakers")
    if known is None:
        return options
    voices = tuple((name, read_pcm(voice, given.get("sample_rate", RATE))) for name, voice in known.items())
    return msgspec.structs.replace(options, known_speakers=voices)
