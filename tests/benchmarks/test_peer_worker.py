"""Peers as child processes: the protocol, and every way in which one can be missing or die."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from motet.benchmarks import peer_worker
from motet.benchmarks.peer_worker import PeerError, PeerWorker

WORKER = """
    import json, sys
    print(json.dumps({"ready": True, "name": "echo", "version": "1", "dtype": "bf16"}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["cmd"] == "quit":
            break
        if command["cmd"] == "die":
            sys.exit("out of luck")
        answer = {"tokens": command["n"]} if "n" in command else {"error": "no n"}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER))
    return path


def test_a_worker_answers_and_its_errors_are_told(script: Path) -> None:
    with PeerWorker([sys.executable, script], start_timeout_s=30) as worker:
        assert worker.name == "echo (1), bf16"
        assert worker.ask({"cmd": "streams", "n": 3}) == {"tokens": 3}
        with pytest.raises(PeerError, match="no n"):
            worker.ask({"cmd": "streams"})
        assert worker.cpu_s() >= 0
        with pytest.raises(PeerError, match="status 1.*out of luck"):
            worker.ask({"cmd": "die"})
        with pytest.raises(PeerError, match="ended"):
            worker.ask({"cmd": "streams", "n": 3})


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="nothing_like_it"):
        PeerWorker([sys.executable, "-c", "import nothing_like_it"], start_timeout_s=30)
    with pytest.raises(PeerError, match="no answer within"):
        PeerWorker([sys.executable, "-c", "import sys; sys.stdin.read()"], start_timeout_s=0.2)
    with pytest.raises(PeerError, match="no answer: b'hello'"):
        PeerWorker([sys.executable, "-c", "print('hello')"], start_timeout_s=30)


def test_a_peer_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    script = tmp_path / "build.sh"
    script.write_text("echo no compiler here >&2; exit 3")
    with pytest.raises(PeerError, match="status 3.*no compiler here"):
        peer_worker.build("anything", script=script)
    script.write_text('echo building >&2; echo "/venvs/$1"')
    assert peer_worker.build("anything", script=script) == Path("/venvs/anything")
