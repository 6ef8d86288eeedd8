"""Every word of the wire: requests, responses, stream chunks, errors. Typed, so that OpenAPI can be made from it.

Requests forbid unknown fields: a misspelt name is a 400 that names it. Three kinds of known fields:
honoured; harmless (accepted and ignored: they ask for nothing we could fail to give); and unsupported, listed in
`NEUTRAL` with the values that ask for nothing - any other value is refused by name.

Does not know how a request is answered, nor what a tokenizer is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.types import Send

from ..engine.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    MotetError,
    Overloaded,
    Unavailable,
    UnsupportedParameter,
    to_info,
)

# ------------------------------------------------------------------------------------------------------------- errors


class AuthenticationFailed(MotetError):
    code = "invalid_api_key"


class HostNotAllowed(MotetError):
    code = "host_not_allowed"


class OriginNotAllowed(MotetError):
    code = "origin_not_allowed"


class UpgradeRequired(MotetError):
    code = "upgrade_required"


class RouteNotFound(MotetError):
    code = "not_found"


class MethodNotAllowed(MotetError):
    code = "method_not_allowed"


class RequestTimeout(MotetError):
    code = "request_timeout"


class RequestTooLarge(MotetError):
    code = "request_too_large"


class UnsupportedMediaType(MotetError):
    code = "unsupported_media_type"


class HeadersTooLarge(MotetError):
    code = "headers_too_large"


class DeadlineExceeded(MotetError):
    code = "deadline_exceeded"


class InvalidJSON(InvalidRequest):
    code = "invalid_json"


# class -> (HTTP status, type on the wire); a subclass not listed is treated like its parent.
ERRORS: Mapping[type[MotetError], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    InvalidJSON: (400, "invalid_request_error"),
    ContextLengthExceeded: (400, "invalid_request_error"),
    UnsupportedParameter: (400, "invalid_request_error"),
    HostNotAllowed: (400, "invalid_request_error"),
    AuthenticationFailed: (401, "authentication_error"),
    OriginNotAllowed: (403, "invalid_request_error"),
    ModelNotFound: (404, "invalid_request_error"),
    RouteNotFound: (404, "invalid_request_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    RequestTimeout: (408, "timeout"),
    DuplicateRequest: (409, "invalid_request_error"),
    RequestTooLarge: (413, "invalid_request_error"),
    UnsupportedMediaType: (415, "invalid_request_error"),
    UpgradeRequired: (426, "invalid_request_error"),
    Overloaded: (429, "rate_limit_error"),
    HeadersTooLarge: (431, "invalid_request_error"),
    InternalError: (500, "server_error"),
    ModelLoadError: (503, "server_error"),
    Unavailable: (503, "server_error"),
    EngineDead: (503, "server_error"),
    DeadlineExceeded: (504, "server_error"),
    MotetError: (500, "server_error"),
}


class ErrorBody(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct, frozen=True, kw_only=True):
    error: ErrorBody


class WireError(Struct, frozen=True, kw_only=True):
    """An error ready to be sent: status line, body, extra headers."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]
    code: str


def wire_error(error: BaseException, *, overload_status: int = 429) -> WireError:
    """Any exception as status, envelope and headers; of a foreign one only the class is told."""
    info = to_info(error)
    cls: type[MotetError] = type(error) if isinstance(error, MotetError) else InternalError
    status, kind = next(ERRORS[parent] for parent in cls.__mro__ if parent in ERRORS)
    if isinstance(error, Overloaded):
        status = overload_status
    body = encode(ErrorEnvelope(error=ErrorBody(message=info.message, type=kind, param=info.param, code=info.code)))
    headers = []
    if status in (429, 503):
        wait_s = info.retry_after_s if info.retry_after_s is not None else 1.0
        headers = [
            (b"retry-after", b"%d" % max(math.ceil(wait_s), 1)),
            (b"retry-after-ms", b"%d" % max(wait_s * 1e3, 1)),
        ]
    elif status == 401:
        headers = [(b"www-authenticate", b"Bearer")]
    if status in (408, 431):
        headers.append((b"connection", b"close"))
    return WireError(status=status, body=body, headers=headers, code=info.code)


def wire_type(kind: str) -> str:
    """The type on the wire of an error that travels as `ErrorInfo`, by the name of its class."""
    return next((word for cls, (_, word) in ERRORS.items() if cls.__name__ == kind), "server_error")


