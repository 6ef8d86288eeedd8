"""The device arbiter: whose step runs next on one device. Plain policy, the clock is handed in.

Earliest deadline over audio that is due, then the best priority, then fair share in device-seconds. An engine that comes
back from idleness starts at the share of the least served active one, so that it neither starves others nor waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Voice(Protocol):
    """What the arbiter asks of an engine."""

    def has_work(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def best_priority(self) -> int: ...


@dataclass(kw_only=True)
class Choice:
    """`name`'s step runs next; `slack_s` is the time until somebody else's audio is due, None = unbounded."""

    name: str
    slack_s: float | None


class DeviceArbiter:
    """Chooses among named engines; `charge` tells it what a step cost."""

    def __init__(self, *, urgent_s: float = 0.25, weights: dict[str, float] | None = None) -> None:
        self._urgent_s = urgent_s  # a deadline nearer than this goes before everything else
        self._weights = weights or {}
        self._used: dict[str, float] = {}
        self._active: set[str] = set()

    def choose(self, engines: dict[str, Voice], now: float) -> Choice | None:
        """The next engine, or None when nobody has work."""
        working = {name: engine for name, engine in engines.items() if engine.has_work()}
        if not working:
            self._active.clear()
            return None
        self._welcome(set(working))
        due = {name: deadline for name, engine in working.items() if (deadline := engine.next_deadline()) is not None}
        urgent = {name: deadline for name, deadline in due.items() if deadline - now <= self._urgent_s}
        if urgent:
            name = min(urgent, key=lambda n: (urgent[n], n))
        else:
            name = min(working, key=lambda n: (working[n].best_priority(), self._used.get(n, 0.0), n))
        others = [deadline for other, deadline in due.items() if other != name]
        slack = max(0.0, min(others) - now) if others else None
        return Choice(name=name, slack_s=slack)

    def charge(self, name: str, seconds: float) -> None:
        """Add a step's device time to an engine's share."""
        self._used[name] = self._used.get(name, 0.0) + seconds / self._weights.get(name, 1.0)

    def forget(self, name: str) -> None:
        """An engine is gone."""
        self._used.pop(name, None)
        self._active.discard(name)

    def _welcome(self, working: set[str]) -> None:
        """Lift the share of engines that were idle to the least share among the active ones."""
        floor = min((self._used.get(name, 0.0) for name in self._active & working), default=None)
        for name in working - self._active:
            if floor is not None:
                self._used[name] = max(self._used.get(name, 0.0), floor)
        self._active = working
