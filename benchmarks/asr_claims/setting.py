"""The claims about the recogniser, how much is measured, and the recordings that everybody hears."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from motet.benchmarks.claims import Claim
from motet.benchmarks.motet_recogniser import Samples
from motet.deploy.speech_demo import Clip, join
from motet.engine.config import EngineConfig
from motet.engine.types import TranscribeOptions
from motet.pipelines.media import SAMPLE_RATE, decode_audio

OPTIONS = TranscribeOptions(language="en")
WITHOUT_TIMES = TranscribeOptions(language="en", timestamps=False)  # as faster-whisper's batched mode does it
OTHERS = ("transformers", "openvino-whisper")  # the "best other peer" of the long files

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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    long_s: float = 600.0
    gap_s: float = 0.7
    rounds: int = 5
    batch_sizes: tuple[int, ...] = (8, 16)  # of the peer; its best one counts
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
    speech_share: float = 1 / 3  # of the long stream; the rest is pauses
    drift_hours: float = 2.0
    num_drift: int = 10


REHEARSAL = Sizes(
    long_s=12.0, rounds=1, batch_sizes=(8,), num_clips=2, num_live=2, live_s=4.0, num_final=1, tail_s=0.5, hours=20 / 3600,
    flat_from_s=5.0, drift_hours=40 / 3600, num_drift=2,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share. `Server` reads `model`, `engine` and `threads`."""

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
