"""Text encoders of the picture families with random weights, and whole folders in diffusers' layout."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from motet.models.diffusion_text import QWEN_TEMPLATE

from ..tiny import lively


def random_weights(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 1 if value.dim() == 1 else 2 * value.shape[-1] ** -0.5
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in name and "bias" not in name else 0.3 * scale * noise)
    return model.eval()


def clip(folder: Path, end: str = "", *, projected: bool = False, width: int = 16, seed: int = 0) -> None:
    """`text_encoder` and `tokenizer` of letters; the end is the padding, as in CLIP's own."""
    letters = [*string.ascii_lowercase, ","]
    words = ["<|startoftext|>", "<|endoftext|>", "!", *letters, *(f"{letter}</w>" for letter in letters)]
    ids = {word: at for at, word in enumerate(words)}
    # The end has the highest id, where old configs (whose end is 2) look for it.
    ids["<|endoftext|>"], ids[words[-1]] = ids[words[-1]], ids["<|endoftext|>"]
    pad = "!" if end == "_2" else "<|endoftext|>"  # as SD3 has it
    CLIPTokenizer(vocab=ids, merges=[], pad_token=pad, model_max_length=77).save_pretrained(folder / f"tokenizer{end}")
    config = CLIPTextConfig(
        vocab_size=len(ids),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=ids["<|startoftext|>"],
        eos_token_id=2 if end == "_2" else ids["<|endoftext|>"],
        pad_token_id=ids[pad],
    )
    model = CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)
    random_weights(model, seed).save_pretrained(folder / f"text_encoder{end}")


def t5(folder: Path, end: str, width: int) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in [*string.ascii_lowercase, ","]]
    T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(folder / f"tokenizer{end}")
    config = T5Config(
        vocab_size=64, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    random_weights(T5EncoderModel(config), 5).save_pretrained(folder / f"text_encoder{end}")


def emoji(folder: Path) -> None:
    """As demo/recipes/emoji_text.py makes it: a word is an id, 16 places."""
    words = ["<pad>", "<s>", "<unk>", "</s>", "a", "red", "apple", "two", "small", "cats", "on", "the", "left"]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    random_weights(CLIPTextModel(config), 0).save_pretrained(folder / "text_encoder")


def qwen(folder: Path) -> None:
    """Bytes, and the template's words so that its start is exactly 34 ids, as Qwen's own is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: at for at, letter in enumerate(alphabet)}
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[])
    tokenizer.add_tokens(marks, special_tokens=True)
    start = QWEN_TEMPLATE.split("{}")[0]
    body = start[len("<|im_start|>") :].split("<|im_end|>")[0]
    step = len(body) // 25
    pieces = [body[at : at + step] for at in range(0, 24 * step, step)] + [body[24 * step :]]
    tokenizer.add_tokens(pieces)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
            "max_position_embeddings": 2048,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "fullatt_block_indexes": [0],
        },
    )
    random_weights(Qwen2_5_VLForConditionalGeneration(config), 0).save_pretrained(folder / "text_encoder")


def sd3(folder: Path) -> None:
    clip(folder, projected=True)
    clip(folder, "_2", projected=True, width=12, seed=1)
    t5(folder, "_3", 40)


def qwen_pipeline(folder: Path) -> Any:
    """Text encoder and tokenizer of `qwen`, and all the rest; 4 x 4 pixels a latent. Saved to the folder."""
    qwen(folder)
    transformer = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], temperal_downsample=[False, True], num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    _enliven(transformer, vae)
    made = QwenImagePipeline(
        scheduler=scheduler,
        vae=vae,
        transformer=transformer,
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder"),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
    )
    return _saved(made, folder)


def sd3_pipeline(folder: Path, *, with_t5: bool = True) -> Any:
    """The encoders of `sd3`, and all the rest; 4 x 4 pixels a latent. Saved to the folder."""
    encoders = folder.parent / f"{folder.name}-encoders"
    sd3(encoders)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=40, caption_projection_dim=32, pooled_projection_dim=28,
        pos_embed_max_size=192,
    )  # fmt: skip
    vae = _autoencoder()
    _enliven(transformer, vae)
    parts: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    for end in ("", "_2"):
        parts[f"text_encoder{end}"] = CLIPTextModelWithProjection.from_pretrained(encoders / f"text_encoder{end}")
        parts[f"tokenizer{end}"] = CLIPTokenizer.from_pretrained(encoders / f"tokenizer{end}")
    if with_t5:
        parts["text_encoder_3"] = T5EncoderModel.from_pretrained(encoders / "text_encoder_3")
        parts["tokenizer_3"] = T5TokenizerFast.from_pretrained(encoders / "tokenizer_3")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _saved(StableDiffusion3Pipeline(scheduler=scheduler, vae=vae, transformer=transformer, **parts), folder)


def flux(folder: Path) -> None:
    clip(folder)
    t5(folder, "_2", 24)


def flux_pipeline(folder: Path, *, guided: bool = True) -> Any:
    """The encoders of `flux`, and all the rest; 4 x 4 pixels a latent. Guided: as FLUX.1-dev, else -schnell."""
    flux(folder)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=16, guidance_embeds=guided, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = _autoencoder()
    shifts: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True} if guided else {"shift": 1.0}
    _enliven(transformer, vae)
    made = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**shifts),
        vae=vae,
        transformer=transformer,
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=T5EncoderModel.from_pretrained(folder / "text_encoder_2"),
        tokenizer_2=T5TokenizerFast.from_pretrained(folder / "tokenizer_2"),
    )
    return _saved(made, folder)


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=4, norm_num_groups=4, layers_per_block=1,
        scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


@torch.no_grad()
def _enliven(transformer: Any, vae: Any) -> None:
    lively(transformer)
    transformer.eval()
    torch.manual_seed(0)
    for value in vae.parameters():
        if value.dim() > 1:
            value.copy_(torch.randn(value.shape) * value[0].numel() ** -0.5)
    vae.eval()


def _saved(pipeline: Any, folder: Path) -> Any:
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
