"""Where the time of a step goes: `MOTET_PROFILE=1` prints one table to stderr, a column for each kind of step, every 2,000
steps and when the engine is closed (MOTET_PROFILE=N: every N steps).

Costs nothing when off: `profile_if_asked` looks at the environment once, after the engine is built, and then wraps the
parts of that engine. Every part's time is its own: what it spent inside another part is counted there. The whole-layer
op (models/layer_stack.py) measures itself and hands its parts in as nanoseconds.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from ..models import decoder, layers
from ..models.layer_stack import PARTS
from .types import StepPlan

EVERY = 2000  # steps between two tables

# The order of the table; parts that never ran are left out. `rest` is what no other part claims: Python between them.
ORDER = (
    "schedule", "inputs", "embed", *PARTS, "head", "sampling", "result", "land", "events", "rest"
)  # fmt: skip


class Profiled(Protocol):
    """What is profiled: an engine with its runner behind the executor."""

    scheduler: Any
    executor: Any

    def step(self, slack_s: float | None = None) -> list[Any]: ...
    def close(self) -> None: ...


class StepProfile:
    """Seconds by kind of step and part. `clock` gives seconds; tests script it."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stack: list[float] = []  # seconds that parts inside each open part have taken
        self._parts: dict[str, float] = defaultdict(float)  # of the step in progress
        self._shape = ("", 0, 0)  # kind, tokens and sequences of the step in progress
        self.totals: dict[str, dict[str, float]] = {}
        self.num_steps: dict[str, int] = defaultdict(int)
        self.num_tokens: dict[str, int] = defaultdict(int)
        self.num_seqs: dict[str, int] = defaultdict(int)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted under `part` without the parts called from within."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(0.0)
            began = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = self._clock() - began
                self._parts[part] += seconds - self._stack.pop()
                if self._stack:
                    self._stack[-1] += seconds

        return run

    def add(self, part: str, seconds: float) -> None:
        """Time that the part in progress has measured itself; it is taken off that part."""
        self._parts[part] += seconds
        if self._stack:
            self._stack[-1] += seconds

    def begin(self, plan: StepPlan) -> None:
        """Name the step in progress by its plan."""
        counts = [step.num_tokens for step in plan.steps]
        kind = "decode" if max(counts, default=0) <= 1 else "prefill" if min(counts) > 1 else "mixed"
        self._shape = (kind, sum(counts) + sum(len(step.drafts) for step in plan.steps), len(counts))

    def end(self) -> bool:
        """Book the step in progress; False for one without work, which counts nowhere."""
        kind, tokens, seqs = self._shape
        if seqs:
            totals = self.totals.setdefault(kind, defaultdict(float))
            for part, seconds in self._parts.items():
                totals[part] += seconds
            self.num_steps[kind] += 1
            self.num_tokens[kind] += tokens
            self.num_seqs[kind] += seqs
        self._parts.clear()
        self._shape = ("", 0, 0)
        return seqs > 0

    def table(self) -> str:
        """Microseconds per step and share of each part, a column per kind of step."""
        kinds = [kind for kind in ("decode", "prefill", "mixed") if self.num_steps[kind]]
        lines = [f"{'part':<12}" + "".join(f"{kind:>12}{'us':>8}{'%':>7}" for kind in kinds)]
        steps = {kind: self.num_steps[kind] for kind in kinds}
        whole = {kind: sum(self.totals[kind].values()) for kind in kinds}
        for part in (*ORDER, *sorted({p for kind in kinds for p in self.totals[kind]} - set(ORDER))):
            if any(part in self.totals[kind] for kind in kinds):
                line = f"{part:<12}"
                for kind in kinds:
                    seconds = self.totals[kind].get(part, 0.0)
                    line += f"{'':12}{seconds / steps[kind] * 1e6:8.0f}{100 * seconds / (whole[kind] or 1):7.1f}"
                lines.append(line)
        lines.append(f"{'step':<12}" + "".join(f"{'':12}{whole[k] / steps[k] * 1e6:8.0f}{100.0:7.1f}" for k in kinds))
        lines.append(f"{'steps':<12}" + "".join(f"{'':12}{steps[k]:8d}{'':7}" for k in kinds))
        for name, counts in (("tokens/step", self.num_tokens), ("seqs/step", self.num_seqs)):
            lines.append(f"{name:<12}" + "".join(f"{'':12}{counts[k] / steps[k]:8.1f}{'':7}" for k in kinds))
        return "\n".join(line.rstrip() for line in lines)


