"""Measure the recogniser against its peers, on the same weights, threads and audio, in one run.

    python benchmarks/asr.py [--json FILE] [--only CLAIM,...] [--speech DIR]

Claims (human speech, English, greedy with fallback, voice detection on):

    long_tiny_en  times real time of a 10-minute file, whisper-tiny.en, over faster-whisper's best batched mode (int8);
                  also at least 1.3 times transformers in bfloat16 with our cuts, and OpenVINO's Whisper pipeline
    long_base     the same with whisper-base
    clips16       16 clips of 5 to 15 s at once over the same one after another, both ours
    live20        20 streams of continuous speech over WebSocket: p95 of seconds from a segment's close to its text
    final_ms      one stream over WebSocket: true end of speech to final text, 150 ms of waiting for silence included
    rss_gb        memory of the engine's process at the end of a 4-hour stream and of a 4-hour file, flat from 30 min on;
                  it fails too when ten known clips in two hours of faint noise are not where they belong, within 0.3 s
    diarize       seconds that telling speakers adds to a 10-minute file over those of the transcript

A speed counts only beside its word error rate: ours may be at most 0.3 points above the peer's in the same run. Engines have
turns, run by run, while the others idle; figures are medians. The peer is built if absent (peers/build.sh). The audio is
joined from motet-demo's ten recordings (or those of --speech, a folder with transcripts.tsv: file, seconds, text), repeated
with gaps. Exit status 0 when it ran, 1 when we ourselves could not be measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from motet.benchmarks import claims
from motet.benchmarks.asr_claims.long_file import long_file
from motet.benchmarks.asr_claims.memory import memory
from motet.benchmarks.asr_claims.own_modes import clips_at_once, speakers
from motet.benchmarks.asr_claims.setting import CLAIMS, REHEARSAL, Setting, Sizes, read_speech
from motet.benchmarks.claims import Row
from motet.benchmarks.llm import built_kernels
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_engine import EngineError
from motet.benchmarks.motet_recogniser import MotetRecogniser, Samples
from motet.benchmarks.motet_server import Server
from motet.deploy import speech_demo
from motet.deploy.speech_demo import Heard, error_rate, final_latency_s
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError
from motet.pipelines.media import SAMPLE_RATE

FINAL_SILENCE_S = 0.15
LIVE_SILENCE_S = 0.3
LIVE_FRAME = SAMPLE_RATE // 10  # samples of a message: what the client costs is not what is measured
PARTIAL_S = 1.5  # asked for; at least every 2 s is the claim
MAX_PARTIAL_GAP_S = 2.0
LONG = {"long_tiny_en": "whisper-tiny.en", "long_base": "whisper-base"}
# Without HTTP, in the order in which one engine gets them: memory last, it must hold after all the rest.
DIRECT = ("long_tiny_en", "long_base", "clips16", "diarize", "rss_gb")


def main(argv: Sequence[str] | None = None) -> int:
    parser = claims.make_parser(__doc__, list(CLAIMS.values()), ())
    parser.add_argument(
        "--model", default="whisper-tiny.en", help="of all claims but the long ones (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "auto"), default="auto", help="of ours")
    parser.add_argument("--speech", type=Path, metavar="DIR", help="recordings with a transcripts.tsv")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does it run? The figures mean nothing")
    options = parser.parse_args(argv)

    say(f"load average at the start: {os.getloadavg()[0]:.1f} (anything else that runs here spoils the figures)")
    if not options.rehearse:
        say(built_kernels())
    setting = Setting(
        model=options.model,
        engine=EngineConfig(dtype=options.dtype, device="cpu"),
        threads=options.threads,
        sizes=REHEARSAL if options.rehearse else Sizes(),
        speech=read_speech(options.speech) if options.speech else speech_demo.clips(),
    )
    rows: dict[str, Row] = {}
    by_model: dict[str, list[str]] = {}
    for name in [name for name in DIRECT if name in options.only]:
        by_model.setdefault(LONG.get(name, options.model) if not options.rehearse else options.model, []).append(name)
    for model, names in by_model.items():
        rows |= attempt(names, partial(measure_direct, setting, model, names))
    if live := [name for name in options.only if name in ("live20", "final_ms")]:
        rows |= attempt(live, lambda: measure_live(setting, live))
    ordered = [rows[name] for name in options.only]
    return claims.report(ordered, rehearsed=options.rehearse, json_file=options.json)


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    return claims.attempt(CLAIMS, names, measure, (EngineError, MotetError, OSError))


# ------------------------------------------------------------------------------------------------- the engine by itself


def measure_direct(setting: Setting, model: str, wanted: list[str]) -> list[Row]:
    """Claims about one engine process without HTTP."""
    measurements: dict[str, Callable[[Setting, MotetRecogniser], Row]] = {
        "long_tiny_en": partial(long_file, claim=CLAIMS["long_tiny_en"]),
        "long_base": partial(long_file, claim=CLAIMS["long_base"]),
        "clips16": clips_at_once,
        "diarize": speakers,
        "rss_gb": memory,
    }
    rows: dict[str, Row] = {}
    say(f"ours: loading {model}")
    with MotetRecogniser(model, setting.engine, threads=setting.threads) as engine:
        for name in wanted:
            rows |= attempt([name], partial(_alone, measurements[name], setting, engine))
    return list(rows.values())


def _alone(measure: Callable[[Setting, MotetRecogniser], Row], setting: Setting, engine: MotetRecogniser) -> list[Row]:
    say(f"{'-' * 20} {engine.model}")
    return [measure(setting, engine)]


# ------------------------------------------------------------------------------------------------------ live, over HTTP


def measure_live(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about the server, which a client hears over WebSocket at the speed of speech."""
    say(f"ours: starting the server with {setting.model}")
    rows: dict[str, Row] = {}
    with Server(setting) as server:
        server.wait()
        url = f"http://127.0.0.1:{server.port}"
        if "final_ms" in wanted:
            rows |= attempt(["final_ms"], lambda: [asyncio.run(_final(setting, url))])
        if "live20" in wanted:
            rows |= attempt(["live20"], lambda: [asyncio.run(_live(setting, url))])
    return list(rows.values())


