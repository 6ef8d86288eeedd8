"""Drafts are only a guess: whatever they say, a verifying decoder says its own text, in no more passes than alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine.text_draft import TextDraft

TIMES = 1000  # ids from here on


def passes(draft: list[int], text: list[int], room: int = 1 << 20) -> int:
    """How often a decoder that will say `text` computes, verifying what is offered."""
    offering = TextDraft(draft, timestamp_begin=TIMES)
    said: list[int] = []
    count = 0
    while len(said) <= len(text):  # one more pass says the end
        count += 1
        offered = offering.offer(room)
        assert offering.offer(room) == offered and len(offered) <= room
        new: list[int] = []
        for at in range(len(offered) + 1):
            position = len(said) + at
            if position == len(text):
                offering.observe(new, len(offered))
                return count
            new.append(text[position])
            if at == len(offered) or offered[at] != text[position]:
                break
        offering.observe(new, len(offered))
        said += new
    raise AssertionError("the end was passed")


words = st.lists(st.integers(0, 20) | st.integers(TIMES, TIMES + 10), max_size=40)


@given(words, words)
def test_never_more_passes_than_alone(draft: list[int], text: list[int]) -> None:
    assert passes(draft, text) <= len(text) + 1
    assert passes(draft, text, room=0) == len(text) + 1


TEXT = [TIMES, *range(1, 31), TIMES + 50]


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        (TEXT, 1),
        ([*TEXT[:-1], 99], 2),  # another end
        ([*TEXT[:25], TIMES + 40], 8),  # more was said since
        ([*TEXT[:10], 99, *TEXT[11:]], 6),  # a word has changed
        ([*TEXT[:10], *TEXT[12:]], 9),  # words came in
        ([*TEXT[:10], 97, 98, *TEXT[10:]], 6),  # words fell out
        ([TIMES, *range(60, 70), *TEXT[1:]], 6),  # the window begins later now
        ([*TEXT[:15], TIMES + 20, TIMES + 20, *TEXT[15:]], 8),  # a cut fell out
        ([], len(TEXT) + 1),
    ],
)
def test_a_near_guess_saves_most_passes(draft: list[int], most: int) -> None:
    assert passes(draft, TEXT) <= most


def test_a_useless_draft_is_given_up() -> None:
    offering = TextDraft(range(500, 600), timestamp_begin=TIMES)
    rows = 0
    for token in range(1, 60):
        offered = offering.offer(448)
        rows += len(offered)
        offering.observe([token], len(offered))
    assert rows <= 110  # once the whole, then a few, then none
