"""Step caches: most of a denoiser's blocks are left out at steps where their result would hardly change.

Two policies, each with a state per row (a picture's guidance branch), so that batch mates never influence each other: decisions
compare a row with its own past only, reduced over that row alone.

- TeaCache (Liu et al., arXiv 2411.19108): the relative L1 change of an indicator (the first block's modulated input, or a
  function of the timestep) is mapped by a calibrated polynomial to the expected change of the output, and summed up; while the
  sum stays below the threshold, the blocks' last residual (output - input) is added again instead of running them.
- First-block cache (ParaAttention): the first block always runs; while its residual differs from that of the last *computed*
  step by at most the threshold, the other blocks' last residual is added.

A threshold of 0 means off, and then nothing of this file runs. Few-step models are refused: each of their steps changes much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from .errors import ModelLoadError

MIN_STEPS = 9  # runs shorter than this are computed whole: neighbouring steps differ too much
Policy = Literal["teacache", "first_block"]


class BlockModel(Protocol):
    """A denoiser in parts. A *trunk* is its own idea of a batch between blocks; `hidden` of it is the picture's stream.

    blocks over [0, last) from begin(rows), then finish, must equal its plain forward.
    """

    def begin(self, rows: Any) -> Any:
        """Everything before the first block: a trunk of all rows."""
        ...

    def hidden(self, trunk: Any) -> torch.Tensor:
        """[R, T, D]: what the blocks have made of the picture so far."""
        ...

    def indicator(self, trunk: Any) -> torch.Tensor:
        """[R, ...]: TeaCache's signal, of a trunk fresh from `begin`."""
        ...

    def select(self, trunk: Any, rows: Sequence[int]) -> Any:
        """A trunk of these rows alone."""
        ...

    def blocks(self, trunk: Any, start: int, stop: int | None) -> Any:
        """The trunk after blocks [start, stop); None: up to the last."""
        ...

    def finish(self, trunk: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The prediction [R, ...] from `hidden` [R, T, D] after the last block. `trunk` is the one from `begin`."""
        ...


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """`coefficients`: TeaCache's polynomial, highest power first. `max_skips`: after so many skipped steps one is computed."""

    policy: Policy
    threshold: float
    coefficients: tuple[float, ...] = ()
    max_skips: int = 8

    def __post_init__(self) -> None:
        if self.policy not in ("teacache", "first_block"):
            raise ValueError(f"step_cache: expected teacache or first_block, got {self.policy!r}")
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"step_cache: expected a threshold of 0 or more, got {self.threshold}")
        if self.max_skips < 1:
            raise ValueError(f"step_cache: expected max_skips of 1 or more, got {self.max_skips}")

    @property
    def on(self) -> bool:
        return self.threshold > 0


def check_cache(config: CacheConfig | None, *, few_step: bool, has_blocks: bool) -> CacheConfig | None:
    """The cache to use for a model, None for off. Raises ModelLoadError where it cannot work."""
    if config is None or not config.on:
        return None
    if few_step:
        raise ModelLoadError("step_cache: this model makes a picture in a few steps, none of which can be left out")
    if not has_blocks:
        raise ModelLoadError("step_cache: this model's family does not run block by block")
    if config.policy == "teacache" and len(config.coefficients) != 5:
        raise ModelLoadError(
            "step_cache: teacache needs this model's own five coefficients (see step_cache.Calibrator)"
        )
    return config


def change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Relative L1 distance of one row's tensors, a 0-d fp32 tensor; 0 where both are zero."""
    now, before = now.float().contiguous(), before.float().contiguous()
    return (now - before).abs().mean() / before.abs().mean().clamp_min(1e-12)


def polynomial(coefficients: Sequence[float], x: float) -> float:
    """Horner's rule, highest power first."""
    total = 0.0
    for c in coefficients:
        total = total * x + c
    return total


@dataclass(eq=False)
class RowCache:
    """One row's past. `step` counts from 0 to `num_steps - 1`; the first and the last step are always computed.

    `mask`, where the signal depends on the schedule alone, says beforehand at which steps the blocks run.
    """

    config: CacheConfig
    num_steps: int
    mask: tuple[bool, ...] | None = None
    step: int = 0
    total: float = 0.0
    num_skips: int = 0  # in a row
    signal: torch.Tensor | None = None  # TeaCache: of the step before; first block: of the last computed step
    residual: torch.Tensor | None = None
    decisions: list[bool] = field(default_factory=list)  # True: computed

    def decide(self, difference: float | None) -> bool:
        """Whether the blocks run at this step; moves on to the next. `difference` is the signal's change, None where unknown.

        A change that is not finite computes: a cache never hides that numbers went wrong.
        """
        config = self.config
        if self.mask is not None:
            compute = self.mask[self.step]
        elif self.step == 0 or self.step >= self.num_steps - 1 or difference is None or not math.isfinite(difference):
            compute = True
        elif config.policy == "teacache":
            self.total += max(0.0, polynomial(config.coefficients, difference))
            compute = not self.total < config.threshold
        else:
            compute = not difference <= config.threshold
        compute = compute or self.residual is None or self.num_skips >= config.max_skips
        if compute:
            self.total = 0.0
        self.num_skips = 0 if compute else self.num_skips + 1
        self.decisions.append(compute)
        self.step += 1
        return compute


