"""smooth_beside_images: voices that keep up while pictures are painted all the time, in one host on one device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_engine import EngineError
from motet.benchmarks.motet_server import Server
from motet.benchmarks.speech_claims.listener import Heard, listen
from motet.benchmarks.speech_claims.setting import CLAIMS, Setting

_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the server has counted so far, and when."""

    when: float
    rows: float  # denoised: two of each picture at each step, where it is guided
    steps: float  # of a batch of rows
    speech_s: float  # for so long the voice had the device


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Voices from their texts until the last listener has heard all."""

    heard: list[Heard]
    seconds: float
    rows_per_s: float
    rows_per_step: float
    speech_share: float  # of the time, that the voice had the device

    @property
    def num_late(self) -> int:
        return sum(one.lateness_s() > 0 for one in self.heard)


def beside_images(setting: Setting) -> Row:
    """The server with both models: pictures alone, voices alone, both."""
    say(f"starting the server with {setting.model} and {setting.pictures}")
    with Server(setting, beside=[setting.pictures]) as server:
        server.wait()
        return asyncio.run(_measure(setting, server.port))


async def _measure(setting: Setting, port: int) -> Row:
    sizes = setting.sizes
    voice, painter = await asyncio.to_thread(_models, port)
    warm_rows = await _rows_of_one(setting, port, voice, painter)
    await asyncio.gather(*(listen(port, setting.passage(number), seed=number) for number in range(2)))
    async with _painting(setting, port, painter):
        await asyncio.sleep(sizes.alone_s / 8)
        before = await _counters(port, voice, painter)
        await asyncio.sleep(sizes.alone_s)
        after = await _counters(port, voice, painter)
    alone = (after.rows - before.rows) / (after.when - before.when) / warm_rows
    say(f"  pictures alone: {alone:.2f} a second")
    speech = await _speak(setting, port, voice, painter)
    say(f"  {sizes.num_beside} voices alone: {speech.speech_share:.0%} of the time, {speech.num_late} fell behind")
    async with _painting(setting, port, painter):
        await asyncio.sleep(sizes.alone_s / 8)
        both = await _speak(setting, port, voice, painter)
    ours, left = both.rows_per_s / warm_rows, alone * (1 - speech.speech_share)
    late_s = max(one.lateness_s() for one in both.heard)
    first = max(one.first_s for one in both.heard)
    say(
        f"  both: {ours:.2f} pictures a second of {left:.2f}, {both.num_late} voices fell behind (worst "
        f"{late_s * 1e3:.0f} ms), voices {both.speech_share:.0%} of the time, {both.rows_per_step:.1f} rows a step (alone "
        f"{(after.rows - before.rows) / max(1.0, after.steps - before.steps):.1f})"
    )
    row = claims.measured(
        CLAIMS["smooth_beside_images"], ours, left, runs=1,
        ours_name=f"{setting.pictures} beside {sizes.num_beside} voices of {setting.model}",
        peer_name="pictures alone, for the time that the voices alone leave",
        why=f"one host, {setting.threads} threads; {both.num_late} of {len(both.heard)} listeners waited (worst "
        f"{late_s * 1e3:.0f} ms; {speech.num_late} without pictures), first sound after at most {first * 1e3:.0f} ms; "
        f"{both.seconds:.0f} s of listening; alone {alone:.2f} pictures a second, voices {speech.speech_share:.0%} of the time "
        f"(beside pictures {both.speech_share:.0%})",
    )  # fmt: skip
    if both.num_late:
        row = dataclasses.replace(row, holds=False, why=f"a voice fell behind; {row.why}")
    return row


async def _speak(setting: Setting, port: int, voice: str, painter: str) -> Passage:
    """Texts at once to listeners who play them at the speed of speech; over when the last one has heard all."""
    before = await _counters(port, voice, painter)
    heard = await asyncio.gather(
        *(listen(port, setting.passage(number), seed=number) for number in range(setting.sizes.num_beside))
    )
    plays_s = max(one.first_s + one.audio_s + one.lateness_s() for one in heard)
    plays_s = min(plays_s, setting.sizes.most_heard_s)
    await asyncio.sleep(max(0.0, before.when + plays_s - time.perf_counter()))
    after = await _counters(port, voice, painter)
    seconds = after.when - before.when
    return Passage(
        heard=list(heard),
        seconds=seconds,
        rows_per_s=(after.rows - before.rows) / seconds,
        rows_per_step=(after.rows - before.rows) / max(1.0, after.steps - before.steps),
        speech_share=(after.speech_s - before.speech_s) / seconds,
    )


@contextlib.asynccontextmanager
async def _painting(setting: Setting, port: int, painter: str) -> AsyncIterator[None]:
    """Pictures are painted all the time. Raises EngineError when one fails meanwhile."""
    over = asyncio.Event()

    async def paint() -> None:
        while not over.is_set():
            await asyncio.to_thread(_paint, port, painter, setting.sizes.steps)

    tasks = [asyncio.create_task(paint()) for _ in range(setting.sizes.num_under_way)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def _rows_of_one(setting: Setting, port: int, voice: str, painter: str) -> float:
    """Rows that a picture takes in all its steps."""
    before = await _counters(port, voice, painter)
    await asyncio.to_thread(_paint, port, painter, setting.sizes.steps)
    after = await _counters(port, voice, painter)
    if not after.rows > before.rows:
        raise EngineError("the server counts no rows that are denoised")
    return after.rows - before.rows


def _paint(port: int, model: str, steps: int) -> None:
    _call(port, "/v1/images/generations", {"model": model, "prompt": "a big cat on a blue background", "steps": steps})


def _models(port: int) -> tuple[str, str]:
    """Ids of the voice and of the picture model, in the order in which they were named to the server."""
    found = [str(one["id"]) for one in json.loads(_call(port, "/v1/models"))["data"]]
    if len(found) != 2:
        raise EngineError(f"expected two models, got {found}")
    return found[0], found[1]


async def _counters(port: int, voice: str, painter: str) -> Counters:
    text = await asyncio.to_thread(_call, port, "/metrics")
    now = time.perf_counter()
    return Counters(
        when=now,
        rows=_value(text, "motet_diffusion_rows_total", {"model": painter}),
        steps=_value(text, "motet_diffusion_steps_total", {"model": painter}),
        speech_s=_value(text, "motet_device_seconds_total", {"model": voice}),
    )


def _value(metrics: str, name: str, labels: Mapping[str, str]) -> float:
    """One sample of Prometheus' text; 0 where there is none yet."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in metrics.splitlines():
        if line.startswith(f"{name}{{") and all(label in line for label in wanted):
            return float(line.rpartition(" ")[2])
    return 0.0


def _call(port: int, path: str, body: Mapping[str, object] | None = None) -> str:
    """GET, or POST of JSON. Raises EngineError for any answer but success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        raise EngineError(f"{path}: {error.code} {error.read()[:200].decode(errors='replace')}") from None
