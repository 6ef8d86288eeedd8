"""Rows for a denoiser that share nothing but the size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motet.engine.painter import Rows
from motet.models.diffusion import Caption

SCALE = 4  # pixels of a latent's side


def rows(
    lengths: Sequence[int] = (3, 7, 1, 5), *, seed: int = 0, side: tuple[int, int] = (8, 12), pooled: bool = True
) -> Rows:
    """Times, guidance, captions and their lengths differ. Latents [R, 4, *side], words [L, 24], pooled captions [20] or none."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    return Rows(
        latents=torch.randn(count, 4, *side, generator=generator),
        times=torch.rand(count, generator=generator),
        guidance=1 + 4 * torch.rand(count, generator=generator),
        conds=[
            Caption(
                torch.randn(words, 24, generator=generator), torch.randn(20, generator=generator) if pooled else None
            )
            for words in lengths
        ],
        width=SCALE * side[1],
        height=SCALE * side[0],
    )


def pick(all_rows: Rows, index: Sequence[int]) -> Rows:
    """These rows alone."""
    chosen = list(index)
    return Rows(
        latents=all_rows.latents[chosen],
        times=all_rows.times[chosen],
        guidance=all_rows.guidance[chosen],
        conds=[all_rows.conds[at] for at in chosen],
        width=all_rows.width,
        height=all_rows.height,
    )
