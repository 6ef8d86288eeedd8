"""Whisper's special tokens and the tables that older model directories lack. Torch-free.

The three vocabularies differ in two things: English-only models lack one text token, and large-v3 has one language
more; every id after them is shifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.errors import ModelLoadError

NUM_TIMESTAMPS = 1501  # 0.00, 0.02 ... 30.00 s
TIMESTAMP_STEP_S = 0.02

# In the order of their ids. The hundredth came with large-v3.
LANGUAGES = tuple(
    """en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml
    cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi
    lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue""".split()
)
# Written without spaces between words: word times go by characters.
SPACELESS_LANGUAGES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))


@dataclass(frozen=True, kw_only=True)
class WhisperTokens:
    """Ids with a meaning. `languages` maps codes ("en") to ids. Ids >= timestamp_begin are times, TIMESTAMP_STEP_S apart."""

    eot: int
    sot: int
    languages: Mapping[str, int]
    translate: int
    transcribe: int
    startoflm: int
    startofprev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    multilingual: bool

    @property
    def timestamp_end(self) -> int:
        """One past the last timestamp."""
        return self.timestamp_begin + NUM_TIMESTAMPS

    @classmethod
    def of_vocabulary(cls, vocab_size: int) -> WhisperTokens:
        """By size: 51864 English only, 51865 multilingual, 51866 large-v3 and turbo (with up to 127 rows of padding)."""
        kind = {51864: (50256, 99), 51865: (50257, 99), 51866: (50257, 100)}.get(vocab_size)
        if kind is None:
            raise ModelLoadError(f"vocab_size: expected 51864, 51865 or 51866 for Whisper, got {vocab_size}")
        eot, num_languages = kind
        after = eot + 2 + num_languages
        return cls(
            eot=eot,
            sot=eot + 1,
            languages={code: eot + 2 + at for at, code in enumerate(LANGUAGES[:num_languages])},
            translate=after,
            transcribe=after + 1,
            startoflm=after + 2,
            startofprev=after + 3,
            no_speech=after + 4,
            no_timestamps=after + 5,
            timestamp_begin=after + 6,
            multilingual=vocab_size != 51864,
        )

    def prompt(self, language: str = "en", *, translate: bool = False, timestamps: bool = True) -> list[int]:
        """The start of a transcript: what every decode begins with, after any prompt."""
        ids = [self.sot]
        if self.multilingual:
            ids += [self.languages[language], self.translate if translate else self.transcribe]
        return ids if timestamps else [*ids, self.no_timestamps]

    @property
    def never(self) -> tuple[int, ...]:
        """Special ids that no transcript holds."""
        return (self.sot, self.translate, self.transcribe, self.startoflm, self.startofprev, self.no_speech)


# (layer, head) of cross attentions that follow the words, by (decoder layers, heads, English only, vocabulary); for
# directories whose configuration does not tell.
_ALIGNMENT_HEADS: dict[tuple[int, int, bool], str] = {
    (4, 6, True): "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    (4, 6, False): "2.2 3.0 3.2 3.3 3.4 3.5",
    (6, 8, True): "3.3 4.7 5.1 5.5 5.7",
    (6, 8, False): "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    (12, 12, False): "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    (24, 16, False): "13.15 15.4 15.15 16.1 20.0 23.4",
    (4, 20, False): "2.4 2.11 3.3 3.6 3.11 3.14",
}
_LARGE_V3 = "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6"


def known_alignment_heads(num_layers: int, num_heads: int, vocab_size: int) -> list[tuple[int, int]]:
    """The table's heads for a model of this size, else all heads of the upper half of the layers, as the reference does."""
    table = _ALIGNMENT_HEADS.get((num_layers, num_heads, vocab_size == 51864))
    if (num_layers, num_heads, vocab_size) == (32, 20, 51866):
        table = _LARGE_V3
    if table is None:
        return [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads)]
    return [(int(layer), int(head)) for layer, head in (pair.split(".") for pair in table.split())]
