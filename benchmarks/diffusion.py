"""Measure pictures against diffusers' own loop, on the same weights, dtype, threads and compile setting, in one run.

    python benchmarks/diffusion.py [--json FILE] [--only CLAIM,...] [--model motet-emoji] [--timeline FILE.svg]

Claims (20 steps, guidance on, both branches of it in one batch on both sides):

    one_image    pictures per second of one after another, from the request to the pixels, over diffusers' loop
    concurrent8  eight asked for at once, over diffusers' loop with one after another
    late_joiner  p95 of the seconds that a picture takes which is asked for while a batch of four runs: it joins; diffusers'
                 loop, with batches of requests, lets it wait until the batch is over (ours made to wait is told of too)
    step_cache   pictures per second, eight at once, with the fastest step cache that keeps the final latents within 0.05 (mean
                 relative L1, 32 held-out captions), over the same engine without; one at a time is told of too
    overlap      wall time at steady load over that of the busiest stage; `--timeline` draws the three stages

Ours runs behind its process's socket, as the server has it, but for the last two. Every picture has a caption that is new to
everybody; the empty caption of guidance is known to both. Diffusers' loop has a process of its own (peers/run_diffusers.py).
Engines have turns, run by run, while the other idles; figures are medians. Exit status 0 when it ran, 1 when we ourselves
could not be measured.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.diffusion_claims.overlap import overlap
from motet.benchmarks.diffusion_claims.setting import CLAIMS, REHEARSAL, Setting, Sizes
from motet.benchmarks.diffusion_claims.speed import Diffusers, concurrent8, late_joiner, one_image
from motet.benchmarks.diffusion_claims.step_cache import step_cache
from motet.benchmarks.llm import built_kernels
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_engine import EngineError
from motet.benchmarks.motet_painter import MotetPainter
from motet.benchmarks.peer_worker import PeerError
from motet.engine.config import EngineConfig, PictureConfig
from motet.engine.errors import MotetError

BESIDE_PEER: dict[str, Callable[[Setting, MotetPainter, Diffusers], Row]] = {
    "one_image": one_image,
    "concurrent8": concurrent8,
    "late_joiner": late_joiner,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), ())
    parser.add_argument("--model", default="motet-emoji", help="a picture model (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="auto", help="of both sides")
    parser.add_argument("--compile", action="store_true", help="compile the blocks, on both sides")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw the stages of overlap there, as SVG")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)

    say(f"load average at the start: {os.getloadavg()[0]:.1f} (anything else that runs here spoils the figures)")
    if not options.rehearse:
        say(built_kernels())
    setting = Setting(
        model=options.model,
        engine=EngineConfig(dtype=options.dtype, device="cpu"),
        pictures=PictureConfig(image_compile=options.compile),
        threads=options.threads,
        sizes=REHEARSAL if options.rehearse else Sizes(),
    )
    rows: dict[str, Row] = {}
    if served := [name for name in BESIDE_PEER if name in options.only]:
        rows |= attempt(served, lambda: measure_served(setting, served))
    if "step_cache" in options.only:
        rows |= attempt(["step_cache"], lambda: [step_cache(setting)])
    if "overlap" in options.only:
        rows |= attempt(["overlap"], lambda: [overlap(setting, options.timeline)])
    ordered = [rows[name] for name in options.only]
    return claims.report(ordered, rehearsed=options.rehearse, json_file=options.json)


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    return claims.attempt(CLAIMS, names, measure, (EngineError, MotetError, OSError))


def measure_served(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about the engine behind its socket."""
    rows: dict[str, Row] = {}
    say(f"ours: loading {setting.model}")
    with MotetPainter(
        setting.model, setting.engine, setting.pictures, threads=setting.threads, steps=setting.sizes.steps
    ) as ours:
        try:
            with Diffusers(setting, ours) as peer:
                for name in wanted:
                    say(f"{'-' * 20} {name}")
                    rows |= attempt([name], partial(_one, BESIDE_PEER[name], setting, ours, peer))
        except PeerError as error:
            say(f"  diffusers: {error}")
            rows |= {name: claims.failed(CLAIMS[name], str(error)) for name in wanted if name not in rows}
    return list(rows.values())


def _one(
    measure: Callable[[Setting, MotetPainter, Diffusers], Row], setting: Setting, ours: MotetPainter, peer: Diffusers
) -> list[Row]:
    return [measure(setting, ours, peer)]


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that no engine outlives us
    sys.exit(main())
