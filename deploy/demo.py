"""`motet demo`: the main jobs on the packaged models, with figures.

Starts the real server as a child process, asks it over SSE with the public `openai` client, asks a second turn that
hits the prefix cache, lets it hear human speech over WebSocket (speech_demo.py) and speak its answer (voice_demo.py), has it
make pictures (picture_demo.py), asks once through the SDK, and prints what happened. Knows no engine: it is just a client.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.errors import ModelNotFound, Unavailable
from ..pipelines.hub import default_model

QUESTION = "Why is the sky blue? Answer in two sentences."
FOLLOW_UP = "And why is it red in the evening?"
SDK_QUESTION = "Write one sentence about the sea."
START_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One streamed answer as its reader saw it. Times in seconds."""

    text: str
    ttft_s: float
    total_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        decoding_s = self.total_s - self.ttft_s
        return (self.num_output_tokens - 1) / decoding_s if decoding_s > 0 and self.num_output_tokens > 1 else 0.0


def run(*, port: int = 0, keep_serving: bool = False, model: str | None = None) -> int:
    """The demo; exit status 0 when every step worked."""
    try:
        import openai
    except ImportError as error:
        raise Unavailable("the demo needs the openai client: run `make venv`, or pip install openai") from error

    from . import picture_demo

    model = model or default_model("llm")
    recogniser, voice = _installed("asr"), _installed("tts")
    painters = picture_demo.installed()
    served = [name for name in (model, recogniser, voice, *painters) if name]
    with running_server(served, port or free_port()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        say(f"\n-- over HTTP, with the openai client: {QUESTION}")
        messages = [{"role": "user", "content": QUESTION}]
        first = ask(client, model, messages)
        say(f"\n-- second turn of the same conversation: {FOLLOW_UP}")
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": FOLLOW_UP}]
        second = ask(client, model, messages)
        if recogniser:
            from . import speech_demo

            speech_demo.run(url, recogniser, client)
        if recogniser and voice:
            from . import voice_demo

            voice_demo.run(voice, recogniser, first.text, client)
        if painters:
            picture_demo.run(url, painters, client)
        say(f"\n-- in this process, with the SDK: {SDK_QUESTION}")
        sdk = ask_sdk(model, SDK_QUESTION)
        say("\n" + table(model, first, second, sdk))
        if keep_serving:
            say(f"\nserving {', '.join(served)} at {url} (Ctrl-C ends it). Try:\n{curl(url, model)}")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    return 0


def ask(client: Any, model: str, messages: list[dict[str, str]], *, max_tokens: int = 96) -> Turn:
    """One streamed chat completion, printed as it comes."""
    started = time.perf_counter()
    first_token_s: float | None = None
    pieces: list[str] = []
    usage: Any = None
    chunks = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                first_token_s = first_token_s or time.perf_counter() - started
                pieces.append(choice.delta.content)
                say(choice.delta.content, end="")
    say("")
    total_s = time.perf_counter() - started
    if usage is None or first_token_s is None:
        raise Unavailable("the server's stream ended without an answer and its usage")
    details = usage.prompt_tokens_details
    return Turn(
        text="".join(pieces),
        ttft_s=first_token_s,
        total_s=total_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=(details.cached_tokens or 0) if details else 0,
        num_output_tokens=usage.completion_tokens,
    )


def ask_sdk(model: str, question: str) -> Turn:
    """The same through the SDK: the engine runs in a thread of this process."""
    from ..pipelines.chat import Chat

    with Chat(model) as chat:
        started = time.perf_counter()
        first_token_s: float | None = None
        stream = chat.stream(question, temperature=0, max_tokens=48)
        for piece in stream:
            first_token_s = first_token_s or time.perf_counter() - started
            say(piece, end="")
        say("")
        result = stream.result
        return Turn(
            text=result.text,
            ttft_s=first_token_s or 0.0,
            total_s=time.perf_counter() - started,
            num_prompt_tokens=result.usage.num_prompt_tokens,
            num_cached_tokens=result.usage.num_cached_tokens,
            num_output_tokens=result.usage.num_output_tokens,
        )


def table(model: str, first: Turn, second: Turn, sdk: Turn) -> str:
    """The figures, as the client measured them."""
    lines = [f"{model:<24}{'HTTP, turn 1':>14}{'HTTP, turn 2':>14}{'SDK':>14}"]
    turns = (first, second, sdk)
    rows = {
        "prompt tokens": [str(turn.num_prompt_tokens) for turn in turns],
        "of them from the cache": [str(turn.num_cached_tokens) for turn in turns],
        "first token (TTFT)": [f"{turn.ttft_s * 1e3:.0f} ms" for turn in turns],
        "output tokens": [str(turn.num_output_tokens) for turn in turns],
        "tokens per second": [f"{turn.tokens_per_s:.1f}" for turn in turns],
    }
    lines += [f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows.items()]
    hit = 100 * second.num_cached_tokens / max(1, second.num_prompt_tokens)
    lines.append(f"prefix-cache hit of the second turn: {hit:.0f} % of its prompt")
    return "\n".join(lines)


def curl(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def _installed(kind: str) -> str | None:
    """The installed model of a kind, if there is one."""
    try:
        return default_model(kind)
    except ModelNotFound as error:
        print(f"a part of this demo is left out: {error}", file=sys.stderr)
        return None


@contextlib.contextmanager
def running_server(models: str | Sequence[str], port: int) -> Iterator[str]:
    """`motet serve` as a child process, ready for requests; SIGTERM at the end. Gives its URL."""
    url = f"http://127.0.0.1:{port}"
    names = [models] if isinstance(models, str) else models
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", *names, "--port", str(port), "--preload"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    before = signal.signal(signal.SIGTERM, _leave)  # so that the server never outlives us
    try:
        wait_ready(child, url)
        yield url
    finally:
        signal.signal(signal.SIGTERM, before)
        child.terminate()
        try:
            child.wait(timeout=15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_ready(child: subprocess.Popen[bytes], url: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll /readyz until it says 200. Raises Unavailable when the server ends or the time is up."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if (status := child.poll()) is not None:
            raise Unavailable(f"the server ended with status {status} before it was ready")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
                if response.status == 200:
                    print(f"server ready after {time.monotonic() - started:.1f} s", file=sys.stderr)
                    return
        time.sleep(0.05)
    raise Unavailable(f"the server was not ready after {timeout_s:.0f} s")


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def say(text: str, *, end: str = "\n") -> None:
    print(text, end=end, flush=True)
