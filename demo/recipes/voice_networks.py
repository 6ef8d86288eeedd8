"""Networks of the demo voice's codec, for training: log-mel encoder, residual vector quantizer, two decoders.

`SnacDecoder` is what ships, SNAC's decoder at another size (hubertsiuzdak/snac): depthwise convolution, then per rate a
Snake, a transposed convolution and three residual units, and a tanh; no noise blocks. Motet's models/snac.py loads it.
`GuideDecoder` (ConvNeXt blocks and an inverse STFT, the shape of Vocos) learns several times as fast on a CPU and only
teaches encoder and codebooks.

The encoder starts from a log-mel spectrogram rather than from the waveform: its codes then do not depend on phase, which
a language model could not predict anyway.

Letters: B clips, T time, L latent size, K codes of a codebook.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from voice_snake import snake, snake_depthwise

SAMPLE_RATE = 24_000
HOP = 512  # samples per latent frame: 46.875 Hz
MEL_FFT, MEL_HOP, MEL_BINS = 1024, 256, 100


def mel_filters(fft: int, bins: int) -> Tensor:
    """Triangles of equal width on the mel scale 2595 log10(1 + f / 700), up to half the rate: [bins, fft / 2 + 1]."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, bins + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, fft // 2 + 1, dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0).float()


class ConvNeXt(nn.Module):
    """Depthwise convolution over 7 frames, then two linear layers per frame; [B, C, T] -> the same."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, inner), nn.Linear(inner, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).transpose(1, 2))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).transpose(1, 2)


class MelEncoder(nn.Module):
    """Samples [B, 1, T] -> latents [B, L, T / 512]; T a multiple of 512."""

    window: Tensor
    filters: Tensor

    def __init__(self, latent: int, channels: int = 192, inner: int = 512, depth: int = 2) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(MEL_FFT))
        self.register_buffer("filters", mel_filters(MEL_FFT, MEL_BINS))
        self.first = nn.Conv1d(MEL_BINS, channels, 7, padding=3)
        self.before = nn.ModuleList(ConvNeXt(channels, inner) for _ in range(depth))
        self.halve = nn.Conv1d(channels, channels, 4, stride=2, padding=1)
        self.after = nn.ModuleList(ConvNeXt(channels, inner) for _ in range(depth))
        self.norm, self.last = nn.LayerNorm(channels), nn.Linear(channels, latent)

    def log_mel(self, pcm: Tensor) -> Tensor:
        """[B, 1, T] -> [B, 100, T / 256], about unit variance."""
        padded = F.pad(pcm[:, 0].float(), ((MEL_FFT - MEL_HOP) // 2,) * 2)
        spectrum = torch.stft(padded, MEL_FFT, MEL_HOP, window=self.window, return_complex=True, center=False).abs()
        return ((self.filters @ spectrum).clamp(min=1e-4).log() + 4) / 3

    def forward(self, pcm: Tensor) -> Tensor:
        with torch.autocast(pcm.device.type, enabled=False):
            mel = self.log_mel(pcm)
        x: Tensor = self.first(mel)
        for block in self.before:
            x = block(x)
        x = self.halve(x)
        for block in self.after:
            x = block(x)
        out: Tensor = self.last(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return out


class Codebook(nn.Module):
    """One level: latents averaged over `stride` frames, projected to 8 dims, replaced by the nearest of K vectors.

    The vectors follow the mean of what chooses them (exponential moving average); one that nothing chose for 60 steps is
    put where a latent is.
    """

    vectors: Tensor
    counts: Tensor
    sums: Tensor
    unused: Tensor
    started: Tensor

    def __init__(self, latent: int, size: int, stride: int, dim: int = 8) -> None:
        super().__init__()
        self.size, self.stride, self.dim = size, stride, dim
        self.into, self.out = nn.Conv1d(latent, dim, 1), nn.Conv1d(dim, latent, 1)
        self.register_buffer("vectors", torch.randn(size, dim))
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", self.vectors.clone())
        self.register_buffer("unused", torch.zeros(size))
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))

    def nearest(self, flat: Tensor) -> Tensor:
        """fp32 [n, 8] -> codes [n]."""
        return (self.vectors.square().sum(1) - 2 * flat @ self.vectors.T).argmin(1)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, T] -> (what this level says of them [B, L, T], codes [B, T / stride], commitment loss)."""
        pooled = F.avg_pool1d(latents, self.stride) if self.stride > 1 else latents
        small = self.into(pooled).float()
        flat = small.detach().transpose(1, 2).reshape(-1, self.dim)
        if self.training and not self.started:
            self._start(flat)
        codes = self.nearest(flat)
        chosen = self.vectors[codes].view(small.shape[0], -1, self.dim).transpose(1, 2)
        if self.training:
            self._follow(flat, codes)
        loss = F.mse_loss(small, chosen.detach())
        said = self.out(small + (chosen - small).detach())  # gradients pass straight through
        if self.stride > 1:
            said = said.repeat_interleave(self.stride, -1)
        return said, codes.view(small.shape[0], -1), loss

    def lookup(self, codes: Tensor) -> Tensor:
        """Codes [B, T / stride] -> [B, L, T]."""
        said: Tensor = self.out(self.vectors[codes].transpose(1, 2))
        return said.repeat_interleave(self.stride, -1) if self.stride > 1 else said

    @torch.no_grad()
    def _start(self, flat: Tensor) -> None:
        picked = flat[torch.randint(len(flat), (self.size,), device=flat.device)]
        self.vectors.copy_(picked + 1e-3 * torch.randn_like(picked))
        self.sums.copy_(self.vectors)
        self.started.fill_(True)

    @torch.no_grad()
    def _follow(self, flat: Tensor, codes: Tensor) -> None:
        counts = torch.bincount(codes, minlength=self.size).float()
        self.counts.mul_(0.98).add_(counts, alpha=0.02)
        self.sums.mul_(0.98).add_(torch.zeros_like(self.sums).index_add_(0, codes, flat), alpha=0.02)
        self.vectors.copy_(self.sums / (self.counts[:, None] + 1e-5))
        self.unused.add_(1).masked_fill_(counts > 0, 0)
        dead = (self.unused > 60).nonzero()[:32, 0]
        if len(dead):
            fresh = flat[torch.randint(len(flat), (len(dead),), device=flat.device)]
            self.vectors[dead], self.counts[dead], self.sums[dead], self.unused[dead] = fresh, 0.5, fresh * 0.5, 0.0


