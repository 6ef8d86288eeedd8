"""Which batch an engine starts with, and that it starts warm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from motet.engine.diffusion_load import PictureModel, best_rows, start_engine
from motet.engine.errors import ModelLoadError
from motet.engine.step_cache import CacheConfig
from motet.engine.types import Done

from .scripted_adapter import RULES, ScriptedPainter, StraightRun, ends, request, run


def model(painter: ScriptedPainter) -> PictureModel:
    return PictureModel(
        family="scripted", painter=painter, rules=RULES, begin_solver=StraightRun, dtype="float32", weight_bytes=1
    )


def test_rows_are_doubled_while_it_pays() -> None:
    assert best_rows(lambda rows: 0.01 + 0.001 * rows, most=64, limit_s=1.0) == 64
    assert best_rows(lambda rows: 0.01 * rows, most=64, limit_s=1.0) == 1  # bound by arithmetic: nothing won
    assert best_rows(lambda rows: 0.01 + 0.001 * rows, most=64, limit_s=0.03) == 16
    assert best_rows(lambda rows: 0.01 * max(4, rows), most=64, limit_s=1.0) == 4
    assert best_rows(lambda rows: 9.0, most=1, limit_s=1.0) == 1


def test_an_engine_starts_warm_and_clean() -> None:
    painter = ScriptedPainter()
    phases: list[str] = []
    ticks = iter(range(10**9))
    one = start_engine(
        "fake", Path("/nowhere"), model(painter), report=phases.append, clock=lambda: next(ticks) * 1e-6, max_rows=8
    )
    assert phases == ["warm-up", "ready"] and "decode ends" in painter.log and painter.batches
    assert one.info.kind == "image" and one.info.extra["sizes"] == [[16, 16], [32, 16]]
    assert one.info.extra["step_rows"] == 8  # by this clock every pass takes as long
    assert one.stats()["pictures"] == one.stats()["requests"] == 0
    assert isinstance(ends(run(one, request("a")))["a"], Done)
    one.close()


def test_a_model_that_cannot_make_a_picture_does_not_load() -> None:
    class Broken(ScriptedPainter):
        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            if self.batches and len(self.batches) > 1:
                raise RuntimeError("no picture")
            return super().decode(latents)

    with pytest.raises(RuntimeError, match="no picture"):
        start_engine("fake", Path(), model(Broken()), max_step_rows=2)
    tea = CacheConfig(policy="teacache", threshold=0.1, coefficients=(0.0,) * 5)
    few = replace(model(ScriptedPainter()), rules=replace(RULES, sigmas=(1.0, 0.5)))
    with pytest.raises(ModelLoadError):
        start_engine("fake", Path(), few, cache=tea, max_step_rows=2)
