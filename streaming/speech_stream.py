"""WebSocket /v1/audio/speech/stream: text in as it is written, sound out as it is spoken.

    ws://HOST/v1/audio/speech/stream?model=default&voice=default&format=pcm&speed=1&seed=7

The client sends text messages:

    {"type": "text", "text": "Hello wor"}    pieces, cut anywhere; a sentence is spoken once its end is there
    {"type": "flush"}                        speak all that is there now
    {"type": "cancel"}                       stop speaking and forget what waits; the session goes on
    {"type": "end"}                          there is no more text

The server sends the sound as binary messages of 100 to 200 ms (the first is shorter), and

    {"type": "ready", "model", "voice", "format", "content_type", "rate", "channels", "session_id"}
    {"type": "utterance", "index", "text", "start_s"}          its sound follows; text: the words it says
    {"type": "utterance", "index", "text", "start_s", "end_s"} its sound has been sent
    {"type": "flushed", "audio_s"}                             so has all up to a flush, or the end
    {"type": "cancelled", "audio_s"}                           no sound of the text before it comes after it
    {"type": "done", "audio_s", "usage"}                       then closes with 1000
    {"type": "error", "message", "code", "param"}              text that cannot be spoken; all else closes then

Times are seconds of the sound sent on this connection, at the speed asked for. What lies between two flushes (cancels) is one
turn, and one whole file of its format: pcm, the default, is bare samples (signed 16 bits, little-endian, mono, 24 kHz). A client
that reads slowly is spoken to as slowly; one that reads nothing at all is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from ..engine.errors import InvalidRequest, MotetError
from ..engine.frontend.speech import SpokenAudio
from ..pipelines.sound_file import CONTENT_TYPES, FASTEST, FORMATS, RATE, SLOWEST, SoundFormat
from .config import DEFAULT_MODEL, ServedModel
from .exchange import named_error
from .service import Service
from .session import NORMAL, UNSUPPORTED_DATA, SocketSession, query_number
from .speaking import Sound, Speaking
from .speech_words import (
    Cancel,
    Cancelled,
    Flush,
    Flushed,
    Ready,
    SpeechDone,
    SpeechUsage,
    SpokenWord,
    TextPiece,
    UtteranceMark,
)

_KNOWN = ("model", "voice", "format", "speed", "seed", "temperature")
_MAX_WAITING = 100_000  # characters that were sent and are not spoken yet
_LEAST_S, _MOST_S = 0.1, 0.2  # of a message of sound

_decoder: msgspec.json.Decoder[SpokenWord] = msgspec.json.Decoder(SpokenWord)


class SpeechStream(SocketSession):
    route = "/v1/audio/speech/stream"

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(service, scope, receive, send)
        self.usage = SpeechUsage()
        self.num_samples = 0  # of speech on its way to the client or there, before the change of speed
        self.num_utterances = 0
        self._num_waiting = 0  # characters
        self._writing: _Turn | None = None  # the turn that text goes into
        self._turns: asyncio.Queue[_Turn | None] = asyncio.Queue()  # to be spoken; None: and no more
        self._spoken: tuple[_Turn, asyncio.Task[None]] | None = None  # the turn being spoken
        self._no_more = False
        self._ended = asyncio.Event()

    async def prepare(self) -> None:
        query = self.query
        for name in query:
            if name not in _KNOWN:
                raise InvalidRequest(f"unknown field {name[:100]!r}", param=name[:100], code="unknown_parameter")
        self.model: ServedModel = self.service.model(query.get("model", DEFAULT_MODEL), "tts")
        kind = query.get("format", "pcm")
        if kind not in FORMATS:
            raise InvalidRequest(f"format: expected {', '.join(FORMATS)}, got {kind[:40]!r}", param="format")
        self.format = cast(SoundFormat, kind)
        self.speed = query_number(query, "speed", 1.0, SLOWEST, FASTEST)
        self.seed = _whole_number(query, "seed")
        self.temperature = query_number(query, "temperature", 0, 0, 2) if "temperature" in query else None

    async def opened(self) -> None:
        voice = await self.service.speech.format(self.model.id)
        self.voice = voice.voice(self.query.get("voice", DEFAULT_MODEL))
        self.start(self._speak())
        self.put(
            Ready(
                model=self.model.id,
                voice=self.voice,
                format=self.format,
                content_type=CONTENT_TYPES[self.format],
                rate=RATE,
                channels=1,
                session_id=self.id,
            )
        )

    # ------------------------------------------------------------------------------------------------------ hearing

    async def on_text(self, text: str) -> None:
        try:
            word = _decoder.decode(text)
        except msgspec.ValidationError as error:
            await self._refuse(named_error(error))
        except (msgspec.DecodeError, RecursionError):
            await self._refuse(InvalidRequest("expected a JSON object with a type: text, flush, cancel or end"))
        if isinstance(word, TextPiece):
            await self._hear(word.text)
        elif isinstance(word, Flush):
            self._flush()
        elif isinstance(word, Cancel):
            self._cancel()
        else:
            self._finish_text()

    async def on_binary(self, data: bytes) -> None:
        await self._refuse(InvalidRequest("expected text messages, got binary data"))

    async def finish(self) -> None:
        self._finish_text()
        if self._draining:
            await self._ended.wait()

    async def _hear(self, text: str) -> None:
        if self._no_more:
            await self._refuse(InvalidRequest("text after the end"))
        if self._writing is None and not text.strip():
            return  # a space between two turns is nothing to say
        if self._num_waiting + len(text) > _MAX_WAITING:
            await self._refuse(
                InvalidRequest(f"text: more than {_MAX_WAITING} characters that are not spoken yet", param="text")
            )
        if self._writing is None:
            self._writing = _Turn()
            self._turns.put_nowait(self._writing)
        self._num_waiting += len(text)
        self._writing.push(text)

    def _flush(self) -> None:
        if self._writing is not None:
            self._writing.close()
            self._writing = None

    def _cancel(self) -> None:
        """Data goes, control stays: all text and sound up to here, but not the end."""
        self._writing = None
        while not self._turns.empty():
            self._turns.get_nowait()
        if self._no_more:
            self._turns.put_nowait(None)
        if self._spoken is not None:
            turn, task = self._spoken
            turn.cancelled = True
            task.cancel()
        self._num_waiting = 0
        self.num_samples -= self.drop_data()
        self.put(Cancelled(audio_s=self._seconds()))

    def _finish_text(self) -> None:
        self._flush()
        if not self._no_more:
            self._no_more = True
            self._turns.put_nowait(None)

    async def _refuse(self, error: InvalidRequest) -> None:
        self.put(self.error_message(error))
        await self.end(UNSUPPORTED_DATA, error.message)

    # ----------------------------------------------------------------------------------------------------- speaking

    async def _speak(self) -> None:
        """One turn after the other, to the end."""
        while (turn := await self._turns.get()) is not None:
            task = self.start(self._say(turn))
            self._spoken = turn, task
            await asyncio.wait({task})
            self._spoken = None
        self.put(SpeechDone(audio_s=self._seconds(), usage=self.usage))
        self._ended.set()
        if not self._draining:
            await self.sent()
            await self.end(NORMAL)

    async def _say(self, turn: _Turn) -> None:
        speaking = Speaking(
            self.service,
            self.model,
            turn.text(),
            voice=self.voice,
            seed=self.seed,
            temperature=self.temperature,
            started=time.perf_counter(),
            idle_s=self.config.session_max_s,  # half a sentence waits for its other half
        )
        sound = _Frames(self, Sound(self.format, self.speed))
        try:
            pieces = speaking.pieces(lambda: "client" if turn.cancelled else "disconnect")
            async with contextlib.aclosing(pieces):
                await self._tell(pieces, sound)
            await sound.finish()
            await self.put_data(Flushed(audio_s=self._seconds()))
        except InvalidRequest as error:  # of this text; the next may be better
            self.put(self.error_message(error))
        finally:
            if self._writing is turn:  # it has failed; what follows is another one
                self._writing = None
            if not turn.cancelled:
                self._num_waiting -= turn.num_chars
            self._count(speaking.usage)

    async def _tell(self, pieces: AsyncGenerator[SpokenAudio, None], sound: _Frames) -> None:
        """The sound of a turn, each utterance between its marks."""
        mark: UtteranceMark | None = None
        async for piece in pieces:
            if mark is None:
                mark = UtteranceMark(index=self.num_utterances, text=piece.text, start_s=self._seconds())
                self.num_utterances += 1
                await self.put_data(mark)
            await sound.push(piece.pcm, last=piece.last)
            if piece.last:
                await self.put_data(replace(mark, end_s=self._seconds()))
                mark = None

    def _seconds(self) -> float:
        return round(self.num_samples / RATE / self.speed, 3)

    def _count(self, usage: SpeechUsage) -> None:
        self.usage = SpeechUsage(
            input_tokens=self.usage.input_tokens + usage.input_tokens,
            output_tokens=self.usage.output_tokens + usage.output_tokens,
            total_tokens=self.usage.total_tokens + usage.total_tokens,
        )

    def error_message(self, error: MotetError) -> dict[str, Any]:
        return {"type": "error", "message": error.message, "code": error.code, "param": error.param}


class _Turn:
    """Text between two flushes: one request to the voice, one file."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.cancelled = False
        self._pieces: deque[str] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def push(self, piece: str) -> None:
        self.num_chars += len(piece)
        self._pieces.append(piece)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def text(self) -> AsyncGenerator[str, None]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


class _Frames:
    """PCM of any cut, as messages of an even length in the session's format. The first leaves as it comes."""

    def __init__(self, session: SpeechStream, sound: Sound) -> None:
        self._session = session
        self._sound = sound
        self._held = bytearray()
        self._least, self._most = (2 * int(s * session.speed * RATE) for s in (_LEAST_S, _MOST_S))
        self._first = True
        self._untold = 0  # samples that the encoder has and nothing came out for

    async def push(self, pcm: bytes, *, last: bool) -> None:
        self._held += pcm
        while self._held and (last or self._first or len(self._held) >= self._least):
            frame = bytes(self._held[: self._most])
            del self._held[: self._most]
            self._first = False
            self._untold += len(frame) // 2
            await self._send(await self._sound.push(frame))

    async def finish(self) -> None:
        await self._send(await self._sound.finish())

    async def _send(self, data: bytes) -> None:
        if data:
            await self._session.put_data(data, self._untold)
            self._session.num_samples += self._untold
            self._untold = 0


def _whole_number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        value = int(text) if len(text) <= 20 else 2**64
    except ValueError:
        value = 2**64
    if not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"{name}: expected a whole number of 64 bits, got {text[:40]!r}", param=name)
    return value