class Quantizer(nn.Module):
    """Residual levels, coarse to fine; `strides` in latent frames, SNAC's are (4, 2, 1)."""

    def __init__(self, latent: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Codebook(latent, size, stride) for size, stride in zip(sizes, strides))

    def forward(self, latents: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """[B, L, T], T a multiple of the first stride -> (quantized [B, L, T], codes of each level, commitment loss)."""
        rest, whole, codes = latents, torch.zeros_like(latents), list[Tensor]()
        loss = latents.new_zeros(())
        for level in self.levels:
            said, mine, cost = level(rest)
            rest, whole, loss = rest - said, whole + said, loss + cost
            codes.append(mine)
        return whole, codes, loss

    def lookup(self, codes: Sequence[Tensor]) -> Tensor:
        return torch.stack([level.lookup(mine) for level, mine in zip(self.levels, codes)]).sum(0)


class GuideDecoder(nn.Module):
    """Latents [B, L, T] -> samples [B, 1, T * 512] through magnitudes and phases of an STFT of hop 256."""

    window: Tensor

    def __init__(self, latent: int, channels: int = 320, inner: int = 960, before: int = 2, after: int = 5) -> None:
        super().__init__()
        self.first = nn.Conv1d(latent, channels, 7, padding=3)
        self.before = nn.ModuleList(ConvNeXt(channels, inner) for _ in range(before))
        self.widen = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)
        self.after = nn.ModuleList(ConvNeXt(channels, inner) for _ in range(after))
        self.norm, self.last = nn.LayerNorm(channels), nn.Linear(channels, MEL_FFT + 2)
        self.register_buffer("window", torch.hann_window(MEL_FFT))

    def forward(self, latents: Tensor) -> Tensor:
        x = self.first(latents)
        for block in self.before:
            x = block(x)
        x = self.widen(x)
        for block in self.after:
            x = block(x)
        size, phase = self.last(self.norm(x.transpose(1, 2))).transpose(1, 2).float().chunk(2, 1)
        spectrum = torch.polar(size.clamp(max=6).exp(), phase)
        frames = torch.fft.irfft(spectrum, MEL_FFT, dim=1) * self.window[None, :, None]
        num = frames.shape[-1]
        length, edge = (num - 1) * MEL_HOP + MEL_FFT, (MEL_FFT - MEL_HOP) // 2

        def overlap(parts: Tensor) -> Tensor:
            return F.fold(parts, (1, length), (1, MEL_FFT), stride=(1, MEL_HOP))[:, :, 0]

        weight = overlap(self.window.square()[None, :, None].expand(1, -1, num)).clamp(min=1e-3)
        return (overlap(frames) / weight)[..., edge : edge + num * MEL_HOP]


