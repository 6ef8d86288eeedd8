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
    )
}
LATER = ("smooth_beside_images",)
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


REHEARSAL = Sizes(rounds=1, num_sentences=1, streams=(2,), codec_frames=8)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share. `Server` reads `model`, `engine` and `threads`."""

    model: str
    engine: EngineConfig
    threads: int
    sizes: Sizes

    def passage(self, first: int = 0) -> str:
        """A text that begins with sentence number `first`."""
        at = first % len(SENTENCES)
        return " ".join((*SENTENCES[at:], *SENTENCES[:at])[: self.sizes.num_sentences])
