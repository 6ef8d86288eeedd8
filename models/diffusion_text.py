"""Prompts -> captions: the text encoders of the picture families, run as diffusers' own pipelines run them.

What a caption is differs by family:

  ClipCaptions   motet-emoji: a CLIP text model's words up to the caption's end, and its vector at the end
  FluxCaptions   T5's words, always 512 of them: Flux was trained with the padding as if it were text, and so it is fed;
                 CLIP's vector of the first 77 tokens
  Sd3Captions    the words of two CLIPs side by side, 77 with padding, then T5's 256 with padding; both CLIPs' vectors
  QwenCaptions   a language model's hidden states of the prompt in a template, without the template's start; no vector

Where two encoders read one prompt, the short-sighted one (CLIP, 77 tokens) reads its beginning, as in the pipelines; a prompt
that the far-sighted one cannot read whole is refused, where the pipelines cut it. Unknown prompts of one call run as one batch.
A caption never keeps its batch alive, and never depends on it: the encoders are causal, or padded to one length.

Calls may come from any thread; a tokenizer answers one at a time (the fast ones raise "Already borrowed" otherwise).
Nothing is downloaded, unpickled or run from a model's folder.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..engine.errors import InvalidRequest, ModelLoadError
from .diffusion import Caption

CLIP_TOKENS = 77
FLUX_TOKENS = 512
SD3_TOKENS = 256
QWEN_TOKENS = 1024
# Qwen-Image's prompt as it was trained; the first 34 ids are this text up to the prompt, and are dropped.
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_DROPPED = 34


class _Tokens:
    """One tokenizer of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        path = _part(folder, name)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever it is: broken JSON, missing files, unknown classes
            raise ModelLoadError(f"{name}: not a tokenizer that can be read ({type(error).__name__})") from error
        if self._tokenizer.pad_token_id is None:
            raise ModelLoadError(f"{name}: expected a pad token, got none")
        self._lock = threading.Lock()

    def ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """With the tokenizer's start and end, of any length."""
        with self._lock:
            found: list[list[int]] = self._tokenizer(list(prompts), verbose=False)["input_ids"]
        return found

    def side_by_side(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """int64 [B, Lmax], padded at the right."""
        longest = max(len(row) for row in ids)
        padding = self._tokenizer.pad_token_id
        return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in ids])

    def of_length(self, prompts: Sequence[str], length: int) -> Tensor:
        """int64 [B, length], padded, or cut with the end kept."""
        with self._lock:
            found = self._tokenizer(
                list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )
        ids: Tensor = found["input_ids"]
        return ids


def _part(folder: Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_dir():
        raise ModelLoadError(f"{Path(folder).name}: expected a folder {name}, got none")
    return path


_reading = threading.Lock()  # transformers patches torch's initializers meanwhile


def _encoder(cls: Any, folder: Path, name: str, device: torch.device, dtype: torch.dtype, **how: Any) -> Any:
    """A `transformers` model of safetensors, to be run only. Raises ModelLoadError when a weight is missing or misshapen.

    It is read in fp32 and cast afterwards: for any other dtype `from_pretrained` sets torch's default dtype, which is the whole
    process's, while other engines load and run; of two at once the second even restores what the first had set.
    """
    path = _part(folder, name)
    with _reading:
        model = _read(cls, path, name, how)
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype is torch.float16 else set()
    for parameter_name, parameter in model.named_parameters():
        if not kept & set(parameter_name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)


def _read(cls: Any, path: Path, name: str, how: dict[str, Any]) -> Any:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, told = cls.from_pretrained(
            path,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told instead of raised, so that they can be named
            **how,
        )
    except Exception as error:
        raise ModelLoadError(f"{name}: not a {cls.__name__} that can be read ({type(error).__name__})") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    for what in ("missing", "mismatched"):
        names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in told[f"{what}_keys"])
        if names:
            raise ModelLoadError(f"{name}: {len(names)} {what} weights, first {', '.join(names[:5])}")
    return model


