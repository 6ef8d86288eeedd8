"""Qwen-Image's transformer (Qwen team 2025; `diffusers` QwenImageTransformer2DModel): rows with their own times and captions.

The blocks are diffusers'; ours are the way through them and what happens in their attention: words in front of the picture's
tokens, as many as each row has (their lengths go to the attention, never a mask), block by block for step caches. For one row it
computes what QwenImageTransformer2DModel.forward computes; times are embedded in fp32 where diffusers rounds them to the weights'
dtype first. A picture's tokens stand at (0, row, column) around its middle; the words on the diagonal behind it, from a place
that depends on its size alone: so rows of one size share their angles, whatever their captions.

R rows, L words of the longest caption, T = (h / 2) * (w / 2) tokens of a picture, D = H heads of d.
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
from .diffusion_attention import Turn, attend_joint, attentions, turn_pairs
from .diffusion_flux import pack, unpack

# Variants of the class that edit pictures or make layers: they want more than a prompt.
_REFUSED = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


@dataclass(frozen=True, eq=False)
class Trunk:
    """A batch between blocks. `steer` [R, D] goes into every modulation."""

    words: Tensor  # [R, L, D]
    picture: Tensor  # [R, T, D]
    steer: Tensor
    lengths: Tensor | None  # int32 [R]; None: every row has L words
    turns: tuple[Turn, Turn]  # of the words, of the picture's tokens
    grid: tuple[int, int]


class QwenDenoiser:
    """A denoiser (models/diffusion.py Denoiser) that runs block by block (engine/step_cache.py BlockModel)."""

    def __init__(self, model: Any, *, scale: int, attention: Backend = "auto") -> None:
        """`model`: QwenImageTransformer2DModel with its weights, evaluated only; `scale`: pixels of a latent's side.

        The model's attention is ours from then on. Raises ModelLoadError for a variant that takes more than a prompt.
        """
        config = model.config
        refused = [name for name in _REFUSED if config.get(name)]
        if refused:
            raise ModelLoadError(f"transformer: a Qwen-Image with {', '.join(refused)} is not supported")
        self.model, self._scale = model, scale
        self._channels = config.in_channels // 4
        self._blocks: list[Any] = list(model.transformer_blocks)
        for block, of_block in zip(self._blocks, attentions(attention, "qwen-image", len(self._blocks))):
            block.attn.set_processor(JointAttention(of_block))
        self._compiled = False

    def compile(self, backend: str = "inductor") -> None:
        """torch.compile of the block, once for all of them, all sizes and all captions (and once more for a lone row)."""
        self._compiled = True
        for block in self._blocks:
            block.compile(backend=backend, dynamic=True)

    @property
    def device(self) -> torch.device:
        return self.model.img_in.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.img_in.weight.dtype  # type: ignore[no-any-return]

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        return (self._channels, *(2 * (side // (2 * self._scale)) for side in (height, width)))

    def batch_key(self, width: int, height: int) -> Hashable:
        return (width, height)

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        """Billions of floating point operations of a row in a step: matrices, then attention."""
        _, rows, columns = self.latent_shape(width, height)
        tokens, dim = rows * columns // 4 + num_tokens, self.model.inner_dim
        return float((24 * dim**2 * tokens + 4 * dim * tokens**2) * len(self._blocks) / 1e9)

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Guidance as Qwen-Image has it, over predictions [C, h, w]: each token as long as it is with the prompt alone."""
        both = pack(torch.stack([with_prompt, without]))
        guided = both[1] + scale * (both[0] - both[1])
        length = guided.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(guided.dtype).tiny)
        guided = guided * (both[0].norm(dim=-1, keepdim=True) / length)
        return unpack(guided[None], (with_prompt.shape[1] // 2, with_prompt.shape[2] // 2))[0]

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
        grid = (latents.shape[2] // 2, latents.shape[3] // 2)
        of_picture, of_words = model.pos_embed([(1, *grid)], max_txt_seq_len=words.shape[1], device=self.device)
        return Trunk(
            words=model.txt_in(model.txt_norm(words)),
            picture=model.img_in(pack(latents)),
            steer=model.time_text_embed(rows.times.to(self.device), latents),
            # One kind of pass for a compiled block; else nothing is masked where nothing has to be.
            lengths=lengths if ragged or self._compiled else None,
            turns=(_parts(of_words), _parts(of_picture)),
            grid=grid,
        )

    def hidden(self, trunk: Trunk) -> Tensor:
        return trunk.picture

    @torch.inference_mode()
    def indicator(self, trunk: Trunk) -> Tensor:
        """The first block's modulated input, the picture's part: [R, T, D]."""
        first = self._blocks[0]
        before_attention, _ = first.img_mod(trunk.steer).chunk(2, dim=-1)
        signal: Tensor = first._modulate(first.img_norm1(trunk.picture), before_attention)[0]
        return signal

    def select(self, trunk: Trunk, rows: Sequence[int]) -> Trunk:
        picked = torch.tensor(list(rows), device=trunk.picture.device)
        return dataclasses.replace(
            trunk,
            words=trunk.words[picked],
            picture=trunk.picture[picked],
            steer=trunk.steer[picked],
            lengths=None if trunk.lengths is None else trunk.lengths[picked],
        )

    @torch.inference_mode()
    def blocks(self, trunk: Trunk, start: int, stop: int | None) -> Trunk:
        words, picture = trunk.words, trunk.picture
        for block in self._blocks[start:stop]:
            words, picture = block(
                hidden_states=picture,
                encoder_hidden_states=words,
                encoder_hidden_states_mask=None,
                temb=trunk.steer,
                image_rotary_emb=trunk.turns,
                joint_attention_kwargs={"kv_lens": trunk.lengths},
            )
        return dataclasses.replace(trunk, words=words, picture=picture)

    @torch.inference_mode()
    def finish(self, trunk: Trunk, hidden: Tensor) -> Tensor:
        return unpack(self.model.proj_out(self.model.norm_out(hidden, trunk.steer)), trunk.grid)


def _parts(angles: Tensor) -> Turn:
    """Complex numbers of length 1 -> cosines and sines, each in one piece."""
    return angles.real.contiguous(), angles.imag.contiguous()


class JointAttention:
    """What diffusers calls a block's attention processor: words in front, the picture behind, key lengths instead of a mask."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Turn, Turn] | None = None,
        kv_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The picture's tokens [R, T, D] and the words [R, L, D], normed and modulated -> what is added to each."""
        if encoder_hidden_states_mask is not None or attention_mask is not None or image_rotary_emb is None:
            raise ValueError("expected key lengths and angles, got a mask")
        of_words, of_picture = image_rotary_emb
        num_words, heads = encoder_hidden_states.shape[1], (attn.heads, -1)
        words = (
            turn_pairs(attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(-1, heads)), of_words),
            turn_pairs(attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(-1, heads)), of_words),
            attn.add_v_proj(encoder_hidden_states).unflatten(-1, heads),
        )
        picture = (
            turn_pairs(attn.norm_q(attn.to_q(hidden_states).unflatten(-1, heads)), of_picture),
            turn_pairs(attn.norm_k(attn.to_k(hidden_states).unflatten(-1, heads)), of_picture),
            attn.to_v(hidden_states).unflatten(-1, heads),
        )
        q, k, v = (torch.cat(parts, 1) for parts in zip(words, picture))
        mixed = attend_joint(self.attention, q, k, v, kv_lens, hidden_states.shape[1])
        return attn.to_out[0](mixed[:, num_words:]), attn.to_add_out(mixed[:, :num_words])
