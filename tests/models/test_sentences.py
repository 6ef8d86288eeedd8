"""Where text is cut: sentences, the same however the text comes, and utterances that a voice can hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.models.sentences import LONGEST, SentenceSplitter, sentences, utterances

STORY = """Dr. Smith came at 5 p.m. on Friday. He met J. K. Rowling, e.g. in the U.S. Then they left! "Really?" she asked.
It cost $3.50. Wait... what? See No. 5 at 24 Baker St. in London. It was cold etc. The end

# Title
- one item
- two items
1. First thing
2. Second thing. i am here. you are there"""


def test_a_story() -> None:
    assert sentences(STORY) == [
        "Dr. Smith came at 5 p.m. on Friday.",
        "He met J. K. Rowling, e.g. in the U.S.",
        "Then they left!",
        '"Really?"',
        "she asked.",
        "It cost $3.50.",
        "Wait... what?",
        "See No. 5 at 24 Baker St. in London.",
        "It was cold etc.",
        "The end",
        "# Title",
        "- one item",
        "- two items",
        "1. First thing",
        "2. Second thing.",
        "i am here.",
        "you are there",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        (" \n ", []),
        ("One", ["One"]),
        ("3.5 and 4.5", ["3.5 and 4.5"]),
        ("No! Yes? Ok.", ["No!", "Yes?", "Ok."]),
        ("He sat in the sun. She left.", ["He sat in the sun.", "She left."]),
        ("We start at 9 a.m. Monday. Good.", ["We start at 9 a.m. Monday.", "Good."]),
        ("Dec. 5 is fine.", ["Dec. 5 is fine."]),
        ("(It rained.) We left.", ["(It rained.)", "We left."]),
        ("日本。東京！", ["日本。", "東京！"]),
        ("wrapped\nlines go on. Yes", ["wrapped\nlines go on.", "Yes"]),
        ("one paragraph\n\nanother", ["one paragraph", "another"]),
    ],
)
def test_cases(text: str, found: list[str]) -> None:
    assert sentences(text) == found


def streamed(text: str, cuts: list[int]) -> list[str]:
    splitter, found, start = SentenceSplitter(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += splitter.push(text[start:cut])
        start = max(start, cut)
    return [*found, *splitter.flush()]


@given(st.lists(st.integers(0, len(STORY)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_cut_anywhere_the_sentences_are_the_same(cuts: list[int]) -> None:
    assert streamed(STORY, cuts) == sentences(STORY)


@given(st.text(alphabet="aB. ,!?\n-1'\"", max_size=60), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_text_streams_as_it_is_whole(text: str, seed: int) -> None:
    rng = random.Random(seed)
    cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))]
    assert streamed(text, cuts) == sentences(text)
    assert "".join("".join(sentences(text)).split()) == "".join(text.split()), "nothing is lost"


def test_long_sentences_are_cut() -> None:
    for unit in ("a", "a, ", "a ", "Dr. ", ".", ". ", "(", "1. "):
        text = unit * (20_000 // len(unit))
        found = sentences(text)
        assert all(len(sentence) <= LONGEST + 4 for sentence in found)
        assert "".join("".join(found).split()) == "".join(text.split())
        rng = random.Random(5)
        assert streamed(text, [rng.randrange(20_000) for _ in range(300)]) == found


def test_a_sentence_is_given_as_soon_as_it_is_sure() -> None:
    splitter = SentenceSplitter()
    assert splitter.push("It is here.") == []  # "here.5" is possible
    assert splitter.push(" ") == ["It is here."]
    assert splitter.push("At 5 p.m. ") == []  # the next word decides
    assert splitter.push("Then they left early that day") == ["At 5 p.m."]
    assert splitter.waiting.strip() == "Then they left early that day"


def test_a_clause_before_the_sentence_ends() -> None:
    splitter = SentenceSplitter()
    splitter.push("Well, yes, ")
    assert splitter.take_clause() == ""
    splitter.push("when the sun sets, we")
    assert splitter.take_clause() == "Well, yes, when the sun sets,"
    assert splitter.flush() == ["we"] and splitter.flush() == []


@pytest.mark.parametrize(
    ("sentence", "pieces"),
    [
        ("short.", ["short."]),
        ("one, two. three?", ["one, two.", "three?"]),
        ("the quick brown fox jumps over the lazy dog and then it runs away through the forest.",
         ["the quick brown fox jumps over the lazy dog", "and then it runs away through the forest."]),
        ("he opened the old door of the house, looked around for a while, went in and closed it.",
         ["he opened the old door of the house, looked around for a while,", "went in and closed it."]),
    ],
)  # fmt: skip
def test_utterances(sentence: str, pieces: list[str]) -> None:
    assert utterances(sentence, max_chars=90, max_words=14) == pieces


@given(st.text(alphabet="abcdefg ,.?", max_size=600), st.integers(10, 90), st.integers(0, 14))
@settings(max_examples=80, deadline=None)
def test_utterances_fit_and_hold_all_words(text: str, max_chars: int, max_words: int) -> None:
    found = utterances(text, max_chars=max_chars, max_words=max_words)
    assert all(0 < len(piece) <= max_chars for piece in found)
    assert not max_words or all(len(piece.split()) <= max_words for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())
