"""What the decoder is asked, what it answers, and one try at a window. Data; the work is segment_decoder.py's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .beam_search import BeamSearch, Hypothesis
from .decoding_rules import compression_ratio
from .language_choice import LanguageChoice
from .text_draft import TextDraft


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """One request's way of decoding, checked by its owner. `prompt` are ids that follow start-of-previous."""

    prompt: tuple[int, ...] = ()
    translate: bool = False
    timestamps: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    beam_size: int = 1
    patience: float = 1.0
    length_penalty: float | None = None
    best_of: int = 1
    compression_ratio_threshold: float = 2.4
    logprob_threshold: float = -1.0
    no_speech_threshold: float = 0.6
    suppress: tuple[int, ...] | None = None
    alignment: bool = False  # frames at which the text tokens begin
    max_tokens: int = 224
    provisional: bool = (
        False  # text that will be said again: less silence after the window is encoded, which is cheaper
    )


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A window's transcript. `ids` have timestamps but no eot; `begins` has a frame for each text id and one for the end."""

    ids: list[int]
    logprobs: list[float]
    text: str
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float
    begins: list[int] | None = None
    num_fallbacks: int = 0


@dataclass(kw_only=True, eq=False)
class DecodeJob:
    """One window. `load` gives its samples [n] fp32, n <= 480000, when its turn comes. Lower `key` goes first."""

    owner: Any  # `drop` forgets by it
    load: Callable[[], torch.Tensor]
    num_samples: int
    options: DecodeOptions
    language: LanguageChoice
    seed: int = 0
    priority: int = 0
    due: float = math.inf
    tag: Any = None  # the owner's
    draft: tuple[int, ...] = ()  # ids of an earlier transcript of nearly the same audio: makes greedy decoding faster
    order: int = 0
    audio: int = -1  # its audio slot
    next_temperature: int = 0
    candidates: list[Decoded] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, float, int]:
        return self.priority, self.due, self.order


@dataclass(kw_only=True, eq=False)
class Finished:
    """A job's end: its transcript, or the error that ended it alone."""

    job: DecodeJob
    result: Decoded | None = None
    error: Exception | None = None


@dataclass(kw_only=True, eq=False)
class Attempt:
    """One try: `purpose` is "detect" (one row: which language), "decode", or "align" (all rows again, for word times)."""

    job: DecodeJob
    purpose: str
    slots: list[int]
    prompt: list[int]
    sot: int = 0  # index of start-of-transcript within the prompt
    temperature: float = 0.0
    fed: bool = False  # the prompt has been computed
    hypotheses: list[Hypothesis] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    looped: bool = False
    beams: BeamSearch | None = None
    no_speech_prob: float = 0.0
    chosen: Decoded | None = None
    broken: bool = False
    moved: list[tuple[int, int]] = field(default_factory=list)  # slots to copy: (from, to)
    draft: TextDraft | None = None  # greedy decoding only
    offered: list[int] = field(default_factory=list)  # of the draft, computed in this step

    @property
    def live(self) -> list[Hypothesis]:
        return self.beams.live if self.beams is not None else self.hypotheses

    def rows(self) -> list[tuple[int, int, list[int]]]:
        """What is computed next: (slot, first position, ids)."""
        if not self.fed:
            return [(self.slots[0], 0, [*self.prompt, *self.offered])]
        return [
            (self.slots[at], len(self.prompt) + len(h.ids) - 1, [*h.ids[-1:], *self.offered])
            for at, h in enumerate(self.live)
            if self.beams is not None or self.open[at]
        ]

    def follow(self, parents: list[int]) -> None:
        """Slots for beams that have these parents: the first child stays in its parent's, others get `moved` there."""
        old = self.slots
        slots = [-1] * len(parents)
        taken: set[int] = set()
        for at, parent in enumerate(parents):
            if parent not in taken:
                taken.add(parent)
                slots[at] = old[parent]
        spare = [slot for slot in old if slot not in slots]
        self.moved = []
        for at, parent in enumerate(parents):
            if slots[at] < 0:
                slots[at] = spare.pop()
                self.moved.append((old[parent], slots[at]))
        self.slots = [*slots, *spare]

    @property
    def width(self) -> int:
        """Text slots it needs."""
        return self.job.options.beam_size if self.beams is not None else max(1, len(self.hypotheses))

    @property
    def noise_seed(self) -> int:
        """A draw depends on the window and its temperature (and the sample's number); never on the batch."""
        return (self.job.seed * 1_000_003 + self.job.next_temperature * 1009) & 0x7FFF_FFFF_FFFF_FFFF


def shortened(decoded: Decoded, ids: list[int], text: str) -> Decoded:
    """The transcript with its first `ids` alone."""
    logprobs = decoded.logprobs[: len(ids)]
    return dataclasses.replace(
        decoded,
        ids=ids,
        logprobs=logprobs,
        text=text,
        avg_logprob=sum(logprobs) / (len(ids) + 1),
        compression_ratio=compression_ratio(text),
    )
