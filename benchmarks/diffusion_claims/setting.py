"""The claims about pictures, how much is measured, and what is painted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from motet.benchmarks.claims import Claim
from motet.engine.config import EngineConfig, PictureConfig

CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(id="one_image", better="higher", target=1.3, unit="pictures/s"),
        Claim(id="concurrent8", better="higher", target=2.0, unit="pictures/s"),
        Claim(id="late_joiner", better="lower", target=0.6, unit="s"),
        Claim(id="step_cache", better="higher", target=1.5, unit="pictures/s"),
        Claim(id="overlap", better="lower", target=1.1, unit="s"),
    )
}
HELD_OUT = Path(__file__).resolve().parents[2] / "demo" / "recipes" / "heldout.jsonl"

NAMES = (
    "cat", "car", "apple", "rocket", "tree", "house", "fish", "star", "dog", "banana", "clock", "key", "guitar", "bus", "moon",
    "flower",
)  # fmt: skip
PLACES = ("left", "right", "top", "bottom")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    steps: int = 20
    rounds: int = 7
    num_together: int = 8
    num_running: int = 4  # pictures of the batch that a late one meets
    num_late: int = 40  # late ones of each kind
    max_error: float = 0.05  # mean relative L1 distance of final latents that a step cache may cost
    num_held_out: int = 32  # pictures on which a step cache is judged
    num_calibration: int = 8  # other ones on which its threshold is chosen
    first_block: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.28, 0.31, 0.34, 0.37, 0.4, 0.45, 0.5)  # thresholds
    teacache: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.28, 0.31, 0.34, 0.37, 0.4, 0.45, 0.5)
    num_steady: int = 96  # pictures of the steady load
    num_inside: int = 16  # of them, under way at any time


REHEARSAL = Sizes(
    steps=10, rounds=1, num_together=2, num_running=2, num_late=1, num_held_out=2, num_calibration=2, first_block=(0.0001, 9.0),
    teacache=(9.0,), num_steady=6, num_inside=2, max_error=9.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share."""

    model: str
    engine: EngineConfig
    pictures: PictureConfig
    threads: int
    sizes: Sizes
    _captions: Iterator[str] = field(default_factory=lambda: _captions())

    def fresh(self, count: int) -> list[str]:
        """Captions that nobody has painted yet, so that no cache of encoded prompts helps anybody."""
        return list(itertools.islice(self._captions, count))


def _captions() -> Iterator[str]:
    """As motet-emoji learnt them, all different; neighbours differ in their lengths. After 1,600 they tell of two emoji."""
    for count in ("a", "two"):
        for size, tint, place in itertools.product(("big", "", "small"), ("", "red", "green"), (*PLACES, "")):
            for index, name in enumerate(NAMES):
                colour = COLOURS[(index + len(place)) % len(COLOURS)]
                where = f"on the {place}" if place else ""
                yield " ".join(f"{count} {size} {tint} {name} {where} on a {colour} background".split())


def held_out() -> list[str]:
    """Captions whose combinations motet-emoji has never seen."""
    return [json.loads(line)["caption"] for line in HELD_OUT.read_text().splitlines()]
