"""What the transformers of pictures do to queries and keys, and their attention over words in front of a picture's tokens.

R rows, L words (padded), T tokens of a picture, S = L + T; H heads of D numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.sage_attention import Attention, Backend

Turn = tuple[Tensor, Tensor]


def attentions(backend: Backend, family: str, count: int) -> list[Attention]:
    """One for each block: the guard of quantized attention falls back layer by layer."""
    return [Attention(backend, layer=f"{family} block {block}") for block in range(count)]


def attend_joint(attention: Attention, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, tail: int) -> Tensor:
    """[R, S, H, D] each, words in front, the last `tail` the picture's -> [R, S, H * D].

    `lengths` int32 [R], how many words are real; None: all. What is computed at padding is of no use to anybody.
    """
    return attention(q, k, v, lengths, tail=tail).flatten(2)


def grid_angles(axes: tuple[int, ...], rows: int, columns: int, theta: float = 10_000.0) -> Turn:
    """Cosines and sines fp32 [rows * columns, D / 2] of tokens at (0, row, column), as Flux places them; D = sum(axes).

    Words stand at (0, 0, 0), which turns nothing.
    """
    place = torch.zeros(rows, columns, 3, dtype=torch.float64)
    place[..., 1] += torch.arange(rows)[:, None]
    place[..., 2] += torch.arange(columns)
    turns = []
    for axis, dim in enumerate(axes):
        frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turns.append(place[..., axis].flatten()[:, None] * frequencies)
    turn = torch.cat(turns, 1)
    return turn.cos().float(), turn.sin().float()


def turn_pairs(x: Tensor, turn: Turn) -> Tensor:
    """Rotary embedding of neighbouring pairs in fp32: x [R, T, H, D], turn [T, D / 2] each -> x's dtype."""
    cosine, sine = (part[:, None] for part in turn)
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1)
    return turned.flatten(-2).to(x.dtype)


def rms_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over each head: [..., D]."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Layer norm without weights, then each row's own scale and shift: x [R, S, D], shift and scale [R, 1, D]."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift
