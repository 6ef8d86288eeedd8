"""The speech frontend: text, or text that streams in, to the audio of a voice. Lives with the client; torch-free.

`prepare` does everything that can refuse a request; `stream` submits and yields `SpokenAudio`, then exactly one terminal
event; `speak` is both. Text is spelled out, cut into utterances and given to the engine utterance by utterance, the next
ones only while less than AHEAD_S seconds of speech are under way beyond what the reader has taken. So neither a long text nor
a slow reader costs more memory than that, and an iterator of text is asked for more only when there is room.

Text that streams in is spoken as soon as a sentence is complete, at the beginning of a request even a clause of four words.
When the text pauses for `idle_s` seconds in the middle of a sentence, what is there is spoken as if it were whole; so it is at
once where the iterator gives None. The end of the iterator ends the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from ...models.speech_format import SpeechFormat, load_format
from ..client import EngineClient
from ..errors import InvalidRequest, MotetError
from ..params import check_params
from ..types import Aborted, AnyEvent, Audio, Done, Failed, ModelInfo, SamplingParams, SpeechRequest
from .utterances import Utterance, UtteranceMaker

MAX_CHARS = 20_000  # of a whole text, and of one piece of text that streams in
AHEAD_S = 20.0  # of speech under way beyond what the reader has taken
IDLE_S = 2.0
_SAMPLE_RATE = 24_000

TextStream: TypeAlias = AsyncIterable[str | None]


@dataclass(frozen=True, kw_only=True)
class SpeakRequest:
    """One request in words. `text` is whole, or pieces of it as they come; None among them: speak what is there.

    Sampling is the voice's own, except for what is given here.
    """

    model: str
    text: str | TextStream
    voice: str | None = None  # None, "" and "default": the model's default voice
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # the same seed, the same audio
    params: SamplingParams | None = None  # all of it at once; the single values win over it
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # seconds from submit to the first audio
    cache_salt: str = ""
    idle_s: float = IDLE_S
    request_id: str = ""  # made by the server; empty: the frontend makes one


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenAudio:
    """The next piece of speech: mono 16-bit little-endian PCM at 24 kHz, maybe empty where an utterance ends.

    `text` stands in the first piece of each utterance only: the words that it says, spelled out.
    """

    pcm: bytes
    utterance: int
    last: bool = False  # the utterance ends with this piece
    text: str = ""

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / _SAMPLE_RATE


SpeechEvent: TypeAlias = SpokenAudio | Done | Aborted | Failed


@dataclass(frozen=True, kw_only=True)
class PreparedSpeech:
    """A request that passed every check here. It can be streamed once."""

    request: SpeakRequest
    request_id: str
    format: SpeechFormat
    voice: str
    params: SamplingParams | None
    first: list[Utterance]  # what is submitted at once
    rest: Iterator[Utterance] | None  # of a whole text; None: it streams in
    whole: bool  # `first` is everything


class SpeechFrontend:
    """Text in, audio out, over one `EngineClient`. One object serves any number of requests at once."""

    def __init__(self, client: EngineClient, *, max_chars: int = MAX_CHARS) -> None:
        self._client = client
        self._max_chars = max_chars
        self._formats: dict[str, SpeechFormat] = {}
        self._loading = asyncio.Lock()

    async def format(self, model: str) -> SpeechFormat:
        """The words and voices of a model, which is loaded for it. Raises MotetError."""
        return await self._format_of(await self._client.load(model))

    async def prepare(self, request: SpeakRequest) -> PreparedSpeech:
        """Check a request. Raises MotetError, `param` naming the field (the text is "input"); nothing was submitted then."""
        if isinstance(request.text, str):
            self._check_length(request.text)
            if not request.text.strip():
                raise _nothing("expected text to speak, got none")
        elif not isinstance(request.text, AsyncIterable):
            raise InvalidRequest(
                f"input: expected text or an async iterator of it, got {type(request.text).__name__}", param="input"
            )
        if math.isnan(request.idle_s) or request.idle_s <= 0:
            raise InvalidRequest(f"idle_s: expected seconds above 0, got {request.idle_s}", param="idle_s")
        info = await self._client.load(request.model)
        voice_format = await self._format_of(info)
        voice = voice_format.voice(request.voice)
        params = _params(request, voice_format)
        if params is not None:
            check_params(params, info.vocab_size)
        first: list[Utterance] = []
        rest: Iterator[Utterance] | None = None
        whole = False
        if isinstance(request.text, str):
            rest = UtteranceMaker(voice_format, voice).push(request.text, last=True)
            found = await _advance(rest, voice_format)
            if found is None:
                raise _nothing("there is nothing in the text that this voice can say")
            first = [found]
            # A short text goes in one message; looking one utterance ahead tells.
            while not whole and sum(utterance.guessed_s for utterance in first) < AHEAD_S:
                following = await _advance(rest, voice_format)
                whole = following is None
                first += [following] if following is not None else []
        return PreparedSpeech(
            request=request,
            request_id=request.request_id or f"speech-{secrets.token_hex(12)}",
            format=voice_format,
            voice=voice,
            params=params,
            first=first,
            rest=rest,
            whole=whole,
        )

    async def speak(self, request: SpeakRequest) -> AsyncGenerator[SpeechEvent, None]:
        """`prepare` and `stream` in one; errors of the former are raised at the first step."""
        stream = self.stream(await self.prepare(request))
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def stream(self, prepared: PreparedSpeech) -> AsyncGenerator[SpeechEvent, None]:
        """Submit and yield audio as it is made, then one terminal event. Closing it early aborts the request.

        What an iterator of text raises is raised here, after the request was aborted.
        """
        request_id = prepared.request_id
        ahead = _Ahead()
        later = self._later(prepared)
        events: AsyncIterator[AnyEvent] | None = None
        feeder: asyncio.Task[None] | None = None
        arriving: asyncio.Future[AnyEvent] | None = None
        try:
            first = list(prepared.first)
            if not first:
                found = await anext(later, None)
                if found is None:
                    error = _nothing("the text ended without anything that this voice can say")
                    yield Failed(request_id=request_id, error=error.info())
                    return
                first = [found]
            for utterance in first:
                ahead.add(utterance)
            events = self._client.submit(_speech_request(prepared, first))
            arriving = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)  # the request leaves before what is appended to it
            if not prepared.whole:
                feeder = asyncio.create_task(self._feed(request_id, later, ahead))
            while True:
                event = await arriving
                if isinstance(event, Audio):
                    piece = ahead.take(event)
                    if piece is not None:
                        yield piece
                elif isinstance(event, (Done, Aborted, Failed)):
                    yield _ending(event, ahead)
                    return
                arriving = asyncio.ensure_future(anext(events))
        except MotetError as error:  # of text that streamed in, before anything was submitted
            yield Failed(request_id=request_id, error=error.info())
        finally:
            for task in (feeder, arriving):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task  # also where it is done: what it raised has been told
            await later.aclose()
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    # --------------------------------------------------------------------------------------------------------- feeding

    async def _feed(self, request_id: str, later: AsyncGenerator[Utterance, None], ahead: _Ahead) -> None:
        """Append utterance after utterance while there is room ahead of the reader. Aborts the request when it fails."""
        try:
            async for utterance in later:
                await ahead.room()
                ahead.add(utterance)
                await self._client.append(request_id, utterance.prompt)
            await self._client.append(request_id, [], last=True)
        except Exception as error:
            ahead.error = error
            await self._client.abort(request_id, "client")
            raise

    async def _later(self, prepared: PreparedSpeech) -> AsyncGenerator[Utterance, None]:
        """The utterances after those that are prepared. Raises InvalidRequest, and what the caller's iterator raises."""
        if prepared.rest is not None:
            while (found := await _advance(prepared.rest, prepared.format)) is not None:
                yield found
            return
        text = prepared.request.text
        assert not isinstance(text, str)
        maker = UtteranceMaker(prepared.format, prepared.voice)
        pieces = aiter(text)
        waiting: asyncio.Task[str | None] | None = None
        idle = True  # nothing has come since the last time that all was spoken
        try:
            while True:
                if waiting is None:
                    waiting = asyncio.create_task(_next(pieces))
                await asyncio.wait({waiting}, timeout=None if idle else min(prepared.request.idle_s, 1e6))
                if not waiting.done():
                    idle = True
                    made = maker.push("", last=True)
                    while (found := await _advance(made, prepared.format)) is not None:
                        yield found
                    continue
                try:
                    piece = waiting.result()
                except StopAsyncIteration:
                    break
                finally:
                    waiting = None
                if piece is not None and not isinstance(piece, str):
                    raise InvalidRequest(f"input: expected pieces of text, got {type(piece).__name__}", param="input")
                idle = piece is None
                self._check_length(piece or "")
                made = maker.push(piece or "", last=idle)
                while (found := await _advance(made, prepared.format)) is not None:
                    yield found
            made = maker.push("", last=True)
            while (found := await _advance(made, prepared.format)) is not None:
                yield found
        finally:
            if waiting is not None:
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await waiting
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    # ------------------------------------------------------------------------------------------------------- preparing

    async def _format_of(self, info: ModelInfo) -> SpeechFormat:
        if info.kind != "tts":
            raise InvalidRequest(f"model: {info.model} does not speak (it is of kind {info.kind!r})", param="model")
        found = self._formats.get(info.source)
        if found is None:
            async with self._loading:
                found = self._formats.get(info.source)
                if found is None:
                    found = self._formats[info.source] = await asyncio.to_thread(load_format, info.source)
        return found

    def _check_length(self, text: str) -> None:
        if len(text) > self._max_chars:
            raise InvalidRequest(
                f"input: expected at most {self._max_chars} characters, got {len(text)}; send a longer text in pieces",
                param="input",
                code="string_above_max_length",
            )


