"""Noise levels: what a model's scheduler_config.json says (diffusers' words) -> the levels of one picture's run.

Two kinds of model. *Flow*: a picture at level s is s * noise + (1 - s) * image, s from 1 to 0, and the model is told s.
*Variance preserving* (vp): it is alpha * image + alpha * s * noise with alpha = 1 / sqrt(1 + s^2), and the model is told one of
its training steps. The kind and the numbers are the scheduler's; which solver then walks along the levels is a request's choice.
A vp model's levels depend on the solver too, as when diffusers makes one scheduler from another's config.

Levels are kept as diffusers keeps them, rounded to fp32. Flow models are told their level unrounded, where diffusers' DPM and
UniPC schedulers cut it to thousandths. What is not here is refused by name: beta and Lu spacing, inverted levels, thresholding,
learned variances, orders above 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import InvalidRequest, ModelLoadError

Kind = Literal["flow", "vp"]
Spacing = Literal["steps", "train"]
_EPS = 1e-6  # UniPC's distance from level 1, where its logarithm would be infinite

_NOISE = {
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
}
_BETAS = _NOISE | {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
_CLIP = {"thresholding": False, "dynamic_thresholding_ratio": 0.995, "sample_max_value": 1.0}
_CURVES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_SHIFTS: dict[str, Any] = {
    "use_dynamic_shifting": False,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "time_shift_type": "exponential",
}
_FLOW = {"num_train_timesteps": 1000, "shift": 1.0, "invert_sigmas": False, "shift_terminal": None} | _CURVES | _SHIFTS
_MULTISTEP: dict[str, Any] = {
    "solver_order": 2,
    "lower_order_final": True,
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "timestep_spacing": "linspace",
    "steps_offset": 0,
    "final_sigmas_type": "zero",
} | (_BETAS | _CLIP | _CURVES | _SHIFTS)

# Every option of a class, with its default there.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": _FLOW | {"stochastic_sampling": False},
    "FlowMatchLCMScheduler": _FLOW | {"scale_factors": None, "upscale_mode": "bicubic"},
    "DPMSolverMultistepScheduler": _MULTISTEP
    | {
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "euler_at_final": False,
        "use_lu_lambdas": False,
        "lambda_min_clipped": -math.inf,
        "variance_type": None,
    },
    "UniPCMultistepScheduler": _MULTISTEP
    | {
        "predict_x0": True,
        "solver_type": "bh2",
        "disable_corrector": [],
        "solver_p": None,
        "sigma_min": None,
        "sigma_max": None,
        "shift_terminal": None,
    },
    "LCMScheduler": _BETAS
    | _CLIP
    | {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "original_inference_steps": 50,
        "clip_sample": False,
        "clip_sample_range": 1.0,
        "set_alpha_to_one": True,
        "steps_offset": 0,
        "timestep_spacing": "leading",
        "timestep_scaling": 10.0,
    },
    "EulerAncestralDiscreteScheduler": _BETAS | {"timestep_spacing": "linspace", "steps_offset": 0},
}
_OWN = {  # the solver that a class is
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchLCMScheduler": "lcm",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "unipc",
    "LCMScheduler": "lcm",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
}
_FLOW_SOLVERS = ("euler", "dpmpp_2m", "unipc", "lcm")
_VP_SOLVERS = ("dpmpp_2m", "unipc", "euler_ancestral")
# Values that work; an option that is in neither table may be anything of its default's type.
_ONLY: dict[str, tuple[Any, ...]] = {
    "algorithm_type": ("dpmsolver++",),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "final_sigmas_type": ("zero", "sigma_min"),
    "invert_sigmas": (False,),
    "lambda_min_clipped": (-math.inf,),
    "predict_x0": (True,),
    "prediction_type": ("epsilon", "v_prediction", "sample", "flow_prediction"),
    "scale_factors": (None, []),
    "sigma_max": (None,),
    "sigma_min": (None,),
    "solver_order": (1, 2),
    "solver_p": (None,),
    "stochastic_sampling": (False,),
    "thresholding": (False,),
    "time_shift_type": ("exponential", "linear"),
    "timestep_spacing": ("linspace", "leading", "trailing"),
    "trained_betas": (None,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
    "variance_type": (None,),
}
_SOLVER_TYPES = {"DPMSolverMultistepScheduler": ("midpoint", "heun"), "UniPCMultistepScheduler": ("bh1", "bh2")}
# What configs carry along from classes that they were made from, and diffusers does not read either.
_LEFT_OVER = frozenset(
    "clip_sample clip_sample_range dynamic_thresholding_ratio interpolation_type sample_max_value max_image_seq_len "
    "base_image_seq_len original_inference_steps set_alpha_to_one skip_prk_steps timestep_scaling timestep_type "
    "steps_offset".split()
)


@dataclass(frozen=True, kw_only=True)
class Level:
    """A picture at this level is alpha * image + sigma * noise."""

    alpha: float
    sigma: float

    @property
    def lam(self) -> float:
        """Half the logarithm of the signal-to-noise ratio, which exponential solvers take for time."""
        if not self.sigma:
            return math.inf
        return math.log(self.alpha / self.sigma) if self.alpha else -math.inf


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `sigmas` has a level more than there are steps, the last one is where the picture is done; `times[i]` is what the
    model is told at step i; `options` are the scheduler's."""

    kind: Kind
    prediction: str  # "flow_prediction", "epsilon", "v_prediction" or "sample"
    sigmas: tuple[float, ...]
    times: tuple[float, ...]
    options: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        return len(self.times)

    def level(self, step: int) -> Level:
        sigma = self.sigmas[step]
        if self.kind == "flow":
            return Level(alpha=1 - sigma, sigma=sigma)
        alpha = 1 / math.sqrt(1 + sigma * sigma)
        return Level(alpha=alpha, sigma=sigma * alpha)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A model's noise levels for any number of steps. `given`: a few-step model's own levels, taken as they are.

    `spacing` of flow models whose scheduler takes its levels from the pipeline: "steps" is 1, 1 - 1/n, ... (Flux, Qwen-Image),
    "train" goes to the last training step, shifted, as the scheduler does when it is left alone (Stable Diffusion 3).
    """

    scheduler: str
    options: Mapping[str, Any] = field(hash=False)
    given: tuple[float, ...] = ()
    spacing: Spacing = "steps"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, sigmas: Sequence[float] = (), spacing: Spacing = "steps"
    ) -> Schedule:
        """From the mapping in scheduler_config.json. Raises ModelLoadError, naming what was found and what is known."""
        name = config.get("_class_name")
        if name not in SCHEDULERS:
            raise ModelLoadError(f"scheduler: expected one of {', '.join(SCHEDULERS)}, got {str(name)[:80]!r}")
        options = _read_options(name, config)
        schedule = cls(scheduler=name, options=options, given=tuple(sigmas), spacing=spacing)
        if sigmas and schedule.kind != "flow":
            raise ModelLoadError(f"sigmas: only models of flow have levels of their own, not those of {name}")
        if any(not 0 < s <= 1 for s in sigmas) or any(a <= b for a, b in zip(sigmas, sigmas[1:])):
            raise ModelLoadError("sigmas: expected falling numbers above 0 and up to 1")
        return schedule

    @property
    def kind(self) -> Kind:
        flow = self.scheduler.startswith("FlowMatch") or self.options.get("use_flow_sigmas")
        return "flow" if flow else "vp"

    @property
    def solvers(self) -> tuple[str, ...]:
        """The solvers that can walk along its levels, the scheduler's own one first."""
        own = _OWN[self.scheduler]
        if self.scheduler == "LCMScheduler":
            return (own,)
        others = _FLOW_SOLVERS if self.kind == "flow" else _VP_SOLVERS
        return (own, *(name for name in others if name != own))

    @property
    def num_train(self) -> int:
        return int(self.options["num_train_timesteps"])

    def plan(self, solver: str, num_steps: int, num_tokens: int) -> Plan:
        """The levels of a run. `num_tokens`: of the picture, which dynamic shifting asks for. Raises InvalidRequest for a number
        of steps that these levels cannot be cut into."""
        if self.given and num_steps != len(self.given):
            raise InvalidRequest(f"num_steps: this model takes {len(self.given)}, got {num_steps}", param="num_steps")
        if num_steps < 1 or num_steps > self.num_train:
            raise InvalidRequest(f"num_steps: expected 1 to {self.num_train}, got {num_steps}", param="num_steps")
        options = self.options
        prediction = "flow_prediction" if self.scheduler.startswith("FlowMatch") else options["prediction_type"]
        if self.kind == "flow":
            levels = list(self.given) or self._flow_levels(num_steps, num_tokens)
            if solver == "unipc" and abs(levels[0] - 1) < _EPS:
                levels[0] -= _EPS
            sigmas = _fp32([*levels, 0.0])
            times = sigmas[:-1]
        elif solver == "lcm":
            times = tuple(float(step) for step in self._lcm_steps(num_steps))
            sigmas = (*_fp32([self._table[int(time)] for time in times]), 0.0)
        else:
            levels, steps = self._vp_levels(solver, num_steps)
            to_least = options.get("final_sigmas_type") == "sigma_min" and solver != "euler_ancestral"
            last = self._table[0] if to_least else 0.0
            sigmas, times = _fp32([*levels, last]), tuple(steps)
        return Plan(kind=self.kind, prediction=prediction, sigmas=sigmas, times=times, options=options)

    # -------------------------------------------------------------------------------------------------------- flow

    def _flow_levels(self, n: int, num_tokens: int) -> list[float]:
        options, num_train = self.options, self.num_train
        shift = options["shift"] if "shift" in options else options["flow_shift"]
        dtype = torch.float64
        if self.scheduler == "DPMSolverMultistepScheduler":
            even = [1 - alpha for alpha in _evenly(1.0, 1 / num_train, n + 1)][:0:-1]
        elif self.scheduler == "UniPCMultistepScheduler":
            even = _evenly(1.0, 1 / num_train, n + 1)[:-1]
        elif self.spacing == "train":
            # The scheduler shifts its smallest level twice: once to know it, once with the others.
            least = 1 / num_train if options["use_dynamic_shifting"] else _shift(1 / num_train, shift)
            even = _evenly(1.0, least, n)
        else:
            even, dtype = _evenly(1.0, 1 / n, n), torch.float32
        levels = torch.tensor(even, dtype=dtype)
        if options["use_dynamic_shifting"]:
            mu = self._mu(num_tokens)
            by = torch.tensor(mu if options["time_shift_type"] == "linear" else math.exp(mu), dtype=dtype)
            levels = by / (by + (1 / levels - 1))
        else:
            levels = shift * levels / (1 + (shift - 1) * levels)
        terminal = options.get("shift_terminal")
        if terminal and levels[-1] < 1:
            rest = 1 - levels
            levels = 1 - rest / (rest[-1] / (1 - terminal))
        found: list[float] = levels.tolist()
        if options["use_karras_sigmas"]:
            return _karras(found[0], found[-1], n)
        if options["use_exponential_sigmas"]:
            return _exponential(found[0], found[-1], n)
        return found

    def _mu(self, num_tokens: int) -> float:
        """How far levels are shifted, by the picture's tokens."""
        o = self.options
        slope = (o["max_shift"] - o["base_shift"]) / (o["max_image_seq_len"] - o["base_image_seq_len"])
        return float(num_tokens * slope + (o["base_shift"] - slope * o["base_image_seq_len"]))

    # ---------------------------------------------------------------------------------------------------------- vp

    @cached_property
    def _table(self) -> list[float]:
        """The level of each training step, rising."""
        kept = self.alphas_cumprod
        levels: list[float] = (((1 - kept) / kept) ** 0.5).double().tolist()
        return levels

    @cached_property
    def alphas_cumprod(self) -> Tensor:
        """fp32 [num_train]: the share of the image in the variance at each training step."""
        options, num_train = self.options, self.num_train
        first, last = options["beta_start"], options["beta_end"]
        if options["beta_schedule"] == "linear":
            betas = torch.linspace(first, last, num_train, dtype=torch.float32)
        elif options["beta_schedule"] == "scaled_linear":
            betas = torch.linspace(first**0.5, last**0.5, num_train, dtype=torch.float32) ** 2
        else:  # squaredcos_cap_v2: Nichol and Dhariwal 2021

            def share(at: float) -> float:
                return math.cos((at + 0.008) / 1.008 * math.pi / 2) ** 2

            cut = [min(1 - share((i + 1) / num_train) / share(i / num_train), 0.999) for i in range(num_train)]
            betas = torch.tensor(cut, dtype=torch.float32)
        if options["rescale_betas_zero_snr"]:
            betas = _to_zero_snr(betas)
        kept = torch.cumprod(1 - betas, 0)
        if options["rescale_betas_zero_snr"]:
            kept[-1] = 2**-24  # as diffusers has it: no infinite level
        return kept

    def _vp_levels(self, solver: str, n: int) -> tuple[list[float], list[float]]:
        """Levels and the training steps that stand for them, falling."""
        options, num_train = self.options, self.num_train
        ancestral = solver == "euler_ancestral"
        if not ancestral and (options.get("use_karras_sigmas") or options.get("use_exponential_sigmas")):
            curve = _karras if options["use_karras_sigmas"] else _exponential
            levels = curve(self._table[-1], self._table[0], n)
            found = [self._step_of(level) for level in levels]
            whole = options["use_karras_sigmas"] and (
                solver == "unipc" or options["beta_schedule"] != "squaredcos_cap_v2"
            )
            return levels, [float(round(step) if whole else int(step)) for step in found]
        spacing, offset = options["timestep_spacing"], options["steps_offset"]
        if spacing == "linspace" and ancestral:
            steps = list(_fp32(_evenly(0.0, num_train - 1.0, n)))[::-1]
        elif spacing == "linspace":
            steps = [float(round(step)) for step in _evenly(0.0, num_train - 1.0, n + 1)][:0:-1]
        elif spacing == "leading":
            ratio = num_train // (n if ancestral else n + 1)
            steps = [float(i * ratio + offset) for i in (range(n) if ancestral else range(1, n + 1))][::-1]
        else:
            steps = [float(round(num_train - i * (num_train / n)) - 1) for i in range(n)]
        if steps[0] > num_train - 1:
            raise InvalidRequest(f"num_steps: {n} steps with an offset of {offset} do not fit", param="num_steps")
        return [self._level_at(step) for step in steps], steps

    def _level_at(self, step: float) -> float:
        low = min(int(step), self.num_train - 2) if self.num_train > 1 else 0
        high = min(low + 1, self.num_train - 1)
        return self._table[low] + (step - low) * (self._table[high] - self._table[low])

    def _step_of(self, level: float) -> float:
        """The training step of a level, between two of them by their logarithms."""
        logs, wanted = self._logs, math.log(max(level, 1e-10))
        low = max((i for i, log in enumerate(logs[:-1]) if log <= wanted), default=0)
        share = (logs[low] - wanted) / (logs[low] - logs[low + 1])
        share = min(1.0, max(0.0, share))
        return (1 - share) * low + share * (low + 1)

    @cached_property
    def _logs(self) -> list[float]:
        return [math.log(level) for level in self._table]

    def _lcm_steps(self, n: int) -> list[int]:
        """Every so many of the steps that the model was distilled at."""
        taught = self.options["original_inference_steps"]
        if n > taught:
            raise InvalidRequest(f"num_steps: this model was made for up to {taught}, got {n}", param="num_steps")
        apart = self.num_train // taught
        steps = [apart * i - 1 for i in range(taught, 0, -1)]
        return [steps[math.floor(i * (taught / n))] for i in range(n)]


