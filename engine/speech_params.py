"""How a voice's wishes and a request's become sampling parameters. Torch-free: frontends and the speech engine use the same.

What may be said (masks), what ends it (stop ids) and how long it may be are the voice's own in every phase: no request can
change them, and the end-of-sequence id of the checkpoint's configuration never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..models.speech_format import Phase, Sampling
from .errors import InvalidRequest
from .types import SamplingParams, StepMask


def voice_params(sampling: Sampling, **asked: Any) -> SamplingParams:
    """The voice's own parameters, with what a request asked for (fields of SamplingParams; None: not asked)."""
    own: dict[str, Any] = msgspec.structs.asdict(sampling)
    return SamplingParams(**(own | {name: value for name, value in asked.items() if value is not None}))


def check_append(token_ids: Sequence[int], *, last: bool, is_open: bool, has_other: bool) -> None:
    """Raise InvalidRequest unless this is one more utterance of an open request, or its end; `has_other`: PCM or embeddings."""
    if has_other:
        raise InvalidRequest("append: a voice takes the ids of one utterance", param="pcm")
    if not is_open:
        raise InvalidRequest("append: this request is unknown or takes no more input", param="request_id")
    if not token_ids and not last:
        raise InvalidRequest("append: expected the ids of one utterance, got none", param="token_ids")


def phase_params(
    phase: Phase, mask: StepMask, asked: SamplingParams | None, *, max_tokens: int, seed: int
) -> SamplingParams:
    """Parameters of one phase. `asked` are the request's: they colour the codes; phones are always drawn as the voice says."""
    chosen = asked if asked is not None and phase.name == "codes" else voice_params(phase.sampling)
    return msgspec.structs.replace(
        chosen,
        allowed=mask,
        stop_token_ids=(phase.stop,),
        ignore_eos=True,
        min_tokens=min(phase.min_tokens, max_tokens),
        max_tokens=max_tokens,
        seed=seed,
        logprobs=None,
        prompt_logprobs=None,
    )


def phase_mask(phase: Phase) -> StepMask:
    """The ids that a phase allows, by output token."""
    return StepMask(steps=phase.masks, cycle=True)
