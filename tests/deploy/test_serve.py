"""`motet serve` as a process of its own: ready, answering, free of torch, and gone when told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.deploy.cli import main
from motet.deploy.demo import free_port, wait_ready
from motet.deploy.serve import served_models
from motet.engine.errors import ModelNotFound
from motet.models import registry

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", MODEL, "--port", str(port), "--preload"]
    command += ["--max-model-len", "256", "--num-blocks", "64"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_ready(child, f"http://127.0.0.1:{port}")
        yield child, f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def test_it_answers(server: tuple[subprocess.Popen[bytes], str]) -> None:
    body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 3, "temperature": 0}
    request = urllib.request.Request(
        f"{server[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 3


def test_the_servers_process_has_no_torch_inside(server: tuple[subprocess.Popen[bytes], str]) -> None:
    assert "libtorch" not in Path(f"/proc/{server[0].pid}/maps").read_text()


def test_ctrl_c_ends_it(server: tuple[subprocess.Popen[bytes], str]) -> None:
    """Last in this file: it ends the server."""
    child = server[0]
    host = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) == 0
    assert child.stderr is not None
    told = child.stderr.read().decode()
    assert f"motet: {MODEL}: weights" in told, "progress while loading"
    assert "Traceback" not in told
    assert host
    for pid in host:
        assert not Path(f"/proc/{pid}").exists()


def test_an_unknown_model_ends_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model"]) == 1
    assert "no model 'no-such-model'" in capsys.readouterr().err


def test_without_names_every_installed_model_is_served() -> None:
    assert MODEL in [model.id for model in served_models(()).values()]
    assert [model.id for model in served_models((MODEL, MODEL)).values()] == [MODEL]
    path = str(registry.resolve(MODEL).path)
    assert served_models((path,))[path].id == "SmolLM2-135M-Instruct.Q4_1"  # never the path itself
    assert served_models((path,), ("mine",))[path].id == "mine"
    with pytest.raises(ModelNotFound):
        served_models((MODEL, "nope"))
