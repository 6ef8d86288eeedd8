"""N-gram drafts: what followed the last time these tokens stood at the end. Also called prompt lookup.

Searches the sequence's own tokens for an earlier occurrence of its last n tokens (longest n first, latest occurrence
first) and proposes the tokens that followed it as a chain.
"""

from __future__ import annotations

from array import array

from .proposer import Drafts, View


class NgramProposer:
    """Chains of at most `num_drafts` tokens from matches of `max_n` down to `min_n` tokens."""

    def __init__(self, *, num_drafts: int, max_n: int = 4, min_n: int = 2) -> None:
        self.num_drafts = num_drafts
        self.max_n = max_n
        self.min_n = min_n

    def propose(self, view: View, aux_hidden: object | None) -> Drafts:
        tokens = view.token_ids
        # Bytes of fixed-width ids turn the search into bytes.rfind, which is C; a hit must lie on an id boundary.
        haystack = array("i", tokens).tobytes()
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            needle = haystack[-4 * n :]
            end = len(haystack) - 4
            while (found := haystack.rfind(needle, 0, end)) >= 0 and found % 4:
                end = found + len(needle) - 1
            if found >= 0:
                start = found // 4 + n
                ids = list(tokens[start : start + min(self.num_drafts, view.room)])
                return Drafts(ids=ids, parents=list(range(-1, len(ids) - 1)))
        return Drafts()

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        """N-grams learn nothing from acceptance."""
