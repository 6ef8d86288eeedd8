"""Decisions of the step caches against plain loops, and that rows never influence each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from motet.engine.errors import ModelLoadError
from motet.engine.painter import Rows
from motet.engine.step_cache import (
    CacheConfig,
    Calibrator,
    RowCache,
    cached_forward,
    change,
    check_cache,
    polynomial,
    row_cache,
    schedule_mask,
)
from motet.engine.types import Done

from .scripted_adapter import RULES, ScriptedPainter, ends, engine, request, run

TEA = CacheConfig(policy="teacache", threshold=0.15, coefficients=(0.0, 0.0, 1.0, 0.5, 0.0))
FIRST = CacheConfig(policy="first_block", threshold=0.08)


def rows_at(painter: ScriptedPainter, latents: torch.Tensor, prompts: list[str], times: list[float]) -> Rows:
    return Rows(
        latents=latents,
        times=torch.tensor(times),
        guidance=torch.ones(len(prompts)),
        conds=[painter._cond(prompt) for prompt in prompts],
        width=16,
        height=16,
    )


def trajectory(seed: int, num_steps: int) -> torch.Tensor:
    """[num_steps, 2, 2, 2]: latents that change fast, slowly, and fast again."""
    generator = torch.Generator().manual_seed(seed)
    start, drift = torch.randn(2, 2, 2, 2, generator=generator)
    speed = [0.2 * math.cos(3 * step / num_steps + seed) ** 2 for step in range(num_steps)]
    return torch.stack([start + drift * sum(speed[: step + 1]) for step in range(num_steps)])


def reference(painter: ScriptedPainter, config: CacheConfig, prompt: str, path: torch.Tensor) -> tuple[Any, Any]:
    """The published loop for one row: its decisions and predictions."""
    decisions, predictions = [], []
    total, skips = 0.0, 0
    before = residual = None
    for step, latents in enumerate(path):
        trunk = painter.begin(rows_at(painter, latents[None], [prompt], [1 - step / len(path)]))
        start = trunk.hidden
        if config.policy == "teacache":
            signal = trunk.hidden + trunk.shift[:, None]
        else:
            trunk = painter.blocks(trunk, 0, 1)
            signal = trunk.hidden - start
            start = trunk.hidden
        compute = step in (0, len(path) - 1)
        if not compute:
            d = ((signal - before).abs().mean() / before.abs().mean()).item()
            if config.policy == "teacache":
                c = config.coefficients
                total += c[0] * d**4 + c[1] * d**3 + c[2] * d**2 + c[3] * d + c[4]
                compute = total >= config.threshold
            else:
                compute = d > config.threshold
            compute = compute or skips >= config.max_skips
        if compute:
            total, skips = 0.0, 0
            out = painter.blocks(trunk, trunk.done, None).hidden
            residual = out - start
        else:
            skips += 1
            out = start + residual
        if compute or config.policy == "teacache":
            before = signal
        decisions.append(compute)
        predictions.append(painter.finish(trunk, out)[0])
    return decisions, torch.stack(predictions)


@pytest.mark.parametrize("config", [TEA, FIRST], ids=["teacache", "first_block"])
def test_batched_decisions_are_those_of_the_reference_loop(config: CacheConfig) -> None:
    painter = ScriptedPainter()
    prompts = ["a cat", "one small red apple", "car", "blue"]
    num_steps = 24
    paths = [trajectory(seed, num_steps) for seed in range(4)]
    caches = [RowCache(config, num_steps) for _ in prompts]
    predictions: list[list[torch.Tensor]] = [[] for _ in prompts]
    for tick in range(num_steps + 9):  # row r joins at tick 3 r, so that rows are at different steps
        present = [r for r in range(4) if 0 <= tick - 3 * r < num_steps]
        if not present:
            continue
        latents = torch.stack([paths[r][tick - 3 * r] for r in present])
        times = [1 - (tick - 3 * r) / num_steps for r in present]
        rows = rows_at(painter, latents, [prompts[r] for r in present], times)
        out = cached_forward(painter, rows, [caches[r] for r in present])
        for r, row in zip(present, out):
            predictions[r].append(row)
    skipped = set()
    for r, prompt in enumerate(prompts):
        decisions, expected = reference(painter, config, prompt, paths[r])
        assert caches[r].decisions == decisions
        skipped.add(decisions.count(False))
        torch.testing.assert_close(torch.stack(predictions[r]), expected, rtol=0, atol=1e-5)
    assert min(skipped) >= 3 and len(skipped) > 1  # the rows are told apart


def test_blocks_run_for_computed_rows_only() -> None:
    painter = ScriptedPainter()
    caches = [RowCache(TEA, 20), RowCache(TEA, 20, mask=(True,) * 20)]
    latents = torch.randn(2, 2, 2, 2)
    for _ in range(3):
        cached_forward(painter, rows_at(painter, latents, ["a", "b"], [0.5, 0.5]), caches)
    assert painter.block_rows == [2, 1, 1] and caches[0].decisions == [True, False, False]


def test_a_change_that_is_not_a_number_computes_and_skips_are_bounded() -> None:
    cache = RowCache(CacheConfig(policy="first_block", threshold=1.0, max_skips=2), 20)
    cache.residual = torch.zeros(1)
    assert [cache.decide(d) for d in (None, 0.0, float("nan"), 0.0, 0.0, 0.0, float("inf"))] == [
        *(True, False, True, False, False, True, True)
    ]


def test_a_planned_mask_is_the_loop_of_the_schedule() -> None:
    times = torch.linspace(1, 0, 30)
    signals = torch.stack([torch.cos(times * w) for w in (1.0, 2.0, 5.0)], dim=1)
    mask = schedule_mask(TEA, signals)
    total, expected = 0.0, [True]
    for step in range(1, 30):
        d = (signals[step] - signals[step - 1]).abs().mean() / signals[step - 1].abs().mean()
        total += polynomial(TEA.coefficients, d.item())
        compute = total >= TEA.threshold or step == 29
        total = 0.0 if compute else total
        expected.append(compute)
    assert list(mask) == expected and 0 < expected.count(False) < 28
    painter = ScriptedPainter()
    painter.indicator = None  # type: ignore[assignment]  # with a mask nobody looks
    cache = RowCache(TEA, 30, mask)
    for time in times.tolist():
        cached_forward(painter, rows_at(painter, torch.ones(1, 2, 2, 2), ["a"], [time]), [cache])
    assert tuple(cache.decisions) == mask
    with pytest.raises(ValueError, match="teacache"):
        schedule_mask(FIRST, signals)


@pytest.mark.parametrize("policy", ["teacache", "first_block"])
def test_threshold_0_is_off_bit_for_bit(policy: Any) -> None:
    off = CacheConfig(policy=policy, threshold=0.0)
    assert check_cache(off, few_step=True, has_blocks=False) is None and row_cache(off, 50) is None
    assert latents_of(off, 3) == latents_of(None, 3)


def latents_of(config: CacheConfig | None, count: int) -> list[list[float]]:
    """Final latents of `count` pictures made together, and how many rows were skipped."""
    one = engine(cache=config)
    found: dict[int, list[float]] = {}
    offer = one._offer_decoding

    def look(what: Any, tensor: torch.Tensor) -> Any:
        found[what.making.order.seeds[0]] = tensor.flatten().tolist()
        return offer(what, tensor)

    one._offer_decoding = look  # type: ignore[method-assign]
    prompts = ["a cat", "one small red apple", "car"]
    wanted = [request(f"r{i}", prompts[i], seed=i, num_steps=16 + i) for i in range(count)]
    assert {type(end) for end in ends(run(one, *wanted)).values()} == {Done}
    assert (one.counters.num_skipped_rows > 0) == (config is not None and config.on)
    one.close()
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("config", [TEA, FIRST], ids=["teacache", "first_block"])
def test_in_the_engine_neighbours_change_nothing_and_pictures_hardly(config: CacheConfig) -> None:
    together, alone, exact = latents_of(config, 3), latents_of(config, 1), latents_of(None, 1)
    torch.testing.assert_close(torch.tensor(together[0]), torch.tensor(alone[0]), rtol=0, atol=1e-5)
    assert alone != exact
    assert change(torch.tensor(alone[0]), torch.tensor(exact[0])) < 0.2


def test_a_bad_row_fails_alone_with_a_cache_too() -> None:
    one = engine(cache=TEA)
    events = run(one, request("a", num_steps=12), request("bad", "raise", num_steps=12))
    assert isinstance(ends(events)["a"], Done) and one.num_requests() == 0
    one.close()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="few steps"):
        engine(cache=TEA, rules=_few_step())
    with pytest.raises(ModelLoadError, match="block by block"):
        check_cache(TEA, few_step=False, has_blocks=False)
    with pytest.raises(ModelLoadError, match="coefficients"):
        check_cache(CacheConfig(policy="teacache", threshold=0.1), few_step=False, has_blocks=True)
    for bad in ({"policy": "magic", "threshold": 0.1}, {"policy": "teacache", "threshold": float("nan")}):
        with pytest.raises(ValueError):
            CacheConfig(**bad)  # type: ignore[arg-type]
    assert row_cache(TEA, 4) is None  # short runs are computed whole


def _few_step() -> Any:
    import dataclasses

    return dataclasses.replace(RULES, sigmas=(1.0, 0.75, 0.5, 0.25))


def test_the_calibrator_finds_the_polynomial() -> None:
    wanted = (40.0, -12.0, 3.0, 0.5, 0.01)
    calibrator = Calibrator()
    for run_, start in enumerate((0.01, 0.02)):
        signal, output = torch.ones(4), torch.ones(6)
        calibrator.observe(run_, signal, output)
        for step in range(12):
            d = start + 0.015 * step
            signal, output = signal * (1 + d), output * (1 + polynomial(wanted, d))
            calibrator.observe(run_, signal, output)
    fitted = calibrator.fit()
    for d in (0.01, 0.05, 0.12, 0.18):
        assert polynomial(fitted, d) == pytest.approx(polynomial(wanted, d), rel=1e-2)
    with pytest.raises(ValueError, match="5 or more"):
        Calibrator().fit()
