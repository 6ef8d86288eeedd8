"""API keys: who may come in. Knows hashes only; the keys themselves are forgotten once read.

Once one key is set, every path asks for it except the probes in OPEN_PATHS: a new route is closed until listed, never
open until guarded.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from .protocol import AuthenticationFailed, send_error

OPEN_PATHS = frozenset({"/livez", "/readyz", "/ping", "/health"})
_HASHED = "sha256:"
_MAX_KEYS = 4  # looked at per request
_SUBPROTOCOL = "openai-insecure-api-key."  # how browsers send a key: their WebSockets take no headers


class KeyRing:
    """SHA-256 digests of the accepted keys."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        entries = [*keys]
        if file is not None:
            lines = (line.split("#", 1)[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
            entries += [line for line in lines if line]
            if not entries:
                raise ValueError(f"{file.name} holds no API key; expected one a line")
        self._digests = tuple(_digest(entry) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: str) -> bool:
        """Compare with every key, so that the time taken tells nothing about which was close."""
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found


def _digest(entry: str) -> bytes:
    if entry.startswith(_HASHED):
        try:
            digest = bytes.fromhex(entry.removeprefix(_HASHED))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ValueError("an API key entry that starts with 'sha256:' must go on with 64 hex digits")
        return digest
    if len(entry.strip()) < 1:
        raise ValueError("an API key must not be empty")
    return hashlib.sha256(entry.encode()).digest()


def presented_keys(scope: Scope) -> list[str]:
    """The keys of a request: `Authorization: Bearer`, `x-api-key` (Anthropic) or `api-key` (Azure).

    A WebSocket may bring its key as a subprotocol too.
    """
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, rest = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                found.append(rest.strip())
        elif name in (b"x-api-key", b"api-key"):
            found.append(value.decode("latin-1").strip())
    for offer in scope.get("subprotocols", ()):
        if offer.startswith(_SUBPROTOCOL):
            found.append(offer.removeprefix(_SUBPROTOCOL))
    return [key for key in found if key][:_MAX_KEYS]


class AuthMiddleware:
    """Pure ASGI. Answers 401 in the usual envelope; a WebSocket gets it in place of the upgrade."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self.keys or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        given = presented_keys(scope)
        if any(self.keys.accepts(key) for key in given):
            await self.app(scope, receive, send)
            return
        wanted = "the API key is not valid" if given else "no API key was sent; expected 'Authorization: Bearer KEY'"
        await send_error(send, AuthenticationFailed(wanted))
