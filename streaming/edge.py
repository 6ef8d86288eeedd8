"""The outermost layer: every HTTP request gets its Exchange, every response its headers, every error the envelope.
A WebSocket is let in or refused here; what happens in it is session.py's.

Pure ASGI throughout: Starlette's BaseHTTPMiddleware would hide the client's disconnect from the routes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.errors import InternalError, MotetError, Overloaded, Unavailable
from .exchange import Exchange
from .protocol import (
    HostNotAllowed,
    MethodNotAllowed,
    OriginNotAllowed,
    RouteNotFound,
    UpgradeRequired,
    send_error,
    wire_error,
)
from .service import Service

log = logging.getLogger("motet.server")
access_log = logging.getLogger("motet.access")

CLIENT_CLOSED_REQUEST = 499  # in the log and the metrics only
SOCKET_PATHS = ("/v1/audio/stream", "/v1/audio/speech/stream", "/v1/realtime")


class EdgeMiddleware:
    """Makes the Exchange, counts the request, answers what nobody below has answered."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(self.service, scope, receive, send)
        scope["motet"] = exchange
        self.service.metrics.http_started()
        try:
            await self.app(scope, receive, exchange.send)
        except Exception as error:
            if not isinstance(error, MotetError):
                log.error("request %s failed", exchange.request_id, exc_info=error)
            if exchange.status == 0:
                await send_error(exchange.send, error)
            else:
                exchange.abort_connection()
        finally:
            status = CLIENT_CLOSED_REQUEST if exchange.gone else exchange.status or 500
            seconds = time.perf_counter() - exchange.started
            self.service.metrics.http_finished(exchange.route, _known_method(exchange.method), status, seconds)
            if self.service.config.access_log:
                access_log.info(
                    "%s",
                    json.dumps(
                        {
                            "request_id": exchange.request_id,
                            "method": exchange.method,
                            "path": scope["path"][:200],
                            "status": status,
                            "model": exchange.model,
                            "ms": round(seconds * 1e3, 1),
                        }
                    ),
                )

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the layers below refuse a WebSocket with an HTTP answer, and say 404 where no route wants it."""
        opened = answered = False

        async def answer(message: Message) -> None:
            nonlocal opened, answered
            kind = message["type"]
            if kind == "websocket.close" and not opened and not answered:
                await send_error(answer, RouteNotFound("no such route on this server"))
                return
            opened |= kind == "websocket.accept"
            if kind.startswith("http.response."):
                answered = True
                message = {**message, "type": f"websocket.{kind}"}
            await send(message)

        scope["motet"] = self.service
        try:
            if not origin_allowed(scope, self.service.config.cors_origins):
                raise OriginNotAllowed("the Origin header names no page that may use this server; see cors_origins")
            await self.app(scope, receive, answer)
        except Exception as error:
            if not isinstance(error, MotetError):
                log.error("a session failed", exc_info=error)
            elif isinstance(error, Overloaded | Unavailable):
                self.service.metrics.observe_rejected(error.code)
            if not opened and not answered:
                await send_error(answer, error, overload_status=self.service.config.overload_status)
            elif not answered:
                scope["extensions"]["motet.abort"]()


def origin_allowed(scope: Scope, listed: Sequence[str]) -> bool:
    """Whether a page of this origin may open a WebSocket: browsers ask nobody before they open one.

    Clients that are no browsers send no Origin; pages of this very host and of the listed origins may come in.
    """
    fields = dict(scope["headers"])
    origin = fields.get(b"origin", b"").decode("latin-1").lower()
    own = fields.get(b"host", b"").decode("latin-1").lower()
    return not origin or origin.partition("://")[2] == own or origin in (one.lower() for one in listed)


class HostMiddleware:
    """Refuses requests whose Host header is not listed: a guard against DNS rebinding."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self.app = app
        self.exact = frozenset(host.lower() for host in allowed if not host.startswith("*."))
        self.suffixes = tuple(host[1:].lower() for host in allowed if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            host = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
            if host not in self.exact and not (self.suffixes and host.endswith(self.suffixes)):
                await send_error(send, HostNotAllowed("the Host header names no host of this server"))
                return
        await self.app(scope, receive, send)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 (and any other HTTPException) in the usual envelope."""
    assert isinstance(error, HTTPException)
    ours: MotetError
    if error.status_code == 404 and request.scope["path"] in SOCKET_PATHS:
        ours = UpgradeRequired("this is a WebSocket: expected a request to upgrade")
    elif error.status_code == 404:
        ours = RouteNotFound("no such route on this server")
    elif error.status_code == 405:
        ours = MethodNotAllowed(f"{_known_method(request.method)} is not allowed here")
    else:
        ours = InternalError("the request could not be handled")
    wire = wire_error(ours)
    return Response(wire.body, wire.status, headers=error.headers, media_type="application/json")


def _known_method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE") else "other"
