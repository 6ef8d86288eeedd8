"""Which rows of a step get logits, and how each is processed and sampled. The request's words end here: below are rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..kernels.sampling import (
    SamplingRows,
    apply_allowed,
    apply_bias,
    apply_penalties,
    apply_ranges,
    apply_repetition,
)
from .transfers import upload
from .types import EmbeddingSpan, SamplingParams

_MOST_RANGES = 4  # of a mask; rows with more are edited one by one


@dataclass(kw_only=True, eq=False)
class SlotState:
    """What the runner knows of a sequence between steps, besides its tokens and block table."""

    params: SamplingParams
    seed: int
    num_prompt: int
    pool: bool
    pooling: str
    embeddings: list[EmbeddingSpan]
    num_blocks: list[int]
    stop_ids: tuple[int, ...]
    pooled_sum: torch.Tensor | None = None
    # Of a chunk that has passed some layers: rows bf16 [n, E] and the stream fp32 [n, E] (models/layer_stack.py).
    between: tuple[torch.Tensor, torch.Tensor] | None = None
    edits: bool = field(init=False)  # whether its logits are changed before sampling
    penalizes: bool = field(init=False)
    joins: bool = field(init=False)  # its edits can be made for many rows at once: `edit_together`

    def __post_init__(self) -> None:
        p = self.params
        self.penalizes = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
        self.edits = bool(self.penalizes or p.logit_bias or p.allowed or (p.min_tokens and self.stop_ids))
        few = p.allowed is not None and max((len(ranges) for ranges in p.allowed.steps), default=9) <= _MOST_RANGES
        ends_early = bool(p.min_tokens and self.stop_ids) and not few
        self.joins = self.edits and not (p.presence_penalty or p.frequency_penalty or p.logit_bias or ends_early)
        self.joins &= few or p.allowed is None


def edit_logits(logits: torch.Tensor, state: SlotState, known: Sequence[int]) -> None:
    """Change one row of logits [V] in place for the token that follows `known` (prompt, output and drafts on the path).

    Penalties, then bias, then what is forbidden: so that no bias can bring back a forbidden token.
    """
    params = state.params
    num_output = len(known) - state.num_prompt
    if state.penalizes:
        window = params.penalty_window
        context = known[-window:] if window else known
        output = known[max(state.num_prompt, len(known) - window if window else 0) :]
        apply_penalties(
            logits[None],
            [context],
            [output],
            [params.presence_penalty],
            [params.frequency_penalty],
            [params.repetition_penalty],
        )
    if params.logit_bias:
        apply_bias(logits, list(params.logit_bias), list(params.logit_bias.values()))
    if params.allowed is not None:
        ranges = params.allowed.at(num_output)
        if ranges is not None:
            apply_allowed(logits, ranges)
    if num_output < params.min_tokens and state.stop_ids:
        logits[list(state.stop_ids)] = -torch.inf


def edit_together(
    logits: torch.Tensor,
    rows: Sequence[int],
    states: Sequence[SlotState],
    *,
    slots: Sequence[int],
    known: Sequence[int],
    tokens: torch.Tensor,
) -> None:
    """`edit_logits` for those rows of logits [n, V] whose states join in: a few operations for all, whatever their number.

    `tokens` [slots, positions] holds the ids of all sequences where the logits are, so nobody waits for them; `known` counts
    those of each row, drafts excepted.
    """
    device = logits.device
    penalized = [at for at, state in enumerate(states) if state.penalizes]
    if penalized:
        params = [states[at].params for at in penalized]
        widths = [min(known[at], p.penalty_window or known[at]) for at, p in zip(penalized, params, strict=True)]
        last = torch.tensor([known[at] - 1 for at in penalized])[:, None]
        back = torch.minimum(torch.arange(max(widths))[None], torch.tensor(widths)[:, None] - 1)
        where = torch.cat((torch.tensor([slots[at] for at in penalized])[:, None], last - back), dim=1)
        where = where if device.type == "cpu" else where.pin_memory().to(device, non_blocking=True)
        context = tokens[where[:, :1], where[:, 1:]]
        repetition = upload([p.repetition_penalty for p in params], torch.float32, device)[:, None]
        mine = _Rows(logits, [rows[at] for at in penalized])
        apply_repetition(mine.logits, context, repetition)
        mine.put_back()
    masked: list[int] = []
    bounds: list[list[int]] = []
    for at, state in enumerate(states):
        num_output = known[at] - state.num_prompt
        ranges = state.params.allowed.at(num_output) if state.params.allowed is not None else None
        if num_output < state.params.min_tokens and state.stop_ids:
            ranges = tuple(_without(ranges if ranges is not None else ((0, logits.shape[1]),), state.stop_ids))
        if ranges is None:
            continue
        masked.append(rows[at])
        bounds.append([bound for pair in ranges for bound in pair])
    if masked:
        width = max(map(len, bounds))
        table = torch.tensor([pairs + [0] * (width - len(pairs)) for pairs in bounds])
        table = table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
        mine = _Rows(logits, masked)
        apply_ranges(mine.logits, table[:, ::2], table[:, 1::2])
        mine.put_back()


class _Rows:
    """Some rows of logits, edited as if they were all: the very same memory where they are."""

    def __init__(self, logits: torch.Tensor, rows: list[int]) -> None:
        self._all = logits
        self._index = None if rows == list(range(logits.shape[0])) else upload(rows, torch.int64, logits.device)
        self.logits = logits if self._index is None else logits[self._index]

    def put_back(self) -> None:
        if self._index is not None:
            self._all[self._index] = self.logits


def _without(ranges: Sequence[tuple[int, int]], ids: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges without some ids."""
    left = list(ranges)
    for index in ids:
        left = [
            part
            for low, high in left
            for part in ([(low, index), (index + 1, high)] if low <= index < high else [(low, high)])
            if part[0] < part[1]
        ]
    return left


class RowParameters:
    """How the rows of a step are sampled. Kept from one step to the next: while the same sequences are sampled, only the
    positions change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: list[SlotState] = []
        self._rows = sampling_rows([], [], device)

    def at(self, states: list[SlotState], positions: Sequence[int]) -> SamplingRows:
        """Parameters of the rows of `states`; `positions` are those of the sampled tokens."""
        if states != self._states:  # by identity
            self._rows, self._states = sampling_rows(states, positions, self._device), states
        elif self._rows.any_random:  # nobody else asks for noise
            self._rows = replace(self._rows, noise_position=upload(positions, torch.int64, self._device))
        return self._rows


def sampling_rows(states: Sequence[SlotState], positions: Sequence[int], device: torch.device) -> SamplingRows:
    """Row parameters for N rows; `positions` are those of the sampled tokens, half of the noise key."""
    params = [state.params for state in states]
    return SamplingRows(
        temperature=upload([p.temperature for p in params], torch.float32, device),
        top_k=upload([p.top_k for p in params], torch.int64, device),
        top_p=upload([p.top_p for p in params], torch.float32, device),
        min_p=upload([p.min_p for p in params], torch.float32, device),
        noise_seed=upload([state.seed for state in states], torch.int64, device),
        noise_position=upload(positions, torch.int64, device),
        any_random=any(p.temperature > 0 for p in params),
        any_top_k=any(p.top_k > 0 for p in params),
        any_top_p=any(p.top_p < 1 for p in params),
        any_min_p=any(p.min_p > 0 for p in params),
    )
