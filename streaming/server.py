"""Runs the application: the socket, uvicorn, the engine's start, and the end in good order.

First SIGTERM: /readyz says 503, new requests get 503 `draining`, those in flight may finish within
`shutdown_timeout_s` (live sessions: what was said so far is finished, then they close with 1012), then the engine is
drained and closed. A second SIGTERM, or Ctrl-C, ends what is in flight at once
(each client is told).
Uvicorn's own signal handling is not used: it would close connections before the requests on them have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from ..engine.client import EngineClient
from ..engine.errors import MotetError, to_info
from .app import create_app
from .config import ServerConfig
from .connection import LimitedSocket, connection_class, quiet_uvicorn
from .service import Service

log = logging.getLogger("motet.server")

ClientFactory = Callable[[], Awaitable[EngineClient]]
_FAREWELL_S = 1.0  # for the last words to clients whose requests are ended early
_CLOSE_S = 5.0  # for the engine to end after a drain; after Ctrl-C a fifth of it


def say(line: str) -> None:
    """One line for the person who started the server."""
    print(line, flush=True)


def run(config: ServerConfig, client_factory: ClientFactory, *, announce: Callable[[str], None] = say) -> int:
    """`serve` in an event loop of its own (uvloop where installed). Returns the exit code."""
    factory = uvicorn.Config(app="", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config, client_factory, announce=announce))


async def serve(
    config: ServerConfig,
    client_factory: ClientFactory,
    *,
    announce: Callable[[str], None] = say,
    signals: bool = True,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until a signal (or `stop`) and return the exit code: 0, or 1 when the engine could not be started.

    The port is open at once: while `client_factory` works, /livez says 200 and /readyz 503. Raises OSError when the
    address cannot be had.
    """
    listener = bind(config)
    service = Service(config)
    server = _Server(
        uvicorn.Config(
            create_app(None, config, service=service),
            http=connection_class(config),
            ws=LimitedSocket,
            ws_max_size=config.max_socket_message_bytes,
            ws_per_message_deflate=False,
            ws_ping_interval=config.socket_ping_s,
            ws_ping_timeout=config.socket_ping_s,
            lifespan="off",
            timeout_keep_alive=int(max(config.idle_timeout_s, 1)),
            timeout_graceful_shutdown=2,
            server_header=False,
            proxy_headers=False,
            **quiet_uvicorn(),
        )
    )
    ending = _Ending(stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_start(service, client_factory, url_of(listener, config), announce))
    with ending.signals() if signals else contextlib.nullcontext():
        watch = asyncio.create_task(ending.wait())
        try:
            await asyncio.wait({serving, starting, watch}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled() and starting.result() is not None:
                await asyncio.wait({serving, watch}, return_when=asyncio.FIRST_COMPLETED)
            return await _end(config, service, server, starting, ending)
        finally:
            watch.cancel()
            server.should_exit = True
            await asyncio.wait({serving})
            await service.decoder.close()


async def _start(
    service: Service, client_factory: ClientFactory, url: str, announce: Callable[[str], None]
) -> EngineClient | None:
    """Start the engine beside the running server. None: it cannot be started (reason logged and kept)."""
    try:
        client = await client_factory()
    except Exception as error:
        service.failure = error if isinstance(error, MotetError) else MotetError(to_info(error).message)
        log.error(
            "the engine could not be started: %s",
            service.failure.message,
            exc_info=None if isinstance(error, MotetError) else error,
        )
        print(f"motet: the engine could not be started: {service.failure.message}", file=sys.stderr, flush=True)
        return None
    service.attach(client)
    gc.collect()
    gc.freeze()  # what was made at start is not looked at again
    count = len(service.config.models)
    announce(f"Motet serves {count} model{'' if count == 1 else 's'} on {url}")
    return client


async def _end(
    config: ServerConfig,
    service: Service,
    server: _Server,
    starting: asyncio.Task[EngineClient | None],
    ending: _Ending,
) -> int:
    """Let requests finish as far as the signals allow, then end the engine, then the server."""
    if not ending.at_once.is_set():
        draining = asyncio.create_task(service.drain(config.shutdown_timeout_s))
        hurry = asyncio.create_task(ending.at_once.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        hurry.cancel()
    close_s = _CLOSE_S / 5 if ending.at_once.is_set() else _CLOSE_S
    service.abort_all("shutdown")
    await service.drain(_FAREWELL_S)
    server.should_exit = True
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting}, timeout=close_s)
    if not starting.done() or starting.cancelled():
        return 0
    client = starting.result()
    if client is None:
        return 1
    with contextlib.suppress(MotetError, OSError, TimeoutError):
        async with asyncio.timeout(close_s):
            await client.drain(close_s / 2)
    with contextlib.suppress(MotetError, OSError, TimeoutError):
        async with asyncio.timeout(close_s):
            await client.close()
    return 0


class _Ending:
    """What the signals asked for: `soon` after the first SIGTERM, `at_once` after the second or Ctrl-C."""

    def __init__(self, soon: asyncio.Event | None = None) -> None:
        self.soon = soon or asyncio.Event()
        self.at_once = asyncio.Event()

    async def wait(self) -> None:
        await self.soon.wait()

    def on_signal(self, number: int) -> None:
        if number == signal.SIGINT or self.soon.is_set():
            self.at_once.set()
        self.soon.set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address. Raises OSError, for example when the port is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """The address to type into a client; port 0 has become the real one."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
