"""How many prompt tokens a step may carry while others decode, so that nobody's stream stutters. Policy without tensors.

A step with decodes shall take at most `slowdown` times as long as one that only decodes; longer only where many prompts wait
beside few streams, since whoever waits for a first token waits too, and a fuller batch is a faster one. A prompt need not be
cut where one longer step ends it: a small credit of seconds, filled slowly by steps that only decode, pays for it, seldom
enough to stay above the 99th percentile. A long prompt does not touch the credit before its end: there it buys least steps
at the beginning, where tokens are cheap.

A chunk so small that the reading of its context is most of its cost is not cut further. Where the model allows it, PART tokens
then pass a few layers in each step, as many as fit: a long context is read once for all of them, and steps stay as short.

Lengths are learnt from steps that have landed: a decode step's for each number of sequences, and what comes on top of it as
a sum of what a chunk makes a step do: its tokens, what they look back on, the reading of their context however few they
are, and the streams' growth since a step last only decoded. So a chunk is cut before its context makes it dear, not after,
and one slow step in between changes little. Knows no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens of a chunk, whatever it costs: a prompt always gets on. Fewer would help nobody: each further step reads the whole
# context again, and the streams grow meanwhile. 15 streams beside the last of 8,000 tokens: 4 tokens cost 7.3 ms of attention,
# 8 cost 9.8, 16 cost 14.6 (two cores of an EPYC Zen 5).
LEAST = 6
# Tokens of a chunk that passes the layers in several steps. At 7,700 tokens of context one costs 1.4 ms alone among 8, 1.06 among
# 16, 0.94 among 32, 0.9 among 64 (there); a layer of 32 takes 1 ms, so that steps still come out even.
PART = 32
PART_FROM = 512  # tokens of context; with less, prompts do better in one batch
CREDIT_S = 0.15  # the most that a step may take beyond its pace
_WEIGHT = 4  # streams that a waiting prompt weighs as much as (64 prompts at once then lose 1 % of throughput, not 5)
_EARNED = 0.05  # of the time of steps that only decode
_NEW = 0.25  # weight of the newest decode step
_NEW_CHUNK = 0.15  # and of the newest chunk, once some have been seen
# Steps at which tokens, tokens x context, and contexts weigh about the same.
_TOKENS, _LOOKS, _CONTEXT = 64, 64 * 4096, 4096

Chunk = tuple[int, int, float]  # where it starts, its tokens, the share of the layers that they pass


@dataclass(kw_only=True)
class _Decode:
    """A step that only decodes."""

    seconds: float
    context: float  # positions that its sequences see, all together


class PrefillPace:
    """`slowdown` above 1. One object per scheduler."""

    def __init__(self, slowdown: float) -> None:
        if not slowdown > 1:
            raise ValueError(f"prefill_slowdown: expected more than 1, got {slowdown}")
        self._slowdown = slowdown
        self._decodes: dict[int, _Decode] = {}  # by the number of sequences
        self._cost: list[float] = []  # seconds of each of `_work`; empty before the first chunk
        self._num_chunks = 0
        self._was_slow = False  # the last chunk took much longer than expected
        self._credit_s = CREDIT_S
        self._paced_s = 0.0  # what the last limit gave
        self._growth_s = 0.0  # what of it the decodes' own growth takes
        self._limit = 0  # and in tokens

    def limit(self, num_decodes: int, context: int = 0, positions: Sequence[int] = (0,)) -> int | None:
        """Prompt tokens that fit beside so many decodes, which see `context` positions together; None = as many as there are.

        `positions`: of the prompts that want them, where each goes on.
        """
        base = self._decode(num_decodes) if num_decodes else None
        if base is None:
            return None  # no step has only decoded yet, so there is no pace to keep
        self._paced_s = (self._slowdown - 1) * base.seconds * max(1.0, _WEIGHT * len(positions) / num_decodes)
        self._growth_s = self._costs_of(num_decodes, base)[3] * (context - base.context) / _CONTEXT
        fixed_s, token_s = self._costs(base, num_decodes, positions)
        self._limit = max(LEAST, int((self._paced_s - fixed_s) / token_s))
        return self._limit

    def part(self, start: int, count: int, num_prompts: int) -> float:
        """The share of the layers that a chunk may pass in a step of the last `limit`, of one among so many prompts."""
        costs = self._cost or _first_guess(self._paced_s)
        seconds = sum(c * w for c, w in zip(costs, _work([(start, count, 1.0)], 0.0), strict=True))
        fits = (self._paced_s - self._growth_s) / num_prompts / max(seconds, 1e-9)
        return min(1.0, max(LEAST / count, fits))

    def part_tokens(self, start: int, num_prompts: int) -> int:
        """Tokens of a chunk that fills some such steps, PART at least."""
        fits = self.part(start, PART, num_prompts)
        return int(PART * fits * math.ceil(1 / fits))

    def credit(self) -> int:
        """Tokens more than the last `limit`, for prompts that end with them; they are taken to cost what those did."""
        return int(self._credit_s / self._paced_s * self._limit) if self._paced_s else 0

    def observe(self, num_decodes: int, context: int, chunks: Sequence[Chunk], seconds: float) -> None:
        """A landed step. Without decodes beside them, prompt chunks say nothing that is needed here."""
        if num_decodes == 0 or seconds <= 0:
            return
        base = self._decode(num_decodes)
        if not chunks:
            old = self._decodes.setdefault(num_decodes, _Decode(seconds=seconds, context=context))
            old.seconds += _NEW * (seconds - old.seconds)
            old.context += _NEW * (context - old.context)
            self._credit_s = min(CREDIT_S, self._credit_s + _EARNED * seconds)
        elif base is not None and seconds > base.seconds:
            if sum(count for _, count, share in chunks if share == 1.0) > self._limit:
                self._credit_s = max(0.0, self._credit_s - max(0.0, seconds - base.seconds - self._paced_s))
            self._learn(_work(chunks, context - base.context), seconds - base.seconds, base.seconds, num_decodes)

    def _learn(self, work: list[float], seconds: float, base_s: float, num_decodes: int) -> None:
        """Move the costs towards what this step took beyond `base_s`, each by its part in it."""
        cost = self._cost = self._cost or _first_guess(base_s / num_decodes)
        expected = sum(c * w for c, w in zip(cost, work, strict=True))
        # One lucky measurement shall not make a giant of the next chunk, nor one slow step a dwarf; two in a row are believed.
        most = 2 * expected + base_s
        is_slow, was_slow, self._was_slow = seconds > most, self._was_slow, seconds > most
        error = max(seconds if was_slow else min(seconds, most), expected / 4) - expected
        self._num_chunks += 1
        weight = 0.5 if is_slow and was_slow else max(_NEW_CHUNK, 1 / self._num_chunks)
        size = sum(w * w for w in work)
        self._cost = [max(0.0, c + weight * error * w / size) for c, w in zip(cost, work, strict=True)]

    def _costs(self, base: _Decode, num_decodes: int, positions: Sequence[int]) -> tuple[float, float]:
        """Seconds that come on top of `base` whatever the chunk, and for each of its tokens."""
        tokens, looks, reads, _ = self._costs_of(num_decodes, base)
        mean = sum(positions) / max(1, len(positions))
        fixed_s = reads * sum(positions) / _CONTEXT + self._growth_s
        return fixed_s, max(tokens / _TOKENS + looks * mean / _LOOKS, base.seconds / num_decodes / 64)

    def _costs_of(self, num_decodes: int, base: _Decode) -> list[float]:
        return self._cost or _first_guess(base.seconds / num_decodes)

    def _decode(self, num_decodes: int) -> _Decode | None:
        """Of so many sequences, or of the nearest number that was seen."""
        if not self._decodes:
            return None
        return self._decodes[min(self._decodes, key=lambda seen: (abs(seen - num_decodes), seen))]


def _work(chunks: Sequence[Chunk], growth: float) -> list[float]:
    """What chunks make a step do beside decoding: tokens, looks of tokens at their context, contexts read, growth."""
    tokens = sum(count * share for _, count, share in chunks)
    looks = sum(count * share * (start + count / 2) for start, count, share in chunks)
    reads = sum(start * share for start, _, share in chunks)
    return [tokens / _TOKENS, looks / _LOOKS, reads / _CONTEXT, growth / _CONTEXT]


def _first_guess(decode_s: float) -> list[float]:
    """A prompt token is taken to cost as much as a decode, which is too much."""
    return [decode_s * _TOKENS, 0.0, 0.0, 0.0]


@dataclass(kw_only=True)
class PromptShare:
    """Tokens that prompts share within one plan, so that a short one need not wait for a long one."""

    left: int
    credit: int  # more than these, for a prompt that ends with them
    num_prompts: int  # still to be asked
    num_sharing: int = 0  # asked or not; 0 where nothing is paced

    def bound(self, count: int, num_pending: int) -> int:
        """How many of `count` tokens a prompt with so many pending gets."""
        return min(count, self.whole_or(-(-self.left // max(1, self.num_prompts)), num_pending))

    def whole_or(self, part: int, num_pending: int) -> int:
        """All that is pending where the credit reaches for it, else `part` at most."""
        return num_pending if num_pending <= part + self.credit else part

    def took(self, count: int) -> None:
        """A prompt has got its tokens, on credit where more than what was left."""
        self.credit -= max(0, count - self.left)
        self.left = max(0, self.left - count)
        self.num_prompts -= 1
