"""`motet bench llm` on the command line: its arguments, and their words for what is wrong with them.

A closed loop keeps `--concurrency` requests on their way; an open loop sends `--rate` a second whether or not the server
keeps up, which is how the world sends them. The run itself is bench_run.py, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .bench_load import Lengths, parse_arrival

DEFAULT_REQUESTS = 64
DEFAULT_CONCURRENCY = 16


def add_parser(commands: Any) -> None:
    """`bench` with its kinds, on the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure a server under load", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    llm = kinds.add_parser(
        "llm", help="streamed text completions", allow_abbrev=False,
        description="Times of streamed text completions under load: TTFT, ITL, whole answers, tokens per second.",
    )  # fmt: skip
    llm.add_argument("model", nargs="?", metavar="MODEL",
                     help="with --url: the id to ask for (default: the server's first); else what to serve "
                     "(default: the first installed chat model)")  # fmt: skip
    llm.add_argument("--url", help="a running server, such as http://127.0.0.1:8000 (default: start one)")
    llm.add_argument("--rate", type=_positive, metavar="R", help="open loop: requests per second, in the mean")
    llm.add_argument("--arrival", type=_typed(parse_arrival), metavar="HOW",
                     help="of an open loop: poisson (default), constant or gamma:CV (above 1: burstier)")  # fmt: skip
    llm.add_argument("--concurrency", type=_count, metavar="N",
                     help=f"closed loop: so many at once (default: {DEFAULT_CONCURRENCY})")  # fmt: skip
    llm.add_argument("--isl", type=_typed(Lengths.parse), default=Lengths.parse("256"), metavar="LENGTHS",
                     help="prompt tokens: N, uniform:LOW:HIGH or normal:MEAN:DEVIATION (default: 256)")  # fmt: skip
    llm.add_argument("--osl", type=_typed(Lengths.parse), default=Lengths.parse("128"), metavar="LENGTHS",
                     help="output tokens, likewise (default: 128)")  # fmt: skip
    llm.add_argument("--num-requests", type=_count, metavar="N",
                     help=f"how many to measure (default: {DEFAULT_REQUESTS}, without --duration)")  # fmt: skip
    llm.add_argument("--duration", type=_positive, metavar="S", help="send for so many seconds, then wait for the rest")
    llm.add_argument("--warmup", type=_natural, default=2, metavar="N",
                     help="requests sent before, one after the other, that do not count (default: 2)")  # fmt: skip
    llm.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    llm.add_argument("--stop-at-end", action="store_true",
                     help="let answers end early (do not send ignore_eos, which not every server knows)")  # fmt: skip
    llm.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same requests at the same times")
    llm.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of one request (default: 600)")
    llm.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY",
                     help="default: $OPENAI_API_KEY")  # fmt: skip
    llm.add_argument("--tokenizer", metavar="MODEL",
                     help="an installed model, file or directory whose tokenizer makes prompts of exact length "
                     "(default: MODEL, where it is here; else a word counts as a token)")  # fmt: skip
    llm.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    llm.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Exit status 0 when at least one request went well, 1 when none did, 130 after Ctrl-C."""
    from .bench_run import run_llm

    return run_llm(namespace)


# --------------------------------------------------------------------------------------------- reading the command line


def _typed(parse: Any) -> Any:
    """argparse shows the message of an ArgumentTypeError, not that of a ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _positive(text: str) -> float:
    value = _read(float, text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _count(text: str) -> int:
    value = int(_read(int, text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return value


def _natural(text: str) -> int:
    value = int(_read(int, text))
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return value


def _read(kind: type[float] | type[int], text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
