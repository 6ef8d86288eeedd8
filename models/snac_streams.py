"""Live streams through a SNAC decoder: every layer goes on where it stopped, and nothing is computed twice.

Each convolution keeps its left context in a slot of the stream, and what it looks ahead becomes delay, so a step takes N
frames of each of its streams and gives N frames' worth of samples, `config.lookahead` late. A whole decode pads every
layer with zeros at both ends; here rows outside of a stream are zeroed at every layer, which is the same: pieces of any
size give the whole's samples. Empty frames at the end (`config.flush_frames`) push the last samples out.

What it does not know: who streams, how much waits, when a step is due (engine/codec_engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.sampling import MASK32, noise_keys
from ..kernels.snake import SnakeUnit, kept, snake, snake_unit, with_context
from .snac import Block, DenseUnit, Snac

_Pair: TypeAlias = tuple[Tensor, Tensor]


class _Rows:
    """Where the rows of a step lie: at one rate, behind one delay."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[float], num_rows: int, device: torch.device) -> None:
        """starts: first latent step of each stream; lengths: latent steps of the whole stream, infinity if not known."""
        self._starts, self._lengths, self._num, self._device = starts, lengths, num_rows, device
        self._rate, self._delay = 1, 0

    def faster(self, rate: int) -> None:
        self._rate, self._delay = self._rate * rate, self._delay * rate

    def later(self, delay: int) -> None:
        self._delay += delay

    @property
    def first(self) -> list[int]:
        """Position of the first row of each stream; negative before its begin."""
        return [start * self._rate - self._delay for start in self._starts]

    def spans(self) -> list[tuple[int, int]]:
        """Rows lo..hi of each stream that exist."""
        rows = self._num * self._rate
        return [
            (min(max(-at, 0), rows), int(min(max(length * self._rate - at, 0), rows)))
            for at, length in zip(self.first, self._lengths)
        ]

    def keep(self) -> Tensor | None:
        """The same for kernels/snake.py: int64 [B, 2]; None when all exist, as in the midst of streams."""
        rows, spans = self._num * self._rate, self.spans()
        if all(span == (0, rows) for span in spans):
            return None
        return torch.tensor(spans, device=self._device)


