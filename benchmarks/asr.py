"""Measure the recogniser against its peers, on the same weights, threads and audio, in one run.

    python benchmarks/asr.py [--json FILE] [--only CLAIM,...] [--speech DIR]

Claims (human speech, English, greedy with fallback, voice detection on):

    long_tiny_en  times real time of a 10-minute file, whisper-tiny.en, over faster-whisper's best batched mode (int8);
                  also at least 1.3 times transformers in bfloat16 with our cuts
    long_base     the same with whisper-base
    clips16       16 clips of 5 to 15 s at once over the same one after another, both ours
    live20        20 streams of continuous speech over WebSocket: p95 of seconds from a segment's close to its text
    final_ms      one stream over WebSocket: true end of speech to final text, 150 ms of waiting for silence included
    rss_gb        memory of the engine's process at the end of a 4-hour stream and of a 4-hour file, flat from 30 min on
    diarize       seconds that telling speakers adds to a 10-minute file over those of the transcript

A speed counts only beside its word error rate: ours may be at most 0.3 points above the peer's in the same run. Engines have
turns, run by run, while the others idle; figures are medians. The peer is built if absent (peers/build.sh). The audio is
joined from motet-demo's ten recordings (or those of --speech, a folder with transcripts.tsv: file, seconds, text), repeated
with gaps. Exit status 0 when it ran, 1 when we ourselves could not be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from motet.benchmarks import claims, llm, peer_worker
from motet.benchmarks.claims import Claim, Row
from motet.benchmarks.llm import OURS_FAILED, SETTLE_S, built_kernels, say
from motet.benchmarks.motet_engine import EngineError
from motet.benchmarks.motet_recogniser import MotetRecogniser, Samples
from motet.benchmarks.peer_worker import PEERS, PeerError, PeerWorker
from motet.deploy import speech_demo
from motet.deploy.speech_demo import Clip, Heard, error_rate, final_latency_s, join
from motet.engine.config import EngineConfig
from motet.engine.errors import MotetError
from motet.engine.types import TranscribeOptions
from motet.models.registry import resolve
from motet.pipelines.media import SAMPLE_RATE, decode_audio

PEER = "faster-whisper"
OTHERS = ("transformers",)  # the "best other peer" of the long files
OTHER_ROUNDS = 3  # turns that they get
MIN_OVER_OTHERS = 1.3
MAX_WER_LOSS = 0.003  # of ours over a peer's
OPTIONS = TranscribeOptions(language="en")
WITHOUT_TIMES = TranscribeOptions(language="en", timestamps=False)  # as faster-whisper's batched mode does it
FINAL_SILENCE_S = 0.15
LIVE_SILENCE_S = 0.3
LIVE_FRAME = SAMPLE_RATE // 10  # samples of a message: what the client costs is not what is measured
PARTIAL_S = 1.5  # asked for; at least every 2 s is the claim
MAX_PARTIAL_GAP_S = 2.0
FLAT = 1.05  # memory at the end over that after half an hour, with 32 MB for the allocator
FLAT_GB = 0.03

CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(id="long_tiny_en", better="higher", target=3.0, unit="x real time"),
        Claim(id="long_base", better="higher", target=3.0, unit="x real time"),
        Claim(id="clips16", better="higher", target=1.5, unit="x real time"),
        Claim(id="live20", better="lower", target=1.5, unit="s", absolute=True),
        Claim(id="final_ms", better="lower", target=300.0, unit="ms", absolute=True),
        Claim(id="rss_gb", better="lower", target=1.5, unit="GB", absolute=True),
        Claim(id="diarize", better="lower", target=0.5, unit="s"),
    )
}
LONG = {"long_tiny_en": "whisper-tiny.en", "long_base": "whisper-base"}
# Without HTTP, in the order in which one engine gets them: memory last, it must hold after all the rest.
DIRECT = ("long_tiny_en", "long_base", "clips16", "diarize", "rss_gb")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    long_s: float = 600.0
    gap_s: float = 0.7
    rounds: int = 5
    batch_sizes: tuple[int, ...] = (8, 16)  # of the peers; their best one counts
    others: tuple[str, ...] = OTHERS
    num_clips: int = 16
    min_clip_s: float = 5.0
    max_clip_s: float = 15.0
    num_live: int = 20
    live_s: float = 180.0
    num_final: int = 10
    tail_s: float = 2.0  # of quiet after the last word, until which its text must have come
    hours: float = 4.0
    flat_from_s: float = 1800.0


REHEARSAL = Sizes(
    long_s=12.0, rounds=1, batch_sizes=(8,), num_clips=2, num_live=2, live_s=4.0, num_final=1, tail_s=0.5, hours=20 / 3600,
    flat_from_s=5.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share. `llm.Server` reads `model`, `engine` and `threads`."""

    model: str
    engine: EngineConfig
    threads: int
    sizes: Sizes
    speech: list[Clip]

    def long_audio(self, seconds: float) -> tuple[Samples, str]:
        """The recordings joined and repeated until so many seconds (whole recordings), and what is said."""
        parts: list[Clip] = []
        length = 0.0
        while length < seconds:
            parts.append(self.speech[len(parts) % len(self.speech)])
            length += parts[-1].seconds + self.sizes.gap_s
        return join([part.samples for part in parts], self.sizes.gap_s), " ".join(part.text for part in parts)

    def clips(self) -> list[Clip]:
        """Audios of 5 to 15 s: recordings, joined where they are shorter."""
        sizes = self.sizes
        found: list[Clip] = []
        at = 0
        while len(found) < sizes.num_clips:
            parts: list[Clip] = []
            while sum(part.seconds + sizes.gap_s for part in parts) < sizes.min_clip_s:
                parts.append(self.speech[at % len(self.speech)])
                at += 1
            samples = join([part.samples for part in parts], sizes.gap_s)[: round(sizes.max_clip_s * SAMPLE_RATE)]
            found.append(Clip(name=parts[0].name, samples=samples, text=" ".join(part.text for part in parts)))
        return found


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
    broken = any(row.why.startswith(OURS_FAILED) for row in ordered)
    if options.rehearse:
        ordered = [dataclasses.replace(row, holds=False, why=f"a rehearsal; {row.why}") for row in ordered]
    print("\n" + claims.table(ordered), flush=True)
    if options.json:
        claims.write_json(ordered, options.json)
    return 1 if broken else 0


