"""Who spoke when: two voices made from one speaker's clips, enrolment, splitting of segments, clustering, smoothing."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from torch import Tensor

import motet_demo
from motet.engine.diarizer import Diarization, Diarizer, Turn, diarize, label, speech_of
from motet.engine.errors import InvalidRequest
from motet.engine.speaker_clusters import best_path, find_voices
from motet.engine.types import Segment, TranscribeOptions, Word
from motet.models.speaker import SpeakerEncoder
from motet.pipelines.media import decode_audio

RATE = 16_000


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    return SpeakerEncoder.load()


@pytest.fixture(scope="module")
def voices() -> dict[str, list[Tensor]]:
    """Ten clips of one speaker, and the same played 1.3 times slower and faster: pitch and formants of other people."""
    clips = [torch.from_numpy(decode_audio(path)) for path, _ in motet_demo.clips()]
    return {"her": clips, "low": [played(clip, 1.3) for clip in clips], "high": [played(clip, 0.77) for clip in clips]}


def played(pcm: Tensor, slower: float) -> Tensor:
    return torch.nn.functional.interpolate(pcm[None, None], scale_factor=slower, mode="linear")[0, 0]


def conversation(turns: list[tuple[str, Tensor]], gap_s: float = 0.3) -> tuple[Tensor, list[tuple[str, float, float]]]:
    """The turns one after another, and who speaks from when to when."""
    pieces: list[Tensor] = []
    truth = []
    at = 0
    for who, pcm in turns:
        truth.append((who, at / RATE, (at + pcm.shape[0]) / RATE))
        pieces += [pcm, torch.zeros(round(gap_s * RATE))]
        at += pcm.shape[0] + round(gap_s * RATE)
    return torch.cat(pieces), truth


def transcript(truth: list[tuple[str, float, float]], turns_a_segment: int = 2) -> tuple[list[Segment], list[str]]:
    """Words of 0.3 s, segments that run over speakers, and who truly says each word."""
    segments: list[Segment] = []
    said: list[str] = []
    for first in range(0, len(truth), turns_a_segment):
        words = []
        for who, start, end in truth[first : first + turns_a_segment]:
            times = np.arange(start + 0.05, end - 0.3, 0.3)
            words += [
                Word(word=f" w{i}", start=float(t), end=float(t) + 0.25, probability=0.9) for i, t in enumerate(times)
            ]
            said += [who] * len(times)
        text = "".join(word.word for word in words)
        segments.append(
            Segment(id=len(segments), start=words[0].start, end=words[-1].end, text=text, words=words, tokens=[1, 2])
        )
    return segments, said


def spoken(segments: list[Segment]) -> list[str]:
    return [word.speaker or "" for segment in segments for word in segment.words or ()]


def right(found: list[str], said: list[str]) -> float:
    """Share of words whose label is that of their speaker, labels matched to speakers as well as they can be."""
    labels, people = sorted(set(found)), sorted(set(said))
    people += ["nobody"] * max(0, len(labels) - len(people))
    return max(
        sum(match[labels.index(a)] == b for a, b in zip(found, said)) / len(said)
        for match in itertools.permutations(people, len(labels))
    )


def test_two_voices_are_told_apart(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    turns = [(who, voices[who][index]) for index in range(6) for who in ("low", "her")]
    pcm, truth = conversation(turns)
    segments, said = transcript(truth)
    result = diarize(pcm, segments, TranscribeOptions(diarize=True), encoder)
    found = spoken(result)
    assert set(found) == {"SPEAKER_00", "SPEAKER_01"}
    assert found[0] == "SPEAKER_00"  # named in order of appearance
    assert right(found, said) >= 0.9
    # Segments that ran over both are split, and nothing of them is lost.
    assert [segment.id for segment in result] == list(range(len(result)))
    assert len(result) >= len(truth) - 1
    assert "".join(segment.text for segment in result) == "".join(segment.text for segment in segments)
    assert all({word.speaker for word in segment.words or ()} == {segment.speaker} for segment in result)
    assert all(a.end <= b.start for a, b in itertools.pairwise(result))
    assert segments[0].speaker is None  # what came in is as it was


def test_one_voice_is_one_speaker(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    pcm, truth = conversation([("her", clip) for clip in voices["her"]])
    segments, _ = transcript(truth)
    result = diarize(pcm, segments, TranscribeOptions(), encoder)
    assert set(spoken(result)) == {"SPEAKER_00"}
    assert [(s.text, s.tokens) for s in result] == [(s.text, s.tokens) for s in segments]


def test_a_number_of_speakers_is_obeyed(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    turns = [(who, voices[who][index]) for index in range(3) for who in ("her", "high", "low")]
    pcm, truth = conversation(turns)
    segments, said = transcript(truth, turns_a_segment=3)
    three = spoken(diarize(pcm, segments, TranscribeOptions(num_speakers=3), encoder))
    assert len(set(three)) == 3 and right(three, said) >= 0.9
    for num in (1, 2):
        assert len(set(spoken(diarize(pcm, segments, TranscribeOptions(num_speakers=num), encoder)))) == num


def test_known_speakers_are_called_by_name(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    turns = [(who, voices[who][index]) for index in range(4) for who in ("low", "her")]
    pcm, truth = conversation(turns)
    segments, said = transcript(truth)
    known = (("Allison", voices["her"][8].numpy().tobytes()), ("Mia", voices["high"][8].numpy().tobytes()))
    for num in (None, 2):
        found = spoken(diarize(pcm, segments, TranscribeOptions(known_speakers=known, num_speakers=num), encoder))
        assert set(found) == {"SPEAKER_00", "Allison"}  # Mia says nothing
        hers = [a == "Allison" for a in found]
        assert sum(a == (b == "her") for a, b in zip(hers, said)) >= 0.9 * len(said)


def test_segments_without_words_are_labelled_whole(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    pcm, truth = conversation([(who, voices[who][index]) for index in range(3) for who in ("her", "low")])
    segments = [Segment(id=i, start=start, end=end, text=" x") for i, (_, start, end) in enumerate(truth)]
    result = diarize(pcm, segments, TranscribeOptions(), encoder)
    assert [segment.speaker for segment in result] == ["SPEAKER_00", "SPEAKER_01"] * 3


def test_audio_that_comes_in_pieces_gives_the_same_turns(
    encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]
) -> None:
    pcm, truth = conversation([(who, voices[who][index]) for index in range(4) for who in ("her", "low")])
    regions = [(start, end) for _, start, end in truth]
    whole, pieces = Diarizer(encoder), Diarizer(encoder)
    whole.add(pcm, 0.0, regions)
    for start, end in regions:
        first = int(start * RATE)
        pieces.add(pcm[first : round(end * RATE)], first / RATE, [(start, end)])
    assert [turn.speaker for turn in pieces.turns()] == [turn.speaker for turn in whole.turns()]
    assert np.allclose([turn.end for turn in pieces.turns()], [turn.end for turn in whole.turns()], atol=0.05)


def test_a_recording_is_read_in_bounded_pieces(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    pcm, truth = conversation([(who, voices[who][index]) for index in range(4) for who in ("her", "low")])
    segments, _ = transcript(truth)
    reads: list[tuple[int, int]] = []

    def read(start: int, end: int) -> Tensor:
        reads.append((start, end))
        return pcm[start:end]

    work = Diarization(read, segments, TranscribeOptions(), encoder, regions=[(0.0, pcm.shape[0] / RATE)])
    per_step = []
    result = None
    while result is None:
        before = len(reads)
        result = work.step()
        per_step.append(len(reads) - before)
    heard = per_step.index(0)  # then voices, path and labels, each in steps of their own
    assert set(per_step[:heard]) == {1} and not any(per_step[heard:]) and heard >= 2 and len(per_step) > heard + 2
    assert max(end - start for start, end in reads) <= 31 * RATE
    assert reads[-1][1] == pcm.shape[0]
    whole = diarize(pcm, segments, TranscribeOptions(), encoder, regions=[(0.0, pcm.shape[0] / RATE)])
    assert result == whole and set(spoken(result)) == {"SPEAKER_00", "SPEAKER_01"}


def test_known_voices_are_heard_one_a_step(encoder: SpeakerEncoder, voices: dict[str, list[Tensor]]) -> None:
    pcm, truth = conversation([("her", clip) for clip in voices["her"][:2]])
    segments, _ = transcript(truth)
    known = tuple((name, voices[name][8].numpy().tobytes()) for name in ("her", "high", "low"))
    heard: list[int] = []

    class Counting:
        embed_spans = staticmethod(encoder.embed_spans)

        def voice(self, pcm: Tensor) -> Tensor:
            heard.append(pcm.shape[0])
            return encoder.voice(pcm)

    work = Diarization(lambda a, b: pcm[a:b], segments, TranscribeOptions(known_speakers=known), Counting())
    assert not heard  # opening costs nothing
    result = None
    while result is None:
        before = len(heard)
        result = work.step()
        assert len(heard) - before <= 1
    assert len(heard) == 3 and set(spoken(result)) == {"her"}


def test_silence_and_scraps_are_one_speaker_or_nothing(encoder: SpeakerEncoder) -> None:
    assert Diarizer(encoder).turns() == []
    silent = Diarizer(encoder)
    silent.add(torch.zeros(3 * RATE))
    assert silent.turns() == []
    segment = Segment(id=4, start=0.5, end=0.7, text=" hm")
    assert diarize(torch.zeros(RATE), [segment], TranscribeOptions(), encoder) == [segment]
    assert diarize(torch.zeros(0), [], TranscribeOptions(), encoder) == []
    scrap = torch.rand(RATE, generator=torch.Generator().manual_seed(0)) - 0.5
    (labelled,) = diarize(scrap, [segment], TranscribeOptions(), encoder)
    assert (labelled.speaker, labelled.id) == ("SPEAKER_00", 4)
    broken = torch.full((2 * RATE,), torch.nan)
    assert diarize(broken, [segment], TranscribeOptions(), encoder)[0].text == " hm"


def test_bad_enrolment_is_refused(encoder: SpeakerEncoder) -> None:
    good = torch.rand(RATE)
    for name, pcm in [
        ("", good),
        ("Ann", good[:100]),
        ("Ann", torch.zeros(RATE)),
        ("Ann", torch.full((RATE,), torch.inf)),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            Diarizer(encoder, known=[(name, pcm)])
        assert caught.value.param == "known_speakers"
    with pytest.raises(InvalidRequest):
        Diarizer(encoder, num_speakers=0)
    with pytest.raises(InvalidRequest):
        diarize(good, [], TranscribeOptions(known_speakers=(("Ann", b"abc"),)), encoder)


def test_words_take_the_longest_overlap_or_the_nearest_turn() -> None:
    turns = [Turn(0.0, 1.0, "a"), Turn(1.0, 2.0, "b"), Turn(5.0, 6.0, "c")]
    spans = [(0.2, 0.4), (0.7, 1.1), (0.9, 1.3), (2.5, 2.7), (4.4, 4.6), (9.0, 9.1), (1.5, 1.5)]
    words = [Word(word=f" {start}", start=start, end=end, probability=1.0) for start, end in spans]
    segments = [Segment(id=i, start=w.start, end=w.end, text=w.word, words=[w]) for i, w in enumerate(words)]
    assert spoken(label(segments, turns)) == ["a", "a", "b", "b", "c", "c", "b"]


def test_speech_is_where_the_words_are() -> None:
    words = [Word(word=" a", start=1.0, end=1.2, probability=1.0), Word(word=" b", start=1.5, end=2.0, probability=1.0)]
    late = Word(word=" c", start=4.0, end=4.5, probability=1.0)
    segments = [
        Segment(id=0, start=0.0, end=5.0, text="", words=[*words, late]),
        Segment(id=1, start=7.0, end=8.0, text=""),
    ]
    assert speech_of(segments) == [(1.0, 2.0), (4.0, 4.5), (7.0, 8.0)]


def people(rng: np.random.Generator, num: int) -> np.ndarray:
    """Unit vectors [num, 256], each pair 0.45 alike."""
    axes = np.linalg.qr(rng.normal(size=(256, num + 1)))[0].T
    return np.sqrt(0.45) * axes[0] + np.sqrt(0.55) * axes[1:]


def windows_of(rng: np.random.Generator, person: np.ndarray, count: int) -> np.ndarray:
    """Unit vectors [count, 256] around `person`, each pair 0.72 alike."""
    points = person + rng.normal(0, 0.039, (count, 256))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def test_a_rare_voice_among_many_windows_is_found_and_an_outlier_is_not() -> None:
    rng = np.random.default_rng(0)
    persons = people(rng, 4)
    many = np.concatenate([windows_of(rng, person, count) for person, count in zip(persons, (500, 400, 20, 1))])
    found = find_voices(many, similarity=0.8, min_size=3)
    assert len(found) == 3 and (found @ persons[:3].T).max(0).min() > 0.95
    # Asked for two, the two large ones are taken and not the odd window.
    two = find_voices(many, num=2, min_size=3)
    assert len(two) == 2 and (two @ persons[:2].T).max(0).min() > 0.9
    assert find_voices(many[:1], num=1).shape == (1, 256)
    assert find_voices(many[:0]).shape == (0, 256)


def test_four_hours_of_windows_are_clustered_in_bounded_time() -> None:
    rng = np.random.default_rng(1)
    persons = people(rng, 3)
    vectors = np.concatenate([windows_of(rng, persons[turn % 3], 100) for turn in range(180)])
    begun = time.process_time()
    found = find_voices(vectors, similarity=0.8, min_size=3)
    assert time.process_time() - begun < 5
    assert len(found) == 3 and (found @ persons.T).max(0).min() > 0.99


def test_the_path_prefers_no_switch_to_a_weak_one() -> None:
    scores = np.array([[1, 0], [1, 0], [0.4, 0.6], [1, 0], [0, 1], [0, 1], [0, 1]], np.float32)
    dear = np.full(7, 0.5, np.float32)
    assert best_path(scores, dear).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert best_path(scores, np.zeros(7, np.float32)).tolist() == [0, 0, 1, 0, 1, 1, 1]
    assert best_path(scores[:, :1], dear).tolist() == [0] * 7
