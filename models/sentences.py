"""Where text may be cut for speaking: into sentences, whole or while it streams in, and sentences into utterances.

Sentences are cut in the text as it was typed, before anything is spelled out, so that each can be spoken as soon as it is
there. `SentenceSplitter` gives the same sentences however its text was cut into pieces. Knows English abbreviations; knows no
voice. All of it is linear in the length of the text: a sentence never has more than LONGEST characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .speech_words import BEFORE_SOMETHING, DAYS, MAY_END, MONTHS, ONLY_CAPITALISED, STARTERS

LONGEST = 600  # characters of a sentence; what is longer is cut at a clause or a space
CLAUSE_WORDS = 4  # in front of the mark at which a sentence may be begun before its end has come

# The end of a sentence: marks, what closes behind them, and a space; or a line that ends a paragraph or an item of a list.
_END = re.compile(
    r"[.!?\u2026]++[\"')\]}\u201d\u2019\u00bb*_]{0,4}(?=\s)|[\u3002\uff01\uff1f]|"
    r"\n(?=[ \t\r]{0,20}(?:\n|[-*+#>\u2022]|\d{1,3}[.)]\s))"
)
_CLAUSE = re.compile(r"[,;:](?=\s)|\s[-\u2013\u2014]{1,2}(?=\s)|\u2014")
_SPACE = re.compile(r"\s+")
_LAST_WORD = re.compile(r"[\w.]{1,20}$")
_NEXT = re.compile(r"\s*([\"'(\[\u201c\u2018*_]{0,4}\w[\w.]{0,15})")
_ALWAYS = frozenset(BEFORE_SOMETHING) - {"est", "ft", "ext", "sec"}
_NEVER_NEW = {day[:3] for day in DAYS} | {month[:3] for month in MONTHS}
_NEEDED = 24  # characters behind a full stop that decide what it is

_JOINING = frozenset(
    "and but or because which that who when while where if so then as than although before after until".split()
)
_LEADING = frozenset(
    "of in to with for on at from by into over under through about between against during without".split()
)
_HOLDING = frozenset("a an the my your his her its our their".split()) | _LEADING  # no cut behind these


class SentenceSplitter:
    """Text in pieces of any size -> sentences, each as soon as its end is sure."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def waiting(self) -> str:
        """What has come of the next sentence."""
        return self._text

    def push(self, piece: str) -> list[str]:
        """More text -> the sentences that it completes, stripped, none of them empty."""
        self._text += piece
        return self._take(final=False)

    def take_clause(self) -> str:
        """The beginning of a sentence that has not ended yet, up to a clause of some words; "" if there is none."""
        for mark in _CLAUSE.finditer(self._text):
            clause = self._text[: mark.end()]
            if len(clause.split()) >= CLAUSE_WORDS:
                self._text = self._text[mark.end() :]
                return clause.strip()
        return ""

    def flush(self) -> list[str]:
        """All that is there: nothing more will come, or not soon."""
        found = self._take(final=True)
        rest, self._text = self._text.strip(), ""
        return [*found, rest] if rest else found

    def _take(self, *, final: bool) -> list[str]:
        text = self._text
        start = 0
        found: list[str] = []
        while True:
            end = _sentence_end(text, start, final=final)
            if end < 0:
                break
            if sentence := text[start:end].strip():
                found.append(sentence)
            start = end
        self._text = text[start:]
        if not self._text.strip():
            self._text = ""
        return found


def sentences(text: str) -> list[str]:
    """The sentences of a whole text, stripped, none of them empty."""
    splitter = SentenceSplitter()
    return [*splitter.push(text), *splitter.flush()]


def utterances(sentence: str, *, max_chars: int, max_words: int = 0, spelled: bool = True) -> list[str]:
    """A sentence in pieces that one utterance may have, cut where a speaker would breathe: at a comma, before a conjunction,
    before a preposition, else anywhere. `max_words` 0: any number. `spelled`: it holds no abbreviations any more, so that a
    full stop within it is one, and cut at.

    Words alone that are too long are cut too. The pieces hold all words of the sentence in their order.
    """
    found: list[str] = []
    for part in re.split(r"(?<=[.?!])\s+", sentence.strip()) if spelled else [sentence]:
        words = [word[at : at + max_chars] for word in part.split() for at in range(0, len(word), max_chars)]
        while words:
            fits = _num_fitting(words, max_chars, max_words or len(words))
            num = len(words) if fits == len(words) else _best_cut(words, fits)
            found.append(" ".join(words[:num]))
            words = words[num:]
    return found


