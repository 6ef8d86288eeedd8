"""Regions, chunks and live boundaries: what must hold for any probabilities, and a few cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.errors import InvalidRequest
from motet.engine.segmenter import (
    Boundary,
    Chunk,
    LiveSegmenter,
    Region,
    SegmenterOptions,
    chunks,
    speech_regions,
)

WINDOW = 512


def windows(count: int) -> int:
    return count * WINDOW


# Small lengths, so that short inputs meet every rule.
OPTIONS = SegmenterOptions(
    min_silence=windows(4), pad=windows(2), max_speech=windows(24), min_dip=windows(2), overlap=windows(3)
)


@st.composite
def probabilities(draw: st.DrawFn) -> list[float]:
    """Stretches of speech, silence and doubt: what a detector gives, sped up."""
    levels = st.sampled_from([0.0, 0.2, 0.34, 0.36, 0.45, 0.5, 0.7, 1.0])
    stretches = draw(st.lists(st.tuples(levels, st.integers(1, 30)), max_size=12))
    noisy = draw(st.lists(levels, max_size=40))
    return [level for level, length in stretches for _ in range(length)] + noisy


@st.composite
def any_options(draw: st.DrawFn) -> SegmenterOptions:
    pad = draw(st.integers(0, 5))
    return SegmenterOptions(
        min_silence=windows(draw(st.integers(0, 8))),
        min_speech=windows(draw(st.sampled_from([0, 0, 3]))),
        pad=windows(pad) + draw(st.sampled_from([0, 1, 255])),
        max_speech=windows(draw(st.integers(8, 40)) + 2 * pad + 1),
        min_dip=windows(draw(st.integers(0, 4))),
        overlap=windows(draw(st.integers(0, 20))),
    )


def hysteresis(probs: list[float], options: SegmenterOptions) -> list[tuple[int, int]]:
    """Stretches of speech in windows without any limit on their length, told the slow way."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(probs):
        if probs[at] < options.threshold:
            at += 1
            continue
        end = at + 1
        while end < len(probs):
            if probs[end] < options.silence_below:
                later = next((i for i in range(end, len(probs)) if probs[i] >= options.threshold), len(probs))
                quiet = [i for i in range(end, later) if probs[i] < options.silence_below]
                if (max(quiet) + 1 - end) * WINDOW >= max(options.min_silence, WINDOW) or later == len(probs):
                    break
                end = later
            else:
                end += 1
        found.append((at, end))
        at = end
        while at < len(probs) and probs[at] < options.threshold:
            at += 1
    return found


@given(probabilities(), any_options(), st.integers(0, 511))
@settings(max_examples=400, deadline=None)
def test_regions_are_sorted_inside_the_file_short_enough_and_hold_all_speech(
    probs: list[float], options: SegmenterOptions, missing: int
) -> None:
    num_samples = max(windows(len(probs)) - missing, 0)
    regions = speech_regions(probs, num_samples, options)
    for region in regions:
        assert 0 <= region.start < region.end <= num_samples
        assert region.end - region.start <= options.max_speech
    for before, after in zip(regions, regions[1:]):
        assert before.start < after.start and before.end < after.end
        assert after.start == before.end - after.overlap if after.overlap else after.start >= before.end
    assert not regions or not regions[0].overlap
    if options.min_speech == 0:
        for i, prob in enumerate(probs):
            first, last = windows(i), min(windows(i + 1), num_samples)
            if prob >= options.threshold and first < last:
                assert any(region.start <= first and last <= region.end for region in regions), i


@given(probabilities(), any_options())
@settings(max_examples=200, deadline=None)
def test_without_a_limit_regions_are_the_stretches_of_hysteresis(probs: list[float], options: SegmenterOptions) -> None:
    unlimited = replace(options, max_speech=10**9, pad=0, min_speech=0)
    regions = speech_regions(probs, windows(len(probs)), unlimited)
    assert [(region.start, region.end) for region in regions] == [
        (windows(start), windows(end)) for start, end in hysteresis(probs, options)
    ]