def _refuse_longer(ids: Sequence[Sequence[int]], most: int) -> None:
    longest = max(len(row) for row in ids)
    if longest > most:
        raise InvalidRequest(f"prompt: expected at most {most} tokens, got {longest}", param="prompt")


class ClipCaptions:
    """`text_encoder` (CLIPTextModel) and `tokenizer`: words [L, D] of the caption's own length, vector [D] at its end.

    An empty prompt is a caption too, of a start and an end: the unconditional one. Words that the tokenizer does not know
    become its unknown id.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ModelLoadError."""
        from transformers import CLIPTextModel

        self._tokens = _Tokens(folder, "tokenizer")
        self._encoder = _encoder(CLIPTextModel, folder, "text_encoder", device, dtype)
        self._device = device
        self.max_tokens: int = self._encoder.config.max_position_embeddings  # with start and end

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> list[Caption]:
        """Raises InvalidRequest for more tokens than the encoder has places for."""
        ids = self._tokens.ids(prompts)
        _refuse_longer(ids, self.max_tokens)
        # CLIP is causal: padding at the right reaches no word before it, and needs no mask.
        out = self._encoder(input_ids=self._tokens.side_by_side(ids).to(self._device))
        words, vectors = out.last_hidden_state, out.pooler_output
        return [Caption(words[row, : len(of)].clone(), vectors[row].clone()) for row, of in enumerate(ids)]


class FluxCaptions:
    """`text_encoder` (CLIPTextModel) and `text_encoder_2` (T5EncoderModel): words [512, D] of T5, vector [P] of CLIP.

    Padding is attended to, in T5 and later in Flux: FluxPipeline gives neither a mask.
    """

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, *, max_tokens: int = FLUX_TOKENS
    ) -> None:
        """Raises ModelLoadError."""
        from transformers import CLIPTextModel, T5EncoderModel

        self._clip_tokens, self._t5_tokens = _Tokens(folder, "tokenizer"), _Tokens(folder, "tokenizer_2")
        self._clip = _encoder(CLIPTextModel, folder, "text_encoder", device, dtype)
        self._t5 = _encoder(T5EncoderModel, folder, "text_encoder_2", device, dtype)
        self._device = device
        self._clip_length = min(CLIP_TOKENS, self._clip.config.max_position_embeddings)
        self.max_tokens = max_tokens

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> list[Caption]:
        """Raises InvalidRequest for more than `max_tokens` of T5."""
        _refuse_longer(self._t5_tokens.ids(prompts), self.max_tokens)
        clip_ids = self._clip_tokens.of_length(prompts, self._clip_length).to(self._device)
        vectors = self._clip(input_ids=clip_ids).pooler_output
        t5_ids = self._t5_tokens.of_length(prompts, self.max_tokens).to(self._device)
        words = self._t5(input_ids=t5_ids).last_hidden_state
        return [Caption(words[row].clone(), vectors[row].clone()) for row in range(len(prompts))]


