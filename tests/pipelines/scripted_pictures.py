"""A hub whose engine makes pictures by the scripted painter: the real engine, host and client around a model of nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from motet.engine.client import InlineClient
from motet.engine.config import HostConfig
from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.diffusion_load import PictureModel, start_engine
from motet.engine.errors import ModelNotFound
from motet.engine.painter import Rows
from motet.engine.picture_request import PictureRules
from motet.pipelines.hub import Hub

from ..engine.scripted_adapter import RULES, ScriptedPainter, StraightRun

MODEL = "scripted-pictures"


class PacedPainter(ScriptedPainter):
    """A pass takes at least `step_s` seconds; what is kept of passes and pictures tells who was computed."""

    def __init__(self, *, step_s: float = 0.0) -> None:
        super().__init__()
        self.step_s = step_s
        self.begun_from: list[torch.Tensor] = []  # pictures that were encoded

    def forward(self, rows: Rows) -> torch.Tensor:
        time.sleep(self.step_s)
        return super().forward(rows)

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        self.begun_from.append(pixels)
        return super().encode_image(pixels)


class Studio:
    """A hub and what is behind it."""

    def __init__(self, *, step_s: float = 0.0, rules: PictureRules = RULES) -> None:
        self.painter = PacedPainter()
        self.engines: list[DiffusionEngine] = []

        def build(name: str, config: HostConfig, report: Callable[[str], None]) -> DiffusionEngine:
            if name != MODEL:
                raise ModelNotFound(f"no model {name!r}")
            model = PictureModel(
                family="scripted", painter=self.painter, rules=rules, begin_solver=StraightRun, dtype="float32",
                weight_bytes=1,
            )  # fmt: skip
            self.engines.append(start_engine(name, Path("/nowhere"), model, max_step_rows=8, report=report))
            self.painter.batches.clear()
            self.painter.step_s = step_s
            return self.engines[-1]

        self.hub = Hub(HostConfig(), client=InlineClient(HostConfig(), build=build))

    @property
    def engine(self) -> DiffusionEngine:
        return self.engines[-1]

    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        engine = self.engine
        return not (engine.num_requests() or engine.planner.num_rows or engine.planner.num_waiting)
