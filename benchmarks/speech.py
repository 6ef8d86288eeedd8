"""Measure the voice: how fast it speaks, how soon, and to how many at once.

    python benchmarks/speech.py [--json FILE] [--only CLAIM,...] [--model motet-voice]

Claims (over WebSocket /v1/audio/speech/stream of a real server, unless said otherwise):

    rtf             seconds of work per second of speech, one stream, a passage of eight sentences; median
    first_audio_ms  from the first text to the first sound, one stream; median
    streams         passages spoken at once to listeners who play them at the speed of speech: the largest number tried of
                    which none ever waits for sound
    codec8          the codec for eight streams in one batch over the same one by one (engine without server); it holds only
                    while each stream costs at most 0.08 of real time
    smooth_beside_images  pictures per second, painted all the time in the same host while six passages are spoken, over those
                    alone for the time that the voices leave; it holds only when no listener ever waits for sound

Nobody else speaks these weights, so most targets are absolute. Exit status 0 when it ran, 1 when we ourselves failed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from statistics import median

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.llm import built_kernels
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_engine import EngineError
from motet.benchmarks.motet_server import Server
from motet.benchmarks.speech_claims.beside_images import beside_images
from motet.benchmarks.speech_claims.codec import codec_together
from motet.benchmarks.speech_claims.listener import Heard, listen
from motet.benchmarks.speech_claims.setting import CLAIMS, REHEARSAL, Setting, Sizes
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError

SERVED = ("rtf", "first_audio_ms", "streams")


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), ())
    parser.add_argument("--model", default="motet-voice", help="a voice (default: %(default)s)")
    parser.add_argument("--pictures", default="motet-emoji", help="of smooth_beside_images (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="auto")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)

    say(f"load average at the start: {os.getloadavg()[0]:.1f} (anything else that runs here spoils the figures)")
    if not options.rehearse:
        say(built_kernels())
    setting = Setting(
        model=options.model,
        pictures=options.pictures,
        engine=EngineConfig(dtype=options.dtype, device="cpu"),
        threads=options.threads,
        sizes=REHEARSAL if options.rehearse else Sizes(),
    )
    rows: dict[str, Row] = {}
    if "codec8" in options.only:
        rows |= attempt(["codec8"], lambda: [codec_together(setting)])
    if served := [name for name in options.only if name in SERVED]:
        rows |= attempt(served, lambda: measure_served(setting, served))
    if "smooth_beside_images" in options.only:
        rows |= attempt(["smooth_beside_images"], lambda: [beside_images(setting)])
    ordered = [rows[name] for name in options.only]
    return claims.report(ordered, rehearsed=options.rehearse, json_file=options.json)


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    return claims.attempt(CLAIMS, names, measure, (EngineError, MotetError, OSError))


def measure_served(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about the server."""
    say(f"starting the server with {setting.model}")
    rows: list[Row] = []
    with Server(setting) as server:
        server.wait()
        asyncio.run(listen(server.port, setting.passage(), seed=0))  # warm
        if "rtf" in wanted or "first_audio_ms" in wanted:
            rows += [row for row in asyncio.run(_alone(setting, server.port)) if row.claim in wanted]
        if "streams" in wanted:
            rows.append(asyncio.run(_together(setting, server.port)))
    return rows


async def _alone(setting: Setting, port: int) -> list[Row]:
    heard = [await listen(port, setting.passage(number), seed=number) for number in range(setting.sizes.rounds)]
    shares = sorted(one.done_s / one.audio_s for one in heard)
    first = sorted(one.first_s * 1e3 for one in heard)
    sentences = [one.utterance_ends[0] if one.utterance_ends else one.done_s for one in heard]
    say(f"  one stream: {median(shares):.3f} of real time, first sound after {median(first):.0f} ms")
    return [
        claims.measured(
            CLAIMS["rtf"], median(shares), ours_name=setting.model, runs=len(heard),
            why=f"passages of {median(one.audio_s for one in heard):.0f} s over WebSocket, {setting.threads} threads; "
            f"worst {shares[-1]:.3f}",
        ),
        claims.measured(
            CLAIMS["first_audio_ms"], median(first), ours_name=setting.model, runs=len(heard),
            why=f"over WebSocket; worst {first[-1]:.0f} ms; first sentence whole after {median(sentences) * 1e3:.0f} ms",
        ),
    ]  # fmt: skip


async def _together(setting: Setting, port: int) -> Row:
    best, told = 0, "none of the numbers tried"
    for count in setting.sizes.streams:
        tasks = (listen(port, setting.passage(number), seed=number) for number in range(count))
        heard: list[Heard] = await asyncio.gather(*tasks)
        late = [one.lateness_s() for one in heard]
        num_late = sum(waited > 0 for waited in late)
        first = sorted(one.first_s * 1e3 for one in heard)
        say(
            f"  {count} streams: {num_late} fell behind (worst {max(late) * 1e3:.0f} ms), first sound after "
            f"{median(first):.0f} ms (worst {first[-1]:.0f}), all said after {max(one.done_s for one in heard):.1f} s"
        )
        if num_late:
            break
        best, told = count, f"first sound after {median(first):.0f} ms, worst {first[-1]:.0f} ms"
    return claims.measured(
        CLAIMS["streams"], best, ours_name=setting.model, runs=1,
        why=f"all at once, passages of {setting.sizes.num_sentences} sentences; {told}; tried: "
        f"{', '.join(map(str, setting.sizes.streams))}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
