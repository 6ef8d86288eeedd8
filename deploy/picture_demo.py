"""The picture part of `motet demo`: a prompt becomes a file through the server, by each packaged model; then eight at once.

Knows no engine: it is just a client of /v1/images/generations, and of /metrics for what each stage took.
"""

from __future__ import annotations

import base64
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import ModelNotFound, Unavailable
from ..models import registry
from .speech_demo import say

PROMPT = "a red apple on a blue background"
MODELS = ("motet-emoji", "motet-emoji-turbo")
NUM_AT_ONCE = 8
SEED = 1
STAGES = ("encode", "denoise", "decode")


@dataclass(frozen=True, kw_only=True)
class Made:
    """What one model did. Seconds; `stages` are those of the one picture."""

    path: Path
    size: str
    num_steps: int
    total_s: float
    stages: tuple[float, ...]
    per_s: float  # pictures a second, `NUM_AT_ONCE` requests at once


def installed() -> list[str]:
    """Those of the packaged models whose weights are here; says on stderr which are not."""
    found = []
    for model in MODELS:
        try:
            registry.resolve(model)
        except ModelNotFound as error:
            print(f"a part of this demo is left out: {error}", file=sys.stderr)
        else:
            found.append(model)
    return found


def run(url: str, models: Sequence[str], client: Any, *, folder: Path = Path()) -> None:
    """A picture of each model, the first as motet-demo.png, and the figures."""
    columns: list[Made] = []
    client.models.list()  # the connection is there before the clock runs
    for number, model in enumerate(models, start=1):
        path = folder / ("motet-demo.png" if number == 1 else f"motet-demo-{number}.png")
        say(f"\n-- {model} paints into {path}: {PROMPT}")
        columns.append(paint(url, model, client, path))
    say("\n" + table(models, columns))


def paint(url: str, model: str, client: Any, path: Path) -> Made:
    """A picture by itself, written to `path`; then `NUM_AT_ONCE` requests together."""
    before, steps_before = _stage_seconds(url, model), _metric(url, model, "motet_diffusion_steps_total")
    started = time.perf_counter()
    answer = client.images.generate(model=model, prompt=PROMPT, extra_body={"seed": SEED})
    total_s = time.perf_counter() - started
    after = _stage_seconds(url, model)
    num_steps = round(_metric(url, model, "motet_diffusion_steps_total") - steps_before)
    if not answer.data or not answer.data[0].b64_json:
        raise Unavailable("the server sent no picture")
    data = base64.b64decode(answer.data[0].b64_json)
    path.write_bytes(data)
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(
            pool.map(
                lambda seed: client.images.generate(model=model, prompt=PROMPT, extra_body={"seed": seed}),
                range(SEED, SEED + NUM_AT_ONCE),
            )
        )
    return Made(
        path=path,
        size=_size(data),
        num_steps=num_steps,
        total_s=total_s,
        stages=tuple(new - old for new, old in zip(after, before, strict=True)),
        per_s=NUM_AT_ONCE / (time.perf_counter() - started),
    )


def table(models: Sequence[str], columns: Sequence[Made]) -> str:
    """The figures, as the client measured them; of the stages, as the server says."""
    rows = {
        "size": [made.size for made in columns],
        "steps": [str(made.num_steps) for made in columns],
        "one picture": [f"{made.total_s * 1e3:.0f} ms" for made in columns],
    }
    for at, stage in enumerate(STAGES):
        rows[f"  of it to {stage}"] = [f"{made.stages[at] * 1e3:.0f} ms" for made in columns]
    rows[f"{NUM_AT_ONCE} requests at once, pictures a second"] = [f"{made.per_s:.2f}" for made in columns]
    lines = [f"{'':<40}" + "".join(f"{model:>20}" for model in models)]
    lines += [f"{name:<40}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in rows.items()]
    return "\n".join(lines)


def _stage_seconds(url: str, model: str) -> list[float]:
    return [_metric(url, model, f"motet_diffusion_{stage}_seconds_total") for stage in STAGES]


def _metric(url: str, model: str, name: str) -> float:
    """A counter of a model on /metrics; 0 where it is not there yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    start = f'{name}{{model="{model}"}} '
    return next((float(line.removeprefix(start)) for line in lines if line.startswith(start)), 0.0)


def _size(data: bytes) -> str:
    """Width and height of a PNG file: two numbers of 4 bytes in its first part."""
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    return f"{width}x{height}"
