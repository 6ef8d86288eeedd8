"""The speech detector against its authors' own model (recorded), and itself in every other way of being called."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import motet_demo
from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.models import vad as vad_module
from motet.models.onnx_weights import read_onnx_weights
from motet.models.vad import WINDOW, SileroVAD, VADStreams, packaged_weights
from motet.pipelines.media import decode_audio, to_s16

RECORDED = Path(__file__).parent / "silero_vad_probabilities.json"


@pytest.fixture(scope="module")
def vad() -> SileroVAD:
    return SileroVAD.load()


@pytest.fixture(scope="module")
def speech() -> torch.Tensor:
    """Nine seconds with a pause, whole windows."""
    clips = [
        decode_audio(path) for path, _ in motet_demo.clips() if path.name in ("vm-mismatch.flac", "tt-allbusy.flac")
    ]
    whole = torch.from_numpy(np.concatenate([clips[1], np.zeros(16000, np.float32), clips[0]]))
    return whole[: len(whole) // WINDOW * WINDOW]


def test_probabilities_are_those_of_the_authors_model(vad: SileroVAD) -> None:
    recorded = json.loads(RECORDED.read_text())["probabilities"]
    clips = {path.name: path for path, _ in motet_demo.clips()}
    for name, expected in recorded.items():
        got = vad.file(decode_audio(clips[name]))
        assert got.shape == (len(expected),)
        assert torch.allclose(got, torch.tensor(expected), atol=1e-4), name


def test_speech_is_told_from_what_is_none(vad: SileroVAD, speech: torch.Tensor) -> None:
    assert (vad.file(speech) > 0.5).float().mean() > 0.7
    noise = torch.randn(5 * 16000, generator=torch.Generator().manual_seed(0)) * 0.05
    tone = torch.sin(torch.arange(5 * 16000) * 0.17) * 0.3
    for nothing in (torch.zeros(5 * 16000), noise, tone):
        assert vad.file(nothing).max() < 0.5


def test_blocks_do_not_show(vad: SileroVAD, speech: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = vad.file(speech)
    monkeypatch.setattr(vad_module, "_BLOCK", 7)
    monkeypatch.setattr(vad_module, "_SEQUENCE", 50)
    assert torch.allclose(vad.file(speech), whole, atol=1e-5)


def test_a_scan_in_pieces_equals_the_whole(vad: SileroVAD, speech: torch.Tensor) -> None:
    whole = vad.file(speech[:-7])
    draw, scan, at = random.Random(0), vad.scan(), 0
    pieces = []
    while at < len(speech) - 7:
        size = draw.choice([0, 1, 2, 30]) * WINDOW
        pieces.append(scan.push(speech[at : min(at + size, len(speech) - 7)]))
        at += size
    assert torch.allclose(torch.cat(pieces), whole, atol=1e-5)


def test_streams_together_equal_each_alone_and_the_file(vad: SileroVAD, speech: torch.Tensor) -> None:
    """Five streams of different audio, fed pieces of different lengths at different times, over reused slots."""
    draw = random.Random(0)
    audio = [speech.roll(-i * 20 * WINDOW)[: (60 + 15 * i) * WINDOW] for i in range(5)]
    streams = VADStreams(vad, 8)
    streams.run([1, 3], [torch.randn(4 * WINDOW), torch.randn(WINDOW)])
    slots = [6, 1, 3, 0, 7]
    for slot in slots:
        streams.reset(slot)
    heard = [0] * 5
    got: list[list[float]] = [[] for _ in audio]
    while any(at < len(clip) for at, clip in zip(heard, audio)):
        turn = [i for i in range(5) if heard[i] < len(audio[i]) and draw.random() < 0.7]
        draw.shuffle(turn)
        pieces = [audio[i][heard[i] : heard[i] + WINDOW * draw.choice([1, 1, 2, 9])] for i in turn]
        for i, piece, probs in zip(turn, pieces, streams.run([slots[i] for i in turn], pieces)):
            heard[i] += len(piece)
            got[i] += probs
    for clip, probs in zip(audio, got):
        assert torch.allclose(torch.tensor(probs), vad.file(clip), atol=1e-4)


def test_a_stream_that_sends_no_numbers_hurts_neither_others_nor_its_own_future(
    vad: SileroVAD, speech: torch.Tensor
) -> None:
    streams = VADStreams(vad, 2)
    bad = torch.full((WINDOW,), float("nan"))
    first = streams.step([0, 1], torch.stack([bad, speech[:WINDOW]]))
    assert abs(first[1] - float(vad.file(speech[:WINDOW])[0])) < 1e-5
    later = streams.run([0], [speech[: 40 * WINDOW]])[0]
    assert max(later) > 0.5


def test_odd_lengths(vad: SileroVAD, speech: torch.Tensor) -> None:
    assert vad.file(torch.zeros(0)).shape == (0,)
    assert vad.file(torch.zeros(1)).shape == (1,)
    completed = torch.nn.functional.pad(speech[: 10 * WINDOW + 3], (0, WINDOW - 3))
    assert torch.allclose(vad.file(speech[: 10 * WINDOW + 3]), vad.file(completed), atol=1e-6)
    assert VADStreams(vad, 1).run([], []) == []


def test_read_only_arrays_are_taken_without_a_word(vad: SileroVAD, speech: torch.Tensor) -> None:
    received = np.frombuffer(speech.numpy().tobytes(), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(vad.file(received), vad.file(speech), atol=1e-6)
        as_s16 = np.frombuffer(to_s16(speech.numpy()), np.int16)
        assert torch.allclose(vad.file(as_s16), vad.file(speech), atol=1e-6)


def test_other_audio_is_refused(vad: SileroVAD) -> None:
    for wrong in (torch.zeros(2, 512), torch.zeros(512, dtype=torch.int32), np.zeros(512)):
        with pytest.raises(InvalidRequest, match="float32"):
            vad.file(wrong)  # type: ignore[arg-type]


def test_safetensors_are_read_and_other_weights_refused(vad: SileroVAD, tmp_path: Path) -> None:
    weights = vad_module._from_onnx(read_onnx_weights(packaged_weights()))
    save_file(weights, tmp_path / "vad.safetensors")
    clip = torch.randn(20 * WINDOW) * 0.1
    assert torch.equal(SileroVAD.load(tmp_path / "vad.safetensors").file(clip), vad.file(clip))
    save_file(weights | {"conv2.bias": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"conv2\.bias"):
        SileroVAD.load(tmp_path / "other.safetensors")


def test_damaged_onnx_files_are_refused_or_lack_weights(tmp_path: Path) -> None:
    data = bytearray(packaged_weights().read_bytes())
    draw = random.Random(1)
    path = tmp_path / "damaged.onnx"
    for _ in range(60):
        damaged = bytearray(data)
        match draw.randrange(3):
            case 0:
                damaged = damaged[: draw.randrange(len(damaged))]
            case 1:
                at = draw.randrange(200)
                damaged[at] = draw.randrange(256)
            case _:
                damaged = bytearray(draw.randbytes(draw.randrange(100)))
        path.write_bytes(damaged)
        try:
            SileroVAD.load(path)
        except ModelLoadError as error:
            assert str(tmp_path) not in error.message
    with pytest.raises(ModelLoadError, match="FileNotFoundError"):
        SileroVAD.load(tmp_path / "none.onnx")
