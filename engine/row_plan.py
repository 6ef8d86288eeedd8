"""Which pictures take the next denoise step: pure policy over costs, without tensors or clocks.

A *unit* is one picture: one row per guidance branch. Units with the same batch key (size, conditioning structure) can share a
forward pass. Two decisions are made here, both between steps:

- `admit`: which waiting units join. A unit joins when its key's batch has room for its cost, or is empty; all running units
  together hold at most `max_rows` rows. Within a key nobody is overtaken, and nobody passes one whom only `max_rows` keeps
  out, so that a large picture is not starved by small ones.
- `next_step`: which key runs, by deficit round robin in units of cost (Shreedhar & Varghese, 1995), so that keys get equal
  shares of the device however much one of their steps costs. Better priorities run before worse ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One picture. `cost` is that of all its rows in one step, in any unit of its own (see `Adapter.cost`)."""

    name: Any  # hashable, the caller's own
    key: Hashable
    rows: int
    cost: float
    priority: int = 0
    order: tuple[float, int] = (math.inf, 0)  # among equal priorities: the smallest first

    @property
    def rank(self) -> tuple[int, tuple[float, int]]:
        return (self.priority, self.order)


@dataclass(eq=False)
class _Lane:
    """The running units of one key. `deficit` is the cost that it may still run for."""

    key: Hashable
    units: dict[Hashable, Unit]
    stepped: dict[Hashable, int]  # by unit: when it was last stepped
    deficit: float = 0.0

    @property
    def priority(self) -> int:
        return min(unit.priority for unit in self.units.values())

    def batch(self, most: float) -> list[Unit]:
        """The best by priority, then those that have waited longest, within `most`; at least one."""
        chosen: list[Unit] = []
        cost = 0.0
        for unit in sorted(self.units.values(), key=lambda u: (u.priority, self.stepped[u.name], u.order)):
            if chosen and cost + unit.cost > most:
                continue
            chosen.append(unit)
            cost += unit.cost
        return chosen


class RowPlanner:
    """Waiting and running units. `max_step_cost` bounds a step's batch (a lone unit may exceed it), `max_rows` all of them."""

    def __init__(self, *, max_step_cost: float, max_rows: int) -> None:
        if not max_step_cost > 0 or max_rows < 1:
            raise ValueError(f"expected a positive cost and 1 or more rows, got {max_step_cost} and {max_rows}")
        self.max_step_cost = max_step_cost
        self.max_rows = max_rows
        self._waiting: dict[Hashable, Unit] = {}
        self._lanes: dict[Hashable, _Lane] = {}  # in the order of their turns
        self._running: dict[Hashable, Unit] = {}
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_rows(self) -> int:
        """Rows of the running units."""
        return sum(unit.rows for unit in self._running.values())

    def add(self, unit: Unit) -> None:
        """A new unit waits. Its name must be new."""
        assert unit.name not in self._waiting and unit.name not in self._running
        self._waiting[unit.name] = unit

    def remove(self, name: Hashable) -> None:
        """A unit has ended, wherever it was; unknown names are ignored."""
        self._waiting.pop(name, None)
        unit = self._running.pop(name, None)
        if unit is None:
            return
        lane = self._lanes[unit.key]
        del lane.units[name], lane.stepped[name]
        if not lane.units:  # as DRR has it: who has nothing to run keeps no credit
            del self._lanes[unit.key]

    def admit(self) -> list[Unit]:
        """Units that join now; they are running from here on."""
        joined: list[Unit] = []
        closed: set[Hashable] = set()
        rows = self.num_rows
        for unit in sorted(self._waiting.values(), key=lambda u: u.rank):
            if unit.key in closed:
                continue
            lane = self._lanes.get(unit.key)
            if lane is not None and sum(u.cost for u in lane.units.values()) + unit.cost > self.max_step_cost:
                closed.add(unit.key)
                continue
            if self._running and rows + unit.rows > self.max_rows:
                break
            rows += unit.rows
            del self._waiting[unit.name]
            if lane is None:
                lane = self._lanes[unit.key] = _Lane(unit.key, {}, {})
            lane.units[unit.name] = self._running[unit.name] = unit
            lane.stepped[unit.name] = -1
            joined.append(unit)
        return joined

    def next_step(self, most: float | None = None) -> list[Unit]:
        """The units that take the next step, all of one key; empty when none is running. `most` bounds this step's cost too."""
        if not self._lanes:
            return []
        most = self.max_step_cost if most is None else min(most, self.max_step_cost)
        best = min(lane.priority for lane in self._lanes.values())
        lanes = [lane for lane in self._lanes.values() if lane.priority == best]
        batches = {lane.key: lane.batch(most) for lane in lanes}
        costs = {key: sum(unit.cost for unit in batch) for key, batch in batches.items()}
        # Rounds of the robin until a lane may run; whole rounds are skipped at once, which is what makes this exact and cheap.
        quantum = max(min(costs.values()), 1e-9)
        rounds = {lane.key: max(0, math.ceil((costs[lane.key] - lane.deficit) / quantum - 1e-9)) for lane in lanes}
        chosen = min(lanes, key=lambda lane: rounds[lane.key])  # the first in turn among equals
        for lane in lanes:
            lane.deficit += rounds[chosen.key] * quantum
        chosen.deficit = max(0.0, chosen.deficit - costs[chosen.key])
        self._lanes[chosen.key] = self._lanes.pop(chosen.key)  # its turn is over
        self._num_steps += 1
        for unit in batches[chosen.key]:
            chosen.stepped[unit.name] = self._num_steps
        return batches[chosen.key]
