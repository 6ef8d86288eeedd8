"""Whisper models for tests: a small random one of transformers, and the packaged tiny.en in transformers' form."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from motet.kernels.linear import as_weight, dequantize
from motet.models.ctranslate2 import CTranslate2WhisperSource
from motet.models.registry import resolve

TINY = resolve("whisper-tiny.en").path


def small_config(**changes: Any) -> Any:
    """A transformers config with few and uneven sizes, over the English vocabulary."""
    from transformers import WhisperConfig

    sizes = {
        "vocab_size": 51864,
        "num_mel_bins": 80,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 160,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    return WhisperConfig(**{**sizes, **changes})


def small_hf(seed: int = 0, **changes: Any) -> Any:
    """A random WhisperForConditionalGeneration in fp32, with weights large enough that layers matter."""
    from transformers import WhisperForConditionalGeneration

    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(small_config(attn_implementation="eager", **changes)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1 and "embed_positions" not in name:
                value.normal_(0, 1.5 / value[0].numel() ** 0.5)
            elif "bias" in name:
                value.normal_(0, 0.1)
    return model


def save_small(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Writes it as a directory that `load_whisper` reads; gives the transformers model."""
    model = small_hf(seed, **changes)
    model.save_pretrained(folder)
    shutil.copy(TINY / "tokenizer.json", folder / "tokenizer.json")
    return model


@lru_cache(maxsize=1)
def tiny_hf() -> Any:
    """The packaged tiny.en as transformers' model in fp32."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    source = CTranslate2WhisperSource(TINY)
    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        attn_implementation="eager",
    )
    model = WhisperForConditionalGeneration(config).eval()
    state = {
        name: dequantize(as_weight(value), torch.float32) if not isinstance(value, torch.Tensor) else value.float()
        for name in source.names()
        if not name.endswith("k_proj.bias")
        for value in [source.get(name)]
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"proj_out.weight"}
    model.tie_weights()
    return model


def speech_like(seconds: float, seed: int = 0) -> torch.Tensor:
    """16 kHz fp32: a buzz with moving formants and pauses; not words, but no silence either."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(int(seconds * 16_000)) / 16_000
    voice = sum(torch.sin(2 * torch.pi * 120 * n * t + n) / n for n in range(1, 20))
    envelope = (torch.sin(2 * torch.pi * 3 * t) + 0.3).clamp_min(0)
    return (0.1 * voice * envelope + 0.003 * torch.randn(t.shape, generator=generator)).float()
