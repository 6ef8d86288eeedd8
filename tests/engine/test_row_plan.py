"""Who joins and who steps: shares by cost, order, bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from motet.engine.row_plan import RowPlanner, Unit


def unit(name: str, key: str = "a", cost: float = 1.0, rows: int = 1, priority: int = 0, order: int = 0) -> Unit:
    return Unit(name=name, key=key, rows=rows, cost=cost, priority=priority, order=(0.0, order))


def names(units: list[Unit]) -> list[object]:
    return [one.name for one in units]


def test_units_of_one_key_share_steps_up_to_the_cost() -> None:
    planner = RowPlanner(max_step_cost=3, max_rows=100)
    for index in range(5):
        planner.add(unit(f"u{index}", order=index))
    assert names(planner.admit()) == ["u0", "u1", "u2"]
    assert names(planner.next_step()) == ["u0", "u1", "u2"]
    planner.remove("u1")
    assert names(planner.admit()) == ["u3"]
    assert sorted(map(str, names(planner.next_step()))) == ["u0", "u2", "u3"]


def test_a_unit_above_the_budget_runs_alone() -> None:
    planner = RowPlanner(max_step_cost=3, max_rows=2)
    planner.add(unit("huge", cost=50, rows=4, order=0))
    planner.add(unit("small", order=1))
    assert names(planner.admit()) == ["huge"] and names(planner.next_step()) == ["huge"]
    assert planner.admit() == []
    planner.remove("huge")
    assert names(planner.admit()) == ["small"]


def test_keys_share_the_device_by_cost_not_by_steps() -> None:
    planner = RowPlanner(max_step_cost=10, max_rows=100)
    planner.add(unit("big", "big", cost=8))
    planner.add(unit("small", "small", cost=1))
    planner.add(unit("middle", "middle", cost=3))
    planner.admit()
    spent: Counter[str] = Counter()
    for _ in range(1200):
        (one,) = planner.next_step()
        spent[str(one.key)] += int(one.cost)
    assert max(spent.values()) - min(spent.values()) <= 2 * 8, spent


def test_a_big_key_waits_no_longer_than_its_share() -> None:
    planner = RowPlanner(max_step_cost=10, max_rows=100)
    planner.add(unit("big", "big", cost=8))
    planner.add(unit("small", "small", cost=1))
    planner.admit()
    steps = [names(planner.next_step())[0] for _ in range(60)]
    gaps = [b - a for a, b in zip(*(lambda at: (at, at[1:]))([i for i, name in enumerate(steps) if name == "big"]))]
    assert gaps and max(gaps) <= 9


def test_nobody_is_overtaken_within_a_key_or_at_the_limit_of_rows() -> None:
    planner = RowPlanner(max_step_cost=4, max_rows=4)
    planner.add(unit("running", cost=2, rows=2, order=0))
    planner.admit()
    planner.add(unit("large", cost=3, rows=2, order=1))
    planner.add(unit("tiny", cost=1, rows=1, order=2))
    assert planner.admit() == []  # tiny would fit beside, but came later
    planner.add(unit("other", "b", cost=1, rows=3, order=3))
    planner.add(unit("late", "c", cost=1, rows=1, order=4))
    assert planner.admit() == []  # `other` waits for rows, `late` does not pass it
    planner.remove("running")
    assert names(planner.admit()) == ["large", "tiny"]


def test_better_priority_first_and_it_joins_first() -> None:
    planner = RowPlanner(max_step_cost=1, max_rows=10)
    planner.add(unit("later", "a", order=0, priority=1))
    planner.add(unit("now", "b", order=1, priority=0))
    assert names(planner.admit()) == ["now", "later"]
    assert [names(planner.next_step()) for _ in range(3)] == [["now"]] * 3
    planner.remove("now")
    assert names(planner.next_step()) == ["later"]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_bounds_hold_and_all_finish(seed: int) -> None:
    rng = random.Random(seed)
    planner = RowPlanner(max_step_cost=6, max_rows=8)
    left: dict[object, int] = {}
    for index in range(60):
        name = f"u{index}"
        left[name] = rng.randint(1, 6)
        planner.add(unit(name, rng.choice("abc"), rng.choice([1.0, 2.0, 4.0]), rng.randint(1, 2), order=index))
    num_steps = 0
    while left:
        planner.admit()
        assert planner.num_rows <= 8
        step = planner.next_step()
        assert step and len({one.key for one in step}) == 1 and sum(one.cost for one in step) <= 6
        for one in step:
            left[one.name] -= 1
            if left[one.name] == 0 or rng.random() < 0.05:
                del left[one.name]
                planner.remove(one.name)
        num_steps += 1
        assert num_steps < 1000
    assert planner.num_running == planner.num_waiting == planner.num_rows == 0 and planner.next_step() == []


def test_a_lane_that_was_empty_brings_no_credit() -> None:
    planner = RowPlanner(max_step_cost=10, max_rows=100)
    planner.add(unit("big", "big", cost=8))
    planner.add(unit("small", "small", cost=1))
    planner.admit()
    for _ in range(7):
        planner.next_step()
    planner.remove("big")
    planner.add(unit("again", "big", cost=8))
    planner.admit()
    assert [names(planner.next_step()) for _ in range(7)] == [["small"]] * 7
