"""`motet image` from outside: files, stdout, stdin, failures, interrupts. A scripted model is behind it."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from motet import ImageGeneration
from motet.deploy import cli, image
from motet.deploy.cli import main
from motet.deploy.image import ProgressBar
from motet.pipelines.picture_file import PictureFormat
from motet.pipelines.types import ImageProgress, MadePicture

from ..pipelines.scripted_pictures import MODEL, Studio

PROMPT = "a red apple on a blue background"


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Studio]:
    """The engine of every command of this test, which runs in a folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    studios: list[Studio] = []

    def load(_: argparse.Namespace) -> ImageGeneration:
        studios.append(Studio())
        studio.engines = studios[-1].engines
        return ImageGeneration(MODEL, hub=studios[-1].hub)

    monkeypatch.setattr(image, "_load", load)
    studio = Studio()
    with studio.hub:
        yield studio
    assert all(one.hub.closed for one in studios), "a command leaves no engine"


def test_a_prompt_to_a_file(studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", PROMPT, "-o", "x.png", "--seed", "3", "--steps", "8", "--size", "32x16"]) == 0
    output = capsys.readouterr()
    assert output.out == "" and os.listdir() == ["x.png"]
    lines = output.err.splitlines()
    quarters = [line.split(" after ")[0] for line in lines[:-2]]  # a quarter that passes at once is not told
    assert quarters == sorted(quarters, key=len) and quarters[-1] == "motet: 100 %" and len(quarters) <= 4
    assert lines[-2] == "motet: x.png: 32x16, seed 3" and "a picture of 8 steps in" in lines[-1]
    with Image.open("x.png") as made:
        assert made.size == (32, 16) and made.mode == "RGB"


def test_formats(studio: Studio) -> None:
    for name in ("x.jpg", "x.JPEG", "x.webp", "x.png"):
        assert main(["image", PROMPT, "-o", name, "--seed", "3"]) == 0
    assert main(["image", PROMPT, "-o", "raw.bin", "--format", "webp", "--quality", "5", "--seed", "3"]) == 0
    found = {}
    for name in os.listdir():
        with Image.open(name) as made:
            found[name] = made.format
    assert found == {"x.jpg": "JPEG", "x.JPEG": "JPEG", "x.webp": "WEBP", "x.png": "PNG", "raw.bin": "WEBP"}
    assert main(["image", PROMPT, "-o", "x.png", "--seed", "4"]) == 0, "a file that is named is written over"


def test_several_are_numbered(studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", PROMPT, "-n", "3", "-o", "x.webp", "--seed", "5"]) == 0
    assert sorted(os.listdir()) == ["x-1.webp", "x-2.webp", "x-3.webp"]
    error = capsys.readouterr().err
    assert "x-3.webp: 16x16, seed 7" in error and "3 pictures of 4 steps" in error


def test_without_a_name_nothing_is_written_over(studio: Studio) -> None:
    for _ in range(2):
        assert main(["image", PROMPT]) == 0
    assert sorted(os.listdir()) == ["picture-2.png", "picture.png"]
    for _ in range(2):
        assert main(["image", PROMPT, "-n", "2", "--format", "jpeg"]) == 0
    assert sorted(name for name in os.listdir() if name.endswith("jpg")) == [f"picture-{k}.jpg" for k in (1, 2, 3, 4)]
    assert main(["image", PROMPT, "-n", "2"]) == 0
    assert {"picture-3.png", "picture-4.png"} < set(os.listdir())


def test_stdout_and_stdin(
    studio: Studio, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert main(["image", "-", "-o", "-", "--seed", "3"]) == 0
    piped = capfdbinary.readouterr().out
    assert main(["image", PROMPT, "-o", "x.png", "--seed", "3"]) == 0
    assert Path("x.png").read_bytes() == piped and piped.startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfa"), encoding="utf-8"))
    assert main(["image", "-"]) == 1
    assert b"cannot be read as text" in capfdbinary.readouterr().err


def test_to_begin_with_a_picture(studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.full((20, 40, 3), 200, np.uint8)).save("in.jpg")
    assert main(["image", PROMPT, "-o", "x.png", "--image", "in.jpg", "--strength", "0.5", "--negative", "blue"]) == 0
    assert "a picture of 2 steps" in capsys.readouterr().err and os.path.exists("x.png")


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ([], "the following arguments are required: PROMPT", 2),
        ([""], "there is no prompt", 1),
        ([PROMPT, "-o", "x.gif"], "ends in .png", 1),
        ([PROMPT, "-o", "no/x.png"], "there is no folder no", 1),
        ([PROMPT, "-o", "."], "is a folder", 1),
        ([PROMPT, "-o", "-", "-n", "2"], "stdout holds one picture", 1),
        ([PROMPT, "-n", "0"], "expected 1 to 10", 1),
        ([PROMPT, "-n", "1000000000"], "expected 1 to 10", 1),
        ([PROMPT, "--size", "17x17"], "size: expected one of 16x16, 32x16, got 17x17", 1),
        ([PROMPT, "--size", "big"], "size: expected WIDTHxHEIGHT, got 'big'", 1),
        ([PROMPT, "--steps", "0"], "steps: expected 1 or more, got 0", 1),
        ([PROMPT, "--steps", "10000"], "steps: expected 1 to 200, got 10000", 1),
        ([PROMPT, "--steps", "x"], "invalid int value", 2),
        ([PROMPT, "--guidance", "nan"], "guidance_scale", 1),
        ([PROMPT, "--solver", "magic"], "solver: expected one of euler", 1),
        ([PROMPT, "--quality", "101", "--format", "webp"], "expected 0 to 100", 1),
        ([PROMPT, "--quality", "50"], "no effect on png", 1),
        ([PROMPT, "--image", "none.png"], "there is no file none.png", 1),
        ([PROMPT, "--strength", "0.5"], "strength: expected with --image", 1),
        ([PROMPT, "--format", "bmp"], "invalid choice", 2),
        ([PROMPT, "--sede", "2"], "did you mean --seed", 2),
        ([PROMPT + " raise"], "internal error", 1),
    ],
)
def test_what_cannot_work(
    studio: Studio, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str, status: int
) -> None:
    assert main(["image", *arguments]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert os.listdir() == []


def test_a_disk_that_cannot_be_written(
    studio: Studio, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert main(["image", PROMPT, "-o", "x.png"]) == 1
    assert "x.png: No space left on device" in capsys.readouterr().err and os.listdir() == []


def test_formats_of_the_command_line_are_those_of_the_sdk() -> None:
    assert cli.PICTURE_FORMATS == get_args(PictureFormat) and set(image.SUFFIXES.values()) == set(cli.PICTURE_FORMATS)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_of_a_terminal() -> None:
    out = Terminal()
    bar = ProgressBar(2, out)
    bar.take(ImageProgress(index=1, step=5, num_steps=10))
    assert bar.line().startswith("[######------------------]  25 %  step 5/20  0/2 pictures  ")
    bar.take(MadePicture(index=1, seed=0, image=Image.new("RGB", (1, 1))))
    assert "]  50 %  step 10/20  1/2 pictures" in bar.line()
    bar.clear()
    assert out.getvalue().count("\r\x1b[K") == 3 and "\n" not in out.getvalue() and out.getvalue().endswith("\r\x1b[K")


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    """A child that is interrupted while it denoises."""
    script = f"""
        import sys, types
        tests = sys.modules["tests"] = types.ModuleType("tests")
        tests.__path__ = [{str(Path(__file__).parents[1])!r}]
        from tests.pipelines.scripted_pictures import MODEL, Studio
        from motet import ImageGeneration
        from motet.deploy import image
        from motet.deploy.cli import main
        image._load = lambda _: ImageGeneration(MODEL, hub=Studio(step_s=0.05).hub)
        sys.exit(main(["image", "a cat", "-n", "2", "-o", "out/x.png", "--steps", "40"]))
    """
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "motet: 25 %" in child.stderr.readline()  # half a second
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == ""
    assert os.listdir(tmp_path / "out") == []
