"""One HTTP request and its answer: the body read within limits, the work raced against the client's leaving, the bytes
written without ever waiting for ever.

`Endpoint` is the ASGI application behind each route; a handler is `async def handler(exchange) -> None`. Exactly one
place reads `receive`: first `read_body`, then the watcher that waits for the disconnect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ..engine.errors import InvalidRequest, MotetError, Overloaded, Unavailable
from .protocol import (
    DeadlineExceeded,
    InvalidJSON,
    RequestTimeout,
    RequestTooLarge,
    UnsupportedMediaType,
    encode,
    send_error,
    wire_error,
)

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("motet.server")

_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_MAX_VALUES = 500_000  # in a JSON body, counted by its commas
_DRAIN_S = 2.0  # how long an oversize body is read on, only so that the client gets to see the answer
_SLOW_LINE = 64 * 1024  # bytes per second below which an upload takes too long
_FAREWELL_S = 1.0  # for the last words to a client that may not be reading
T = TypeVar("T")
Handler = Callable[["Exchange"], Coroutine[Any, Any, None]]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_EVENTS = b"text/event-stream; charset=utf-8"
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def new_id(kind: str) -> str:
    """An id of ours for an answer; whatever the client calls its request stays out of it."""
    return f"{kind}-{uuid.uuid4().hex}"


def stopped_error(reason: str) -> MotetError:
    """What a client is told when its request was ended by somebody else's wish."""
    if reason == "deadline":
        return DeadlineExceeded("the request's deadline has passed")
    if reason == "shutdown":
        return Unavailable("the server is shutting down", code="draining", retry_after_s=5.0)
    return Unavailable(f"the request was aborted ({reason})", code="aborted")


