"""Clients and hosts: inline thread and child process behave alike; one terminal event, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motet.engine.client import HostClient, InlineClient
from motet.engine.config import EngineConfig, HostConfig
from motet.engine.errors import ModelLoadError, ModelNotFound
from motet.engine.process_client import ProcessClient
from motet.engine.types import TERMINAL, Aborted, AnyEvent, Done, Failed, Request

from .. import tiny

KINDS = pytest.mark.parametrize("kind", ["inline", "process"])


@asynccontextmanager
async def client_of(kind: str, **engine: object) -> AsyncIterator[HostClient]:
    settings: dict[str, object] = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 257} | engine
    config = HostConfig(threads=1, engine=EngineConfig(**settings))  # type: ignore[arg-type]
    client: HostClient
    if kind == "inline":
        client = InlineClient(config)
    else:
        client = await ProcessClient.start(config, environment={"OMP_NUM_THREADS": "1"})
    try:
        yield client
    finally:
        await client.close()  # type: ignore[attr-defined]


def request(length: int = 9, **fields: object) -> Request:
    item = tiny.request(tiny.prompt(length), **fields)
    item.model = str(tiny.llama())
    return item


async def collect(client: HostClient, item: Request) -> list[AnyEvent]:
    events = [event async for event in client.submit(item)]
    assert [isinstance(event, TERMINAL) for event in events] == [False] * (len(events) - 1) + [True]
    return events


@KINDS
def test_tokens_equal_the_engines_own(kind: str) -> None:
    expected = tiny.answers(tiny.engine(), [tiny.request(tiny.prompt(n)) for n in (5, 9, 30)])

    async def scenario() -> None:
        async with client_of(kind) as client:
            answers = await asyncio.gather(*(collect(client, request(n)) for n in (5, 9, 30)))
            assert [tiny.tokens(events) for events in answers] == expected
            info = await client.load(str(tiny.llama()))
            assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (tiny.VOCAB, 512, (tiny.EOS,))
            stats = (await client.stats())["models"][str(tiny.llama())]
            assert stats["generation_tokens"] == 48 and stats["running"] == 0
            assert (await client.health())["models"] == {str(tiny.llama()): "loaded"}

    asyncio.run(scenario())


@KINDS
def test_abort_in_every_state(kind: str) -> None:
    async def scenario() -> None:
        async with client_of(kind) as client:
            early = request()
            await client.abort(early.request_id, "early")  # before submit
            (event,) = await collect(client, early)
            assert isinstance(event, Aborted) and event.reason == "early"

            loading = request(max_tokens=480)  # the model is not loaded yet, or just so
            task = asyncio.create_task(collect(client, loading))
            await asyncio.sleep(0.05)
            await client.abort(loading.request_id)
            assert isinstance((await task)[-1], Aborted)

            running = request(max_tokens=480)
            stream = client.submit(running)
            await anext(stream)
            await client.abort(running.request_id, "client")
            await client.abort(running.request_id, "client")  # twice
            rest = [event async for event in stream]
            assert isinstance(rest[-1], Aborted) and rest[-1].reason == "client"
            await client.abort(running.request_id)  # late; the id is over

            left = request(max_tokens=480)
            stream = client.submit(left)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            hungry = request(open=True)
            stream = client.submit(hungry)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.2)
            await client.abort(hungry.request_id)
            assert isinstance(await waiting, Aborted)

            events = await collect(client, request())
            assert len(tiny.tokens(events)) == 16
            stats = (await client.stats())["models"][str(tiny.llama())]
            assert stats["kv_usage"] == 0.0 and stats["running"] == stats["waiting"] == 0

    asyncio.run(scenario())


@KINDS
def test_open_input_and_duplicate_ids(kind: str) -> None:
    ids = tiny.prompt(20)
    expected = tiny.one(tiny.engine(), tiny.request(ids))

    async def scenario() -> None:
        async with client_of(kind) as client:
            await client.load(str(tiny.llama()))
            item = request(5, open=True)
            item.prompt = ids[:5]
            task = asyncio.create_task(collect(client, item))
            await asyncio.sleep(0.05)
            (refusal,) = await collect(client, request(name=item.request_id))
            assert isinstance(refusal, Failed) and refusal.error.code == "duplicate_request_id"
            await client.append(item.request_id, ids[5:11])
            await client.update(item.request_id, priority=-1)
            await client.append(item.request_id, ids[11:], last=True)
            assert tiny.tokens(await task) == expected
            bad = request(5, open=True)
            task = asyncio.create_task(collect(client, bad))
            await asyncio.sleep(0.05)
            await client.append(bad.request_id, [tiny.VOCAB + 1])
            assert isinstance((await task)[-1], Failed)

    asyncio.run(scenario())


@KINDS
def test_bad_models_and_requests_are_clear_errors(kind: str) -> None:
    async def scenario() -> None:
        async with client_of(kind) as client:
            with pytest.raises(ModelNotFound, match="no model 'nobody'"):
                await client.load("nobody")
            item = request()
            item.model = "nobody"
            (event,) = await collect(client, item)
            assert isinstance(event, Failed) and event.error.code == "model_not_found"
            events = await collect(client, request(temperature=-1.0))
            assert isinstance(events[-1], Failed) and events[-1].error.param == "temperature"

    asyncio.run(scenario())


def test_models_are_called_by_their_served_names_only() -> None:
    async def scenario() -> None:
        config = HostConfig(
            models=(str(tiny.llama()),), served_model_name=("mine",), threads=1,
            engine=EngineConfig(dtype="float32", device="cpu", num_blocks=64),
        )  # fmt: skip
        client = InlineClient(config)
        item = tiny.request(tiny.prompt(9))
        item.model = "mine"
        assert isinstance((await collect(client, item))[-1], Done)
        (refusal,) = await collect(client, request())
        assert isinstance(refusal, Failed) and refusal.error.code == "model_not_found"
        await client.close()

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="served_model_name"):
        HostConfig(models=("a", "b"), served_model_name=("x",))
    with pytest.raises(ValueError, match="different ids"):
        HostConfig(models=("a", "b"), served_model_name=("x", "x"))


@KINDS
def test_drain_lets_running_finish_and_refuses_new(kind: str) -> None:
    async def scenario() -> None:
        async with client_of(kind) as client:
            await client.load(str(tiny.llama()))
            task = asyncio.create_task(collect(client, request(max_tokens=100)))
            await asyncio.sleep(0.02)
            draining = asyncio.create_task(client.drain(30.0))
            await asyncio.sleep(0)
            (refusal,) = await collect(client, request())
            assert isinstance(refusal, Failed) and refusal.error.code == "draining"
            await draining
            assert isinstance((await task)[-1], Done)

    asyncio.run(scenario())


@KINDS
def test_drain_aborts_what_is_late(kind: str) -> None:
    async def scenario() -> None:
        async with client_of(kind) as client:
            await client.load(str(tiny.llama()))
            task = asyncio.create_task(collect(client, request(max_tokens=503)))
            await asyncio.sleep(0.02)
            await client.drain(0.0)
            last = (await task)[-1]
            assert isinstance(last, Aborted) and last.reason == "shutdown"

    asyncio.run(scenario())


def test_killed_host_fails_its_requests_and_serves_again() -> None:
    expected = tiny.one(tiny.engine(), tiny.request(tiny.prompt(9)))

    async def scenario() -> None:
        async with client_of("process") as client:
            assert isinstance(client, ProcessClient)
            await client.load(str(tiny.llama()))
            streams = [client.submit(request(9 + i, max_tokens=450)) for i in range(16)]
            for stream in streams:
                await anext(stream)
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for stream in streams:
                last = [event async for event in stream][-1]
                assert isinstance(last, Failed) and last.error.code == "engine_dead"
            assert client.num_requests == 0
            events = await collect(client, request())  # waits for the new child
            assert tiny.tokens(events) == expected
            assert client.num_restarts == 1 and client.pid != pid
            assert (await client.health())["models"] == {str(tiny.llama()): "loaded"}

    asyncio.run(scenario())


def test_child_ends_with_its_parents_socket() -> None:
    async def scenario() -> int:
        async with client_of("process") as client:
            assert isinstance(client, ProcessClient)
            assert client.pid is not None
            return client.pid

    pid = asyncio.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_damaged_weights_are_a_load_error(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny.llama() / name).read_bytes())
    data = (tiny.llama() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])

    async def scenario() -> None:
        async with client_of("inline") as client:
            with pytest.raises(ModelLoadError):
                await client.load(str(tmp_path))
            assert len(tiny.tokens(await collect(client, request()))) == 16

    asyncio.run(scenario())


def test_input_waits_for_its_request() -> None:
    """While the host is being restarted nothing of an input is lost, and none overtakes its request."""

    class Slow(HostClient):
        def __init__(self) -> None:
            super().__init__()
            self.reachable = asyncio.Event()
            self.posted: list[str] = []

        async def _reach(self) -> None:
            await self.reachable.wait()

        def _post(self, message: object) -> None:
            self.posted.append(type(message).__name__)

        def _is_alive(self) -> bool:
            return True

    async def main() -> None:
        client = Slow()
        events = client.submit(Request(request_id="r", model="m", prompt=[1], open=True))
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        appending = asyncio.ensure_future(client.append("r", [2], last=True))
        await asyncio.sleep(0.01)
        assert not client.posted and not appending.done()
        client.reachable.set()
        await appending
        assert client.posted == ["Submit", "Append"]
        client._receive([Done(request_id="r", finish_reason="stop")])
        assert isinstance(await first, Done)
        # One that ends before it is sent lets go of its input.
        client.reachable.clear()
        late = asyncio.ensure_future(anext(client.submit(Request(request_id="s", model="m", prompt=[1], open=True))))
        await asyncio.sleep(0)
        appending = asyncio.ensure_future(client.append("s", [2]))
        await asyncio.sleep(0.01)
        client._receive([Aborted(request_id="s", reason="client")])
        await appending
        client.reachable.set()
        assert isinstance(await late, Aborted) and "Submit" not in client.posted[2:]

    asyncio.run(main())


def test_input_waits_for_room_in_the_socket() -> None:
    async def main() -> None:
        client = await ProcessClient.start(HostConfig(models=()))
        try:
            assert client._process is not None
            os.kill(client._process.pid, signal.SIGSTOP)  # it reads nothing
            sending = asyncio.ensure_future(_pour(client))
            done, _ = await asyncio.wait({sending}, timeout=0.5)
            assert not done
            assert client._transport is not None
            assert client._transport.get_write_buffer_size() < 4 << 20  # type: ignore[attr-defined]
            os.kill(client._process.pid, signal.SIGCONT)
            await asyncio.wait_for(sending, 30)
        finally:
            await client.close()

    asyncio.run(main())


async def _pour(client: ProcessClient) -> None:
    for _ in range(64):
        await client.append("nobody", [], pcm=bytes(1 << 20))
