"""LocalAgreement-2: which words of a growing transcript will not change any more. Pure: words in, words out.

Every hypothesis is a fresh transcript of the same buffer, so its end is unreliable: a word is *committed* once two
hypotheses in a row agree on it and on everything before it, and then never taken back. The rest is *tentative*. Knows
nothing of audio or models; times are seconds on one clock, whatever is cut off the front of the buffer.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from .types import Word

_SLACK_S = 0.1  # a word that starts this much before the end of the committed text is still new
_NEAR_S = 1.0  # only near the committed end can the head of a hypothesis repeat its tail
_MAX_OVERLAP = 5  # words


class LocalAgreement:
    """One stream's agreement. Memory is bounded by the longest hypothesis, not by the length of the stream."""

    def __init__(self) -> None:
        self.committed_end = 0.0  # end of the last committed word
        self._tail: deque[str] = deque(maxlen=_MAX_OVERLAP)  # keys of the last committed words
        self._tentative: list[Word] = []

    @property
    def tentative(self) -> list[Word]:
        """What the last hypothesis says after the committed words."""
        return list(self._tentative)

    def update(self, hypothesis: Sequence[Word]) -> list[Word]:
        """Take the next transcript of the buffer (committed words may be in it); return the newly committed words."""
        fresh = self._fresh(hypothesis)
        agreed = 0
        for old, new in zip(self._tentative, fresh, strict=False):
            if old.word.strip() != new.word.strip():
                break
            agreed += 1
        self._tentative = fresh[agreed:]
        return self._commit(fresh[:agreed])

    def flush(self) -> list[Word]:
        """Speech has ended: commit all that is tentative and return it. The next hypothesis starts anew."""
        rest, self._tentative = self._tentative, []
        return self._commit(rest)

    def drop(self, until: float) -> None:
        """Speech up to `until` is over and told in another way: forget what is tentative; no word before comes again."""
        self._tentative = []
        self._tail.clear()
        self.committed_end = max(self.committed_end, until)

    def trim_point(
        self, segment_ends: Sequence[float], *, start: float, end: float, target_s: float = 15.0, max_s: float = 25.0
    ) -> float | None:
        """Up to where the buffer [start, end) may be cut off, or None while it is short or nothing in it is settled.

        The last end of a segment within the committed text is best: what follows starts like a sentence. A buffer
        longer than `max_s` is cut after the last committed word wherever that is.
        """
        if end - start <= target_s:
            return None
        settled = [time for time in segment_ends if start < time <= self.committed_end + 1e-6]
        if settled:
            return max(settled)
        if end - start > max_s and start < self.committed_end < end:
            return self.committed_end
        return None

    def _commit(self, words: list[Word]) -> list[Word]:
        committed = []
        for word in words:
            begin = max(word.start, self.committed_end)
            if (begin, max(word.end, begin)) != (word.start, word.end):
                word = replace(word, start=begin, end=max(word.end, begin))  # times never run backwards
            self.committed_end = word.end
            self._tail.append(_key(word.word))
            committed.append(word)
        return committed

    def _fresh(self, hypothesis: Sequence[Word]) -> list[Word]:
        """The hypothesis without what is committed: by time first, then by its words where times were off."""
        if not self._tail:
            return [word for word in hypothesis if word.end > self.committed_end - _SLACK_S or not self.committed_end]
        skip = 0
        while skip < len(hypothesis) and hypothesis[skip].start <= self.committed_end - _SLACK_S:
            skip += 1
        fresh = list(hypothesis[skip:])
        if not fresh or fresh[0].start - self.committed_end > _NEAR_S:
            return fresh
        # Where the committed tail has been skipped already, an equal word after it was really said twice.
        if skip and _key(hypothesis[skip - 1].word) == self._tail[-1]:
            return fresh
        tail = list(self._tail)
        for size in range(min(len(tail), len(fresh)), 0, -1):
            if [_key(word.word) for word in fresh[:size]] == tail[-size:]:
                return fresh[size:]
        return fresh


def _key(word: str) -> str:
    """A word as it sounds: case and punctuation around it aside."""
    text = word.strip().casefold()
    bare = text.strip("".join({letter for letter in text if unicodedata.category(letter)[0] in "PSZ"}))
    return bare or text
