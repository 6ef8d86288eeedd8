"""What a load test sends and when: lengths drawn from distributions, arrival times, prompts of a given length. Seeded.

Knows no HTTP. Everything is drawn beforehand from one seed, so two runs with the same seed send the same requests at the
same times.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

MAX_LENGTH = 1_000_000
# Short everyday words: about a token each in most vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education"
).split()


class Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of token counts: always `low`, uniform in low..high, or normal (mean, deviation), at least 1."""

    kind: Literal["fixed", "uniform", "normal"]
    low: float
    high: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "256", "uniform:64:512" or "normal:256:64". Raises ValueError in one line."""
        name, *numbers = text.split(":") if ":" in text else ["fixed", text]
        wanted = {"fixed": 1, "uniform": 2, "normal": 2}.get(name)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if wanted is None or len(values) != wanted:
            raise ValueError(f"expected N, uniform:LOW:HIGH or normal:MEAN:DEVIATION, got {text!r}")
        if not all(0 <= value <= MAX_LENGTH for value in values) or values[0] < 1:
            raise ValueError(f"lengths are 1 to {MAX_LENGTH:,} tokens, got {text!r}")
        if name != "normal" and any(value != int(value) for value in values):
            raise ValueError(f"a length is a whole number of tokens, got {text!r}")
        if name == "uniform" and values[1] < values[0]:
            raise ValueError(f"uniform:LOW:HIGH needs LOW <= HIGH, got {text!r}")
        return cls(kind=name, low=values[0], high=values[1] if wanted == 2 else 0.0)  # type: ignore[arg-type]

    def draw(self, source: random.Random) -> int:
        """A length in tokens."""
        if self.kind == "uniform":
            return source.randint(int(self.low), int(self.high))
        if self.kind == "normal":
            return min(MAX_LENGTH, max(1, round(source.gauss(self.low, self.high))))
        return int(self.low)

    def __str__(self) -> str:
        return f"{self.low:g}" if self.kind == "fixed" else f"{self.kind}:{self.low:g}:{self.high:g}"


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Gaps between requests of an open loop. Gamma with variation 1 is Poisson, with 0 a metronome; larger is burstier."""

    rate: float  # requests per second, in the mean
    variation: float = 1.0  # standard deviation of a gap over its mean

    def times(self, source: random.Random) -> Iterator[float]:
        """Seconds from the start at which requests are sent; endless."""
        now = 0.0
        while True:
            yield now
            now += self._gap(source)

    def _gap(self, source: random.Random) -> float:
        if self.variation == 0:
            return 1.0 / self.rate
        shape = 1.0 / self.variation**2
        return source.gammavariate(shape, 1.0 / (self.rate * shape))


def parse_arrival(text: str) -> float:
    """The variation of "constant", "poisson" or "gamma:CV". Raises ValueError in one line."""
    if text in ("constant", "poisson"):
        return 0.0 if text == "constant" else 1.0
    name, _, number = text.partition(":")
    try:
        variation = float(number)
    except ValueError:
        variation = -1.0
    if name != "gamma" or not 0.01 <= variation <= 100:
        raise ValueError(f"expected constant, poisson or gamma:CV with CV from 0.01 to 100, got {text!r}")
    return variation


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request to be sent: a prompt (text, or token ids where the model's tokenizer is here) and how much is wanted."""

    number: int
    prompt: str | list[int]
    max_tokens: int


def jobs(*, isl: Lengths, osl: Lengths, seed: int | str, encoder: Encoder | None) -> Iterator[Job]:
    """Endless requests. Every prompt is other random words, so no prefix cache answers for the engine."""
    for number in itertools.count():
        source = random.Random(f"{seed}/{number}")
        length = isl.draw(source)
        yield Job(number=number, prompt=make_prompt(length, source, encoder), max_tokens=osl.draw(source))


def make_prompt(length: int, source: random.Random, encoder: Encoder | None) -> str | list[int]:
    """Random words: exactly `length` token ids with an encoder, else `length` words."""
    if encoder is None:
        return " ".join(source.choices(WORDS, k=length))
    ids: list[int] = []
    while len(ids) < length:
        ids += encoder.encode(" ".join(source.choices(WORDS, k=length)), add_special_tokens=False)
    return ids[:length]