class Exchange:
    """One request. `model` and `route` are filled in on the way, for headers, metrics and the access log."""

    __slots__ = (
        "_receive",
        "_send",
        "_start",
        "_task",
        "_timer",
        "_write_since",
        "body_done",
        "complete",
        "engine_ids",
        "events",
        "fields",
        "gone",
        "method",
        "model",
        "request_id",
        "route",
        "scope",
        "service",
        "started",
        "status",
        "stop_reason",
        "streaming",
    )

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.service = service
        self.scope = scope
        self.started = time.perf_counter()
        self.fields: dict[bytes, bytes] = dict(scope["headers"])
        given = self.fields.get(b"x-request-id", b"")
        self.request_id = given.decode() if _SAFE_ID.fullmatch(given) else new_id("req")
        self.method: str = scope["method"]
        self.route = "other"
        self.model = ""
        self.status = 0  # 0: no response started
        self.streaming = False
        self.events = False  # what is streamed is events, so that an error can be one too
        self.body_done = False
        self.complete = False  # the last byte of the answer is on its way
        self.gone = False  # the client has left
        self.stop_reason = ""
        self.engine_ids: list[str] = []  # requests in the engine on behalf of this one
        self._receive = receive
        self._send = send
        self._start: Send = self.send
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_since = 0.0  # loop time when the write in progress began; 0: none

    # --------------------------------------------------------------------------------------------------- reading

    async def read_body(self) -> bytes:
        """The whole body. Counted while it streams, whatever Content-Length claims."""
        chunks = [chunk async for chunk in self.chunks(self.service.config.max_body_bytes)]
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def chunks(self, limit: int, *, upload: bool = False) -> AsyncIterator[bytes]:
        """The body as it comes, at most `limit` bytes of it. An upload may take longer, but no longer than a slow line."""
        claimed = self._claimed_length()
        if claimed > limit:
            await self.discard(limit)
            raise RequestTooLarge(f"the body has {claimed} bytes, the limit is {limit}")
        started = asyncio.get_running_loop().time()
        size, done = 0, False
        while not done:
            allowed_s = self.service.config.body_timeout_s + (size / _SLOW_LINE if upload else 0)
            try:
                async with asyncio.timeout_at(started + allowed_s):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(f"the body did not arrive within {allowed_s:g} s") from None
            if message["type"] == "http.disconnect":
                self.gone = True
                raise _ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                await self.discard(limit)
                raise RequestTooLarge(f"the body has more than {limit} bytes, which is the limit")
            done = self.body_done = not message.get("more_body", False)
            yield chunk

    def _claimed_length(self) -> int:
        claimed = self.fields.get(b"content-length", b"")
        return int(claimed) if claimed.isdigit() and len(claimed) < 19 else 0

    async def discard(self, limit: int) -> None:
        """Read on for a moment: a client that is still sending would not see our answer, only a reset."""
        if self.body_done or self._claimed_length() > 4 * limit:
            return
        size = 0
        try:
            async with asyncio.timeout(_DRAIN_S):
                while size <= 4 * limit:
                    message = await self._receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        self.body_done = message["type"] != "http.disconnect"
                        return
        except TimeoutError:
            return

    async def read_json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as the decoder's type. Raises UnsupportedMediaType, InvalidJSON, InvalidRequest (param named)."""
        kind = self.fields.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
        body = await self.read_body()
        if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise UnsupportedMediaType(f"expected content-type application/json, got {kind.decode('latin-1')[:80]!r}")
        if len(body) > _MAX_VALUES and body.count(b",") > _MAX_VALUES:
            # Decoding so many would hold up everybody's streams; no context is long enough for them anyway.
            raise RequestTooLarge(f"the body holds more than {_MAX_VALUES} values")
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise named_error(error) from None
        except RecursionError:
            raise InvalidJSON("the JSON body is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise _not_finite(body) or InvalidJSON(f"the body is not valid JSON: {error}") from None

    # --------------------------------------------------------------------------------------------------- answering

    async def send(self, message: Message) -> None:
        """ASGI send with the headers that every response carries."""
        if message["type"] == "http.response.start":
            if self._task is None and not self.body_done and self._has_body():
                await self.discard(self.service.config.max_body_bytes)
            self.status = message["status"]
            headers = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                (b"openai-processing-ms", b"%d" % ((time.perf_counter() - self.started) * 1e3)),
            ]
            if self.model:
                headers.append((b"x-motet-model", self.model.encode("latin-1", "replace")))
            if self.service.state != "ready" and self.service.state != "starting":
                headers.append((b"connection", b"close"))
            elif not self.body_done and self._has_body():
                headers.append((b"connection", b"close"))  # the rest of the body is of no use to anybody
            message = {**message, "headers": headers}
        await self._send(message)

    def _has_body(self) -> bool:
        return self.fields.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.fields

    async def send_bytes(
        self,
        body: bytes,
        content_type: bytes = b"application/json",
        *,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        base = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self._start({"type": "http.response.start", "status": status, "headers": base + (headers or [])})
        self.complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_struct(
        self, value: msgspec.Struct, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        await self.send_bytes(encode(value), status=status, headers=headers)

    async def start_stream(self, content_type: bytes = _EVENTS) -> None:
        """Send the status line of a stream, of events or of other bytes, and begin to watch the reader."""
        self.streaming, self.events = True, content_type == _EVENTS
        self._watch_writes()
        headers = [(b"content-type", content_type), *_STREAM_HEADERS]
        await self._start({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes) -> None:
        """One piece of the stream in one write. Waits while the reader is slow; the watch ends a wait too long."""
        self._write_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._write_since = 0.0

    async def end_stream(self, body: bytes) -> None:
        """The last piece."""
        self.complete = True
        self._write_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._write_since = 0.0

    def _watch_writes(self) -> None:
        timeout_s = self.service.config.write_timeout_s
        loop = asyncio.get_running_loop()
        if self._write_since and loop.time() - self._write_since > timeout_s:
            self.stop("slow_reader")
            return
        self._timer = loop.call_later(timeout_s / 4, self._watch_writes)

    # ------------------------------------------------------------------------------------------------- running

    def stop(self, reason: str) -> None:
        """End the work on this request: disconnect, slow_reader, shutdown. Nothing happens once it has ended."""
        if self._task is not None and not self._task.done() and not self.stop_reason:
            self.stop_reason = reason
            self.service.abort_in_engine(self.engine_ids, reason)
            # Not before the engine has been told: closing its iterators would tell it too, without the reason.
            asyncio.get_running_loop().call_soon(self._task.cancel)

    async def run(self, handler: Handler, send: Send) -> None:
        """Run the handler as a task of its own beside the watcher for the disconnect; answer its errors.

        Heads of responses leave through `send`, so that the layers in between see them; bodies go out directly.
        """
        self._start = send
        if self.method in ("GET", "HEAD"):
            await self._settle(await _outcome(handler(self)))
            return
        self._task = asyncio.create_task(handler(self))
        self.service.exchanges.add(self)
        try:
            await asyncio.wait({self._task})
        finally:
            self._task.cancel()
            await asyncio.wait({self._task})
            self.service.exchanges.discard(self)
            if self._timer is not None:
                self._timer.cancel()
        error: BaseException | None = None if self._task.cancelled() else self._task.exception()
        if self._task.cancelled():
            error = stopped_error(self.stop_reason) if self.stop_reason else None
            if error is None:
                raise asyncio.CancelledError
        await self._settle(error)

    async def watched(self, work: Awaitable[T]) -> T:
        """Await `work` after the body was read, while watching for the client's leaving."""
        watcher = asyncio.create_task(self._watch_disconnect())
        try:
            return await work
        finally:
            watcher.cancel()

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.complete:
            self.stop("disconnect")

    async def _settle(self, error: BaseException | None) -> None:
        """What remains to be told to the client after the handler."""
        if error is None:
            return
        if isinstance(error, _ClientGone) or self.stop_reason == "disconnect":
            self.service.metrics.observe_disconnect("streaming" if self.streaming else "waiting")
            self.gone = True
            return
        if self.stop_reason == "slow_reader":
            log.info(
                "request %s: the reader took nothing for %g s", self.request_id, self.service.config.write_timeout_s
            )
            self.abort_connection()
            return
        if not isinstance(error, MotetError):
            log.error("request %s failed", self.request_id, exc_info=error)
        overload_status = self.service.config.overload_status
        if self.status == 0:
            if isinstance(error, Overloaded | Unavailable):
                self.service.metrics.observe_rejected(error.code)
            await send_error(self._start, error, overload_status=overload_status)
        elif self.events:
            wire = wire_error(error, overload_status=overload_status)
            try:
                async with asyncio.timeout(_FAREWELL_S):
                    await self.end_stream(b"data: " + wire.body + b"\n\n" + DONE)
            except TimeoutError:
                self.abort_connection()
        else:  # whoever was sent half a file shall see that it is half
            self.abort_connection()

    def abort_connection(self) -> None:
        """Drop the connection with all that still waits to be written; the only way to free a dead reader's buffer."""
        abort = self.scope.get("extensions", {}).get("motet.abort")
        if abort is not None:
            abort()


class _ClientGone(Exception):
    """The client left while we were reading its request."""


async def _outcome(work: Awaitable[None]) -> BaseException | None:
    try:
        await work
    except Exception as error:
        return error
    return None


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, route: str, handler: Handler) -> None:
        self.route = route
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["motet"]
        exchange.route = self.route
        await exchange.run(self.handler, send)


# ----------------------------------------------------------------------------------------------- naming what is wrong

_PATH = re.compile(r" - at (`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_FIELD = re.compile(r"(unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def named_error(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec's complaint with the field taken out of it as `param`."""
    text = str(error)
    path = ""
    if found := _PATH.search(text):
        path = found["path"].lstrip(".")
        text = text[: found.start()]
    if found := _FIELD.search(text):
        name = found["name"][:100]
        path = f"{path}.{name}" if path else name
        text = f"{found[1]} field {name!r}"
        code = "unknown_parameter" if found[1] == "unknown" else "missing_parameter"
        return InvalidRequest(text, param=path, code=code)
    return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)


def _not_finite(body: bytes) -> InvalidRequest | None:
    """Name the parameter when what breaks the JSON is NaN or Infinity, which many JSON writers let through."""
    if len(body) > 1_000_000 or not (b"NaN" in body or b"Infinity" in body):
        return None
    marker = object()
    try:
        value: Any = json.loads(body, parse_constant=lambda _: marker)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        for key, item in value.items():
            if item is marker or (isinstance(item, (dict, list)) and _holds(item, marker)):
                return InvalidRequest(f"{key[:100]}: expected a finite number, got NaN or Infinity", param=key[:100])
    return None


def _holds(value: Any, marker: object) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if item is marker:
            return True
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
    return False
