"""The table of a step's time: exact sums on a scripted clock, every part found on a real engine, nothing when off."""

from __future__ import annotations

import io
from typing import Any

import pytest

from motet.engine.step_profile import ORDER, StepProfile, profile_if_asked
from motet.engine.types import SequenceStep, StepPlan

from .. import tiny


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def plan(*counts: int) -> StepPlan:
    return StepPlan(
        step=0, steps=[SequenceStep(slot=i, start=0, num_tokens=n, sample=True) for i, n in enumerate(counts)]
    )


def test_a_part_s_time_is_its_own() -> None:
    clock = Clock()
    profile = StepProfile(clock=clock)
    inner = profile.timed("attention", lambda: clock.spend(3.0))

    def work() -> None:
        clock.spend(1.0)
        inner()
        profile.add("qkv", 0.5)
        clock.spend(2.0)

    step = profile.timed("rest", work)
    for counts in ((1, 1), (1,)):
        profile.begin(plan(*counts))
        step()
        profile.end()
    profile.begin(plan(7, 1))
    step()
    profile.end()
    step()  # a step without work counts nowhere
    profile.end()
    assert profile.totals == {
        "decode": {"attention": 6.0, "qkv": 1.0, "rest": 5.0},
        "mixed": {"attention": 3.0, "qkv": 0.5, "rest": 2.5},
    }
    assert profile.num_steps == {"decode": 2, "mixed": 1} | {k: 0 for k in profile.num_steps if k == "prefill"}
    table = profile.table().splitlines()
    assert table[1].split() == ["qkv", "500000", "8.3", "500000", "8.3"]
    assert table[2].split() == ["attention", "3000000", "50.0", "3000000", "50.0"]
    assert table[4].split() == ["step", "6000000", "100.0", "6000000", "100.0"]
    assert table[6].split() == ["tokens/step", "1.5", "8.0"]


def test_a_part_that_raises_is_closed() -> None:
    clock = Clock()
    profile = StepProfile(clock=clock)

    def fail() -> None:
        clock.spend(1.0)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        profile.timed("rest", profile.timed("head", fail))()
    profile.timed("rest", lambda: clock.spend(2.0))()
    profile.begin(plan(1))
    profile.end()
    assert profile.totals["decode"] == {"head": 1.0, "rest": 2.0}


def test_off_it_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("MOTET_PROFILE", value)
        engine = tiny.engine()
        before = dict(vars(engine))
        assert profile_if_asked(engine) is None
        assert dict(vars(engine)) == before and "step" not in before
        engine.close()
    monkeypatch.setenv("MOTET_PROFILE", "yes")
    with pytest.raises(ValueError, match="MOTET_PROFILE"):
        tiny.engine()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # layer by layer, and all layers in one call
def test_every_part_of_an_engine_shows(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    from motet.models import decoder, layers

    for module in (decoder, layers):  # what is wrapped for the whole process is put back afterwards
        for name in ("paged_attention", "rotary_store_kv", "store_kv", "multiply_gate", "activate"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    for name in ("rms_norm", "rms_norm_residual", "layer_norm"):
        monkeypatch.setattr(layers, name, getattr(layers, name))
    config: dict[str, Any] = {"dtype": dtype, "deterministic": False}
    plain = tiny.one(tiny.engine(**config), tiny.request(tiny.prompt(20), max_tokens=8, ignore_eos=True))
    engine = tiny.engine(**config)
    monkeypatch.setenv("MOTET_PROFILE", "4")
    out = io.StringIO()
    profile = profile_if_asked(engine, out=out)
    assert profile is not None
    assert tiny.one(engine, tiny.request(tiny.prompt(20), max_tokens=8, ignore_eos=True)) == plain
    assert set(profile.totals["decode"]) == set(ORDER)
    assert profile.num_steps == {"prefill": 1, "decode": 7} | {k: 0 for k in profile.num_steps if k == "mixed"}
    assert out.getvalue().count("tokens/step") == 2  # after four steps and after eight
    engine.close()
    assert out.getvalue().count("tokens/step") == 3
