"""The hub's loop thread: blocking and awaiting callers, errors, cancellation, an orderly end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from motet.engine.config import HostConfig
from motet.engine.errors import InvalidRequest, ModelNotFound, Unavailable
from motet.pipelines.hub import Hub, default_model

from .scripted_client import ScriptedClient


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def hub(client: ScriptedClient) -> Iterator[Hub]:
    with Hub(HostConfig(), client=client) as hub:
        yield hub


async def where() -> str:
    return threading.current_thread().name


def test_coroutines_run_on_the_hubs_own_thread(hub: Hub) -> None:
    assert hub.run(where()) == "motet-hub"


def test_an_awaiting_caller_keeps_its_own_loop(hub: Hub) -> None:
    async def main() -> tuple[str, str]:
        return await hub.run_async(where()), await where()

    assert asyncio.run(main()) == ("motet-hub", "MainThread")


def test_errors_come_back_as_they_are(hub: Hub) -> None:
    async def fail() -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest, match="no"):
        hub.run(fail())


def test_cancelling_the_caller_cancels_the_coroutine(hub: Hub) -> None:
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await hub.run_async(wait())

    asyncio.run(main())
    assert ended.wait(5)


def test_close_is_final_and_twice_is_fine(client: ScriptedClient) -> None:
    hub = Hub(HostConfig(), client=client)
    hub.close()
    hub.close()
    assert client.num_closed == 1
    assert hub.closed
    with pytest.raises(Unavailable, match="closed"):
        hub.run(where())


def test_close_ends_what_still_waits(client: ScriptedClient) -> None:
    hub = Hub(HostConfig(), client=client)
    future = hub.start(asyncio.sleep(60))
    hub.close()
    assert future.cancelled()


def test_a_forgotten_hub_closes_itself(client: ScriptedClient) -> None:
    hub = Hub(HostConfig(), client=client)
    assert hub.run(where()) == "motet-hub"
    del hub
    gc.collect()
    assert client.num_closed == 1
    assert "motet-hub" not in {thread.name for thread in threading.enumerate()}


def test_default_model_is_the_packaged_one() -> None:
    assert default_model("llm") == "smollm2-135m-instruct"
    with pytest.raises(ModelNotFound, match="no model of kind 'nonsense'"):
        default_model("nonsense")