def row_cache(config: CacheConfig | None, num_steps: int, mask: tuple[bool, ...] | None = None) -> RowCache | None:
    """State for one row, or None where every step is to be computed."""
    if config is None or not config.on or num_steps < MIN_STEPS:
        return None
    return RowCache(config, num_steps, mask)


def schedule_mask(config: CacheConfig, signals: torch.Tensor) -> tuple[bool, ...]:
    """TeaCache's decisions for a whole run from `signals` [num_steps, ...], one per step, where they depend on time alone."""
    if config.policy != "teacache":
        raise ValueError("a first block's residual depends on the picture; only teacache can be planned")
    num_steps = len(signals)
    plan = RowCache(config, num_steps)
    plan.residual = signals[:0]  # stands for the one that the first step leaves behind
    differences = [None, *(change(a, b).item() for a, b in zip(signals[1:], signals[:-1]))]
    return tuple(plan.decide(difference) for difference in differences)


def cached_forward(model: BlockModel, rows: Any, caches: Sequence[RowCache]) -> torch.Tensor:
    """The prediction [R, ...] of a row batch with one cache per row, all of one policy. One device sync at most."""
    trunk = model.begin(rows)
    hidden = model.hidden(trunk)
    if caches[0].config.policy == "teacache":
        base, base_hidden, start = trunk, hidden, 0
        planned = all(cache.mask is not None for cache in caches)
        signals = None if planned else model.indicator(trunk)
    else:
        base = model.blocks(trunk, 0, 1)
        base_hidden, start = model.hidden(base), 1
        signals = base_hidden - hidden
    computed = _decide(caches, signals)
    skipped = [row for row in range(len(caches)) if row not in set(computed)]
    out = base_hidden.clone()
    if computed:
        part = base if not skipped else model.select(base, computed)
        tail = model.hidden(model.blocks(part, start, None))
        for at, row in enumerate(computed):
            out[row] = tail[at]
            caches[row].residual = tail[at] - base_hidden[row]
    for row in skipped:
        residual = caches[row].residual
        assert residual is not None
        out[row] += residual
    return model.finish(trunk, out)


def _decide(caches: Sequence[RowCache], signals: torch.Tensor | None) -> list[int]:
    """Rows whose blocks run. Each row's change is reduced by itself; the host reads all of them at once."""
    differences: list[float | None] = [None] * len(caches)
    if signals is not None:
        known = [row for row, cache in enumerate(caches) if cache.signal is not None]
        if known:
            values = torch.stack([change(signals[row], caches[row].signal) for row in known])  # type: ignore[arg-type]
            for row, value in zip(known, values.tolist()):
                differences[row] = value
    computed = []
    for row, cache in enumerate(caches):
        compute = cache.decide(differences[row])
        if compute:
            computed.append(row)
        if signals is not None and (compute or cache.config.policy == "teacache"):
            cache.signal = signals[row].clone()
    return computed


class Calibrator:
    """Collects how a model's output follows TeaCache's indicator, and fits the polynomial. Runs are told apart by `run`."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pairs: list[tuple[float, float]] = []

    def observe(self, run: Any, signal: torch.Tensor, output: torch.Tensor) -> None:
        """One computed step of one row: its indicator, and its hidden states [T, D] after the last block."""
        before = self._last.get(run)
        if before is not None:
            self.pairs.append((change(signal, before[0]).item(), change(output, before[1]).item()))
        self._last[run] = (signal.clone(), output.clone())

    def fit(self) -> tuple[float, ...]:
        """Five coefficients, highest power first, by least squares. Raises ValueError with too few different pairs."""
        xs = torch.tensor([x for x, _ in self.pairs], dtype=torch.float64)
        ys = torch.tensor([y for _, y in self.pairs], dtype=torch.float64)
        if len(xs.unique()) < 5:
            raise ValueError(f"expected 5 or more different changes to fit, got {len(xs.unique())}")
        scale = xs.abs().max().clamp_min(1e-12)  # powers of numbers near 1 keep the problem well conditioned
        powers = torch.stack([(xs / scale) ** p for p in (4, 3, 2, 1, 0)], dim=1)
        solution = torch.linalg.lstsq(powers, ys[:, None], driver="gelsd").solution[:, 0]
        return tuple(float(c / scale**p) for c, p in zip(solution, (4, 3, 2, 1, 0)))
