"""Pictures: what a text encoder, an autoencoder and a denoiser of any family are to each other, and the three as one painter.

R rows, C channels, h x w latents; L words, D numbers a word; P numbers of a pooled caption. Latents of one picture are unpacked
fp32 [C, h, w] everywhere outside a denoiser: noise is drawn so, solvers work so, autoencoders take so. A family packs them.

The families are in diffusion_flux.py, diffusion_qwen.py and diffusion_sd3.py; folders are read by diffusion_folder.py.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.fp8 import Steps


@dataclass(frozen=True, eq=False)
class Caption:
    """An encoded prompt: its words, of its own length, and what steers the denoiser as a whole where the family has that."""

    embeds: Tensor  # [L, D]
    pooled: Tensor | None = None  # [P]

    @property
    def num_bytes(self) -> int:
        return self.embeds.nbytes + (0 if self.pooled is None else self.pooled.nbytes)


class Rows(Protocol):
    """One forward pass, as engine/painter.py makes it: row r is one guidance branch of one picture at its own time.

    `latents` fp32 [R, C, h, w] as the solver scaled them; `times` fp32 [R], what the solver's schedule gives the model;
    `guidance` fp32 [R], for models that embed it; `conds` [R].
    """

    @property
    def latents(self) -> Tensor: ...
    @property
    def times(self) -> Tensor: ...
    @property
    def guidance(self) -> Tensor: ...
    @property
    def conds(self) -> Sequence[Caption]: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...


class Captions(Protocol):
    """Prompts -> captions, in the dtype and on the device of the denoiser."""

    def __call__(self, prompts: Sequence[str]) -> list[Caption]:
        """One for each, in order, never padded. Raises InvalidRequest (param "prompt") for one that is too long."""
        ...


class Autoencoder(Protocol):
    """Pictures <-> latents in the denoiser's scale (diffusion_vae.py)."""

    scale: int  # pixels of a latent's side
    channels: int

    def decode(self, latents: Tensor) -> Tensor:
        """fp32 [B, C, h, w] -> uint8 [B, H, W, 3]."""
        ...

    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 [H, W, 3] on the CPU -> fp32 [C, h, w]: the mode, nothing drawn."""
        ...


class Denoiser(Protocol):
    """A family's transformer. Each row's prediction depends on that row alone, to rounding.

    One that runs block by block also has `begin`, `hidden`, `indicator`, `select`, `blocks` and `finish`, as step caches want
    them (engine/step_cache.py BlockModel).
    """

    @property
    def device(self) -> torch.device: ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """[C, h, w] of a picture of so many pixels."""
        ...

    def forward(self, rows: Rows) -> Tensor:
        """The prediction [R, C, h, w], any float dtype."""
        ...

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        """Work of one row in one step: floating point operations in billions."""
        ...

    def batch_key(self, width: int, height: int) -> Hashable:
        """Rows of equal keys share a forward pass."""
        ...


def pad_captions(captions: Sequence[Caption], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Words side by side: embeds [R, Lmax, D], zeros after each one's end, and lengths int32 [R]."""
    longest = max(len(caption.embeds) for caption in captions)
    first = captions[0].embeds
    embeds = torch.zeros(len(captions), longest, first.shape[1], device=device, dtype=dtype)
    for row, caption in enumerate(captions):
        embeds[row, : len(caption.embeds)] = caption.embeds
    lengths = torch.tensor([len(caption.embeds) for caption in captions], dtype=torch.int32, device=device)
    return embeds, lengths


_BLOCKWISE = ("begin", "hidden", "indicator", "select", "blocks", "finish")


class Stages:
    """Captions, denoiser and autoencoder as the engine's painter (engine/painter.py Painter)."""

    def __init__(
        self,
        captions: Captions,
        denoiser: Denoiser,
        autoencoder: Autoencoder,
        *,
        devices: tuple[torch.device, torch.device, torch.device],
        steps: Steps | None = None,
    ) -> None:
        """`devices` of encode, denoise, decode; `steps` of a denoiser with FP8 layers: what those share."""
        self.devices = devices
        self._captions, self._autoencoder = captions, autoencoder
        self.denoiser = denoiser
        self.latent_shape, self.forward = denoiser.latent_shape, denoiser.forward
        self.cost, self.batch_key = denoiser.cost, denoiser.batch_key
        if steps is not None:
            self.protect = functools.partial(setattr, steps, "exact")
        if hasattr(denoiser, "guide"):  # classifier-free guidance of the family's own kind
            self.guide = denoiser.guide
        if all(hasattr(denoiser, name) for name in _BLOCKWISE):  # the engine asks whether there is a `begin`
            for name in _BLOCKWISE:
                setattr(self, name, getattr(denoiser, name))

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[Caption]:
        """Captions on the denoiser's device. Raises InvalidRequest for a prompt that is too long."""
        to = self.devices[1]
        return [
            Caption(caption.embeds.to(to), None if caption.pooled is None else caption.pooled.to(to))
            for caption in self._captions(prompts)
        ]

    def num_tokens(self, cond: Caption) -> int:
        return len(cond.embeds)

    def num_bytes(self, cond: Caption) -> int:
        return cond.num_bytes

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """uint8 [H, W, 3] on the CPU -> fp32 [C, h, w] on the denoiser's device."""
        return self._autoencoder.encode(pixels).to(self.devices[1])

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """fp32 [B, C, h, w] -> uint8 [B, H, W, 3]."""
        return self._autoencoder.decode(latents.to(self.devices[2]))


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedPicture:
    """A picture model's folder, read (diffusion_folder.load_picture).

    `card` has plain values only: sizes [[W, H]], steps, max_steps, guidance "cfg" | "embedded" | "none", guidance_scale, solver
    (wire name), sigmas (of few-step models, else empty), few_step, scheduler (diffusers' scheduler_config mapping), and
    max_prompt_chars.
    """

    family: str
    painter: Stages
    card: Mapping[str, Any]
    dtype: torch.dtype
    weight_bytes: int
