"""Executors: where plans run. `launch(plan)` starts one, `handle.result()` waits for it; ranks decide nothing.

`InlineExecutor` calls the runner here; with a depth above 0 on a CPU it does so in one worker thread, so that the loop can
schedule the next plan meanwhile. `RankExecutor` (engine/parallel/) sends each plan to the other ranks as well.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from .model_runner import ModelRunner
from .types import StepPlan, StepResult


class Handle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised."""
        ...


class Executor(Protocol):
    def launch(self, plan: StepPlan) -> Handle: ...

    def call_all(self, verb: str, **arguments: Any) -> list[Any]:
        """Call a method of every rank's runner by name; results in rank order."""
        ...

    def health(self) -> None:
        """Raise EngineDead when a rank is gone."""
        ...

    def close(self) -> None: ...


class InlineExecutor:
    """The runner in this process."""

    def __init__(self, runner: ModelRunner, *, threaded: bool = False) -> None:
        self.runner = runner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="motet-step") if threaded else None

    def launch(self, plan: StepPlan) -> Handle:
        if self._pool is None:
            return self.runner.launch(plan)
        return self._pool.submit(self.runner.run, plan)

    def call_all(self, verb: str, **arguments: Any) -> list[Any]:
        if self._pool is None:
            return [getattr(self.runner, verb)(**arguments)]
        return [self._pool.submit(getattr(self.runner, verb), **arguments).result()]

    def health(self) -> None:
        """An inline runner is alive as long as this process is."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
