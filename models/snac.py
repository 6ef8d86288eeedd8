"""SNAC: codes of several time scales to sound and back (hubertsiuzdak/snac; Siuzdak et al. 2024).

    codec = Snac.load("folder")                 # config.json and safetensors in the names of the snac package
    pcm = codec.decode(codec.encode(pcm))       # whole recordings
    streams = SnacStreams(codec, 8)             # models/snac_streams.py: many live ones, frame by frame

Decoding whole is streaming in large pieces. Weight norm is folded away when weights are read, in whichever of torch's two
spellings it is stored; a codec without an encoder (the demo voice's) only decodes. Noise blocks draw from (seed, position),
never from a generator, so that pieces make the same sound as a whole.

Letters: B recordings or streams, T time, N rows of a call, L latent size, C channels, K codes of a frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.errors import InvalidRequest, ModelLoadError
from ..kernels.linear import LinearWeight
from ..kernels.snake import SnakeUnit, snake
from .loader import WeightSource, check_names, open_weights, read_config
from .snac_config import DILATIONS, KERNEL, SnacConfig

_PIECE = 24  # frames that decode together: some 2 s
# Torch's two spellings of weight norm: (magnitude, direction).
_NORMED = ((".parametrizations.weight.original0", ".parametrizations.weight.original1"), (".weight_g", ".weight_v"))


class Conv:
    """A convolution that keeps the rate, over rows: its windows are laid side by side and multiplied."""

    def __init__(self, weight: Tensor, bias: Tensor, *, groups: int, dilation: int = 1) -> None:
        self.num_taps, self.dilation = weight.shape[2], dilation
        self.depthwise = groups > 1
        # [K, C] of a depthwise one, else [K * C in, C out]
        taps = weight.permute(2, 1, 0)
        self.taps = (taps[:, 0] if self.depthwise else taps.flatten(0, 1)).contiguous()
        self.bias = bias

    @property
    def context(self) -> int:
        """Rows before the new ones that it sees."""
        return (self.num_taps - 1) * self.dilation

    def __call__(self, held: Tensor) -> Tensor:
        """held [B, context + N, C] -> [B, N, C out]."""
        num_rows = held.shape[1] - self.context
        batch, channels = held.shape[0], held.shape[2]
        parts = [held[:, tap * self.dilation : tap * self.dilation + num_rows] for tap in range(self.num_taps)]
        if self.depthwise:
            return sum((part * taps for part, taps in zip(parts, self.taps)), self.bias)
        windows = torch.cat(parts, 2).view(batch * num_rows, self.num_taps * channels)
        return torch.addmm(self.bias, windows, self.taps).view(batch, num_rows, -1)


@dataclass(frozen=True, slots=True, eq=False)
class DenseUnit:
    """A residual unit whose first convolution mixes channels; kernels/snake.py has the depthwise one."""

    alpha: Tensor
    conv: Conv
    second_alpha: Tensor
    matrix: Tensor  # [C, C]
    bias: Tensor

    @property
    def delay(self) -> int:
        return self.conv.context // 2


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Of the decoder: Snake, transposed convolution of 2 * rate taps, noise, residual units."""

    alpha: Tensor  # [C]
    matrix: Tensor  # [C, 2 * rate * C out]: what a row adds to the `rate` rows under it, then to the next `rate` ones
    bias: Tensor  # [C out]
    rate: int
    noise: Tensor | None  # [C out, C out]
    units: tuple[SnakeUnit | DenseUnit, ...]

    @property
    def trim(self) -> int:
        """Rows of the overlapped output that lie before the first."""
        return -(-self.rate // 2)


class Snac:
    """The codec's networks. Stateless; `decode` and models/snac_streams.py keep what streams need."""

    def __init__(self, config: SnacConfig, source: WeightSource, *, device: torch.device | str = "cpu") -> None:
        """ModelLoadError names parameters that are missing, unexpected or of another shape. Weights become fp32."""
        self.config, self.device = config, torch.device(device)
        weights = _Weights(source, self.device)
        self.has_encoder = any(name.startswith("encoder.") for name in weights.names)
        if self.has_encoder and not config.encoder_dim:
            raise ModelLoadError("the weights hold an encoder, but the config has no encoder_dim")
        shapes = config.shapes(encoder=self.has_encoder)
        check_names(shapes, weights.names)
        held = {name: weights.take(name, shape) for name, shape in shapes.items()}
        # What a code says, ready to be added: [codebook size, L] of each level.
        self.tables = []
        for level in range(len(config.vq_strides)):
            prefix = f"quantizer.quantizers.{level}."
            out = held[prefix + "out_proj.weight"][:, :, 0]
            self.tables.append(F.linear(held[prefix + "codebook.weight"], out, held[prefix + "out_proj.bias"]))
        latent, at = config.latent_dim, config.first_block
        groups = latent if config.depthwise else 1
        self.first = Conv(held["decoder.model.0.weight"], held["decoder.model.0.bias"], groups=groups)
        self.widen: tuple[Tensor, Tensor] | None = None  # [C, L] and [C]
        if config.depthwise:
            self.widen = held["decoder.model.1.weight"][:, :, 0], held["decoder.model.1.bias"]
        self.blocks = tuple(
            self._block(held, f"decoder.model.{at + nth}.block.", rate) for nth, rate in enumerate(config.decoder_rates)
        )
        last = at + len(self.blocks)
        self.last_alpha = held[f"decoder.model.{last}.alpha"].flatten()
        self.last_taps = held[f"decoder.model.{last + 1}.weight"][0].contiguous()  # [C, K]
        self.last_bias = held[f"decoder.model.{last + 1}.bias"]
        self._held = held if self.has_encoder else {}

    @classmethod
    def load(cls, path: Path | str, *, device: torch.device | str = "cpu") -> Snac:
        """From a folder with config.json and safetensors. ModelNotFound, ModelLoadError as the constructor."""
        return cls(SnacConfig.read(read_config(path)), open_weights(path), device=device)

    @property
    def num_bytes(self) -> int:
        """Of the decoder's parameters as they lie in memory."""
        tensors = [*self.tables, self.first.taps, self.last_taps, *(self.widen or ())]
        for block in self.blocks:
            tensors += [block.matrix] + ([] if block.noise is None else [block.noise])
            tensors += [part for unit in block.units for part in (unit.matrix, _taps(unit))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _block(self, held: dict[str, Tensor], prefix: str, rate: int) -> Block:
        weight = held[prefix + "1.weight"]  # [C, C out, 2 * rate]
        noise = self.config.noise
        units = range(2 + noise, 2 + noise + len(DILATIONS))
        return Block(
            alpha=held[prefix + "0.alpha"].flatten(),
            matrix=weight.transpose(1, 2).reshape(weight.shape[0], -1).contiguous(),
            bias=held[prefix + "1.bias"],
            rate=rate,
            noise=held[prefix + "2.linear.weight"][:, :, 0] if noise else None,
            units=tuple(self._unit(held, f"{prefix}{at}.block.", dilation) for at, dilation in zip(units, DILATIONS)),
        )

    def _unit(self, held: dict[str, Tensor], prefix: str, dilation: int) -> SnakeUnit | DenseUnit:
        alpha, second = held[prefix + "0.alpha"].flatten(), held[prefix + "2.alpha"].flatten()
        matrix, bias = held[prefix + "3.weight"][:, :, 0].t().contiguous(), held[prefix + "3.bias"]
        weight, taps_bias = held[prefix + "1.weight"], held[prefix + "1.bias"]
        if not self.config.depthwise:
            return DenseUnit(alpha, Conv(weight, taps_bias, groups=1, dilation=dilation), second, matrix, bias)
        return SnakeUnit(alpha, weight[:, 0].t().contiguous(), taps_bias, second, matrix, bias, dilation)

    # ------------------------------------------------------------------------------------------------------ codes

    def check(self, frames: Tensor) -> None:
        """InvalidRequest unless `frames` is int [..., K] of codes that there are."""
        config = self.config
        if frames.dim() < 2 or frames.shape[-1] != config.codes_per_frame or frames.is_floating_point():
            raise InvalidRequest(
                f"frames are integers of shape [frames, {config.codes_per_frame}], got {list(frames.shape)}",
                param="frames",
            )
        if frames.numel() and not (0 <= int(frames.min()) and int(frames.max()) < config.codebook_size):
            raise InvalidRequest(f"codes lie in 0..{config.codebook_size - 1}", param="frames")

    def frames(self, codes: Sequence[Tensor]) -> Tensor:
        """Codes of each level, [B, T / stride], T a multiple of the first stride -> frames [B, n, K]."""
        per_level = self.config.codes_per_level
        counts = {level.shape[-1] / count for level, count in zip(codes, per_level)}
        if len(codes) != len(per_level) or len(counts) != 1 or not counts.copy().pop().is_integer():
            raise InvalidRequest(f"expected {list(per_level)} codes a frame in {len(per_level)} levels", param="codes")
        return torch.cat([level.unflatten(1, (-1, count)) for level, count in zip(codes, per_level)], 2)

    def latents(self, frames: Tensor) -> Tensor:
        """Frames int64 [B, n, K] -> what their codes say, [B, n * vq_strides[0], L]."""
        total: Tensor | None = None
        levels = frames.split(self.config.codes_per_level, 2)
        for codes, table, stride in zip(levels, self.tables, self.config.vq_strides):
            said = F.embedding(codes.flatten(1), table)
            said = said if stride == 1 else said.repeat_interleave(stride, 1)
            total = said if total is None else total + said
        assert total is not None
        return total

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor], *, seeds: Sequence[int] = ()) -> Tensor:
        """Codes of each level, int64 [B, T / stride] -> samples fp32 [B, T * hop] in -1..1.

        `seeds`, one for each recording, are of the noise; default 0. Raises InvalidRequest for codes of other shapes or
        sizes.
        """
        from .snac_streams import SnacStreams

        frames = self.frames(codes)
        self.check(frames)
        batch, num_frames = frames.shape[:2]
        streams = SnacStreams(self, batch)
        slots = range(batch)
        for slot, seed in zip(slots, seeds or (0,) * batch, strict=True):
            streams.reset(slot, seed)
            streams.end(slot, num_frames)
        frames = F.pad(frames, (0, 0, 0, self.config.flush_frames)).to(self.device)
        pieces = [streams.step(slots, piece) for piece in frames.split(_PIECE, 1)]
        return torch.stack([torch.cat([piece[slot] for piece in pieces]) for slot in slots])

    # ---------------------------------------------------------------------------------------------------- encoding

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> list[Tensor]:
        """Samples fp32 [B, T], completed with silence to whole frames -> codes of each level, int64 [B, steps / stride].

        Raises InvalidRequest for another shape, and where the weights have no encoder.
        """
        if not self.has_encoder:
            raise InvalidRequest("these weights only decode: they hold no encoder")
        if pcm.dim() != 2 or not pcm.is_floating_point() or not pcm.shape[1]:
            raise InvalidRequest(f"samples are floats of shape [recordings, T], got {list(pcm.shape)}", param="pcm")
        x = F.pad(pcm.to(self.device, torch.float32), (0, -pcm.shape[1] % self.config.frame_samples))[:, None]
        rest = self._encoded(x).transpose(1, 2)  # [B, T, L]
        codes = []
        for level, stride in enumerate(self.config.vq_strides):
            prefix = f"quantizer.quantizers.{level}."
            pooled = rest.unflatten(1, (-1, stride)).mean(2)
            small = F.linear(
                pooled, self._held[prefix + "in_proj.weight"][:, :, 0], self._held[prefix + "in_proj.bias"]
            )
            # Nearest among directions: the largest cosine.
            vectors = F.normalize(self._held[prefix + "codebook.weight"])
            found = (F.normalize(small, dim=-1) @ vectors.t()).argmax(-1)
            rest = rest - F.embedding(found, self.tables[level]).repeat_interleave(stride, 1)
            codes.append(found)
        return codes

    def _encoded(self, x: Tensor) -> Tensor:
        """[B, 1, T] -> [B, L, T / hop]."""
        x = self._conv(x, "encoder.block.0", padding=KERNEL // 2)
        for at, rate in enumerate(self.config.encoder_rates, 1):
            block = f"encoder.block.{at}.block."
            for unit, dilation in enumerate(DILATIONS):
                prefix = f"{block}{unit}.block."
                y = self._snake(x, prefix + "0.alpha")
                groups = x.shape[1] if self.config.depthwise else 1
                y = self._conv(y, prefix + "1", padding=KERNEL // 2 * dilation, dilation=dilation, groups=groups)
                x = x + self._conv(self._snake(y, prefix + "2.alpha"), prefix + "3")
            x = self._conv(self._snake(x, block + "3.alpha"), block + "4", stride=rate, padding=-(-rate // 2))
        groups = x.shape[1] if self.config.depthwise else 1
        return self._conv(x, f"encoder.block.{len(self.config.encoder_rates) + 1}", padding=KERNEL // 2, groups=groups)

    def _conv(
        self, x: Tensor, name: str, *, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
    ) -> Tensor:
        weight, bias = self._held[name + ".weight"], self._held[name + ".bias"]
        return F.conv1d(x, weight, bias, stride, padding, dilation, groups)

    def _snake(self, x: Tensor, name: str) -> Tensor:
        return snake(x.transpose(1, 2), self._held[name].flatten()).transpose(1, 2)


def _taps(unit: SnakeUnit | DenseUnit) -> Tensor:
    return unit.taps if isinstance(unit, SnakeUnit) else unit.conv.taps


class _Weights:
    """A source in which weight norm is folded away: a normed weight goes by its plain name."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self.names = source.names()
        self._normed: dict[str, tuple[str, str]] = {}
        for magnitude, direction in _NORMED:
            for base in _bases(self.names, magnitude):
                if base + direction in self.names:  # half a pair stays what it is: unexpected
                    self._normed[base + ".weight"] = base + magnitude, base + direction
                    self.names = self.names - {base + magnitude, base + direction} | {base + ".weight"}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """fp32, contiguous, on the device. ModelLoadError for another shape or a quantized one."""
        pair = self._normed.get(name)
        value = self._plain(name) if pair is None else _folded(name, *map(self._plain, pair))
        if tuple(value.shape) != shape:
            raise ModelLoadError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
        return value.to(self._device).contiguous()

    def _plain(self, name: str) -> Tensor:
        value = self._source.get(name)
        if isinstance(value, LinearWeight):
            raise ModelLoadError(f"{name}: expected floats, got a quantized matrix")
        return value.float()


def _bases(names: Iterable[str], suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _folded(name: str, magnitude: Tensor, direction: Tensor) -> Tensor:
    """magnitude [O, 1, 1] * direction [O, I, K] / its norm over all but the first dimension."""
    if direction.dim() != 3 or magnitude.shape != (direction.shape[0], 1, 1):
        raise ModelLoadError(f"{name}: magnitudes {list(magnitude.shape)} do not fit weights {list(direction.shape)}")
    lengths: Tensor = direction.norm(dim=(1, 2), keepdim=True)
    return direction * (magnitude / lengths)