# --------------------------------------------------------------------------------------------------------- mechanism


def _sentence_end(text: str, start: int, *, final: bool) -> int:
    """Where the sentence from `start` ends, or -1 while that is not known."""
    limit = start + LONGEST
    for mark in _END.finditer(text, start, min(len(text), limit + 4)):
        if mark[0][0] != ".":
            return mark.end()
        if not final and len(text) - mark.end() < _NEEDED and _is_doubtful(text, start, mark):
            return -1  # the next word decides
        if _is_full_stop(text, start, mark):
            return mark.end()
    if len(text) <= limit or (not final and len(text) <= limit + 8):  # a mark may stand across the limit
        return -1
    clause = max((mark.end() for mark in _CLAUSE.finditer(text, start + LONGEST // 2, limit)), default=0)
    space = max((mark.end() for mark in _SPACE.finditer(text, start + LONGEST // 2, limit)), default=0)
    return clause or space or limit


def _word_before(text: str, start: int, mark: re.Match[str]) -> str:
    found = _LAST_WORD.search(text[max(start, mark.start() - 20) : mark.start()])
    return found[0] if found else ""


def _is_doubtful(text: str, start: int, mark: re.Match[str]) -> bool:
    word = _word_before(text, start, mark)
    low = word.lower()
    return (
        mark[0].startswith("..")
        or low in MAY_END
        or low in BEFORE_SOMETHING
        or _is_initial(word)
        or low in ("no", "p", "pp")
    )


def _is_initial(word: str) -> bool:
    return bool(re.fullmatch(r"[A-Z]|(?:[A-Za-z]\.)+[A-Za-z]", word))


def _is_full_stop(text: str, start: int, mark: re.Match[str]) -> bool:
    """Whether a row of full stops, with a space behind it, ends a sentence."""
    word = _word_before(text, start, mark)
    low = word.lower()
    following = _NEXT.match(text, mark.end(), mark.end() + _NEEDED)
    after = following[1].lstrip("\"'([\u201c\u2018*_") if following else ""
    if mark[0].startswith(".."):
        return not after[:1].islower()
    if re.fullmatch(r"\d{1,3}", word) and not text[start : mark.start() - len(word)].strip():
        return False  # "1. First"
    if low in ("no", "p", "pp", "nos") and after[:1].isdigit():
        return False
    if low in ONLY_CAPITALISED and not word[:1].isupper():
        return True
    if low in _ALWAYS:
        return not after
    if low in MAY_END or low in BEFORE_SOMETHING or (_is_initial(word) and len(word) > 1):
        if low in ("a.m", "p.m", "etc"):
            new = after[:1].isupper() and not after[:2].isupper() and after[:3].lower() not in _NEVER_NEW
        else:
            new = after[:1].isupper() and after.rstrip(".").lower() in STARTERS
        return not after or new
    if _is_initial(word):
        return word == "I" or not after[:1].isupper()
    return True


def _num_fitting(words: list[str], max_chars: int, max_words: int) -> int:
    length = -1
    for number, word in enumerate(words[:max_words]):
        length += 1 + len(word)
        if length > max_chars:
            return max(1, number)
    return min(len(words), max_words)


def _best_cut(words: list[str], fits: int) -> int:
    """How many of the first `fits` words go together, when more follow."""
    most = min(fits, len(words) - 2)  # two words at least are left: one alone is hard to say
    if most < 1:
        return max(1, fits)
    least = min(3, most)
    places: tuple[Callable[[int], bool], ...] = (  # the best first
        lambda at: words[at - 1][-1] in ",;:",
        lambda at: words[at].lower() in _JOINING,
        lambda at: words[at].lower() in _LEADING,
        lambda at: words[at - 1].lower() not in _HOLDING,
    )
    for good in places:
        for at in range(most, least - 1, -1):
            if good(at) and words[at - 1].lower() not in _JOINING:
                return at
    return most
