"""Four hours: memory that stays, and times that do not drift."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from motet.benchmarks import claims
from motet.benchmarks.asr_claims.setting import CLAIMS, OPTIONS, Setting
from motet.benchmarks.claims import Row
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.motet_recogniser import Answer, MotetRecogniser
from motet.engine.types import Word
from motet.pipelines.media import SAMPLE_RATE

FLAT = 1.05  # memory at the end over that after half an hour, with 32 MB for the allocator
FLAT_GB = 0.03
MAX_DRIFT_S = 0.3


def memory(setting: Setting, engine: MotetRecogniser) -> Row:
    """GB of the engine's process at the end of a stream and of a file; the row fails too where times drift."""
    claim = CLAIMS["rss_gb"]
    sizes = setting.sizes
    seconds = sizes.hours * 3600
    passage, _ = setting.long_audio(min(sizes.long_s, seconds))
    pause = np.zeros(round(len(passage) * (1 / sizes.speech_share - 1)), np.float32)
    say(f"  a stream of {sizes.hours:.2g} hours, {sizes.speech_share:.0%} of it speech")
    live = engine.simulate_stream(np.concatenate([passage, pause]), seconds, OPTIONS, [sizes.flat_from_s])
    say(
        f"  GB after {sizes.flat_from_s:.0f} s and at the end: {live[0]:.2f}, {live[-1]:.2f}; a file as long, all speech"
    )
    file = np.resize(passage, round(seconds * SAMPLE_RATE))
    read = engine.file_memory(file, OPTIONS, [sizes.flat_from_s])
    say(f"  GB when the text had come to {sizes.flat_from_s:.0f} s and at the end: {read[0]:.2f}, {read[-1]:.2f}")
    worst_s, told = drift(setting, engine)
    row = claims.measured(
        claim, max(live[-1], read[-1]), ours_name=engine.name, runs=1,
        why=f"{sizes.hours:.2g} hours: a stream {live[0]:.2f} GB after {sizes.flat_from_s / 60:.0f} min, {live[-1]:.2f} at the "
        f"end; a file {read[0]:.2f} and {read[-1]:.2f}; {told}",
    )  # fmt: skip
    if any(gb[-1] > gb[0] * FLAT + FLAT_GB for gb in (live, read)):
        row = dataclasses.replace(row, holds=False, why=f"memory grows; {row.why}")
    if worst_s > MAX_DRIFT_S:
        row = dataclasses.replace(row, holds=False, why=f"times drift; {row.why}")
    return row


def drift(setting: Setting, engine: MotetRecogniser) -> tuple[float, str]:
    """The worst error in seconds of the first and last words' times of known clips, far apart in a long file of faint noise.

    The right times are those of the clip by itself, moved to where it lies. Also says so in words.
    """
    sizes = setting.sizes
    options = msgspec.structs.replace(OPTIONS, word_timestamps=True)
    total = round(sizes.drift_hours * 3600 * SAMPLE_RATE)
    file = np.random.default_rng(0).normal(0.0, 1e-4, total).astype(np.float32)  # -80 dB
    expected: list[float] = []
    for number in range(sizes.num_drift):
        clip = setting.speech[number % len(setting.speech)].samples
        # Not at round times, and the last one at the end.
        start = round((total - len(clip) - SAMPLE_RATE) * (number + 1) / sizes.num_drift) - 7919 * (number % 3)
        file[start : start + len(clip)] += clip
        # By itself it has the same noise around it.
        low, high = max(0, start - SAMPLE_RATE), min(total, start + len(clip) + SAMPLE_RATE)
        alone = words_of(engine.transcribe(file[low:high], options))
        expected += [low / SAMPLE_RATE + edge for edge in (alone[0].start, alone[-1].end)]
    found = words_of(engine.transcribe(file, options))
    edges = [edge for word in found for edge in (word.start, word.end)]
    worst = max(min((abs(edge - at) for edge in edges), default=at) for at in expected)
    return worst, (
        f"{sizes.num_drift} clips in a file of {sizes.drift_hours:.2g} hours: the worst time is {worst:.2f} s off "
        f"({len(found)} words)"
    )


def words_of(answer: Answer) -> list[Word]:
    return [word for segment in answer.segments for word in segment.words or ()]
