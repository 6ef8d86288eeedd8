"""One host in this process, built from one config, and the event-loop thread that talks to it.

Pipelines (chat, later transcription, speech, images) are thin objects over a hub; several may share one, and then share
its engines, its memory and its arbiter. The hub gives both worlds to its pipelines: `run` blocks a thread that has no
event loop, `run_async` suits the caller's own loop. Knows no prompts, no tokens, no models.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..engine.client import EngineClient, InlineClient, OnProgress
from ..engine.config import HostConfig
from ..engine.errors import ModelNotFound, Unavailable
from ..engine.frontend.pictures import PictureFrontend
from ..engine.frontend.speech import SpeechFrontend
from ..engine.frontend.text import TextFrontend
from ..engine.types import ModelInfo
from ..models import registry

T = TypeVar("T")


class Hub:
    """Engines in a thread of this process. Close it, or use it in a `with` block; at exit it closes itself."""

    def __init__(
        self, config: HostConfig, *, client: EngineClient | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """`on_progress` hears (on the hub's thread) how far the load of a model is.

        `client` is another way to reach engines than a host of our own; `config` then says nothing.
        """
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="motet-hub", daemon=True)
        self._thread.start()
        self.client: EngineClient = client if client is not None else _own_host(config, on_progress)
        self.text = TextFrontend(self.client)
        self.speech = SpeechFrontend(self.client)
        self.pictures = PictureFrontend(self.client)
        self._finalizer = weakref.finalize(self, _shut_down, self.client, self._loop, self._thread)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the hub's loop. Raises Unavailable once closed."""
        if self.closed:
            coroutine.close()
            raise Unavailable("this pipeline is closed", code="closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, blocking this thread; an interrupt (Ctrl-C) cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, awaited on the caller's loop; cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(self.start(coroutine))

    def load(self, model: str) -> ModelInfo:
        """Load a model now rather than at its first request."""
        return self.run(self.client.load(model))

    def close(self) -> None:
        """End every request and free the engines; closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_model(kind: str) -> str:
    """The id of the first model of a kind whose weights are here. Raises ModelNotFound, saying what to install."""
    missing: ModelNotFound | None = None
    for spec in registry.installed():
        if spec.kind == kind:
            try:
                spec.locate()
                return spec.id
            except ModelNotFound as error:
                missing = missing or error
    raise missing or ModelNotFound(f"no model of kind {kind!r} is installed; `make venv` installs the demo models")


def _own_host(config: HostConfig, on_progress: OnProgress | None) -> InlineClient:
    client = InlineClient(config)
    client.on_progress = on_progress
    return client


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _shut_down(client: EngineClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the client on its loop, then the loop. Knows no hub, so that a forgotten hub can be collected."""

    async def close() -> None:
        try:
            await client.close()
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await loop.shutdown_asyncgens()
        finally:
            loop.stop()

    future = asyncio.run_coroutine_threadsafe(close(), loop)
    if threading.current_thread() is not thread:  # the collector may run anywhere, also on the loop itself
        thread.join(timeout=10)
        if future.done() and not future.cancelled() and future.exception() is not None:
            raise future.exception()  # type: ignore[misc]