class SnacStreams:
    """State of up to `num_slots` streams. Give `reset` a slot before its next stream."""

    def __init__(self, codec: Snac, num_slots: int) -> None:
        self.codec, self.num_slots = codec, num_slots
        self._seeds, self._taken = [0] * num_slots, [0] * num_slots  # latent steps that went in
        self._lengths = [math.inf] * num_slots  # in latent steps
        like = codec.last_bias

        def zeros(*shape: int) -> Tensor:
            return like.new_zeros(num_slots, *shape)

        self._first = zeros(codec.first.context, codec.config.latent_dim)
        self._tails: list[Tensor] = []  # what the last row adds to the rows under the next: [S, rate * C]
        self._units: list[list[_Pair]] = []
        for block in codec.blocks:
            channels = len(block.bias)
            self._tails.append(zeros(block.rate * channels))
            self._units.append(
                [
                    unit.new_state(num_slots)
                    if isinstance(unit, SnakeUnit)
                    else (zeros(2 * unit.delay, channels), zeros(unit.delay, channels))
                    for unit in block.units
                ]
            )
        self._last = zeros(codec.last_taps.shape[1] - 1, codec.last_taps.shape[1])  # products of the last rows

    @property
    def num_bytes(self) -> int:
        """Of the state of all slots."""
        return sum(state.numel() * state.element_size() for state in self._states())

    def _states(self) -> list[Tensor]:
        units = [state for pairs in self._units for pair in pairs for state in pair]
        return [self._first, self._last, *self._tails, *units]

    def reset(self, slot: int, seed: int = 0) -> None:
        """A new stream begins here; `seed` is of its noise."""
        for state in self._states():
            state[slot] = 0
        self._seeds[slot] = seed & (1 << 63) - 1
        self._taken[slot], self._lengths[slot] = 0, math.inf

    def end(self, slot: int, num_frames: int) -> None:
        """The stream is `num_frames` frames long, counted from its begin; what comes after them only pushes."""
        steps = num_frames * self.codec.config.vq_strides[0]
        assert steps >= self._taken[slot], "a stream ends before it has gone on"
        self._lengths[slot] = steps

    @torch.inference_mode()
    def step(self, slots: Sequence[int], frames: Tensor) -> list[Tensor]:
        """The next N frames of each of these streams: int64 [B, N, K] on the codec's device -> B times samples fp32 [n].

        Streams give N * frame_samples samples each, fewer at their ends. Codes must be ones that there are (`Snac.check`).
        """
        assert len(set(slots)) == len(slots) == len(frames), "each stream once"
        codec, config = self.codec, self.codec.config
        where = torch.tensor(list(slots), device=codec.device)
        num = frames.shape[1] * config.vq_strides[0]
        rows = _Rows([self._taken[slot] for slot in slots], [self._lengths[slot] for slot in slots], num, codec.device)
        for slot in slots:
            self._taken[slot] += num
        x = kept(codec.latents(frames), rows.keep())
        x = codec.first(with_context(x, self._first, where))
        rows.later(codec.first.context // 2)
        x = kept(x if codec.widen is None else F.linear(x, *codec.widen), rows.keep())
        for at, block in enumerate(codec.blocks):
            x = self._raised(x, block, self._tails[at], where)
            rows.faster(block.rate)
            rows.later(block.trim)
            if block.noise is not None:
                seeds = [self._seeds[slot] for slot in slots]
                x = x + _noise(seeds, rows.first, x.shape[1], at, x.device) * F.linear(x, block.noise)
            x = kept(x, rows.keep())
            for unit, state in zip(block.units, self._units[at]):
                rows.later(unit.delay)
                if isinstance(unit, SnakeUnit):
                    x = snake_unit(x, unit, state, where, rows.keep())
                else:
                    x = _dense_unit(x, unit, state, where, rows.keep())
        pcm = self._samples(x, where)
        rows.later(codec.last_taps.shape[1] // 2)
        return [samples[lo:hi] for samples, (lo, hi) in zip(pcm, rows.spans())]

    def _raised(self, x: Tensor, block: Block, tails: Tensor, slots: Tensor) -> Tensor:
        """The transposed convolution: x [B, N, C] -> [B, N * rate, C out]. Rows overlap with the next one's."""
        batch, num_rows, channels = x.shape
        y = snake(x, block.alpha).view(batch * num_rows, channels) @ block.matrix
        here, over = y.view(batch, num_rows, 2, -1).unbind(2)  # each [B, N, rate * C out]
        out = here.unflatten(2, (block.rate, -1)) + block.bias
        flat = out.view(batch, num_rows, -1)
        flat[:, 1:] += over[:, :-1]
        flat[:, 0] += tails[slots]
        tails[slots] = over[:, -1]
        raised: Tensor = flat.view(batch, num_rows * block.rate, len(block.bias))
        return raised

    def _samples(self, x: Tensor, slots: Tensor) -> Tensor:
        """The last Snake, convolution and tanh: x [B, N, C] -> [B, N]."""
        codec = self.codec
        num_taps = codec.last_taps.shape[1]
        products = with_context(snake(x, codec.last_alpha) @ codec.last_taps, self._last, slots)  # [B, N + K - 1, K]
        # Output row t is the sum over k of row t + k, product k: a diagonal.
        shape, step = (x.shape[0], x.shape[1], num_taps), products.stride(1)
        diagonal = products.as_strided(shape, (products.stride(0), step, step + 1))
        return torch.tanh(diagonal.sum(2) + codec.last_bias)


def _dense_unit(x: Tensor, unit: DenseUnit, state: _Pair, slots: Tensor, keep: Tensor | None) -> Tensor:
    """`snake_unit` for a convolution that mixes channels."""
    y = unit.conv(with_context(snake(x, unit.alpha), state[0], slots))
    held = with_context(x, state[1], slots)
    y = torch.addmm(unit.bias, snake(y, unit.second_alpha).flatten(0, 1), unit.matrix).view(x.shape)
    return kept(held[:, : x.shape[1]] + y, keep)


def _noise(seeds: Sequence[int], first: Sequence[int], num_rows: int, block: int, device: torch.device) -> Tensor:
    """Normal noise fp32 [B, N, 1]: a function of (seed, position, block) alone, by Box and Muller's transform."""
    seed = torch.tensor([[value] for value in seeds], device=device)
    position = torch.tensor([[at] for at in first], device=device) + torch.arange(num_rows, device=device)
    keys = noise_keys(seed, position, block)
    radius = ((keys >> 32 & MASK32).float() + 0.5) * 2.0**-32
    turn = (keys & MASK32).float() * (2 * math.pi * 2.0**-32)
    return (torch.sqrt(-2 * torch.log(radius.clamp(max=1 - 2.0**-24))) * torch.cos(turn))[..., None]
