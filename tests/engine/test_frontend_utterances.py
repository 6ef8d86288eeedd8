"""What a voice is given to say in one breath: fits it, holds the words, begins early."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.frontend.utterances import MAX_WORDS, Utterance, UtteranceMaker
from motet.models.speech_format import SpeechFormat, load_format

from ..pipelines.scripted_voice import LETTERS, said, write_voice


def voice(tmp_path: Path) -> SpeechFormat:
    return load_format(write_voice(tmp_path))


def made(voice_format: SpeechFormat, *texts: str) -> list[Utterance]:
    maker = UtteranceMaker(voice_format, "ada")
    found = [utterance for text in texts for utterance in list(maker.push(text))]
    return [*found, *maker.push("", last=True)]


def test_a_long_sentence_is_cut_where_one_breathes(tmp_path: Path) -> None:
    text = (
        "The old captain, who had seen many storms, steered his ship around the rocks because the wind came from the west "
        "and nobody else on board knew the way home."
    )
    found = made(voice(tmp_path), text)
    assert [utterance.text for utterance in found] == [
        "the old captain, who had seen many storms.",
        "steered his ship around the rocks because the wind came from the west.",
        "and nobody else on board knew the way home.",
    ]
    assert [utterance.pause_s > 0 for utterance in found] == [False, False, True], "a pause is for sentences"


def test_prompts_are_the_voices_own(tmp_path: Path) -> None:
    voice_format = voice(tmp_path)
    for utterance in made(voice_format, "Is it 5 o'clock? Yes, it is."):
        assert utterance.prompt == voice_format.prompt(utterance.text) and said(utterance.prompt) == utterance.text
        assert 0.5 < utterance.guessed_s < 3


def test_nothing_is_spoken_twice_or_lost_when_text_streams(tmp_path: Path) -> None:
    text = "Well. It is late, my friend, and we go. See you! Bye."
    voice_format = voice(tmp_path)
    whole = " ".join(utterance.text for utterance in made(voice_format, text))
    streamed = " ".join(utterance.text for utterance in made(voice_format, *text))
    words = [spoken.replace(",", "").replace(".", "").split() for spoken in (whole, streamed)]
    assert words[0] == words[1] == "well it is late my friend and we go see you bye".split()


@given(st.text(max_size=300))
@settings(max_examples=80, deadline=None)
def test_any_text_fits_the_voice(tmp_path_factory: object, text: str) -> None:
    voice_format = _shared(tmp_path_factory)
    for utterance in made(voice_format, text):
        assert set(utterance.text) <= set(LETTERS) and len(utterance.text) <= voice_format.max_chars
        assert len(utterance.text.split()) <= MAX_WORDS + 1 and utterance.text[-1] in ".?"


_formats: list[SpeechFormat] = []


def _shared(factory: object) -> SpeechFormat:
    if not _formats:
        _formats.append(load_format(write_voice(factory.mktemp("voice"))))  # type: ignore[attr-defined]
    return _formats[0]