def _read_options(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the class, checked."""
    known = SCHEDULERS[name]
    for key, value in config.items():
        if key not in known and not key.startswith("_") and value and key not in _LEFT_OVER:
            raise ModelLoadError(
                f"scheduler: {name} has no option {str(key)[:60]!r}; it has {', '.join(sorted(known))}"
            )
    options = {key: config.get(key, default) for key, default in known.items()}
    for key, value in options.items():
        allowed = _SOLVER_TYPES[name] if key == "solver_type" else _ONLY.get(key)
        if allowed is not None:
            fits = any(value == one and type(value) is type(one) for one in allowed)
            if not fits:
                said = ", ".join(str(one) for one in allowed)
                raise ModelLoadError(f"scheduler: {name}: {key}: served is {said}, got {str(value)[:60]!r}")
        else:
            _check_value(name, key, value, known[key])
    _check_together(name, options)
    return options


def _check_value(name: str, key: str, value: Any, default: Any) -> None:
    """Of the default's type, finite, and within what a run can be made from."""
    if key == "shift_terminal":
        fits = value is None or (_is_number(value) and 0 <= value < 1)
    elif key == "disable_corrector":
        fits = isinstance(value, list) and all(type(step) is int for step in value)
    elif isinstance(default, bool):
        fits = isinstance(value, bool)
    elif isinstance(default, int):
        least = 0 if key == "steps_offset" else 1
        fits = type(value) is int and least <= value <= 100_000
    elif isinstance(default, float):
        fits = _is_number(value) and (value > 0 if key in ("shift", "flow_shift") else value >= 0)
    else:
        fits = isinstance(value, type(default))
    if not fits:
        raise ModelLoadError(f"scheduler: {name}: {key}: not a value that can be: {str(value)[:60]!r}")


def _check_together(name: str, options: Mapping[str, Any]) -> None:
    """Options that are right alone and wrong together."""

    def refuse(why: str) -> None:
        raise ModelLoadError(f"scheduler: {name}: {why}")

    curved = options.get("use_karras_sigmas") or options.get("use_exponential_sigmas")
    if options.get("use_karras_sigmas") and options.get("use_exponential_sigmas"):
        refuse("use_karras_sigmas and use_exponential_sigmas exclude each other")
    if options.get("use_dynamic_shifting"):
        if options["max_image_seq_len"] == options["base_image_seq_len"]:
            refuse("base_image_seq_len and max_image_seq_len are equal")
        if name == "DPMSolverMultistepScheduler" and options["time_shift_type"] != "exponential":
            refuse("time_shift_type: served is exponential")
    flow = options.get("use_flow_sigmas")
    if flow is None:
        if options.get("prediction_type") == "flow_prediction":
            refuse("prediction_type: served are epsilon, v_prediction and sample, got 'flow_prediction'")
        if name == "EulerAncestralDiscreteScheduler" and options["prediction_type"] == "sample":
            refuse("prediction_type: served are epsilon and v_prediction, got 'sample'")
    elif flow != (options["prediction_type"] == "flow_prediction"):
        refuse("use_flow_sigmas and prediction_type flow_prediction go together")
    elif flow and (curved or options["final_sigmas_type"] != "zero"):
        refuse("use_flow_sigmas goes with evenly spaced levels down to zero")
    elif not flow and (options["use_dynamic_shifting"] or options.get("shift_terminal")):
        refuse("use_dynamic_shifting and shift_terminal go with use_flow_sigmas")
    if name == "LCMScheduler" and options["original_inference_steps"] > options["num_train_timesteps"]:
        refuse("original_inference_steps is above num_train_timesteps")
    if not 0 <= options.get("beta_start", 0.0) <= options.get("beta_end", 0.0) < 1:
        refuse("expected 0 <= beta_start <= beta_end < 1")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _evenly(first: float, last: float, n: int) -> list[float]:
    """`n` numbers from `first` to `last`; of one, the first."""
    if n == 1:
        return [first]
    step = (last - first) / (n - 1)
    return [i * step + first for i in range(n - 1)] + [last]


def _shift(level: float, by: float) -> float:
    return by * level / (1 + (by - 1) * level)


def _karras(first: float, last: float, n: int) -> list[float]:
    """Karras et al. 2022, rho 7."""
    high, low = first ** (1 / 7), last ** (1 / 7)
    return [(high + at * (low - high)) ** 7 for at in _evenly(0.0, 1.0, n)]


def _exponential(first: float, last: float, n: int) -> list[float]:
    return [math.exp(log) for log in _evenly(math.log(first), math.log(last), n)]


def _to_zero_snr(betas: Tensor) -> Tensor:
    """Betas after whose last step nothing of the image is left (Lin et al. 2023)."""
    root = torch.cumprod(1 - betas, 0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    root = (root - last) * (first / (first - last))
    kept = root**2
    return 1 - torch.cat([kept[:1], kept[1:] / kept[:-1]])


def _fp32(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(list(values), dtype=torch.float64).float().double().tolist())
