"""Numbers as words, against the package `inflect`."""

from __future__ import annotations

import random
import re

import inflect
import pytest

from motet.models.spoken_numbers import cardinal, fraction, number, ordinal, plural, roman, spelled, year

_PEER = inflect.engine()


def peer(value: int, *, nth: bool = False) -> str:
    text = _PEER.number_to_words(_PEER.ordinal(value) if nth else value)
    return re.sub(r"[-,]", " ", str(text)).replace("  ", " ")


def test_cardinals_and_ordinals_are_those_of_inflect() -> None:
    rng = random.Random(1)
    values = [*range(1100), *(rng.randrange(10**digits) for digits in range(4, 21) for _ in range(20))]
    for value in values:
        assert cardinal(str(value)) == peer(value)
        assert value > 10**9 or ordinal(str(value)) == peer(value, nth=True)


def test_long_rows_are_read_digit_by_digit() -> None:
    assert cardinal("1" * 22).split()[:2] == ["one", "one"]
    assert len(number("9" * 10_000).split()) == 10_000
    assert spelled("0123456") == "zero one two three, four five six"


@pytest.mark.parametrize(
    ("digits", "words"),
    [("1998", "nineteen ninety eight"), ("2000", "two thousand"), ("2009", "two thousand and nine"), ("2010", "twenty ten"),
     ("1066", "ten sixty six"), ("1900", "nineteen hundred"), ("1805", "eighteen oh five")],
)  # fmt: skip
def test_years(digits: str, words: str) -> None:
    assert year(digits) == words


def test_fractions_and_plurals() -> None:
    assert fraction("1", "2") == "one half" and fraction("3", "2") == "three halves"
    assert fraction("5", "8") == "five eighths" and fraction("7", "0") == "seven over zero"
    assert plural("ninety") == "nineties" and plural("six") == "sixes" and plural("two thousand") == "two thousands"


def test_roman_numerals() -> None:
    assert [roman(text) for text in ("I", "IV", "IX", "XIV", "MCMXCVIII")] == [1, 4, 9, 14, 1998]
    assert [roman(text) for text in ("IIII", "IC", "VX", "A", "", "MMMM")] == [None] * 6
