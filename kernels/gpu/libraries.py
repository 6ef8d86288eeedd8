"""Attention by installed libraries instead of Triton, where MOTET_ATTENTION names one: flashinfer, flash_attn, xformers.

    flashinfer  decode batches  cache of 16 bits, any block size, no soft cap
    flash_attn  decode batches  cache of 16 bits, block size a multiple of 256, no sinks
    xformers    dense attention (encoders)

What a library does not take runs in Triton or torch. Decode batches only, since there the library is told how many kv
indices a row sees; for several rows of a sequence libraries assume that they are its last tokens, which `PagedBatch`
does not promise. None is a default: written against their documented signatures, tested with stand-ins of these
signatures, not run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os

import torch

from ..attention import PagedBatch

LIBRARIES = ("flashinfer", "flash_attn", "xformers")
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation gives its decode kernels; zeroed before first use


@functools.cache
def attention_library() -> str:
    """The library that MOTET_ATTENTION names, or "triton". Decided at the first call.

    Raises ValueError for another name and RuntimeError where the library is not installed or cannot be imported.
    """
    name = os.environ.get("MOTET_ATTENTION", "triton")
    if name == "triton":
        return name
    if name not in LIBRARIES:
        raise ValueError(f"MOTET_ATTENTION: expected triton, {', '.join(LIBRARIES)}, got {name!r}")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"MOTET_ATTENTION={name}, but it cannot be imported: {error}") from error
    return name


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    group: int,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of a decode batch by the chosen library; None where it does not take it."""
    library = attention_library()
    sixteen = q.dtype in (torch.bfloat16, torch.float16) and kv.dtype is q.dtype
    plain = batch.mark == "decode" and q.shape[0] == batch.kv_lens.shape[0] and batch.ancestor_mask is None
    if library not in ("flashinfer", "flash_attn") or not sixteen or not plain:
        return None
    table, lengths = batch.block_tables[group], batch.num_visible.to(torch.int32)
    left = window - 1 if window > 0 else -1
    if library == "flashinfer":
        if soft_cap or return_lse:
            return None
        out: torch.Tensor = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            kv,
            _workspace(q.device),
            table,
            lengths.clamp(min=1),
            batch.max_kv_len,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            window_left=left,
            sinks=None if sinks is None else [sinks.float()],
            kv_layout="HND",
        )
        return out.masked_fill(lengths[:, None, None] <= 0, 0.0)  # it was told of one kv index, a padding row has none
    if sinks is not None or batch.block_size % 256:
        return None
    keys, values = kv.transpose(2, 3).unbind(1)  # [N, T, K, D] views
    out, lse, *_ = importlib.import_module("flash_attn").flash_attn_with_kvcache(
        q[:, None],
        keys,
        values,
        cache_seqlens=lengths,
        block_table=table,
        softmax_scale=scale,
        causal=True,
        window_size=(left, 0 if window > 0 else -1),
        softcap=soft_cap,
        return_softmax_lse=True,
    )
    return (out[:, 0], lse[:, :, 0]) if return_lse else out[:, 0]


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor | None:
    """Attention of whole windows q, k, v [B, T, H, D] -> [B, T, H, D] by xformers, where it is chosen."""
    if attention_library() != "xformers":
        return None
    attention = importlib.import_module("xformers.ops").memory_efficient_attention
    return attention(q, k, v, scale=scale)  # type: ignore[no-any-return]
