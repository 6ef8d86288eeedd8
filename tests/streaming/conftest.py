"""A real server on a loopback port, in a thread, over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from motet.streaming.config import ServedModel, ServerConfig
from motet.streaming.server import serve

from .fake_engine import ASR, MODEL, FakeEngine, write_tokenizer
from .fake_painter import IMAGE
from .fake_voice import TTS, write_voice


@dataclass
class Running:
    """A server that runs. `wait(condition)` looks at the engine for at most two seconds."""

    engine: FakeEngine
    url: str
    port: int
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], None] = lambda: None  # begin to drain, as SIGTERM does; does not wait

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def wait(self, condition: Callable[[FakeEngine], bool], what: str, timeout_s: float = 2.0) -> None:
        deadline = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition(self.engine):
                return
            deadline.wait(0.01)
        raise AssertionError(f"not within {timeout_s} s: {what}; {self.engine.ended}")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_voice(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def start_server(source: Path) -> Iterator[Callable[..., Running]]:
    """Start servers with the given ServerConfig values; all are stopped at the end of the test."""
    yield from _servers(source)


@pytest.fixture(scope="session")
def shared_server(source: Path) -> Iterator[Running]:
    for start in _servers(source):
        yield start()


@pytest.fixture
def server(shared_server: Running) -> Running:
    """A server with the default configuration, its engine as if new."""
    shared_server.wait(lambda engine: not engine.live, "the last test's requests end")
    shared_server.engine.reset()
    return shared_server


def _servers(source: Path) -> Iterator[Callable[..., Running]]:
    stops: list[Callable[[], None]] = []

    def start(**options: Any) -> Running:
        engine = FakeEngine(source)
        kinds = {MODEL: "llm", ASR: "asr", TTS: "tts", IMAGE: "image"}
        models = tuple(ServedModel(id=name, kind=kind) for name, kind in kinds.items())
        config = ServerConfig(**{"port": 0, "models": models, "shutdown_timeout_s": 2.0, **options})
        ready = threading.Event()
        parts: dict[str, Any] = {}

        def announce(line: str) -> None:
            parts["url"] = line.rsplit(" ", 1)[1]
            ready.set()

        async def main() -> int:
            parts["loop"], parts["stop"] = asyncio.get_running_loop(), asyncio.Event()

            async def factory() -> FakeEngine:
                return engine

            return await serve(config, factory, announce=announce, signals=False, stop=parts["stop"])

        def run() -> None:
            try:
                parts["code"] = asyncio.run(main())
            finally:
                ready.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(10) and "url" in parts

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended
                parts["loop"].call_soon_threadsafe(parts["stop"].set)
            thread.join(10)
            assert not thread.is_alive(), "the server did not end"
            assert parts["code"] == 0 and engine.closed and not engine.live

        stops.append(stop)

        def drain() -> None:
            parts["loop"].call_soon_threadsafe(parts["stop"].set)

        return Running(engine, parts["url"], int(parts["url"].rsplit(":", 1)[1]), parts["loop"], drain)

    yield start
    for stop in stops:
        stop()
