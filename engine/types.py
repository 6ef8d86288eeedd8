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


class SideIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of the other codebooks for positions start..start+n of a multi-codebook model: `ids` is [n][codebooks - 1].

    They are part of what a position is: its K and V, and with them the keys of cached blocks, depend on them.
    """

    start: int
    ids: list[list[int]]


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


class Request(msgspec.Struct, kw_only=True, tag="tokens"):
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
    side: list[SideIds] = []  # of prompt positions that hold audio, for multi-codebook models
    open: bool = False  # more input follows through `append`
    attempt: int = 0


class TranscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How speech becomes text. Times are seconds. Defaults are those of the reference implementation's long-form mode."""

    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None  # two-letter code; None: detected on speech
    prompt: str = ""  # text that may have come before; given to every chunk
    hotwords: str = ""  # words likely to occur; given to every chunk
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # the next one is tried where a guard fails
    beam_size: int = 1  # at temperature 0
    patience: float = 1.0
    length_penalty: float | None = None  # None: plain average
    best_of: int = 1  # samples at temperature > 0
    compression_ratio_threshold: float = 2.4
    logprob_threshold: float = -1.0
    no_speech_threshold: float = 0.6
    suppress_tokens: tuple[int, ...] | None = None  # None: the model's own list
    word_timestamps: bool = False
    timestamps: bool = True
    vad: bool = True
    vad_threshold: float = 0.5
    min_silence_s: float = 0.16  # of files; live streams end a segment after `end_silence_s`
    end_silence_s: float = 0.5
    speech_pad_s: float = 0.4
    max_segment_s: float = 29.0
    partial_s: float = 0.0  # live: seconds between partial results; 0: none
    seed: int = 0
    diarize: bool = False
    num_speakers: int | None = None
    known_speakers: tuple[tuple[str, bytes], ...] = ()  # name, its voice as float32 PCM at 16 kHz


class AudioRequest(msgspec.Struct, kw_only=True, tag="audio"):
    """One request to a recogniser. Audio is 16 kHz mono PCM, little-endian: "f32" in [-1, 1] or "s16".

    A file comes whole in `pcm`, or with `in_pieces` through `append(pcm=..., last=...)`; it is heard while it comes and decoded
    when all is there. A live stream starts with `open=True` and grows through `append` too.
    """

    request_id: str
    model: str
    options: TranscribeOptions = TranscribeOptions()
    pcm: bytes = b""
    encoding: Literal["f32", "s16"] = "f32"
    open: bool = False
    in_pieces: bool = False
    priority: int = 0
    deadline: float | None = None
    attempt: int = 0


class SpeechRequest(msgspec.Struct, kw_only=True, tag="speech"):
    """One request to a voice. Each utterance (a sentence or so) is a prompt of its own, made by the frontend
    (engine/frontend/speech.py): those known at once lie in `utterances`; with `open` each later one is an `append`.

    Utterances are spoken in their order, each as soon as it can be. A frontend appends the next one when its reader has
    taken most of what was spoken, which is what bounds the audio under way.
    """

    request_id: str
    model: str
    utterances: list[list[int]] = []
    params: SamplingParams | None = (
        None  # None: the voice's own; masks, stop ids and length limits are always the voice's
    )
    priority: int = 0
    deadline: float | None = None  # seconds from submit to the first audio; None: the engine's own goal
    cache_salt: str = ""
    open: bool = False
    attempt: int = 0


class ImageRequest(msgspec.Struct, kw_only=True, tag="image_request"):
    """One request for pictures. Zero, "" and None mean: the model's own (its card says which: `ModelInfo.extra`).

    Picture i of `n` is made from seed `seed + i`, from noise drawn on the CPU: the same seed makes the same picture whatever
    runs beside it (up to the last bits of a batched matrix product), alone or as one of `n`. With `image`, uint8 [H, W, 3]
    of the size asked for, the picture begins as that one with noise added: `strength` 1 forgets it, near 0 keeps it.
    """

    request_id: str
    model: str
    prompt: str
    negative_prompt: str = ""
    width: int = 0
    height: int = 0
    num_steps: int = 0
    guidance_scale: float | None = None
    seed: int = 0  # the frontend draws one where the caller gave none
    n: int = 1
    solver: str = ""
    strength: float = 0.8  # only with `image`
    image: Blob | None = None
    preview_every: int = 0  # steps between previews; 0: none
    priority: int = 0
    deadline: float | None = (
        None  # seconds from submit; waiting longer to be started raises the priority, nothing is dropped
    )
    attempt: int = 0


