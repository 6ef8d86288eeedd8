"""The arbiter with scripted engines and a hand-made clock."""

from __future__ import annotations

from dataclasses import dataclass

from motet.engine.arbiter import DeviceArbiter


@dataclass
class Scripted:
    work: bool = True
    deadline: float | None = None
    priority: int = 0

    def has_work(self) -> bool:
        return self.work

    def next_deadline(self) -> float | None:
        return self.deadline

    def best_priority(self) -> int:
        return self.priority


def test_nobody_works() -> None:
    assert DeviceArbiter().choose({"a": Scripted(work=False)}, 0.0) is None


def test_urgent_audio_goes_first_and_earliest_deadline_wins() -> None:
    engines = {"pictures": Scripted(priority=-5), "voice": Scripted(deadline=10.2), "ears": Scripted(deadline=10.1)}
    choice = DeviceArbiter().choose(engines, 10.0)  # type: ignore[arg-type]
    assert choice is not None and choice.name == "ears"
    assert choice.slack_s is not None and abs(choice.slack_s - 0.2) < 1e-9


def test_a_far_deadline_only_bounds_the_others_step() -> None:
    engines = {"pictures": Scripted(priority=-1), "voice": Scripted(deadline=12.0)}
    choice = DeviceArbiter().choose(engines, 10.0)  # type: ignore[arg-type]
    assert choice is not None and choice.name == "pictures" and choice.slack_s == 2.0


def test_equal_priority_shares_device_seconds() -> None:
    arbiter, engines = DeviceArbiter(), {"slow": Scripted(), "fast": Scripted()}
    cost, used = {"slow": 0.5, "fast": 0.1}, {"slow": 0.0, "fast": 0.0}
    for _ in range(600):
        choice = arbiter.choose(engines, 0.0)  # type: ignore[arg-type]
        assert choice is not None and choice.slack_s is None
        arbiter.charge(choice.name, cost[choice.name])
        used[choice.name] += cost[choice.name]
    assert abs(used["slow"] - used["fast"]) <= 0.6


def test_who_was_idle_neither_starves_others_nor_waits() -> None:
    arbiter = DeviceArbiter()
    busy, idle = Scripted(), Scripted(work=False)
    for _ in range(100):
        assert arbiter.choose({"busy": busy, "idle": idle}, 0.0).name == "busy"  # type: ignore
        arbiter.charge("busy", 1.0)
    idle.work = True
    order = []
    for _ in range(10):
        name = arbiter.choose({"busy": busy, "idle": idle}, 0.0).name  # type: ignore
        order.append(name)
        arbiter.charge(name, 1.0)
    assert order.count("idle") in (5, 6, 4) and "idle" in order[:2]
