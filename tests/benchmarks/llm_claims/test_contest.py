"""Turns: everybody does the same work in alternating order, whoever fails drops out, the best peer is found."""

from __future__ import annotations

import dataclasses

import pytest

from motet.benchmarks.llm_claims import setting as shared
from motet.benchmarks.llm_claims.contest import OURS, Contestant, Event, Outcome, compete
from motet.benchmarks.llm_claims.setting import REHEARSAL, Setting
from motet.benchmarks.peer_worker import PeerError
from motet.engine.config import EngineConfig


class Clockwork:
    """A contestant with a fixed speed that writes down its work; fails at the turn `until`."""

    def __init__(self, name: str, rate: float, diary: list[tuple[str, object]], until: int = 99) -> None:
        self.name = f"{name} 1.0"
        self.key = name
        self.rate = rate
        self._diary = diary
        self._until = until

    def cpu_s(self) -> float:
        return 0.0

    def streams(self, prompts: list[list[int]], max_tokens: int) -> float:
        self._until -= 1
        if self._until < 0:
            raise PeerError(f"{self.key} is out of breath")
        self._diary.append((self.key, prompts[0][0]))
        return self.rate

    def seconds(self, prompt: list[int], max_tokens: int) -> float:
        return max_tokens / self.rate


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SETTLE_S", 0.0)


def streams(who: Contestant, number: int) -> float:
    return who.streams([[number]], 1)


def contest(failing: int = 99) -> tuple[Outcome, list[tuple[str, object]]]:
    diary: list[tuple[str, object]] = []
    contestants: dict[str, Contestant] = {
        "slow": Clockwork("slow", 10.0, diary),
        "fast": Clockwork("fast", 30.0, diary, failing),
        OURS: Clockwork(OURS, 20.0, diary),
    }
    events = [
        Event(name="streams", measure=streams),
        Event(name="alone", measure=lambda who, _: who.seconds([], 1), who=frozenset({OURS}), repeats=2),
    ]
    return compete(contestants, events, rounds=3), diary


def test_everybody_does_the_same_work_in_alternating_order() -> None:
    outcome, diary = contest()
    assert [who for who, _ in diary] == ["slow", "fast", OURS, OURS, "fast", "slow", "slow", "fast", OURS]
    assert [work for _, work in diary] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert outcome.best_peer("streams") == "fast"
    assert outcome.median("streams", OURS) == 20.0 and outcome.runs("streams") == 3
    assert outcome.runs("alone") == 6 and outcome.median("alone", "fast") is None and outcome.best_peer("alone") is None
    assert outcome.told("streams") == "slow 10.0; fast 30.0" and outcome.lost == {}


def test_a_peer_that_fails_on_the_way_drops_out_with_its_figures() -> None:
    outcome, diary = contest(failing=1)
    assert [who for who, _ in diary].count("fast") == 1
    assert outcome.best_peer("streams") == "slow" and outcome.median("streams", "fast") is None
    assert outcome.lost == {"fast": "fast is out of breath"}
    assert "fast missing: fast is out of breath" in outcome.told("streams")
    assert outcome.runs("streams", "slow") == 3


def test_prompts_differ_within_a_turn_and_between_turns_and_may_be_longer_than_the_text() -> None:
    setting = Setting(
        model="m", path=shared.Path("m"), text=list(range(1000)), engine=EngineConfig(), threads=1, peers=(),
        sizes=dataclasses.replace(REHEARSAL, num_streams=4, num_prompt=16),
    )  # fmt: skip
    two = [tuple(prompt) for turn in (0, 1) for prompt in setting.prompts(turn)]
    assert len(set(two)) == 8 and all(len(prompt) == 16 for prompt in two)
    assert len(setting.prompts(0, 3)) == 3
    long = setting.slice(0, 2500)
    assert len(long) == 2500 and long[:1000] == long[1000:2000] == list(range(1000))