class _Ahead:
    """What was given to the engine and has not been taken by the reader, in seconds of speech: guessed for what is to come,
    counted for what has been taken. Also puts the pauses in between."""

    def __init__(self) -> None:
        self._utterances: deque[Utterance] = deque()  # not finished, in order; the first is number `_number`
        self._number = 0
        self._taken_s = 0.0  # of the first of them
        self._guessed_s = 0.0  # of all of them
        self._begun = False
        self._pause_s = 0.0  # in front of the next utterance
        self._change = asyncio.Event()
        self.total_s = 0.0
        self.error: Exception | None = None  # why no more text comes

    def add(self, utterance: Utterance) -> None:
        self._utterances.append(utterance)
        self._guessed_s += utterance.guessed_s

    async def room(self) -> None:
        """Wait until the next utterance may be given to the engine."""
        while self._utterances and self._guessed_s - self._taken_s >= AHEAD_S:
            self._change.clear()
            await self._change.wait()

    def take(self, event: Audio) -> SpokenAudio | None:
        """An event of the engine as the reader shall have it; None where it holds nothing for him."""
        first = self._utterances[0] if self._utterances else None
        text = first.text if first is not None and not self._begun else ""
        pcm = event.pcm
        if pcm and self._pause_s:
            pcm = bytes(2 * round(self._pause_s * _SAMPLE_RATE)) + pcm
            self._pause_s = 0.0
        piece = SpokenAudio(pcm=pcm, utterance=event.utterance, last=event.last, text=text)
        self._begun = True
        self._taken_s += piece.seconds
        self.total_s += piece.seconds
        if event.last and first is not None:
            self._utterances.popleft()
            self._guessed_s -= first.guessed_s
            self._taken_s = 0.0
            self._pause_s = first.pause_s
            self._begun = False
        self._change.set()
        return piece if pcm or event.last else None


