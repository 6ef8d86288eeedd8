"""Segments of a transcript as subtitles: SubRip (.srt) and WebVTT (.vtt). Pure text, no files, torch-free.

Both give one cue per segment in order of time, skip what has no text, and never write a line that a reader could take for
the end of a cue or for its times. With `max_chars` a segment whose words have times becomes several shorter cues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unicodedata import category

from ..engine.types import Segment, Word


@dataclass(frozen=True, kw_only=True)
class Cue:
    """What stands on the screen from `start_ms` to `end_ms` (always later); `text` is one line."""

    start_ms: int
    end_ms: int
    text: str
    speaker: str | None = None


def to_srt(segments: Iterable[Segment], *, max_chars: int = 0) -> str:
    """SubRip; times as 00:00:00,000. A speaker stands before the text: "Ann: Hello."."""
    blocks = []
    for number, cue in enumerate(cues(segments, max_chars=max_chars), 1):
        # SubRip knows no escapes, and its readers look for an arrow anywhere.
        text = (f"{_one_line(cue.speaker)}: {cue.text}" if cue.speaker else cue.text).replace("-->", "->")
        blocks.append(f"{number}\n{clock(cue.start_ms, ',')} --> {clock(cue.end_ms, ',')}\n{text}\n")
    return "\n".join(blocks)


def to_vtt(segments: Iterable[Segment], *, max_chars: int = 0) -> str:
    """WebVTT; times as 00:00:00.000. A speaker becomes a voice span: <v Ann>Hello."""
    blocks = ["WEBVTT\n"]
    for cue in cues(segments, max_chars=max_chars):
        text = _escape(cue.text)
        if cue.speaker:
            text = f"<v {_escape(_one_line(cue.speaker))}>{text}"
        blocks.append(f"{clock(cue.start_ms, '.')} --> {clock(cue.end_ms, '.')}\n{text}\n")
    return "\n".join(blocks)


def cues(segments: Iterable[Segment], *, max_chars: int = 0) -> Iterator[Cue]:
    """The cues of segments. `max_chars` 0: one cue per segment; else pieces of about so many characters."""
    for segment in sorted(segments, key=lambda one: one.start):
        if max_chars > 0 and segment.words:
            for words in _even_pieces(segment.words, max_chars):
                text = "".join(word.word for word in words)
                yield from _cue(words[0].start, words[-1].end, text, words[0].speaker or segment.speaker)
        else:
            yield from _cue(segment.start, segment.end, segment.text, segment.speaker)


def clock(ms: int, mark: str) -> str:
    """Milliseconds as hours:minutes:seconds, then `mark` and thousandths. Hours may pass 99."""
    seconds, ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{mark}{ms:03d}"


def _cue(start: float, end: float, text: str, speaker: str | None) -> Iterator[Cue]:
    text = _one_line(text)
    if text:
        start_ms = max(0, round(start * 1000))
        # A cue of no length is an error in WebVTT and never shown in SubRip.
        yield Cue(start_ms=start_ms, end_ms=max(round(end * 1000), start_ms + 1), text=text, speaker=speaker)


def _even_pieces(words: list[Word], max_chars: int) -> list[list[Word]]:
    """As few runs as `max_chars` allows, and as even as so many can be: no last word alone."""
    best = list(_pieces(words, max_chars))
    for width in range(sum(len(word.word) for word in words) // len(best), max_chars):
        pieces = list(_pieces(words, width))
        if len(pieces) == len(best):
            return pieces
    return best


def _pieces(words: list[Word], max_chars: int) -> Iterator[list[Word]]:
    """Words in runs of at most `max_chars` characters (a longer word stands alone) and of one speaker."""
    run: list[Word] = []
    length = 0
    for word in words:
        if run and (length + len(word.word.rstrip()) > max_chars or word.speaker != run[0].speaker):
            yield run
            run, length = [], 0
        length += len(word.word) if run else len(word.word.lstrip())
        run.append(word)
    if run:
        yield run


def _one_line(text: str) -> str:
    """Without line breaks (an empty line ends a cue), control characters and doubled spaces."""
    return " ".join("".join(" " if category(char) in ("Cc", "Zl", "Zp") else char for char in text).split())


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