class Snake(nn.Module):
    """x + sin(a x)^2 / a, one a per channel (Ziyin et al. 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return snake(x, self.alpha)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            nn.Conv1d(channels, channels, 7, padding=3 * dilation, dilation=dilation, groups=channels),
            Snake(channels),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, depthwise, second, pointwise = self.block
        y = snake_depthwise(x, first.alpha, depthwise.weight, depthwise.bias, depthwise.dilation[0])
        return x + pointwise(second(y))


class SnacDecoder(nn.Module):
    """Latents [B, L, T] -> samples [B, 1, T * product of rates]. Module names are those of the snac package."""

    def __init__(self, latent: int, channels: int = 256, rates: Sequence[int] = (8, 8, 4, 2)) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv1d(latent, latent, 7, padding=3, groups=latent),
            nn.Conv1d(latent, channels, 1),
        ]
        for rate in rates:
            half = channels // 2
            up = nn.ConvTranspose1d(
                channels, half, 2 * rate, stride=rate, padding=-(-rate // 2), output_padding=rate % 2
            )
            units = [ResidualUnit(half, dilation) for dilation in (1, 3, 9)]
            layers.append(nn.Sequential(Snake(channels), up, *units))
            channels = half
        layers += [Snake(channels), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh()]
        self.model = nn.Sequential(*layers)

    def forward(self, latents: Tensor) -> Tensor:
        out: Tensor = self.model(latents)
        return out


class SpectralLoss(nn.Module):
    """Mean over several resolutions of log-mel, magnitude and log-magnitude distances."""

    RESOLUTIONS = ((2048, 512, 80), (1024, 256, 80), (512, 128, 40), (256, 64, 20))  # FFT, hop, mel bins

    def __init__(self) -> None:
        super().__init__()
        for size, _, bins in self.RESOLUTIONS:
            self.register_buffer(f"window{size}", torch.hann_window(size))
            self.register_buffer(f"filters{size}", mel_filters(size, bins))

    def _magnitude(self, x: Tensor, size: int, hop: int) -> Tensor:
        window = getattr(self, f"window{size}")
        spectrum = torch.stft(x, size, hop, window=window, return_complex=True, center=True, pad_mode="constant")
        return (spectrum.real.square() + spectrum.imag.square() + 1e-7).sqrt()

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """[B, 1, T] each -> a scalar."""
        total = made.new_zeros(())
        for size, hop, _ in self.RESOLUTIONS:
            filters = getattr(self, f"filters{size}")
            a = self._magnitude(made[:, 0].float(), size, hop)
            with torch.no_grad():
                b = self._magnitude(wanted[:, 0].float(), size, hop)
            mel = ((filters @ a).clamp(min=1e-3).log() - (filters @ b).clamp(min=1e-3).log()).abs().mean()
            linear = (a - b).abs().mean() / (b.mean() + 1e-3)
            log = (a.clamp(min=1e-3).log() - b.clamp(min=1e-3).log()).abs().mean()
            total = total + mel + 0.25 * linear + 0.25 * log
        return total / len(self.RESOLUTIONS)
