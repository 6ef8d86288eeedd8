"""The recogniser on human speech with the packaged tiny.en, float32, against transformers and against itself."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from motet.engine.asr_engine import ASREngine
from motet.engine.asr_load import load_asr
from motet.engine.config import EngineConfig, HostConfig
from motet.engine.decode_job import DecodeJob, DecodeOptions
from motet.engine.language_choice import LanguageChoice
from motet.engine.segment_decoder import SegmentDecoder
from motet.engine.types import AnyEvent, AudioRequest, Done, Recognized, Segment, TranscribeOptions, Word
from motet_demo import clips

from ..models.whisper_models import tiny_hf

RATE = 16_000
_ids = itertools.count()


@lru_cache(maxsize=1)
def running() -> ASREngine:
    return load_asr("whisper-tiny.en", HostConfig(engine=EngineConfig(dtype="float32", device="cpu", max_num_seqs=6)))


@lru_cache(maxsize=1)
def voices() -> list[tuple[NDArray[np.float32], str]]:
    """Samples and words of the packaged clips."""
    found = []
    for path, text in clips():
        with av.open(str(path)) as file:
            frames = [frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)]
        pcm = np.concatenate(frames)
        scale = 1.0 if pcm.dtype.kind == "f" else 32768.0
        found.append(((pcm / scale).astype(np.float32), text))
    return found


def events_of(asked: list[AudioRequest]) -> list[AnyEvent]:
    engine = running()
    for item in asked:
        engine.submit(item)
    events: list[AnyEvent] = []
    while engine.has_work():
        events += engine.step()
    return events


def request(pcm: Any, **options: Any) -> AudioRequest:
    data = np.asarray(pcm, "<f4").tobytes()
    return AudioRequest(request_id=f"s{next(_ids)}", model="m", pcm=data, options=TranscribeOptions(**options))


def segments(events: list[AnyEvent], item: AudioRequest) -> list[Segment]:
    return [s for e in events if isinstance(e, Recognized) and e.request_id == item.request_id for s in e.segments]


def text(found: list[Segment]) -> str:
    return "".join(s.text for s in found)


def bare(words: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", words.casefold())


def errors(hypothesis: str, reference: str) -> int:
    """Words to change, drop or add."""
    a, b = bare(hypothesis), bare(reference)
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


def test_batched_equals_alone_and_says_what_was_said() -> None:
    asked = [request(pcm, word_timestamps=True) for pcm, _ in voices()]
    together = events_of(asked)
    wrong = sum(errors(text(segments(together, item)), said) for item, (_, said) in zip(asked, voices(), strict=True))
    total = sum(len(bare(said)) for _, said in voices())
    assert wrong / total < 0.12, wrong / total
    for item, (pcm, _) in list(zip(asked, voices(), strict=True))[2::4]:
        alone = request(pcm, word_timestamps=True)
        # Numbers may differ in their last bits with the number of rows; what is said and when may not.
        for one, other in zip(segments(events_of([alone]), alone), segments(together, item), strict=True):
            assert (one.text, one.tokens, one.temperature) == (other.text, other.tokens, other.temperature)
            assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-3)
            times = [(w.start, w.end) for w in one.words or []]
            assert np.allclose(times, [(w.start, w.end) for w in other.words or []], atol=0.041)
    for item, (pcm, _) in zip(asked, voices(), strict=True):
        found = segments(together, item)
        times = [t for s in found for w in s.words or [] for t in (w.start, w.end)]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= len(pcm) / RATE
        assert all(0 < w.probability <= 1 for s in found for w in s.words or [])
        assert all(text([s]) == "".join(w.word for w in s.words or []) for s in found)


def test_greedy_ids_equal_transformers() -> None:
    """Whole windows under the same rules: token for token what transformers' model and processors give."""
    reference, model = tiny_hf(), running().model
    chosen = [torch.from_numpy(pcm) for pcm, _ in voices()[2:4]]
    decoder = SegmentDecoder(model, num_slots=2)
    for at, pcm in enumerate(chosen):
        job = DecodeJob(
            owner=at,
            load=lambda pcm=pcm: pcm,  # type: ignore[misc]
            num_samples=len(pcm),
            options=DecodeOptions(temperatures=(0.0,)),
            language=LanguageChoice("en"),
        )
        decoder.add(job)
    found: dict[int, list[int]] = {}
    while decoder.has_work():
        for finished in decoder.step():
            assert finished.result is not None
            found[finished.job.owner] = finished.result.ids
    rules = processors(model)
    with torch.no_grad():
        encoded = reference.model.encoder(model.log_mel(chosen))
        for at in range(len(chosen)):
            ids = torch.tensor([[model.tokens.sot]])
            window = encoded.last_hidden_state[at : at + 1]
            while ids.shape[1] < 60:
                logits = reference(encoder_outputs=(window,), decoder_input_ids=ids, use_cache=False).logits[:, -1]
                for rule in rules:
                    logits = rule(ids, logits)
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
                if ids[0, -1] == model.tokens.eot:
                    break
            assert found[at] == ids[0, 1:-1].tolist()


