"""How many prompt tokens a step may carry while others decode, so that nobody's stream stutters. Policy without tensors.

A step with decodes shall take at most `slowdown` times as long as one that only decodes; longer only where many prompts wait
beside few streams, since whoever waits for a first token waits too, and a fuller batch is a faster one. Rare short prompts
need not be cut at all: a small credit of seconds, filled slowly by steps that only decode, pays for one long step, seldom
enough to stay above the 99th percentile.

Both lengths are learnt from steps that have landed: a decode step's for each number of sequences, a prompt token's from the
latest chunks alone, since attention makes it dearer as its context grows. Knows no clocks.
"""

from __future__ import annotations

# Tokens of a chunk, whatever it costs: a prompt always gets on. Measured beside 15 streams: with 8, a prompt of 8,000 had its
# first token after 19.5 s instead of 12, and the 99th percentile of its neighbours' pauses fell from 42 to 39 ms only.
LEAST = 16
CREDIT_S = 0.15  # the most that a step may take beyond its pace
_WEIGHT = 4  # streams that a waiting prompt weighs as much as (64 prompts at once then lose 1 % of throughput, not 5)
_EARNED = 0.05  # of the time of steps that only decode
_NEW = 0.25  # weight of the newest decode step
_NEW_CHUNK = 0.5  # and of the newest chunk


class PrefillPace:
    """`slowdown` above 1. One object per scheduler."""

    def __init__(self, slowdown: float) -> None:
        if not slowdown > 1:
            raise ValueError(f"prefill_slowdown: expected more than 1, got {slowdown}")
        self._slowdown = slowdown
        self._decode_s: dict[int, float] = {}  # seconds of a step that decodes so many sequences
        self._token_s = 0.0  # seconds of one more prompt token; 0: not known yet
        self._credit_s = CREDIT_S
        self._paced_s = 0.0  # what the last limit gave, without credit

    def limit(self, num_decodes: int, num_prompts: int = 1) -> int | None:
        """Prompt tokens of `num_prompts` prompts that fit beside so many decodes; None = as many as there are."""
        if num_decodes == 0:
            return None
        base = self._decode_seconds(num_decodes)
        if base is None:
            return None  # no step has only decoded yet, so there is no pace to keep
        self._paced_s = (self._slowdown - 1) * base * max(1.0, _WEIGHT * num_prompts / num_decodes)
        # Before the first chunk a prompt token is taken to cost as much as a decode, which is too much.
        token_s = self._token_s or base / num_decodes
        return max(LEAST, int((self._paced_s + self._credit_s) / token_s))

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A landed step. Without decodes beside it, a prompt chunk says nothing that is needed here."""
        if num_decodes == 0 or seconds <= 0:
            return
        base = self._decode_seconds(num_decodes)
        if num_prompt_tokens == 0:
            old = self._decode_s.get(num_decodes, seconds)
            self._decode_s[num_decodes] = old + _NEW * (seconds - old)
            self._credit_s = min(CREDIT_S, self._credit_s + _EARNED * seconds)
        elif base is not None and seconds > base:
            self._credit_s = max(0.0, self._credit_s - max(0.0, seconds - base - self._paced_s))
            old = self._token_s or base / num_decodes
            # One lucky measurement shall not make a giant of the next chunk.
            cost = max((seconds - base) / num_prompt_tokens, old / 4)
            self._token_s = cost if not self._token_s else old + _NEW_CHUNK * (cost - old)

    def _decode_seconds(self, num_decodes: int) -> float | None:
        """Of a step of so many decodes, or of the nearest number that was seen."""
        if not self._decode_s:
            return None
        return self._decode_s[min(self._decode_s, key=lambda seen: (abs(seen - num_decodes), seen))]
