"""Ours beside ours: clips at once and one after another, a transcript with speakers and without."""

from __future__ import annotations

import time
from statistics import median

import msgspec

from motet.benchmarks import claims
from motet.benchmarks.asr_claims.setting import CLAIMS, OPTIONS, Setting
from motet.benchmarks.claims import Row
from motet.benchmarks.llm_claims.setting import SETTLE_S, say
from motet.benchmarks.motet_recogniser import MotetRecogniser
from motet.deploy.speech_demo import error_rate
from motet.pipelines.media import SAMPLE_RATE


def clips_at_once(setting: Setting, engine: MotetRecogniser) -> Row:
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


def speakers(setting: Setting, engine: MotetRecogniser) -> Row:
    samples, _ = setting.long_audio(setting.sizes.long_s)
    options = msgspec.structs.replace(OPTIONS, diarize=True)
    engine.transcribe(samples, options)
    with_speakers: list[float] = []
    without: list[float] = []
    found: set[str | None] = set()
    for turn in range(setting.sizes.rounds):
        for diarize in (True, False) if turn % 2 == 0 else (False, True):
            time.sleep(SETTLE_S)
            answer = engine.transcribe(samples, options if diarize else OPTIONS)
            (with_speakers if diarize else without).append(answer.seconds)
            if diarize:
                found = {segment.speaker for segment in answer.segments}
        say(f"  round {turn + 1}: {with_speakers[-1]:.2f} s with speakers, {without[-1]:.2f} s without")
    extra_s = median(a - b for a, b in zip(with_speakers, without))
    return claims.measured(
        CLAIMS["diarize"], max(0.0, extra_s), median(without), peer_name=f"{engine.name}, transcript alone",
        ours_name=f"{engine.name}, what speakers add", runs=len(without),
        why=f"{len(samples) / SAMPLE_RATE:.0f} s of one voice, {setting.threads} threads; {len(found)} speakers found",
    )  # fmt: skip