class _Timed:
    """A layer whose `forward` (and `forward_residual`) is timed; everything else is the layer's own."""

    def __init__(self, profile: StepProfile, part: str, inner: Any) -> None:
        self._inner = inner
        for name in ("forward", "forward_residual"):
            if hasattr(inner, name):
                setattr(self, name, profile.timed(part, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def profile_if_asked(engine: Profiled, *, out: TextIO | None = None) -> StepProfile | None:
    """Wrap the engine when MOTET_PROFILE asks for it. Call once, when the engine is warm. For an engine in one process."""
    asked = os.environ.get("MOTET_PROFILE", "0")
    if asked in ("", "0"):
        return None
    if not asked.isdecimal():
        raise ValueError(f"MOTET_PROFILE: expected 0, 1 or a number of steps, got {asked!r}")
    profile = StepProfile()
    _wrap(profile, engine, EVERY if asked == "1" else int(asked), out or sys.stderr)
    return profile


def _wrap(profile: StepProfile, engine: Any, every: int, out: TextIO) -> None:
    runner, scheduler = engine.executor.runner, engine.scheduler
    _wrap_model(profile, runner.model)
    scheduler.schedule = profile.timed("schedule", scheduler.schedule)
    scheduler.land = profile.timed("land", scheduler.land)
    engine._events = profile.timed("events", engine._events)
    for name, part in (("inputs", "inputs"), ("sample_rows", "sampling"), ("_finish", "result")):
        setattr(runner, name, profile.timed(part, getattr(runner, name)))
    launch, step = runner.launch, profile.timed("rest", engine.step)

    def launch_named(plan: StepPlan) -> Any:
        profile.begin(plan)
        return launch(plan)

    def print_table() -> None:
        if profile.num_steps:
            print(profile.table(), file=out, flush=True)

    def step_booked(slack_s: float | None = None) -> list[Any]:
        events: list[Any] = step(slack_s)
        if profile.end() and sum(profile.num_steps.values()) % every == 0:
            print_table()
        return events

    def close_and_print() -> None:
        print_table()
        close()

    runner.launch = launch_named
    engine.step, close, engine.close = step_booked, engine.close, close_and_print


def _wrap_model(profile: StepProfile, model: Any) -> None:
    """The parts of a decoder of ours; another model shows as a whole."""
    model.embed = profile.timed("embed", model.embed)
    model.logits = profile.timed("head", model.logits)
    if not isinstance(model, decoder.Decoder):
        model.forward = profile.timed("model", model.forward)
        return
    if model.stack is not None:
        model.stack.measure(profile.add)
        return
    for block in model.blocks:
        attention, mlp = block.attention, getattr(block, "mlp", None)
        attention.qkv = _Timed(profile, "qkv", attention.qkv)  # type: ignore[assignment]
        attention.out = _Timed(profile, "out", attention.out)  # type: ignore[assignment]
        if isinstance(mlp, decoder.MLP):
            mlp.up = _Timed(profile, "gate_up", mlp.up)  # type: ignore[assignment]
            mlp.down = _Timed(profile, "down", mlp.down)  # type: ignore[assignment]
    # Functions are wrapped where they are called from, for the whole process: a profiled process is for one engine.
    for module, name, part in (
        (decoder, "paged_attention", "attention"),
        (decoder, "rotary_store_kv", "rotary"),
        (decoder, "store_kv", "rotary"),
        (decoder, "multiply_gate", "activation"),
        (decoder, "activate", "activation"),
        (layers, "rms_norm", "norm"),
        (layers, "rms_norm_residual", "norm"),
        (layers, "layer_norm", "norm"),
    ):
        setattr(module, name, profile.timed(part, getattr(module, name)))
