"""From a picture model's name to a running engine: read, which batch pays, everything run once, the card told. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..kernels.sage_attention import Backend
from ..models import loader
from .cache_calibration import read_coefficients
from .config import HostConfig
from .diffusion_engine import DiffusionEngine, Mask
from .errors import ModelLoadError
from .painter import BeginSolver, Painter, Rows
from .picture_request import MAX_PICTURES, PictureRules
from .schedules import Schedule, Spacing
from .solvers import begin_solver
from .step_cache import CacheConfig
from .types import ImageRequest, ModelInfo

_CPU_STEP_S = 0.25  # the longest step of a batch: between steps others have their turn and joiners join
_CUDA_STEP_S = 0.5
_NEARLY = 0.9
_MEASURE_S = 0.1


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


def load_image(
    name: str,
    config: HostConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> DiffusionEngine:
    """A warm engine for pictures. Raises ModelNotFound or ModelLoadError."""
    from .load import pick_device, pick_dtype

    pictures = config.pictures
    report("resolve")
    path = loader.resolve(name).path
    device = pick_device(config.engine.device, 0)
    others = (pictures.image_encode_device, pictures.image_decode_device)
    encode, decode = (pick_device(other, 0) if other else device for other in others)
    report("weights")
    model = picture_model(
        path,
        dtype=pick_dtype(config.engine, device),
        devices=(encode, device, decode),
        attention=pictures.image_attention,
        weights=pictures.image_weights,
        compile=pictures.image_compile,
    )
    return start_engine(
        name,
        path,
        model,
        cache=cache_config(config, path),
        max_step_rows=pictures.image_step_rows,
        protected_steps=pictures.image_protected_steps,
        report=report,
        clock=clock,
    )


def cache_config(config: HostConfig, path: Path) -> CacheConfig | None:
    """The step cache that was asked for, None for none. TeaCache's coefficients are the config's, or else what the model's
    folder has from cache_calibration.py. Raises ModelLoadError for a file there that cannot be used."""
    pictures = config.pictures
    if not pictures.image_cache:
        return None
    coefficients = pictures.image_cache_coefficients
    if pictures.image_cache == "teacache" and not coefficients:
        coefficients = read_coefficients(path)
    return CacheConfig(policy=pictures.image_cache, threshold=pictures.image_cache_threshold, coefficients=coefficients)


def picture_model(
    path: Path,
    *,
    dtype: torch.dtype,
    devices: tuple[torch.device, torch.device, torch.device],
    attention: Backend = "auto",
    weights: Literal["auto", "fp8"] = "auto",
    compile: bool = False,
) -> PictureModel:
    """A folder as the engine wants it. Raises ModelLoadError."""
    from ..models.diffusion_folder import load_picture

    loaded = load_picture(path, dtype=dtype, devices=devices, attention=attention, weights=weights)
    card = loaded.card
    # Stable Diffusion 3's pipeline leaves the levels to its scheduler, the others give them.
    spacing: Spacing = "train" if loaded.family == "sd3" else "steps"
    schedule = Schedule.from_config(card["scheduler"], sigmas=tuple(card["sigmas"]), spacing=spacing)
    if card["solver"] not in schedule.solvers:
        raise ModelLoadError(f"solver: expected one of {', '.join(schedule.solvers)}, got {card['solver'][:40]!r}")
    rules = PictureRules(
        sizes=tuple((width, height) for width, height in card["sizes"]),
        num_steps=card["steps"],
        guidance=card["guidance"],
        guidance_scale=card["guidance_scale"],
        solver=card["solver"],
        solvers=tuple(schedule.solvers),
        sigmas=tuple(card["sigmas"]),
    )
    if compile:
        if not hasattr(loaded.painter.denoiser, "compile"):
            raise ModelLoadError(f"image_compile: family {loaded.family} is not compiled")
        loaded.painter.denoiser.compile()
    return PictureModel(
        family=loaded.family,
        painter=loaded.painter,
        rules=rules,
        begin_solver=begin_solver(schedule),
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
    )


def best_rows(seconds: Callable[[int], float], *, most: int, limit_s: float) -> int:
    """Rows of the largest batch that does not lose: of 1, 2, 4 ... whose step stays below `limit_s`, the most that make nearly as
    many rows per second as any. Whoever comes later joins the next step then, which costs nobody throughput. Others' work
    beside ours makes measurements too long, never too short, so one of them ends nothing."""
    rates: dict[int, float] = {}
    rows = 1
    while rows <= most:
        now = seconds(rows)
        if rates and now > limit_s:
            break
        rates[rows] = rows / now
        rows *= 2
    best = max(rates.values())
    return max(rows for rows, rate in rates.items() if rate >= _NEARLY * best)


@torch.inference_mode()
def start_engine(
    name: str,
    path: Path,
    model: PictureModel,
    *,
    cache: CacheConfig | None = None,
    max_rows: int = 64,
    max_step_rows: int = 0,
    protected_steps: int = 0,
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
        times: list[float] = []
        while len(times) < 3 or len(times) < 10 and sum(times) < _MEASURE_S:  # the first one warms up
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
        protected_steps=protected_steps,
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
        "max_guidance": rules.max_guidance,
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
