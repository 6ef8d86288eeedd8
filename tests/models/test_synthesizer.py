"""Voices of ONNX: how text becomes ids of sounds, what the graph gives, and what is said of a voice that cannot work."""

from __future__ import annotations

import builtins
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motet.engine.errors import InternalError, InvalidRequest, ModelLoadError, ModelNotFound
from motet.models.registry import resolve
from motet.models.speech_format import load_format
from motet.models.synthesizer import PiperSynthesizer, SynthesizerFormat, read_description

from .piper_voice import RATE, SYMBOLS, TABLE, samples, write_voice


def ids(*sounds: str) -> list[int]:
    """Begin, pad, sound, pad, ..., end; of speaker 0."""
    padded = [i for sound in sounds for i in (SYMBOLS.index(sound), 0)]
    return [0, 1, 0, *padded, 2]


def fake_espeak(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program of that name which leaves its arguments and its input beside itself."""
    program = folder / "espeak-ng"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\nread -r words\necho "$words" >> {folder}/heard\n{body}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_path_names_a_voice(tmp_path: Path) -> None:
    path = write_voice(tmp_path)
    found = resolve(str(path))
    assert (found.id, found.kind, found.path) == ("tiny", "tts", path.resolve())
    path.with_name("tiny.onnx.json").unlink()
    with pytest.raises(ModelNotFound, match=r"two files, X\.onnx and X\.onnx\.json"):
        resolve(str(path))


def test_characters_become_ids(tmp_path: Path) -> None:
    format = load_format(write_voice(tmp_path))
    assert isinstance(format, SynthesizerFormat)
    assert (format.voices, format.language, format.sample_rate) == (("tiny",), "en", 24_000)
    assert format.prompt("Hi, é.") == ids("h", "i", ",", " ", "e", "\u0301", ".")
    assert format.prompt("a_^$5#b") == ids("a", "b")  # marks of its own are no sounds that a text can have
    for text, words in (("", "got none"), ("55", "no sound"), ("a" * 301, "at most 300")):
        with pytest.raises(InvalidRequest, match=words):
            format.prompt(text)
    with pytest.raises(InvalidRequest, match="tiny has tiny"):
        format.prompt("a", "other")


def test_speakers_have_names(tmp_path: Path) -> None:
    format = load_format(write_voice(tmp_path, speakers=3))
    assert format.voices == ("s0", "s1", "s2") and format.default_voice == "s0"
    assert format.prompt("a", "s2") == [2, *ids("a")[1:]]
    nameless = load_format(write_voice(tmp_path, name="other", speakers=2, speaker_id_map={}))
    assert nameless.voices == ("0", "1")


def test_the_graph_gives_samples(tmp_path: Path) -> None:
    voice = PiperSynthesizer.load(write_voice(tmp_path), threads=1)
    assert voice.sample_rate == RATE
    prompt = ids("a", "z")
    quiet = voice.synthesize(prompt, noise=0.0)
    np.testing.assert_allclose(quiet, samples(prompt), atol=1e-6)
    assert np.array_equal(voice.synthesize(prompt, noise=0.0), quiet)
    noisy = voice.synthesize(prompt) - quiet
    assert 0.004 < noisy.std() < 0.006  # the voice's own noise_scale
    assert 0.008 < (voice.synthesize(prompt, noise=2.0) - quiet).std() < 0.012
    several = PiperSynthesizer.load(write_voice(tmp_path, name="several", speakers=3))
    np.testing.assert_allclose(several.synthesize([2, *prompt[1:]], noise=0.0), samples([2, *prompt[1:]]), atol=1e-6)


def test_samples_are_finite_and_within_the_scale(tmp_path: Path) -> None:
    description = read_description(write_voice(tmp_path))

    def voice(answer: list[float]) -> PiperSynthesizer:
        inputs = [SimpleNamespace(name=name) for name in ("input", "input_lengths", "scales")]
        run = lambda wanted, given: [np.array([[answer]], np.float32)]  # noqa: E731
        return PiperSynthesizer(SimpleNamespace(get_inputs=lambda: inputs, run=run), description)

    assert voice([-3.0, 0.5, 2.0]).synthesize(ids("a")).tolist() == [-1.0, 0.5, 1.0]
    with pytest.raises(InternalError, match="NaN"):
        voice([0.0, float("nan")]).synthesize(ids("a"))


def test_espeak_is_asked_clause_by_clause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_espeak(tmp_path, monkeypatch, "echo '(en)hˈə'; echo ' ló(fr)'")
    format = load_format(write_voice(tmp_path, phoneme_type="espeak", espeak={"voice": "en-gb"}))
    sounds = ["h", "ˈ", "ə", " ", "l", "o", "\u0301"]
    assert format.prompt("Hello 10:30, $(reboot); you?!") == ids(*sounds, ",", " ", *sounds, " ", *sounds, "?")
    assert (tmp_path / "asked").read_text().splitlines() == ["-q --ipa -v en-gb --stdin"] * 3
    assert (tmp_path / "heard").read_text().splitlines() == ["Hello 10:30", "$(reboot)", "you"]


@pytest.mark.parametrize(("body", "words"), [("exit 3", "status 3"), ("exec sleep 5", "no answer within")])
def test_an_espeak_that_fails_is_our_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    fake_espeak(tmp_path, monkeypatch, body)
    monkeypatch.setattr("motet.models.synthesizer._ESPEAK_S", 0.2)
    format = load_format(write_voice(tmp_path, phoneme_type="espeak"))
    with pytest.raises(InternalError, match=words):
        format.prompt("a")


def test_a_voice_that_needs_espeak_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_voice(tmp_path, phoneme_type="espeak")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match="needs the program espeak-ng"):
        load_format(path)


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "onnxruntime":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelLoadError, match=r"pip install 'motet\[piper\]'"):
        PiperSynthesizer.load(write_voice(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phoneme_id_map": {"a": [3]}}, r"expected ids of \['_', '\^', '\$'\]"),
        ({"phoneme_id_map": TABLE | {"a": [999]}}, "expected ids in"),
        ({"phoneme_id_map": TABLE | {"a": "3"}}, "phoneme_id_map"),
        ({"phoneme_type": "pinyin"}, "expected text or espeak"),
        ({"audio": {"sample_rate": 0}}, "sample_rate"),
        ({"espeak": {"voice": "-x /etc/passwd"}}, "expected a voice's name"),
        ({"inference": {"length_scale": 0}}, "expected scales"),
        ({"num_speakers": 0}, "speaker_id_map"),
        ({"speaker_id_map": {"x": 7}}, "speaker_id_map"),
    ],
)
def test_a_description_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_description(write_voice(tmp_path, graph=False, **changes))


def test_damaged_files_are_errors_of_ours(tmp_path: Path) -> None:
    path = write_voice(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match="not a usable ONNX graph"):
        PiperSynthesizer.load(path)
    speakerless = write_voice(tmp_path, name="speakerless", num_speakers=2)
    with pytest.raises(ModelLoadError, match="expected a graph with inputs"):
        PiperSynthesizer.load(speakerless)
    path.with_name("tiny.onnx.json").write_bytes(b"{")
    with pytest.raises(ModelLoadError, match=r"tiny\.onnx\.json"):
        read_description(path)
