"""Whisper's ears: 16 kHz samples to log-mel windows of 30 s, many windows at once.

The floor of 8 below the loudest value is taken per window (as transformers and the batched mode of faster-whisper do;
openai's own program takes it over the whole file).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLE_RATE = 16_000
FFT_SIZE = 400
HOP = 160
WINDOW_SAMPLES = 480_000  # 30 s
NUM_FRAMES = 3_000
_HALF = FFT_SIZE // 2
_FLOOR = 1e-10


def mel_filters(num_mels: int) -> Tensor:
    """Slaney's filterbank, area-normalized, 0 to 8 kHz: fp32 [num_mels, 201]."""

    def to_mel(hz: Tensor) -> Tensor:  # linear below 1 kHz, logarithmic above
        low = hz * 3 / 200
        return torch.where(hz < 1000, low, 15 + torch.log(hz.clamp_min(1e-9) / 1000) * 27 / math.log(6.4))

    def to_hz(mel: Tensor) -> Tensor:
        return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp((mel - 15) * math.log(6.4) / 27))

    bins = torch.linspace(0, SAMPLE_RATE / 2, _HALF + 1, dtype=torch.float64)
    top = float(to_mel(torch.tensor(SAMPLE_RATE / 2, dtype=torch.float64)))
    edges = to_hz(torch.linspace(0, top, num_mels + 2, dtype=torch.float64))
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    triangles = torch.minimum(rising, falling).clamp_min(0)
    return (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).float()


class LogMel:
    """Makes log-mel windows on one device."""

    def __init__(self, num_mels: int, device: torch.device | str = "cpu") -> None:
        self.num_mels = num_mels
        self._filters = mel_filters(num_mels).to(device)
        self._window = torch.hann_window(FFT_SIZE, device=device)
        self._device = torch.device(device)

    def __call__(self, pcm: Sequence[Tensor]) -> Tensor:
        """Each fp32 [n], at most 30 s (longer is cut) -> fp32 [B, num_mels, 3000]; the rest of a window is silence."""
        if self._device.type == "cpu" and len(pcm) > 1:  # one at a time stays in the cache, and short clips stay cheap
            return torch.cat([self([clip]) for clip in pcm])
        out = torch.empty(len(pcm), self.num_mels, NUM_FRAMES, device=self._device)
        if not pcm:
            return out
        lengths = [min(clip.shape[0], WINDOW_SAMPLES) for clip in pcm]
        # Frames after the last sample are silence in every bin: only the others are computed.
        num_frames = min(NUM_FRAMES, (max(lengths) + _HALF) // HOP + 1)
        padded = torch.zeros(len(pcm), _HALF + WINDOW_SAMPLES + _HALF, device=self._device)[
            :, : (num_frames - 1) * HOP + FFT_SIZE
        ]
        for row, (clip, length) in enumerate(zip(pcm, lengths)):
            clip = clip[:length].to(self._device, torch.float32)
            take = min(length, padded.shape[1] - _HALF)
            padded[row, _HALF : _HALF + take] = clip[:take]
            # The frames at the edges see the window's own mirror image.
            padded[row, :_HALF] = padded[row, _HALF + 1 : FFT_SIZE + 1].flip(0)
            beyond = padded.shape[1] - _HALF - WINDOW_SAMPLES
            if beyond > 0:
                end = _HALF + WINDOW_SAMPLES
                padded[row, end : end + beyond] = padded[row, end - 1 - beyond : end - 1].flip(0)
        spectrum = torch.stft(padded, FFT_SIZE, HOP, window=self._window, center=False, return_complex=True)
        power = spectrum.real.square() + spectrum.imag.square()  # [B, 201, frames]
        mel = torch.matmul(self._filters, power[..., :num_frames]).clamp_min_(_FLOOR).log10_()
        floor = (mel.amax((1, 2), keepdim=True) if num_frames == NUM_FRAMES else self._loudest(mel)) - 8
        out[..., :num_frames] = torch.maximum(mel, floor)
        out[..., num_frames:] = floor.clamp_min(math.log10(_FLOOR))
        return out.add_(4).div_(4)

    @staticmethod
    def _loudest(mel: Tensor) -> Tensor:
        """[B, 1, 1]: of the whole window, whose other frames are silent."""
        return mel.amax((1, 2), keepdim=True).clamp_min(math.log10(_FLOOR))
