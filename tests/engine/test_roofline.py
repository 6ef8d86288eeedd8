"""Bytes and products of steps, and the fraction of the machine's limits, in exact arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from motet.engine import roofline
from motet.engine.metrics import Metrics
from motet.engine.roofline import Peaks, Roofline, StepCost, measure_peaks, phase, step_cost
from motet.engine.types import SequenceStep, StepPlan
from motet.models.build import random_model
from motet.models.spec import AttentionWork, Workload

FULL = AttentionWork(window=0, kv_bytes=8, products=3)
WINDOW = AttentionWork(window=4, kv_bytes=100, products=1000)


def work(*attention: AttentionWork) -> Workload:
    return Workload(
        num_layers=2, layer_bytes=1000, layer_products=50, head_bytes=400, head_products=7, attention=attention
    )


def step(start: int, num_tokens: int, sample: bool = True, drafts: int = 0) -> SequenceStep:
    ids = list(range(drafts))
    return SequenceStep(
        slot=0, start=start, num_tokens=num_tokens, sample=sample, drafts=ids, parents=[i - 1 for i in ids]
    )


def plan(*steps: SequenceStep) -> StepPlan:
    return StepPlan(step=0, steps=list(steps))


def test_decode_reads_the_weights_once_and_each_context_once() -> None:
    cost = step_cost(work(FULL), plan(step(9, 1), step(19, 1)))
    assert cost == StepCost(num_bytes=1000 + 400 + (10 + 20) * 8, num_products=2 * (50 + 7) + (10 + 20) * 3)


def test_a_chunk_without_a_sample_needs_no_head() -> None:
    cost = step_cost(work(FULL), plan(step(10, 4, sample=False)))
    assert cost == StepCost(num_bytes=1000 + 14 * 8, num_products=4 * 50 + (11 + 12 + 13 + 14) * 3)


def test_rows_that_pass_some_layers_count_in_part() -> None:
    half = step(10, 4, sample=False)
    half.layers = (1, 2)
    cost = step_cost(work(FULL), plan(half))
    assert cost == StepCost(num_bytes=500 + 14 * 4, num_products=4 * 25 + (11 + 12 + 13 + 14) * 3 // 2)
    beside = step_cost(work(FULL), plan(step(9, 1), half))
    assert beside == StepCost(
        num_bytes=1400 + 10 * 8 + 14 * 4, num_products=57 + 30 + 4 * 25 + (11 + 12 + 13 + 14) * 3 // 2
    )


def test_drafts_are_rows_with_logits() -> None:
    cost = step_cost(work(FULL), plan(step(10, 1, drafts=2)))
    assert cost == StepCost(num_bytes=1400 + 13 * 8, num_products=3 * (50 + 7) + (11 + 12 + 13) * 3)


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("rows", range(1, 8))
def test_windows_count_what_is_seen(start: int, rows: int) -> None:
    sees = [{i for i in range(p + 1) if i > p - 4} for p in range(start, start + rows)]
    cost = step_cost(work(WINDOW), plan(step(start, rows, sample=False)))
    assert cost.num_bytes == 1000 + 100 * len(set().union(*sees))
    assert cost.num_products == 50 * rows + 1000 * sum(map(len, sees))


def test_the_slower_of_memory_and_arithmetic_bounds() -> None:
    peaks = Peaks(bytes_per_s=1000.0, products_per_s=10.0)
    assert StepCost(num_bytes=5000, num_products=20).seconds(peaks) == 5.0
    assert StepCost(num_bytes=1000, num_products=20).seconds(peaks) == 2.0


def test_fractions_by_phase() -> None:
    line = Roofline(work(), Peaks(bytes_per_s=1400.0, products_per_s=1e9))
    assert line.fractions() == {}
    for _ in range(3):
        line.observe(plan(step(5, 1)), 2.0)  # 1,400 bytes: at least one second
    line.observe(plan(step(0, 8, sample=False)), 10 / 1.4)
    line.observe(plan(step(5, 1), step(0, 8, sample=False)), 1.0)
    line.observe(plan(), 1.0)
    line.observe(plan(step(5, 1)), 0.0)
    assert line.fractions() == pytest.approx({"decode": 0.5, "prefill": 0.1, "mixed": 1.0})


def test_old_steps_fade() -> None:
    line = Roofline(work(), Peaks(bytes_per_s=1400.0, products_per_s=1e9))
    for seconds in [*[100.0] * 50, *[1.25] * 1000]:
        line.observe(plan(step(5, 1)), seconds)
    assert line.fractions()["decode"] == pytest.approx(0.8, rel=1e-3)


def test_phases() -> None:
    assert phase([step(5, 1), step(9, 1)]) == "decode"
    assert phase([step(5, 2), step(9, 30)]) == "prefill"
    assert phase([step(5, 1), step(9, 30)]) == "mixed"


def test_workload_of_a_decoder() -> None:
    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    model = random_model(config, dtype=torch.float32)
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 2 * 96 + 96 * 64
    assert model.workload(16 * 4) == Workload(
        num_layers=2,
        layer_bytes=2 * per_layer * 4,
        layer_products=2 * per_layer,
        head_bytes=96 * 64 * 4,
        head_products=96 * 64,
        attention=(AttentionWork(window=0, kv_bytes=2 * 2 * 2 * 16 * 4, products=2 * 2 * 4 * 16),),
    )
    assert random_model({**config, "model_type": "mixtral", "num_local_experts": 2}).workload(64) is None


def test_peaks_are_the_best_of_what_was_measured() -> None:
    times = itertools.chain([0, 4, 4, 5, 5, 8], [10, 12, 12, 13, 13, 16, 16, 18])
    weight = torch.ones(1 << 24, dtype=torch.int32)  # 64 MiB, read in 4, 1 and 3 s
    peaks = measure_peaks([weight], quantized=False, device="cpu", clock=lambda: float(next(times)))
    assert peaks == Peaks(bytes_per_s=float(64 << 20), products_per_s=1024.0**3)


@pytest.mark.parametrize("quantized", [False, True])
def test_peaks_of_a_cpu_that_multiplies_neither_bf16_nor_int8(monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    """With AVX2 alone torch takes seconds for such a matrix: a model's start shall not wait for that."""
    monkeypatch.setattr(roofline, "torch_multiplies_bf16", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    seen: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Watch():
        peaks = measure_peaks([torch.ones(8)], quantized=quantized, device="cpu")
    assert peaks.products_per_s > 0 and set(seen) == {torch.float32}


def test_it_is_a_metric() -> None:
    metrics = Metrics()
    metrics.set_engine_stats({"models": {"m": {"roofline": {"decode": 0.5, "mixed": 0.25}}}})
    text = metrics.render().decode()
    assert 'motet_roofline_fraction{model="m",phase="decode"} 0.5' in text
    assert 'motet_roofline_fraction{model="m",phase="mixed"} 0.25' in text
