"""What a Whisper directory says of its model: sizes, token ids, suppressed ids, alignment heads. Torch-free.

Two kinds of directory: transformers' (config.json, generation_config.json, safetensors) and CTranslate2's (model.bin and
a config.json of lists alone, whose sizes come from the weights).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import ModelLoadError
from .whisper_tokens import WhisperTokens, known_alignment_heads

_MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """Sizes. `heads` and `layers` are the decoder's."""

    num_mels: int
    hidden: int
    heads: int
    layers: int
    encoder_heads: int
    encoder_layers: int
    decoder_ffn: int
    encoder_ffn: int
    vocab_size: int
    num_audio_positions: int = 1500
    num_text_positions: int = 448

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
                raise ModelLoadError(f"{name}: expected a positive whole number, got {str(value)[:40]!r}")
        for heads in (self.heads, self.encoder_heads):
            if self.hidden % heads:
                raise ModelLoadError(f"hidden size {self.hidden} does not divide into {heads} heads")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> WhisperConfig:
        """From a transformers config. Raises ModelLoadError for what this model cannot be."""
        if config.get("activation_function", "gelu") != "gelu":
            raise ModelLoadError(f"activation_function: expected gelu, got {str(config['activation_function'])[:40]!r}")
        if config.get("scale_embedding"):
            raise ModelLoadError("scale_embedding: expected false")
        keys = {
            "num_mels": "num_mel_bins",
            "hidden": "d_model",
            "heads": "decoder_attention_heads",
            "layers": "decoder_layers",
            "encoder_heads": "encoder_attention_heads",
            "encoder_layers": "encoder_layers",
            "decoder_ffn": "decoder_ffn_dim",
            "encoder_ffn": "encoder_ffn_dim",
            "vocab_size": "vocab_size",
            "num_audio_positions": "max_source_positions",
            "num_text_positions": "max_target_positions",
        }
        missing = [key for key in keys.values() if key not in config]
        if missing:
            raise ModelLoadError(f"config.json: no {', '.join(missing)}")
        return cls(**{ours: config[theirs] for ours, theirs in keys.items()})


@dataclass(frozen=True, kw_only=True)
class WhisperRules:
    """Ids a decode must not sample, and the heads that follow the words."""

    suppress_tokens: tuple[int, ...]  # never
    begin_suppress: tuple[int, ...]  # not as the first token
    alignment_heads: tuple[tuple[int, int], ...]  # (layer, head)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file. Raises ModelLoadError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelLoadError(f"{path.name}: larger than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path.name}: not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name}: expected a JSON object")
    return value


def read_rules(
    path: Path, config: WhisperConfig, tokens: WhisperTokens, non_speech: Sequence[int], blank: Sequence[int]
) -> WhisperRules:
    """From generation_config.json, else config.json of either kind, else the tables.

    `non_speech` and `blank` (ids of " ") come from the tokenizer, for a directory that lists nothing.
    """
    told = {**read_json(path / "config.json"), **read_json(path / "generation_config.json")}
    suppress = _ids(told, config, "suppress_tokens", "suppress_ids")
    if suppress is None or -1 in suppress:  # -1 stands for the list of the reference
        suppress = [*(suppress or ()), *non_speech]
    begin = _ids(told, config, "begin_suppress_tokens", "suppress_ids_begin")
    return WhisperRules(
        suppress_tokens=tuple(sorted({*(i for i in suppress if i >= 0), *tokens.never})),
        begin_suppress=tuple(begin) if begin is not None else (*blank, tokens.eot),
        alignment_heads=_heads(told, config),
    )


def _ids(told: Mapping[str, Any], config: WhisperConfig, *names: str) -> list[int] | None:
    for name in names:
        value = told.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) and -1 <= i < config.vocab_size for i in value
        ):
            raise ModelLoadError(f"{name}: expected a list of ids below {config.vocab_size}")
        return value
    return None


def _heads(told: Mapping[str, Any], config: WhisperConfig) -> tuple[tuple[int, int], ...]:
    value = told.get("alignment_heads")
    if value is None:
        value = known_alignment_heads(config.layers, config.heads, config.vocab_size)
    try:
        heads = [(int(layer), int(head)) for layer, head in value]
    except (TypeError, ValueError):
        raise ModelLoadError("alignment_heads: expected a list of [layer, head]") from None
    if not heads or any(not (0 <= layer < config.layers and 0 <= head < config.heads) for layer, head in heads):
        raise ModelLoadError(f"alignment_heads: expected heads of {config.layers} layers of {config.heads} heads")
    return tuple(sorted(set(heads)))
