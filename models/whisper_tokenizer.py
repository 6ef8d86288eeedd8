"""Whisper's text: ids to text and words and back. Torch-free.

Text is byte-level BPE; ids from `eot` on are specials and timestamps, which have no text here.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ..engine.errors import ModelLoadError
from .tokenizer import Tokenizer, load_tokenizer
from .whisper_tokens import SPACELESS_LANGUAGES, WhisperTokens

_MAX_VOCABULARY_BYTES = 64 << 20
# Marks that close or open nothing words are about, and the first pieces of a hyphen or quote within running text.
_SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),
]
_MUSIC = "♩♪♫♬♭♮♯"


class WhisperTokenizer:
    """Encode plain text, decode text ids, group ids into words. Immutable and shared freely."""

    def __init__(self, tokenizer: Tokenizer, tokens: WhisperTokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone; no special token, whatever the text spells. InvalidRequest for invalid Unicode."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids below `eot`; a broken character shows as U+FFFD. A leading space stays."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The same as bytes, so that pieces can be joined before they are read as UTF-8."""
        eot = self._tokens.eot
        return b"".join(self._tokenizer.token_bytes(index) for index in ids if 0 <= index < eot)

    def decode_with_timestamps(self, ids: Iterable[int]) -> str:
        """For people and logs: times as <|1.08|>."""
        out: list[bytes] = []
        for index in ids:
            if index >= self._tokens.timestamp_begin:
                out.append(f"<|{(index - self._tokens.timestamp_begin) * 0.02:.2f}|>".encode())
            elif index < self._tokens.eot:
                out.append(self._tokenizer.token_bytes(index))
        return b"".join(out).decode("utf-8", "replace")

    def split_to_words(self, ids: Sequence[int], language: str = "en") -> tuple[list[str], list[list[int]]]:
        """Words and the ids of each, in order; a word carries its leading space, punctuation stands alone.

        Languages that write no spaces are split at characters. An id >= `eot` is a word of its own with text "".
        """
        pieces = self._characters(ids)
        if language in SPACELESS_LANGUAGES:
            return [text for text, _ in pieces], [part for _, part in pieces]
        words: list[str] = []
        groups: list[list[int]] = []
        for text, part in pieces:
            alone = part[0] >= self._tokens.eot or text.startswith(" ") or text.strip() in string.punctuation
            if alone or not words:
                words.append(text)
                groups.append(list(part))
            else:
                words[-1] += text
                groups[-1].extend(part)
        return words, groups

    def _characters(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The shortest runs of ids that are whole characters, with their text."""
        out: list[tuple[str, list[int]]] = []
        raw, run = b"", list[int]()
        for index in ids:
            if index >= self._tokens.eot:
                if run:
                    out.append((raw.decode("utf-8", "replace"), run))
                    raw, run = b"", []
                out.append(("", [index]))
                continue
            raw += self._tokenizer.token_bytes(index)
            run.append(index)
            if not _is_cut(raw):
                out.append((raw.decode("utf-8", "replace"), run))
                raw, run = b"", []
        if run:
            out.append((raw.decode("utf-8", "replace"), run))
        return out

    def non_speech_tokens(self) -> tuple[int, ...]:
        """Ids of marks that are no speech (brackets, music notes, speaker dashes), as the reference lists them."""
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in [*_SYMBOLS, *_MUSIC]:
            for ids in (self.encode(symbol), self.encode(" " + symbol)):
                if len(ids) == 1 or symbol in _MUSIC:
                    found.add(ids[0])
        return tuple(sorted(found))


def _is_cut(raw: bytes) -> bool:
    """True when the bytes end within a character that more bytes could finish."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def load_whisper_tokenizer(path: Path, tokens: WhisperTokens) -> WhisperTokenizer:
    """From tokenizer.json, else from the vocabulary of a CTranslate2 directory. Raises ModelLoadError."""
    if (path / "tokenizer.json").is_file():
        return WhisperTokenizer(load_tokenizer(path), tokens)
    for name in ("vocabulary.json", "vocabulary.txt"):
        if (path / name).is_file():
            return WhisperTokenizer(Tokenizer(_from_vocabulary(path / name, tokens.eot), name=path.name), tokens)
    raise ModelLoadError(f"{path.name}: no tokenizer.json and no vocabulary.json or vocabulary.txt here")


def _from_vocabulary(file: Path, num_text: int) -> Backend:
    """Byte-level BPE from its vocabulary alone: a piece's id is its rank, so its merge is the last one made within it."""
    import json

    if file.stat().st_size > _MAX_VOCABULARY_BYTES:
        raise ModelLoadError(f"{file.name}: larger than {_MAX_VOCABULARY_BYTES} bytes")
    try:
        text = file.read_text(encoding="utf-8")
        pieces = json.loads(text) if file.suffix == ".json" else text.split("\n")
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{file.name}: not readable as a vocabulary") from None
    if not isinstance(pieces, list) or len(pieces) < num_text or not all(isinstance(piece, str) for piece in pieces):
        raise ModelLoadError(f"{file.name}: expected at least {num_text} pieces")
    ranks = {piece: rank for rank, piece in enumerate(pieces[:num_text])}
    merges = [pair for piece in pieces[256:num_text] if (pair := _last_merge(piece, ranks)) is not None]
    backend = Backend(models.BPE(vocab=ranks, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _last_merge(piece: str, ranks: dict[str, int]) -> tuple[str, str] | None:
    """The two pieces that `piece` is made of, found by merging its characters with lower ranks only."""
    parts, limit = list(piece), ranks[piece]
    while len(parts) > 2:
        rank, at = min((ranks.get(a + b, limit), at) for at, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank >= limit:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
