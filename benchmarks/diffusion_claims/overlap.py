"""overlap: at steady load the three stages work beside each other; drawn as they did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.diffusion_claims.in_process import host_config
from motet.benchmarks.diffusion_claims.setting import CLAIMS, Setting
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_painter import painted
from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import load_image
from motet.engine.types import ImageRequest

STAGES = ("encode", "denoise", "decode")
_COLOURS = {"encode": "#1e88e5", "denoise": "#43a047", "decode": "#fb8c00"}
_DRAWN_S = 1.0  # of the timeline


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job of a stage, or a step of the denoiser; seconds of one clock."""

    stage: str
    began: float
    ended: float


def overlap(setting: Setting, timeline: Path | None) -> Row:
    """Wall time over the busiest stage's own, while there is always more to do."""
    works: list[Work] = []
    made: list[DiffusionEngine] = []

    def build(name: str, config: HostConfig, report: Callable[[str], None]) -> DiffusionEngine:
        engine = load_image(name, config, report)
        made.append(engine)
        return engine

    asyncio.run(_paint(setting, build, lambda: made[0].watch(lambda *work: works.append(_work(*work)))))
    inner = steady(works)
    busy = {stage: sum(one.ended - one.began for one in inner if one.stage == stage) for stage in STAGES}
    wall = max(one.ended for one in inner) - min(one.began for one in inner)
    most = max(busy, key=lambda stage: busy[stage])
    shares = ", ".join(f"{stage} {busy[stage] / wall:.0%}" for stage in STAGES)
    say(f"  steady load: {wall:.2f} s, of which {shares}")
    if timeline:
        timeline.write_text(draw(inner))
        say(f"  the timeline is in {timeline}")
    sizes = setting.sizes
    return claims.measured(
        CLAIMS["overlap"], wall, busy[most], ours_name=f"motet {made[0].info.dtype}, wall time",
        peer_name=f"what the {most} stage worked", runs=sum(one.stage == "decode" for one in inner),
        why=f"{sizes.num_inside} pictures under way at any time, {sizes.steps} steps, {setting.threads} threads; busy: "
        f"{shares}; one stage after another it would be {sum(busy.values()) / busy[most]:.2f}; runs are pictures",
    )  # fmt: skip


def _work(stage: str, began: float, ended: float) -> Work:
    return Work(stage=stage, began=began, ended=ended)


def steady(works: Sequence[Work]) -> list[Work]:
    """What began after the first fifth of the pictures was decoded, and ended before the last fifth was."""
    ends = sorted(one.ended for one in works if one.stage == "decode")
    first, last = ends[len(ends) // 5], ends[-max(1, len(ends) // 5)]
    return [one for one in works if one.began >= first and one.ended <= last]


async def _paint(
    setting: Setting,
    build: Callable[[str, HostConfig, Callable[[str], None]], DiffusionEngine],
    loaded: Callable[[], None],
) -> None:
    sizes = setting.sizes
    client = InlineClient(host_config(setting), build=build)
    try:
        await client.load(setting.model)
        loaded()
        prompts = list(enumerate(setting.fresh(sizes.num_steady)))

        async def keep_busy(steps: int) -> None:
            while prompts:
                number, prompt = prompts.pop()
                request = ImageRequest(
                    request_id=str(number), model=setting.model, prompt=prompt, seed=number, num_steps=steps
                )
                await painted(client, request)
                steps = sizes.steps

        async with asyncio.TaskGroup() as group:
            for number in range(
                sizes.num_inside
            ):  # first pictures of fewer steps, so that they do not all end together
                group.create_task(keep_busy(max(1, sizes.steps * (number + 1) // sizes.num_inside)))
    finally:
        await client.close()


def draw(works: Sequence[Work]) -> str:
    """SVG of the first second: a lane for each stage, a block for each job or step."""
    began = min(one.began for one in works)
    seconds = min(_DRAWN_S, max(one.ended for one in works) - began)
    left, width, lane, top = 90, 1000, 44, 14
    height = top + lane * len(STAGES) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{left + width + 40}" height="{height}" fill="#ffffff"/>',
    ]
    for at, stage in enumerate(STAGES):
        y = top + at * lane
        parts.append(f'<text x="8" y="{y + 22}">{stage}</text>')
        parts.append(f'<rect x="{left}" y="{y + 4}" width="{width}" height="{lane - 14}" fill="#eeeeee"/>')
        for one in works:
            start, end = (min(max(when - began, 0.0), seconds) * width / seconds for when in (one.began, one.ended))
            if one.stage == stage and end > start:
                parts.append(
                    f'<rect x="{left + start:.2f}" y="{y + 4}" width="{max(end - start - 1, 0.5):.2f}" height="{lane - 14}" '
                    f'fill="{_COLOURS[stage]}"/>'
                )
    floor = top + lane * len(STAGES)
    for tick in range(11):
        x = left + tick * width / 10
        parts.append(f'<path d="M{x:.1f} {floor} v6" stroke="#111111"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 20}" text-anchor="middle">{tick * seconds * 100:.0f} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
