"""Formats of voices: prompts, masks, guards, and the way from ids to frames, against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.models.registry import resolve
from motet.models.speech_format import LetterVoice, OrpheusVoice, SpeechFormat, is_voice, load_format

from .. import tiny


def changed(folder: Path, **fields: object) -> Path:
    """A copy of the tiny voice's description with other fields; dots lead into objects."""
    voice = json.loads((tiny.voice() / "speech.json").read_text())
    for name, value in fields.items():
        *path, last = name.split("__")
        at = voice
        for part in path:
            at = at[part]
        at[last] = value
    (folder / "speech.json").write_text(json.dumps(voice))
    return folder


def test_a_letter_voice_spells_letters_and_phones() -> None:
    voice = load_format(tiny.voice())
    assert isinstance(voice, LetterVoice) and voice.letters == tiny.LETTERS
    assert voice.prompt("ab.") == [1, 6, 7, 6 + tiny.LETTERS.index("."), 2, 3]
    phones, codes = voice.phases
    assert phones.masks == (((37, 37 + len(tiny.PHONES)), (4, 5)),) and phones.stop == 4
    assert phones.sampling.temperature == 0
    assert codes.stop == 5 and codes.min_tokens == 3
    assert codes.masks == (((96, 112), (5, 6)), ((112, 128),), ((128, 144),))
    assert voice.phase_prompt([1, 6, 2, 3], []) == [1, 6, 2, 3]
    assert voice.phase_prompt([1, 6, 2, 3], [[40, 41]]) == [1, 6, 2, 3, 40, 41, 4]
    assert voice.tokens_per_s == pytest.approx(3 * 24000 / 2048)
    assert resolve(str(tiny.voice())).kind == "tts"


def test_the_guard_grows_with_the_text_and_ends_at_whole_frames() -> None:
    voice = load_format(tiny.voice())
    short, long = voice.prompt("no."), voice.prompt("a" * 90)
    assert voice.max_tokens(short) % 3 == voice.max_tokens(long) % 3 == 0
    assert voice.max_tokens(short) < voice.max_tokens(long) <= 20 * voice.tokens_per_s
    assert voice.max_tokens(long, 0) > 90


@pytest.mark.parametrize(
    ("text", "param"), [("", "input"), ("  ", "input"), ("Hello", "input"), ("a" * 91, "input"), ("né", "input")]
)
def test_what_a_letter_voice_cannot_speak(text: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_format(tiny.voice()).prompt(text)
    assert caught.value.param == param


def test_voices_have_names() -> None:
    voice = load_format(tiny.orpheus())
    assert voice.voice(None) == voice.voice("default") == voice.voice("") == "tara"
    assert voice.voice("leo") == "leo"
    with pytest.raises(InvalidRequest, match="tara, leo") as caught:
        voice.voice("hal")
    assert caught.value.param == "voice"


def test_orpheus_puts_its_own_ids_around_plain_text() -> None:
    voice = load_format(tiny.orpheus())
    assert isinstance(voice, OrpheusVoice) and voice.carry_s > 0 and voice.trim_below > 0
    ids = voice.prompt("hello", "leo")
    text = voice.tokenizer.encode("leo: hello")
    assert ids == [50, *text, 51, 52, 53, 54] and text[0] == 1  # the tokenizer's own begin
    # Special tokens in a user's text are read as characters.
    special = voice.tokenizer.encode("<|END|>", add_special_tokens=False, parse_special=True)
    assert len(special) == 1 and special[0] not in voice.prompt("a <|END|> b")
    assert voice.phases == (voice.codes_phase,) and voice.codes_phase.stop == 5
    assert voice.codes_phase.sampling.repetition_penalty == 1.1 and voice.codes_phase.sampling.penalty_window > 0
    assert voice.spoken([50, 51], [96, 112]) == [50, 51, 96, 112, 5, 55]


def test_a_snapshot_of_orpheus_needs_no_description(tmp_path: Path) -> None:
    folder = tmp_path / "models--canopylabs--3b-es_it-ft-research_release"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 156940, "eos_token_id": 128001})
    )
    assert is_voice(folder) and resolve(str(folder)).kind == "tts"
    voice = load_format(folder)
    assert voice.voices == ("javi", "sergio", "maria") and voice.codec == "hubertsiuzdak/snac_24khz"
    phase = voice.codes_phase
    assert phase.stop == 128258 and len(phase.masks) == 7
    assert phase.masks[0] == ((128266, 132362), (128258, 128259)) and phase.masks[6][0][1] == 156938
    assert phase.sampling.temperature == 0.6 and phase.sampling.top_p == 0.9
    assert voice.tokens_per_s == pytest.approx(82.03, abs=0.01)


