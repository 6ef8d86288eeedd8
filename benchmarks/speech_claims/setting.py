"""The claims about voices, how much is measured, and what is said."""

from __future__ import annotations

from dataclasses import dataclass

from motet.benchmarks.claims import Claim
from motet.engine.config import EngineConfig

CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(id="rtf", better="lower", target=0.35, unit="s/s", absolute=True),
        Claim(id="first_audio_ms", better="lower", target=150.0, unit="ms", absolute=True),
        Claim(id="streams", better="higher", target=6, unit="streams", absolute=True),
        Claim(id="codec8", better="higher", target=1.0, unit="x real time"),
        Claim(id="smooth_beside_images", better="higher", target=0.8, unit="pictures/s"),
    )
}
MAX_CODEC_SHARE = 0.08  # of real time, that the codec may cost each of eight streams

SENTENCES = (
    "The old lighthouse keeper climbed the stairs every evening.",
    "He lit the lamp and looked out over the water.",
    "On clear nights he could see the ships far away.",
    "Sometimes a storm came up and the waves beat against the rocks.",
    "Then he stayed awake until morning and watched the light.",
    "In winter the village sent him bread, coffee and letters.",
    "He answered every one of them by hand.",
    "Nobody knew how many years he had lived there.",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `REHEARSAL` only shows that everything runs; its figures mean nothing."""

    rounds: int = 7
    num_sentences: int = 8  # of a passage: some 25 seconds
    streams: tuple[int, ...] = (6, 8, 12, 16, 24, 32, 48, 64)  # tried in turn until one falls behind
    codec_frames: int = 120  # of the coarsest codebook: 10 s each
    num_beside: int = 6  # voices while pictures are painted
    alone_s: float = 8.0  # for so long pictures are painted while nobody speaks
    steps: int = 20
    num_under_way: int = 4  # pictures at any time
    most_heard_s: float = 60.0  # of a passage, for so long pictures are counted at most


REHEARSAL = Sizes(rounds=1, num_sentences=1, streams=(2,), codec_frames=8, num_beside=2, alone_s=0.5, steps=2,
    most_heard_s=1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share. `Server` reads `model`, `engine` and `threads`."""

    model: str
    pictures: str  # a model of the same server
    engine: EngineConfig
    threads: int
    sizes: Sizes

    def passage(self, first: int = 0) -> str:
        """A text that begins with sentence number `first`."""
        at = first % len(SENTENCES)
        return " ".join((*SENTENCES[at:], *SENTENCES[:at])[: self.sizes.num_sentences])
