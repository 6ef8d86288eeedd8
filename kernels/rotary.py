"""Rotary position embedding: frequencies of every scaling kind that transformers knows, tables, and the rotation.

Letters: R rows, H query heads, K kv heads, D head dim, P rotated dims (P <= D), all positions int64.
A rope dict is transformers' `rope_parameters` (or the older `rope_scaling`): {"rope_type": ..., "rope_theta": ...}.

Two kinds change with the length of the text (dynamic, longrope). By default each position takes the frequencies of a
text that ends there, which is what transformers does when fed token by token, and which makes chunked equal whole.
With `context_length` every position takes the frequencies of a text of that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .attention import store_kv
from .dispatch import cpu_ops, gpu_ops

TABLE_CHUNK = 2048  # positions computed at once; fixed, so that a table's numbers never depend on when it grew


def inverse_frequencies(
    rope: Mapping[str, Any], rotary_dim: int, max_position: int, seq_len: int = 0
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [P / 2] fp32 and the factor on cos and sin, for a text of `seq_len` tokens (0: short).

    Raises ValueError for a rope type that is not known.
    """
    kind = rope_kind(rope)
    base = float(rope.get("rope_theta") or 10000.0)
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    factor = rope.get("factor")
    original = int(rope.get("original_max_position_embeddings") or max_position)
    if kind == "default":
        return 1.0 / base**exponent, 1.0
    if kind == "linear":
        return 1.0 / base**exponent / float(factor or 1.0), 1.0
    if kind == "dynamic":
        growth = float(factor or 1.0) * max(seq_len, max_position) / max_position - (float(factor or 1.0) - 1.0)
        return 1.0 / (base * growth ** (rotary_dim / (rotary_dim - 2))) ** exponent, 1.0
    if kind == "proportional":
        num_rotated = int(float(rope.get("partial_rotary_factor") or 1.0) * rotary_dim // 2)
        inv_freq = torch.zeros(rotary_dim // 2)
        inv_freq[:num_rotated] = 1.0 / base ** exponent[:num_rotated]
        return inv_freq / float(factor or 1.0), 1.0
    if kind == "llama3":
        return _llama3(rope, 1.0 / base**exponent, float(factor or 1.0), original), 1.0
    if factor is None:
        factor = max_position / original
    if kind == "longrope":
        scales = torch.tensor(rope["long_factor" if seq_len > original else "short_factor"], dtype=torch.float32)
        attention_factor = rope.get("attention_factor")
        if attention_factor is None:
            attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return 1.0 / (scales * base**exponent), float(attention_factor)
    return _yarn(rope, base, exponent, float(factor), original)


def rope_kind(rope: Mapping[str, Any]) -> str:
    """The scaling kind under its present name. Raises ValueError for an unknown one."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    known = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
    if kind not in known:
        raise ValueError(f"rope_type: expected one of {', '.join(known)}, got {kind!r}")
    return kind


def _llama3(rope: Mapping[str, Any], inv_freq: torch.Tensor, factor: float, original: int) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * inv_freq / (2 * math.pi)  # turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.where(turns > high, inv_freq, torch.where(turns < low, inv_freq / factor, 0 * inv_freq)) + torch.where(
        (turns > high) | (turns < low), 0.0, (1 - blend) * inv_freq / factor + blend * inv_freq
    )


def _yarn(
    rope: Mapping[str, Any], base: float, exponent: torch.Tensor, factor: float, original: int
) -> tuple[torch.Tensor, float]:
    """YaRN: dims that turn often are kept, dims that turn less than once are stretched, with a ramp between."""
    rotary_dim = 2 * exponent.numel()

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)

    def dim_of(num_turns: float) -> float:
        return rotary_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dim_of(float(rope.get("beta_fast") or 32)), dim_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # no division by zero
    keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    wavelength = base**exponent
    return 1.0 / (factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep, float(attention_factor)


class Rotary:
    """Cos and sin tables of one kind of layer. On a CPU they grow as positions come."""

    def __init__(
        self,
        head_dim: int,
        rope_parameters: Mapping[str, Any] | None = None,
        max_position: int = 2048,
        theta: float | None = None,
        partial_rotary_factor: float | None = None,
        *,
        original_max_position: int | None = None,
        context_length: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`max_position` is the config's max_position_embeddings. `theta`, `partial_rotary_factor` and
        `original_max_position` stand in where the dict does not say. Raises ValueError for an unknown rope type.
        """
        rope = {key: value for key, value in (rope_parameters or {}).items() if value is not None}
        defaults = {
            "rope_theta": theta,
            "partial_rotary_factor": partial_rotary_factor,
            "original_max_position_embeddings": original_max_position,
        }
        self.rope = {key: value for key, value in defaults.items() if value is not None} | rope
        self.kind = rope_kind(self.rope)
        self.head_dim = head_dim
        self.max_position = max_position
        self.context_length = context_length
        share = 1.0 if self.kind == "proportional" else float(self.rope.get("partial_rotary_factor", 1.0))
        self.rotary_dim = int(head_dim * share)
        self.device = torch.device(device)
        section = self.rope.get("mrope_section")
        self._axis = None if section is None else _mrope_axes(section, bool(self.rope.get("mrope_interleaved")))
        if self._axis is not None and len(self._axis) != self.rotary_dim // 2:
            raise ValueError(f"mrope_section: expected a sum of {self.rotary_dim // 2}, got {list(section or ())}")
        self._cos = self._sin = torch.empty(0, self.rotary_dim // 2, device=self.device)
        # A GPU must not be asked for the largest position at every step, so its table is whole from the start.
        self._grow(TABLE_CHUNK if self.device.type == "cpu" else max_position)

    def _grow(self, num_positions: int) -> None:
        """Extends the tables to at least `num_positions` rows, in whole chunks."""
        parts = []
        for start in range(self._cos.shape[0], num_positions, TABLE_CHUNK):
            position = torch.arange(start, start + TABLE_CHUNK)
            angle, factor = self._angles(position)
            parts.append((angle.cos() * factor, angle.sin() * factor))
        if parts:
            self._cos = torch.cat([self._cos, *(cos.to(self.device) for cos, _ in parts)])
            self._sin = torch.cat([self._sin, *(sin.to(self.device) for _, sin in parts)])

    def _angles(self, position: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Angles [P, rotary_dim / 2] fp32 for consecutive positions [P], and the factor on cos and sin."""
        fixed = self.context_length
        inv_freq, factor = inverse_frequencies(self.rope, self.rotary_dim, self.max_position, fixed)
        wide = position.float()[:, None]
        angle = wide * inv_freq
        if fixed or self.kind not in ("dynamic", "longrope"):
            return angle, factor
        if self.kind == "longrope":
            original = int(self.rope.get("original_max_position_embeddings") or self.max_position)
            inv_freq, _ = inverse_frequencies(self.rope, self.rotary_dim, self.max_position, original + 1)
            return torch.where(position[:, None] >= original, wide * inv_freq, angle), factor
        for row in range(max(0, self.max_position - int(position[0])), len(position)):
            seq_len = int(position[row]) + 1
            inv_freq, _ = inverse_frequencies(self.rope, self.rotary_dim, self.max_position, seq_len)
            angle[row] = wide[row] * inv_freq
        return angle, factor

    def cos_sin(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [R, rotary_dim / 2] fp32 for position [R], or [3, R] with sections. Once per step, not per layer."""
        if position.is_cpu and position.numel() and (last := int(position.max())) >= self._cos.shape[0]:
            self._grow(last + 1)
        if position.dim() == 1:
            return self._cos.index_select(0, position), self._sin.index_select(0, position)
        if self._axis is None:
            return self._cos.index_select(0, position[0]), self._sin.index_select(0, position[0])
        axis = torch.tensor(self._axis, device=position.device)
        rows = position.index_select(0, axis).T  # [R, P / 2]: every pair of dims follows its own axis
        return self._cos.gather(0, rows), self._sin.gather(0, rows)


def _mrope_axes(section: list[int], interleaved: bool) -> list[int]:
    """Axis (0 time, 1 height, 2 width) of each rotated pair: in bands, or interleaved t h w t h w ... t t."""
    if not interleaved:
        return [i % 3 for i, width in enumerate(section) for _ in range(width)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        axes[axis : section[axis] * 3 : 3] = [axis] * len(axes[axis : section[axis] * 3 : 3])
    return axes


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first P dims of q [R, H, D] and k [R, K, D]; cos, sin [R, P / 2] fp32; arithmetic in fp32.

    Dims are paired (i, i + P / 2), or (2i, 2i + 1) when `interleaved`. q and k may be overwritten; use what returns.
    """
    if q.is_cpu and (ops := cpu_ops()) is not None and ops.can_rotate(q, k, cos):
        ops.rotate(q, k, cos, sin, interleaved)
        return q, k
    if (gpu := gpu_ops(q.device.type)) is not None and gpu.can_rotate(q, k, cos):
        return gpu.apply_rotary(q, k, cos, sin, interleaved=interleaved)  # type: ignore[no-any-return]
    return rotate_reference(q, cos, sin, interleaved=interleaved), rotate_reference(
        k, cos, sin, interleaved=interleaved
    )


def rotate_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """The definition for one tensor x [R, H, D]: a new tensor, fp32 arithmetic, rounded once."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    else:
        low, high = turned[..., :half], turned[..., half:]
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def rotary_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
) -> torch.Tensor:
    """`apply_rotary`, then `store_kv` of the rotated k and of v [R, K, D], in one pass. Returns the rotated q.

    q may be overwritten; k and v are as undefined afterwards as in `apply_rotary`.
    """
    if q.is_cpu and (ops := cpu_ops()) is not None and ops.can_rotate(q, k, cos) and ops.can_store(k, v, kv):
        ops.rotate_store_kv(q, k, v, cos, sin, kv, slots, interleaved)
        return q
    gpu = gpu_ops(q.device.type)
    if gpu is not None and gpu.can_rotate(q, k, cos) and gpu.can_store(k, v, kv):
        return gpu.rotary_store_kv(q, k, v, cos, sin, kv, slots, interleaved=interleaved)  # type: ignore[no-any-return]
    q, k = apply_rotary(q, k, cos, sin, interleaved=interleaved)
    store_kv(k, v, kv, slots)
    return q
