"""The speaker encoder against a plain re-implementation of the package's arithmetic, and what its vectors are good for."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import motet_demo
from motet.engine.errors import ModelLoadError
from motet.models.registry import resolve
from motet.models.speaker import WINDOW, SpeakerEncoder, loudness_of, windows
from motet.pipelines.media import decode_audio

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    return SpeakerEncoder.load()


@pytest.fixture(scope="module")
def clips() -> list[torch.Tensor]:
    return [torch.from_numpy(decode_audio(path)) for path, _ in motet_demo.clips()]


def plain_mel(pcm: np.ndarray) -> np.ndarray:
    """Power mel frames [1 + T // 160, 40], frame by frame in float64."""

    def hertz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)

    top = 15 + 27 * math.log(8) / math.log(6.4)
    edges = [hertz(top * index / 41) for index in range(42)]
    filters = np.zeros((40, 201))
    for band in range(40):
        low, centre, high = edges[band : band + 3]
        for index in range(201):
            at = index * 40.0
            height = min((at - low) / (centre - low), (high - at) / (high - centre))
            filters[band, index] = max(0.0, height) * 2 / (high - low)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    padded = np.pad(pcm.astype(np.float64), 200)
    frames = [padded[at : at + 400] * hann for at in range(0, len(pcm) + 1, 160)]
    return np.abs(np.fft.rfft(np.stack(frames))) ** 2 @ filters.T


def plain_vector(mel: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """One window [frames, 40] through the gates, step by step in float64."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    inputs = mel
    for layer in range(3):
        hidden, cell, outputs = np.zeros(256), np.zeros(256), []
        for row in inputs:
            gates = (
                weights[f"lstm.weight_ih_l{layer}"] @ row
                + weights[f"lstm.weight_hh_l{layer}"] @ hidden
                + weights[f"lstm.bias_ih_l{layer}"]
                + weights[f"lstm.bias_hh_l{layer}"]
            )
            take, forget, new, show = np.split(gates, 4)
            cell = sigmoid(forget) * cell + sigmoid(take) * np.tanh(new)
            hidden = sigmoid(show) * np.tanh(cell)
            outputs.append(hidden)
        inputs = np.stack(outputs)
    vector = np.maximum(weights["linear.weight"] @ inputs[-1] + weights["linear.bias"], 0)
    return vector / np.linalg.norm(vector)


def test_mel_and_vectors_are_those_of_plain_arithmetic(encoder: SpeakerEncoder, clips: list[torch.Tensor]) -> None:
    weights = {name: tensor.double().numpy() for name, tensor in load_file(resolve("speaker-ge2e").path).items()}
    pcm = clips[1][: 3 * 16_000]
    expected = plain_mel(pcm.numpy())
    mel = encoder.mel(pcm)
    assert mel.shape == expected.shape == (301, 40)
    assert np.abs(mel.numpy() - expected).max() < 1e-5 * expected.max()
    batch = torch.stack([mel[:160], mel[80:240], mel[141:301]])
    vectors = encoder.embed(batch)
    for vector, window in zip(vectors, batch):
        plain = plain_vector(window.double().numpy(), weights)
        assert float(vector.double() @ torch.from_numpy(plain)) > 0.99999
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)


def test_mel_of_a_long_recording_has_no_seams(encoder: SpeakerEncoder) -> None:
    pcm = torch.rand(61 * 16_000, generator=torch.Generator().manual_seed(1)) * 0.2 - 0.1
    whole = encoder.mel(pcm)
    around = encoder.mel(pcm[59 * 16_000 :])
    assert torch.allclose(whole[5920:], around[20:], rtol=1e-4, atol=1e-6)


def test_vectors_do_not_depend_on_the_batch_nor_on_loudness(encoder: SpeakerEncoder, clips: list[torch.Tensor]) -> None:
    pcm = torch.cat(clips[:3])
    spans = windows(0, pcm.shape[0], 4000)
    assert len(spans) > 64  # more than one batch of the encoder
    together = encoder.embed_spans(pcm, spans, [0.1] * len(spans))
    for index in (0, 63, 64, len(spans) - 1):
        alone = encoder.embed_spans(pcm, [spans[index]], [0.1])[0]
        assert float(alone @ together[index]) > 0.9999
    quiet = encoder.voice(clips[1] * 0.01)
    assert float(quiet @ encoder.voice(clips[1])) > 0.9999


def test_bf16_gives_nearly_the_same_vectors(encoder: SpeakerEncoder, clips: list[torch.Tensor]) -> None:
    half = SpeakerEncoder.load(dtype=torch.bfloat16)
    pcm = clips[1]
    spans = windows(0, pcm.shape[0], WINDOW // 2)
    rms = [loudness_of(pcm)] * len(spans)
    alike = (half.embed_spans(pcm, spans, rms) * encoder.embed_spans(pcm, spans, rms)).sum(1)
    assert float(alike.min()) > 0.99


def test_one_voice_is_alike_across_clips_and_another_is_not(encoder: SpeakerEncoder, clips: list[torch.Tensor]) -> None:
    def other(pcm: torch.Tensor) -> torch.Tensor:  # 1.3 times slower: pitch and formants lower
        longer = torch.nn.functional.interpolate(pcm[None, None], scale_factor=1.3, mode="linear")
        return longer[0, 0]

    own = torch.stack([encoder.voice(clip) for clip in clips[:6]])
    others = torch.stack([encoder.voice(other(clip)) for clip in clips[:6]])
    pairs = torch.triu_indices(6, 6, 1)
    same = (own @ own.T)[pairs[0], pairs[1]]
    assert float(same.mean()) > 0.8 > 0.7 > float((own @ others.T).mean())


def test_speech_shorter_than_a_window_still_sounds_like_its_speaker(
    encoder: SpeakerEncoder, clips: list[torch.Tensor]
) -> None:
    pcm = clips[1]
    short = encoder.embed_spans(pcm, [(16_000, 16_000 + 12_800)], [loudness_of(pcm)])[0]
    assert float(short @ encoder.voice(pcm)) > 0.65


def test_windows_cover_speech_evenly() -> None:
    assert windows(100, 9000, 12_800) == [(100, 9000)]
    spans = windows(1000, 1000 + 5 * 16_000, 12_800)
    assert spans[0][0] == 1000 and spans[-1][1] == 1000 + 5 * 16_000
    steps = {second[0] - first[0] for first, second in zip(spans, spans[1:])}
    assert max(steps) <= 12_800 and max(steps) - min(steps) <= 1
    assert {end - start for start, end in spans} == {WINDOW}


def test_silence_and_nothing_are_no_error(encoder: SpeakerEncoder) -> None:
    assert encoder.embed_spans(torch.zeros(100), [], []).shape == (0, 256)
    silent = encoder.embed_spans(torch.zeros(WINDOW), [(0, WINDOW)], [0.0])
    assert bool(torch.isfinite(silent).all())


def test_the_file_is_the_one_of_the_card_and_others_are_refused(tmp_path: Path) -> None:
    path = resolve("speaker-ge2e").path
    assert path.stat().st_size <= 6_000_000
    card = (ROOT / "demo" / "speaker-ge2e.md").read_text(encoding="utf-8")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in card
    tensors = load_file(path)
    del tensors["linear.bias"]
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"other\.safetensors: not a GE2E speaker encoder: linear\.bias"):
        SpeakerEncoder.load(tmp_path / "other.safetensors")
