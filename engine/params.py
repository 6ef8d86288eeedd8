"""What may be asked of the core: limits and checks of requests. Torch-free; frontends and engines use the same ones."""

from __future__ import annotations

import math

from .errors import ContextLengthExceeded, InvalidRequest
from .types import Blob, ModelInfo, Request, SamplingParams

MAX_LOGPROBS = 100
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STEP_MASKS = 65536
MAX_SEED = 2**63 - 1

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}

# field, lowest, highest, what it means
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest, with `param` set, for the first value that makes no sense. O(size of params)."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name}: expected a number in [{low:g}, {high:g}], got {value!r}", param=name)
    if params.top_p == 0:
        raise InvalidRequest("top_p: expected more than 0, got 0", param="top_p")
    if not (math.isfinite(params.repetition_penalty) and 0 < params.repetition_penalty <= 100):
        raise InvalidRequest(
            f"repetition_penalty: expected a number in (0, 100], got {params.repetition_penalty!r}",
            param="repetition_penalty",
        )
    for name, low_int in (("top_k", -1), ("penalty_window", 0), ("min_tokens", 0)):
        value = getattr(params, name)
        if not low_int <= value <= 2**31:
            raise InvalidRequest(f"{name}: expected an integer of {low_int} or more, got {value}", param=name)
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InvalidRequest(f"max_tokens: expected 0 or more, got {params.max_tokens}", param="max_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens: expected at most max_tokens ({params.max_tokens}), got {params.min_tokens}",
            param="min_tokens",
        )
    if params.seed is not None and not -MAX_SEED <= params.seed <= MAX_SEED:
        raise InvalidRequest(f"seed: expected a 64-bit integer, got {params.seed}", param="seed")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequest(f"{name}: expected 0 to {MAX_LOGPROBS}, got {value}", param=name)
    _check_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), MAX_LOGIT_BIAS, vocab_size)
    for bias in params.logit_bias.values():
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise InvalidRequest(f"logit_bias: expected values in [-100, 100], got {bias!r}", param="logit_bias")
    if params.allowed is not None:
        _check_masks(params, vocab_size)


def check_request(request: Request, *, max_model_len: int, vocab_size: int, hidden_size: int) -> None:
    """Raise InvalidRequest for a request that can never run on a model of these sizes."""
    check_params(request.params, vocab_size)
    prompt, num_prompt = request.prompt, len(request.prompt)
    if not prompt and not request.open:
        raise InvalidRequest("prompt: expected at least one token, got an empty prompt", param="prompt")
    if prompt and not (0 <= min(prompt) and max(prompt) < vocab_size):
        wrong = next(i for i in prompt if not 0 <= i < vocab_size)
        raise InvalidRequest(f"prompt: expected token ids in [0, {vocab_size}), got {wrong}", param="prompt")
    check_length(num_prompt, request.params.max_tokens, max_model_len, generates=request.task == "generate")
    for span in request.embeddings:
        check_blob(span.blob)
        shape = span.blob.shape
        if len(shape) != 2 or shape[1] != hidden_size:
            raise InvalidRequest(
                f"prompt embeddings: expected shape [n, {hidden_size}], got {list(shape)}", param="embeddings"
            )
        if span.start < 0 or span.start + shape[0] > num_prompt:
            raise InvalidRequest(
                f"prompt embeddings: expected positions within the prompt of {num_prompt}, got "
                f"{span.start}..{span.start + shape[0]}",
                param="embeddings",
            )


def check_side_ids(request: Request, info: ModelInfo) -> None:
    """Raise InvalidRequest for side ids that are not this model's, or for what a multi-codebook model cannot be asked."""
    if info.num_codebooks == 1:
        if request.side:
            raise InvalidRequest("side: this model has one codebook", param="side")
        return
    # Logits are those of codebook 0 and of the end: ids of text are never among them.
    check_params(request.params, info.num_codes + 1)
    if request.params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: a multi-codebook model has none for text", param="prompt_logprobs")
    width, end = info.num_codebooks - 1, 0
    for span in request.side:
        if span.start < end or span.start + len(span.ids) > len(request.prompt):
            raise InvalidRequest(
                f"side: expected runs in order within the prompt of {len(request.prompt)}, got "
                f"{span.start}..{span.start + len(span.ids)}",
                param="side",
            )
        end = span.start + len(span.ids)
        for ids in span.ids:
            if len(ids) != width or not (0 <= min(ids) and max(ids) < info.num_codes):
                raise InvalidRequest(
                    f"side: expected {width} ids in [0, {info.num_codes}) at each position, got {ids[:40]}",
                    param="side",
                )


def check_blob(blob: Blob) -> None:
    """Raise InvalidRequest when bytes and shape of a tensor disagree, or when its bytes are not here."""
    if blob.ref:
        raise InvalidRequest(f"expected a tensor's bytes, got a reference of kind {blob.ref.split(':')[0]!r}")
    expected = math.prod(blob.shape) * _ITEM_BYTES[blob.dtype]
    if min(blob.shape, default=0) < 0 or len(blob.data) != expected:
        raise InvalidRequest(f"expected {expected} bytes for {blob.dtype} {list(blob.shape)}, got {len(blob.data)}")


def check_length(
    num_prompt: int, max_tokens: int | None, max_model_len: int, *, generates: bool = True, param: str = "prompt"
) -> None:
    """Raise ContextLengthExceeded when prompt and output do not fit the model, with the numbers."""
    room = max_model_len - num_prompt
    if room < (1 if generates and max_tokens != 0 else 0):
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; this model's context is {max_model_len} tokens, output included",
            param=param,
        )
    if generates and max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"max_tokens: expected at most {room} (context {max_model_len} minus prompt {num_prompt}), got {max_tokens}",
            param="max_tokens",
        )


def _check_ids(name: str, ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise InvalidRequest(f"{name}: expected at most {most} entries, got {len(ids)}", param=name)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: expected token ids in [0, {vocab_size}), got {token_id}", param=name)


def _check_masks(params: SamplingParams, vocab_size: int) -> None:
    assert params.allowed is not None
    steps = params.allowed.steps
    if sum(len(ranges) for ranges in steps) > MAX_STEP_MASKS:
        raise InvalidRequest(f"allowed: expected at most {MAX_STEP_MASKS} ranges in all", param="allowed")
    for ranges in steps:
        if not any(max(low, 0) < min(high, vocab_size) for low, high in ranges):
            raise InvalidRequest(
                f"allowed: expected each step to allow at least one id in [0, {vocab_size}), got {list(ranges)}",
                param="allowed",
            )
