"""`motet speak` from outside: files, stdout, stdin, failures, interrupts. A scripted client is the engine."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet import Speech
from motet.deploy import cli, speak
from motet.deploy.cli import main
from motet.engine.config import HostConfig
from motet.engine.errors import ErrorInfo
from motet.pipelines.hub import Hub
from motet.pipelines.media import decode_audio
from motet.pipelines.sound_file import FORMATS

from ..pipelines.scripted_voice import MODEL, ScriptedVoice


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedVoice:
    """The engine of every command of this test, which runs in a folder of its own."""
    client = ScriptedVoice(tmp_path / "voice")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def load(_: argparse.Namespace) -> Speech:
        return Speech(MODEL, hub=Hub(HostConfig(), client=client))

    monkeypatch.setattr(speak, "_load", load)
    return client


class Stdin(io.StringIO):
    """Text of a pipe."""


def seconds(path: str) -> float:
    return len(decode_audio(Path(path))) / 16_000


def test_a_text_to_a_file(client: ScriptedVoice, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speak", "Dr. Lee is here.", "-o", "x.mp3", "--seed", "3", "--voice", "ada"]) == 0
    assert client.texts() == ["doctor lee is here."] and client.num_closed == 1
    assert client.requests[0].params is not None and client.requests[0].params.seed == 3
    output = capsys.readouterr()
    assert output.out == "" and "x.mp3: 1.5 s of speech in" in output.err
    assert seconds("x.mp3") == pytest.approx(1.54, abs=0.01)
    assert os.listdir() == ["x.mp3"]


def test_without_a_name_nothing_is_written_over(client: ScriptedVoice, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["speak", "We are here."]) == 0
    assert main(["speak", "We are here.", "--format", "flac", "--speed", "2"]) == 0
    assert sorted(os.listdir()) == ["speech-2.wav", "speech.flac", "speech.wav"]
    assert "speech-2.wav: " in capsys.readouterr().err
    assert seconds("speech.flac") == pytest.approx(seconds("speech.wav") / 2, abs=0.01)


def test_stdout(client: ScriptedVoice, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["speak", "We are here.", "-o", "-"]) == 0
    raw = capfdbinary.readouterr().out
    assert main(["speak", "We are here.", "-o", "-", "--format", "wav"]) == 0
    assert capfdbinary.readouterr().out[44:] == raw and len(raw) > 40_000
    assert os.listdir() == []


def test_stdin_is_spoken_as_it_comes(client: ScriptedVoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("We are here now.\nThey are\nthere.\n"))
    assert main(["speak", "-", "-o", "x.wav"]) == 0
    assert client.texts() == ["we are here now.", "they are there."] and client.requests[0].open


def test_a_long_text(client: ScriptedVoice) -> None:
    assert main(["speak", "We all went home again. " * 250, "-o", "x.flac"]) == 0
    assert len(client.texts()) == 250


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ([], "say what to speak", 2),
        (["", "-o", "x.wav"], "there is no text", 1),
        (["hello you", "-o", "x.txt"], "ends in", 1),
        (["hello you", "-o", "no/x.wav"], "there is no folder no", 1),
        (["hello you", "-o", "."], "is a folder", 1),
        (["hello you", "--speed", "nan"], "speed", 1),
        (["hello you", "--format", "mp4"], "invalid choice", 2),
        (["hello you", "--voice", "bob"], "has ada; got 'bob'", 1),
        (["...", "-o", "x.wav"], "nothing in the text", 1),
        (["hello you", "--sped", "2"], "did you mean --speed", 2),
    ],
)
def test_what_cannot_work(
    client: ScriptedVoice, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, status: int
) -> None:
    assert main(["speak", *arguments]) == status
    assert said in capsys.readouterr().err
    assert not client.requests and os.listdir() == []


def test_a_failing_engine_leaves_no_file(client: ScriptedVoice, capsys: pytest.CaptureFixture[str]) -> None:
    client.fail = ErrorInfo(kind="EngineDead", message="the host has ended", code="engine_dead")
    assert main(["speak", "hello you", "-o", "x.wav"]) == 1
    assert "the host has ended" in capsys.readouterr().err and os.listdir() == []


def test_a_disk_that_cannot_be_written(
    client: ScriptedVoice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("motet.pipelines.sound_file.write_sound", full)
    assert main(["speak", "hello you", "-o", "x.wav"]) == 1
    assert "x.wav: No space left on device" in capsys.readouterr().err and os.listdir() == []


def test_stdin_that_never_comes_keeps_nobody() -> None:
    read_end, write_end = os.pipe()
    ended = threading.Event()
    with os.fdopen(read_end) as file, os.fdopen(write_end, "w") as writer:
        lines = speak._lines(file, ended)
        writer.write("one\n")
        writer.flush()
        assert next(lines) == "one\n"
        threading.Timer(0.05, ended.set).start()
        assert next(lines, "over") == "over"
        writer.close()  # the thread that still reads ends with the pipe


def test_bytes_that_are_no_text() -> None:
    lines: Iterator[str] = speak._lines(
        io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfa"), encoding="utf-8"), threading.Event()
    )
    with pytest.raises(ValueError, match="cannot be read as text"):
        next(lines)


def test_voices(client: ScriptedVoice, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speak", "--list-voices"]) == 0
    assert capsys.readouterr().out == "ada\n"


def test_formats_of_the_command_line_are_those_of_the_sdk() -> None:
    assert cli.SOUND_FORMATS == FORMATS


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    """A child that is interrupted while it waits for more text on stdin."""
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1] / "pipelines")!r})
        from scripted_voice import MODEL, ScriptedVoice
        from motet import Speech
        from motet.deploy import speak
        from motet.deploy.cli import main
        from motet.engine.config import HostConfig
        from motet.pipelines.hub import Hub
        client = ScriptedVoice(Path("voice"))
        speak._load = lambda _: Speech(MODEL, hub=Hub(HostConfig(), client=client))
        sys.exit(main(["speak", "-", "-o", "out/x.wav"]))
    """
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"We are here now. And\n")
        child.stdin.flush()
        wait_for_part(tmp_path / "out")
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
    assert os.listdir(tmp_path / "out") == []


def wait_for_part(folder: Path) -> None:
    """Until the file is being written."""
    for _ in range(2000):
        if os.listdir(folder):
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing was written")