def processors(model: Any) -> list[Any]:
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    eot = model.tokens.eot
    config = GenerationConfig(eos_token_id=eot, bos_token_id=eot, no_timestamps_token_id=model.tokens.no_timestamps)
    config.max_initial_timestamp_index = 50
    return [
        SuppressTokensLogitsProcessor(list(model.suppress_tokens)),
        SuppressTokensAtBeginLogitsProcessor(list(model.begin_suppress), begin_index=1),
        WhisperTimeStampLogitsProcessor(config, begin_index=1),
    ]


def trimmed(pcm: NDArray[np.float32]) -> NDArray[np.float32]:
    """Without the silence at its ends, so that its place is that of its first and last word."""
    loud = np.flatnonzero(np.abs(pcm) > 0.02)
    return pcm[max(0, loud[0] - 160) : loud[-1] + 160]


@lru_cache(maxsize=1)
def joined() -> tuple[NDArray[np.float32], list[tuple[float, float, str]]]:
    """Four clips at known seconds of one recording."""
    pieces, places, position = [], [], 0
    gaps = [0.7, 3.0, 0.9, 6.5]
    for gap, (pcm, said) in zip(gaps, voices()[2:6], strict=False):
        silence = np.random.default_rng(0).normal(0, 1e-4, round(gap * RATE)).astype(np.float32)
        voice = trimmed(pcm)
        start = position + len(silence)
        position = start + len(voice)
        places.append((start / RATE, position / RATE, said))
        pieces += [silence, voice]
    pieces.append(np.zeros(RATE, np.float32))
    return np.concatenate(pieces), places


def words_of(found: list[Segment]) -> list[Word]:
    return [w for s in found for w in s.words or []]


def test_clips_at_known_offsets_have_their_times() -> None:
    pcm, places = joined()
    item = request(pcm, word_timestamps=True)
    words = words_of(segments(events_of([item]), item))
    for start, end, said in places:
        mine = [w for w in words if start - 0.3 < (w.start + w.end) / 2 < end + 0.3]
        assert errors("".join(w.word for w in mine), said) <= 2
        assert mine[0].start == pytest.approx(start, abs=0.1)
        assert mine[-1].end == pytest.approx(end, abs=0.2)


def streamed(pcm: NDArray[np.float32], piece_s: float, **options: Any) -> list[Segment]:
    item = request(pcm[:0], **options)
    item.open = True
    engine = running()
    engine.submit(item)
    events: list[AnyEvent] = []
    size = round(piece_s * RATE)
    for position in range(0, len(pcm), size):
        data = pcm[position : position + size].tobytes()
        engine.append(item.request_id, [], pcm=data, last=position + size >= len(pcm))
        while engine.has_work():
            events += engine.step()
    assert isinstance(events[-1], Done)
    return segments(events, item)


