"""Text, whole or as it streams in -> utterances: what a voice is given to say in one breath, as prompt ids.

Pure policy without a clock: who waits, and for how long, is engine/frontend/speech.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...models.plain_text import tidy
from ...models.sentences import SentenceSplitter, utterances
from ...models.speech_format import SpeechFormat
from ...models.speech_text import normalize, spell_letters

PAUSE_S = 0.15  # of silence behind a sentence, beside what the voice itself leaves
MAX_WORDS = 14  # of an utterance of a voice that reads letters: what such voices learn from
_EARLY_WORDS = (3, 9)  # the first utterance may end at a comma behind so many words: it is heard sooner
_CHARS_PER_S = 13.0  # of speech, to guess how long an utterance will be


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """`text` is what is said, `prompt` the voice's ids for it; `pause_s` of silence follows unless it is the last."""

    text: str
    prompt: list[int]
    pause_s: float

    @property
    def guessed_s(self) -> float:
        return 0.3 + len(self.text) / _CHARS_PER_S


class UtteranceMaker:
    """Cuts the text of one request. A sentence of one word joins the next one: alone it is hard to say well."""

    def __init__(self, voice_format: SpeechFormat, voice: str) -> None:
        self._format = voice_format
        self._voice = voice
        self._splitter = SentenceSplitter()
        self._held = ""  # one word that waits for more
        self._begun = False

    def push(self, text: str, *, last: bool = False) -> Iterator[Utterance]:
        """More text -> the utterances that are complete now, made one by one as they are asked for.

        Take them all before the next call. Before the first utterance a clause is enough. `last`: all that is there.
        """
        found = self._splitter.push(text)
        if last:
            found += self._splitter.flush()
        for sentence in found:
            yield from self._speak(sentence)
        if not last and not self._begun and (clause := self._splitter.take_clause()):
            yield from self._speak(clause, 0.0)
        if last and self._held:
            yield self._utterance(self._held)
            self._held = ""

    def _speak(self, sentence: str, pause_s: float = PAUSE_S) -> Iterator[Utterance]:
        letters = self._format.letters
        spoken = tidy(sentence) if letters is None else spell_letters(normalize(sentence))
        if letters is not None:
            spoken = "".join(letter for letter in spoken if letter in letters).strip()
        if not any(char.isalnum() for char in spoken):
            return
        if self._held:
            spoken, self._held = f"{self._held.rstrip('.?!')}, {spoken}", ""
        pieces = utterances(
            spoken,
            max_chars=self._format.max_chars - 1,
            max_words=MAX_WORDS if letters else 0,
            spelled=letters is not None,
        )
        pieces = [piece for piece in pieces if any(char.isalnum() for char in piece)]
        if not self._begun and pieces:
            pieces[:1] = _cut_early(pieces[0])
        if letters is not None and "." in letters:
            # Such a voice has learned sentences, which end: a cut within one is said as an end too.
            pieces = [piece if piece[-1] in ".?" else piece.rstrip(",") + "." for piece in pieces]
        if pieces and letters is not None and " " not in pieces[-1]:
            self._held = pieces.pop()
        for number, piece in enumerate(pieces):
            self._begun = True
            yield self._utterance(piece, pause_s if number == len(pieces) - 1 else 0.0)

    def _utterance(self, text: str, pause_s: float = PAUSE_S) -> Utterance:
        return Utterance(text=text, prompt=self._format.prompt(text, self._voice), pause_s=pause_s)


def _cut_early(text: str) -> list[str]:
    words = text.split(" ")
    low, high = _EARLY_WORDS
    if len(words) <= high:
        return [text]
    at = next((at for at in range(low, high + 1) if words[at - 1].endswith(",") and len(words) - at > 1), 0)
    return [" ".join(words[:at]), " ".join(words[at:])] if at else [text]
