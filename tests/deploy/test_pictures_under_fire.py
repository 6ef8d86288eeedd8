"""The real server with a tiny model of pictures: its engine is killed while pictures are made, clients leave, nothing is left."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image

from motet.deploy.demo import free_port, wait_ready

from .. import tiny
from .test_under_fire import host_of

NUM_REQUESTS = 8
LONG = {"steps": 200}  # with n=10 some seconds of work


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port, model = free_port(), tiny.tiny_picture(tmp_path / "tiny-picture")
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", str(model), "--port", str(port), "--preload"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(child, f"http://127.0.0.1:{port}")
        yield child, f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


async def ask(client: openai.AsyncOpenAI, index: int, started: asyncio.Semaphore) -> str:
    """One request, every second one streamed; releases `started` when that has begun. Gives the error's code."""
    try:
        if index % 2:
            await client.images.generate(prompt="a red cat", n=10, extra_body=LONG)
        else:
            stream = await client.images.generate(
                prompt="a red cat", n=10, stream=True, partial_images=3, extra_body=LONG
            )
            async for event in stream:
                if event.type == "image_generation.partial_image":
                    started.release()
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.code}"
    except openai.APIError as error:
        return f"event {error.code}"
    return "done"


def test_killing_the_engine_is_told_to_everybody_and_it_paints_again(
    server: tuple[subprocess.Popen[bytes], str],
) -> None:
    child, url = server

    async def scenario() -> None:
        first_host = host_of(child)
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as probe,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            before = await client.images.generate(prompt="a big cat", extra_body={"seed": 3})
            started = asyncio.Semaphore(0)
            asked = [asyncio.create_task(ask(client, index, started)) for index in range(NUM_REQUESTS)]
            await started.acquire()
            os.kill(first_host, signal.SIGKILL)
            ends = await asyncio.gather(*asked)
            assert ends[1::2] == ["503 engine_dead"] * (NUM_REQUESTS // 2)
            assert set(ends[::2]) <= {"event engine_dead", "503 engine_dead"}
            assert (await probe.get("/livez")).status_code == 200
            # The new host loads the model again; the same seed is the same picture there.
            after = await client.images.generate(prompt="a big cat", extra_body={"seed": 3}, timeout=60)
            assert before.data is not None and after.data is not None
            assert after.data[0].b64_json == before.data[0].b64_json
            assert Image.open(io.BytesIO(base64.b64decode(after.data[0].b64_json or ""))).size == (64, 64)
            assert host_of(child) != first_host
            # Clients that leave leave nothing behind.
            leaving = [asyncio.create_task(ask(client, index, started)) for index in range(NUM_REQUESTS)]
            await started.acquire()
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            for _ in range(200):
                metrics = (await probe.get("/metrics")).text
                if "motet_diffusion_running_rows" in metrics and all(
                    f'{name}{{model="tiny-picture"}} 0.0' in metrics
                    for name in ("motet_diffusion_running_rows", "motet_requests_running", "motet_requests_waiting")
                ):
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError(metrics)
            assert "motet_engine_restarts 1.0" in metrics

    asyncio.run(scenario())
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 0
