"""Checks a caller's wishes for a transcript against the model, and turns them into ids and samples."""

from __future__ import annotations

import math
from typing import Any

from .decode_job import DecodeOptions
from .decoding_rules import TIMESTAMP_S
from .errors import InvalidRequest
from .recording import SAMPLE_RATE
from .segmenter import SegmenterOptions
from .transcript import WINDOW_SAMPLES
from .types import TranscribeOptions

_MAX_TEMPERATURES = 16
# Samples between a live segment's end and the moment when the silence after it is long enough, if that leaves some of it: its
# text can be had in this time. Three windows of the detector.
_LEAD = 3 * 512


def check_options(options: TranscribeOptions, *, model: Any, num_slots: int, live: bool) -> None:
    """Raises InvalidRequest, naming the field, for what this model cannot do or nobody can."""
    tokens = model.tokens

    def refuse(param: str, message: str) -> InvalidRequest:
        return InvalidRequest(f"{param}: {message}", param=param)

    if options.task == "translate" and not tokens.multilingual:
        raise refuse("task", "this model knows English only and cannot translate")
    if options.language is not None:
        if not tokens.multilingual and options.language != "en":
            raise refuse("language", f"this model knows English only, got {options.language!r}")
        if tokens.multilingual and options.language not in tokens.languages:
            raise refuse("language", f"expected a two-letter code that this model knows, got {options.language[:20]!r}")
    hot = options.temperatures
    if not 1 <= len(hot) <= _MAX_TEMPERATURES or not all(0.0 <= t <= 2.0 for t in hot):
        raise refuse("temperatures", f"expected 1 to {_MAX_TEMPERATURES} numbers in [0, 2]")
    for name in ("beam_size", "best_of"):
        value = getattr(options, name)
        if not 1 <= value <= num_slots:
            raise refuse(name, f"expected 1 to {num_slots}, got {value}")
    if not 0.0 < options.patience <= 10.0:
        raise refuse("patience", f"expected more than 0 and at most 10, got {options.patience}")
    if options.length_penalty is not None and not 0.0 <= options.length_penalty <= 10.0:
        raise refuse("length_penalty", f"expected 0 to 10, got {options.length_penalty}")
    for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
        if math.isnan(getattr(options, name)):
            raise refuse(name, "expected a number")
    if options.suppress_tokens and not all(-1 <= i < model.config.vocab_size for i in options.suppress_tokens):
        raise refuse("suppress_tokens", f"expected token ids below {model.config.vocab_size}")
    if not 0.0 <= options.end_silence_s <= 30.0:
        raise refuse("end_silence_s", f"expected 0 to 30, got {options.end_silence_s}")
    if not 1.0 <= options.max_segment_s <= 30.0:
        raise refuse("max_segment_s", f"expected 1 to 30, got {options.max_segment_s}")
    if not 0.0 <= options.partial_s <= 60.0:
        raise refuse("partial_s", f"expected 0 to 60, got {options.partial_s}")
    if len(options.prompt) > 20_000 or len(options.hotwords) > 20_000:
        raise refuse("prompt", "expected at most 20000 characters")
    if live and options.diarize:
        raise refuse("diarize", "not available for live streams")
    segmenter_options(options, live=live)


def decode_options(options: TranscribeOptions, *, model: Any, alignment: bool) -> DecodeOptions:
    """In ids. The prompt is cut to its end, hotwords to their beginning: together half the decoder's context."""
    most = model.config.num_text_positions // 2 - 1
    encode = model.tokenizer.encode
    hotwords = encode(" " + options.hotwords.strip())[: most // 2] if options.hotwords.strip() else []
    room = most - len(hotwords)
    prompt = encode(" " + options.prompt.strip())[-room:] if options.prompt.strip() else []
    suppress = options.suppress_tokens
    if suppress is not None and -1 in suppress:  # the reference's word for "and the usual ones"
        suppress = tuple(sorted({*model.suppress_tokens, *(i for i in suppress if i >= 0)}))
    return DecodeOptions(
        prompt=(*hotwords, *prompt),
        translate=options.task == "translate",
        timestamps=options.timestamps,
        temperatures=options.temperatures,
        beam_size=options.beam_size,
        patience=options.patience,
        length_penalty=options.length_penalty,
        best_of=options.best_of,
        compression_ratio_threshold=options.compression_ratio_threshold,
        logprob_threshold=options.logprob_threshold,
        no_speech_threshold=options.no_speech_threshold,
        suppress=suppress,
        alignment=alignment,
        max_tokens=model.config.num_text_positions // 2,
    )


def segmenter_options(options: TranscribeOptions, *, live: bool) -> SegmenterOptions:
    """In samples. Raises InvalidRequest."""

    def samples(seconds: float) -> int:
        if not 0.0 <= seconds <= 60.0:
            raise InvalidRequest(f"times of segments lie within 0 and 60 s, got {seconds}", param="min_silence_s")
        return round(seconds * SAMPLE_RATE)

    min_silence = samples(options.end_silence_s if live else options.min_silence_s)
    return SegmenterOptions(
        threshold=options.vad_threshold,
        min_silence=min_silence,
        tail=max(512, -(-min_silence // 512) * 512 - _LEAD) if live else None,
        pad=samples(options.speech_pad_s),
        max_speech=min(samples(options.max_segment_s), WINDOW_SAMPLES),
    )


assert WINDOW_SAMPLES == 1500 * round(TIMESTAMP_S * SAMPLE_RATE)
