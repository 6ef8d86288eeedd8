"""Snake, x + sin(a x)^2 / a, and the residual unit that SNAC builds on it, for streams that go on from call to call.

Letters: B streams of a call, N new rows of each, C channels, S slots of state, K taps, d dilation. A row is one moment of
all channels: time runs along the rows, so that a convolution's left context is the rows before, and channels fill vectors.

A convolution that looks to both sides is made causal by delay: its output row t is that of row t - d (K - 1) / 2. Its last
d (K - 1) input rows stay in a slot. Rows before a stream's begin or behind its end do not exist, and the layers above must
see zeros there: `keep` says which output rows exist. (Ziyin et al. 2020; Siuzdak et al. 2024.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dispatch import cpu_ops

_TINY = 1e-9  # as SNAC was trained


@dataclass(frozen=True, slots=True, eq=False)
class SnakeUnit:
    """Weights of x + matrix . snake(depthwise convolution of snake(x)); everything fp32 and contiguous on CPU."""

    alpha: torch.Tensor  # [C]
    taps: torch.Tensor  # [K, C], K odd
    taps_bias: torch.Tensor  # [C]
    second_alpha: torch.Tensor  # [C]
    matrix: torch.Tensor  # [C in, C out]
    bias: torch.Tensor  # [C]
    dilation: int

    @property
    def delay(self) -> int:
        """Rows between an input and the output above it."""
        return (self.taps.shape[0] - 1) // 2 * self.dilation

    def new_state(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(the last 2 * delay rows behind the first Snake, the last `delay` input rows): each [S, rows, C], zeros."""
        shape = (num_slots, self.delay, self.taps.shape[1])
        return self.taps.new_zeros(shape[0], 2 * shape[1], shape[2]), self.taps.new_zeros(shape)


def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """x + sin(alpha x)^2 / alpha for x [..., C], alpha [C]; in x's dtype."""
    if x.is_cpu and (ops := cpu_ops()) is not None and ops.can_snake(x, alpha):
        return ops.snake(x.contiguous(), alpha)  # type: ignore[no-any-return]
    return snake_reference(x, alpha)


def snake_reference(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """The definition."""
    return torch.addcdiv(x, torch.sin(alpha * x).square_(), alpha + _TINY)


def snake_unit(
    x: torch.Tensor,
    unit: SnakeUnit,
    state: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next rows of B streams: x [B, N, C] -> [B, N, C], `unit.delay` rows late. Moves `state` on.

    slots  int64 [B], different ones; they say whose state a stream has
    keep   int64 [B, 2]: output rows lo..hi of each stream exist, the others become zero; None: all exist
    """
    if x.is_cpu and (ops := cpu_ops()) is not None and ops.can_snake_unit(x, unit.alpha):
        return ops.snake_unit(  # type: ignore[no-any-return]
            x.contiguous(),
            unit.alpha,
            unit.taps,
            unit.taps_bias,
            unit.second_alpha,
            unit.matrix,
            unit.bias,
            unit.dilation,
            *state,
            slots,
            keep,
        )
    return snake_unit_reference(x, unit, state, slots, keep)


def snake_unit_reference(
    x: torch.Tensor,
    unit: SnakeUnit,
    state: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, on any device."""
    num_rows, delay = x.shape[1], unit.delay
    active = with_context(snake_reference(x, unit.alpha), state[0], slots)
    held = with_context(x, state[1], slots)
    y = unit.taps_bias + active[:, :num_rows] * unit.taps[0]
    for tap in range(1, len(unit.taps)):
        at = tap * unit.dilation
        y = torch.addcmul(y, active[:, at : at + num_rows], unit.taps[tap])
    assert held.shape[1] == num_rows + delay
    y = held[:, :num_rows] + torch.addmm(
        unit.bias, snake_reference(y, unit.second_alpha).flatten(0, 1), unit.matrix
    ).view(x.shape)
    return kept(y, keep)


def with_context(x: torch.Tensor, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """x [B, N, C] behind the rows of its slots, state [S, rows, C] -> [B, rows + N, C]; the last rows become the state."""
    held = torch.cat([state[slots], x], 1)
    state[slots] = held[:, held.shape[1] - state.shape[1] :]
    return held


def kept(x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """x [B, N, C] with zeros outside of rows lo..hi of `keep` [B, 2]."""
    if keep is None:
        return x
    rows = torch.arange(x.shape[1], device=x.device)
    outside = (rows < keep[:, :1]) | (rows >= keep[:, 1:])
    return x.masked_fill(outside[..., None], 0.0)
