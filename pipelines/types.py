"""What the SDK takes and gives: plain frozen dataclasses, no tensors, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from ..engine.frontend.events import TextLogprob
from ..engine.types import SamplingParams, Timing, Usage

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt: TypeAlias = str | Sequence[Message]
Prompts: TypeAlias = list[str] | list[Sequence[Message]] | list[list[dict[str, Any]]] | list[list[dict[str, str]]]


class ChatOptions(TypedDict, total=False):
    """What one answer may be asked for by keyword; the names and meanings of `SamplingParams`, and those of text."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    penalty_window: int
    logit_bias: dict[int, float]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    params: SamplingParams  # all of them at once; single keywords win over it
    stop: str | Sequence[str]  # the answer ends before the first of these texts
    system: str  # a system message put in front of the prompt
    priority: int  # lower runs earlier


@dataclass(frozen=True, kw_only=True)
class ChatTiming:
    """Seconds, as the engine saw them. `tokens_per_s` counts the tokens after the first."""

    queue_s: float
    ttft_s: float
    total_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, timing: Timing, usage: Usage) -> ChatTiming:
        decoding_s = timing.total_s - timing.first_token_s
        num_decoded = usage.num_output_tokens - 1
        return cls(
            queue_s=timing.queue_s,
            ttft_s=timing.first_token_s,
            total_s=timing.total_s,
            tokens_per_s=num_decoded / decoding_s if num_decoded > 0 and decoding_s > 0 else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class ChatResult:
    """A whole answer. Prints as its text.

    `finish_reason` is "stop" (end of turn, a stop text or id, named by `stop_reason`) or "length".
    `token_ids` are the ids behind `text`; `logprobs` holds one entry per token when `logprobs=k` was asked.
    """

    text: str
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timing: ChatTiming
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] | None = None

    def __str__(self) -> str:
        return self.text
