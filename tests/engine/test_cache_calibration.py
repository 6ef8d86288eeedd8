"""The tool that fits TeaCache to a model: on a scripted painter whose blocks can be followed, and the file that it leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from motet.engine.cache_calibration import FILE, calibrate, measure, read_coefficients, write_coefficients
from motet.engine.config import HostConfig, PictureConfig
from motet.engine.diffusion_load import cache_config
from motet.engine.errors import ModelLoadError
from motet.engine.painter import BeginSolver, Rows
from motet.engine.picture_request import PictureRules
from motet.engine.step_cache import CacheConfig, change, polynomial

from .scripted_adapter import RULES, ScriptedPainter, StraightRun

PROMPTS = ("a red apple", "two cats on the left", "a rocket")


@dataclass(frozen=True, eq=False)
class Model:
    painter: ScriptedPainter
    rules: PictureRules = replace(RULES, num_steps=20)
    begin_solver: BeginSolver = StraightRun


def test_the_polynomial_says_how_far_the_output_moves() -> None:
    model = Model(ScriptedPainter())
    coefficients, pairs = calibrate(model, PROMPTS)
    assert len(pairs) == 3 * 2 * 19  # prompts, branches, neighbouring steps
    mean = sum(y for _, y in pairs) / len(pairs)
    unknown, left = (
        sum((y - mean) ** 2 for _, y in pairs),
        sum((y - polynomial(coefficients, x)) ** 2 for x, y in pairs),
    )
    assert left < 0.8 * unknown
    assert calibrate(model, PROMPTS) == (coefficients, pairs)  # nothing in it is left to chance


def test_pairs_are_of_one_picture_and_branch() -> None:
    """Against a loop written out by hand."""
    painter = ScriptedPainter()
    _, pairs = calibrate(Model(painter, rules=replace(RULES, num_steps=9, guidance_scale=1.0)), PROMPTS[:1], seed=4)
    latents = torch.randn(painter.latent_shape(16, 16), generator=torch.Generator().manual_seed(4))
    (cond,) = painter.encode(PROMPTS[:1])
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(9):
        rows = Rows(
            latents=latents[None],
            times=torch.tensor([1 - step / 9]),
            guidance=torch.ones(1),
            conds=[cond],
            width=16,
            height=16,
        )
        trunk = painter.begin(rows)
        past.append((painter.indicator(trunk)[0], painter.blocks(trunk, 0, None).hidden[0]))
        latents = latents - painter.forward(rows)[0] / 9
    wanted = [(change(b[0], a[0]).item(), change(b[1], a[1]).item()) for a, b in zip(past, past[1:])]
    assert torch.allclose(torch.tensor(pairs), torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_a_higher_threshold_leaves_out_more() -> None:
    model = Model(ScriptedPainter())
    coefficients, _ = calibrate(model, PROMPTS)
    configs = [CacheConfig(policy="teacache", threshold=t, coefficients=coefficients) for t in (1e-9, 0.05, 0.3)]
    found = measure(model, PROMPTS, configs, seed=50)
    (none, exact), (some, near), (most, far) = found
    assert none == exact == 0.0
    assert 0 < some < most < 1 and 0 < near < far


def test_models_without_a_use_for_it_are_refused() -> None:
    painter = ScriptedPainter()
    with pytest.raises(ModelLoadError, match="few steps"):
        calibrate(Model(painter, rules=replace(RULES, sigmas=(1.0, 0.5))), PROMPTS)
    with pytest.raises(ModelLoadError, match="block by block"):
        calibrate(Model(object()), PROMPTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from 9 on, got 4"):
        calibrate(Model(painter), PROMPTS, num_steps=4)
    with pytest.raises(ValueError, match="one or more"):
        calibrate(Model(painter), ())


def test_the_file_is_found_again(tmp_path: Path) -> None:
    assert read_coefficients(tmp_path) == ()
    coefficients = (1.5, -2.0, 0.25, 1e-3, 0.0)
    write_coefficients(tmp_path, coefficients, prompts=3)
    assert read_coefficients(tmp_path) == coefficients
    config = HostConfig(pictures=PictureConfig(image_cache="teacache", image_cache_threshold=0.1))
    cache = cache_config(config, tmp_path)
    assert cache is not None and cache.coefficients == coefficients and cache.threshold == 0.1
    own = PictureConfig(
        image_cache="teacache", image_cache_threshold=0.1, image_cache_coefficients=(0.0, 0.0, 0.0, 1.0, 0.0)
    )
    cache = cache_config(HostConfig(pictures=own), tmp_path)
    assert cache is not None and cache.coefficients == (0.0, 0.0, 0.0, 1.0, 0.0)
    first = cache_config(
        HostConfig(pictures=replace(own, image_cache="first_block", image_cache_coefficients=())), tmp_path
    )
    assert first is not None and first.coefficients == ()
    assert cache_config(HostConfig(), tmp_path) is None


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", "{}", '{"teacache": [1, 2, 3, 4]}', '{"teacache": [1, 2, 3, 4, "5"]}', '{"teacache": [1, 2, 3, 4, NaN]}',
     '{"teacache": [1, 2, 3, 4, true]}', json.dumps({"teacache": [1.0] * 30_000})],
)  # fmt: skip
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ModelLoadError, match=FILE):
        read_coefficients(tmp_path)
