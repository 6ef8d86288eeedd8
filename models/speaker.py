"""Voices as points: the GE2E speaker encoder, which maps 1.6 s of speech to a unit vector of 256.

Knows mel spectrograms of this encoder and its LSTM. Knows nothing of speakers, words or clustering
(`engine/diarizer.py`). Facts of the front end are those of resemblyzer 0.1.4: 16 kHz, 25 ms windows every 10 ms,
40 mel bands of power, no logarithm. Unlike the package, which only raises recordings quieter than -30 dBFS, we bring all
speech to one loudness: between near and far voices of a meeting that is what keeps one person one point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.errors import ModelLoadError
from .registry import resolve
from .safetensors_source import SafetensorsSource
from .whisper_mel import FFT_SIZE, HOP, mel_filters

PACKAGED = "speaker-ge2e"
WINDOW_FRAMES = 160  # what the encoder was trained on: 1.6 s
WINDOW = WINDOW_FRAMES * HOP
_NUM_MELS = 40
_HIDDEN = 256
_LAYERS = 3
_TARGET_RMS = 10 ** (-20 / 20)
_MAX_GAIN = 1000.0
_BATCH = 64  # windows in one LSTM call: the fastest on CPU, and a bound on memory (about 15 MB)
_MEL_CHUNK = 6000  # frames of one STFT call: 1 minute


class SpeakerEncoder(nn.Module):
    """Three LSTM layers of 256, a projection, ReLU, unit length. Similarity of two voices is their dot product."""

    size = _HIDDEN
    filters: Tensor
    hann: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_NUM_MELS, _HIDDEN, _LAYERS, batch_first=True)
        self.linear = nn.Linear(_HIDDEN, _HIDDEN)
        self.register_buffer("filters", mel_filters(_NUM_MELS), persistent=False)
        self.register_buffer("hann", torch.hann_window(FFT_SIZE), persistent=False)

    @classmethod
    def load(
        cls, path: Path | str | None = None, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> SpeakerEncoder:
        """From a safetensors file with the tensors `lstm.*` and `linear.*`; None: the packaged one, `speaker-ge2e`.

        Raises ModelNotFound, or ModelLoadError that says what is wrong with the file.
        `dtype` is that of the LSTM; the front end is always fp32. bf16 is twice as fast where the CPU has it.
        """
        path = resolve(PACKAGED).path if path is None else Path(path)
        source = SafetensorsSource([path])
        encoder = cls()
        state = dict(encoder.state_dict())
        wrong = [name for name in state if name not in source.names() or source.shape(name) != tuple(state[name].shape)]
        if wrong:
            raise ModelLoadError(
                f"{path.name}: not a GE2E speaker encoder: {', '.join(wrong[:4])} missing or misshapen"
            )
        for name in state:
            tensor = source.get(name)
            assert isinstance(tensor, Tensor)
            state[name] = tensor.to(torch.float32)
        encoder.load_state_dict(state)
        encoder.requires_grad_(False).eval().to(device)
        encoder.lstm.to(dtype)
        return encoder

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device

    @torch.inference_mode()
    def mel(self, pcm: Tensor) -> Tensor:
        """Power mel frames of `pcm` f32 [T] at 16 kHz -> f32 [1 + T // 160, 40], the frame's centre at 160 * index."""
        pcm = pcm.to(self.device, torch.float32)
        num_frames = 1 + pcm.shape[0] // HOP
        padded = F.pad(pcm, (FFT_SIZE // 2, FFT_SIZE))  # zeros, as the reference's centred STFT
        mels = []
        for first in range(0, num_frames, _MEL_CHUNK):
            count = min(_MEL_CHUNK, num_frames - first)
            piece = padded[first * HOP : (first + count - 1) * HOP + FFT_SIZE]
            spectrum = torch.stft(piece, FFT_SIZE, HOP, window=self.hann, center=False, return_complex=True)
            power = spectrum.real.square() + spectrum.imag.square()
            mels.append((self.filters @ power).T)
        return torch.cat(mels)

    @torch.inference_mode()
    def embed(self, mels: Tensor) -> Tensor:
        """Unit vectors f32 [N, 256] of power mel windows f32 [N, frames, 40], all of one length (best: 160 frames)."""
        dtype = self.lstm.weight_ih_l0.dtype
        vectors = []
        for batch in mels.split(_BATCH):
            _, (hidden, _) = self.lstm(batch.to(self.device, dtype))
            vectors.append(F.normalize(F.relu(self.linear(hidden[-1].float())), dim=1))
        return torch.cat(vectors) if vectors else torch.zeros(0, _HIDDEN, device=self.device)

    @torch.inference_mode()
    def embed_spans(self, pcm: Tensor, spans: Sequence[tuple[int, int]], loudness: Sequence[float]) -> Tensor:
        """Unit vectors f32 [N, 256] of the spans [start, end) in samples of `pcm` f32 [T]: each 0.1 to 1.6 s.

        A span shorter than 1.6 s is repeated until it fills the window: far better than silence or a short sequence.
        `loudness[i]` is the RMS of the speech around span i (`loudness_of`); audio is brought to -20 dBFS by it, as
        the mel frames are powers and the encoder would hear a louder voice as another one. One call makes the mel of
        all of `pcm`: give about a minute.
        """
        if not spans:
            return torch.zeros(0, _HIDDEN, device=self.device)
        mel = self.mel(pcm)
        offsets = torch.arange(WINDOW_FRAMES)
        vectors = []
        for first in range(0, len(spans), _BATCH):
            batch = spans[first : first + _BATCH]
            starts = torch.tensor([start // HOP for start, _ in batch])
            lengths = torch.tensor([min(WINDOW_FRAMES, max(1, (end - start) // HOP)) for start, end in batch])
            gains = torch.tensor([_gain(rms) ** 2 for rms in loudness[first : first + _BATCH]])
            frames = (starts[:, None] + offsets % lengths[:, None]).clamp_max(mel.shape[0] - 1).to(mel.device)
            vectors.append(self.embed(mel[frames] * gains.to(mel.device)[:, None, None]))
        return torch.cat(vectors)

    def voice(self, pcm: Tensor) -> Tensor:
        """One unit vector f32 [256] for `pcm` f32 [T] of one speaker, a minute at most: the mean of its windows."""
        spans = windows(0, pcm.shape[0], WINDOW // 2)
        vectors = self.embed_spans(pcm, spans, [loudness_of(pcm)] * len(spans))
        return F.normalize(vectors.mean(0), dim=0)


def windows(start: int, end: int, step: int) -> list[tuple[int, int]]:
    """Spans of 1.6 s that cover [start, end) evenly, their starts at most `step` apart (all in samples).

    Speech shorter than 1.6 s is one span.
    """
    if end - start <= WINDOW:
        return [(start, end)]
    count = 1 + math.ceil((end - start - WINDOW) / step)
    places = [start + round(index * (end - start - WINDOW) / (count - 1)) for index in range(count)]
    return [(place, place + WINDOW) for place in places]


def loudness_of(pcm: Tensor) -> float:
    """RMS of `pcm` f32 [T] in [-1, 1]; 0 when there is nothing."""
    return float(pcm.square().mean().sqrt()) if pcm.shape[0] else 0.0


def _gain(rms: float) -> float:
    return min(_TARGET_RMS / rms, _MAX_GAIN) if rms > 0 else 1.0
