"""From a model name to a running recogniser: weights, voice detector, sizes, a warm-up. Imports torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.attention import row_width
from ..kernels.linear import has_byte_products
from ..models import loader
from ..models.registry import find
from ..models.speaker import PACKAGED, SpeakerEncoder
from ..models.vad import SileroVAD, VADStreams
from ..models.whisper import Whisper, load_whisper
from .asr_engine import ASREngine, Diarize, ReadSamples
from .config import EngineConfig, HostConfig
from .diarizer import Diarization
from .errors import ModelLoadError
from .load import pick_device, pick_dtype
from .types import AudioRequest, Done, Failed, ModelInfo, Segment, TranscribeOptions

_MAX_STREAMS = 256
_CPU_CACHE_BYTES = 384 << 20


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What "auto" became."""

    device: str
    dtype: str
    num_slots: int
    num_audio: int
    encoder_batch: int
    cache_bytes: int
    weight_bytes: int


def load_asr(
    name: str,
    config: HostConfig,
    report: Callable[[str], None] = lambda phase: None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ASREngine:
    """A warm recogniser. Raises ModelNotFound or ModelLoadError."""
    report("resolve")
    path = loader.resolve(name).path
    device = pick_device(config.engine.device, 0)
    dtype = pick_dtype(config.engine, device)
    report("weights")
    in_bytes = _runs_in_bytes(config.engine, dtype, device)
    model = load_whisper(path, dtype=dtype, device=device, quantize="int8" if in_bytes else None)
    model.cross_int8 = in_bytes
    vad = SileroVAD.load()
    report("cache")
    slots, audio, batch = _sizes(config.engine, model)
    info = ModelInfo(
        model=name,
        kind="asr",
        source=str(path),
        max_model_len=model.config.num_text_positions,
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden,
        eos_token_ids=(model.tokens.eot,),
        dtype=str(dtype).removeprefix("torch."),
        weight_format="int8" if in_bytes else "",
    )
    engine = ASREngine(
        info=info,
        model=model,
        vad=vad,
        streams=VADStreams(vad, _MAX_STREAMS),
        clock=clock,
        num_slots=slots,
        num_audio=audio,
        encoder_batch=batch,
        input_timeout_s=config.engine.input_timeout_s,
        seed=config.engine.seed,
        diarize=_diarize(),
    )
    resolved = Resolved(
        device=str(device),
        dtype=info.dtype,
        num_slots=slots,
        num_audio=audio,
        encoder_batch=batch,
        cache_bytes=engine.decoder.cache_bytes,
        weight_bytes=model.weight_bytes,
    )
    extra = {
        **dataclasses.asdict(resolved),
        "multilingual": model.tokens.multilingual,
        "languages": list(model.tokens.languages) if model.tokens.multilingual else ["en"],
        "diarize": engine.can_diarize,
    }
    engine.info = ModelInfo(**{**{f: getattr(info, f) for f in info.__struct_fields__}, "extra": extra})
    report("warm-up")
    _warm_up(engine)
    report("ready")
    return engine


def _runs_in_bytes(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """8-bit weights and 8-bit keys and values of windows: where asked for, and by itself where that is the faster way.

    On an EPYC Zen 5 ten minutes took tiny.en 2.16 s so and 2.59 s in bfloat16, at the same word error rate; benchmarks/asr.py
    compares. `weights="dequantize"` keeps bfloat16.
    """
    if config.quantize == "int8":
        return True
    wanted = config.quantize == "" and config.weights != "dequantize"
    return wanted and dtype is torch.bfloat16 and device.type == "cpu" and has_byte_products()


def _sizes(config: EngineConfig, model: Whisper) -> tuple[int, int, int]:
    """Text slots, audio slots, windows encoded at once: as many as pay and fit."""
    sizes = model.config
    row = row_width(sizes.head_dim, torch.int8) if model.cross_int8 else sizes.head_dim * model.dtype.itemsize
    window = 2 * sizes.layers * sizes.num_audio_positions * sizes.heads * row  # bytes of one window's keys and values
    if model.device.type == "cuda":
        budget, most, batch = int(torch.cuda.mem_get_info(model.device)[0] * 0.5), 64, 8
    else:
        # More hypotheses at once would not be faster: a decode step reads every window's keys and values.
        budget, most, batch = _CPU_CACHE_BYTES, 24, 1
    audio = max(2, min(most, config.max_num_seqs, budget // window))
    return max(8, 2 * audio), audio, batch  # beams and samples share a window, and their own memory is small


def _diarize() -> Diarize | None:
    """The diarizer's door, with its voice encoder loaded at the first use; None where its weights are not installed."""
    if find(PACKAGED) is None:
        return None
    encoders: list[SpeakerEncoder] = []

    def begin(read: ReadSamples, segments: list[Segment], options: TranscribeOptions) -> Diarization:
        if not encoders:
            encoders.append(SpeakerEncoder.load())
        return Diarization(read, segments, options, encoders[0])

    return begin


def _warm_up(engine: ASREngine) -> None:
    """One window of a quiet tone, so that nobody's first word pays for lazy initialization."""
    tone = (torch.arange(16_000).float() * 0.1).sin() * 0.05
    options = TranscribeOptions(
        vad=False, language="en" if not engine.model.tokens.multilingual else None, temperatures=(0.0,), word_timestamps=True
    )  # fmt: skip
    engine.submit(AudioRequest(request_id="warm-up", model="", options=options, pcm=tone.numpy().tobytes()))
    for _ in range(1000):
        ended = [event for event in engine.step() if isinstance(event, (Done, Failed))]
        if ended and isinstance(ended[0], Failed):
            raise ModelLoadError(f"the model does not run: {ended[0].error.message}")
        if ended:
            return
