"""Claims about whole processes: what HTTP adds, how much memory a server holds, how soon a chat answers."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from statistics import median

from motet.benchmarks import claims, process_tree, raw_stream
from motet.benchmarks.claims import Row
from motet.benchmarks.motet_engine import EngineError, MotetEngine
from motet.benchmarks.motet_server import Server
from motet.benchmarks.raw_stream import StreamError

from . import setting as shared
from .setting import CLAIMS, Setting, say

QUESTION = "Why is the sky blue? Answer in two sentences."
_PROMPT = b"> "  # of `motet chat`


def server_ttft(setting: Setting, server: Server, engine: MotetEngine) -> Row:
    """Median of the pairs' differences: a streamed chat over a kept connection, and the same ids without HTTP."""
    body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}]}
    with raw_stream.connect(server.port) as connection:
        ids = raw_stream.ask(connection, raw_stream.post("/tokenize", body))["tokens"]
        request = raw_stream.post("/v1/chat/completions", {**body, "stream": True, "temperature": 0, "max_tokens": 4})
        for _ in range(3):
            raw_stream.first_text_s(connection, request)
            engine.one(ids, max_tokens=4)
        over_http, without = [], []
        for pair in range(setting.sizes.pairs):
            for http in (True, False) if pair % 2 == 0 else (False, True):
                if http:
                    over_http.append(raw_stream.first_text_s(connection, request) * 1e3)
                else:
                    without.append(engine.one(ids, max_tokens=4).first_token_s * 1e3)
                time.sleep(0.02)  # whoever came before is done with its last words
    extra = median(a - b for a, b in zip(over_http, without))
    why = (
        f"median {median(over_http):.2f} ms over HTTP, {median(without):.2f} ms without; the same {len(ids)} ids each time, "
        f"their prefix cached on both sides; {setting.threads} threads"
    )
    say(f"  {why}")
    return claims.measured(CLAIMS["server_ttft_ms"], extra, runs=setting.sizes.pairs, ours_name=engine.name, why=why)


def server_throughput(setting: Setting, server: Server, engine: MotetEngine) -> Row:
    """Tokens per second of 16 streams over HTTP, over those of the engine's process alone."""
    sizes = setting.sizes
    over_http, without, client_cpu, server_cpu = [], [], [], []
    # A turn's prompts are new to both engines: no prefix is cached on either side.
    raw_stream.read_streams(server.port, _completions(setting.prompts(sizes.rounds), sizes.num_new))
    engine.streams(setting.prompts(sizes.rounds), sizes.num_new)
    for turn in range(sizes.rounds):
        for http in (True, False) if turn % 2 == 0 else (False, True):
            time.sleep(shared.SETTLE_S)
            if not http:
                without.append(engine.streams(setting.prompts(turn), sizes.num_new))
                say(f"  round {turn + 1}: without HTTP {without[-1]:.1f} tokens/s")
                continue
            before = server.cpu_s()
            streams = raw_stream.read_streams(server.port, _completions(setting.prompts(turn), sizes.num_new))
            server_cpu.append((server.cpu_s() - before) / streams.seconds)
            client_cpu.append(streams.cpu_s / streams.seconds)
            _check_count(streams, sizes.num_streams * sizes.num_new)
            over_http.append(streams.num_tokens / streams.seconds)
            say(f"  round {turn + 1}: over HTTP {over_http[-1]:.1f} tokens/s, {streams.num_events} events")
    why = (
        f"{sizes.num_streams} x ({sizes.num_prompt} in, {sizes.num_new} out), {setting.threads} threads; of a core: "
        f"client {100 * median(client_cpu):.1f} %, HTTP process {100 * median(server_cpu):.1f} %"
    )
    return claims.measured(
        CLAIMS["server_throughput"], median(over_http), median(without), peer_name=f"motet without HTTP, {engine.name}",
        ours_name=engine.name, runs=sizes.rounds, why=why,
    )  # fmt: skip


def rss_gb(setting: Setting) -> Row:
    """Most memory that a server's processes hold together while 16 streams grow to 1,024 tokens: one server, all rounds.

    PSS: pages that several processes share count once, in parts. Of one server, so it includes what earlier rounds left.
    """
    sizes = setting.sizes
    most: list[float] = []
    with Server(setting) as server:
        server.wait()
        for turn in range(sizes.rounds):
            prompts = [
                setting.slice(turn * sizes.num_streams + index, sizes.resident_prompt)
                for index in range(sizes.num_streams)
            ]
            with process_tree.PssWatch(server.pid) as watch:
                streams = raw_stream.read_streams(server.port, _completions(prompts, sizes.num_new))
            _check_count(streams, sizes.num_streams * sizes.num_new)
            most.append(watch.most_bytes / 1e9)
            say(f"  round {turn + 1}: {most[-1]:.3f} GB in {watch.num_processes} processes, {watch.num_looks} looks")
    return claims.measured(
        CLAIMS["rss_gb"], max(most), runs=sizes.rounds, ours_name=f"motet serve, {setting.engine.dtype}",
        why=f"largest PSS of the whole process tree, {sizes.num_streams} streams of {sizes.resident_prompt} + "
        f"{sizes.num_new} tokens, {watch.num_processes} processes; round by round: "
        + ", ".join(f"{value:.3f}" for value in most),
    )  # fmt: skip


def chat_start_s(setting: Setting) -> Row:
    """From starting `motet chat` with a question waiting to the first byte of the answer; files are in the page cache."""
    times = [_chat_once(setting) for _ in range(setting.sizes.rounds + 1)][1:]
    return claims.measured(
        CLAIMS["chat_start_s"], median(times), runs=len(times), ours_name="motet chat",
        why=f"process start to first token, warm; {setting.threads} threads; runs: "
        + ", ".join(f"{seconds:.2f}" for seconds in times),
    )  # fmt: skip


def _chat_once(setting: Setting) -> float:
    command = [
        sys.executable, "-m", "motet.deploy.cli", "chat", setting.model, "--temperature", "0", "--max-tokens", "8",
        "--threads", str(setting.threads),
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{QUESTION}\n".encode())
            process.stdin.close()
            answer = b""
            while len(answer) <= len(_PROMPT):
                ready, _, _ = select.select([process.stdout], [], [], 120.0)
                data = os.read(process.stdout.fileno(), 4096) if ready else b""
                if not data:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
                    raise EngineError(f"motet chat gave no answer: {said[-1][:200]}")
                answer += data
            seconds = time.perf_counter() - began
            process.stdout.read()
            if not answer.startswith(_PROMPT) or process.wait(timeout=30) != 0:
                raise EngineError(f"motet chat ended with status {process.returncode} after {answer[:80]!r}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            process.stdout.close()
    say(f"  first token after {seconds:.2f} s")
    return seconds


def _completions(prompts: list[list[int]], max_tokens: int) -> list[bytes]:
    return [
        raw_stream.post(
            "/v1/completions",
            {
                "model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            },
        )
        for prompt in prompts
    ]  # fmt: skip


def _check_count(streams: raw_stream.Streams, expected: int) -> None:
    if streams.num_tokens != expected:
        raise StreamError(f"the server counts {streams.num_tokens} tokens instead of {expected}")
