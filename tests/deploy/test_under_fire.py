"""The real server with real weights: its engine is killed under load, it is told to stop under load, its model is broken."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from motet.deploy.demo import free_port, wait_ready
from motet.models import registry

MODEL = "smollm2-135m-instruct"
NUM_STREAMS = 16


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", MODEL, "--port", str(port), "--preload"]
    command += ["--shutdown-timeout-s", "240"]  # without a compiler, on a busy machine, half a minute is too little
    command += ["--max-model-len", "512", "--num-blocks", "640"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(child, f"http://127.0.0.1:{port}")
        yield child, f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def host_of(child: subprocess.Popen[bytes]) -> int:
    """Process id of the server's engine host."""
    return int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])


async def ask(client: openai.AsyncOpenAI, index: int, started: asyncio.Semaphore, max_tokens: int) -> str:
    """One streamed answer; releases `started` at its first token. Gives the finish reason, or the error's code."""
    reason = "none"
    try:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Count to {index + 100}."}], stream=True,
            max_tokens=max_tokens, extra_body={"ignore_eos": True},
        )  # fmt: skip
        seen = False
        async for chunk in stream:
            if not seen and chunk.choices and chunk.choices[0].delta.content:
                seen = True
                started.release()
            if chunk.choices and chunk.choices[0].finish_reason:
                reason = chunk.choices[0].finish_reason
    except openai.APIError as error:
        return f"error {error.code}"
    return reason


def test_killing_the_engine_ends_its_streams_cleanly_and_it_serves_again(
    server: tuple[subprocess.Popen[bytes], str],
) -> None:
    child, url = server

    async def scenario() -> None:
        first_host = host_of(child)
        lives: list[int] = []

        async def watch() -> None:
            async with httpx.AsyncClient(base_url=url) as probe:
                while True:
                    lives.append((await probe.get("/livez", timeout=30)).status_code)
                    await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            started = asyncio.Semaphore(0)
            streams = [asyncio.create_task(ask(client, i, started, 400)) for i in range(NUM_STREAMS)]
            for _ in range(NUM_STREAMS):
                await started.acquire()
            os.kill(first_host, signal.SIGKILL)
            assert await asyncio.gather(*streams) == ["error engine_dead"] * NUM_STREAMS
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello!"}], max_tokens=5, timeout=60,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert answer.usage is not None and answer.usage.completion_tokens == 5
        watching.cancel()
        assert len(lives) > 3 and set(lives) == {200}
        assert host_of(child) != first_host
        async with httpx.AsyncClient(base_url=url) as probe:
            metrics = (await probe.get("/metrics")).text
        assert "motet_engine_restarts 1.0" in metrics

    asyncio.run(scenario())


def test_sigterm_under_load_lets_accepted_requests_finish(server: tuple[subprocess.Popen[bytes], str]) -> None:
    child, url = server

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            started = asyncio.Semaphore(0)
            streams = [asyncio.create_task(ask(client, i, started, 60)) for i in range(NUM_STREAMS)]
            for _ in range(NUM_STREAMS):
                await started.acquire()
            child.send_signal(signal.SIGTERM)
            assert await asyncio.gather(*streams) == ["length"] * NUM_STREAMS

    asyncio.run(scenario())
    assert child.wait(timeout=60) == 0


def test_a_damaged_model_file_is_one_line_and_status_1(tmp_path: Path) -> None:
    whole = registry.resolve(MODEL).path
    broken = tmp_path / "broken.gguf"
    with whole.open("rb") as file:
        broken.write_bytes(file.read(3_000_000))
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", str(broken), "--port", str(free_port()), "--preload"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert ended.returncode == 1
    assert "broken.gguf" in ended.stderr and "Traceback" not in ended.stderr
    assert str(tmp_path) not in ended.stderr.replace(str(broken), "")