AnyRequest: TypeAlias = Request | AudioRequest | SpeechRequest | ImageRequest


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
    """New output tokens. `prompt_logprobs` comes with the first event only (None for position 0).

    `side_ids`, of multi-codebook models only, has one list of codebooks 1.. for each of `token_ids` (codebook 0).
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    side_ids: list[list[int]] | None = None


class Pooled(Event, tag="pooled", kw_only=True):
    """The pooled hidden state [hidden] of a pooling request."""

    output: Blob


class Word(msgspec.Struct, kw_only=True):
    """A spoken word with its times in seconds from the start of the audio; `word` keeps its leading space."""

    word: str
    start: float
    end: float
    probability: float
    speaker: str | None = None


class Segment(msgspec.Struct, kw_only=True):
    """A final piece of transcript. `seek` is the start of its window in frames of 10 ms, as in the reference."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0
    seek: int = 0
    words: list[Word] | None = None
    speaker: str | None = None
    language: str = ""


class Recognized(Event, tag="recognized", kw_only=True):
    """Final segments, in order of time. `language` and its probability are those detected or asked for.

    With this event all text of the first `upto` seconds has been told; no segment that begins before will come.
    """

    segments: list[Segment]
    language: str = ""
    language_probability: float = 1.0
    upto: float = 0.0


class Partial(Event, tag="partial", kw_only=True):
    """Live: `committed` was agreed on and will not change (append it); `tentative` may still change."""

    committed: str
    tentative: str = ""
    start: float = 0.0


class Speech(Event, tag="speech", kw_only=True):
    """Live: speech began or ended at `sample` (16 kHz) of the stream. `upto` is that of `Recognized`."""

    what: Literal["started", "stopped"]
    sample: int
    upto: float = 0.0


class Audio(Event, tag="audio", kw_only=True):
    """Speech that was made: mono 16-bit little-endian PCM at 24 kHz, the next piece of utterance number `utterance`."""

    pcm: bytes
    utterance: int = 0
    last: bool = False  # the utterance ends with this piece (which may be empty)


class Denoising(Event, tag="denoising", kw_only=True):
    """Picture `index` has `step` of `num_steps` steps behind it. `preview`, uint8 [H, W, 3], is what it looks like so far;
    it may come a few steps late, with the step at which it was taken."""

    step: int
    num_steps: int
    index: int = 0
    preview: Blob | None = None


class Picture(Event, tag="picture", kw_only=True):
    """A finished picture, uint8 [H, W, 3], and the seed that makes it again alone."""

    index: int
    seed: int
    image: Blob


FinishReason: TypeAlias = Literal["stop", "length"]


class Done(Event, tag="done", kw_only=True):
    """Terminal: finished as asked. `stop_token` is the id that ended it; it is not among the tokens."""

    finish_reason: FinishReason
    stop_token: int | None = None
    usage: Usage = Usage()
    timing: Timing = Timing()
    audio_s: float = 0.0  # seconds of audio heard (recognisers) or made (voices)


class Aborted(Event, tag="aborted", kw_only=True):
    """Terminal: ended early by somebody's wish (`reason`: client, disconnect, slow_reader, deadline, shutdown...)."""

    reason: str
    usage: Usage = Usage()


class Failed(Event, tag="failed", kw_only=True):
    """Terminal: ended by an error."""

    error: ErrorInfo


AnyEvent: TypeAlias = (
    Tokens | Pooled | Recognized | Partial | Speech | Audio | Denoising | Picture | Done | Aborted | Failed
)
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
    side: list[SideIds] = []  # of multi-codebook models: the prompt's and, after a preemption, the output's


class SequenceStep(msgspec.Struct, kw_only=True):
    """Work for one slot: compute positions start..start+num_tokens, then the draft tree hanging on the last of them.

    `parents[i]` is the index of draft i's parent among the drafts, or -1 for the last known token; parents come
    before children. `sample` is False for a prefill chunk that does not reach the end of the known tokens.

    With `layers` = (first, end) the positions pass these layers alone in this step. Steps of the same positions follow until
    `end` is the number of layers; only then are they computed.
    """

    slot: int
    start: int
    num_tokens: int
    sample: bool
    layers: tuple[int, int] | None = None
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
    side_ids: list[list[int]] | None = None  # of multi-codebook models: codebooks 1.. of each of `token_ids`
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
    num_codebooks: int = 1  # ids of one position; more than 1: Tokens carry side ids
    num_codes: int = 0  # of multi-codebook models: ids of one codebook; primary ids above `num_codes` are text
    extra: dict[str, Any] = {}
