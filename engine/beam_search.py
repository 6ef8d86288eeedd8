"""Beam search over one window of speech: which hypotheses live on, and which are finished. Lists of numbers, no tensors.

A finished hypothesis ends in eot (not among its ids). The search ends with round(beam_size * patience) of them. The best is
that with the highest total log probability over its length, or over ((5 + length) / 6) ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Hypothesis:
    """`total` sums `logprobs`, with eot's once it is finished."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total: float = 0.0

    @property
    def avg_logprob(self) -> float:
        """Per token, eot counted."""
        return self.total / (len(self.ids) + 1)

    def score(self, length_penalty: float | None) -> float:
        """What hypotheses are ranked by."""
        length = max(1, len(self.ids))
        return self.total / (length if length_penalty is None else ((5 + length) / 6) ** length_penalty)


class BeamSearch:
    """Starts with one empty hypothesis; `live` holds at most `beam_size`."""

    def __init__(self, *, beam_size: int, patience: float, eot: int) -> None:
        self.live = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self._size = beam_size
        self._enough = max(1, round(beam_size * patience))
        self._eot = eot

    @property
    def done(self) -> bool:
        return len(self.finished) >= self._enough or not self.live

    def advance(self, top_ids: Sequence[Sequence[int]], top_logprobs: Sequence[Sequence[float]]) -> list[int]:
        """Extend by each live hypothesis's beam_size + 1 best tokens. Gives the parent (old index) of each live one."""
        candidates = [
            (self.live[parent].total + logprob, parent, token, logprob)
            for parent, (ids, logprobs) in enumerate(zip(top_ids, top_logprobs, strict=True))
            for token, logprob in zip(ids, logprobs, strict=True)
            if logprob > float("-inf")
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        live: list[Hypothesis] = []
        parents: list[int] = []
        for total, parent, token, logprob in candidates:
            old = self.live[parent]
            if token == self._eot:
                if len(self.finished) < self._enough:
                    self.finished.append(Hypothesis(ids=old.ids, logprobs=old.logprobs, total=total))
                continue
            live.append(Hypothesis(ids=[*old.ids, token], logprobs=[*old.logprobs, logprob], total=total))
            parents.append(parent)
            if len(live) == self._size:
                break
        self.live = live
        return parents

    def best(self, length_penalty: float | None) -> Hypothesis:
        """The winner; unfinished hypotheses count where fewer than beam_size have finished."""
        pool = list(self.finished)
        for hypothesis in sorted(self.live, key=lambda h: -h.total):
            if len(pool) >= self._size:
                break
            pool.append(hypothesis)
        return max(pool, key=lambda h: h.score(length_penalty), default=Hypothesis())
