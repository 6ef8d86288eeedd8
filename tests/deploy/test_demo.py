"""`motet demo` as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from motet.deploy import picture_demo
from motet.deploy.demo import Turn, table
from motet.deploy.voice_demo import first_sentences
from motet.engine.errors import Unavailable
from motet.pipelines.media import SAMPLE_RATE, decode_audio


def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "motet.deploy.cli", "demo"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-- over HTTP, with the openai client" in done.stdout
    assert "-- in this process, with the SDK" in done.stdout
    (hit,) = re.findall(r"prefix-cache hit of the second turn: (\d+) %", done.stdout)
    assert int(hit) > 30
    assert "-- 10 recordings of human speech at once, each over its own WebSocket" in done.stdout
    (live, uploaded) = re.findall(r"word error rate +([\d.]+) % +([\d.]+) %", done.stdout)[0]
    assert float(live) < 15 and float(uploaded) < 15
    assert done.stdout.count("ms after the last sound]") == 10
    assert "-- motet-voice speaks the answer into motet-demo.wav, whisper-tiny.en listens" in done.stdout
    spoken = decode_audio(tmp_path / "motet-demo.wav")
    assert len(spoken) > 2 * SAMPLE_RATE
    (said,) = re.findall(r"word error rate +([\d.]+) %\n", done.stdout.partition("motet-voice speaks")[2])
    assert float(said) < 60  # one answer: its exact figure is chance, but noise would not be read at all
    for model in (painters := picture_demo.installed()):
        assert f"-- {model} paints into motet-demo" in done.stdout
    if painters:
        with Image.open(tmp_path / "motet-demo.png") as made:
            assert made.size == (64, 64)
    assert "Traceback" not in done.stderr


def test_models_of_pictures_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture_demo, "MODELS", ("no-such-model",))
    assert picture_demo.installed() == []
    assert "a part of this demo is left out: no model 'no-such-model'" in capsys.readouterr().err


def test_the_table() -> None:
    turn = Turn(text="x", ttft_s=0.1, total_s=1.1, num_prompt_tokens=40, num_cached_tokens=20, num_output_tokens=11)
    assert turn.tokens_per_s == pytest.approx(10)
    text = table("model", turn, turn, turn)
    assert "100 ms" in text
    assert "50 % of its prompt" in text


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [
        ("One. Two is longer.", 100, "One. Two is longer."),
        ("One. Two is longer.", 12, "One."),
        ("One is  it?\nTwo is longer.", 14, "One is it?"),
        ("No mark in all of this", 10, "No mark"),
    ],
)
def test_what_is_spoken_of_an_answer(text: str, limit: int, kept: str) -> None:
    assert first_sentences(text, limit) == kept


def test_a_server_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from motet.deploy import demo

    with pytest.raises(Unavailable, match="ended with status"), demo.running_server("no-such-model", demo.free_port()):
        raise AssertionError("it was never ready")
