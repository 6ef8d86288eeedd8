"""`motet bench llm` against a fake server: what is sent, what is counted, every way in which a request can go wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from motet.deploy import bench_run
from motet.deploy.bench_load import Arrivals, Lengths, jobs, make_prompt, parse_arrival
from motet.deploy.bench_report import Record, figures, spread, table
from motet.deploy.cli import main

from ..streaming.fake_engine import write_tokenizer
from .fake_completions import FakeCompletions


def bench(url: str, tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Run the command; gives its JSON."""
    file = tmp_path / "figures.json"
    assert main(["bench", "llm", "--url", url, "--json", str(file), *arguments]) == status
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# ------------------------------------------------------------------------------------------------------------ whole runs


def test_a_closed_loop_counts_what_the_server_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCompletions(step_s=0.001) as server:
        found = bench(server.url, tmp_path, "--concurrency", "3", "--num-requests", "7", "--isl", "5", "--osl", "4")
    assert found["requests"] == {"completed": 7, "failed": 0, "unfinished": 0} and found["errors"] == {}
    assert found["output_tokens_per_s"] == pytest.approx(28 / found["seconds"])
    assert found["total_tokens_per_s"] == pytest.approx(7 * (4 + 5) / found["seconds"])
    assert found["prompt_tokens"]["max"] == found["prompt_tokens"]["min"] == 5
    assert found["ttft_ms"]["p50"] < found["e2e_ms"]["p50"] and found["itl_ms"]["min"] > 0
    assert server.most_at_once == 3
    assert len(server.bodies) == 9  # two to warm up
    assert server.num_connections < 9  # they are kept
    body = server.bodies[-1]
    assert body["model"] == "first" and body["stream"] is True and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["temperature"] == 0
    said = capsys.readouterr().out
    assert "closed loop, 3 at once" in said and "p99" in said and "7 requests in" in said


def test_the_same_seed_sends_the_same_and_no_prompt_twice(tmp_path: Path) -> None:
    sent = []
    for seed in ("1", "1", "2"):
        with FakeCompletions() as server:
            lengths = ("--isl", "uniform:16:40", "--osl", "uniform:1:9")
            bench(server.url, tmp_path, "m", "--seed", seed, "--num-requests", "6", "--concurrency", "1", *lengths)
            sent.append([(body["prompt"], body["max_tokens"]) for body in server.bodies])
    assert sent[0] == sent[1] != sent[2]
    prompts = [prompt for prompt, _ in sent[0]]
    assert len({prompt[:60] for prompt in prompts}) == len(prompts) == 8  # warm-up's too
    assert len({len(prompt.split()) for prompt in prompts}) > 3


