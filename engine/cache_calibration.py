"""Fit a model's step cache: how far its output moves when TeaCache's indicator moves, and what a threshold costs and saves.

    python -m motet.engine.cache_calibration MODEL [--prompts FILE] [--steps N] [--thresholds 0.05,0.1] [--write]

Runs some prompts to the end, every step computed, and fits the five coefficients of this model's polynomial. `--write` puts them
into `motet_cache.json` in the model's folder, where `load_image` finds them; without it they are printed only. For each threshold
it says which share of the steps' blocks is left out and how far the final latents are from those without a cache (relative L1).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .diffusion_engine import guided
from .errors import ModelLoadError
from .painter import BeginSolver, Painter, Rows
from .picture_request import PictureOrder, PictureRules, check_order
from .step_cache import MIN_STEPS, BlockModel, CacheConfig, Calibrator, RowCache, cached_forward, change, check_cache
from .types import ImageRequest

FILE = "motet_cache.json"
_MAX_JSON = 1 << 16
PROMPTS = (
    "a red apple on a blue background",
    "two small cats on the left",
    "a big rocket",
    "a purple house on the right on a white background",
    "one green tree on a yellow background",
    "a dog on the top on a black background",
    "a small orange car on a green background",
    "a fish",
)


class Subject(Protocol):
    """What is calibrated: a loaded model (diffusion_load.PictureModel)."""

    @property
    def painter(self) -> Painter: ...
    @property
    def rules(self) -> PictureRules: ...
    @property
    def begin_solver(self) -> BeginSolver: ...


def read_coefficients(folder: Path) -> tuple[float, ...]:
    """A model's own coefficients, highest power first; empty where nobody has calibrated it. Raises ModelLoadError."""
    path = folder / FILE
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelLoadError(f"{FILE}: larger than {_MAX_JSON} bytes")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{FILE}: cannot be read ({error.__class__.__name__})") from None
    numbers: Any = found.get("teacache") if isinstance(found, dict) else None
    fits = isinstance(numbers, list) and len(numbers) == 5
    if not fits or not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
        raise ModelLoadError(f"{FILE}: teacache: expected five numbers, highest power first")
    return tuple(float(one) for one in numbers)


def write_coefficients(folder: Path, coefficients: Sequence[float], **how: Any) -> Path:
    """Beside the model's card; `how` (plain values) says what they were fitted on."""
    path = folder / FILE
    path.write_text(json.dumps({"teacache": list(coefficients), **how}, indent=1) + "\n")
    return path


@torch.inference_mode()
def calibrate(
    subject: Subject, prompts: Sequence[str], *, num_steps: int = 0, seed: int = 0
) -> tuple[tuple[float, ...], list[tuple[float, float]]]:
    """The coefficients, and the pairs (change of the indicator, of the output) that they were fitted on.

    Raises ModelLoadError for a model that has no use for a step cache, ValueError for too few prompts or steps.
    """
    model = _blockwise(subject)
    seen = Calibrator()

    def observed(picture: int, rows: Rows) -> Tensor:
        trunk = model.begin(rows)
        signal, output = model.indicator(trunk), model.hidden(model.blocks(trunk, 0, None))
        for row in range(len(rows)):
            seen.observe((picture, row), signal[row], output[row])
        return model.finish(trunk, output)

    for picture, order in enumerate(_orders(subject, prompts, num_steps, seed)):
        _last_latents(subject, order, partial(observed, picture))
    return seen.fit(), seen.pairs


@torch.inference_mode()
def measure(
    subject: Subject, prompts: Sequence[str], configs: Sequence[CacheConfig], *, num_steps: int = 0, seed: int = 0
) -> list[tuple[float, float]]:
    """For each cache: the share of steps whose blocks are left out, and the mean relative L1 distance of the final latents from
    uncached ones."""
    model = _blockwise(subject)
    skipped, total, away = [0] * len(configs), 0, [0.0] * len(configs)
    orders = _orders(subject, prompts, num_steps, seed)
    for order in orders:
        exact = _last_latents(subject, order, subject.painter.forward)
        total += order.num_steps * len(_branches(order))
        for at, config in enumerate(configs):
            caches = [RowCache(config, order.num_steps) for _ in _branches(order)]
            cached = _last_latents(subject, order, partial(cached_forward, model, caches=caches))
            away[at] += change(cached, exact).item() / len(orders)
            skipped[at] += sum(not computed for cache in caches for computed in cache.decisions)
    return [(count / total, distance) for count, distance in zip(skipped, away)]


