"""What an operator may set about the server. Frozen; checked when made; nothing is written back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DEFAULT_MODEL = "default"  # the first served model that can do the route's job


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as `/v1/models` lists it, whether loaded yet or not."""

    id: str
    kind: str = "llm"
    owned_by: str = "motet"
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address, keys and limits of one server. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    models: tuple[ServedModel, ...] = ()

    # Who may come in. Without keys every client may; with one, every route but the probes asks for it.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None  # one key a line, or "sha256:" and 64 hex digits; "#" starts a comment
    allowed_hosts: tuple[str, ...] = ()  # Host header values ("*.example.org" too); empty: any
    cors_origins: tuple[str, ...] = ()  # exact origins; empty: no CORS headers at all

    # How much may come in.
    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_header_count: int = 128
    max_connections: int = 4096
    max_queued_requests: int = 1024  # admitted and still without a first token
    max_queued_tokens: int = 1_000_000  # prompt tokens of those
    overload_status: Literal[429, 503] = 429  # "healthy but busy" or "cannot serve", for a full queue
    max_upload_bytes: int = 1024 * 1024 * 1024  # of one audio file, as it comes in
    max_uploads_bytes: int = 8 * 1024 * 1024 * 1024  # of all files that are coming in or being read, together
    max_audio_s: float = 4 * 3600.0  # of one audio file, decoded
    max_decodes: int = 2  # audio files decoded at once, and pictures; others wait their turn
    max_pictures_bytes: int = 512 * 1024 * 1024  # of all pictures to begin from that wait to be opened, together
    max_sessions: int = 256  # live WebSocket sessions
    max_socket_message_bytes: int = 4 * 1024 * 1024
    max_live_ahead_s: float = 30.0  # of audio that a live client may send before its time; then it is read no faster

    # How long things may take.
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 15.0  # between two requests of one connection
    write_timeout_s: float = 30.0  # one write to a reader that does not read
    sse_keep_alive_s: float = 10.0  # silence before the first token that is broken with a comment
    stats_timeout_s: float = 2.0  # for the engine's answer to a probe or a scrape
    shutdown_timeout_s: float = 30.0  # for requests in flight after SIGTERM
    socket_ping_s: float = 20.0  # between pings of a WebSocket, and for the answer to one
    session_idle_s: float = 300.0  # a live session in which the client says nothing for so long is closed
    session_max_s: float = 3600.0  # and one older than this

    access_log: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_header_bytes",
            "max_header_count",
            "max_connections",
            "max_queued_requests",
            "max_queued_tokens",
            "header_timeout_s",
            "body_timeout_s",
            "idle_timeout_s",
            "write_timeout_s",
            "sse_keep_alive_s",
            "stats_timeout_s",
            "max_upload_bytes",
            "max_uploads_bytes",
            "max_audio_s",
            "max_decodes",
            "max_pictures_bytes",
            "max_sessions",
            "max_socket_message_bytes",
            "max_live_ahead_s",
            "socket_ping_s",
            "session_idle_s",
            "session_max_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, got {self.port}")
        if self.shutdown_timeout_s < 0:
            raise ValueError(f"shutdown_timeout_s must not be negative, got {self.shutdown_timeout_s}")
        if "*" in self.cors_origins:
            raise ValueError("cors_origins must list exact origins, got '*'")
        ids = [model.id for model in self.models]
        if len(set(ids)) != len(ids):
            raise ValueError(f"models must have different ids, got {ids}")
        if DEFAULT_MODEL in ids:
            raise ValueError(f"no model may be called {DEFAULT_MODEL!r}: that word means the first one")