class Sd3Captions:
    """Three encoders: `text_encoder`, `text_encoder_2` (CLIPTextModelWithProjection), `text_encoder_3` (T5EncoderModel).

    Words [77 + 256, D]: both CLIPs' last but one layer side by side, zeros up to T5's width, then T5's; padding is attended to,
    as StableDiffusion3Pipeline has it. Vector: both CLIPs' projections. Without `text_encoder_3` its words are zeros, and the
    width is read from `transformer/config.json`.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, *, max_tokens: int = SD3_TOKENS) -> None:
        """Raises ModelLoadError."""
        from transformers import CLIPTextModelWithProjection, T5EncoderModel

        self._tokens, self._tokens_2 = _Tokens(folder, "tokenizer"), _Tokens(folder, "tokenizer_2")
        self._clip = _encoder(CLIPTextModelWithProjection, folder, "text_encoder", device, dtype)
        self._clip_2 = _encoder(CLIPTextModelWithProjection, folder, "text_encoder_2", device, dtype)
        self._t5_tokens: _Tokens | None = None
        self._t5: Any = None
        if (Path(folder) / "text_encoder_3").is_dir():
            self._t5_tokens = _Tokens(folder, "tokenizer_3")
            self._t5 = _encoder(T5EncoderModel, folder, "text_encoder_3", device, dtype)
            self._width: int = self._t5.config.d_model
        else:
            self._width = _joint_width(folder)
        self._device, self._dtype = device, dtype
        self._num_t5 = max_tokens
        places = (clip.config.max_position_embeddings for clip in (self._clip, self._clip_2))
        self._clip_length = min(CLIP_TOKENS, *places)
        self.max_tokens = max_tokens if self._t5 is not None else self._clip_length

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> list[Caption]:
        """Raises InvalidRequest for more than `max_tokens` of T5, or of CLIP where there is no T5."""
        far_sighted = self._t5_tokens or self._tokens
        _refuse_longer(far_sighted.ids(prompts), self.max_tokens)
        clip_words, vectors = [], []
        for tokens, clip in ((self._tokens, self._clip), (self._tokens_2, self._clip_2)):
            ids = tokens.of_length(prompts, self._clip_length).to(self._device)
            out = clip(input_ids=ids, output_hidden_states=True)
            clip_words.append(out.hidden_states[-2])
            vectors.append(out.text_embeds)
        words = torch.zeros(
            len(prompts), self._clip_length + self._num_t5, self._width, device=self._device, dtype=self._dtype
        )
        seen = torch.cat(clip_words, -1)
        words[:, : self._clip_length, : seen.shape[-1]] = seen
        if self._t5_tokens is not None:
            ids = self._t5_tokens.of_length(prompts, self._num_t5).to(self._device)
            words[:, self._clip_length :] = self._t5(input_ids=ids).last_hidden_state
        vector = torch.cat(vectors, -1)
        return [Caption(words[row].clone(), vector[row].clone()) for row in range(len(prompts))]


def _joint_width(folder: Path) -> int:
    """Numbers of a word, as the denoiser takes them."""
    try:
        width = json.loads((_part(folder, "transformer") / "config.json").read_text())["joint_attention_dim"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError("transformer/config.json: expected joint_attention_dim, as there is no T5") from error
    if not isinstance(width, int) or not 0 < width <= 1 << 16:
        raise ModelLoadError("transformer/config.json: joint_attention_dim is not a width")
    return width


class QwenCaptions:
    """`text_encoder` (Qwen2.5-VL) and `tokenizer`: the last hidden states [L, D] of the prompt and the template's end.

    Of Qwen2.5-VL only the language model is loaded: no pictures are read here, and no words are written.
    """

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, *, max_tokens: int = QWEN_TOKENS
    ) -> None:
        """Raises ModelLoadError."""
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

        self._tokens = _Tokens(folder, "tokenizer")

        class LanguageModel(Qwen2_5_VLTextModel):  # type: ignore[misc]
            _keys_to_ignore_on_load_unexpected = [r"visual\.", r"^lm_head\."]

        # Checkpoints before transformers 4.52 have model.*, later ones model.language_model.*.
        names = {r"^model\.language_model\.": "", r"^model\.(?!visual\.)": ""}
        self._encoder = _encoder(LanguageModel, folder, "text_encoder", device, dtype, key_mapping=names)
        self._device = device
        self.max_tokens = max_tokens

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> list[Caption]:
        """Raises InvalidRequest for more than `max_tokens` behind the template's start."""
        ids = self._tokens.ids([QWEN_TEMPLATE.format(prompt) for prompt in prompts])
        _refuse_longer([row[QWEN_DROPPED:] for row in ids], self.max_tokens)
        # Causal, and padded at the right: no word sees padding, so none needs a mask.
        words = self._encoder(input_ids=self._tokens.side_by_side(ids).to(self._device)).last_hidden_state
        return [Caption(words[row, QWEN_DROPPED : len(of)].clone()) for row, of in enumerate(ids)]
