"""Rules of decoding against the reference's (transformers), and what is made of ids."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from motet.engine.beam_search import BeamSearch
from motet.engine.decoding_rules import (
    DecodingRules,
    compression_ratio,
    cut_loop,
    is_silence,
    loop_period,
    needs_fallback,
    split_segments,
)
from motet.engine.language_choice import LanguageChoice

# A small vocabulary in Whisper's order: text below EOT, specials, then 101 timestamps.
EOT, NO_TIMESTAMPS, BEGIN, VOCAB = 40, 50, 51, 152
SUPPRESS, BEGIN_SUPPRESS = (3, 4, 45), (7, EOT)


def rules(**changes: object) -> DecodingRules:
    return DecodingRules(
        vocab_size=VOCAB,
        eot=EOT,
        no_timestamps=NO_TIMESTAMPS,
        timestamp_begin=BEGIN,
        suppress=SUPPRESS,
        begin_suppress=BEGIN_SUPPRESS,
        **changes,  # type: ignore[arg-type]
    )


def reference(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    config = GenerationConfig(eos_token_id=EOT, bos_token_id=EOT, no_timestamps_token_id=NO_TIMESTAMPS)
    config.max_initial_timestamp_index = 50
    prompt = [41, 42]
    row = torch.tensor([prompt + ids])
    for processor in (
        SuppressTokensLogitsProcessor(SUPPRESS),
        SuppressTokensAtBeginLogitsProcessor(BEGIN_SUPPRESS, begin_index=len(prompt)),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)),
    ):
        logits = processor(row, logits)
    return logits


def test_rows_equal_the_reference_whatever_came_before() -> None:
    """Random walks under the rules: at every step the same ids are banned as in transformers."""
    draw = random.Random(0)
    torch.manual_seed(0)
    mine = rules()
    histories: list[list[int]] = [[] for _ in range(8)]
    for _ in range(30):
        logits = torch.randn(len(histories), VOCAB) * 2
        expected = torch.cat([reference(ids, row[None].clone()) for ids, row in zip(histories, logits, strict=True)])
        mine.apply(logits, histories, timestamps=[True] * len(histories))
        assert torch.equal(logits, expected)
        for ids, row in zip(histories, logits, strict=True):
            allowed = [i for i in range(VOCAB) if row[i] > -torch.inf and i != EOT]
            ids.append(draw.choice(allowed) if allowed else EOT)
            if not allowed or len(ids) > 12:
                ids.clear()


def test_without_timestamps_and_with_own_suppression() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 10] = 10.0  # text is likelier than all timestamps together
    rules().apply(logits, [[], [9]], timestamps=[False, True], suppress=[None, (5,)])
    banned = {i for i in range(VOCAB) if logits[0, i] == -torch.inf}
    assert banned == {*SUPPRESS, *BEGIN_SUPPRESS, NO_TIMESTAMPS, *range(BEGIN, VOCAB)}
    assert logits[1, 5] == -torch.inf and logits[1, 3] == 0 and logits[1, NO_TIMESTAMPS] == -torch.inf


def test_fallback_and_silence() -> None:
    good = {"ratio": 1.5, "avg_logprob": -0.3, "no_speech_prob": 0.1}
    assert not needs_fallback(**good)
    assert needs_fallback(**{**good, "ratio": 2.5})
    assert needs_fallback(**{**good, "avg_logprob": -1.1})
    assert needs_fallback(**{**good, "looped": True})
    assert not needs_fallback(ratio=3.0, avg_logprob=-1.1, no_speech_prob=0.7)  # silence needs no second try
    assert is_silence(avg_logprob=-1.1, no_speech_prob=0.7)
    assert not is_silence(avg_logprob=-0.9, no_speech_prob=0.7)
    # A guard is never switched off by a number that is none.
    assert needs_fallback(ratio=1.0, avg_logprob=math.nan, no_speech_prob=0.1)
    assert needs_fallback(ratio=1.0, avg_logprob=-0.1, no_speech_prob=math.nan)
    assert is_silence(avg_logprob=math.nan, no_speech_prob=math.nan)
    assert compression_ratio("") == 0.0 and compression_ratio("thank you " * 40) > 2.4


def test_loops_are_seen_and_cut() -> None:
    assert loop_period([1, 2, 3] * 16) == 3
    assert loop_period([9, *[5] * 48]) == 1
    assert loop_period([1, 2, 3] * 15) == 0
    assert loop_period(list(range(100))) == 0
    assert cut_loop([BEGIN, 8, 9, *[1, 2, 3] * 20], EOT) == [BEGIN, 8, 9, 1, 2, 3]
    assert cut_loop([BEGIN, 8, 9], EOT) == [BEGIN, 8, 9]


def test_segments_are_cut_at_pairs() -> None:
    t = lambda seconds: BEGIN + round(seconds / 0.02)  # noqa: E731
    closed = split_segments([t(0), 1, 2, t(1), t(1.2), 3, t(2)], timestamp_begin=BEGIN, window_s=5.0)
    assert [(s.start, s.end, s.first) for s in closed.segments] == [(0.0, 1.0, 0), (1.2, 2.0, 4)]
    assert closed.closed and closed.last_s == 2.0 and closed.tail is None
    ended = split_segments([t(0), 1, 2, t(1), t(1.2), 3], timestamp_begin=BEGIN, window_s=5.0)
    assert len(ended.segments) == 1 and ended.heard_s == 1.0 and not ended.closed
    assert ended.tail is not None and ended.tail.ids == [t(1.2), 3] and ended.tail.start == pytest.approx(1.2)
    single = split_segments([t(0.2), 1, 2, t(1)], timestamp_begin=BEGIN, window_s=5.0)
    assert [(s.start, s.end) for s in single.segments] == [(pytest.approx(0.2), 1.0)]
    bare = split_segments([1, 2], timestamp_begin=BEGIN, window_s=5.0)
    assert [(s.start, s.end) for s in bare.segments] == [(0.0, 5.0)]
    assert split_segments([], timestamp_begin=BEGIN, window_s=5.0).segments == []


def test_beam_search_finds_what_greedy_misses() -> None:
    """Token 1 looks best at first, but 2 leads to the better whole."""
    log = lambda *ps: [math.log(p) for p in ps]  # noqa: E731
    search = BeamSearch(beam_size=2, patience=1.0, eot=EOT)
    assert search.advance([[1, 2, 3]], [log(0.5, 0.4, 0.1)]) == [0, 0]
    parents = search.advance([[4, 5, EOT], [EOT, 4, 5]], [log(0.3, 0.3, 0.2), log(0.9, 0.05, 0.05)])
    assert parents == [0, 0] and [h.ids for h in search.finished] == [[2]]
    search.advance([[EOT, 4, 5], [EOT, 4, 5]], [log(0.5, 0.3, 0.2), log(0.4, 0.3, 0.3)])
    assert search.done
    assert search.best(None).ids == [2]
    assert search.best(None).avg_logprob == pytest.approx(math.log(0.4 * 0.9) / 2)


def test_language_is_asked_until_it_is_sure() -> None:
    choice = LanguageChoice(max_looks=3)
    choice.observe({"en": 0.4, "de": 0.35, "fr": 0.25})
    assert choice.code is None
    choice.observe({"en": 0.3, "de": 0.6, "fr": 0.1})
    assert choice.code == "de" and choice.sure
    unsure = LanguageChoice(max_looks=2)
    for _ in range(2):
        unsure.observe({"en": 0.3, "de": 0.4, "fr": 0.3})
    assert unsure.code == "de" and not unsure.sure
