"""What a text request is, and what comes back. Plain data; routes and the SDK format it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import ErrorInfo
from ..types import FinishReason, SamplingParams, Timing, Usage


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """One request in words. Exactly one of `prompt` (text or ids) and `messages` (a chat) is given."""

    model: str
    prompt: str | list[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # leave the stop string in the text
    n: int = 1
    echo: bool = False  # the caller wants the prompt in front of the answer: PromptInfo.text
    priority: int = 0
    cache_salt: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True  # of text prompts; a chat template writes its own
    truncate_prompt_tokens: int | None = None  # keep the last N prompt tokens; -1: as many as the model takes
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    request_id: str = ""  # made by the server; empty: the frontend makes one


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """Log probability of a token and of the best alternatives, best first. `token` is for display, `bytes` is exact."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int = 0
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """Always the first event that is not a failure. `text` is set for echo, `prompt_logprobs` if asked for.

    `prompt_logprobs` aligns with `token_ids`; its first entry is None.
    """

    num_prompt_tokens: int
    token_ids: list[int]
    prompt_logprobs: list[TextLogprob | None] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of choice `index`, with the tokens it came from; `logprobs` aligns with `token_ids`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TextLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDone:
    """Choice `index` ended. `stop_reason`: the stop string, or the caller's stop id; None for the model's own end.

    `usage` is this choice's; `total_usage` adds choices up with the prompt counted once.
    """

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage = Usage()
    timing: Timing = Timing()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFailed:
    index: int
    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAborted:
    index: int
    reason: str
    usage: Usage = Usage()


TextEvent: TypeAlias = PromptInfo | TextDelta | TextDone | TextFailed | TextAborted
TEXT_TERMINAL = (TextDone, TextFailed, TextAborted)


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Usage of a request from its choices': they share one prompt, so it counts once."""
    usages = list(usages)
    return Usage(
        num_prompt_tokens=max((usage.num_prompt_tokens for usage in usages), default=0),
        num_cached_tokens=max((usage.num_cached_tokens for usage in usages), default=0),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
    )