@given(probabilities(), any_options(), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_chunks_hold_every_region_once_and_are_short_enough(
    probs: list[float], options: SegmenterOptions, more: int
) -> None:
    regions = speech_regions(probs, windows(len(probs)), options)
    limit = options.max_speech + windows(more)
    made = chunks(regions, limit, max_gap=windows(6))
    assert [region for chunk in made for region in chunk.regions] == regions
    for chunk in made:
        assert (chunk.start, chunk.end) == (chunk.regions[0].start, chunk.regions[-1].end)
        assert chunk.end - chunk.start <= limit
        assert all(not region.overlap for region in chunk.regions[1:])
        gaps = [after.start - before.end for before, after in zip(chunk.regions, chunk.regions[1:])]
        assert all(gap < windows(6) for gap in gaps)
    for chunk, after in zip(made, made[1:]):
        assert chunk.forced_cut == (after.overlap > 0)
        assert after.start == chunk.end - after.overlap if after.overlap else after.start >= chunk.end
    assert not made or not made[-1].forced_cut


def listen(probs: list[float], options: SegmenterOptions) -> tuple[list[Boundary], LiveSegmenter]:
    live = LiveSegmenter(options)
    told = []
    for prob in probs:
        kept = live.keep_from
        new = live.push(prob)
        assert all(boundary.sample >= kept for boundary in new)
        assert live.keep_from >= kept
        assert all(boundary.sample <= live.position for boundary in new)
        told += new
    return told + live.finish(), live


def as_regions(told: list[Boundary]) -> list[Region]:
    assert [boundary.what for boundary in told] == ["started", "stopped"] * (len(told) // 2)
    return [Region(start.sample, stop.sample, start.overlap) for start, stop in zip(told[::2], told[1::2])]


@given(probabilities(), any_options())
@settings(max_examples=400, deadline=None)
def test_live_gives_the_regions_of_the_whole_recording(probs: list[float], options: SegmenterOptions) -> None:
    """Exactly, where silence that ends speech has room for the padding of both sides."""
    options = replace(options, min_silence=max(options.min_silence, 2 * options.pad))
    told, live = listen(probs, options)
    assert as_regions(told) == speech_regions(probs, windows(len(probs)), options)
    assert not live.speaking
    for stop, start in zip(told[1::2], told[2::2]):
        assert stop.cut == start.cut


@given(probabilities(), any_options())
@settings(max_examples=200, deadline=None)
def test_live_loses_no_speech_with_any_options(probs: list[float], options: SegmenterOptions) -> None:
    told, _ = listen(probs, replace(options, min_speech=0))
    regions = as_regions(told)
    assert all(region.end - region.start <= options.max_speech for region in regions)
    assert all(after.start >= before.end - after.overlap for before, after in zip(regions, regions[1:]))
    for i, prob in enumerate(probs):
        if prob >= options.threshold:
            assert any(region.start <= windows(i) and windows(i + 1) <= region.end for region in regions), i


def test_live_memory_is_bounded_by_one_segment() -> None:
    live = LiveSegmenter(OPTIONS)
    for prob in ([0.9] * 100 + [0.4] * 200 + [0.1, 0.4] * 100 + [0.0] * 50) * 4:
        live.push(prob)
        assert len(live._tracker._probs) <= OPTIONS.longest_run + 4 + 1
        assert live.position - live.keep_from <= OPTIONS.max_speech + OPTIONS.min_silence + WINDOW


def test_a_start_is_told_at_once_and_a_stop_after_the_silence() -> None:
    live = LiveSegmenter(OPTIONS)
    told = [live.push(prob) for prob in [0.0] * 5 + [0.9] * 3 + [0.0] * 6]
    assert [boundaries for boundaries in told if boundaries] == [
        [Boundary("started", windows(3))],
        [Boundary("stopped", windows(10))],
    ]
    assert told[5] and told[5 + 3 + 4 - 1]
    assert live.quiet_s == 0.0


def test_adjacent_padding_shares_the_gap() -> None:
    options = replace(OPTIONS, min_silence=windows(3))
    probs = [0.9] * 4 + [0.0] * 3 + [0.9] * 4 + [0.0] * 9
    assert speech_regions(probs, windows(20), options) == [
        Region(0, windows(5) + WINDOW // 2),
        Region(windows(5) + WINDOW // 2, windows(13)),
    ]


def test_long_speech_is_cut_in_its_longest_silence() -> None:
    probs = [0.9] * 11 + [0.1] * 2 + [0.9] * 2 + [0.1] * 3 + [0.9] * 20
    first, second = speech_regions(probs, windows(len(probs)), OPTIONS)
    assert first.end == second.start == windows(16) + WINDOW // 2
    assert not second.overlap


def test_long_speech_without_silence_is_cut_where_it_is_least_certain_and_overlaps() -> None:
    probs = [0.9] * 15 + [0.6] + [0.9] * 15
    first, second = speech_regions(probs, windows(len(probs)), OPTIONS)
    assert first == Region(0, windows(16))
    assert second == Region(windows(13), windows(31), overlap=windows(3))
    a, b = chunks([first, second], OPTIONS.max_speech)
    assert (a.forced_cut, a.overlap, b.forced_cut, b.overlap) == (True, 0, False, windows(3))


def test_chunks_join_over_short_gaps_only() -> None:
    regions = [Region(0, 10), Region(12, 20), Region(60, 70), Region(71, 99)]
    assert chunks(regions, 30, max_gap=5) == [
        Chunk(0, 20, tuple(regions[:2])),
        Chunk(60, 70, (regions[2],)),
        Chunk(71, 99, (regions[3],)),
    ]
    assert chunks([], 30) == []


def test_short_speech_is_passed_over_where_asked() -> None:
    options = replace(OPTIONS, min_speech=windows(3))
    probs = [0.0] * 9 + [0.9] * 2 + [0.0] * 9 + [0.9] * 3 + [0.0] * 9
    assert speech_regions(probs, windows(32), options) == [Region(windows(18), windows(25))]
    told, _ = listen(probs, options)
    assert as_regions(told) == [Region(windows(18), windows(25))]


def test_a_probability_that_is_no_number_is_silence() -> None:
    probs = [0.9] * 4 + [float("nan")] * 9
    assert speech_regions(probs, windows(13), OPTIONS) == [Region(0, windows(6))]
    assert speech_regions([float("nan")] * 9, windows(9), OPTIONS) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": 0.0},
        {"threshold": 1.5},
        {"threshold": float("nan")},
        {"negative_threshold": 0.9},
        {"pad": -1},
        {"max_speech": 12800},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        SegmenterOptions(**wrong)  # type: ignore[arg-type]
