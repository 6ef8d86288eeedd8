"""Measure the language engine against its peers, on the same weights, threads and prompts, in one run.

    python benchmarks/llm.py [--json FILE] [--only CLAIM,...] [--peers NAME,...] [--weights dequantize|keep|auto]

All with SmolLM2-135M-Instruct, greedy, end of text ignored; "16 streams" are 16 prompts x 64 ids, 128 new tokens each:

    streams16_vs_vllm      tokens/s of 16 streams over vLLM's on CPU (bf16)
    streams16_vs_llamacpp  the same over llama.cpp's (the Q4_1 file that all weights come from)
    streams16_vs_best      the same over the best of vLLM, llama.cpp and OpenVINO GenAI (computing in f32 and in bf16)
    prefill_1024           1,024 / time of one new token, over the best peer's
    decode_q4_1            127 / (t128 - t1) after 64 ids, over llama.cpp's on the same file
    decode_q4_0, _q8_0     the same on files that llama.cpp's own quantizer made of it
    streams64              tokens/s of 64 streams over that of 16, both ours
    context_4096           decoding after 4,096 ids over decoding after 64; beside it the same with INT8 keys and values
    prefix_ttft            time to first token of 1,000 known + 32 new ids over that of 1,032 new ids
    itl_p99_under_prefill  p99 of the pauses of 15 streams while 8,000 ids prefill, over the same while none do
    server_ttft_ms         what the HTTP server adds to the first token of a streamed chat
    server_throughput      tokens/s of 16 streamed completions through the server over 16 streams without HTTP
    rss_gb                 memory of the server's processes (PSS) while 16 streams grow to 1,024 tokens
    chat_start_s           from starting `motet chat` to its first token

Everybody has turns, run by run, while the others idle (their CPU time meanwhile is printed); figures are medians.
Peers are built if absent (peers/build.sh). Exit status 0 when it ran, 1 when we ourselves could not be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.llm_claims import engine, peers, server, speed
from motet.benchmarks.llm_claims.setting import CLAIMS, REHEARSAL, Setting, Sizes, say
from motet.benchmarks.motet_engine import EngineError, MotetEngine
from motet.benchmarks.motet_server import Server
from motet.benchmarks.raw_stream import StreamError
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError
from motet.models.registry import resolve
from motet.models.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
Measure = Callable[[Setting, list[str]], list[Row]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), ())
    parser.add_argument("--model", default=MODEL, help="a GGUF that Motet can name (default: %(default)s)")
    parser.add_argument("--peers", type=_peer_names, default=peers.NAMES, metavar="NAME,...",
                        help="who may take part (default: all of " + ", ".join(peers.NAMES) + ")")  # fmt: skip
    parser.add_argument("--weights", choices=("dequantize", "keep", "auto"), default="keep",
                        help="of ours, in memory (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="bfloat16",
                        help="of our activations and cache (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)

    say(f"load average at the start: {os.getloadavg()[0]:.1f} (anything else that runs here spoils the figures)")
    if not options.rehearse:
        say(built_kernels())
    setting = make_setting(options)
    rows: dict[str, Row] = {}
    for names, measure in groups():
        if wanted := [name for name in options.only if name in names]:
            rows |= attempt(wanted, partial(measure, setting, wanted))
    ordered = [rows[name] for name in options.only]
    return claims.report(ordered, rehearsed=options.rehearse, json_file=options.json)


def groups() -> list[tuple[tuple[str, ...], Measure]]:
    """Which claims are measured together, and by whom."""
    return [
        (speed.PACKAGED, speed.measure_packaged),
        (tuple(speed.REQUANTIZED), speed.measure_requantized),
        (("streams64",), _alone(engine.streams64)),
        (("context_4096",), _alone(engine.context_4096)),
        (("prefix_ttft", "itl_p99_under_prefill", "server_ttft_ms", "server_throughput"), measure_serving),
        (("rss_gb",), _alone(server.rss_gb)),
        (("chat_start_s",), _alone(server.chat_start_s)),
    ]


def measure_serving(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about one engine process, for the server's beside a second, equal one that has its server."""
    with contextlib.ExitStack() as stack:
        host = None
        if any(name.startswith("server") for name in wanted):
            say("ours: starting the server")
            host = stack.enter_context(Server(setting))
        say("ours: loading")
        ours = stack.enter_context(MotetEngine(setting.model, setting.engine, threads=setting.threads))
        measurements: dict[str, Callable[[], Row]] = {
            "prefix_ttft": partial(engine.prefix_ttft, setting, ours),
            "itl_p99_under_prefill": partial(engine.itl_p99_under_prefill, setting, ours),
        }
        if host is not None:
            host.wait()  # nothing is timed while it still loads
            measurements["server_ttft_ms"] = partial(server.server_ttft, setting, host, ours)
            measurements["server_throughput"] = partial(server.server_throughput, setting, host, ours)
        rows: dict[str, Row] = {}
        for name in wanted:
            rows |= attempt([name], lambda measure=measurements[name]: [measure()])
        return list(rows.values())


def _alone(measure: Callable[[Setting], Row]) -> Measure:
    return lambda setting, _: [measure(setting)]


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    return claims.attempt(CLAIMS, names, measure, (EngineError, MotetError, StreamError, OSError))


def make_setting(options: argparse.Namespace) -> Setting:
    path = resolve(options.model).path
    text = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    sizes = REHEARSAL if options.rehearse else Sizes()
    if len(text) < sizes.num_prefix + sizes.num_tail + sizes.num_prompt:
        raise SystemExit(f"{TEXT} has only {len(text)} tokens")
    return Setting(
        model=options.model,
        path=path,
        text=text,
        engine=EngineConfig(dtype=options.dtype, weights=options.weights, device="cpu"),
        threads=options.threads,
        sizes=sizes,
        peers=tuple(options.peers),
    )


def built_kernels() -> str:
    """Build our own kernels unless they are there (an engine never compiles); says which ones will run."""
    done = subprocess.run(
        [sys.executable, "-m", "motet.kernels.cpu.build"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout.strip() or done.stderr.strip() or "kernels: no answer").splitlines()[-1]


def _peer_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in peers.NAMES]:
        raise argparse.ArgumentTypeError(f"no such peer: {', '.join(unknown)}; known: {', '.join(peers.NAMES)}")
    return names


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that no engine outlives us
    sys.exit(main())