def attempt(names: Sequence[str], measure: Callable[[], list[Row]]) -> dict[str, Row]:
    """What `measure` gives for some claims; when we ourselves fail, a row for each that says so."""
    try:
        return {row.claim: row for row in measure()}
    except (EngineError, MotetError, OSError) as error:
        say(f"  {OURS_FAILED}{error}")
        return {name: claims.failed(CLAIMS[name], f"{OURS_FAILED}{error}") for name in names}


def read_speech(folder: Path) -> list[Clip]:
    """Recordings listed in transcripts.tsv (a line each: file, seconds, text); the first line may be a heading."""
    found: list[Clip] = []
    with (folder / "transcripts.tsv").open(encoding="utf-8", newline="") as lines:
        for file, _, text in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            if (path := folder / file).is_file():
                found.append(Clip(name=path.stem, samples=decode_audio(path), text=text))
    if not found:
        raise SystemExit(f"{folder}/transcripts.tsv names no recording that is there")
    return found


# ------------------------------------------------------------------------------------------------- the engine by itself


def measure_direct(setting: Setting, model: str, wanted: list[str]) -> list[Row]:
    """Claims about one engine process without HTTP."""
    measurements: dict[str, Callable[[Setting, MotetRecogniser], Row]] = {
        "long_tiny_en": partial(_long, claim=CLAIMS["long_tiny_en"]),
        "long_base": partial(_long, claim=CLAIMS["long_base"]),
        "clips16": _clips16,
        "diarize": _diarize,
        "rss_gb": _memory,
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


@dataclass(kw_only=True)
class Rival:
    """A peer on the long file: how it is asked, and what it gave."""

    worker: PeerWorker
    command: dict[str, Any]
    remark: str = ""
    speeds: list[float] = field(default_factory=list)  # times real time
    text: str = ""

    def take_turn(self) -> None:
        told = self.worker.ask(self.command, timeout_s=600)
        self.speeds.append(told["audio_seconds"] / told["seconds"])
        self.text = told["text"]


def _long(setting: Setting, engine: MotetRecogniser, *, claim: Claim) -> Row:
    """One long file: ours and each peer in its fastest mode, a turn each per round."""
    samples, text = setting.long_audio(setting.sizes.long_s)
    seconds = len(samples) / SAMPLE_RATE
    missing: dict[str, str] = {}
    rivals: dict[str, Rival] = {}
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-asr-"))) / "long.f32"
        samples.tofile(file)
        for name in (PEER, *setting.sizes.others):
            try:
                say(f"  {name}: building if absent, loading")
                worker = stack.enter_context(start_peer(name, engine.model, setting.threads))
                rivals[name] = calibrate(worker, file, setting.sizes.batch_sizes, text, sequential=name == PEER)
            except PeerError as error:
                missing[name] = str(error)
                say(f"  {name}: {error}")
        engine.transcribe(samples[: 60 * SAMPLE_RATE], OPTIONS)  # warm
        ours: list[float] = []
        our_text = ""
        for turn in range(setting.sizes.rounds):
            order = ["ours", *rivals]
            for name in order if turn % 2 == 0 else reversed(order):
                if name != "ours" and (name not in rivals or (name != PEER and turn >= OTHER_ROUNDS)):
                    continue
                time.sleep(SETTLE_S)
                if name == "ours":
                    answer = engine.transcribe(samples, WITHOUT_TIMES)
                    our_text = answer.text
                    ours.append(seconds / answer.seconds)
                    say(f"  round {turn + 1}: ours {ours[-1]:.1f} x real time")
                    continue
                try:
                    rivals[name].take_turn()
                    say(f"  round {turn + 1}: {name} {rivals[name].speeds[-1]:.1f} x real time")
                except PeerError as error:
                    missing[name] = str(error)
                    rivals.pop(name).worker.close()
    our_rate = error_rate([(text, our_text)])
    rates = {name: error_rate([(text, rival.text)]) for name, rival in rivals.items()}
    others = [
        f"{rival.worker.name}: {median(rival.speeds):.1f} x real time, {100 * rates[name]:.2f} %"
        for name, rival in rivals.items()
        if name != PEER
    ] + [f"{name}: {why}" for name, why in missing.items() if name != PEER]
    if PEER not in rivals:
        return claims.failed(
            claim, "; ".join([missing[PEER], f"our word error rate {100 * our_rate:.2f} %", *others]), ours=median(ours),
            peer_name=PEER, ours_name=engine.name, runs=len(ours),
        )  # fmt: skip
    peer = rivals[PEER]
    told = [
        f"{seconds:.0f} s, {setting.threads} threads",
        f"word error rate {100 * our_rate:.2f} % beside {100 * rates[PEER]:.2f} %",
        peer.remark,
        *others,
    ]
    row = claims.measured(
        claim, median(ours), median(peer.speeds), runs=len(ours), ours_name=engine.name, why="; ".join(told),
        peer_name=f"{peer.worker.name}, batches of {peer.command['batch_size']}",
    )  # fmt: skip
    slow = [
        name for name, rival in rivals.items() if name != PEER and median(ours) < MIN_OVER_OTHERS * median(rival.speeds)
    ]
    if our_rate > min(rates.values()) + MAX_WER_LOSS:
        row = dataclasses.replace(row, holds=False, why=f"our word error rate is too high; {row.why}")
    if slow:
        row = dataclasses.replace(row, holds=False, why=f"not {MIN_OVER_OTHERS} times {slow[0]}; {row.why}")
    return row


def start_peer(name: str, model: str, threads: int) -> PeerWorker:
    """A peer's worker on the same weights, loaded and warm. Raises PeerError."""
    path = resolve(model).path
    if not (path / "model.bin").is_file():
        raise PeerError(f"peers get CTranslate2 directories only, and {path.name} is none")
    if name == PEER:
        python = peer_worker.build(PEER) / "bin" / "python"
        return PeerWorker([python, PEERS / "run_faster_whisper.py", "--model-dir", path, "--threads", str(threads)])
    return PeerWorker(
        [sys.executable, PEERS / "run_transformers_whisper.py", "--model", model, "--threads", str(threads)]
    )


def calibrate(worker: PeerWorker, file: Path, batch_sizes: Sequence[int], text: str, *, sequential: bool) -> Rival:
    """A rival that will run its fastest batched command; its sequential mode is told of. Raises PeerError."""
    found: list[tuple[float, dict[str, Any]]] = []
    for batch_size in batch_sizes:
        # Without timestamps within a chunk, which is faster-whisper's default and faster.
        command = {
            "cmd": "transcribe", "mode": "batched", "batch_size": batch_size, "timestamps": False, "file": str(file),
        }  # fmt: skip
        told = worker.ask(command, timeout_s=600)
        found.append((told["seconds"], command))
        say(f"    batches of {batch_size}: {told['audio_seconds'] / told['seconds']:.1f} x real time")
    rival = Rival(worker=worker, command=min(found, key=lambda one: one[0])[1])
    if sequential:
        told = worker.ask({"cmd": "transcribe", "mode": "sequential", "file": str(file)}, timeout_s=600)
        speed, rate = told["audio_seconds"] / told["seconds"], error_rate([(text, told["text"])])
        rival.remark = f"sequentially it has {speed:.1f} x real time, {100 * rate:.2f} %"
    return rival


def _clips16(setting: Setting, engine: MotetRecogniser) -> Row:
    clips = setting.clips()
    many = [clip.samples for clip in clips]
    seconds = sum(clip.seconds for clip in clips)
    engine.together(many, OPTIONS)
    together: list[float] = []
    alone: list[float] = []
    texts: dict[bool, list[str]] = {}
    for turn in range(setting.sizes.rounds):
        for at_once in (True, False) if turn % 2 == 0 else (False, True):
            time.sleep(SETTLE_S)
            if at_once:
                answers, taken_s = engine.together(many, OPTIONS)
            else:
                answers = [engine.transcribe(samples, OPTIONS) for samples in many]
                taken_s = sum(answer.seconds for answer in answers)
            (together if at_once else alone).append(seconds / taken_s)
            texts[at_once] = [answer.text for answer in answers]
        say(f"  round {turn + 1}: at once {together[-1]:.1f}, one by one {alone[-1]:.1f} x real time")
    rates = {mode: error_rate(list(zip([clip.text for clip in clips], found))) for mode, found in texts.items()}
    same = sum(a == b for a, b in zip(texts[True], texts[False]))
    return claims.measured(
        CLAIMS["clips16"], median(together), median(alone), peer_name=f"{engine.name}, one after another",
        ours_name=f"{engine.name}, at once", runs=len(together),
        why=f"{len(clips)} clips of {min(clip.seconds for clip in clips):.1f} to {max(clip.seconds for clip in clips):.1f} s, "
        f"{setting.threads} threads; word error rate {100 * rates[True]:.2f} % beside {100 * rates[False]:.2f} %, "
        f"{same} of {len(clips)} texts equal",
    )  # fmt: skip


def _diarize(setting: Setting, engine: MotetRecogniser) -> Row:
    samples, _ = setting.long_audio(setting.sizes.long_s)
    options = msgspec.structs.replace(OPTIONS, diarize=True)
    engine.transcribe(samples, options)
    with_speakers: list[float] = []
    without: list[float] = []
    speakers: set[str | None] = set()
    for turn in range(setting.sizes.rounds):
        for diarize in (True, False) if turn % 2 == 0 else (False, True):
            time.sleep(SETTLE_S)
            answer = engine.transcribe(samples, options if diarize else OPTIONS)
            (with_speakers if diarize else without).append(answer.seconds)
            if diarize:
                speakers = {segment.speaker for segment in answer.segments}
        say(f"  round {turn + 1}: {with_speakers[-1]:.2f} s with speakers, {without[-1]:.2f} s without")
    extra_s = median(a - b for a, b in zip(with_speakers, without))
    return claims.measured(
        CLAIMS["diarize"], max(0.0, extra_s), median(without), peer_name=f"{engine.name}, transcript alone",
        ours_name=f"{engine.name}, what speakers add", runs=len(without),
        why=f"{len(samples) / SAMPLE_RATE:.0f} s of one voice, {setting.threads} threads; {len(speakers)} speakers found",
    )  # fmt: skip


def _memory(setting: Setting, engine: MotetRecogniser) -> Row:
    claim = CLAIMS["rss_gb"]
    sizes = setting.sizes
    seconds = sizes.hours * 3600
    passage, _ = setting.long_audio(min(sizes.long_s, seconds))
    say(f"  a stream of {sizes.hours:.2g} hours")
    live = engine.simulate_stream(passage, seconds, OPTIONS, [sizes.flat_from_s])
    say(f"  GB after {sizes.flat_from_s:.0f} s and at the end: {live[0]:.2f}, {live[-1]:.2f}; a file as long")
    file = np.resize(passage, round(seconds * SAMPLE_RATE))
    read = engine.file_memory(file, OPTIONS, [sizes.flat_from_s])
    say(f"  GB when the text had come to {sizes.flat_from_s:.0f} s and at the end: {read[0]:.2f}, {read[-1]:.2f}")
    row = claims.measured(
        claim, max(live[-1], read[-1]), ours_name=engine.name, runs=1,
        why=f"{sizes.hours:.2g} hours: a stream {live[0]:.2f} GB after {sizes.flat_from_s / 60:.0f} min, {live[-1]:.2f} at the "
        f"end; a file {read[0]:.2f} and {read[-1]:.2f}",
    )  # fmt: skip
    if any(gb[-1] > gb[0] * FLAT + FLAT_GB for gb in (live, read)):
        row = dataclasses.replace(row, holds=False, why=f"memory grows; {row.why}")
    return row


# ------------------------------------------------------------------------------------------------------ live, over HTTP


def measure_live(setting: Setting, wanted: list[str]) -> list[Row]:
    """Claims about the server, which a client hears over WebSocket at the speed of speech."""
    say(f"ours: starting the server with {setting.model}")
    rows: dict[str, Row] = {}
    with llm.Server(setting) as server:  # type: ignore[arg-type]
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

    A stream's clock is the microphone's, and an end lies where the waiting for silence was over (the padding of segments is
    longer than that), or at a cut.
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
