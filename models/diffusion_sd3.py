"""Stable Diffusion 3's transformer (Esser et al. 2024; diffusers SD3Transformer2DModel): rows with their own times and captions.

The blocks are diffusers'; ours are the way through them and what happens in their attention: the picture's tokens in front of
the words, as many words as each row has (their lengths go to the attention, never a mask), block by block for step caches. For
one row it computes what SD3Transformer2DModel.forward computes. Places of the picture's tokens are added to them at the start,
cut from the middle of a table; words have none. SD 3.5's blocks with a second attention, over the picture alone, are blocks too.

R rows, L words of the longest caption, T tokens of a picture (p x p latents each), D = H heads of d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.errors import ModelLoadError
from ..kernels.sage_attention import Attention, Backend
from .diffusion import Rows, pad_captions
from .diffusion_attention import attentions


@dataclass(frozen=True, eq=False)
class Trunk:
    """A batch between blocks. `steer` [R, D] goes into every modulation."""

    words: Tensor | None  # [R, L, D]; None behind the last block, which lets them be
    picture: Tensor  # [R, T, D]
    steer: Tensor
    kv_lens: Tensor | None  # int32 [R]: T and each row's words; None: every row has L
    grid: tuple[int, int]


class Sd3Denoiser:
    """A denoiser (models/diffusion.py Denoiser) that runs block by block (engine/step_cache.py BlockModel)."""

    def __init__(self, model: Any, *, scale: int, attention: Backend = "auto") -> None:
        """`model`: SD3Transformer2DModel with its weights, evaluated only; `scale`: pixels of a latent's side.

        The model's attention is ours from then on.
        """
        self.model, self._scale = model, scale
        self._channels, self._patch = model.config.in_channels, model.config.patch_size
        self._blocks: list[Any] = list(model.transformer_blocks)
        for block, of_block in zip(self._blocks, attentions(attention, "sd3", len(self._blocks))):
            block.attn.set_processor(JointAttention(of_block))
        for index, block in enumerate(self._blocks):
            if block.attn2 is not None:
                of_picture = Attention(attention, layer=f"sd3 block {index}, the picture alone")
                block.attn2.set_processor(JointAttention(of_picture))

    def compile(self, backend: str = "inductor") -> None:
        """torch.compile of each kind of block (the last lets the words be, SD 3.5's first ones have two attentions) for all
        sizes, and once more for a lone row."""
        for block in self._blocks:
            block.compile(backend=backend, dynamic=True)

    @property
    def device(self) -> torch.device:
        return self.model.pos_embed.proj.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.pos_embed.proj.weight.dtype  # type: ignore[no-any-return]

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """[C, h, w]. Raises ModelLoadError for a picture that the table of places is too small for."""
        patch, most = self._patch, self.model.config.pos_embed_max_size
        down, across = (side // (patch * self._scale) for side in (height, width))
        if max(down, across) > most:
            side = most * patch * self._scale
            raise ModelLoadError(f"transformer: places for pictures of up to {side}x{side}, not {width}x{height}")
        return (self._channels, patch * down, patch * across)

    def batch_key(self, width: int, height: int) -> Hashable:
        return (width, height)

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        """Billions of floating point operations of a row in a step: matrices, then attention."""
        _, rows, columns = self.latent_shape(width, height)
        of_picture, dim = rows * columns // self._patch**2, self.model.inner_dim
        tokens = of_picture + num_tokens
        total = (24 * dim**2 * tokens + 4 * dim * tokens**2) * len(self._blocks)
        total += (8 * dim**2 * of_picture + 4 * dim * of_picture**2) * sum(b.attn2 is not None for b in self._blocks)
        return float(total / 1e9)

    # ------------------------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """The velocity, noise minus picture: [R, C, h, w]."""
        trunk = self.begin(rows)
        return self.finish(trunk, self.hidden(self.blocks(trunk, 0, None)))

    @torch.inference_mode()
    def begin(self, rows: Rows) -> Trunk:
        model = self.model
        latents = rows.latents.to(self.device, self.dtype)
        words, lengths = pad_captions(rows.conds, self.device, self.dtype)
        ragged = any(len(caption.embeds) != words.shape[1] for caption in rows.conds)
        vectors = [caption.pooled for caption in rows.conds]
        if any(vector is None for vector in vectors):
            raise ValueError("a caption without the vector that steers")
        picture = model.pos_embed(latents).contiguous()
        steer = torch.stack(vectors).to(self.device, self.dtype)  # type: ignore[arg-type]
        return Trunk(
            words=model.context_embedder(words),
            picture=picture,
            steer=model.time_text_embed(rows.times.to(self.device) * 1000, steer),
            kv_lens=lengths + picture.shape[1] if ragged else None,
            grid=(latents.shape[2] // self._patch, latents.shape[3] // self._patch),
        )

    def hidden(self, trunk: Trunk) -> Tensor:
        return trunk.picture

    @torch.inference_mode()
    def indicator(self, trunk: Trunk) -> Tensor:
        """The first block's modulated input, the picture's part: [R, T, D]."""
        signal: Tensor = self._blocks[0].norm1(trunk.picture, emb=trunk.steer)[0]
        return signal

    def select(self, trunk: Trunk, rows: Sequence[int]) -> Trunk:
        picked = torch.tensor(list(rows), device=trunk.picture.device)
        return dataclasses.replace(
            trunk,
            words=None if trunk.words is None else trunk.words[picked],
            picture=trunk.picture[picked],
            steer=trunk.steer[picked],
            kv_lens=None if trunk.kv_lens is None else trunk.kv_lens[picked],
        )

    @torch.inference_mode()
    def blocks(self, trunk: Trunk, start: int, stop: int | None) -> Trunk:
        words, picture = trunk.words, trunk.picture
        for block in self._blocks[start:stop]:
            words, picture = block(
                hidden_states=picture,
                encoder_hidden_states=words,
                temb=trunk.steer,
                joint_attention_kwargs={"kv_lens": trunk.kv_lens},
            )
        return dataclasses.replace(trunk, words=words, picture=picture)

    @torch.inference_mode()
    def finish(self, trunk: Trunk, hidden: Tensor) -> Tensor:
        """Tokens are p x p latents, channel last: [R, T, p * p * C] -> [R, C, h, w]."""
        patch, (down, across) = self._patch, trunk.grid
        out = self.model.proj_out(self.model.norm_out(hidden, trunk.steer))
        latents: Tensor = out.view(len(out), down, across, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
        return latents.reshape(len(out), -1, down * patch, across * patch)


class JointAttention:
    """What diffusers calls a block's attention processor: the picture in front, words behind, key lengths instead of a mask.

    Without words it is the second attention of SD 3.5, over the picture alone.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        kv_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The picture's tokens [R, T, D] and the words [R, L, D], normed and modulated -> what is added to each."""
        if attention_mask is not None:
            raise ValueError("expected key lengths, got a mask")
        heads = (attn.heads, -1)
        q, k, v = (of(hidden_states).unflatten(-1, heads) for of in (attn.to_q, attn.to_k, attn.to_v))
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        if encoder_hidden_states is None:
            return attn.to_out[0](self.attention(q, k, v).flatten(2))  # type: ignore[no-any-return]
        word_q, word_k, word_v = (
            of(encoder_hidden_states).unflatten(-1, heads) for of in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        q = torch.cat([q, _normed(word_q, attn.norm_added_q)], 1)
        k = torch.cat([k, _normed(word_k, attn.norm_added_k)], 1)
        mixed = self.attention(q, k, torch.cat([v, word_v], 1), kv_lens).flatten(2)
        num_tokens = hidden_states.shape[1]
        of_words = mixed[:, num_tokens:]
        if not attn.context_pre_only:
            of_words = attn.to_add_out(of_words)
        return attn.to_out[0](mixed[:, :num_tokens]), of_words


def _normed(heads: Tensor, norm: Any) -> Tensor:
    return heads if norm is None else norm(heads)
