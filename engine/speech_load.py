"""From a voice's name to a running speech engine: its format, its language model, its codec, warm. Imports torch."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..kernels.linear import has_byte_products
from ..models import loader
from ..models.build import is_ours
from ..models.snac import Snac
from ..models.speech_format import SAMPLE_RATE, SpeechFormat, load_format
from .codec_engine import CodecEngine
from .config import EngineConfig, HostConfig
from .errors import ModelLoadError, MotetError
from .load import load_llm, pick_device, pick_dtype
from .speech_engine import SpeechEngine
from .types import Audio, Done, Failed, ModelInfo, SpeechRequest

_CPU_STREAMS = 64
_CUDA_STREAMS = 512
_LONGEST = 8192  # positions: what speech models were trained on, whatever the text model below them had
_CPU_CONTEXTS = (
    12  # full contexts in the KV cache of a CPU, where no size was asked for: far more streams than it can speak
)


def load_speech(
    name: str,
    config: HostConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    clock: Callable[[], float] = time.monotonic,
    max_streams: int = 0,
) -> SpeechEngine:
    """A warm voice. `max_streams` 0: 64 on a CPU, 512 on CUDA. Raises ModelNotFound or ModelLoadError."""
    report("resolve")
    path = loader.resolve(name).path
    format = load_format(path)
    if format.sample_rate != SAMPLE_RATE:
        raise ModelLoadError(f"codec: expected {SAMPLE_RATE} Hz, got {format.sample_rate}")
    device = pick_device(config.engine.device, 0)
    lm = load_llm(_lm_name(name, path), _lm_config(config.engine, path, device), report=_quiet_end(report), clock=clock)
    _check_ids(format, lm.info.vocab_size)
    report("codec")
    codec = Snac.load(_codec_path(path, format), device=device)
    sizes = codec.config
    if sizes.frame_samples != format.frame_samples or sizes.vq_strides != format.strides:
        raise ModelLoadError(f"codec: expected strides {format.strides}, got {sizes.vq_strides}")
    if sizes.codebook_size != format.size or sizes.sampling_rate != format.sample_rate:
        raise ModelLoadError(
            f"codec: expected {format.size} codes at {format.sample_rate} Hz, got {sizes.codebook_size} at "
            f"{sizes.sampling_rate}"
        )
    streams = max_streams or (_CUDA_STREAMS if device.type == "cuda" else _CPU_STREAMS)
    info = ModelInfo(
        model=name,
        kind="tts",
        source=str(path),
        max_model_len=lm.info.max_model_len,
        vocab_size=lm.info.vocab_size,
        hidden_size=lm.info.hidden_size,
        dtype=lm.info.dtype,
        weight_format=lm.info.weight_format,
        extra={
            **lm.info.extra,
            "family": format.family,
            "voices": list(format.voices),
            "default_voice": format.default_voice,
            "language": format.language,
            "sample_rate": format.sample_rate,
            "max_chars": format.max_chars,
            "tokens_per_s": format.tokens_per_s,
            "max_streams": streams,
            "codec_bytes": codec.num_bytes,
        },
    )
    engine = SpeechEngine(
        info=info,
        lm=lm,
        codec=CodecEngine(codec, max_streams=streams),
        format=format,
        clock=clock,
        max_streams=streams,
        first_frames=sizes.lookahead // sizes.frame_samples + 1,
        input_timeout_s=config.engine.input_timeout_s,
        seed=config.engine.seed,
    )
    report("warm-up")
    _warm_up(engine)
    report("ready")
    return engine


def _lm_name(name: str, path: Path) -> str:
    """What the language model is loaded by: `model.gguf` in the voice's folder, where there is one, else its safetensors."""
    packed = path / "model.gguf"
    return str(packed) if packed.is_file() else name


def _quiet_end(report: Callable[[str], None]) -> Callable[[str], None]:
    """The LM's phases without its "ready": the codec is still to come."""
    return lambda phase: None if phase == "ready" else report(phase)


def _codec_path(path: Path, format: SpeechFormat) -> Path:
    """The codec's folder: inside of the voice's, or another model's."""
    inside = path / format.codec
    if inside.is_dir():
        return inside
    try:
        found = loader.resolve(format.codec).path
    except MotetError as error:
        raise ModelLoadError(
            f"codec: a voice of family {format.family} needs its codec {format.codec[:80]!r}, which is neither a folder "
            f"inside of the voice's nor a model here ({error.message})"
        ) from None
    if not list(found.glob("*.safetensors")):
        raise ModelLoadError(
            f"codec: {format.codec!r} has no safetensors (pickles are never read); put config.json and model.safetensors "
            f"into {inside}"
        )
    return found


def _check_ids(format: SpeechFormat, vocab_size: int) -> None:
    last = max(high for phase in format.phases for ranges in phase.masks for _, high in ranges)
    if last > vocab_size or any(phase.stop >= vocab_size for phase in format.phases):
        raise ModelLoadError(f"speech.json: ids up to {last - 1}, the language model has {vocab_size}")


def _lm_config(config: EngineConfig, path: Path, device: torch.device) -> EngineConfig:
    """A voice's language model: short prompts that need no pacing, no drafts, one device, a context as it was trained with.

    8-bit weights where asked for, and by themselves where a CPU multiplies bytes: on an EPYC Zen 5 a token of one stream took
    0.42 ms so and 0.75 ms in bfloat16, and Whisper heard no more errors (16.1 % and 20.0 % of 230 words). `weights="dequantize"`
    keeps bfloat16.
    """
    raw = loader.read_config(path)
    length = min(config.max_model_len or _LONGEST, int(raw.get("max_position_embeddings") or _LONGEST), _LONGEST)
    changes: dict[str, Any] = {"max_model_len": length, "prefill_slowdown": 0.0, "speculation": "", "tp_size": 1}
    dtype = pick_dtype(config, device, own_products=is_ours(raw))
    plain = config.quantize == "" and config.weights != "dequantize"
    if plain and device.type == "cpu" and dtype is torch.bfloat16 and has_byte_products():
        changes["quantize"] = "int8"
    if device.type == "cpu" and not (config.num_blocks or config.kv_cache_gb):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 8
        changes["kv_cache_gb"] = min(free, _CPU_CONTEXTS * length * _token_bytes(raw, dtype)) / 2**30
    return dataclasses.replace(config, **changes)


def _token_bytes(raw: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes of K and V of one position, by a Llama-shaped config."""
    try:
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        return 2 * int(raw["num_hidden_layers"]) * kv_heads * head_dim * dtype.itemsize
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ModelLoadError(
            "config.json: expected a Llama's sizes (num_hidden_layers, num_attention_heads...)"
        ) from None


def _warm_up(engine: SpeechEngine) -> None:
    """The first sound of one utterance, so that nobody's first word pays for lazy initialization."""
    letters = engine.format.letters
    text = "hello." if letters is None or set("hello.") <= set(letters) else letters.strip()[:3]
    engine.submit(SpeechRequest(request_id="warm-up", model="", utterances=[engine.format.prompt(text)]))
    for _ in range(4000):
        for event in engine.step():
            if isinstance(event, Failed):
                raise ModelLoadError(f"the voice does not run: {event.error.message}")
            if isinstance(event, Done) or (isinstance(event, Audio) and event.pcm):
                engine.abort("warm-up", "client")
                engine.forget_counts()
                return
    raise ModelLoadError("the voice does not run: it made no sound")
