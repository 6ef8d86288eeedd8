"""WebSocket /v1/realtime?intent=transcription: OpenAI's Realtime protocol, transcription sessions.

With server VAD one engine request (`_Turn`) hears the whole session and its Speech events make the items; without it
the audio between two commits is one turn and one item. Deltas carry only text that will not change. Events are those
of the documented list and no others: some clients end on an unknown one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from ..engine.errors import ErrorInfo, InvalidRequest, ModelNotFound, MotetError, Overloaded, from_info, to_info
from ..engine.types import Aborted, Done, Failed, Partial, Recognized, Speech
from .exchange import named_error, new_id, stopped_error
from .live_stream import RATE, LiveStream, PCMInput
from .protocol import InvalidJSON, wire_type
from .realtime_words import ClientEvent, Settings
from .service import Service
from .session import SocketSession

_MIN_COMMIT = RATE // 10  # samples
_MAX_FAILURES = 3
_MAX_TURNS = 8  # of one session that are not finished; more audio waits
_decode = msgspec.json.Decoder(ClientEvent).decode
_TRANSCRIPTION = "conversation.item.input_audio_transcription"
_ITEM_ERRORS = {
    "conversation.item.retrieve": "item_retrieve_invalid_item_id",
    "conversation.item.delete": "item_delete_invalid_item_id",
}
_RESPONSES = (
    "response.create",
    "response.cancel",
    "conversation.item.create",
    "conversation.item.truncate",
    "output_audio_buffer.clear",
)


class Item(Struct, kw_only=True):
    """One committed piece of speech. Samples count from the start of the session."""

    id: str
    start: int
    stop: int | None = None  # None: still spoken
    committed: bool = False
    discarded: bool = False  # the client cleared the buffer under it
    sent: str = ""  # what the deltas say
    sent_of_part: str = ""  # the same since the last final text
    final: str = ""


class _Turn:
    """One engine request and the items that come out of it, oldest first."""

    def __init__(self, stream: LiveStream, start: int, *, manual: bool) -> None:
        self.stream = stream
        self.start = start  # sample of the session
        self.manual = manual
        self.items: list[Item] = []
        self.cleared = False  # nothing that was said since the last commit is wanted
        self.closing: Item | None = None  # the client committed it: all of the rest belongs to it

    @property
    def speaking(self) -> Item | None:
        return self.items[-1] if self.items and self.items[-1].stop is None else None

    def item_at(self, sample: int) -> Item | None:
        """The item that was spoken at a sample, or the one nearest to it."""

        def distance(item: Item) -> int:
            stop = item.stop if item.stop is not None else max(sample, item.start)
            return max(item.start - sample, sample - stop, 0)

        return min(self.items, key=distance, default=None)


class RealtimeSession(SocketSession):
    route = "/v1/realtime"

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(service, scope, receive, send)
        offers = scope.get("subprotocols", ())
        header = dict(scope["headers"]).get(b"openai-beta", b"")
        self.beta = b"realtime=v1" in header or "openai-beta.realtime-v1" in offers
        self.settings = Settings()
        self.expires_at = int(time.time() + self.config.session_max_s)
        self.turns: list[_Turn] = []  # not finished, oldest first
        self.turn: _Turn | None = None  # the one that hears
        self.num_samples = 0  # of the session so far, at 16 kHz
        self.settled = 0  # samples up to the last commit, clear or end of speech
        self.last_item: str | None = None
        self.event_id: str | None = None  # of the client's event being handled
        self._failures = 0  # turns in a row
        self._turn_over = asyncio.Event()

    async def prepare(self) -> None:
        if self.query.get("intent") != "transcription":
            raise InvalidRequest("intent: this server offers 'transcription' sessions only", param="intent")
        self.settings = Settings(model=self.query.get("model") or self.settings.model)
        self._check_model(self.settings)
        self.input = PCMInput(self.settings.encoding, self.settings.rate)

    async def opened(self) -> None:
        self._tell_session("created")

    # ----------------------------------------------------------------------------------------------- from the client

    async def on_binary(self, data: bytes) -> None:
        self._complain(InvalidJSON("expected events as JSON text, got a binary message"))

    async def on_text(self, text: str) -> None:
        self.event_id = None
        try:
            try:
                event = _decode(text)
            except msgspec.ValidationError as error:
                raise named_error(error) from None
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidJSON(f"expected an event as JSON: {error}") from None
            self.event_id = event.event_id
            await self._handle(event)
        except (InvalidRequest, ModelNotFound) as error:
            self._complain(error)

    async def _handle(self, event: ClientEvent) -> None:
        kind = event.type
        if kind == "input_audio_buffer.append":
            await self._append(event.audio)
        elif kind == "input_audio_buffer.commit":
            await self._commit()
        elif kind == "input_audio_buffer.clear":
            await self._clear()
        elif kind == ("transcription_session.update" if self.beta else "session.update"):
            await self._update(event)
        elif kind == "response.cancel":
            raise InvalidRequest("Cancellation failed: no active response found", code="response_cancel_not_active")
        elif kind in _ITEM_ERRORS:
            raise InvalidRequest("item_id: no such item is kept", param="item_id", code=_ITEM_ERRORS[kind])
        elif kind in _RESPONSES:
            raise InvalidRequest(
                f"{kind}: not offered in a transcription session", param="type", code="unsupported_event"
            )
        else:
            raise InvalidRequest(f"type: unknown event {kind[:80]!r}", param="type", code="unknown_event")

    async def _append(self, audio: str | None) -> None:
        if audio is None:
            raise InvalidRequest("missing required field 'audio'", param="audio", code="missing_parameter")
        try:
            data = base64.b64decode(audio, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest("audio: expected base64", param="audio") from None
        for piece in self.input.push(data):
            turn = self.turn or await self._open_turn()
            self.num_samples += len(piece) // 4
            await turn.stream.push(piece)
            if turn is not self.turn:
                return  # it ended meanwhile

    async def _open_turn(self) -> _Turn:
        while len(self.turns) >= _MAX_TURNS:
            self._turn_over.clear()
            await self._turn_over.wait()
        model = self._check_model(self.settings)
        stream = LiveStream(
            self.service.client, model, self.settings.options(), max_ahead_s=self.config.max_live_ahead_s
        )
        await stream.start()
        turn = _Turn(stream, self.num_samples, manual=self.settings.vad is None)
        if turn.manual:
            turn.items.append(Item(id=new_id("item"), start=self.num_samples))
        self.turns.append(turn)
        self.turn = turn
        self.start(self._hear(turn))
        return turn

    async def _commit(self) -> None:
        turn = self.turn
        if turn is None or self.num_samples - self.settled < _MIN_COMMIT:
            ms = (self.num_samples - self.settled) * 1000 / RATE
            raise InvalidRequest(
                f"Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, "
                f"but buffer only has {ms:.2f}ms of audio.",
                code="input_audio_buffer_commit_empty",
            )
        item = turn.speaking
        if item is None:
            item = Item(id=new_id("item"), start=self.settled)
            turn.items.append(item)
        turn.closing = item
        await self._end_turn(turn)
        item.stop = self.num_samples
        self._commit_item(item)

    async def _end_turn(self, turn: _Turn) -> None:
        """No more audio for this turn; what comes next starts another one."""
        rest = self.input.finish()
        self.num_samples += len(rest) // 4
        self.settled = self.num_samples
        if self.turn is turn:
            self.turn = None
        await turn.stream.finish(rest)

    async def _clear(self) -> None:
        turn = self.turn
        if turn is not None:
            if item := turn.speaking:
                item.discarded = True
            turn.cleared = True
            await self._end_turn(turn)
            if all(item.discarded for item in turn.items):
                await turn.stream.abort()
        else:
            self.input.finish()
        self.settled = self.num_samples
        self._tell("input_audio_buffer.cleared")

    async def _update(self, event: ClientEvent) -> None:
        settings = self.settings.updated(event.session, beta=self.beta)
        self._check_model(settings)
        if settings != self.settings:
            turn = self.turn
            if turn is not None:  # what was said so far is heard as it was asked for
                if turn.manual:
                    await self._clear_quietly(turn)
                else:
                    await self._end_turn(turn)
            self.settings = settings
            self.input = PCMInput(settings.encoding, settings.rate)
        self._tell_session("updated")

    async def _clear_quietly(self, turn: _Turn) -> None:
        for item in turn.items:
            item.discarded = True
        turn.cleared = True
        await self._end_turn(turn)
        await turn.stream.abort()

    async def finish(self) -> None:
        if (turn := self.turn) is not None:
            if turn.manual:
                await self._clear_quietly(turn)  # never committed
            else:
                await self._end_turn(turn)
        while self.turns:
            self._turn_over.clear()
            await self._turn_over.wait()

    def _check_model(self, settings: Settings) -> str:
        return self.service.model(settings.model, "asr").id

    # ----------------------------------------------------------------------------------------------- from the engine

    async def _hear(self, turn: _Turn) -> None:
        """One turn's events as the protocol's, to the end."""
        model, metrics = turn.stream.request.model, self.service.metrics
        try:
            async for event in turn.stream.events():
                if isinstance(event, Speech):
                    self._on_speech(turn, event)
                elif isinstance(event, Partial):
                    self._on_partial(turn, event)
                elif isinstance(event, Recognized):
                    self._failures = 0
                    self._on_recognized(turn, event)
                elif isinstance(event, Done):
                    self._complete_all(turn)
                elif isinstance(event, Failed):
                    metrics.observe_failed(model, event.error.code)
                    self._fail(turn, event.error)
                elif isinstance(event, Aborted):
                    metrics.observe_aborted(model, event.reason)
                    if not turn.cleared:
                        self._fail(turn, stopped_error(event.reason).info())
        except asyncio.CancelledError:
            metrics.observe_aborted(model, "disconnect")
            raise
        finally:
            metrics.observe_transcribed(model, turn.stream.num_samples / RATE)
            self.turns.remove(turn)
            if self.turn is turn:
                self.turn = None
                self.settled = self.num_samples
            self._turn_over.set()

    def _on_speech(self, turn: _Turn, event: Speech) -> None:
        if turn.manual or turn.closing is not None:
            return
        sample = turn.start + event.sample
        if event.what == "started":
            if turn.speaking is None:
                item = Item(id=new_id("item"), start=sample, discarded=turn.cleared)
                turn.items.append(item)
                if turn.cleared:
                    return
                self._tell("input_audio_buffer.speech_started", audio_start_ms=sample * 1000 // RATE, item_id=item.id)
            return
        spoken = turn.speaking
        if spoken is None:
            return
        spoken.stop = max(sample, spoken.start)
        if spoken.discarded:
            return
        self.settled = max(self.settled, spoken.stop)
        self._tell("input_audio_buffer.speech_stopped", audio_end_ms=spoken.stop * 1000 // RATE, item_id=spoken.id)
        self._commit_item(spoken)

    def _on_partial(self, turn: _Turn, event: Partial) -> None:
        item = turn.item_at(turn.start + int(event.start * RATE))
        if item is not None and event.committed:
            item.sent_of_part += event.committed
            self._send_delta(item, event.committed)

    def _on_recognized(self, turn: _Turn, event: Recognized) -> None:
        """Final text. A segment belongs to the item in whose time its middle lies."""
        parts: dict[str, str] = {}
        for segment in event.segments:
            middle = turn.start + int((segment.start + segment.end) / 2 * RATE)
            if (item := turn.item_at(middle)) is not None:
                parts[item.id] = parts.get(item.id, "") + segment.text
        complete = turn.start + round(event.upto * RATE)  # no more text will come for what was said before
        for item in list(turn.items):
            part = parts.get(item.id, "")
            if part:
                # What the deltas have said is never taken back; where the final text differs they end.
                if part.startswith(item.sent_of_part):
                    self._send_delta(item, part[len(item.sent_of_part) :])
                item.final += part
                item.sent_of_part = ""
            if item.stop is None or not item.committed or turn.manual or item is turn.closing:
                continue
            if complete >= item.stop:
                self._complete(turn, item)

    def _send_delta(self, item: Item, text: str) -> None:
        text = text if item.sent else text.lstrip()
        if text and not item.discarded:
            item.sent += text
            self._tell(f"{_TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=text)

    def _complete_all(self, turn: _Turn) -> None:
        for item in list(turn.items):
            if item.stop is None:
                item.stop = self.num_samples
            if not item.committed and not item.discarded:
                self._commit_item(item)
            self._complete(turn, item)

    def _complete(self, turn: _Turn, item: Item) -> None:
        turn.items.remove(item)
        if item.discarded:
            return
        seconds = ((item.stop or item.start) - item.start) / RATE
        self._tell(
            f"{_TRANSCRIPTION}.completed",
            item_id=item.id,
            content_index=0,
            transcript=item.final.strip(),
            usage={"type": "duration", "seconds": round(seconds, 3)},
        )

    def _fail(self, turn: _Turn, error: ErrorInfo) -> None:
        """Each item of the turn gets its failure; without items the session's error event tells of it."""
        self._failures += 1
        if error.kind == Overloaded.__name__ or self._failures >= _MAX_FAILURES:
            raise from_info(error)  # every further piece of audio would only fail again
        told = False
        for item in turn.items:
            if item.discarded:
                continue
            if not item.committed:
                self._commit_item(item)
            body = {"type": wire_type(error.kind), "code": error.code, "message": error.message, "param": error.param}
            self._tell(f"{_TRANSCRIPTION}.failed", item_id=item.id, content_index=0, error=body)
            told = True
        turn.items.clear()
        if not told:
            self.put(_error_event(error, None))

    # ------------------------------------------------------------------------------------------------------- telling

    def _commit_item(self, item: Item) -> None:
        item.committed = True
        previous, self.last_item = self.last_item, item.id
        self._tell("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        body = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        for what in ("created",) if self.beta else ("added", "done"):
            self._tell(f"conversation.item.{what}", item=body, previous_item_id=previous)

    def _tell_session(self, what: str) -> None:
        name = "transcription_session" if self.beta else "session"
        self._tell(f"{name}.{what}", session=self.settings.shown(self.id, self.expires_at, beta=self.beta))

    def _tell(self, kind: str, **fields: Any) -> None:
        self.put({"type": kind, "event_id": new_id("event"), **fields})

    def _complain(self, error: MotetError) -> None:
        self.put(_error_event(to_info(error), self.event_id))

    def error_message(self, error: MotetError) -> dict[str, Any]:
        return _error_event(to_info(error), self.event_id)


def _error_event(error: ErrorInfo, event_id: str | None) -> dict[str, Any]:
    """The `error` event; `event_id` is that of the client's event that caused it."""
    body = {
        "type": wire_type(error.kind),
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "event_id": event_id,
    }
    return {"type": "error", "event_id": new_id("event"), "error": body}
