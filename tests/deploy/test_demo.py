"""`motet demo` as a newcomer runs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from motet.deploy.demo import Turn, table
from motet.engine.errors import Unavailable


def test_the_whole_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "motet.deploy.cli", "demo"], capture_output=True, text=True, timeout=300
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
    assert "Traceback" not in done.stderr


def test_the_table() -> None:
    turn = Turn(text="x", ttft_s=0.1, total_s=1.1, num_prompt_tokens=40, num_cached_tokens=20, num_output_tokens=11)
    assert turn.tokens_per_s == pytest.approx(10)
    text = table("model", turn, turn, turn)
    assert "100 ms" in text
    assert "50 % of its prompt" in text


def test_a_server_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from motet.deploy import demo

    with pytest.raises(Unavailable, match="ended with status"), demo.running_server("no-such-model", demo.free_port()):
        raise AssertionError("it was never ready")
