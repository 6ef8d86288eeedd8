"""From a picture model's parts to a running engine: which batch pays, everything run once, the card told. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .diffusion_engine import DiffusionEngine, Mask
from .painter import BeginSolver, Painter, Rows
from .picture_request import MAX_PICTURES, PictureRules
from .step_cache import CacheConfig
from .types import ImageRequest, ModelInfo

_CPU_STEP_S = 0.25  # the longest step of a batch: between steps others have their turn and joiners join
_CUDA_STEP_S = 0.5
_GAIN = 1.05  # twice the rows must give so many times the rows per second


@dataclass(frozen=True, kw_only=True)
class PictureModel:
    """What a family's loader gives (models/diffusion.py): the stages, the card, the solvers."""

    family: str
    painter: Painter
    rules: PictureRules
    begin_solver: BeginSolver
    dtype: str
    weight_bytes: int
    mask: Mask | None = None


def best_rows(seconds: Callable[[int], float], *, most: int, limit_s: float) -> int:
    """Rows of the batch that pays: doubled while that makes more rows per second and a step stays below `limit_s`."""
    rows, last = 1, seconds(1)
    while rows * 2 <= most:
        now = seconds(rows * 2)
        if now > limit_s or 2 * last < _GAIN * now:
            break
        rows, last = rows * 2, now
    return rows


@torch.inference_mode()
def start_engine(
    name: str,
    path: Path,
    model: PictureModel,
    *,
    cache: CacheConfig | None = None,
    max_rows: int = 64,
    max_step_rows: int = 0,
    report: Callable[[str], None] = lambda phase: None,
    clock: Callable[[], float] = time.monotonic,
) -> DiffusionEngine:
    """A warm engine. `max_step_rows` 0: measured, in rows of the default size. Raises ModelLoadError for a cache that cannot
    work, and whatever the model raises at its first picture."""
    report("warm-up")
    painter, rules = model.painter, model.rules
    width, height = rules.sizes[0]
    (cond,) = painter.encode(["a warm-up"])
    latents = torch.zeros(painter.latent_shape(width, height), device=painter.devices[1])
    painter.decode(latents[None])

    def rows_of(count: int) -> Rows:
        ones = torch.ones(count, device=latents.device)
        conds = [cond] * count
        return Rows(
            latents=latents.expand(count, *latents.shape).contiguous(),
            times=ones,
            guidance=ones * rules.guidance_scale,
            conds=conds,
            width=width,
            height=height,
        )

    def seconds(count: int) -> float:
        rows = rows_of(count)
        times = []
        for _ in range(3):  # the first one warms up
            began = clock()
            painter.forward(rows).sum().item()
            times.append(clock() - began)
        return min(times[1:])

    if max_step_rows:
        painter.forward(rows_of(1))
        step_rows = min(max_step_rows, max_rows)
    else:
        limit_s = _CPU_STEP_S if latents.device.type == "cpu" else _CUDA_STEP_S
        step_rows = best_rows(seconds, most=max_rows, limit_s=limit_s)
    num_tokens = painter.num_tokens(cond)
    # A guided picture has two rows: below that its step would be a batch of its own and others would never join.
    cost = max(step_rows, 2) * painter.cost(width, height, num_tokens)
    engine = DiffusionEngine(
        info=ModelInfo(
            model=name,
            kind="image",
            source=str(path),
            max_model_len=0,
            vocab_size=0,
            hidden_size=0,
            dtype=model.dtype,
            extra=card(model, step_rows) | {"weight_bytes": model.weight_bytes},
        ),
        painter=painter,
        rules=rules,
        begin_solver=model.begin_solver,
        max_step_cost=cost,
        max_rows=max_rows,
        cache=cache,
        mask=model.mask,
        clock=clock,
    )
    _run_once(engine)
    report("ready")
    return engine


def card(model: PictureModel, step_rows: int) -> dict[str, Any]:
    """What frontends need to know, in plain values."""
    rules = model.rules
    return {
        "family": model.family,
        "sizes": [list(size) for size in rules.sizes],
        "num_steps": len(rules.sigmas) or rules.num_steps,
        "max_steps": len(rules.sigmas) or rules.max_steps,
        "few_step": rules.few_step,
        "guidance": rules.guidance,
        "guidance_scale": rules.guidance_scale,
        "solver": rules.solver,
        "solvers": list(rules.solvers),
        "max_prompt_chars": rules.max_prompt_chars,
        "takes_image": rules.takes_image,
        "max_pictures": MAX_PICTURES,
        "step_rows": step_rows,
        "devices": [str(device) for device in model.painter.devices],
    }


def _run_once(engine: DiffusionEngine) -> None:
    """One picture of two steps through all stages, so that nobody's first one pays for lazy initialization."""
    num_steps = 0 if engine.rules.few_step else min(2, engine.rules.max_steps)
    counters = engine.counters
    engine.submit(ImageRequest(request_id="warm-up", model=engine.info.model, prompt="a warm-up", num_steps=num_steps))
    failure: BaseException | None = None
    while engine.num_requests():
        if engine.has_work():
            engine.step()
            failure = engine.last_error
        else:
            time.sleep(0.001)
    if failure is not None:
        engine.close()
        raise failure
    engine.counters = type(counters)()
