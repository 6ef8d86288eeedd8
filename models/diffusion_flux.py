"""Flux's transformer (Black Forest Labs 2024; `diffusers` FluxTransformer2DModel): rows with their own times and captions.

The weights are diffusers' modules, the way through them is ours: blocks can be run one by one (step caches), captions are
ragged (their lengths go to the attention, never a mask), each row has its own time. For one row it computes what
FluxTransformer2DModel.forward computes; times are embedded in fp32 where diffusers rounds them to the weights' dtype first.

Small networks on a CPU go through all blocks in one call (kernels/joint_blocks.py), where that computes what `_double` and
`_single` do; their modulation is one product for all blocks.

R rows, L words of the longest caption, T = (h / 2) * (w / 2) tokens of a picture, D = H heads of d.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.joint_blocks import JointBlocks, Stream, can_run, expanded
from ..kernels.sage_attention import Backend
from .diffusion import Caption, Rows, pad_captions
from .diffusion_attention import Turn, attend_joint, attentions, grid_angles, modulated, rms_heads, turn_pairs

_MAX_TIMES = 1024  # values that are kept


@dataclass(frozen=True, eq=False)
class Trunk:
    """A batch between blocks. `tokens` [R, L + T, D], words in front; `steer` [R, D] goes into every modulation.

    `mods`, of networks whose blocks are one call: every block's modulation, and the output's, fp32 [R, M]; tokens are fp32 then.
    """

    tokens: Tensor
    steer: Tensor
    mods: Tensor | None
    lengths: Tensor | None  # int32 [R]; None: every row has L words
    num_words: int
    turn: Turn  # of the picture's tokens
    grid: tuple[int, int]


def _parts(steer: Tensor, linear: nn.Module, count: int) -> list[Tensor]:
    """A block's modulation: `count` tensors [R, 1, D]."""
    return [part[:, None] for part in linear(steer).chunk(count, 1)]


def before_double(
    block: Any, heads: int, tokens: Tensor, num_words: int, steer: Tensor, turn: Turn
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Of a double block, up to its attention: q, k, v [R, L + T, H, d], and the modulation of what follows."""
    attn, split = block.attn, (heads, -1)
    shift, scale, *mods = _parts(steer, block.norm1.linear, 6)
    c_shift, c_scale, *c_mods = _parts(steer, block.norm1_context.linear, 6)
    x, c = modulated(tokens[:, num_words:], shift, scale), modulated(tokens[:, :num_words], c_shift, c_scale)
    q, k = (
        torch.cat(
            [
                rms_heads(of_words(c).unflatten(-1, split), norm_words.weight, norm_words.eps),
                turn_pairs(rms_heads(of_picture(x).unflatten(-1, split), norm.weight, norm.eps), turn),
            ],
            1,
        )
        for of_words, norm_words, of_picture, norm in (
            (attn.add_q_proj, attn.norm_added_q, attn.to_q, attn.norm_q),
            (attn.add_k_proj, attn.norm_added_k, attn.to_k, attn.norm_k),
        )
    )
    v = torch.cat([attn.add_v_proj(c), attn.to_v(x)], 1).unflatten(-1, split)
    return q, k, v, [*mods, *c_mods]


def after_double(block: Any, tokens: Tensor, num_words: int, mixed: Tensor, mods: list[Tensor]) -> Tensor:
    """The rest of a double block: its tokens [R, L + T, D]."""
    gate, shift_mlp, scale_mlp, gate_mlp, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = mods
    words = tokens[:, :num_words] + c_gate * block.attn.to_add_out(mixed[:, :num_words])
    picture = tokens[:, num_words:] + gate * block.attn.to_out[0](mixed[:, num_words:])
    picture = picture + gate_mlp * block.ff(modulated(picture, shift_mlp, scale_mlp))
    words = words + c_gate_mlp * block.ff_context(modulated(words, c_shift_mlp, c_scale_mlp))
    return torch.cat([words, picture], 1)


def before_single(
    block: Any, heads: int, tokens: Tensor, num_words: int, steer: Tensor, turn: Turn
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a single block, up to its attention: q, k, v [R, L + T, H, d], the MLP's inside [R, L + T, F], the gate."""
    attn, split = block.attn, (heads, -1)
    shift, scale, gate = _parts(steer, block.norm.linear, 3)
    x = modulated(tokens, shift, scale)
    q, k = (
        rms_heads(linear(x).unflatten(-1, split), norm.weight, norm.eps)
        for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k))
    )
    q, k = (torch.cat([part[:, :num_words], turn_pairs(part[:, num_words:], turn)], 1) for part in (q, k))
    v = attn.to_v(x).unflatten(-1, split)
    return q, k, v, F.gelu(block.proj_mlp(x), approximate="tanh"), gate


