"""What a decoder will probably say: the ids of an earlier transcript of nearly the same audio, offered to be verified.

A greedy decoder that is given drafts computes a row for each and takes them while its own choices equal them, so the text is
what it would be without; only the number of passes differs. Where a choice differs, the draft goes on after the place that
fits best: a word may have changed, come in or fallen out. Pure: ids in, ids out.
"""

from __future__ import annotations

from collections.abc import Sequence

_AFTER_MISS = 4  # ids offered once a choice has differed; doubled while all are right
_FRUITLESS = 2  # offers of which nothing was right, after which only an id that is found again brings the draft back
_FAR = 32  # ids ahead in which one that was said is looked for


class TextDraft:
    """One attempt's draft. Ids from `timestamp_begin` on are times, which move when audio is added."""

    def __init__(self, ids: Sequence[int], *, timestamp_begin: int) -> None:
        self._ids = list(ids)
        self._timestamp_begin = timestamp_begin
        self._at = 0
        self._most = len(self._ids)
        self._fruitless = 0

    def offer(self, room: int) -> list[int]:
        """At most `room` ids that may follow what was said so far."""
        if self._fruitless >= _FRUITLESS:
            return []
        return self._ids[self._at : self._at + max(0, min(room, self._most))]

    def observe(self, said: Sequence[int], num_offered: int) -> None:
        """What the decoder chose in the pass that verified the last offer, the end of text left out."""
        num_right = 0
        for token in said:
            if self._at < len(self._ids) and self._ids[self._at] == token:
                self._at += 1
                num_right += 1
                self._fruitless = 0
            else:
                self._skip(token)
        if num_offered:
            if num_right >= num_offered:
                self._most = max(2 * self._most, _AFTER_MISS)
            else:
                self._most = _AFTER_MISS
                self._fruitless = 0 if num_right else self._fruitless + 1

    def _skip(self, token: int) -> None:
        """Another id than expected was said: where do we go on?"""
        if token >= self._timestamp_begin:
            if self._at < len(self._ids) and self._ids[self._at] >= self._timestamp_begin:
                self._at += 1
            return
        ahead = self._ids[self._at : self._at + _FAR]
        if token in ahead:
            self._at += ahead.index(token) + 1
            self._fruitless = 0
        elif self._fruitless < _FRUITLESS and self._at < len(self._ids):
            self._at += 1