def test_streamed_says_the_same_as_the_file() -> None:
    pcm, _ = joined()
    whole = request(pcm)
    expected = text(segments(events_of([whole]), whole))
    assert errors(text(streamed(pcm, 0.1711)), expected) <= 2


def test_how_a_stream_is_cut_and_guessed_at_changes_no_word() -> None:
    """In small pieces its ends are decoded ahead of time, with partials every text has a draft; all at once neither is so."""
    pcm = np.concatenate([np.append(clip, np.zeros(RATE // 2, np.float32)) for clip, _ in voices()[:3]])
    options: dict[str, Any] = {"end_silence_s": 0.15, "timestamps": True}
    expected = text(streamed(pcm, 1e3, **options))
    windows = running().decoder.counters["windows"]
    assert text(streamed(pcm, 0.02, **options)) == expected
    ahead = running().decoder.counters["windows"] - windows
    assert text(streamed(pcm, 0.1, partial_s=0.7, **options)) == expected
    assert ahead >= len(streamed(pcm, 1e3, **options)) and running().decoder._choice.num_accepted > 20


def test_drafts_change_no_token() -> None:
    model = running().model
    chosen = [torch.from_numpy(pcm) for pcm, _ in voices()[2:4]]

    def decoded(drafts: list[list[int]]) -> tuple[list[list[int]], int]:
        decoder = SegmentDecoder(model, num_slots=2)
        for at, pcm in enumerate(chosen):
            decoder.add(
                DecodeJob(
                    owner=at,
                    load=lambda pcm=pcm: pcm,  # type: ignore[misc]
                    num_samples=len(pcm),
                    options=DecodeOptions(temperatures=(0.0,)),
                    language=LanguageChoice("en"),
                    draft=tuple(drafts[at]),
                )
            )
        found: dict[int, list[int]] = {}
        while decoder.has_work():
            for finished in decoder.step():
                assert finished.result is not None
                found[finished.job.owner] = finished.result.ids
        return [found[0], found[1]], decoder.counters["decode_steps"]

    plain, num_steps = decoded([[], []])
    for change in (lambda ids: ids, lambda ids: [*ids[:4], 11, *ids[5:]], lambda ids: ids[:-3], lambda ids: ids[::-1]):
        again, fewer = decoded([change(ids) for ids in plain])
        assert again == plain and fewer <= num_steps
    assert decoded(plain)[1] <= 2


def test_a_forced_cut_neither_drops_nor_repeats_words() -> None:
    """Speech without a pause, cut every few seconds: about the same words come out, of a file and of a stream."""
    voice = np.concatenate([trimmed(pcm) for pcm, _ in voices()[:2]])
    whole, cut = request(voice, min_silence_s=3.0), request(voice, max_segment_s=6.0, min_silence_s=3.0)
    events = events_of([whole, cut])
    reference = text(segments(events, whole))
    live = streamed(voice, 0.5, max_segment_s=6.0, end_silence_s=3.0)
    for found in (segments(events, cut), live):
        assert errors(text(found), reference) <= 0.15 * len(bare(reference))
        starts = [s.start for s in found]
        assert starts == sorted(starts) and len(starts) >= 3


def test_noise_silence_and_tones_are_no_text() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 8 * RATE)
    hum = 0.1 * np.sin(np.arange(8 * RATE) * 2 * np.pi * 220 / RATE)
    asked = [request(pcm) for pcm in (np.zeros(8 * RATE), noise, hum, noise[:800])]
    events = events_of(asked)
    assert [text(segments(events, item)) for item in asked] == [""] * 4


def test_beams_and_prompts_on_speech() -> None:
    pcm, said = voices()[3]
    asked = [
        request(pcm, beam_size=3),
        request(pcm, prompt="A message.", hotwords="connect"),
        request(pcm, timestamps=False),
    ]
    events = events_of(asked)
    for item in asked:
        assert errors(text(segments(events, item)), said) <= 1
