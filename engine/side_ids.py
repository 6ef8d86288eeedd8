"""Side ids in the runner: the other codebooks of each position of a multi-codebook model, and how they are finished.

Only a model with `finish_position` has any of this; the runner of any other model keeps no table and does no work for it.
A position's primary id lies in the runner's token table, its side ids in the table here, both on the device and both
written as soon as they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ..kernels.sampling import SamplingRows, sample
from .types import SequenceStep, SideIds

# (logits [n, V] fp32, codebook number) -> sampled ids [n] int64, with the noise of (seed, position, codebook)
Draw = Callable[[torch.Tensor, int], torch.Tensor]


@runtime_checkable
class MultiCodebook(Protocol):
    """A model whose positions hold `num_codebooks` ids each; see models/multi_codebook.py."""

    num_codebooks: int
    num_codes: int
    eos_ids: tuple[int, ...]

    def embed(
        self,
        ids: torch.Tensor,
        side: tuple[torch.Tensor, torch.Tensor] | None = None,
        side_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As any model's `embed`, with the rows' side ids [R, codebooks - 1]; of text rows they mean nothing."""
        ...

    def finish_position(self, hidden: torch.Tensor, ids: torch.Tensor, draw: Draw) -> torch.Tensor:
        """All ids [n, codebooks] of the positions whose primary ids [n] were sampled from `hidden` [n, E].

        Column 0 is the primary id again; the model may put its end id there where the other codebooks say so.
        """
        ...


class SideTable:
    """Side ids of every slot's positions. Positions that were given none hold zeros."""

    def __init__(self, model: MultiCodebook, tokens: torch.Tensor, to_device: Callable[..., torch.Tensor]) -> None:
        """`tokens` [slots, positions] int64 is the runner's own token table, written here where an id is replaced."""
        self._model = model
        self._tokens = tokens
        self._to_device = to_device
        width = model.num_codebooks - 1
        self._table = torch.zeros(*tokens.shape, width, dtype=torch.int32, device=tokens.device)

    def enter(self, slot: int, spans: Sequence[SideIds]) -> None:
        """A sequence enters the slot: forget the last one's ids, so that nothing depends on who was here before."""
        self._table[slot].zero_()
        for span in spans:
            if span.ids:
                rows = self._to_device(np.array(span.ids, np.int32))
                self._table[slot, span.start : span.start + len(span.ids)] = rows

    def embed(
        self, ids: torch.Tensor, side: tuple[torch.Tensor, torch.Tensor] | None, steps: Sequence[SequenceStep]
    ) -> torch.Tensor:
        """Embeddings [R, E] of a step's rows: ids [R] and what `Model.embed` calls `side`, with the rows' side ids."""
        counts = [step.num_tokens for step in steps]
        slot = np.repeat(np.array([step.slot for step in steps], np.int64), counts)
        position = np.concatenate([np.arange(step.start, step.start + step.num_tokens) for step in steps])
        where = self._to_device(np.stack((slot, position)).astype(np.int64))
        return self._model.embed(ids, side, self._table[where[0], where[1]].long())

    def finish(
        self, steps: Sequence[SequenceStep], hidden: torch.Tensor, ids: torch.Tensor, rows: SamplingRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All ids [n, codebooks] of one sampled position per step, and which of them came from NaN [n].

        `hidden` [n, E] are the rows that `ids` [n] were sampled from, `rows` how; the other codebooks are sampled alike,
        each with noise of its own. (Masks, bias and penalties are of the primary id alone.) Ids are in both tables on return.
        """
        broken = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        def draw(logits: torch.Tensor, codebook: int) -> torch.Tensor:
            drawn = sample(logits, replace(rows, head=codebook))
            broken.logical_or_(logits.gather(1, drawn[:, None])[:, 0].isnan())
            return drawn

        full = self._model.finish_position(hidden, ids, draw)
        slots = [step.slot for step in steps]
        ends = [step.start + step.num_tokens for step in steps]
        where = self._to_device(np.array([slots, ends], np.int64))
        self._tokens[where[0], where[1]] = full[:, 0]
        self._table[where[0], where[1]] = full[:, 1:].int()
        return full, broken
