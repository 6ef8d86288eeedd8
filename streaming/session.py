"""One WebSocket from the handshake to its close: who reads, who writes, how long it may last, how it ends.

`SocketSession` is an ASGI application for one connection; protocols (audio_stream.py, realtime.py) subclass it and only
say what a message means. Inside is one task group: the reader, the writer behind a bounded queue, the watch over the
clock, and what the protocol starts. Any of them ends the session by raising `Over`; leaving the group cancels the rest,
and with it every engine request of this session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ..engine.errors import InvalidRequest, MotetError, Overloaded, Unavailable, to_info
from .config import ServerConfig
from .exchange import new_id
from .service import Service

log = logging.getLogger("motet.server")

# Close codes of RFC 6455 and its registry.
NORMAL, GOING_AWAY, UNSUPPORTED_DATA, POLICY, INTERNAL, RESTART, TRY_LATER = 1000, 1001, 1003, 1008, 1011, 1012, 1013
_SUBPROTOCOL = "realtime"
_MAX_QUEUED = 1024  # messages that wait for a slow reader
_MAX_DATA = 64  # of them, pieces of data; whoever makes more has to wait
_LOOK_S = 0.02  # between two looks at what a client has not taken yet
_LAST_WORDS_S = 1.0  # for the queue to empty before a close

_encoder = msgspec.json.Encoder()


class Over(Exception):
    """The session ends. `code` None: the client has left, nothing is to be sent."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class SocketSession:
    """One connection. Subclasses give `route`, `prepare`, `opened`, `on_text`, `on_binary`, `finish`, `error_message`."""

    route = ""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.service = service
        self.scope = scope
        self.id = new_id("sess")
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        self.opened_at = 0.0
        self._receive = receive
        self._send = send
        self._queue: asyncio.Queue[_Queued] = asyncio.Queue(maxsize=_MAX_QUEUED)
        self._num_data = 0  # in the queue
        self._data_room = asyncio.Event()
        self._write_since = 0.0  # loop time when the write in progress began; 0: none
        self._heard_at = 0.0
        self._room = asyncio.Event()
        self._wake = asyncio.Event()
        self._draining = False
        self._stopping = False
        self._group: asyncio.TaskGroup | None = None

    # ------------------------------------------------------------------------------------------ what a protocol says

    async def prepare(self) -> None:
        """Before the handshake: check what was asked. A MotetError refuses the upgrade."""

    async def opened(self) -> None:
        """The first words of the server."""

    @abstractmethod
    async def on_text(self, text: str) -> None: ...

    @abstractmethod
    async def on_binary(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """No more input will come: bring what was heard to its end. Called when the server drains."""

    @abstractmethod
    def error_message(self, error: MotetError) -> dict[str, Any]:
        """An error as the protocol's own message."""

    # -------------------------------------------------------------------------------------------------- for protocols

    @property
    def config(self) -> ServerConfig:
        return self.service.config

    def put(self, message: dict[str, Any] | msgspec.Struct) -> None:
        """Queue a JSON message. Raises Over when the client has left too many unread."""
        self._put(_Queued(_text(message)))

    async def put_data(self, data: bytes | msgspec.Struct, weight: int = 0) -> None:
        """Queue what an interruption takes back: sound, and words about it. Waits while too much of it is not sent."""
        while self._num_data >= _MAX_DATA:
            self._data_room.clear()
            await self._data_room.wait()
        message: Message = {"type": "websocket.send", "bytes": data} if isinstance(data, bytes) else _text(data)
        self._put(_Queued(message, weight))
        self._num_data += 1

    def drop_data(self) -> int:
        """Take back all data that is not being sent yet; gives the sum of its weights. Other messages keep their order."""
        dropped = 0
        for _ in range(self._queue.qsize()):
            queued = self._queue.get_nowait()
            if queued.weight is None:
                self._queue.put_nowait(queued)
            else:
                dropped += queued.weight
            self._queue.task_done()
        self._num_data = 0
        self._data_room.set()
        return dropped

    def _put(self, queued: _Queued) -> None:
        try:
            self._queue.put_nowait(queued)
        except asyncio.QueueFull:
            raise Over(TRY_LATER, "the client does not read what it is sent") from None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside reader and writer; an error in it ends the session."""
        assert self._group is not None
        return self._group.create_task(work)

    async def sent(self) -> None:
        """Wait until all that was queued is on its way: the closing drops what a slow reader has left in our buffers.

        Raises Over when he reads nothing at all.
        """
        await self._queue.join()  # the watch ends this wait
        unsent = self.scope.get("extensions", {}).get("motet.unsent", lambda: 0)
        clock = asyncio.get_running_loop().time
        left, since = unsent(), clock()
        while left:
            await asyncio.sleep(_LOOK_S)
            if (now_left := unsent()) < left:
                left, since = now_left, clock()
            elif clock() - since > self.config.write_timeout_s:
                raise Over(TRY_LATER, "the client does not read what it is sent")

    async def end(self, code: int, reason: str = "") -> None:
        """Close once all that was queued has been sent."""
        await self._flushed()
        raise Over(code, reason)

    # --------------------------------------------------------------------------------------------------- from outside

    def drain(self) -> None:
        """The server will go away: finish and close. Does not wait."""
        self._draining = True
        self._wake.set()

    def stop(self) -> None:
        """Close now. Does not wait."""
        self._stopping = True
        self._wake.set()

    # -------------------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """The whole life. Raises MotetError only before the handshake, for the edge to answer."""
        assert (await self._receive())["type"] == "websocket.connect"
        await self.prepare()
        self.service.open_session(self)
        try:
            # Browsers insist that one of what they offer is chosen; the others hold keys.
            subprotocol = _SUBPROTOCOL if _SUBPROTOCOL in self.scope.get("subprotocols", ()) else None
            accept: Message = {"type": "websocket.accept", "subprotocol": subprotocol}
            await self._send({**accept, "headers": [(b"x-request-id", self.id.encode())]})
            self.service.metrics.socket_opened(self.route)
            self.opened_at = time.perf_counter()
            try:
                over = await self._live()
                if over.code is not None:
                    await self._close(over)
            finally:
                self.service.metrics.socket_closed(self.route, time.perf_counter() - self.opened_at)
        finally:
            self.service.sessions.discard(self)

    async def _live(self) -> Over:
        """Everything between accept and close; returns why it is over."""
        self._heard_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._write())
                group.create_task(self._watch())
                await self.opened()
                await self._read()
        except BaseExceptionGroup as errors:
            return self._why(errors)
        raise AssertionError("the reader ends by raising")

    def _why(self, errors: BaseExceptionGroup[BaseException]) -> Over:
        """The first reason among what ended the tasks."""
        found = list(_leaves(errors))
        for error in found:
            if isinstance(error, Over):
                return error
        first = found[0]
        if not isinstance(first, MotetError):
            if not isinstance(first, Exception):
                raise first
            log.error("session %s failed", self.id, exc_info=first)
        self._try_put(
            self.error_message(first if isinstance(first, MotetError) else MotetError(to_info(first).message))
        )
        code = POLICY if isinstance(first, InvalidRequest) else TRY_LATER if isinstance(first, Overloaded) else INTERNAL
        return Over(code, "the session failed")

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self.service.metrics.observe_disconnect("session")
                raise Over(None)
            self._heard_at = loop.time()
            if self._draining:
                continue  # heard no more
            if self._queue.qsize() > _MAX_QUEUED // 2:  # one who asks faster than reads has to wait for the answers
                self._room.clear()
                await self._room.wait()
            text = message.get("text")
            if text is not None:
                await self.on_text(text)
            else:
                await self.on_binary(message.get("bytes") or b"")
            self._heard_at = (
                loop.time()
            )  # the handler may have waited for the engine, which is not the client's silence

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            queued = await self._queue.get()
            if queued.weight is not None:
                self._num_data -= 1
                self._data_room.set()
            self._write_since = loop.time()
            try:
                await self._send(queued.message)
                if queued.weight is not None:
                    self._heard_at = loop.time()  # who listens needs to say nothing
            except OSError:  # uvicorn's ClientDisconnected
                raise Over(None) from None
            finally:
                self._write_since = 0.0
                self._queue.task_done()
                if self._queue.qsize() < _MAX_QUEUED // 4:
                    self._room.set()

    async def _watch(self) -> None:
        """Ends the session for its age, for a silent client, for one that reads nothing, and when the server goes."""
        config, loop = self.service.config, asyncio.get_running_loop()
        started = loop.time()
        tick = min(config.write_timeout_s, config.session_idle_s, config.session_max_s, 20.0) / 4
        finishing: asyncio.Task[None] | None = None
        while True:
            try:
                async with asyncio.timeout(tick):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now = loop.time()
            if self._stopping:
                self._try_put(self.error_message(Unavailable("the server is shutting down", code="draining")))
                raise Over(RESTART, "the server is shutting down")
            if self._write_since and now - self._write_since > config.write_timeout_s:
                raise Over(TRY_LATER, "the client does not read what it is sent")
            if self._draining and finishing is None:
                finishing = self.start(self._finish())
            if now - started > config.session_max_s:
                self.put(self.error_message(SessionExpired(f"a session lasts {config.session_max_s:g} s at most")))
                await self.end(GOING_AWAY, "the session has reached its maximum age")
            if now - self._heard_at > config.session_idle_s and not self._draining:
                await self.end(GOING_AWAY, f"nothing was heard for {config.session_idle_s:g} s")

    async def _finish(self) -> None:
        await self.finish()
        self.put(self.error_message(Unavailable("the server is shutting down", code="draining", retry_after_s=5.0)))
        await self.end(RESTART, "the server is shutting down")

    async def _flushed(self) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._queue.join()
        except TimeoutError:
            pass

    def _try_put(self, message: dict[str, Any]) -> None:
        try:
            self.put(message)
        except Over:
            pass

    async def _close(self, over: Over) -> None:
        """Send what is queued, if the client takes it at once, and the close frame."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                while not self._queue.empty():
                    await self._send(self._queue.get_nowait().message)
        except (TimeoutError, OSError):
            pass
        reason = over.reason[:100]  # a close frame holds 123 bytes
        close = self.scope.get("extensions", {}).get("motet.close")
        if close is not None:
            close(over.code, reason)
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._send({"type": "websocket.close", "code": over.code, "reason": reason})
        except (TimeoutError, OSError):
            pass


@dataclass(frozen=True, slots=True)
class _Queued:
    message: Message
    weight: int | None = None  # of data, which may be dropped; None: control, which may not


def _text(message: dict[str, Any] | msgspec.Struct) -> Message:
    return {"type": "websocket.send", "text": _encoder.encode(message).decode()}


class SessionExpired(MotetError):
    code = "session_expired"


class SocketEndpoint:
    """The ASGI application of one WebSocket route."""

    def __init__(self, session: type[SocketSession]) -> None:
        self.session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.session(scope["motet"], scope, receive, send).run()


def query_number(query: dict[str, str], name: str, default: float, low: float, high: float) -> float:
    """A number out of the query string. Raises InvalidRequest that names it."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name}: expected a number from {low:g} to {high:g}, got {text[:40]!r}", param=name)
    return value


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
