"""Stop strings: the first one is found, and no more is held back than may become one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.errors import InvalidRequest
from motet.engine.frontend.stop import MAX_STOP_CHARS, MAX_STOPS, StopAutomaton, StopMatcher, check_stops

SMALL = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=5)


def _plain(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Slow and obvious: the earliest end, and there the longest stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


@settings(max_examples=300, deadline=None)
@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_equals_plain_search_at_any_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    match = None
    for start, end in zip(edges, edges[1:], strict=False):
        match = matcher.feed(text[start:end])
        if match is not None:
            break
        seen = text[:end]
        tails = [
            size for size in range(len(seen) + 1) for stop in stops if size < len(stop) and seen.endswith(stop[:size])
        ]
        assert matcher.num_held == max(tails)
    assert (match and (match.start, match.end)) == _plain(text, stops)


def test_skipped_text_never_counts() -> None:
    matcher = StopMatcher(StopAutomaton(["end"]))
    matcher.skip("the end, en")
    assert matcher.num_held == 0 and matcher.feed("d of it") is None
    match = matcher.feed(" end")
    assert match is not None and (match.start, match.end) == (19, 22)


def test_limits() -> None:
    assert check_stops(["a", "b", "a"]) == ("a", "b")
    for bad in (["x"] * 100_000, ["x"] * (MAX_STOPS + 1), [""], ["x" * (MAX_STOP_CHARS + 1)], [5]):
        with pytest.raises(InvalidRequest, match="stop"):
            check_stops(bad)  # type: ignore[arg-type]


def test_the_largest_set_is_fast() -> None:
    start = time.process_time()
    stops = ["a" * 900 + "b" * (index + 1) for index in range(MAX_STOPS)]
    matcher = StopMatcher(StopAutomaton(stops))
    assert matcher.feed("a" * 50_000) is None and matcher.num_held == 900
    assert time.process_time() - start < 2
