"""Subtitles as their readers demand them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine.types import Segment, Word
from motet.pipelines.subtitles import clock, to_srt, to_vtt


def segment(start: float, end: float, text: str, **more: object) -> Segment:
    return Segment(id=0, start=start, end=end, text=text, **more)  # type: ignore[arg-type]


def test_srt() -> None:
    text = to_srt([segment(0, 1.5, " Hello there."), segment(3661.0014, 3662, " Good\n\nbye."), segment(5, 6, "  ")])
    assert text == ("1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:01:01,001 --> 01:01:02,000\nGood bye.\n")


def test_vtt() -> None:
    text = to_vtt([segment(0, 1.5, " a < b --> c & d", speaker="Ann\nB>")])
    assert text == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n<v Ann B&gt;>a &lt; b --&gt; c &amp; d\n"


def test_speakers_and_arrows_in_srt() -> None:
    assert "Ann: x -> y\n" in to_srt([segment(0, 1, "x --> y", speaker="Ann")])


def test_nothing() -> None:
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n"


def test_a_cue_has_a_length_and_cues_are_in_order() -> None:
    text = to_vtt([segment(2, 2, "late"), segment(-0.2, 0.0001, "early")])
    assert text.index("early") < text.index("late")
    assert "00:00:00.000 --> 00:00:00.001" in text
    assert "00:00:02.000 --> 00:00:02.001" in text


def test_times_carry_into_the_next_unit() -> None:
    assert clock(59_999, ".") == "00:00:59.999"
    assert clock(60_000, ".") == "00:01:00.000"
    assert clock(100 * 3_600_000, ",") == "100:00:00,000"
    assert "00:01:00,000" in to_srt([segment(59.9996, 61, "x")])


def test_long_segments_are_split_at_words() -> None:
    words = [Word(word=f" word{i}", start=i, end=i + 0.5, probability=1.0) for i in range(6)]
    text = to_srt([segment(0, 5.5, "".join(word.word for word in words), words=words)], max_chars=12)
    assert [line for line in text.splitlines() if line.startswith("word")] == [
        "word0 word1",
        "word2 word3",
        "word4 word5",
    ]
    assert "00:00:02,000 --> 00:00:03,500" in text
    assert to_srt([segment(0, 1, " no words here at all")], max_chars=5).count("-->") == 1


def test_pieces_are_even() -> None:
    words = [Word(word=f" w{i}", start=i, end=i + 1, probability=1.0) for i in range(5)]
    text = to_srt([segment(0, 5, " w0 w1 w2 w3 w4", words=words)], max_chars=12)
    assert [line for line in text.splitlines() if line.startswith("w")] == ["w0 w1 w2", "w3 w4"]


def test_a_change_of_speaker_splits() -> None:
    words = [Word(word=f" w{i}", start=i, end=i + 1, probability=1.0, speaker="AB"[i // 2]) for i in range(4)]
    text = to_vtt([segment(0, 4, " w0 w1 w2 w3", words=words)], max_chars=80)
    assert "<v A>w0 w1" in text and "<v B>w2 w3" in text


@pytest.mark.parametrize("write", [to_srt, to_vtt])
@given(
    found=st.lists(
        st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.text(max_size=20), st.none() | st.text(max_size=5))
    )
)
def test_any_text_gives_as_many_cues_as_times(write: object, found: list[tuple[float, float, str, str | None]]) -> None:
    assert callable(write)
    text = write([segment(a, b, c, speaker=d) for a, b, c, d in found])
    times = re.findall(r"^\d{2,}:\d\d:\d\d[.,]\d{3} --> \d{2,}:\d\d:\d\d[.,]\d{3}$", text, re.M)
    blocks = [block for block in text.removeprefix("WEBVTT\n").split("\n\n") if block.strip()]
    assert len(times) == len(blocks) == text.count("-->")
