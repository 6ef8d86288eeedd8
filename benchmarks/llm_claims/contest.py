"""Several engines, the same work, a turn each: who may take part, whose turn it is, what everybody's figures were."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from motet.benchmarks.motet_engine import MotetEngine
from motet.benchmarks.peer_worker import PeerError, PeerWorker

from . import setting as shared
from .setting import say

OURS = "ours"


class Contestant(Protocol):
    """An engine that can be asked for work."""

    @property
    def name(self) -> str: ...
    def cpu_s(self) -> float: ...

    def streams(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Tokens per second of all prompts at the same time, prefills included."""
        ...

    def seconds(self, prompt: list[int], max_tokens: int) -> float:
        """One prompt alone, to its last new token."""
        ...


class Peer:
    """Another engine's worker as a contestant. Its methods raise PeerError."""

    def __init__(self, worker: PeerWorker) -> None:
        self._worker = worker
        self.name = worker.name
        self.cpu_s = worker.cpu_s

    def streams(self, prompts: list[list[int]], max_tokens: int) -> float:
        answer = self._worker.ask({"cmd": "streams", "prompts": prompts, "max_tokens": max_tokens})
        self._check(answer, len(prompts) * max_tokens)
        return float(answer["tokens"]) / float(answer["seconds"])

    def seconds(self, prompt: list[int], max_tokens: int) -> float:
        answer = self._worker.ask({"cmd": "generate", "prompt": prompt, "max_tokens": max_tokens})
        self._check(answer, max_tokens)
        return float(answer["seconds"])

    def _check(self, answer: dict[str, object], expected: int) -> None:
        if answer.get("tokens") != expected:
            raise PeerError(f"{self.name} gave {answer.get('tokens')} tokens instead of {expected}")


class Ours:
    """Our engine as a contestant."""

    def __init__(self, engine: MotetEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.cpu_s = engine.cpu_s

    def streams(self, prompts: list[list[int]], max_tokens: int) -> float:
        return self._engine.streams(prompts, max_tokens)

    def seconds(self, prompt: list[int], max_tokens: int) -> float:
        return self._engine.one(prompt, max_tokens=max_tokens).seconds


@dataclass(frozen=True, kw_only=True)
class Event:
    """One discipline. `measure(contestant, number)` does the work of that number: the same for everybody."""

    name: str
    measure: Callable[[Contestant, int], float]
    unit: str = "tokens/s"
    who: frozenset[str] | None = None  # None: everybody
    repeats: int = 1  # per turn; each counts as a run


@dataclass(kw_only=True)
class Outcome:
    """Figures of each event and contestant, who dropped out and why, and how idle those without a turn were."""

    names: dict[str, str]
    figures: dict[str, dict[str, list[float]]]
    lost: dict[str, str] = field(default_factory=dict)
    idle: str = ""

    def median(self, event: str, key: str) -> float | None:
        found = self.figures.get(event, {}).get(key)
        return median(found) if found else None

    def runs(self, event: str, key: str = OURS) -> int:
        return len(self.figures.get(event, {}).get(key, ()))

    def best_peer(self, event: str) -> str | None:
        """Whose median is highest; None when no peer has one."""
        figures = {key: median(found) for key, found in self.figures.get(event, {}).items() if found and key != OURS}
        return max(figures, key=lambda key: figures[key], default=None)

    def told(self, event: str) -> str:
        """Medians of all peers, and who is missing."""
        parts = [
            f"{key} {median(found):.1f}" for key, found in self.figures.get(event, {}).items() if found and key != OURS
        ]
        return "; ".join([*parts, *(f"{key} missing: {why}" for key, why in self.lost.items())])


def compete(contestants: Mapping[str, Contestant], events: Sequence[Event], *, rounds: int) -> Outcome:
    """Let everybody have a turn per round at all events, in alternating order. A peer that fails drops out."""
    taking_part = dict(contestants)
    outcome = Outcome(
        names={key: contestant.name for key, contestant in contestants.items()},
        figures={event.name: {} for event in events},
    )
    idle = _Idle({key: contestant.cpu_s for key, contestant in contestants.items()})
    for turn in range(rounds):
        for key in list(taking_part) if turn % 2 == 0 else list(reversed(taking_part)):
            time.sleep(shared.SETTLE_S)
            try:
                with idle.turn_of(key):
                    _take_turn(outcome, key, taking_part[key], events, turn)
            except PeerError as error:
                outcome.lost[key] = str(error)
                for figures in outcome.figures.values():
                    figures.pop(key, None)
                idle.drop(key)
                del taking_part[key]
    outcome.idle = idle.told()
    return outcome


def _take_turn(outcome: Outcome, key: str, contestant: Contestant, events: Sequence[Event], turn: int) -> None:
    for event in events:
        if event.who is not None and key not in event.who:
            continue
        figures = outcome.figures[event.name].setdefault(key, [])
        for repeat in range(event.repeats):
            figures.append(event.measure(contestant, turn * event.repeats + repeat))
        shown = ", ".join(f"{value:.1f}" for value in figures[-event.repeats :])
        say(f"  round {turn + 1}: {key} {event.name} {shown} {event.unit}")


class _Idle:
    """CPU time that engines take while it is another one's turn."""

    def __init__(self, clocks: dict[str, Callable[[], float]]) -> None:
        self._clocks = clocks
        self._used = dict.fromkeys(clocks, 0.0)
        self._waited = dict.fromkeys(clocks, 0.0)

    @contextlib.contextmanager
    def turn_of(self, name: str) -> Iterator[None]:
        before = {other: clock() for other, clock in self._clocks.items() if other != name}
        began = time.perf_counter()
        yield
        for other, cpu_s in before.items():
            if other in self._clocks:
                self._used[other] += self._clocks[other]() - cpu_s
                self._waited[other] += time.perf_counter() - began

    def drop(self, name: str) -> None:
        self._clocks.pop(name, None)

    def told(self) -> str:
        shares = [
            f"{name} {100 * self._used[name] / waited:.1f} %" for name, waited in self._waited.items() if waited > 0
        ]
        return f"CPU of a core while idle: {', '.join(shares)}"
