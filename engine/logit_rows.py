"""Which rows of a step get logits, and how each is processed and sampled. The request's words end here: below are rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..kernels.sampling import SamplingRows, apply_allowed, apply_bias, apply_penalties
from .transfers import upload
from .types import EmbeddingSpan, SamplingParams


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
    edits: bool = field(init=False)  # whether its logits are changed before sampling
    penalizes: bool = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        self.penalizes = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
        self.edits = bool(self.penalizes or p.logit_bias or p.allowed or (p.min_tokens and self.stop_ids))


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
