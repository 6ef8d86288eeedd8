"""How near to the machine's limits steps run: the time that bytes and products alone would take, over the time they took.

A step must read the weights once and every sequence's K and V once, and multiply what its rows ask for; the roofline says
that it takes at least the longer of the two at the machine's peak rates. `Roofline` adds up that bound and the real seconds by
phase. Knows plans and numbers; `measure_peaks` alone touches tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.linear import has_byte_products, linear, prepare, quantize_int8, torch_multiplies_bf16
from ..models.spec import Workload
from .types import SequenceStep, StepPlan

_LEAST_READ = 64 << 20  # bytes: more than a cache holds
_KEEP = 0.98  # of the sums after each step: the last fifty steps or so count


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What the machine attains at best."""

    bytes_per_s: float
    products_per_s: float  # multiply-adds


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step cannot do without."""

    num_bytes: int
    num_products: int

    def seconds(self, peaks: Peaks) -> float:
        return max(self.num_bytes / peaks.bytes_per_s, self.num_products / peaks.products_per_s)


def step_cost(work: Workload, plan: StepPlan) -> StepCost:
    """Bytes read and multiply-adds of a plan. Draft rows are counted as a chain, layers as alike."""
    num_sampled = 0
    num_bytes = num_products = 0.0
    most = 0.0  # of the layers, that some row passes: their weights are read
    for step in plan.steps:
        rows = step.num_tokens + len(step.drafts)
        share = (step.layers[1] - step.layers[0]) / work.num_layers if step.layers is not None else 1.0
        most = max(most, share)
        num_sampled += step.sample * (1 + len(step.drafts))
        num_products += share * rows * work.layer_products
        for layers in work.attention:
            seen, pairs = _visible(step.start, rows, layers.window)
            num_bytes += share * seen * layers.kv_bytes
            num_products += share * pairs * layers.products
    num_bytes += most * work.layer_bytes + (work.head_bytes if num_sampled else 0)
    num_products += num_sampled * work.head_products
    return StepCost(num_bytes=round(num_bytes), num_products=round(num_products))


def _visible(start: int, rows: int, window: int) -> tuple[int, int]:
    """Kv indices that rows start.. of one sequence see together, and pairs of a row and an index that it sees."""
    end = start + rows
    if window <= 0 or end <= window:
        return end, rows * start + rows * (rows + 1) // 2
    whole = max(0, window - start)  # rows that see everything before them
    return min(end, window + rows - 1), whole * start + whole * (whole + 1) // 2 + (rows - whole) * window


def phase(steps: list[SequenceStep]) -> str:
    """ "decode": one known token a sequence; "prefill": chunks alone; "mixed": both."""
    chunks = sum(step.num_tokens > 1 for step in steps)
    return "decode" if not chunks else "prefill" if chunks == len(steps) else "mixed"


class Roofline:
    """Sums of bound and real time by phase, the old ones fading."""

    def __init__(self, work: Workload, peaks: Peaks) -> None:
        self.work = work
        self.peaks = peaks
        self._sums: dict[str, tuple[float, float]] = {}

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A landed step that took `seconds`."""
        if not plan.steps or seconds <= 0:
            return
        name = phase(plan.steps)
        bound, real = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (bound * _KEEP + step_cost(self.work, plan).seconds(self.peaks), real * _KEEP + seconds)

    def fractions(self) -> dict[str, float]:
        """Bound over real time of each phase that occurred, 0 to about 1."""
        return {name: bound / real for name, (bound, real) in self._sums.items()}


def measure_peaks(
    weights: Sequence[torch.Tensor], *, quantized: bool, device: str, clock: Callable[[], float] = time.perf_counter
) -> Peaks:
    """Reads `weights` (or a buffer, where they might fit a cache) and multiplies square matrices, also int8 where the weights
    are quantized; the best of each counts. Some 20 ms on two cores, 160 with AVX2 only: torch multiplies neither bf16 nor
    int8 there (seconds for such a matrix), so its fp32 and our own bytes show what the CPU can do.
    """
    on_cuda = device.startswith("cuda")

    def best(work: Callable[[], object], repeats: int) -> float:
        seconds = []
        for _ in range(repeats):
            began = clock()
            work()
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(clock() - began)
        return max(min(seconds), 1e-9)

    words = [t.view(torch.int32) for t in weights if t.is_contiguous() and t.shape[-1] * t.element_size() % 4 == 0]
    if sum(t.numel() for t in words) * 4 < _LEAST_READ:
        words = [torch.ones(_LEAST_READ // 4, dtype=torch.int32, device=device)]
    reading = best(lambda: [t.amax() for t in words], 3)
    size = 8192 if on_cuda else 1024
    has_dots = on_cuda or torch_multiplies_bf16()
    a = torch.ones(size, size, dtype=torch.bfloat16 if has_dots else torch.float32, device=device)
    multiplying = best(lambda: a @ a, 4)
    if quantized and has_dots:
        b = torch.ones(size, size, dtype=torch.int8, device=device)
        multiplying = min(multiplying, best(lambda: torch._int_mm(b, b), 4))
    elif quantized and has_byte_products():
        x, weight = a.bfloat16(), prepare(quantize_int8(a), torch.bfloat16)
        multiplying = min(multiplying, best(lambda: linear(x, weight), 4))
    return Peaks(bytes_per_s=sum(t.numel() for t in words) * 4 / reading, products_per_s=size**3 / multiplying)
