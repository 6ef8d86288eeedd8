"""A tiny CSM on disk: 4 codebooks of 20 codes, 50 text tokens, made by `transformers` with weights that give varied codes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
import transformers

NUM_CODES, NUM_CODEBOOKS, NUM_TEXT, END_CODE = 20, 4, 50, 0
END = NUM_CODES  # the primary id that ends an answer
FIRST_TEXT = NUM_CODES + 1

_CODEC = {
    "model_type": "mimi", "hidden_size": 16, "num_filters": 4, "num_residual_layers": 1, "codebook_size": 16,
    "codebook_dim": 8, "num_quantizers": 4, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vector_quantization_hidden_dimension": 8, "upsample_groups": 16,
}  # fmt: skip


@functools.cache
def csm(*, tied: bool = True) -> Path:
    """The folder. `tied`: both decoders read one embedding table, as the published checkpoint does."""
    config = transformers.CsmConfig(
        num_codebooks=NUM_CODEBOOKS, vocab_size=NUM_CODES, text_vocab_size=NUM_TEXT, hidden_size=32,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=1, pad_token_id=0, codebook_pad_token_id=19,
        codebook_eos_token_id=END_CODE, audio_token_id=48, audio_eos_token_id=49, tie_codebooks_embeddings=tied,
        codec_config=_CODEC,
        depth_decoder_config={
            "num_codebooks": NUM_CODEBOOKS, "backbone_hidden_size": 32, "vocab_size": NUM_CODES, "hidden_size": 16,
            "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": NUM_CODEBOOKS + 1,
        },
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.CsmForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("codec_model"):
                parameter.mul_(12.0)
    path = Path(tempfile.mkdtemp(prefix="motet-csm-"))
    model.save_pretrained(path)
    return path


@functools.cache
def reference(*, tied: bool = True) -> transformers.CsmForConditionalGeneration:
    return transformers.CsmForConditionalGeneration.from_pretrained(csm(tied=tied)).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Seeded random text, as primary ids."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(2, NUM_TEXT - 2, (length,), generator=generator) + FIRST_TEXT).tolist()
