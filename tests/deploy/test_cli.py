"""Words of the command line, from outside: exit status, stdout, stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest

from motet.deploy.cli import RESERVED, main


@pytest.mark.parametrize("word", sorted(RESERVED))
def test_reserved_words_say_so(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--anything", "x"]) == 2
    assert "not available yet in this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--port", "x"], "invalid int value"),
        (["serve", "--dtype", "float8"], "invalid choice"),
        (["sevre"], "invalid choice"),
        ([], "required"),
        (["serve", "--block-size", "3"], "power of two"),
        (["serve", "--config", "/nonexistent.toml"], "cannot read"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_models_lists_the_packaged_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    output = capsys.readouterr().out
    assert "smollm2-135m-instruct" in output
    assert "Apache-2.0" in output


def test_an_unknown_model_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "no-such-model"]) == 1
    assert "no model 'no-such-model'" in capsys.readouterr().err


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "x", "--threads", "2", "--print-config"]) == 0
    output = capsys.readouterr().out
    assert 'models = ["x"]' in output
    assert "threads = 2" in output


def test_help_lists_the_flags_of_the_tree() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "motet.deploy.cli", "serve", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for flag in ["--threads", "--host", "--port", "--preload", "--max-model-len", "--api-key", "--config"]:
        assert flag in done.stdout
