"""Blocks of a Flux-shaped transformer as one call on a CPU: words and picture attend to each other, time steers every layer.

R rows, L words (padded), T tokens of the picture, S = L + T, D numbers a token, H heads of d = D / H, F = 4 D inside an MLP.

In a *double* block words and picture have weights of their own (two `Stream`s), in a *single* block they share them. A row's
numbers are its own, bit for bit: neighbours, padding and the number of threads change nothing. Tokens stay fp32 between layers;
products take the weights' dtype: bf16 where the CPU multiplies that (sums in fp32), else fp32.

What it does not know: how tokens come to be, which vector steers (`mods` is already multiplied out), other families. Without the
C++ ops `can_run` is False, and models/diffusion_flux.py goes the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import cpu_ops

COLUMNS = 64  # outputs of a tile
MAX_WIDTH = 1024  # of D: wider layers are bound by their products, which torch's library makes as well


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Weights [out, in] and biases of one stream in one block. `out` is None in a single block, whose `down` [D, D + F] takes the
    attention's output and the MLP's side by side."""

    qkv: tuple[Tensor, Tensor]  # [3 D, D]
    norm_q: Tensor  # [d]
    norm_k: Tensor
    out: tuple[Tensor, Tensor] | None  # [D, D]
    up: tuple[Tensor, Tensor]  # [F, D]
    down: tuple[Tensor, Tensor]  # [D, F]


def can_run(width: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether `JointBlocks` takes a network of this shape here."""
    ops = cpu_ops()
    if ops is None or width > MAX_WIDTH or width % COLUMNS or width % heads or width // heads % 16:
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops.has_bf16_products())


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 64, in / P, 64, P], P = 2 in bf16, 1 in fp32: the columns of a tile side by side (cpu/joint.h)."""
    size = 4 // weight.element_size()
    out, into = weight.shape
    return weight.reshape(out // COLUMNS, COLUMNS, into // size, size).transpose(1, 2).contiguous()


class JointBlocks:
    """The blocks of one network, packed. `doubles`: (words, picture) of each."""

    def __init__(self, doubles: list[tuple[Stream, Stream]], singles: list[Stream], *, heads: int, eps: float) -> None:
        self._heads, self._eps = heads, eps
        self._width = singles[0].qkv[0].shape[1] if singles else doubles[0][0].qkv[0].shape[1]
        packed = [[*_packed(words), *_packed(picture)] for words, picture in doubles]
        packed += [_packed(single) for single in singles]
        self._weights, self._num_double = packed, len(doubles)

    def __call__(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        num_words: int,
        mods: Tensor,
        turn: tuple[Tensor, Tensor],
        start: int,
        stop: int,
    ) -> Tensor:
        """Blocks [start, stop): tokens fp32 [R, S, D], words in front -> the same, zeros at padding.

        lengths  int32 [R], words that are not padding; None: all
        mods     fp32 [R, M], every block's in order. Double: shift, scale, gate [D each] of the attention and of the MLP, for the
                 picture, then for the words. Single: shift, scale, gate
        turn     fp32 cosines and sines [T, d] (`expanded`)
        """
        first, last = min(start, self._num_double), min(stop, self._num_double)
        before = first * 12 + max(0, start - self._num_double) * 3
        weights = [tensor for block in self._weights[start:stop] for tensor in block]
        return torch.ops.motet_cpu.joint_blocks.default(  # type: ignore[no-any-return]
            tokens, lengths, num_words, mods, before * self._width, turn[0], turn[1], weights, last - first,
            (stop - start) - (last - first), self._heads, self._eps,
        )  # fmt: skip


def expanded(cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Of neighbouring pairs [T, d / 2] each -> [T, d] each, so that turned = x * cosine + (neighbours swapped) * sine."""
    signed = torch.stack((-sine, sine), -1).flatten(1)
    return cosine.repeat_interleave(2, 1).contiguous(), signed.contiguous()


def _packed(stream: Stream) -> list[Tensor]:
    tensors: list[Tensor] = []
    for layer in (stream.qkv, (stream.norm_q, stream.norm_k), stream.out, stream.up, stream.down):
        if layer is None:
            continue
        if layer[0].dim() == 1:
            tensors += [vector.float().contiguous() for vector in layer]
        else:
            tensors += [pack(layer[0]), layer[1].float().contiguous()]
    return tensors


# ------------------------------------------------------------------------------------------------------- the definition


def reference(
    stream_pairs: list[tuple[Stream, Stream]],
    singles: list[Stream],
    tokens: Tensor,
    num_words: int,
    mods: Tensor,
    turn: tuple[Tensor, Tensor],
    *,
    heads: int,
    eps: float,
) -> Tensor:
    """All blocks of one row [1, S, D] without padding, in float64: for tests."""
    width = tokens.shape[2]
    x, mods = tokens.double(), mods.double()
    cosine, sine = (part.double()[:, None] for part in turn)
    at = 0

    def take(count: int) -> list[Tensor]:
        nonlocal at
        parts = mods[:, None, at : at + count * width].split(width, 2)
        at += count * width
        return list(parts)

    def linear(x: Tensor, layer: tuple[Tensor, Tensor]) -> Tensor:
        return F.linear(x, layer[0].double(), layer[1].double())

    def shifted(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), eps=1e-6) * (1 + scale) + shift

    def projected(x: Tensor, stream: Stream) -> list[Tensor]:
        q, k, v = (part.unflatten(2, (heads, -1)) for part in linear(x, stream.qkv).chunk(3, 2))
        q, k = (F.rms_norm(p, p.shape[3:], w.double(), eps) for p, w in ((q, stream.norm_q), (k, stream.norm_k)))
        return [q, k, v]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = []
        for part in (q, k):
            picture = part[:, num_words:]
            swapped = picture.unflatten(3, (-1, 2)).flip(4).flatten(3)
            turned.append(torch.cat([part[:, :num_words], picture * cosine + swapped * sine], 1))
        q, k = turned
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return mixed.transpose(1, 2).flatten(2)

    for words, picture in stream_pairs:
        told = {"picture": take(6), "words": take(6)}
        parts = {"words": (words, x[:, :num_words]), "picture": (picture, x[:, num_words:])}
        each = [projected(shifted(part, *told[name][:2]), stream) for name, (stream, part) in parts.items()]
        mixed = attended(*(torch.cat(pair, 1) for pair in zip(*each)))
        made = []
        for (name, (stream, part)), out in zip(parts.items(), (mixed[:, :num_words], mixed[:, num_words:])):
            _, _, gate, shift, scale, gate_mlp = told[name]
            assert stream.out is not None
            part = part + gate * linear(out, stream.out)
            inner = F.gelu(linear(shifted(part, shift, scale), stream.up), approximate="tanh")
            made.append(part + gate_mlp * linear(inner, stream.down))
        x = torch.cat(made, 1)
    for stream in singles:
        shift, scale, gate = take(3)
        normed = shifted(x, shift, scale)
        mixed = attended(*projected(normed, stream))
        inner = F.gelu(linear(normed, stream.up), approximate="tanh")
        x = x + gate * linear(torch.cat([mixed, inner], 2), stream.down)
    return x
