"""Events on their way to a reader: joined while nobody takes them, ended early, failed before and after they are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from motet.engine.config import HostConfig
from motet.engine.errors import InvalidRequest
from motet.pipelines.collected import AsyncCollectedStream, Collected, CollectedStream
from motet.pipelines.hub import Hub

from .scripted_client import ScriptedClient


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(HostConfig(), client=ScriptedClient()) as hub:
        yield hub


class Counting(Collected[list[int], int]):
    """Counts to `last`; even numbers join what lies there. Waits at `hold_at` until told to go on."""

    what = "count"

    def __init__(self, hub: Hub, last: int, *, hold_at: int = -1, fail_at: int = -1) -> None:
        super().__init__(hub)
        self.last, self.hold_at, self.fail_at = last, hold_at, fail_at
        self.held, self.closed = threading.Event(), threading.Event()
        self.go_on = asyncio.Event()

    async def _run(self, ready: Future[None]) -> int:
        if self.fail_at == 0:
            raise InvalidRequest("no such count")
        ready.set_result(None)
        for number in range(self.last):
            if number == self.hold_at:
                self.held.set()
                await self.go_on.wait()
            if number and number == self.fail_at:
                raise InvalidRequest("lost count")
            self._put([number])
        return self.last

    def _join(self, last: list[int], new: list[int]) -> list[int] | None:
        return last + new if new[0] % 2 == 0 else None

    def _close(self) -> None:
        self.closed.set()


def test_what_nobody_took_is_joined(hub: Hub) -> None:
    counting = Counting(hub, 7, hold_at=6)
    with CollectedStream(counting) as stream:
        assert counting.held.wait(5)
        with pytest.raises(RuntimeError, match="the count is not finished"):
            stream.result  # noqa: B018
        assert next(stream) == [0]
        hub._loop.call_soon_threadsafe(counting.go_on.set)
        assert list(stream) == [[1, 2], [3, 4], [5], [6]] and stream.result == 7
        assert next(stream, None) is None and counting.closed.is_set()


def test_errors_come_when_they_are_due(hub: Hub) -> None:
    refused = Counting(hub, 3, fail_at=0)
    with pytest.raises(InvalidRequest, match="no such"):
        CollectedStream(refused)
    assert refused.closed.wait(5)
    stream = CollectedStream(Counting(hub, 3, fail_at=2))
    assert next(stream) == [0] and next(stream) == [1]
    with pytest.raises(InvalidRequest, match="lost"):
        next(stream)


def test_leaving_early_ends_the_request(hub: Hub) -> None:
    counting = Counting(hub, 5, hold_at=3)
    with CollectedStream(counting) as stream:
        assert next(stream) == [0] and counting.held.wait(5)
    assert counting.closed.wait(5)
    assert list(stream) == [[1, 2]]  # what had come; the cancellation is no error of the reader's


def test_async_iteration_begins_with_the_first_item(hub: Hub) -> None:
    async def whole() -> tuple[list[list[int]], int]:
        counting = Counting(hub, 2)
        stream = AsyncCollectedStream(counting)
        await asyncio.sleep(0.01)
        assert counting._task is None
        return [item async for item in stream], stream.result

    assert asyncio.run(whole()) == ([[0], [1]], 2)

    async def unused() -> None:
        async with AsyncCollectedStream(Counting(hub, 2)):
            pass

    asyncio.run(unused())


def test_cancelling_the_reader_ends_the_request(hub: Hub) -> None:
    counting = Counting(hub, 5, hold_at=0)

    async def main() -> None:
        task = asyncio.create_task(anext(AsyncCollectedStream(counting)))
        await asyncio.to_thread(counting.held.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert counting.closed.wait(5)


def test_cancelling_before_the_task_is_known_ends_the_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(hub, 5, hold_at=0)
    start = hub.start

    def late(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        task = start(coroutine)
        assert counting.held.wait(5)
        counting.cancel()  # as another thread does it, which sees no task yet
        return task

    monkeypatch.setattr(hub, "start", late)
    with contextlib.suppress(CancelledError, asyncio.CancelledError):
        counting.begin()
    assert counting.closed.wait(5)
