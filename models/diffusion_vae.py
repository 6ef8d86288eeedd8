"""Pixels to latents and back: the autoencoders of `diffusers`, one picture at a time where memory is short, in tiles where it is
shorter.

Only the modules' encoder and decoder are run, never their `encode`/`decode`, whose tiling and caches are state on the module:
here every call is pure, so threads may share one autoencoder. AutoencoderKLQwenImage is made for videos; of one frame its
convolutions see zeros in the past, so only the last slice in time of each kernel is kept, which is exact and a third of the work.

Whether a picture is decoded in tiles follows from an estimate of its activations against the memory that is free, before anything
runs out. It is decided once per size: a picture depends on its seed, not on who else was in memory that minute. Tiles are not
quite the whole: attention and norms inside a decoder see a tile only. Encoding works the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.errors import InternalError, InvalidRequest, ModelLoadError

CLASSES = ("AutoencoderKL", "AutoencoderKLQwenImage", "AutoencoderTiny")
_HALO = 4  # cells (of latents) at a tile's inner borders that are thrown away: their convolutions saw zeros beyond the border
_BLEND = 8  # cells over which two tiles pass into each other
_SMALLEST_TILE = 32  # cells of a side; below that borders are most of the work
_SEEN = 4  # cells of a side in the run that is measured
_SHARE = 0.5  # of the free memory: the denoiser works meanwhile
_MARGIN = 1.25  # for what convolutions allocate for themselves


@dataclass(frozen=True)
class Span:
    """A tile along one axis, in cells: what is read, and what of it is kept."""

    start: int
    stop: int
    keep_start: int
    keep_stop: int


def spans(size: int, tile: int, halo: int = _HALO, blend: int = _BLEND) -> list[Span]:
    """Tiles of at most `tile` cells over `size`. Neighbours share 2 * halo + blend cells and keep `blend` of these in common."""
    shared = 2 * halo + blend
    if size <= tile:
        return [Span(0, size, 0, size)]
    stride = tile - shared
    if stride <= 0:
        raise ValueError(f"expected tiles of more than {shared} cells, got {tile}")
    count = -(-(size - shared) // stride)
    starts = [round(at * (size - tile) / (count - 1)) for at in range(count)]
    return [
        Span(start, start + tile, start + (halo if start else 0), start + tile - (halo if start + tile < size else 0))
        for start in starts
    ]


def _ramp(mine: Span, before: Span | None, after: Span | None, scale: int, device: torch.device) -> Tensor:
    """fp32 weights of the pixels that a tile keeps: linear over what a neighbour keeps as well, else 1."""
    weights = torch.ones((mine.keep_stop - mine.keep_start) * scale, device=device)
    if before is not None and (both := (before.keep_stop - mine.keep_start) * scale) > 0:
        weights[:both] = (torch.arange(both, device=device) + 0.5) / both
    if after is not None and (both := (mine.keep_stop - after.keep_start) * scale) > 0:
        weights[-both:] *= 1 - (torch.arange(both, device=device) + 0.5) / both
    return weights


def in_tiles(
    run: Callable[[Tensor], Tensor],
    given: Tensor,
    tile: int,
    *,
    reads: int,
    writes: int,
    halo: int = _HALO,
    blend: int = _BLEND,
) -> Tensor:
    """`run` over `given` [1, C, H, W] in tiles of `tile` x `tile` cells, a cell being `reads` elements of `given` and `writes` of
    what comes out; fp32 [1, C', H', W']."""
    rows = spans(given.shape[2] // reads, tile, halo, blend)
    columns = spans(given.shape[3] // reads, tile, halo, blend)
    out = total = None
    for at, row in enumerate(rows):
        down = _ramp(row, *_neighbours(rows, at), writes, given.device)
        for place, column in enumerate(columns):
            across = _ramp(column, *_neighbours(columns, place), writes, given.device)
            made = run(given[..., row.start * reads : row.stop * reads, column.start * reads : column.stop * reads])
            if out is None or total is None:
                size = (given.shape[2] // reads * writes, given.shape[3] // reads * writes)
                out = torch.zeros(1, made.shape[1], *size, device=given.device)
                total = torch.zeros(size, device=given.device)
            made = made[..., _kept(row, writes), _kept(column, writes)].float()
            weights = down[:, None] * across
            down_to = slice(row.keep_start * writes, row.keep_stop * writes)
            across_to = slice(column.keep_start * writes, column.keep_stop * writes)
            out[..., down_to, across_to] += made * weights
            total[down_to, across_to] += weights
    assert out is not None and total is not None
    return out / total


def _neighbours(line: list[Span], at: int) -> tuple[Span | None, Span | None]:
    return (line[at - 1] if at else None, line[at + 1] if at + 1 < len(line) else None)


def _kept(span: Span, scale: int) -> slice:
    return slice((span.keep_start - span.start) * scale, (span.keep_stop - span.start) * scale)


class Autoencoder:
    """One of `CLASSES`, which becomes this object's own: it is moved, cast, and (for one frame) cut.

    `max_bytes`: of activations; 0 is half of the memory that is free when a size first comes. Half precision is not used for
    decoders whose config has `force_upcast`: their activations do not fit fp16. Raises ModelLoadError for another class.
    """

    def __init__(self, vae: nn.Module, *, device: torch.device, dtype: torch.dtype, max_bytes: int = 0) -> None:
        name = type(vae).__name__
        if name not in CLASSES:
            raise ModelLoadError(f"vae: expected one of {', '.join(CLASSES)}, found {name}")
        config: Any = vae.config
        self.device = device
        self.max_bytes = max_bytes
        self.dtype = torch.float32 if dtype == torch.float16 and config.get("force_upcast") else dtype
        self._name = name
        self._vae: Any = vae.requires_grad_(False).eval()
        # By nn.Module's own method: that of `diffusers` warns of layers to be kept in fp32, of which these have none.
        nn.Module.to(vae, device=device, dtype=self.dtype)
        if name == "AutoencoderKLQwenImage":
            _keep_one_frame(vae)
        else:
            nn.Module.to(
                vae, memory_format=torch.channels_last
            )  # decodes 1.3 times as fast on a CPU with AVX-512, fp32
        self.channels: int = config.z_dim if name == "AutoencoderKLQwenImage" else config.latent_channels
        self._mean, self._deviation = _statistics(config, self.channels, device)
        self._lock = threading.Lock()
        self._tiles: dict[tuple[str, int, int], int] = {}
        decode_bytes, self.scale = self._measure(self._decoded, (self.channels, _SEEN, _SEEN))
        encode_bytes, _ = self._measure(self._encoded, (3, _SEEN * self.scale, _SEEN * self.scale))
        self._cell_bytes = {"decode": decode_bytes, "encode": encode_bytes}

    # ------------------------------------------------------------------------------------------------- directions

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, h, w], as the denoiser has them, -> uint8 [B, h * scale, w * scale, 3] on the CPU.

        Raises InternalError `not_finite` where the decoder's numbers leave their range.
        """
        if latents.dim() != 4 or latents.shape[1] != self.channels:
            raise InvalidRequest(f"latents: expected [B, {self.channels}, h, w], got {list(latents.shape)}")
        size = (latents.shape[2], latents.shape[3])
        tile = self.tile("decode", *size)
        fits = not tile and self.estimate("decode", *size) * len(latents) <= self._allowed()
        pictures = []
        for some in latents.split(len(latents) if fits else 1):
            scaled = some.to(self.device, torch.float32) * self._deviation + self._mean
            if tile:
                made = in_tiles(self._decoded, scaled, tile, reads=1, writes=self.scale)
            else:
                made = self._decoded(scaled).float()
            if not bool(torch.isfinite(made).all()):
                raise InternalError("the decoder's numbers went out of range", code="not_finite")
            pixels = (made / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
            pictures.append(pixels.permute(0, 2, 3, 1).contiguous().cpu())
        return torch.cat(pictures)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [H, W, 3] -> fp32 [C, H / scale, W / scale] as the denoiser has them: the most likely ones, nothing drawn."""
        if pixels.dim() != 3 or pixels.shape[2] != 3 or pixels.shape[0] % self.scale or pixels.shape[1] % self.scale:
            raise InvalidRequest(
                f"image: expected [H, W, 3] of multiples of {self.scale}, got {list(pixels.shape)}", param="image"
            )
        shown = pixels.to(self.device).permute(2, 0, 1)[None].float() / 127.5 - 1
        tile = self.tile("encode", pixels.shape[0] // self.scale, pixels.shape[1] // self.scale)
        if tile:
            latents = in_tiles(self._encoded, shown, tile, reads=self.scale, writes=1)
        else:
            latents = self._encoded(shown).float()
        return ((latents - self._mean) / self._deviation)[0]

    def _decoded(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] in the autoencoder's own scale -> pixels [B, 3, H, W], -1 to 1."""
        latents = latents.to(self.dtype)
        if self._name == "AutoencoderKLQwenImage":
            return self._vae.decoder(self._vae.post_quant_conv(latents[:, :, None]))[:, :, 0]  # type: ignore[no-any-return]
        if self._name == "AutoencoderKL" and self._vae.post_quant_conv is not None:
            latents = self._vae.post_quant_conv(latents)
        return self._vae.decoder(latents)  # type: ignore[no-any-return]

    def _encoded(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W], -1 to 1, -> latents [B, C, h, w] in the autoencoder's own scale: the mean of what it says."""
        pixels = pixels.to(self.dtype)
        if self._name == "AutoencoderTiny":
            return self._vae.encoder(pixels)  # type: ignore[no-any-return]
        if self._name == "AutoencoderKLQwenImage":
            return self._vae.quant_conv(self._vae.encoder(pixels[:, :, None]))[:, : self.channels, 0]  # type: ignore[no-any-return]
        said = self._vae.encoder(pixels)
        if self._vae.quant_conv is not None:
            said = self._vae.quant_conv(said)
        return said[:, : self.channels]  # type: ignore[no-any-return]

    # ----------------------------------------------------------------------------------------------------- memory

    def estimate(self, direction: str, height: int, width: int) -> int:
        """Bytes of activations for one picture of `height` x `width` cells (of latents); direction "decode" or "encode"."""
        return round(self._cell_bytes[direction] * height * width * _MARGIN)

    def tile(self, direction: str, height: int, width: int) -> int:
        """Side of the tiles in cells, 0: as a whole. The first answer for a size stays."""
        key = (direction, height, width)
        with self._lock:
            if key not in self._tiles:
                self._tiles[key] = self._choose(direction, height, width)
            return self._tiles[key]

    def _choose(self, direction: str, height: int, width: int) -> int:
        allowed = self._allowed()
        if self.estimate(direction, height, width) <= allowed:
            return 0
        side = int((allowed / max(1, self.estimate(direction, 1, 1))) ** 0.5) // 8 * 8
        side = max(_SMALLEST_TILE, side)
        return 0 if side >= max(height, width) else side

    def _allowed(self) -> int:
        return self.max_bytes or int(free_bytes(self.device) * _SHARE)

    def _measure(self, run: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[float, int]:
        """Bytes of activations per cell, from one small run: a layer's input and output, what waits beside it for a sum, a copy.
        And pixels of a cell's side, where `run` decodes."""
        at_work = widest = 0

        def see(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            nonlocal at_work, widest
            sizes = [tensor.nbytes for tensor in (*given, made) if isinstance(tensor, Tensor)]
            at_work, widest = max(at_work, sum(sizes)), max(widest, *sizes, 0)

        leaves = [module for module in self._vae.modules() if not list(module.children())]
        handles = [module.register_forward_hook(see) for module in leaves]
        try:
            with torch.inference_mode():
                made = run(torch.zeros(1, *shape, device=self.device))
        finally:
            for handle in handles:
                handle.remove()
        return (at_work + 2 * widest) / _SEEN**2, made.shape[-1] // _SEEN


def _statistics(config: Any, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the autoencoder's latents, fp32 [1, C, 1, 1]: the denoiser's are (latents - mean) / deviation."""
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    scaling = config.get("scaling_factor") or 1.0
    if mean is None or deviation is None:
        mean, deviation = [config.get("shift_factor") or 0.0] * channels, [1.0] * channels
    if len(mean) != channels or len(deviation) != channels or not all(deviation):
        raise ModelLoadError(f"vae: expected latents_mean and latents_std of {channels} numbers, none of them 0")
    rows = torch.tensor([mean, deviation], dtype=torch.float32, device=device).reshape(2, 1, channels, 1, 1)
    return rows[0], rows[1] / scaling


def _keep_one_frame(vae: nn.Module) -> None:
    """Cut causal convolutions in time to what one frame meets: the last slice of the kernel, nothing of the past."""
    for module in vae.modules():
        if type(module).__name__ == "QwenImageCausalConv3d":
            conv: Any = module
            conv.weight = nn.Parameter(conv.weight[:, :, -1:].contiguous(), requires_grad=False)
            conv.kernel_size = (1, *conv.kernel_size[1:])
            conv._padding = (*conv._padding[:4], 0, 0)


def free_bytes(device: torch.device) -> int:
    """Memory that could be had now: of a GPU what is free or only cached, of the host what is available to this process."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = _read_number(Path("/proc/meminfo"), "MemAvailable:", 1024)
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"), "", 1)
    if limit is not None:
        left = limit - (_read_number(Path("/sys/fs/cgroup/memory.current"), "", 1) or 0)
        free = left if free is None else min(free, left)
    return 2**31 if free is None else max(0, free)


def _read_number(path: Path, label: str, unit: int) -> int | None:
    """The number behind `label` in a file of the kernel's, None where there is none (also "max")."""
    try:
        for line in path.read_text().splitlines():
            word = line.removeprefix(label).split()[0] if line.startswith(label) and line.strip() else ""
            if word.isdigit():
                return int(word) * unit
    except OSError:
        pass
    return None
