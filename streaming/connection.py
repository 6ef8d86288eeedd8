"""uvicorn's httptools connection with limits: header bytes and count, time for the headers, pipelined requests, number
of connections; every refusal at this level is in the JSON envelope too. Puts `motet.abort` into the ASGI scope.

A connection that upgrades to a WebSocket goes on as `LimitedSocket`, whose scope also holds `motet.close(code, reason)`:
it closes even while the peer reads nothing. `motet.unsent()` tells how many bytes wait for the peer to read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from ..engine.errors import InvalidRequest, MotetError, Unavailable
from .config import ServerConfig
from .protocol import HeadersTooLarge, RequestTimeout, wire_error

_MAX_PIPELINED = 16
_LARGEST_READ = 256 * 1024  # bytes that one read of the event loop may bring
_MAX_FRAGMENTS = 4096  # of one WebSocket message
_CLOSE_S = 2.0  # for the peer's answer to our closing, and for what is still to be written

log = logging.getLogger("motet.server")


def connection_class(limits: ServerConfig) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn with these limits bound."""

    class LimitedConnection(HttpToolsProtocol):
        _refusal: MotetError | None = None
        _header_bytes = 0  # of the head being parsed
        _head_received = 0  # raw bytes that came in while a head was unfinished
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                self._refusal = Unavailable("too many connections", code="too_many_connections", retry_after_s=1.0)
                self.send_400_response("")
                return
            self._header_timer = self.loop.call_later(limits.header_timeout_s, self._headers_too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self.scope["extensions"] = {"motet.abort": self.transport.abort}  # type: ignore[dict-item]
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(limits.header_timeout_s, self._headers_too_slow)

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._count(len(name) + len(value))
            if len(self.headers) > limits.max_header_count:
                self._refuse(HeadersTooLarge(f"more than {limits.max_header_count} headers"))

        def on_headers_complete(self) -> None:
            self._stop_header_timer()
            if len(self.pipeline) >= _MAX_PIPELINED:
                self._refuse(Unavailable("too many pipelined requests", code="too_many_requests", retry_after_s=1.0))
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self._header_timer is None:
                self._head_received = 0
                return
            # A header line that never ends reaches no callback: an unfinished head is counted by what came in for it.
            self._head_received += len(data)
            if self._head_received > limits.max_header_bytes + _LARGEST_READ and not self.transport.is_closing():
                self._refusal = HeadersTooLarge(f"headers of more than {limits.max_header_bytes} bytes")
                self.send_400_response("")

        def send_400_response(self, msg: str) -> None:
            """Every refusal of the connection itself; uvicorn calls it for what is not HTTP."""
            error = self._refusal or InvalidRequest("the request is not valid HTTP", code="invalid_http")
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                wire = wire_error(error)
                head = [
                    STATUS_LINE[wire.status],
                    b"content-type: application/json\r\n",
                    b"content-length: %d\r\n" % len(wire.body),
                ]
                head += [name + b": " + value + b"\r\n" for name, value in wire.headers if name != b"connection"]
                self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", wire.body]))
            self.transport.close()

        def timeout_keep_alive_handler(self) -> None:
            """A peer idle for so long has either read everything, or never will."""
            if self.transport.get_write_buffer_size() > 0:
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

        def _unsupported_upgrade_warning(self) -> None:
            log.debug("a client asked for an upgrade that is not offered here")

        def _count(self, size: int) -> None:
            self._header_bytes += size
            if self._header_bytes > limits.max_header_bytes:
                self._refuse(HeadersTooLarge(f"headers of more than {limits.max_header_bytes} bytes"))

        def _refuse(self, error: MotetError) -> None:
            """Stop the parser: httptools turns this into HttpParserError, and uvicorn calls `send_400_response`."""
            self._refusal = error
            raise _Refused

        def _headers_too_slow(self) -> None:
            self._header_timer = None
            if self._head_received == 0:
                self.transport.close()  # nothing was asked
            elif not self.transport.is_closing():
                self._refusal = RequestTimeout(f"no complete request head within {limits.header_timeout_s:g} s")
                self.send_400_response("")

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return LimitedConnection


class _Refused(Exception):
    pass


class LimitedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket on the websockets library's state machine. Reads one message ahead, no further."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = _CLOSE_S

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.handshake_initiated and not self.handshake_complete:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions |= {
                "motet.abort": self.transport.abort,
                "motet.close": self._close_now,
                "motet.unsent": self.transport.get_write_buffer_size,
            }

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.conn.fail(1008, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def handle_parser_exception(self) -> None:
        """A peer that breaks the protocol or a limit is told why, also while it is still sending.

        Closing a socket with unread data resets the connection, and the peer would never see the close frame. So only our
        side is ended; what still comes is thrown away until the peer ends its own, or for a moment.
        """
        if self.close_sent:
            return
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        if self.transport.can_write_eof():
            if self.read_paused:  # only a reader sees the peer's end
                self.read_paused = False
                self.transport.resume_reading()
            self.transport.write_eof()
            self.close_timer = self.loop.call_later(_CLOSE_S, self.transport.abort)
        else:
            self.transport.close()

    def _close_now(self, code: int, reason: str) -> None:
        """Send a close frame whether or not the peer reads, and drop what it has not read after a moment."""
        if not self.close_sent and self.handshake_complete and not self.transport.is_closing():
            self.stop_keepalive()
            self.conn.send_close(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()
            self.close_timer = self.loop.call_later(_CLOSE_S, self.transport.abort)


def quiet_uvicorn() -> dict[str, Any]:
    """Logging for uvicorn: warnings and errors only; lines on invalid HTTP or UTF-8 are the clients' fault."""
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not record.getMessage().startswith(("Invalid HTTP request", "Invalid UTF-8 sequence"))
    )
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # forms that are none are told to their senders
    return {"log_config": None, "log_level": "warning", "access_log": False}
