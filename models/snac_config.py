"""What a SNAC codec is made of (hubertsiuzdak/snac, config.json): sizes, rates, and the names of its parameters.

A frame is one code of the coarsest level: `vq_strides[0]` latent steps, each of `hop` samples. Its codes stand level by
level, in time order inside a level: for strides 4, 2, 1 that is [c0 | c1 c1 | c2 c2 c2 c2].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.errors import ModelLoadError
from .parameters import Shapes

KERNEL = 7  # taps of every convolution that does not change the rate
DILATIONS = (1, 3, 9)  # of a block's residual units


@dataclass(frozen=True, slots=True)
class SnacConfig:
    sampling_rate: int
    latent_dim: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    vq_strides: tuple[int, ...]
    noise: bool
    depthwise: bool
    encoder_dim: int  # 0: the config knows of no encoder
    encoder_rates: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> SnacConfig:
        """From a config.json. ModelLoadError names the field that is missing, wrong or not supported."""
        if config.get("attn_window_size") is not None:
            raise ModelLoadError(
                "attn_window_size: codecs with local attention (SNAC's 32 and 44 kHz ones) are not supported; "
                "expected null, as the 24 kHz one has"
            )
        encoder_dim = _size(config, "encoder_dim", 0) if config.get("encoder_dim") is not None else 0
        encoder_rates = _sizes(config, "encoder_rates") if encoder_dim else ()
        implied = encoder_dim << len(encoder_rates)
        made = cls(
            sampling_rate=_size(config, "sampling_rate"),
            latent_dim=_size(config, "latent_dim", implied) if config.get("latent_dim") is not None else implied,
            decoder_dim=_size(config, "decoder_dim"),
            decoder_rates=_sizes(config, "decoder_rates"),
            codebook_size=_size(config, "codebook_size"),
            codebook_dim=_size(config, "codebook_dim"),
            vq_strides=_sizes(config, "vq_strides"),
            noise=_flag(config, "noise"),
            depthwise=_flag(config, "depthwise"),
            encoder_dim=encoder_dim,
            encoder_rates=encoder_rates,
        )
        if not made.latent_dim:
            raise ModelLoadError("latent_dim: expected a size, or encoder_dim and encoder_rates that give it")
        if encoder_dim and (made.latent_dim != implied or math.prod(encoder_rates) != made.hop):
            raise ModelLoadError(
                f"encoder_rates {encoder_rates} and encoder_dim do not fit latent_dim and decoder_rates"
            )
        if made.decoder_dim % (1 << len(made.decoder_rates)):
            raise ModelLoadError(f"decoder_dim {made.decoder_dim} cannot be halved {len(made.decoder_rates)} times")
        if any(made.vq_strides[0] % stride for stride in made.vq_strides):
            raise ModelLoadError(f"vq_strides {made.vq_strides}: each must divide the first")
        return made

    @property
    def hop(self) -> int:
        """Samples of a latent step."""
        return math.prod(self.decoder_rates)

    @property
    def frame_samples(self) -> int:
        return self.hop * self.vq_strides[0]

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.sampling_rate / self.frame_samples

    @property
    def codes_per_level(self) -> tuple[int, ...]:
        """How many codes of each level a frame has."""
        return tuple(self.vq_strides[0] // stride for stride in self.vq_strides)

    @property
    def codes_per_frame(self) -> int:
        return sum(self.codes_per_level)

    @property
    def lookahead(self) -> int:
        """Samples by which the decoder's output is late: how far it looks ahead."""
        half = KERNEL // 2
        late = half
        for rate in self.decoder_rates:
            late = late * rate + -(-rate // 2) + half * sum(DILATIONS)
        return late + half

    @property
    def flush_frames(self) -> int:
        """Empty frames that push the last samples out."""
        return -(-self.lookahead // self.frame_samples)

    def shapes(self, *, encoder: bool) -> Shapes:
        """The parameters that must be there, with weight norm folded away."""
        shapes: Shapes = {}
        latent, channels = self.latent_dim, self.decoder_dim
        for level in range(len(self.vq_strides)):
            prefix = f"quantizer.quantizers.{level}."
            shapes[prefix + "codebook.weight"] = (self.codebook_size, self.codebook_dim)
            _conv(shapes, prefix + "out_proj", (latent, self.codebook_dim, 1))
            if encoder:
                _conv(shapes, prefix + "in_proj", (self.codebook_dim, latent, 1))
        if self.depthwise:
            _conv(shapes, "decoder.model.0", (latent, 1, KERNEL))
            _conv(shapes, "decoder.model.1", (channels, latent, 1))
        else:
            _conv(shapes, "decoder.model.0", (channels, latent, KERNEL))
        for at, rate in enumerate(self.decoder_rates, self.first_block):
            block, half = f"decoder.model.{at}.block.", channels // 2
            shapes[block + "0.alpha"] = (1, channels, 1)
            shapes[block + "1.weight"], shapes[block + "1.bias"] = (channels, half, 2 * rate), (half,)
            if self.noise:
                shapes[block + "2.linear.weight"] = (half, half, 1)
            for unit in range(len(DILATIONS)):
                self._unit(shapes, f"{block}{unit + 2 + self.noise}.block.", half)
            channels = half
        last = self.first_block + len(self.decoder_rates)
        shapes[f"decoder.model.{last}.alpha"] = (1, channels, 1)
        _conv(shapes, f"decoder.model.{last + 1}", (1, channels, KERNEL))
        if encoder:
            self._encoder(shapes)
        return shapes

    @property
    def first_block(self) -> int:
        """Index of the decoder's first block among its layers."""
        return 2 if self.depthwise else 1

    def _unit(self, shapes: Shapes, prefix: str, channels: int) -> None:
        shapes[prefix + "0.alpha"] = shapes[prefix + "2.alpha"] = (1, channels, 1)
        _conv(shapes, prefix + "1", (channels, 1 if self.depthwise else channels, KERNEL))
        _conv(shapes, prefix + "3", (channels, channels, 1))

    def _encoder(self, shapes: Shapes) -> None:
        channels = self.encoder_dim
        _conv(shapes, "encoder.block.0", (channels, 1, KERNEL))
        for at, rate in enumerate(self.encoder_rates, 1):
            block = f"encoder.block.{at}.block."
            for unit in range(len(DILATIONS)):
                self._unit(shapes, f"{block}{unit}.block.", channels)
            shapes[block + "3.alpha"] = (1, channels, 1)
            _conv(shapes, block + "4", (2 * channels, channels, 2 * rate))
            channels *= 2
        last = f"encoder.block.{len(self.encoder_rates) + 1}"
        _conv(shapes, last, (channels, 1 if self.depthwise else channels, KERNEL))


def _conv(shapes: Shapes, name: str, shape: tuple[int, int, int]) -> None:
    shapes[name + ".weight"], shapes[name + ".bias"] = shape, shape[:1]


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 20:
        raise ModelLoadError(f"{name}: expected a positive integer, got {str(value)[:40]!r}")
    return value


def _sizes(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    if not isinstance(value, list | tuple) or not 0 < len(value) <= 16:
        raise ModelLoadError(f"{name}: expected a list of positive integers, got {str(value)[:40]!r}")
    return tuple(_size({name: part}, name) for part in value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{name}: expected true or false, got {str(value)[:40]!r}")
    return value
