"""What the diffusion engine asks of a model and of a solver. Shapes: R rows, C channels, H, W of latents; all plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .picture_request import PictureOrder


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """One forward pass: row r is one guidance branch of one picture at its own time.

    `latents` [R, ...] as the solver scaled them; `times` fp32 [R], what the solver's schedule gives the model; `guidance` fp32
    [R], for models that embed it; `conds` [R], each prompt's own embeddings, of any lengths.
    """

    latents: torch.Tensor
    times: torch.Tensor
    guidance: torch.Tensor
    conds: Sequence[Any]
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.conds)


class Painter(Protocol):
    """A text-to-image model in its three stages. `encode`, `encode_image` and `decode` run in their stages' threads.

    Some have more: the methods of step_cache.BlockModel, and `guide(with_prompt, without, scale)`, one picture's predictions
    [...] -> its guided one, where a family's classifier-free guidance is not the plain one; and `protect(exact)`, where weights
    are FP8: from then on activations stay in 16 bits, or not.
    """

    devices: tuple[torch.device, torch.device, torch.device]  # of encode, denoise, decode

    def encode(self, prompts: Sequence[str]) -> list[Any]:
        """Embeddings of each prompt, on the denoiser's device. Raises InvalidRequest for a prompt that is too long."""
        ...

    def num_tokens(self, cond: Any) -> int:
        """Tokens of an encoded prompt."""
        ...

    def num_bytes(self, cond: Any) -> int:
        """Memory of an encoded prompt."""
        ...

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [H, W, 3] on the CPU -> latents of `latent_shape`, fp32, on the denoiser's device."""
        ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of one picture's latents."""
        ...

    def forward(self, rows: Rows) -> torch.Tensor:
        """The prediction [R, ...] of every row, which depends on that row alone."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[1, ...] -> uint8 [1, H, W, 3]."""
        ...

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        """Work of one row in one step, in any fixed unit."""
        ...

    def batch_key(self, width: int, height: int) -> Hashable:
        """Rows of equal keys share a forward pass."""
        ...


class SolverRun(Protocol):
    """One picture's way through its schedule: pure in all but its own history."""

    def time(self, step: int) -> float:
        """What the model is told at `step`."""
        ...

    def start(self, noise: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """Latents at the first step that runs."""
        ...

    def scale(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        """The model's input."""
        ...

    def takes_noise(self, step: int) -> bool:
        """Whether `advance` wants fresh noise."""
        ...

    def advance(
        self, latents: torch.Tensor, prediction: torch.Tensor, step: int, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents after `step`, and the finished picture as it looks from there (x0)."""
        ...


BeginSolver = Callable[[PictureOrder, tuple[int, ...]], SolverRun]  # order, latent shape
