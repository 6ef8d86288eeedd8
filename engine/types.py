"""What crosses the doors of the engine: requests, events, plans and results. All msgspec, no tensors.

Letters: a *position* is an index into a sequence (prompt + output); a *slot* names a sequence in the running batch;
a *block* is a page of the KV cache; a *group* is a set of layers with equal KV needs.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from .errors import ErrorInfo

# --------------------------------------------------------------------------------------------------------- requests


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on its way between processes: raw little-endian bytes with dtype and shape; never pickle.

    `ref` names bytes that lie elsewhere ("shm:NAME"); an empty `ref` means that `data` holds them.
    """

    dtype: Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8"]
    shape: tuple[int, ...]
    data: bytes = b""
    ref: str = ""
    digest: bytes = b""  # blake2b-16 of the bytes; part of cache keys


class EmbeddingSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt embeddings for positions start..start+n; `blob` is [n, hidden]. The ids there are only counted and hashed."""

    start: int
    blob: Blob


class StepMask(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed tokens by output step: `steps[i]` lists half-open id ranges [lo, hi) allowed for output token i.

    After the last step: from the start again if `cycle`, else everything is allowed.
    """

    steps: tuple[tuple[tuple[int, int], ...], ...]
    cycle: bool = False

    def at(self, step: int) -> tuple[tuple[int, int], ...] | None:
        """Ranges for output token `step`, or None when it is unconstrained."""
        if step < len(self.steps):
            return self.steps[step]
        return self.steps[step % len(self.steps)] if self.cycle and self.steps else None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, in the field's usual words. Checked by `engine/sampling.py:check_params`.

    Temperature 0 is greedy. Noise depends on (seed, position) only, never on the batch. `logprobs=k` returns the
    sampled token's log probability and the k best alternatives, before temperature and filters.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int = 0  # the last N tokens count for penalties; 0: all
    logit_bias: dict[int, float] = {}
    allowed: StepMask | None = None
    seed: int | None = None  # the frontend draws one where the caller gave none
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Request(msgspec.Struct, kw_only=True):
    """One request to the core. `request_id` is made by the server; a caller's own id is only metadata."""

    request_id: str
    model: str
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    task: Literal["generate", "pool"] = "generate"
    pooling: Literal["last", "mean"] = "last"  # of the final hidden rows, for task "pool"
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # seconds on the host's monotonic clock from submit; audio due
    cache_salt: str = ""  # set by the server per tenant, never by the client
    embeddings: list[EmbeddingSpan] = []
    open: bool = False  # more input follows through `append`
    attempt: int = 0


# ----------------------------------------------------------------------------------------------------------- events


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one position's token, its rank (1 = best) and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since submit on the host's clock."""

    queue_s: float = 0.0  # until first scheduled
    first_token_s: float = 0.0  # until the first token left the engine (TTFT)
    total_s: float = 0.0


class Event(msgspec.Struct, kw_only=True):
    """Root of events. `seq` counts a request's events from 0 within one attempt."""

    request_id: str
    attempt: int = 0
    seq: int = 0


class Tokens(Event, tag="tokens", kw_only=True):
    """New output tokens. `prompt_logprobs` comes with the first event only (None for position 0)."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0


class Pooled(Event, tag="pooled", kw_only=True):
    """The pooled hidden state [hidden] of a pooling request."""

    output: Blob


FinishReason: TypeAlias = Literal["stop", "length"]


class Done(Event, tag="done", kw_only=True):
    """Terminal: finished as asked. `stop_token` is the id that ended it; it is not among the tokens."""

    finish_reason: FinishReason
    stop_token: int | None = None
    usage: Usage = Usage()
    timing: Timing = Timing()


class Aborted(Event, tag="aborted", kw_only=True):
    """Terminal: ended early by somebody's wish (`reason`: client, disconnect, slow_reader, deadline, shutdown...)."""

    reason: str
    usage: Usage = Usage()


class Failed(Event, tag="failed", kw_only=True):
    """Terminal: ended by an error."""

    error: ErrorInfo


AnyEvent: TypeAlias = Tokens | Pooled | Done | Aborted | Failed
TERMINAL = (Done, Aborted, Failed)


# --------------------------------------------------------------------------------------------------- plans, results


class NewSequence(msgspec.Struct, kw_only=True):
    """A sequence that enters the batch: everything a rank needs to know about it."""

    slot: int
    token_ids: list[int]  # prompt and, after a preemption, the output so far
    num_prompt: int
    block_ids: list[list[int]]  # per group, from the start of the sequence; 0 = null block
    params: SamplingParams
    seed: int
    pool: bool = False
    pooling: Literal["last", "mean"] = "last"
    embeddings: list[EmbeddingSpan] = []


class SequenceStep(msgspec.Struct, kw_only=True):
    """Work for one slot: compute positions start..start+num_tokens, then the draft tree hanging on the last of them.

    `parents[i]` is the index of draft i's parent among the drafts, or -1 for the last known token; parents come
    before children. `sample` is False for a prefill chunk that does not reach the end of the known tokens.
    """

    slot: int
    start: int
    num_tokens: int
    sample: bool
    new_blocks: list[list[int]] = []  # per group, appended to the block table
    append_ids: list[int] = []  # input that came for an open request
    append_embeddings: list[EmbeddingSpan] = []
    drafts: list[int] = []
    parents: list[int] = []


class StepPlan(msgspec.Struct, kw_only=True):
    """One step for the executor, as a diff. Slots in `release` are forgotten before anything else happens."""

    step: int
    release: list[int] = []
    new: list[NewSequence] = []
    steps: list[SequenceStep] = []


class SequenceResult(msgspec.Struct, kw_only=True):
    """What one slot's work gave: 0 tokens for a chunk, 1 for a decode, up to 1 + depth after verification."""

    slot: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # for positions start+1.. of this chunk
    pooled: Blob | None = None
    error: ErrorInfo | None = None  # this sequence alone failed (for example: NaN logits)


class StepResult(msgspec.Struct, kw_only=True):
    step: int
    results: list[SequenceResult] = []
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------------ description


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend needs to know of a loaded model. `source` is the resolved local path (tokenizer, template)."""

    model: str
    kind: str  # "llm"
    source: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = ""
    weight_format: str = ""
    extra: dict[str, Any] = {}
