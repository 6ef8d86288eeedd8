"""The continuous batch of windows: what is said, what is tried again, whose slots are free. With a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motet.engine.decode_job import Decoded, DecodeJob, DecodeOptions
from motet.engine.language_choice import LanguageChoice
from motet.engine.segment_decoder import SegmentDecoder
from motet.models.whisper_tokens import WhisperTokens

from .scripted_whisper import BEGIN, EOT, TOKENS, ScriptedWhisper, at

LOOP = [at(0), *[7, 8] * 60]


def job(window: int, owner: Any = None, language: LanguageChoice | None = None, **options: Any) -> DecodeJob:
    pcm = torch.full((16_000,), window / 1000)
    return DecodeJob(
        owner=owner if owner is not None else window,
        load=lambda: pcm,
        num_samples=16_000,
        options=DecodeOptions(**options),
        language=language or LanguageChoice("en"),
        seed=window,
    )


def answers(decoder: SegmentDecoder, jobs: list[DecodeJob]) -> dict[int, Decoded | Exception]:
    for item in jobs:
        decoder.add(item)
    found: dict[int, Decoded | Exception] = {}
    for _ in range(5000):
        if not decoder.has_work():
            break
        for finished in decoder.step():
            answer = finished.result if finished.error is None else finished.error
            assert answer is not None
            found[finished.job.owner] = answer
    assert not decoder.has_work() and decoder.num_free == (decoder.num_slots, decoder.num_slots)
    return found


def said(window: int) -> list[int]:
    return [at(0), *range(100 * window, 100 * window + 3 * window), at(0.8)]


def test_many_windows_share_few_slots() -> None:
    model = ScriptedWhisper({window: [said(window)] for window in range(1, 10)})
    found = answers(SegmentDecoder(model, num_slots=4, encoder_batch=2), [job(window) for window in range(1, 10)])
    assert {window: found[window].ids for window in found} == {window: said(window) for window in range(1, 10)}  # type: ignore[union-attr]
    assert max(model.batches) == 4
    # Batched together, not one after another.
    assert len(model.batches) < 0.6 * sum(len(said(window)) + 2 for window in range(1, 10))


def test_a_failed_window_is_tried_again_without_stalling_the_others() -> None:
    model = ScriptedWhisper(
        {1: [LOOP, LOOP, said(1)], 2: [said(2)], 3: [[at(0), *[i * i % 9973 for i in range(90)], at(0.9)]]}
    )
    decoder = SegmentDecoder(model, num_slots=3)
    found = answers(decoder, [job(window) for window in (1, 2, 3)])
    assert found[1].ids == said(1) and found[1].temperature == 0.4 and found[1].num_fallbacks == 2  # type: ignore[union-attr]
    assert found[2].temperature == found[3].temperature == 0.0  # type: ignore[union-attr]
    assert model.attempts == {1: 2, 2: 0, 3: 0}
    assert decoder.counters["windows"] == 3  # encoded once
    # The loop was seen long before the end of the context, and the retries ran beside the long window.
    assert decoder.counters["decode_steps"] < 2 * 64 + 40


def test_when_every_temperature_fails_the_best_is_cut() -> None:
    model = ScriptedWhisper({1: [LOOP]})
    found = answers(SegmentDecoder(model, num_slots=2), [job(1, temperatures=(0.0, 0.2), alignment=True)])
    assert [i for i in found[1].ids if i < EOT] == [7, 8]  # type: ignore[union-attr]
    assert len(found[1].begins) == 3  # type: ignore[union-attr, arg-type]


def test_speech_that_repeats_itself_is_believed_after_three_tries() -> None:
    chorus = [at(0), *[7, 8, 9, 10] * 11, at(0.9)]
    model = ScriptedWhisper({1: [chorus]})
    found = answers(SegmentDecoder(model, num_slots=2), [job(1)])
    assert found[1].ids == chorus and found[1].compression_ratio > 2.4  # type: ignore[union-attr]
    assert model.attempts == {1: 2}


def test_prompts_come_with_every_attempt() -> None:
    model = ScriptedWhisper({1: [LOOP, said(1)]})
    answers(SegmentDecoder(model, num_slots=2), [job(1, prompt=(11, 12))])
    assert model.prompts == [[TOKENS.startofprev, 11, 12, TOKENS.sot]] * 2


@pytest.mark.parametrize("options", [{"beam_size": 3}, {"beam_size": 2, "patience": 2.0, "length_penalty": 1.0}])
def test_beams_share_a_window(options: dict[str, Any]) -> None:
    model = ScriptedWhisper({1: [said(1)], 2: [said(2)]})
    found = answers(SegmentDecoder(model, num_slots=5), [job(w, alignment=True, **options) for w in (1, 2)])
    assert {w: found[w].ids for w in (1, 2)} == {w: said(w) for w in (1, 2)}  # type: ignore[union-attr]
    assert found[2].begins is not None and len(found[2].begins) == 7  # type: ignore[union-attr]


def test_samples_do_not_depend_on_the_batch() -> None:
    """With flat logits the noise decides: the same window, alone and among others, at every temperature."""

    class Flat(ScriptedWhisper):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            out = super().logits(hidden) / 30.0
            out[:, EOT] += 8.0
            return out

    options = {"temperatures": (1.0,), "best_of": 2, "logprob_threshold": -100.0, "compression_ratio_threshold": 99.0}
    scripts = {window: [said(window)] for window in range(1, 6)}
    together = answers(SegmentDecoder(Flat(scripts), num_slots=8), [job(window, **options) for window in (4, 2, 1, 5)])
    for window, found in together.items():
        alone = answers(SegmentDecoder(Flat(scripts), num_slots=2), [job(window, **options)])
        assert alone[window].ids == found.ids  # type: ignore[union-attr]
    assert len({tuple(found.ids) for found in together.values()}) == 4  # type: ignore[union-attr]


def test_errors_end_one_window_alone() -> None:
    scripts = {window: [said(window)] for window in (1, 2, 3)}
    model = ScriptedWhisper(scripts)
    model.fail_on = 2
    found = answers(SegmentDecoder(model, num_slots=4), [job(window) for window in (1, 2, 3)])
    assert isinstance(found[2], RuntimeError) and found[1].ids == said(1) and found[3].ids == said(3)  # type: ignore[union-attr]
    model = ScriptedWhisper(scripts)
    model.nan_on = 3
    found = answers(SegmentDecoder(model, num_slots=4), [job(window) for window in (1, 2, 3)])
    assert isinstance(found[3], ArithmeticError) and found[1].ids == said(1) and found[2].ids == said(2)  # type: ignore[union-attr]

    def broken() -> torch.Tensor:
        raise ValueError("no audio")

    bad = job(1)
    bad.load = broken
    found = answers(SegmentDecoder(ScriptedWhisper(scripts), num_slots=4, encoder_batch=2), [bad, job(2)])
    assert isinstance(found[1], ValueError) and found[2].ids == said(2)  # type: ignore[union-attr]


def test_the_language_is_asked_of_one_window_at_a_time() -> None:
    tokens = WhisperTokens.of_vocabulary(51865)
    ids = [tokens.timestamp_begin, 5, 6, tokens.timestamp_begin + 20]
    model = ScriptedWhisper({window: [ids] for window in (1, 2, 3)}, tokens=tokens)
    model.config.vocab_size = 51864  # the scripted logits' width
    model.languages = {1: {"en": 0.4, "de": 0.35, "fr": 0.25}, 2: {"en": 0.1, "de": 0.8, "fr": 0.1}}
    choice = LanguageChoice(max_looks=3)
    found = answers(SegmentDecoder(model, num_slots=4), [job(window, language=choice) for window in (1, 2, 3)])
    assert choice.code == "de" and len(found) == 3
    starts = [prompt for prompt in model.prompts if prompt != [tokens.sot]]
    assert all(prompt[:3] == [tokens.sot, tokens.languages["de"], tokens.transcribe] for prompt in starts)
    assert model.prompts.count([tokens.sot]) == 2


@pytest.mark.parametrize("num_steps", range(0, 14, 2))
@pytest.mark.parametrize("options", [{}, {"beam_size": 3}])
def test_dropping_at_any_time_frees_the_slots(num_steps: int, options: dict[str, Any]) -> None:
    model = ScriptedWhisper({1: [LOOP, said(1)], 2: [said(2)], 3: [said(3)]})
    decoder = SegmentDecoder(model, num_slots=3)
    for window in (1, 2, 3):
        decoder.add(job(window, **options))
    found = {}
    for _ in range(num_steps):
        found.update({f.job.owner: f.result for f in decoder.step()})
    decoder.drop(1)
    while decoder.has_work():
        found.update({f.job.owner: f.result for f in decoder.step()})
    assert decoder.num_free == (3, 3)
    assert found[2].ids == said(2) and found[3].ids == said(3)  # type: ignore[union-attr]
    assert 1 not in found


def test_somebody_who_is_waited_for_goes_first() -> None:
    model = ScriptedWhisper({window: [said(window)] for window in range(1, 7)})
    decoder = SegmentDecoder(model, num_slots=1)
    for window in range(1, 6):
        decoder.add(job(window))
    urgent = job(6)
    urgent.due = 1.0
    decoder.step()
    decoder.add(urgent)
    assert decoder.earliest_due() == 1.0
    order = []
    while decoder.has_work():
        order += [finished.job.owner for finished in decoder.step()]
    assert order == [1, 6, 2, 3, 4, 5]
    assert BEGIN > EOT


def drafted(draft: list[int], **options: Any) -> tuple[Decoded, SegmentDecoder]:
    model = ScriptedWhisper({1: [[at(0), *range(10, 40), at(2)]], 2: [said(2)]})
    decoder = SegmentDecoder(model, num_slots=4)
    asked = job(1, **options)
    asked.draft = tuple(draft)
    found = answers(decoder, [asked, job(2)])
    assert isinstance(found[1], Decoded) and isinstance(found[2], Decoded) and found[2].ids == said(2)
    return found[1], decoder


@pytest.mark.parametrize("options", [{}, {"alignment": True}, {"prompt": (5, 6)}, {"max_tokens": 20}])
@pytest.mark.parametrize(
    "draft",
    [
        [at(0), *range(10, 40), at(2)],
        [at(0), *range(10, 30), at(1)],
        [at(0), *range(10, 20), 7, *range(21, 40)],
        [at(0.5), 3, 3, 3],
        [*range(10, 40)] * 20,  # more than there is room for
        [EOT, EOT + 1, 10],
    ],
)
def test_a_draft_changes_no_token(draft: list[int], options: dict[str, Any]) -> None:
    plain, alone = drafted([], **options)
    found, decoder = drafted(draft, **options)
    assert (found.ids, found.text, found.begins) == (plain.ids, plain.text, plain.begins)
    assert found.logprobs == pytest.approx(plain.logprobs) and found.avg_logprob == pytest.approx(plain.avg_logprob)
    assert decoder.num_tokens == alone.num_tokens
    assert decoder.counters["decode_steps"] <= alone.counters["decode_steps"]


def test_a_draft_that_holds_is_one_pass() -> None:
    _, decoder = drafted([at(0), *range(10, 40), at(2)])
    alone = SegmentDecoder(ScriptedWhisper({2: [said(2)]}), num_slots=4)
    answers(alone, [job(2)])
    assert decoder.counters["decode_steps"] <= alone.counters["decode_steps"] + 1


def test_a_draft_helps_greedy_decoding_only() -> None:
    loop = [7, 8] * 60
    model = ScriptedWhisper({1: [[at(0), *loop], said(1)]})
    asked = job(1, temperatures=(0.0, 0.4))
    asked.draft = (at(0), *loop)
    decoder = SegmentDecoder(model, num_slots=4)
    found = answers(decoder, [asked])[1]
    assert isinstance(found, Decoded) and found.ids == said(1) and found.temperature == 0.4
    assert decoder._choice.num_accepted > 10  # the loop was noticed within the draft as without it
    beams = job(2, beam_size=3)
    beams.draft = tuple(said(2))
    decoder = SegmentDecoder(ScriptedWhisper({2: [said(2)]}), num_slots=4)
    answers(decoder, [beams])
    assert decoder._choice.num_drafted == 0


def test_an_adopted_window_is_another_owners() -> None:
    for num_steps in range(6):
        decoder = SegmentDecoder(ScriptedWhisper({w: [said(w)] for w in (1, 2)}), num_slots=2)
        first, other = job(1, owner="a"), job(2, owner="b")
        for item in (first, other):
            decoder.add(item)
        found = [finished for _ in range(num_steps) for finished in decoder.step()]
        decoder.adopt(first, "c", 1.0)
        assert found or decoder.earliest_due() == 1.0
        decoder.drop("a")
        while decoder.has_work():
            found += decoder.step()
        assert {finished.job.owner for finished in found} == {"b", "c"} and decoder.num_free == (2, 2)