def after_single(block: Any, tokens: Tensor, mixed: Tensor, inner: Tensor, gate: Tensor) -> Tensor:
    """The rest of a single block: its tokens [R, L + T, D]."""
    out: Tensor = tokens + gate * block.proj_out(torch.cat([mixed, inner], -1))
    return out


class FluxDenoiser:
    """A denoiser (models/diffusion.py Denoiser) that runs block by block (engine/step_cache.py BlockModel)."""

    def __init__(self, model: Any, *, scale: int, attention: Backend = "auto") -> None:
        """`model`: FluxTransformer2DModel with its weights, evaluated only; `scale`: pixels of a latent's side."""
        config = model.config
        self.model, self._scale = model, scale
        self._channels = config.in_channels // 4
        self._heads, self._axes = config.num_attention_heads, tuple(config.axes_dims_rope)
        self._blocks: list[nn.Module] = [*model.transformer_blocks, *model.single_transformer_blocks]
        self._num_double = len(model.transformer_blocks)
        self._attentions = attentions(attention, "flux", len(self._blocks))
        self._width: int = model.inner_dim
        self._guided = hasattr(model.time_text_embed, "guidance_embedder")
        self._times: dict[tuple[float, float], Tensor] = {}  # embedded, [D]
        self._captions: WeakKeyDictionary[Caption, Caption] = WeakKeyDictionary()  # as the blocks take them
        self._joint = _joint(model, attention)
        if self._joint is not None:
            linears = _modulations(model)
            self._mod_weight = torch.cat([linear.weight for linear in linears])
            self._mod_bias = torch.cat([linear.bias for linear in linears])

    @property
    def device(self) -> torch.device:
        return self.model.x_embedder.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.x_embedder.weight.dtype  # type: ignore[no-any-return]

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        return (self._channels, *(2 * (side // (2 * self._scale)) for side in (height, width)))

    def batch_key(self, width: int, height: int) -> Hashable:
        return (width, height)

    def cost(self, width: int, height: int, num_tokens: int) -> float:
        """Billions of floating point operations of a row in a step: matrices, then attention."""
        _, rows, columns = self.latent_shape(width, height)
        tokens = rows * columns // 4 + num_tokens
        matrices = 12 * self._width**2 * tokens * len(self._blocks)
        return (2 * matrices + 4 * tokens**2 * self._width * len(self._blocks)) / 1e9

    # ------------------------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """The velocity, noise minus picture: [R, C, h, w]."""
        trunk = self.begin(rows)
        return self.finish(trunk, self.hidden(self.blocks(trunk, 0, None)))

    @torch.inference_mode()
    def begin(self, rows: Rows) -> Trunk:
        captions = [self._embedded(caption) for caption in rows.conds]
        words, lengths = pad_captions(captions, self.device, self.dtype)
        num_words = words.shape[1]
        ragged = any(len(caption.embeds) != num_words for caption in captions)
        latents = rows.latents.to(self.device, self.dtype)
        grid = (latents.shape[2] // 2, latents.shape[3] // 2)
        tokens = torch.cat([words, self.model.x_embedder(pack(latents))], 1)
        steer = F.silu(self._time(rows) + torch.stack([caption.pooled for caption in captions]))  # type: ignore[misc]
        joint = self._joint is not None
        return Trunk(
            tokens=tokens.float() if joint else tokens,
            steer=steer,
            mods=F.linear(steer, self._mod_weight, self._mod_bias).float() if joint else None,
            lengths=lengths if ragged else None,
            num_words=num_words,
            turn=_turn(self._axes, *grid, self.device, joint),
            grid=grid,
        )

    def hidden(self, trunk: Trunk) -> Tensor:
        return trunk.tokens[:, trunk.num_words :]

    @torch.inference_mode()
    def indicator(self, trunk: Trunk) -> Tensor:
        """The first block's modulated input, the picture's part: [R, T, D]."""
        width = self._width
        if trunk.mods is None:
            block: Any = self._blocks[0]
            mods = (block.norm1 if self._num_double else block.norm).linear(trunk.steer)
        else:
            mods = trunk.mods
        return modulated(self.hidden(trunk), mods[:, None, :width], mods[:, None, width : 2 * width])

    def select(self, trunk: Trunk, rows: Sequence[int]) -> Trunk:
        picked = torch.tensor(list(rows), device=trunk.tokens.device)
        return dataclasses.replace(
            trunk,
            tokens=trunk.tokens[picked],
            steer=trunk.steer[picked],
            mods=None if trunk.mods is None else trunk.mods[picked],
            lengths=None if trunk.lengths is None else trunk.lengths[picked],
        )

    @torch.inference_mode()
    def blocks(self, trunk: Trunk, start: int, stop: int | None) -> Trunk:
        stop = len(self._blocks) if stop is None else stop
        tokens = trunk.tokens
        if self._joint is not None and trunk.mods is not None:
            tokens = self._joint(tokens, trunk.lengths, trunk.num_words, trunk.mods, trunk.turn, start, stop)
            return dataclasses.replace(trunk, tokens=tokens)
        for index in range(start, stop):
            run = self._double if index < self._num_double else self._single
            tokens = run(index, tokens, trunk)
            if tokens.dtype is torch.float16:
                tokens = tokens.clip(-65504, 65504)
        return dataclasses.replace(trunk, tokens=tokens)

    @torch.inference_mode()
    def finish(self, trunk: Trunk, hidden: Tensor) -> Tensor:
        mods = self.model.norm_out.linear(trunk.steer) if trunk.mods is None else trunk.mods[:, -2 * self._width :]
        scale, shift = (part[:, None] for part in mods.chunk(2, 1))
        return unpack(self.model.proj_out(modulated(hidden, shift, scale).to(self.dtype)), trunk.grid)

    # ------------------------------------------------------------------------------------------------------- blocks

    def _embedded(self, caption: Caption) -> Caption:
        """A caption in the blocks' width, words [L, D] and what it adds to `steer` [D]: the same at every step."""
        known = self._captions.get(caption)
        if known is None:
            if caption.pooled is None:
                raise ValueError("a caption without the vector that steers")
            words = self.model.context_embedder(caption.embeds.to(self.device, self.dtype))
            pooled = self.model.time_text_embed.text_embedder(caption.pooled[None].to(self.device, self.dtype))
            known = self._captions[caption] = Caption(words, pooled[0])
        return known

    def _time(self, rows: Rows) -> Tensor:
        """Time and guidance as one vector [R, D]. Schedules repeat themselves: on a CPU each pair of values is embedded once."""
        if self.device.type != "cpu":
            return self._embedded_times(rows.times, rows.guidance)
        guidance = rows.guidance if self._guided else torch.zeros_like(rows.times)
        found = []
        for key in zip(rows.times.tolist(), guidance.tolist()):
            known = self._times.get(key)
            if known is None:
                if len(self._times) >= _MAX_TIMES:
                    self._times.clear()
                known = self._times[key] = self._embedded_times(*torch.tensor(key)[:, None])[0]
            found.append(known)
        return torch.stack(found)

    def _embedded_times(self, times: Tensor, guidance: Tensor) -> Tensor:
        """[R] each -> [R, D]."""
        embed = self.model.time_text_embed
        told: Tensor = embed.timestep_embedder(sinusoids(times * 1000).to(self.device, self.dtype))
        if self._guided:
            told = told + embed.guidance_embedder(sinusoids(guidance * 1000).to(self.device, self.dtype))
        return told

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, trunk: Trunk) -> Tensor:
        return attend_joint(self._attentions[index], q, k, v, trunk.lengths, q.shape[1] - trunk.num_words)

    def _double(self, index: int, tokens: Tensor, trunk: Trunk) -> Tensor:
        """Words and picture with weights of their own, one attention."""
        block = self._blocks[index]
        q, k, v, mods = self._before_double(block, self._heads, tokens, trunk.num_words, trunk.steer, trunk.turn)
        return self._after_double(block, tokens, trunk.num_words, self._attend(index, q, k, v, trunk), mods)

    def _single(self, index: int, tokens: Tensor, trunk: Trunk) -> Tensor:
        """Words and picture as one sequence; attention and MLP side by side."""
        block = self._blocks[index]
        q, k, v, inner, gate = self._before_single(block, self._heads, tokens, trunk.num_words, trunk.steer, trunk.turn)
        return self._after_single(block, tokens, self._attend(index, q, k, v, trunk), inner, gate)

    def compile(self, **options: Any) -> None:
        """torch.compile what lies between attentions, once for each kind of block (blocks differ in weights only), for any number
        of rows and words. `options` are torch.compile's. Does nothing where the blocks are one call already."""
        if self._joint is None:
            for name in ("_before_double", "_after_double", "_before_single", "_after_single"):
                setattr(self, name, torch.compile(getattr(self, name), **{"dynamic": True, **options}))

    _before_double = staticmethod(before_double)
    _after_double = staticmethod(after_double)
    _before_single = staticmethod(before_single)
    _after_single = staticmethod(after_single)


def _modulations(model: Any) -> list[nn.Linear]:
    """The layers that `steer` goes through, in the order of blocks; for a double block the picture's comes first."""
    doubles = [norm.linear for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    return [*doubles, *(block.norm.linear for block in model.single_transformer_blocks), model.norm_out.linear]


def _joint(model: Any, attention: Backend) -> JointBlocks | None:
    """All blocks as one call, where this CPU, the network's shape and what was asked for allow it."""
    weight = model.x_embedder.weight
    blocks = (*model.transformer_blocks, *model.single_transformer_blocks)
    plain = all(
        type(layer) is nn.Linear for block in blocks for layer in block.modules() if hasattr(layer, "in_features")
    )
    heads = model.config.num_attention_heads
    if not plain or attention not in ("auto", "sdpa") or weight.device.type != "cpu":
        return None
    if not blocks or not can_run(model.inner_dim, heads, weight.dtype):
        return None

    def of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
        return layer.weight, layer.bias

    def side_by_side(*layers: nn.Linear) -> tuple[Tensor, Tensor]:
        return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])

    with torch.inference_mode():
        doubles = []
        for block in model.transformer_blocks:
            attn = block.attn
            words = Stream(
                qkv=side_by_side(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
                norm_q=attn.norm_added_q.weight,
                norm_k=attn.norm_added_k.weight,
                out=of(attn.to_add_out),
                up=of(block.ff_context.net[0].proj),
                down=of(block.ff_context.net[2]),
            )
            picture = Stream(
                qkv=side_by_side(attn.to_q, attn.to_k, attn.to_v),
                norm_q=attn.norm_q.weight,
                norm_k=attn.norm_k.weight,
                out=of(attn.to_out[0]),
                up=of(block.ff.net[0].proj),
                down=of(block.ff.net[2]),
            )
            doubles.append((words, picture))
        singles = [
            Stream(
                qkv=side_by_side(block.attn.to_q, block.attn.to_k, block.attn.to_v),
                norm_q=block.attn.norm_q.weight,
                norm_k=block.attn.norm_k.weight,
                out=None,
                up=of(block.proj_mlp),
                down=of(block.proj_out),
            )
            for block in model.single_transformer_blocks
        ]
        return JointBlocks(doubles, singles, heads=heads, eps=blocks[0].attn.norm_q.eps)


@functools.lru_cache(maxsize=64)
def _turn(axes: tuple[int, ...], rows: int, columns: int, device: torch.device, joint: bool) -> Turn:
    """The angles of a picture's tokens, where they are needed and as they are needed there."""
    cosine, sine = grid_angles(axes, rows, columns)
    if joint:
        cosine, sine = expanded(cosine, sine)
    return cosine.to(device), sine.to(device)


def sinusoids(times: Tensor, width: int = 256) -> Tensor:
    """[R] -> fp32 [R, width], cosines first: how diffusers' Flux, SD3 and Qwen-Image tell a time (0..1000) or a scale."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=times.device) * (-math.log(10_000.0) / half))
    phases = times.float()[:, None] * frequencies
    return torch.cat([phases.cos(), phases.sin()], 1)


def pack(latents: Tensor) -> Tensor:
    """[R, C, h, w] -> tokens [R, T, 4 C] of 2 x 2 latents, channel first."""
    count, channels, height, width = latents.shape
    blocks = latents.view(count, channels, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(count, height // 2 * (width // 2), channels * 4)


def unpack(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of `pack`; grid: tokens down and across."""
    count, _, width = tokens.shape
    blocks = tokens.view(count, *grid, width // 4, 2, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(count, width // 4, 2 * grid[0], 2 * grid[1])
