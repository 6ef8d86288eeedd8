"""The picture route over the real engine with a scripted model: crowds, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import PictureModel, start_engine
from motet.streaming.config import ServedModel, ServerConfig
from motet.streaming.server import serve

from ..engine.scripted_adapter import RULES, StraightRun
from ..pipelines.scripted_pictures import PacedPainter

MODEL = "scripted"
PATH = "/v1/images/generations"


@dataclass
class Place:
    """A server in the test's own loop, and the engine behind it, which has a thread."""

    url: str
    engine: DiffusionEngine
    painter: PacedPainter
    http: httpx.AsyncClient

    async def ask(self, prompt: str = "a cat", **fields: Any) -> httpx.Response:
        return await self.http.post(PATH, json={"prompt": prompt, **fields})

    async def picture(self, prompt: str = "a cat", **fields: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        answer = await self.ask(prompt, **fields)
        assert answer.status_code == 200, answer.text
        data = base64.b64decode(answer.json()["data"][0]["b64_json"])
        return np.array(Image.open(io.BytesIO(data)))

    async def empty(self) -> None:
        """Nothing of any request is left in the engine, soon."""
        for _ in range(500):
            stats = self.engine.stats()
            if not stats["requests"]:
                break
            await asyncio.sleep(0.01)
        assert (stats["requests"], stats["diffusion_running_rows"]) == (0, 0)


@contextlib.asynccontextmanager
async def place(step_s: float = 0.0, **options: Any) -> AsyncIterator[Place]:
    painter, engines = PacedPainter(), []

    def build(name: str, config: HostConfig, report: Callable[[str], None]) -> DiffusionEngine:
        model = PictureModel(
            family="scripted", painter=painter, rules=RULES, begin_solver=StraightRun, dtype="float32", weight_bytes=1
        )
        engines.append(start_engine(name, Path("/nowhere"), model, max_step_rows=8, report=report))
        painter.batches.clear()
        painter.step_s = step_s
        return engines[-1]

    async def factory() -> InlineClient:
        client = InlineClient(HostConfig(), build=build)
        await client.load(MODEL)
        return client

    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    config = ServerConfig(port=0, models=(ServedModel(id=MODEL, kind="image"),), shutdown_timeout_s=5.0, **options)
    serving = asyncio.create_task(
        serve(config, factory, announce=lambda line: url.set_result(line.rsplit(" ", 1)[1]), signals=False, stop=stop)
    )
    try:
        async with httpx.AsyncClient(base_url=await url, timeout=60, limits=httpx.Limits(max_connections=200)) as http:
            yield Place(url.result(), engines[0], painter, http)
    finally:
        stop.set()
        assert await serving == 0


def run(work: Callable[[Place], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with place(**options) as here:
            await work(here)
            await here.empty()

    asyncio.run(whole())


def test_pictures_and_streams_are_the_same() -> None:
    async def work(here: Place) -> None:
        whole = await here.picture(seed=3, steps=9)
        client = openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.images.generate(
                prompt="a cat", stream=True, partial_images=2, extra_body={"seed": 3, "steps": 9}
            )
            events = [event async for event in stream]
        assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + [
            "image_generation.completed"
        ]
        pixels = [np.array(Image.open(io.BytesIO(base64.b64decode(event.b64_json)))) for event in events]
        assert np.array_equal(pixels[-1], whole) and not np.array_equal(pixels[0], pixels[-1])
        together = await asyncio.gather(*(here.picture(seed=seed, steps=9) for seed in (3, 4, 5)))
        assert np.array_equal(together[0], whole) and not np.array_equal(together[1], whole)

    run(work, step_s=0.005)


def test_a_crowd_of_a_hundred() -> None:
    """The engine keeps 64; the others are told when to come again, and the server is as well as before."""

    async def work(here: Place) -> None:
        here.painter.encode_gate = gate = threading.Event()  # nobody is finished before all have come
        tasks = [asyncio.create_task(here.ask("a cat", seed=at, stream=at % 2 == 0)) for at in range(100)]
        while sum(task.done() for task in tasks) < 36:
            await asyncio.sleep(0.01)
        gate.set()
        answers = await asyncio.gather(*tasks)
        codes = [answer.status_code for answer in answers]
        assert (codes.count(200), codes.count(429)) == (64, 36)
        for answer in answers:
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "server_overloaded" and int(answer.headers["retry-after"]) >= 1
            else:
                assert "b64_json" in answer.text and '"error"' not in answer.text
        assert (await here.ask()).status_code == 200
        assert (await here.http.get("/readyz")).status_code == 200

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_fails_fails_alone(stream: bool) -> None:
    async def work(here: Place) -> None:
        good = [asyncio.create_task(here.picture("a cat", seed=1, steps=30)) for _ in range(2)]
        refused, broken, raised, unseen = await asyncio.gather(
            *(here.ask(word, stream=stream, steps=3) for word in ("unencodable", "nan", "raise", "undecodable"))
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        for answer, code in ((broken, "not_finite"), (raised, "internal_error"), (unseen, "internal_error")):
            if answer.status_code == 200:  # it had begun
                assert stream and f'"code":"{code}"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, code)
        alone = await here.picture("a cat", seed=1, steps=30)
        assert all(np.array_equal(picture, alone) for picture in await asyncio.gather(*good))

    run(work, step_s=0.003)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_request_within_one_step(stream: bool) -> None:
    async def work(here: Place) -> None:
        stays = asyncio.create_task(here.picture("a dog", seed=1, steps=60))
        body = json.dumps({"prompt": "a cat", "steps": 200, "stream": stream, "n": 2}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(here.url.rsplit(":", 1)[1]))
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        while not any("a cat" in batch for batch in here.painter.batches):
            await asyncio.sleep(0.005)
        if stream:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        while here.engine.stats()["requests"] > 1:
            await asyncio.sleep(0.002)
        count = sum("a cat" in batch for batch in here.painter.batches)
        assert count < 40
        await stays
        assert sum("a cat" in batch for batch in here.painter.batches) <= count + 1

    run(work, step_s=0.01)


def test_a_crowd_that_leaves() -> None:
    async def work(here: Place) -> None:
        tasks = [asyncio.create_task(here.ask("a cat", steps=100, n=3, stream=at % 2 == 0)) for at in range(20)]
        while len(here.painter.batches) < 3:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await here.empty()
        assert (await here.ask()).status_code == 200

    run(work, step_s=0.01)


def test_beginning_from_a_picture() -> None:
    async def work(here: Place) -> None:
        file = io.BytesIO()
        Image.new("RGB", (160, 90), (200, 200, 200)).save(file, "JPEG")
        image = base64.b64encode(file.getvalue()).decode()
        await asyncio.gather(*(here.picture(image=image, strength=0.5, size="32x16", seed=at) for at in range(3)))
        (pixels, *_) = here.painter.begun_from
        assert pixels.shape == (16, 32, 3) and abs(pixels.float().mean().item() - 200) < 3

    run(work)