def _blockwise(subject: Subject) -> BlockModel:
    checked = CacheConfig(policy="first_block", threshold=1.0)
    check_cache(checked, few_step=subject.rules.few_step, has_blocks=hasattr(subject.painter, "begin"))
    return subject.painter  # type: ignore[return-value]


def _orders(subject: Subject, prompts: Sequence[str], num_steps: int, seed: int) -> list[PictureOrder]:
    if not prompts:
        raise ValueError("prompts: expected one or more")
    orders = [
        check_order(
            ImageRequest(request_id="", model="", prompt=prompt, num_steps=num_steps, seed=seed + at), subject.rules
        )
        for at, prompt in enumerate(prompts)
    ]
    if orders[0].num_steps < MIN_STEPS:
        raise ValueError(f"num_steps: a cache is used from {MIN_STEPS} on, got {orders[0].num_steps}")
    return orders


def _branches(order: PictureOrder) -> list[str]:
    return [order.prompt] if order.negative_prompt is None else [order.prompt, order.negative_prompt]


def _last_latents(subject: Subject, order: PictureOrder, forward: Callable[[Rows], Tensor]) -> Tensor:
    """One picture before it is decoded, made as the engine makes it."""
    painter = subject.painter
    conds = painter.encode(_branches(order))
    shape = painter.latent_shape(order.width, order.height)
    run = subject.begin_solver(order, shape)
    device = painter.devices[1]
    generator = torch.Generator().manual_seed(order.seeds[0])
    latents = run.start(torch.randn(shape, generator=generator).to(device), None)
    for step in range(order.num_steps):
        rows = Rows(
            latents=run.scale(latents, step).expand(len(conds), *shape),
            times=torch.full((len(conds),), run.time(step), device=device),
            guidance=torch.full((len(conds),), order.guidance_scale, device=device),
            conds=conds,
            width=order.width,
            height=order.height,
        )
        prediction = guided(painter, forward(rows).float(), order.guidance_scale)
        noise = torch.randn(shape, generator=generator).to(device) if run.takes_noise(step) else None
        latents, _ = run.advance(latents, prediction, step, noise)
    return latents


def main() -> None:
    from ..models import loader
    from .config import EngineConfig, HostConfig
    from .diffusion_load import picture_model
    from .load import pick_device, pick_dtype

    parser = argparse.ArgumentParser(description="Fit a picture model's step cache.")
    parser.add_argument("model", help="a name, a hub id or a folder")
    parser.add_argument("--prompts", type=Path, help="a text file, one per line (default: eight plain ones)")
    parser.add_argument("--steps", type=int, default=0, help="(default: the model's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--thresholds", default="0.05,0.1,0.2,0.3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the coefficients into the folder, as {FILE}")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    path = loader.resolve(options.model).path
    device = pick_device(options.device, 0)
    dtype = pick_dtype(HostConfig(engine=EngineConfig(device=options.device)).engine, device)
    subject = picture_model(path, dtype=dtype, devices=(device, device, device))
    prompts = PROMPTS if options.prompts is None else tuple(filter(None, options.prompts.read_text().splitlines()))
    coefficients, pairs = calibrate(subject, prompts, num_steps=options.steps, seed=options.seed)
    print("coefficients", json.dumps(coefficients))
    thresholds = [float(word) for word in options.thresholds.split(",") if word]
    caches = [CacheConfig(policy="teacache", threshold=one, coefficients=coefficients) for one in thresholds]
    # Other noise than what was fitted on.
    found = measure(subject, prompts, caches, num_steps=options.steps, seed=options.seed + 1000)
    for threshold, (share, away) in zip(thresholds, found):
        print(f"threshold {threshold:g}: {share:.0%} of the steps left out, latents {away:.3f} away")
    if options.write:
        how = {"prompts": len(prompts), "pairs": len(pairs), "steps": options.steps or subject.rules.num_steps}
        print("written to", write_coefficients(path, coefficients, **how))


if __name__ == "__main__":
    main()
