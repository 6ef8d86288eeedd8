"""`motet transcribe` from outside: files, folders, formats, failures, interrupts. A scripted client is the engine."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet import Transcription
from motet.deploy import transcribe
from motet.deploy.cli import main, make_parser
from motet.deploy.transcribe import Job, ProgressBar, plan
from motet.engine.config import HostConfig
from motet.engine.errors import InvalidRequest
from motet.pipelines import microphone
from motet.pipelines.hub import Hub

from ..pipelines.scripted_recogniser import MODEL, RATE, ScriptedRecogniser


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedRecogniser:
    """The engine of every command of this test."""
    client = ScriptedRecogniser()

    def load(_: argparse.Namespace) -> Transcription:
        return Transcription(MODEL, hub=Hub(HostConfig(), client=client))

    monkeypatch.setattr(transcribe, "_load", load)
    return client


def write_wav(path: Path, seconds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as writer:
        writer.setparams((1, 2, RATE, 0, "NONE", ""))
        writer.writeframes(bytes(2 * round(seconds * RATE)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two recordings, one of them deeper, and something else."""
    write_wav(tmp_path / "in" / "b.wav", 2.0)
    write_wav(tmp_path / "in" / "a" / "c.WAV", 1.0)
    (tmp_path / "in" / "notes.txt").write_text("not audio")
    return tmp_path / "in"


def test_one_file_to_stdout(client: ScriptedRecogniser, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", str(folder / "b.wav"), "--language", "en", "--prompt", "Names"]) == 0
    output = capsys.readouterr()
    assert output.out == "second 0. second 1.\n"
    assert "0:02 of audio" in output.err and "times real time" in output.err
    assert client.requests[0].options.language == "en" and client.requests[0].options.prompt == "Names"
    assert client.num_closed == 1


def test_a_folder_to_stdout_in_order(
    client: ScriptedRecogniser, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", str(folder)]) == 0
    output = capsys.readouterr()
    assert output.out == f"== {folder}/a/c.WAV ==\nsecond 0.\n== {folder}/b.wav ==\nsecond 0. second 1.\n"
    assert "(2 of 2)" in output.err


def test_json_lines(client: ScriptedRecogniser, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", str(folder), "--format", "json", "--word-timestamps"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["file"] for row in rows] == [f"{folder}/a/c.WAV", f"{folder}/b.wav"]
    assert rows[1]["words"][1]["word"] == " second 1."


@pytest.mark.parametrize(("format", "begins"), [("srt", "1\n00:00:00,000 --> "), ("vtt", "WEBVTT\n\n00:00")])
def test_subtitles_into_a_folder(
    client: ScriptedRecogniser,
    folder: Path,
    tmp_path: Path,
    format: str,
    begins: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["transcribe", str(folder), "--format", format, "--output", str(tmp_path / "out"), "--max-chars", "9"])
        == 0
    )
    written = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written == [tmp_path / "out" / "a" / f"c.{format}", tmp_path / "out" / f"b.{format}"]
    assert all(path.read_text().startswith(begins) for path in written)
    assert client.requests[0].options.word_timestamps
    assert capsys.readouterr().out == ""


def test_a_bad_file_is_one_line_and_the_others_are_done(
    client: ScriptedRecogniser, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", str(folder / "notes.txt"), str(folder / "b.wav")]) == 1
    output = capsys.readouterr()
    assert "second 1." in output.out
    (line,) = [line for line in output.err.splitlines() if "notes.txt" in line]
    assert line.startswith("motet: ") and "Traceback" not in output.err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "say --mic"),
        (["x.wav", "--mic"], 2, "say --mic"),
        (["/nonexistent"], 1, "no file or folder"),
        (["x", "--format", "docx"], 2, "invalid choice"),
        (["x", "--formt", "srt"], 2, "did you mean --format?"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", *arguments]) == status
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_an_empty_folder_and_several_subtitles_on_stdout(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no audio or video"):
        plan([str(tmp_path / "empty")], None, ".txt")
    with pytest.raises(InvalidRequest, match="--output"):
        transcribe.run(make_parser().parse_args(["transcribe", str(folder), "--format", "srt"]))


def test_results_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for name in ("a/x.wav", "a/x.mp3", "b/x.wav", "b/y.wav"):
        write_wav(tmp_path / name, 0.1)
    out = tmp_path / "out"
    jobs = plan([str(tmp_path / "a"), str(tmp_path / "b")], out, ".srt")
    targets = [job.target for job in jobs]
    assert targets == [out / "x.mp3.srt", out / "x.wav.srt", out / "x.wav-2.srt", out / "y.srt"]


def test_speakers_are_told_in_text(tmp_path: Path) -> None:
    from motet.engine.types import Segment
    from motet.pipelines.types import Transcript, TranscriptTiming

    said = [("A", " One."), ("A", " Two."), ("B", " Three.")]
    result = Transcript(
        text="One. Two. Three.", language="en", language_probability=1.0, duration=3.0, task="transcribe",
        segments=tuple(Segment(id=i, start=i, end=i + 1, text=text, speaker=who) for i, (who, text) in enumerate(said)),
        timing=TranscriptTiming(queue_s=0, total_s=1, speed=3),
    )  # fmt: skip
    assert transcribe.Style(format="text").write(result, tmp_path, named=False) == "A: One. Two.\nB: Three.\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar() -> None:
    out = Terminal()
    bar = ProgressBar(2, out)
    bar.draw()
    bar.begin(Path("a"), 60.0)
    bar.advance(Path("a"), 30.0)
    assert "25 %" in bar.line() and "0/2 files" in bar.line()
    bar.advance(Path("a"), 99.0)
    bar.end(Path("a"), well=True)
    assert "50 %" in bar.line() and "1/2 files" in bar.line()
    bar.say("a remark")
    assert "\r\x1b[Ka remark\n" in out.getvalue()


def test_an_interrupt_leaves_nothing_behind(
    client: ScriptedRecogniser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.delay_s = 0.05
    jobs = [Job(source=write_wav(tmp_path / f"{number}.wav", 30.0), target=None) for number in range(20)]
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert main(["transcribe", *(str(job.source) for job in jobs)]) == 130
    assert client.num_running == 0 and client.num_closed == 1
    assert "interrupted after 0 of 20 files" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("motet-file")]


def test_no_microphone_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microphone, "_DEVICES", Path("/nonexistent"))
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["transcribe", "--mic"]) == 1
    error = capsys.readouterr().err
    assert "no microphone here: sounddevice is not installed" in error and error.count("\n") == 1


def test_a_microphone_is_heard_until_an_interrupt(client: ScriptedRecogniser) -> None:
    out = Terminal()

    def pieces() -> Iterator[bytes]:
        yield bytes(2 * RATE * 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        yield bytes(RATE)
        raise AssertionError("it was interrupted")

    with Hub(HostConfig(), client=client) as hub:
        assert transcribe.listen(Transcription(MODEL, hub=hub), pieces(), {}, out) == 0
    lines = out.getvalue().split("\n")
    assert [line.rpartition("\x1b[K")[2] for line in lines] == ["second 0.", "second 1.", "second 2.", ""]
    assert "\r\x1b[Kpart0\x1b[2m maybe\x1b[0m" in lines[0]
    assert client.num_running == 0


def test_help_is_quick_and_free_of_torch() -> None:
    code = (
        "import sys\n"
        "from motet.deploy.cli import main\n"
        "import motet.deploy.transcribe\n"
        "try:\n    main(['transcribe', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'av', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for flag in ("--mic", "--format", "--output", "--diarize", "--word-timestamps", "--model", "--language"):
        assert flag in done.stdout
