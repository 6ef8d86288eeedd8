"""Measure the language engine against its peers, on the same weights, threads and prompts, in one run.

    python benchmarks/llm.py [--json FILE] [--only CLAIM,...] [--weights dequantize|keep|auto]

Claims of this version (all with SmolLM2-135M-Instruct, greedy, end of text ignored):

    streams16_vs_vllm      tokens/s of 16 prompts x 64 ids, 128 new tokens each, over vLLM's on CPU (bf16)
    streams16_vs_llamacpp  the same over llama.cpp's (the Q4_1 file that all weights come from)
    prefix_ttft            time to first token of 1,000 known + 32 new ids over that of 1,032 new ids
    server_ttft_ms         what the HTTP server adds to the first token of a streamed chat
    server_throughput      tokens/s of 16 streamed completions through the server over 16 streams without HTTP

Everybody has turns, run by run, while the others idle (their CPU time meanwhile is printed); figures are medians.
Peers are built if absent (peers/build.sh). Exit status 0 when it ran, 1 when we ourselves could not be measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from motet.benchmarks import claims, peer_worker, raw_stream
from motet.benchmarks.claims import Claim, Row
from motet.benchmarks.motet_engine import EngineError, MotetEngine
from motet.benchmarks.peer_worker import PEERS, PeerError, PeerWorker
from motet.benchmarks.raw_stream import StreamError
from motet.deploy.demo import free_port, wait_ready
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError
from motet.models.registry import resolve
from motet.models.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
OURS_FAILED = "ours failed: "
SETTLE_S = 0.5  # between turns: threads of the one before may still spin for up to 0.2 s

CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(id="streams16_vs_vllm", better="higher", target=1.0, unit="tokens/s"),
        Claim(id="streams16_vs_llamacpp", better="higher", target=1.0, unit="tokens/s"),
        Claim(id="prefix_ttft", better="lower", target=0.15, unit="ms"),
        Claim(id="server_ttft_ms", better="lower", target=3.0, unit="ms", absolute=True),
        Claim(id="server_throughput", better="higher", target=0.95, unit="tokens/s"),
    )
}
LATER = (
    "decode_q4_1", "decode_q4_0", "decode_q8_0", "prefill_1024", "streams16_vs_best", "streams64", "context_4096",
    "rss_gb", "chat_start_s", "itl_p99_under_prefill",
)  # fmt: skip
PEER_CLAIMS = {"vllm": "streams16_vs_vllm", "llamacpp": "streams16_vs_llamacpp"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    num_streams: int = 16
    num_prompt: int = 64
    num_new: int = 128
    rounds: int = 5
    num_prefix: int = 1000
    num_tail: int = 32
    pairs: int = 40


REHEARSAL = Sizes(num_streams=2, num_prompt=8, num_new=4, rounds=1, num_prefix=96, num_tail=8, pairs=2)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share."""

    model: str
    path: Path
    text: list[int]  # ids of the licence
    engine: EngineConfig
    threads: int
    sizes: Sizes

    def prompts(self, turn: int) -> list[list[int]]:
        """Slices of the text: different ones within a turn and from turn to turn, the same for everybody in a turn."""
        count, length = self.sizes.num_streams, self.sizes.num_prompt
        starts = [(turn * count + index) * 61 % (len(self.text) - length) for index in range(count)]
        return [self.text[start : start + length] for start in starts]


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), LATER)
    parser.add_argument("--model", default=MODEL, help="a GGUF that Motet can name (default: %(default)s)")
    parser.add_argument("--weights", choices=("dequantize", "keep", "auto"), default="keep",
                        help="of ours, in memory (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="bfloat16",
                        help="of our activations and cache (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)

    known = [name for name in options.only if name in CLAIMS]
    rows: dict[str, Row] = {name: claims.not_yet(name) for name in options.only if name not in CLAIMS}
    if known:
        say(f"load average at the start: {os.getloadavg()[0]:.1f} (anything else that runs here spoils the figures)")
        if not options.rehearse:
            say(built_kernels())
        setting = make_setting(options.model, options.dtype, options.weights, options.threads, options.rehearse)
        if streams := [name for name in known if name in PEER_CLAIMS.values()]:
            rows |= attempt(streams, lambda: measure_streams(setting, streams))
        if serving := [name for name in known if name not in streams]:
            rows |= attempt(serving, lambda: measure_serving(setting, serving))
    ordered = [rows[name] for name in options.only]
    broken = any(row.why.startswith(OURS_FAILED) for row in ordered)
    if options.rehearse:
        # Nobody shall quote these: not even by accident, out of a file.
        ordered = [
            dataclasses.replace(row, holds=False, why=f"a rehearsal; {row.why}") if row.claim in CLAIMS else row
            for row in ordered
        ]
    print("\n" + claims.table(ordered), flush=True)
    if options.json:
        claims.write_json(ordered, options.json)
    return 1 if broken else 0


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    """What `measure` gives for some claims; when we ourselves fail, a row for each that says so."""
    try:
        return {row.claim: row for row in measure()}
    except (EngineError, MotetError, StreamError, OSError) as error:
        say(f"  {OURS_FAILED}{error}")
        return {name: claims.failed(CLAIMS[name], f"{OURS_FAILED}{error}") for name in names}


def make_setting(model: str, dtype: str, weights: str, threads: int, rehearse: bool) -> Setting:
    path = resolve(model).path
    text = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    engine = EngineConfig(dtype=dtype, weights=weights, device="cpu")  # type: ignore[arg-type]
    sizes = REHEARSAL if rehearse else Sizes()
    if len(text) < sizes.num_prefix + sizes.num_tail + sizes.num_prompt:
        raise SystemExit(f"{TEXT} has only {len(text)} tokens")
    return Setting(model=model, path=path, text=text, engine=engine, threads=threads, sizes=sizes)


def built_kernels() -> str:
    """Build our own kernels unless they are there (an engine never compiles); says which ones will run."""
    done = subprocess.run(
        [sys.executable, "-m", "motet.kernels.cpu.build"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout.strip() or done.stderr.strip() or "kernels: no answer").splitlines()[-1]


# ------------------------------------------------------------------------------------------------ many streams at once


def measure_streams(setting: Setting, wanted: list[str]) -> list[Row]:
    """Tokens per second of all prompts at once: ours and each peer, a turn each per round."""
    sizes = setting.sizes
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        workers: dict[str, PeerWorker] = {}
        for peer, claim_id in PEER_CLAIMS.items():
            if claim_id in wanted:
                try:
                    say(f"{peer}: building if absent, loading")
                    workers[peer] = stack.enter_context(start_peer(peer, setting))
                except PeerError as error:
                    rows.append(claims.failed(CLAIMS[claim_id], str(error), peer_name=peer))
        say("ours: loading")
        # Nothing may be remembered from one turn to the next, here as in the peers.
        engine = MotetEngine(
            setting.model, dataclasses.replace(setting.engine, enable_prefix_caching=False), threads=setting.threads
        )
        ours_name = stack.enter_context(engine).name
        engine.streams(setting.prompts(0), 4)
        ours: list[float] = []
        theirs: dict[str, list[float]] = {peer: [] for peer in workers}
        idle = _Idle({"ours": engine.cpu_s, **{peer: worker.cpu_s for peer, worker in workers.items()}})
        for turn in range(sizes.rounds):
            prompts = setting.prompts(turn)
            order = ["ours", *workers]
            for name in order if turn % 2 == 0 else reversed(order):
                if name != "ours" and name not in workers:
                    continue
                time.sleep(SETTLE_S)
                with idle.turn_of(name):
                    if name == "ours":
                        ours.append(engine.streams(prompts, sizes.num_new))
                        say(f"  round {turn + 1}: ours {ours[-1]:.1f} tokens/s")
                        continue
                    try:
                        answer = workers[name].ask({"cmd": "streams", "prompts": prompts, "max_tokens": sizes.num_new})
                    except PeerError as error:
                        rows.append(claims.failed(CLAIMS[PEER_CLAIMS[name]], str(error), peer_name=name))
                        workers.pop(name).close()
                        idle.drop(name)
                        continue
                    theirs[name].append(answer["tokens"] / answer["seconds"])
                    say(f"  round {turn + 1}: {name} {theirs[name][-1]:.1f} tokens/s")
        rows = [dataclasses.replace(row, ours=median(ours), ours_name=ours_name) for row in rows]
        for peer, worker in workers.items():
            rows.append(
                claims.measured(
                    CLAIMS[PEER_CLAIMS[peer]], median(ours), median(theirs[peer]), peer_name=worker.name,
                    ours_name=ours_name, runs=sizes.rounds,
                    why=f"{sizes.num_streams} x ({sizes.num_prompt} in, {sizes.num_new} out), {setting.threads} threads "
                    f"each, no prefix cache; {idle.told()}",
                )
            )  # fmt: skip
    return rows


def start_peer(peer: str, setting: Setting) -> PeerWorker:
    """A peer's worker, loaded and warm. Raises PeerError."""
    python = peer_worker.build(peer) / "bin" / "python"
    sizes = setting.sizes
    context = -(-(sizes.num_prompt + sizes.num_new) // 256) * 256
    common = ["--streams", str(sizes.num_streams), "--threads", str(setting.threads), "--context", str(context)]
    if peer == "llamacpp":
        return PeerWorker([python, PEERS / "run_llamacpp.py", "--gguf", setting.path, *common])
    # vLLM reads the same weights as bf16 safetensors; the exporter runs with our own Python.
    export = subprocess.run(
        [sys.executable, str(PEERS / "export_hf.py"), "--gguf", str(setting.path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if export.returncode or not export.stdout.split():
        said = export.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"the weights cannot be exported for {peer}: {said[-1][:200]}")
    return PeerWorker([python, PEERS / "run_vllm.py", "--model-dir", export.stdout.split()[-1], *common])


class _Idle:
    """CPU time that engines take while it is another one's turn."""

    def __init__(self, clocks: dict[str, Callable[[], float]]) -> None:
        self._clocks = clocks
        self._used = dict.fromkeys(clocks, 0.0)
        self._waited = dict.fromkeys(clocks, 0.0)

    @contextlib.contextmanager
    def turn_of(self, name: str) -> Iterator[None]:
        before = {other: clock() for other, clock in self._clocks.items() if other != name}
        began = time.perf_counter()
        yield
        for other, cpu_s in before.items():
            if other in self._clocks:
                self._used[other] += self._clocks[other]() - cpu_s
                self._waited[other] += time.perf_counter() - began

    def drop(self, name: str) -> None:
        self._clocks.pop(name, None)

    def told(self) -> str:
        shares = [
            f"{name} {100 * self._used[name] / waited:.1f} %" for name, waited in self._waited.items() if waited > 0
        ]
        return f"CPU of a core while idle: {', '.join(shares)}"


# --------------------------------------------------------------------------------- the prefix cache, and the server


def measure_serving(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about one engine process, for the server's beside a second, equal one that has its server."""
    with contextlib.ExitStack() as stack:
        server = None
        if wanted != ["prefix_ttft"]:
            say("ours: starting the server")
            server = stack.enter_context(Server(setting))
        say("ours: loading")
        engine = stack.enter_context(MotetEngine(setting.model, setting.engine, threads=setting.threads))
        measurements: dict[str, Callable[[], Row]] = {"prefix_ttft": partial(_prefix_ttft, setting, engine)}
        if server is not None:
            server.wait()  # nothing is timed while it still loads
            measurements["server_ttft_ms"] = partial(_server_ttft, setting, server, engine)
            measurements["server_throughput"] = partial(_server_throughput, setting, server, engine)
        rows: dict[str, Row] = {}
        for name in wanted:
            rows |= attempt([name], partial(_alone, measurements[name]))
        return list(rows.values())


def _alone(measure: Callable[[], Row]) -> list[Row]:
    return [measure()]


class Server:
    """`motet serve` as a user starts it; `wait` until it is ready. SIGTERM at the end."""

    def __init__(self, setting: Setting) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()
        command = [
            sys.executable, "-m", "motet.deploy.cli", "serve", setting.model, "--port", str(self.port), "--preload",
            "--threads", str(setting.threads), "--dtype", setting.engine.dtype, "--weights", setting.engine.weights,
            "--device", "cpu",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def wait(self) -> None:
        """Return once it takes requests. Raises EngineError with the server's last word when it does not."""
        try:
            wait_ready(self._process, f"http://127.0.0.1:{self.port}")
        except MotetError as error:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise EngineError(f"{error}: {said[-1][:200]}") from None

    def cpu_s(self) -> float:
        """CPU seconds of the HTTP process so far, without its engine's."""
        return peer_worker.process_cpu_s(self._process.pid)


def _prefix_ttft(setting: Setting, engine: MotetEngine) -> Row:
    """Time to first token after a known prefix, over the same without: each pair has a cache salt of its own."""
    sizes = setting.sizes
    claim = CLAIMS["prefix_ttft"]
    prefix = setting.text[: sizes.num_prefix]

    def prompt(number: int) -> list[int]:
        start = sizes.num_prefix + number * 7 % (len(setting.text) - sizes.num_prefix - sizes.num_tail)
        return prefix + setting.text[start : start + sizes.num_tail]

    for number in range(2):
        engine.one(prompt(number), salt="warm-up")
    least = sizes.num_prefix // setting.engine.block_size * setting.engine.block_size  # whole blocks are shared
    warm, cold = [], []
    for pair in range(2 * sizes.rounds):
        first = engine.one(prompt(2 * pair), salt=f"pair-{pair}")
        second = engine.one(prompt(2 * pair + 1), salt=f"pair-{pair}")
        if first.num_cached_tokens or second.num_cached_tokens < least:
            why = f"the cache gave {first.num_cached_tokens} ids cold and {second.num_cached_tokens} warm"
            return claims.failed(claim, why, ours_name=engine.name)
        cold.append(first.first_token_s * 1e3)
        warm.append(second.first_token_s * 1e3)
        say(f"  pair {pair + 1}: cold {cold[-1]:.1f} ms, warm {warm[-1]:.1f} ms")
    return claims.measured(
        claim,
        median(warm),
        median(cold),
        peer_name=f"{engine.name}, prefix not cached",
        ours_name=f"{engine.name}, prefix cached",
        runs=len(warm),
        why=f"{sizes.num_prefix} ids of prefix + {sizes.num_tail} new, {setting.threads} threads, no HTTP",
    )


def _server_ttft(setting: Setting, server: Server, engine: MotetEngine) -> Row:
    """Median of the pairs' differences: a streamed chat over a kept connection, and the same ids without HTTP."""
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
    body = {"model": "default", "messages": messages}
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


def _server_throughput(setting: Setting, server: Server, engine: MotetEngine) -> Row:
    sizes = setting.sizes
    over_http, without, client_cpu, server_cpu = [], [], [], []

    def requests(turn: int) -> list[bytes]:
        return [
            raw_stream.post(
                "/v1/completions",
                {
                    "model": "default", "prompt": prompt, "max_tokens": sizes.num_new, "temperature": 0,
                    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                },
            )
            for prompt in setting.prompts(turn)
        ]  # fmt: skip

    # A turn's prompts are new to both engines: no prefix is cached on either side.
    raw_stream.read_streams(server.port, requests(sizes.rounds))
    engine.streams(setting.prompts(sizes.rounds), sizes.num_new)
    for turn in range(sizes.rounds):
        for http in (True, False) if turn % 2 == 0 else (False, True):
            time.sleep(SETTLE_S)
            if not http:
                without.append(engine.streams(setting.prompts(turn), sizes.num_new))
                say(f"  round {turn + 1}: without HTTP {without[-1]:.1f} tokens/s")
                continue
            before = server.cpu_s()
            streams = raw_stream.read_streams(server.port, requests(turn))
            server_cpu.append((server.cpu_s() - before) / streams.seconds)
            client_cpu.append(streams.cpu_s / streams.seconds)
            if streams.num_tokens != sizes.num_streams * sizes.num_new:
                raise StreamError(f"the server counts {streams.num_tokens} tokens")
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


def say(line: str) -> None:
    """Progress, on stderr: the table alone goes to stdout."""
    print(line, file=sys.stderr, flush=True)


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that no engine outlives us
    sys.exit(main())
