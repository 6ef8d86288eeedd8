"""Solvers: from a model's prediction at one noise level to the picture at the next. One object per picture, nothing shared.

Every solver here is a weighted sum: of the latents, what the model says the finished picture is (x0), what it said a step ago,
fresh noise. The weights are a function of the levels alone, worked out in fp64; `mix` applies them, to one picture or to rows
with weights of their own. A row's numbers never meet another row's.

- euler: a straight line to the next level. Flow models.
- dpmpp_2m: DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095): a line through the last two x0, exact for the linear part.
- unipc: UniPC (Zhao et al. 2023, arXiv 2302.04867), order 2: as above, and each prediction corrects the step before.
- lcm: to x0 and back to the next level with fresh noise (Luo et al. 2023, arXiv 2310.04378). For models distilled so.
- euler_ancestral: a step below the next level, then noise up to it. Variance preserving models; latents are image + s * noise.

Checked against diffusers' schedulers of the same names. Two places where theirs have no number are ours: level 1 in DPM-Solver++,
and a shifted end with a single step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from .errors import ModelLoadError
from .painter import BeginSolver, SolverRun
from .picture_request import PictureOrder
from .schedules import Level, Plan, Schedule


def mix(tensors: Sequence[Tensor | None], weights: Sequence[float | Tensor]) -> Tensor:
    """The weighted sum of tensors [...] by numbers, or of row batches [R, ...] by weights [R] each. None counts as nothing."""
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if tensor is None:
            continue
        if isinstance(weight, Tensor):
            weight = weight.reshape(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)
        part = tensor * weight
        total = part if total is None else total + part
    assert total is not None
    return total


# ----------------------------------------------------------------------------------- weights, pure functions of levels


def x0_weights(prediction: str, at: Level) -> tuple[float, float]:
    """Of latents and prediction: x0, for latents alpha * image + sigma * noise."""
    if prediction == "epsilon":  # the prediction is the noise
        return 1 / at.alpha, -at.sigma / at.alpha
    if prediction == "v_prediction":  # alpha * noise - sigma * image
        return at.alpha, -at.sigma
    if prediction == "flow_prediction":  # noise - image
        return 1.0, -at.sigma
    assert prediction == "sample"
    return 0.0, 1.0


def dpmpp_weights(
    before: Level | None, now: Level, then: Level, solver_type: str = "midpoint"
) -> tuple[float, float, float]:
    """Of latents, x0, and x0 a step before (`before` is its level; None for a first-order step): the latents at `then`."""
    h = then.lam - now.lam
    whole = -then.alpha * math.expm1(-h)
    kept = then.sigma / now.sigma
    if before is None or math.isinf(before.lam) or math.isinf(h):
        return kept, whole, 0.0
    half = 0.5 * whole if solver_type == "midpoint" else then.alpha * (math.expm1(-h) / h + 1)
    slope = half * h / (now.lam - before.lam)
    return kept, whole + slope, -slope


def unipc_weights(
    before: Level | None, now: Level, then: Level, solver_type: str = "bh2", *, correct: bool = False
) -> tuple[float, float, float, float]:
    """Of latents at `now`, x0 there, x0 at `before` (None: first order), and x0 at `then`, which only a corrector knows."""
    h = then.lam - now.lam
    grown = math.expm1(-h)
    kept, whole = then.sigma / now.sigma, -then.alpha * grown
    scale = then.alpha * (grown if solver_type == "bh2" or math.isinf(h) else -h)
    second = before is not None and not math.isinf(before.lam) and not math.isinf(h)
    rate = (before.lam - now.lam) / h if before is not None and second else -1.0
    if not correct:
        if not second:
            return kept, whole, 0.0, 0.0
        slope = scale * 0.5 / rate
        return kept, whole + slope, -slope, 0.0
    if not second:
        last, slope = 0.5, 0.0
    else:
        phi = grown / -h - 1
        first = phi * then.alpha / scale
        other = (phi / -h - 0.5) * 2 * then.alpha / scale
        share = (first - other) / (1 - rate)
        last, slope = first - share, scale * share / rate
    return kept, whole + slope + scale * last, -slope, -scale * last


def ancestral_weights(now: float, then: float) -> tuple[float, float, float]:
    """Of latents image + now * noise, x0, and fresh noise: latents at level `then`."""
    up = math.sqrt(max(0.0, then**2 * (now**2 - then**2))) / now
    down = math.sqrt(max(0.0, then**2 - up**2))
    return down / now, 1 - down / now, up


# ------------------------------------------------------------------------------------------------- a picture's own run


class _Run:
    """What the solvers have in common: the levels, and latents of alpha * image + sigma * noise."""

    def __init__(self, plan: Plan, begin: int) -> None:
        self.plan = plan
        self.begin = begin

    def time(self, step: int) -> float:
        return self.plan.times[step]

    def start(self, noise: Tensor, image: Tensor | None) -> Tensor:
        if image is None:
            return noise
        at = self.plan.level(self.begin)
        return mix([image, noise], [at.alpha, at.sigma])

    def scale(self, latents: Tensor, step: int) -> Tensor:
        return latents

    def takes_noise(self, step: int) -> bool:
        return False

    def x0(self, latents: Tensor, prediction: Tensor, step: int) -> Tensor:
        return mix([latents, prediction], x0_weights(self.plan.prediction, self.plan.level(step)))


class EulerRun(_Run):
    """Flow models: the prediction is the direction."""

    def advance(self, latents: Tensor, prediction: Tensor, step: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        now, then = self.plan.sigmas[step : step + 2]
        return mix([latents, prediction], [1.0, then - now]), self.x0(latents, prediction, step)


class DpmppRun(_Run):
    """Remembers what x0 was a step ago."""

    _before: Tensor | None = None

    def advance(self, latents: Tensor, prediction: Tensor, step: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        plan, options = self.plan, self.plan.options
        x0 = self.x0(latents, prediction, step)
        left = plan.num_steps - step
        ends_low = options.get("euler_at_final", False) or (
            options.get("lower_order_final", True) and plan.num_steps < 15
        )
        first_order = self._before is None or options.get("solver_order", 2) == 1 or (left == 1 and ends_low)
        before = None if first_order else plan.level(step - 1)
        kind = options.get("solver_type", "midpoint")
        weights = dpmpp_weights(
            before, plan.level(step), plan.level(step + 1), "heun" if kind == "heun" else "midpoint"
        )
        moved = mix([latents, x0, None if first_order else self._before], weights)
        self._before = x0
        return moved, x0


class UniPCRun(_Run):
    """Remembers the corrected latents of the step before, and x0 of the last two."""

    _latents: Tensor | None = None
    _past: tuple[Tensor, ...] = ()  # x0 of the steps before, the latest first
    _order = 1

    def advance(self, latents: Tensor, prediction: Tensor, step: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        plan, options = self.plan, self.plan.options
        kind = "bh1" if options.get("solver_type") == "bh1" else "bh2"
        x0 = self.x0(latents, prediction, step)
        if self._latents is not None and step - 1 not in options.get("disable_corrector", ()):
            older = plan.level(step - 2) if self._order == 2 else None
            weights = unipc_weights(older, plan.level(step - 1), plan.level(step), kind, correct=True)
            two_ago = self._past[1] if self._order == 2 else None
            latents = mix([self._latents, self._past[0], two_ago, x0], weights)
        order = min(options.get("solver_order", 2), len(self._past) + 1)
        if options.get("lower_order_final", True):
            order = min(order, plan.num_steps - step)
        older = plan.level(step - 1) if order == 2 else None
        weights = unipc_weights(older, plan.level(step), plan.level(step + 1), kind)
        moved = mix([latents, x0, self._past[0] if order == 2 else None, None], weights)
        self._latents, self._past, self._order = latents, (x0, *self._past[:1]), order
        return moved, x0


class LcmRun(_Run):
    """To x0 and back, with noise of the request's own generator."""

    def takes_noise(self, step: int) -> bool:
        return step + 1 < self.plan.num_steps

    def advance(self, latents: Tensor, prediction: Tensor, step: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        plan, options = self.plan, self.plan.options
        x0 = self.x0(latents, prediction, step)
        if plan.kind == "vp":
            if options["clip_sample"]:
                x0 = x0.clamp(-options["clip_sample_range"], options["clip_sample_range"])
            time = plan.times[step] * options["timestep_scaling"]
            far = math.hypot(time, 0.5)  # 0.5: the deviation of images, as the boundary condition has it
            x0 = mix([x0, latents], [time / far, 0.25 / far**2])
        then = plan.level(step + 1)
        return mix([x0, noise], [then.alpha, then.sigma]), x0


class AncestralRun(_Run):
    """Latents are image + s * noise here; the model sees them at deviation 1."""

    def start(self, noise: Tensor, image: Tensor | None) -> Tensor:
        sigma = self.plan.sigmas[self.begin]
        if image is not None:
            return mix([image, noise], [1.0, sigma])
        spacing = self.plan.options["timestep_spacing"]
        return noise * (math.hypot(sigma, 1.0) if spacing == "leading" else sigma)

    def scale(self, latents: Tensor, step: int) -> Tensor:
        return latents * self.plan.level(step).alpha

    def takes_noise(self, step: int) -> bool:
        return self.plan.sigmas[step + 1] > 0

    def advance(self, latents: Tensor, prediction: Tensor, step: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        x0 = self.x0(self.scale(latents, step), prediction, step)
        return mix([latents, x0, noise], ancestral_weights(*self.plan.sigmas[step : step + 2])), x0


SOLVERS: dict[str, type[Any]] = {
    "euler": EulerRun,
    "dpmpp_2m": DpmppRun,
    "unipc": UniPCRun,
    "lcm": LcmRun,
    "euler_ancestral": AncestralRun,
}


def begin_solver(schedule: Schedule, *, patch: int = 2) -> BeginSolver:
    """Runs of pictures by a model's levels. `patch` x `patch` latents are a token of the denoiser.

    What it returns raises InvalidRequest for a number of steps that the levels cannot be cut into.
    """
    for name in schedule.solvers:
        if name not in SOLVERS:
            raise ModelLoadError(f"solver: expected one of {', '.join(SOLVERS)}, got {name!r}")
    plan: Callable[[str, int, int], Plan] = lru_cache(maxsize=64)(schedule.plan)

    def begin(order: PictureOrder, shape: tuple[int, ...]) -> SolverRun:
        num_tokens = (shape[-2] // patch) * (shape[-1] // patch)
        run: SolverRun = SOLVERS[order.solver](plan(order.solver, order.num_steps, num_tokens), order.begin)
        return run

    return begin
