"""Training against the clock, for the parts of the demo picture model: budgets in minutes, checkpoints, going on."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CHECKPOINT_S = 300.0
LONGEST_STEP_S = 5.0  # what a step takes longer does not count: the process was stopped, or torch.compile at work
LOG_S = 20.0


class Stage:
    """A network that trains until its minutes are spent: warm-up, cosine, clipping, a mean of the weights, checkpoints.

    `FOLDER/name.ckpt` holds everything needed to go on; a stage whose minutes are spent returns at once from `run`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        network: nn.Module,
        *,
        minutes: float,
        rate: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        mean_decay: float = 0.999,
        warm_up: int = 150,
    ) -> None:
        self.name, self.path, self.network = name, folder / f"{name}.ckpt", network
        self.budget_s, self.rate, self.mean_decay, self.warm_up = minutes * 60, rate, mean_decay, warm_up
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=True)
        self.steps, self.seen, self.spent_s = 0, 0, 0.0
        self.mean = {key: value.detach().clone() for key, value in network.state_dict().items()}
        if self.path.is_file():
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.mean = {key: value.to(self.mean[key].device) for key, value in state["mean"].items()}
            self.steps, self.seen, self.spent_s = state["steps"], state["seen"], state["spent_s"]
            print(f"{name} goes on after {self.spent_s:.0f} s, {self.steps} steps", flush=True)

    @property
    def share(self) -> float:
        """Of the minutes, what is spent: 0..1 and a little more at the end."""
        return self.spent_s / self.budget_s if self.budget_s else 1.0

    def run(
        self,
        step: Callable[[], tuple[Tensor, int]],
        *,
        until: Callable[[], bool] | None = None,
        watch: Callable[[], str] | None = None,
        watch_s: float = 120.0,
    ) -> None:
        """Steps until the minutes are spent.

        Args:
            step: gives a loss and how many pictures it is the mean of.
            until: ends it earlier where it says so, for good.
            watch: gives a line to log, about every `watch_s` seconds; its time does not count.
        """
        last = saved = time.monotonic()
        logged, watched = self.spent_s, self.spent_s
        total, count, seen = 0.0, 0, self.seen
        while self.share < 1:
            falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, self.share - 0.15) / 0.85)))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (self.steps + 1) / self.warm_up) * falling
            loss, pictures = step()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self.seen += pictures
            self._follow()
            total, count = total + float(loss.detach()), count + 1
            now = time.monotonic()
            self.spent_s += min(now - last, LONGEST_STEP_S)
            last = now
            if until is not None and until():
                self.spent_s = max(self.spent_s, self.budget_s)
            if self.spent_s - logged > LOG_S:
                print(
                    f"{self.name} {self.spent_s:.0f} s step {self.steps} pictures {self.seen} loss {total / count:.4f} "
                    f"{(self.seen - seen) / (self.spent_s - logged):.0f} pictures/s",
                    flush=True,
                )
                total, count, seen, logged = 0.0, 0, self.seen, self.spent_s
            if watch is not None and self.spent_s - watched > watch_s:
                print(f"{self.name} {self.spent_s:.0f} s {watch()}", flush=True)
                watched, last = self.spent_s, time.monotonic()
            if time.monotonic() - saved > CHECKPOINT_S:
                self.save()
                saved = last = time.monotonic()
        self.save()

    @torch.no_grad()
    def _follow(self) -> None:
        """The mean of the weights: young at first, so that it forgets the start."""
        decay = min(self.mean_decay, (1 + self.steps) / (20 + self.steps))
        state = self.network.state_dict()
        floating = [key for key, value in state.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.mean[key] for key in floating], [state[key] for key in floating], 1 - decay)

    def averaged(self) -> nn.Module:
        """A copy of the network with the mean of its weights, for use."""
        network = copy.deepcopy(self.network)
        network.load_state_dict(self.mean)
        return network.eval().requires_grad_(False)

    def save(self) -> None:
        state: Mapping[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean,
            "steps": self.steps,
            "seen": self.seen,
            "spent_s": self.spent_s,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").rename(self.path)