def _ending(event: Done | Aborted | Failed, ahead: _Ahead) -> Done | Aborted | Failed:
    """The terminal event for the reader. Raises what the caller's own iterator of text raised."""
    if ahead.error is not None:
        if isinstance(ahead.error, MotetError):
            return Failed(request_id=event.request_id, error=ahead.error.info())
        raise ahead.error
    return msgspec.structs.replace(event, audio_s=ahead.total_s) if isinstance(event, Done) else event


async def _advance(made: Iterator[Utterance], voice_format: SpeechFormat) -> Utterance | None:
    """The next utterance. Letters cost a fraction of a millisecond; a tokenizer may cost more, a phonemizer is a program."""
    if voice_format.letters is None:
        return await asyncio.to_thread(next, made, None)
    await asyncio.sleep(0)  # a long text does not hold up the loop
    return next(made, None)


async def _next(pieces: AsyncIterator[str | None]) -> str | None:
    return await anext(pieces)


def _nothing(why: str) -> InvalidRequest:
    return InvalidRequest(f"input: {why}", param="input", code="empty_input")


def _params(request: SpeakRequest, voice_format: SpeechFormat) -> SamplingParams | None:
    """The voice's own sampling with what the caller changes; None where he changes nothing."""
    names = ("temperature", "top_p", "top_k", "seed")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.params is None and not given:
        return None
    own = request.params or SamplingParams(**msgspec.structs.asdict(voice_format.sampling))
    return msgspec.structs.replace(own, **given)


def _speech_request(prepared: PreparedSpeech, first: list[Utterance]) -> SpeechRequest:
    request = prepared.request
    return SpeechRequest(
        request_id=prepared.request_id,
        model=request.model,
        utterances=[utterance.prompt for utterance in first],
        params=prepared.params,
        priority=request.priority,
        deadline=request.deadline,
        cache_salt=request.cache_salt,
        open=not prepared.whole,
    )
