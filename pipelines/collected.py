"""One request's events on their way to a reader: collected on the hub's loop, iterated from any thread or loop.

`Collected` runs the request and keeps what nobody has taken yet, `CollectedStream` iterates it in plain code, and
`AsyncCollectedStream` for `async for`. What the events are, and how two of them join, is the pipeline's business.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Generic, Self, TypeVar

from .hub import Hub

Item = TypeVar("Item")
Result = TypeVar("Result")


class Collected(ABC, Generic[Item, Result]):
    """A request on its way. A slow reader gets joined items and never holds the engine up."""

    what = "result"  # in the words of errors

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._result: Result | None = None
        self._items: list[Item] = []
        self._ended = False
        self._error: BaseException | None = None
        self._news: asyncio.Event | None = None
        self._task: Future[None] | None = None
        self._unwanted = False

    @abstractmethod
    async def _run(self, ready: Future[None]) -> Result:
        """The request from beginning to end; `_put` what comes, and set `ready` once it is on its way."""

    def _join(self, last: Item, new: Item) -> Item | None:
        """One item in the place of two, or None: they stay apart."""
        return None

    def _close(self) -> None:
        """The request is over, however it ended. Runs on the hub's loop."""

    def begin(self) -> Self:
        """Return once the request is on its way; raises what is wrong with it."""
        ready: Future[None] = Future()
        self._task = self.hub.start(self._pump(ready))
        if self._unwanted:  # `cancel` came from another thread before there was a task to be seen
            self._task.cancel()
        try:
            ready.result()
        except BaseException:
            self._task.cancel()
            raise
        return self

    async def _pump(self, ready: Future[None]) -> None:
        self._news = asyncio.Event()
        try:
            self._result = await self._run(ready)
        except BaseException as error:
            self._error = error
            if not ready.done():
                ready.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._ended = True
            self._close()
            self._news.set()

    def _put(self, item: Item) -> None:
        assert self._news is not None
        joined = self._join(self._items[-1], item) if self._items else None
        if joined is None:
            self._items.append(item)
        else:
            self._items[-1] = joined
        self._news.set()

    async def take(self) -> list[Item]:
        """What came since the last take, at least one item; nothing at the end. Runs on the hub's loop."""
        assert self._news is not None
        while not self._items and not self._ended:
            self._news.clear()
            await self._news.wait()
        if self._items:
            items, self._items = self._items, []
            return items
        if self._error is not None and not isinstance(self._error, asyncio.CancelledError):
            raise self._error
        return []

    @property
    def result(self) -> Result:
        """Raises RuntimeError before the end."""
        if self._result is None:
            raise RuntimeError(f"the {self.what} is not finished: iterate the stream to its end first")
        return self._result

    def cancel(self) -> None:
        self._unwanted = True
        if self._task is not None:
            self._task.cancel()


class CollectedStream(Generic[Item, Result]):
    """Items in order. After the last one `result` holds the whole."""

    def __init__(self, collected: Collected[Item, Result]) -> None:
        self._collected = collected.begin()
        self._waiting: list[Item] = []  # last first

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self._waiting:
            self._waiting = self._collected.hub.run(self._collected.take())[::-1]
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop()

    @property
    def result(self) -> Result:
        return self._collected.result

    def close(self) -> None:
        """Stop early: the engine forgets the request."""
        self._collected.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncCollectedStream(Generic[Item, Result]):
    """`CollectedStream` for `async for`. The request starts with the first item asked for."""

    def __init__(self, collected: Collected[Item, Result]) -> None:
        self._collected = collected
        self._begun = False
        self._waiting: list[Item] = []  # last first

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        try:
            if not self._begun:
                await self._begin()
                self._begun = True
            if not self._waiting:
                self._waiting = (await self._collected.hub.run_async(self._collected.take()))[::-1]
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if not self._waiting:
            self._ending()
            await self.aclose()
            raise StopAsyncIteration
        return self._waiting.pop()

    async def _begin(self) -> None:
        await asyncio.to_thread(self._collected.begin)

    def _ending(self) -> None:
        """There are no more items; raises what the reader has not heard of."""

    @property
    def result(self) -> Result:
        return self._collected.result

    async def aclose(self) -> None:
        """Stop early: the engine forgets the request."""
        self._collected.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