async def _final(setting: Setting, url: str) -> Row:
    """One stream at a time: from the last sound of a recording to the text of its last words."""
    latencies: list[float] = []
    pairs: list[tuple[str, str]] = []
    await speech_demo.stream(url, setting.model, setting.speech[0].samples, silence_s=FINAL_SILENCE_S, pace=0)  # warm
    for clip in setting.speech[: setting.sizes.num_final]:
        heard = await speech_demo.stream(
            url, setting.model, clip.samples, silence_s=FINAL_SILENCE_S, tail_s=setting.sizes.tail_s, language="en"
        )
        latencies.append(final_latency_s(clip.samples, heard) * 1e3)
        pairs.append((clip.text, heard.text))
        say(f"  {clip.name}: {latencies[-1]:.0f} ms: {heard.text[:60]}")
    return claims.measured(
        CLAIMS["final_ms"], median(latencies), ours_name=setting.model, runs=len(latencies),
        why=f"over WebSocket, {setting.threads} threads, {FINAL_SILENCE_S * 1e3:.0f} ms of silence included; worst "
        f"{max(latencies):.0f} ms, word error rate {100 * error_rate(pairs):.1f} %",
    )  # fmt: skip


async def _live(setting: Setting, url: str) -> Row:
    """Many streams at once, each beginning with another recording."""
    sizes = setting.sizes
    audio, text = zip(*(_rotated(setting, number) for number in range(sizes.num_live)))
    heard = await asyncio.gather(
        *(
            speech_demo.stream(
                url,
                setting.model,
                samples,
                silence_s=LIVE_SILENCE_S,
                partials_s=PARTIAL_S,
                language="en",
                frame=LIVE_FRAME,
            )
            for samples in audio
        )
    )
    latencies = sorted(latency for one in heard for latency in closing_latencies_s(one))
    gaps = sorted(gap for one in heard for gap in text_gaps_s(one))
    if not latencies:
        raise EngineError("no segment was closed")
    worst_gap = quantile(gaps, 0.99)
    rate = error_rate(list(zip(text, (one.text for one in heard))))
    row = claims.measured(
        CLAIMS["live20"], quantile(latencies, 0.95), ours_name=setting.model, runs=len(latencies),
        why=f"{len(heard)} streams of {sizes.live_s:.0f} s over WebSocket, {setting.threads} threads; median "
        f"{median(latencies):.2f} s, worst {latencies[-1]:.2f} s; while one speaks, text comes every "
        f"{median(gaps or [0.0]):.2f} s (p99 {worst_gap:.2f}); word error rate {100 * rate:.1f} %",
    )  # fmt: skip
    if worst_gap > MAX_PARTIAL_GAP_S:
        row = dataclasses.replace(row, holds=False, why=f"partial text comes too seldom; {row.why}")
    return row


def _rotated(setting: Setting, number: int) -> tuple[Samples, str]:
    """Continuous speech of about `live_s` seconds that begins with recording `number`."""
    at = number % len(setting.speech)
    turned = dataclasses.replace(setting, speech=[*setting.speech[at:], *setting.speech[:at]])
    return turned.long_audio(setting.sizes.live_s)


def closing_latencies_s(heard: Heard) -> list[float]:
    """For each end of speech that was told: seconds from there to the last segment of what was said before it.

    A stream's clock is the microphone's, and an end lies at a cut, or where the segment's audio ends: up to 0.1 s before the
    waiting for silence is over, which counts against us.
    """
    ends = [message["at"] for _, message in heard.of("speech") if message["what"] == "stopped"]
    last: dict[float, float] = {}
    for when, segment in heard.of("segment"):
        end = next((at for at in ends if at >= segment["end"] - 0.1), None)
        if end is not None:
            last[end] = when
    return [max(0.0, when - end) for end, when in last.items()]


def text_gaps_s(heard: Heard) -> list[float]:
    """Seconds from the beginning of speech to its first text, from text to text, and to its end."""
    gaps: list[float] = []
    since: float | None = None
    for when, message in heard.log:
        speech = message.get("what")
        if speech == "started":
            since = when
        elif since is not None and (speech == "stopped" or message["type"] in ("partial", "segment")):
            gaps.append(when - since)
            since = None if speech == "stopped" else when
    return gaps


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted values lie; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that no engine outlives us
    sys.exit(main())