def plain_frames(ids: list[int], first: int, size: int) -> list[list[int]]:
    """Orpheus' order read literally: t0 | t1 t4 | t2 t3 t5 t6."""
    frames = []
    for start in range(0, len(ids) // 7 * 7, 7):
        t = [ids[start + place] - first - place * size for place in range(7)]
        frames.append([t[0], t[1], t[4], t[2], t[3], t[5], t[6]])
    return frames


@given(st.lists(st.integers(0, 15), max_size=40))
def test_frames_are_those_of_a_plain_loop(codes: list[int]) -> None:
    voice = load_format(tiny.orpheus())
    ids = [voice.first + at % 7 * voice.size + code for at, code in enumerate(codes)]  # code 0 among them: legal
    frames = voice.frames(ids)
    assert frames.shape == (len(codes) // 7, 7) and frames.dtype == np.int64
    assert frames.tolist() == plain_frames(ids, voice.first, voice.size)


def test_two_levels_and_one() -> None:
    voice = load_format(tiny.voice())
    assert voice.frames([96 + 1, 112 + 2, 128 + 3, 96]).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("wrong", [96 + 16, 95, 5])
def test_an_id_of_another_place_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="place"):
        load_format(tiny.voice()).frames([wrong, 112, 128])


def test_neutts_has_its_reference_in_front(tmp_path: Path) -> None:
    voice = load_format(tiny.tiny_voice(tmp_path / "n", family="neutts", strides=(4,)))
    encode = voice.tokenizer.encode  # type: ignore[attr-defined]
    text = encode("hello b", add_special_tokens=False)
    end = encode("<|END|>", add_special_tokens=False, parse_special=True)
    ids = voice.prompt("b")
    assert ids[-(len(text) + 4) :] == [*text, *end, 96 + 3, 96, 96 + 7]
    assert voice.prompt("b", "leo")[-1] == 96 + 5
    assert voice.num_places == 1 and voice.frames([96, 111]).tolist() == [[0], [15]]
    assert voice.max_tokens(ids) < 60 * voice.tokens_per_s


@pytest.mark.parametrize(
    "fields",
    [
        {"family": "piper"},
        {"voices": []},
        {"voices": ["a", "b"]},
        {"default_voice": "hal"},
        {"audio__strides": [4, 3]},
        {"audio__strides": []},
        {"audio__size": 32},  # the codec has 16
        {"audio__order": "by_level"},
        {"audio__first": 40},  # among the phones
        {"text__first": 3},  # among the special ids
        {"phones": None},
        {"max_chars": "many"},
    ],
    ids=str,
)
def test_what_is_wrong_in_a_description_is_named(tmp_path: Path, fields: dict[str, object]) -> None:
    folder = changed(tmp_path, **fields)
    (folder / "codec").symlink_to(tiny.voice() / "codec")
    with pytest.raises(ModelLoadError):
        load_format(folder)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff{", b"[" * 100_000])
def test_a_file_that_is_no_description(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "speech.json").write_bytes(data)
    with pytest.raises(ModelLoadError):
        load_format(tmp_path)


def test_a_folder_without_a_voice(tmp_path: Path) -> None:
    assert not is_voice(tmp_path)
    with pytest.raises(ModelLoadError, match=r"speech\.json"):
        load_format(tmp_path)
    assert isinstance(load_format(str(tiny.voice())), SpeechFormat)
