"""WebSocket /v1/audio/stream: binary PCM in, JSON out; one stream of speech per connection.

    ws://HOST/v1/audio/stream?model=default&encoding=s16&rate=16000&language=en&partials=500

The client sends binary frames of mono PCM, cut anywhere, and {"type": "end"} when there is no more. The server sends

    {"type": "ready", "model", "encoding", "rate", "session_id"}
    {"type": "speech", "what": "started" | "stopped", "at"}                    seconds of the stream, as all times
    {"type": "partial", "committed", "tentative", "start"}                     committed is new and final: append it
    {"type": "segment", "id", "start", "end", "text", "language", "avg_logprob", "no_speech_prob", "words"?, "speaker"?}
    {"type": "done", "audio_s", "dropped_bytes"}                               then closes with 1000
    {"type": "error", "message", "code", "param"}                              then closes
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from starlette.types import Receive, Scope, Send

from ..engine.errors import InvalidRequest, MotetError, from_info
from ..engine.types import Aborted, Done, Failed, Partial, Recognized, Segment, Speech, TranscribeOptions
from .config import DEFAULT_MODEL, ServedModel
from .exchange import stopped_error
from .languages import language_code
from .live_stream import RATE, Encoding, LiveStream, PCMInput, check_rate
from .service import Service
from .session import NORMAL, UNSUPPORTED_DATA, SocketSession, query_number

_KNOWN = ("model", "encoding", "rate", "language", "prompt", "hotwords", "partials", "silence", "words")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class AudioStream(SocketSession):
    route = "/v1/audio/stream"

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(service, scope, receive, send)
        self.dropped = 0  # bytes of half a sample at the end
        self._ended = asyncio.Event()

    async def prepare(self) -> None:
        query = self.query
        for name in query:
            if name not in _KNOWN:
                raise InvalidRequest(f"unknown field {name[:100]!r}", param=name[:100], code="unknown_parameter")
        self.model: ServedModel = self.service.model(query.get("model", DEFAULT_MODEL), "asr")
        encoding = query.get("encoding", "s16")
        if encoding not in ("s16", "f32"):
            raise InvalidRequest(f"encoding: expected s16 or f32, got {encoding[:40]!r}", param="encoding")
        self.input = PCMInput(cast(Encoding, encoding), check_rate(query_number(query, "rate", RATE, 1, 1e6)))
        words = _FLAGS.get(query.get("words", "false"))
        if words is None:
            raise InvalidRequest("words: expected true or false", param="words")
        options = TranscribeOptions(
            language=language_code(query["language"]) if query.get("language") else None,
            prompt=query.get("prompt", ""),
            hotwords=query.get("hotwords", ""),
            word_timestamps=words,
            partial_s=query_number(query, "partials", 0, 0, 60_000) / 1e3,
            end_silence_s=query_number(query, "silence", 500, 32, 5_000) / 1e3,
        )
        self.stream = LiveStream(self.service.client, self.model.id, options, max_ahead_s=self.config.max_live_ahead_s)

    async def opened(self) -> None:
        await self.stream.start()
        self.start(self._tell())
        self.put(
            {
                "type": "ready",
                "model": self.model.id,
                "encoding": self.input.encoding,
                "rate": self.input.rate,
                "session_id": self.id,
            }
        )

    async def on_binary(self, data: bytes) -> None:
        if self.stream.finished:
            await self._refuse("audio after the end")
        try:
            pieces = self.input.push(data)
        except InvalidRequest as error:
            await self._refuse(error.message)
        for piece in pieces:
            await self.stream.push(piece)

    async def on_text(self, text: str) -> None:
        try:
            message = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            message = None
        if message != {"type": "end"}:
            await self._refuse('expected audio as binary frames, or {"type": "end"} as text')
        await self.finish()

    async def finish(self) -> None:
        self.dropped = self.input.cut
        await self.stream.finish(self.input.finish())
        if self._draining:
            await self._ended.wait()

    async def _refuse(self, why: str) -> None:
        self.put(self.error_message(InvalidRequest(why)))
        await self.end(UNSUPPORTED_DATA, why)

    async def _tell(self) -> None:
        """The engine's events as messages, to the end."""
        service = self.service
        try:
            async for event in self.stream.events():
                if isinstance(event, Recognized):
                    for segment in event.segments:
                        self.put(_segment(segment, event.language))
                elif isinstance(event, Partial):
                    self.put(
                        {
                            "type": "partial",
                            "committed": event.committed,
                            "tentative": event.tentative,
                            "start": round(event.start, 3),
                        }
                    )
                elif isinstance(event, Speech):
                    self.put({"type": "speech", "what": event.what, "at": round(event.sample / RATE, 3)})
                elif isinstance(event, Failed):
                    service.metrics.observe_failed(self.model.id, event.error.code)
                    raise from_info(event.error)
                elif isinstance(event, Aborted):
                    service.metrics.observe_aborted(self.model.id, event.reason)
                    raise stopped_error(event.reason)
                elif isinstance(event, Done):
                    self.put({"type": "done", "audio_s": round(event.audio_s, 3), "dropped_bytes": self.dropped})
        except asyncio.CancelledError:
            service.metrics.observe_aborted(self.model.id, "disconnect")
            raise
        finally:
            service.metrics.observe_transcribed(self.model.id, self.stream.num_samples / RATE)
        self._ended.set()
        if not self._draining:
            await self.end(NORMAL)

    def error_message(self, error: MotetError) -> dict[str, Any]:
        return {"type": "error", "message": error.message, "code": error.code, "param": error.param}


def _segment(segment: Segment, language: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "type": "segment",
        "id": segment.id,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "language": segment.language or language,
        "avg_logprob": segment.avg_logprob,
        "no_speech_prob": segment.no_speech_prob,
    }
    if segment.words is not None:
        message["words"] = segment.words
    if segment.speaker is not None:
        message["speaker"] = segment.speaker
    return message
