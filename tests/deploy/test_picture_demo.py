"""The picture part of the demo, and the command, with a tiny model of random weights in the place of the packaged ones."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from PIL import Image

from motet.deploy import picture_demo
from motet.deploy.cli import main
from motet.deploy.demo import free_port, running_server

from .. import tiny


def test_pictures_through_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tiny.tiny_picture(tmp_path / "few", few_step=True)
    folders = [str(tmp_path / "few-base"), str(few)]
    with running_server(folders, free_port()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        picture_demo.run(url, ["few-base", "few"], client, folder=tmp_path)
    output = capsys.readouterr().out
    assert f"-- few-base paints into {tmp_path / 'motet-demo.png'}: {picture_demo.PROMPT}" in output
    rows = {line[:40].strip(): line[40:].split() for line in output.splitlines()[-8:]}
    assert rows[""] == ["few-base", "few"] and rows["size"] == ["64x64", "64x64"] and rows["steps"] == ["4", "2"]
    assert all(float(cell) > 0 for cell in rows["8 requests at once, pictures a second"])
    assert {"one picture", "of it to encode", "of it to denoise", "of it to decode"} < set(rows)
    for name in ("motet-demo.png", "motet-demo-2.png"):
        with Image.open(tmp_path / name) as made:
            assert made.size == (64, 64)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.tiny_picture(tmp_path / "tiny"))
    target = tmp_path / "x.webp"
    command = ["image", "a red apple", "--model", folder, "--threads", "1", "-o", str(target), "--seed", "7"]
    assert main(command) == 0
    error = capsys.readouterr().err
    assert f"{folder} is ready after" in error and f"{target}: 64x64, seed 7" in error
    with Image.open(target) as made:
        assert made.size == (64, 64)
    assert main([*command, "--size", "512x512"]) == 1
    assert "size: expected one of 64x64, got 512x512" in capsys.readouterr().err