async def send_error(
    send: Send, error: BaseException, *, overload_status: int = 429, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer a request that has no response yet with the error envelope."""
    wire = wire_error(error, overload_status=overload_status)
    all_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(wire.body)), *wire.headers]
    await send({"type": "http.response.start", "status": wire.status, "headers": all_headers + (headers or [])})
    await send({"type": "http.response.body", "body": wire.body})


# ------------------------------------------------------------------------------------------------- words of requests

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NaturalInt: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
MAX_PROMPTS = 1024
MAX_MESSAGES = 8192

# Known, but unsupported for now: the values (besides null) that ask for nothing. Anything else is refused by name.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "chat_template": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
}


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # harmless: we add no padding
    continuous_usage_stats: bool | None = None  # unsupported


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and plain completions share."""

    model: str = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None

    # Words of vLLM's clients, with its meaning.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    penalty_window: NaturalInt | None = None  # ours: only the last N tokens count for penalties; 0 = all
    ignore_eos: bool | None = None
    min_tokens: NaturalInt | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=262144)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # keep the last N; -1: what fits
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower runs earlier
    return_token_ids: bool | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None  # the caller's own word: metadata only

    # Harmless: accepted, ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    cache_salt: str | None = None  # isolation between tenants is the server's to give, not the client's to ask
    spaces_between_special_tokens: bool | None = None

    # Unsupported unless neutral; see NEUTRAL.
    response_format: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True, kw_only=True):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True, kw_only=True):
    refusal: str


class ImagePart(Struct, tag_field="type", tag="image_url", kw_only=True):
    image_url: Any = None


class AudioPart(Struct, tag_field="type", tag="input_audio", kw_only=True):
    input_audio: Any = None


class VideoPart(Struct, tag_field="type", tag="video_url", kw_only=True):
    video_url: Any = None


class FilePart(Struct, tag_field="type", tag="file", kw_only=True):
    file: Any = None


Part: TypeAlias = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. An assistant's message may come back just as the SDK received it, null fields included."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None  # ignored: earlier thoughts are not shown to the model again
    reasoning_content: str | None = None
    annotations: list[Any] | None = None  # ignored
    tool_calls: list[Any] | None = None  # unsupported unless empty
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    echo: bool | None = None  # unsupported unless false
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # harmless without tools
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None
    documents: Any = None
    chat_template: Any = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: NaturalInt | None = None  # null: 16, as the field has always had it; 0 with echo: score the prompt
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None  # only n itself
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str = "default"
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt; a template writes its own
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str = "default"
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]


# ------------------------------------------------------------------------------------------------ words of responses


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0
    audio_tokens: int = 0


class UsageBody(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class TopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[TokenLogprobBody]
    refusal: None = None


class AnswerMessage(Struct, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


FinishReason: TypeAlias = Literal["stop", "length"]


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobBody | None] | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobBody | None] | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Columns, one entry per token. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[TokenLogprobBody | None] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Both the whole answer and, with partial choices, a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None | UnsetType = UNSET
    system_fingerprint: str | None = None


class PictureCardBody(Struct, frozen=True, kw_only=True):
    """What a model that makes pictures allows. The first of `sizes` is its default, as are the single values.

    `guidance`: "cfg" also takes a negative prompt; "embedded" is a number the model was trained with; "none" is for models
    that take neither. A few-step model takes exactly `steps`.
    """

    sizes: list[str]
    steps: int
    max_steps: int
    few_step: bool
    guidance: Literal["cfg", "embedded", "none"]
    guidance_scale: float
    solver: str
    solvers: list[str]
    max_prompt_chars: int
    takes_image: bool


class ModelBody(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int | None = None  # known once the model is loaded
    capabilities: list[str] = []
    state: str = "unloaded"
    picture: PictureCardBody | UnsetType = UNSET  # of models that make pictures, once loaded


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str


class Health(Struct, frozen=True, kw_only=True):
    status: Literal["ok", "starting", "draining", "engine_down"]
    models: dict[str, str] = {}


class Version(Struct, frozen=True, kw_only=True):
    version: str


# --------------------------------------------------------------------------------------------------- reading, writing

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


def refuse_unsupported(request: Struct) -> None:
    """Raise UnsupportedParameter for the first field that asks for what this server cannot do."""
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == good and type(value) is type(good) for good in neutral):
            raise UnsupportedParameter(f"{name!r} is not supported by this server", param=name)