def test_prompts_have_exact_lengths_where_the_tokenizer_is_here(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer = write_tokenizer(tmp_path / "model")
    with FakeCompletions() as server:
        found = bench(
            server.url, tmp_path, "served-name", "--tokenizer", str(tokenizer), "--isl", "33", "--osl", "2",
            "--num-requests", "3", "--stop-at-end", "--api-key", "sesame",
        )  # fmt: skip
        assert all(len(body["prompt"]) == 33 and isinstance(body["prompt"][0], int) for body in server.bodies)
        assert all("ignore_eos" not in body and body["model"] == "served-name" for body in server.bodies)
        assert all("Authorization: Bearer sesame\r\n" in head for head in server.heads)
    assert found["settings"]["exact_lengths"] is True


def test_an_open_loop_sends_whether_or_not_the_server_keeps_up(tmp_path: Path) -> None:
    with FakeCompletions(step_s=0.3) as server:
        arguments = ("--rate", "100", "--arrival", "constant", "--num-requests", "6", "--osl", "2", "--warmup", "0")
        found = bench(server.url, tmp_path, *arguments)
        assert server.most_at_once == 6  # each takes 0.6 s, they come every 10 ms
    assert found["settings"]["loop"] == "open" and found["requests"]["completed"] == 6


def test_a_duration_ends_the_sending_and_waits_for_the_rest(tmp_path: Path) -> None:
    with FakeCompletions(step_s=0.02) as server:
        found = bench(server.url, tmp_path, "--duration", "0.3", "--concurrency", "2", "--osl", "3", "--warmup", "0")
    assert found["requests"]["completed"] == len(server.bodies) >= 2
    assert found["requests"]["unfinished"] == 0 and found["settings"]["num_requests"] is None


def test_errors_are_counted_by_code_and_leave_the_figures_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = {0: "429", 1: "429", 2: "cut", 3: "error", 4: "hang", 5: "plain"}
    with FakeCompletions(script) as server:
        arguments = ("--warmup", "0", "--num-requests", "9", "--concurrency", "1", "--timeout", "0.5", "--osl", "5")
        found = bench(server.url, tmp_path, *arguments)
    counts = {code: error["count"] for code, error in found["errors"].items()}
    assert counts == {"429": 2, "incomplete": 2, "stream": 1, "timeout": 1}
    assert found["errors"]["429"]["message"] == "too much of it"
    assert found["errors"]["stream"]["message"] == "the engine ended"
    assert found["requests"] == {"completed": 3, "failed": 6, "unfinished": 0}
    assert found["output_tokens"]["mean"] == 5 and found["e2e_ms"]["max"] < 500
    both = capsys.readouterr()
    assert "failed: 2 x 429: too much of it" in both.out and both.err.count("(429)") == 1


def test_a_kept_connection_that_the_server_closed_is_opened_again(tmp_path: Path) -> None:
    with FakeCompletions({1: "drop", 3: "drop"}) as server:
        arguments = ("--warmup", "0", "--num-requests", "4", "--concurrency", "1", "--osl", "1")
        found = bench(server.url, tmp_path, *arguments)
        assert found["requests"] == {"completed": 4, "failed": 0, "unfinished": 0}
        assert len(server.bodies) == 6
    with FakeCompletions({0: "drop"}) as server:  # one that was new is a failure
        found = bench(server.url, tmp_path, "m", "--warmup", "0", "--num-requests", "1", "--osl", "1", status=1)
        assert found["errors"]["connection"]["count"] == 1 and found["ttft_ms"] is None


def test_a_server_without_usage_is_told_from_one_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCompletions(usage=False) as server:
        found = bench(server.url, tmp_path, "--num-requests", "2", "--osl", "6")
    assert found["usage_counted"] is False and found["output_tokens"]["mean"] == 6 and found["prompt_tokens"] is None
    assert "no usage" in capsys.readouterr().out
    with FakeCompletions() as server:
        server.tokens_per_chunk = 3  # the server's count wins over the number of chunks
        assert bench(server.url, tmp_path, "--num-requests", "2", "--osl", "6")["output_tokens"]["mean"] == 6


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    with FakeCompletions(step_s=0.02) as server:
        command = [
            sys.executable, "-m", "motet.deploy.cli", "bench", "llm", "--url", server.url, "--concurrency", "2",
            "--num-requests", "10000", "--osl", "4", "--warmup", "0", "--json", str(tmp_path / "figures.json"),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60
            while len(server.bodies) < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130 and "Traceback" not in err
    assert "stopped early" in out and "requests in" in out
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["settings"]["interrupted"] is True and found["requests"]["completed"] >= 2
    assert 0 < found["requests"]["unfinished"] <= 2 and found["requests"]["failed"] == 0


def test_without_a_url_it_starts_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    with FakeCompletions() as server:

        class Started:
            def __init__(self, model: str, port: int) -> None:
                started.append(model)

            def __enter__(self) -> str:
                return server.url

            def __exit__(self, *error: object) -> None:
                started.append("ended")

        monkeypatch.setattr(bench_run, "running_server", Started)
        assert main(["bench", "llm", "some-model", "--num-requests", "2", "--osl", "1"]) == 0
    assert started == ["some-model", "ended"] and server.bodies[0]["model"] == "some-model"


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--isl", "many"], "expected N, uniform:LOW:HIGH or normal:MEAN:DEVIATION, got 'many'"),
        (["--isl", "uniform:9:3"], "LOW <= HIGH"),
        (["--isl", "0"], "lengths are 1 to"),
        (["--osl", "uniform:1.5:3"], "whole number"),
        (["--osl", "normal:nan:3"], "lengths are 1 to"),
        (["--rate", "0"], "expected a number above 0"),
        (["--rate", "inf"], "expected a number above 0"),
        (["--concurrency", "x"], "expected a number"),
        (["--num-requests", "0"], "expected 1 or more"),
        (["--warmup", "-1"], "expected 0 or more"),
        (["--rate", "1", "--arrival", "gamma:0"], "gamma:CV"),
        (["--arrival", "poisson"], "--arrival needs --rate"),
        (["--rate", "1", "--concurrency", "2"], "not both"),
        (["--url", "localhost:8000"], "expected a URL like"),
        (["--url", "http://u:p@x"], "expected a URL like"),
        (["--url", "http://x:port"], "expected a URL like"),
        (["--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "one line of ASCII"),
        (["--json", "/no/such/folder/x.json", "--url", "http://127.0.0.1:1"], "no such folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "llm", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("motet: ") and err.count("\n") == 1


def test_a_server_that_is_not_there_or_refuses_the_warm_up_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "llm", "--url", "http://127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "cannot connect to 127.0.0.1:1" in err and err.count("\n") == 1
    with FakeCompletions({0: "404"}) as server:
        assert main(["bench", "llm", "x", "--url", server.url + "/v1/"]) == 1
        assert server.heads[0].startswith("POST /v1/completions ")
    assert "too much of it (404)" in capsys.readouterr().err


def test_an_unknown_tokenizer_is_told_once_a_server_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCompletions() as server:
        assert main(["bench", "llm", "--url", server.url, "--tokenizer", "no-such"]) == 2
    assert "no installed model, file or directory 'no-such'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- loads and figures


@pytest.mark.parametrize(("how", "variation"), [("constant", 0.0), ("poisson", 1.0), ("gamma:3", 3.0)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(how: str, variation: float) -> None:
    times = list(islice(Arrivals(rate=5.0, variation=parse_arrival(how)).times(random.Random(1)), 20_001))
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    assert times[0] == 0.0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.06, abs=1e-6)


def test_lengths_follow_their_distribution() -> None:
    source = random.Random(2)

    def draws(text: str) -> list[int]:
        lengths = Lengths.parse(text)
        assert str(lengths) == text
        return [lengths.draw(source) for _ in range(4000)]

    assert set(draws("7")) == {7}
    assert set(draws("uniform:3:6")) == {3, 4, 5, 6}
    normal = draws("normal:100:10")
    assert statistics.mean(normal) == pytest.approx(100, abs=1) and statistics.stdev(normal) == pytest.approx(
        10, rel=0.1
    )
    assert min(draws("normal:1:50")) == 1


def test_an_encoder_that_gives_few_ids_is_asked_again() -> None:
    class Coarse:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert add_special_tokens is False
            return [len(word) for word in text.split()[::3]]

    assert len(make_prompt(50, random.Random(0), Coarse())) == 50
    first = next(jobs(isl=Lengths.parse("4"), osl=Lengths.parse("2"), seed=0, encoder=None))
    assert isinstance(first.prompt, str) and len(first.prompt.split()) == 4 and first.max_tokens == 2


def test_figures_of_known_times() -> None:
    records = [
        Record(number=0, sent=0.0, ended=1.0, arrivals=(0.1, 0.2, 0.5), num_prompt_tokens=10, num_output_tokens=5),
        Record(number=1, sent=0.5, ended=2.0, arrivals=(0.7,), num_prompt_tokens=30, num_output_tokens=1),
        Record(number=2, sent=0.6, ended=9.0, error="503", message="later"),
    ]
    found = figures(records, num_unfinished=4)
    assert found["seconds"] == 2.0 and found["output_tokens_per_s"] == 3.0 and found["total_tokens_per_s"] == 23.0
    assert found["ttft_ms"]["mean"] == pytest.approx(150) and found["ttft_ms"]["p50"] == pytest.approx(150)
    assert found["itl_ms"]["min"] == pytest.approx(100) and found["itl_ms"]["max"] == pytest.approx(300)
    assert found["e2e_ms"]["max"] == pytest.approx(1500)
    assert found["user_tokens_per_s"]["mean"] == pytest.approx(4 / 0.4)  # of the one that had more than one token
    assert found["errors"] == {"503": {"count": 1, "message": "later"}}
    assert "4 more were on their way" in table(found)
    nothing = figures([])
    assert nothing["ttft_ms"] is None and nothing["seconds"] == 0.0 and "-" in table(nothing)
    hundred = spread([float(value) for value in range(101)])
    assert hundred is not None and (hundred["p50"], hundred["p90"], hundred["p99"]) == (50, 90, 99)


def test_bench_costs_the_other_commands_nothing() -> None:
    """`motet chat` shall not import what only a load test needs."""
    code = "import sys, motet.deploy.cli as c; c.make_parser(); print(sorted(m for m in sys.modules if 'bench_' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True)
    assert done.stdout.strip() == "['motet.deploy.bench_load']"
