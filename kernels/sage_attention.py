"""Dense attention of denoisers: the door (`Attention`), exact attention, and SageAttention, which multiplies q and k in INT8.

Letters: B rows, L queries, S keys, H heads, K kv heads (query head h reads kv head h // (H / K)), D numbers a head.
q [B, L, H, D], k and v [B, S, K, D], the order in which `diffusers` holds them; out [B, L, H, D] in q's dtype, contiguous.

Which keys a row sees: indices [0, kv_lens[b]), and the last `tail` ones, whatever kv_lens says. So a caption padded in front
of the picture's tokens needs no copy: kv_lens = its length, tail = the picture's tokens. A row that sees nothing gives 0 and
the lse -inf. What a row does not see never reaches its output, nor its scales: not even NaN, not its neighbours.

SageAttention (Zhang et al. 2024, arXiv 2410.02367 and 2411.10958; this is our own reading):
- k - mean(k) over the keys the row sees: a number per softmax row is taken from the scores, so the output stays what it was,
  and outliers that all keys share cost no bits. The lse gets it back: + scale * q . mean.
- q and k as INT8 with a scale for each block (128 queries, 64 keys), or for each group of rows that one thread of a tensor core
  holds ("thread", more exact: queries j, j + 8, j + 16, j + 24 of 32, keys 8 i + 2 j and the next of 64).
- softmax online, in base 2 and fp32; its weights times v in fp16, or in FP8 (e4m3): weights times 448, v with a scale for
  each channel, each block of 64 keys summed apart and then added in fp32 (tensor cores sum FP8 with fewer bits than fp32).

What it does not know: layers, models, masks of other shapes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import weakref
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import gpu_ops

Backend = Literal["auto", "sdpa", "sage", "xformers"]
Scales = Literal["block", "thread"]
Product = Literal["fp16", "fp8"]

QUERIES, KEYS = 128, 64  # rows in a block
MAX_HEAD_DIM = 128
LARGEST_INT8, LARGEST_E4M3, LARGEST_FP16 = 127.0, 448.0, 65504.0
TINY = 1e-12  # the least scale: a block of zeros has that one, and stays zeros
LOG2E = 1.4426950408889634
# Fewer keys than that and quantizing costs more than INT8 saves. Estimated: no GPU was at hand.
AUTO_KEYS = 1024
# (rows in a tile, how a tile's rows are laid out: the middle number is the scale's index)
TILES: dict[tuple[str, Scales], tuple[int, tuple[int, int, int]]] = {
    ("q", "block"): (QUERIES, (1, 1, QUERIES)),
    ("k", "block"): (KEYS, (1, 1, KEYS)),
    ("q", "thread"): (32, (4, 8, 1)),
    ("k", "thread"): (64, (8, 4, 2)),
}

log = logging.getLogger("motet.kernels")


# ------------------------------------------------------------------------------------------------------------- the door


class Attention:
    """The attention of one layer, by the backend that was asked for.

    auto      sage on CUDA for head dims up to 128 and 1,024 keys or more; exact attention everywhere else
    sdpa      exact, torch's scaled_dot_product_attention
    sage      SageAttention: Triton on CUDA, plain torch elsewhere (slow: for measuring what it costs a picture); exact
              for head dims above 128
    xformers  exact, memory_efficient_attention, where xformers is installed

    Sage is guarded: where its output is not finite and the exact one is (v beyond fp16, say), that one is given, this layer
    takes exact attention from then on, and says so once in the log. The check waits for the device once a call, and is left
    out while a CUDA graph is recorded: warm-up calls made it. It lies inside the op, so torch.compile meets no break.
    """

    def __init__(
        self, backend: Backend = "auto", *, layer: str = "", scales: Scales = "thread", product: Product = "fp16"
    ) -> None:
        """`layer` names it in the log. Raises ValueError for unknown words and RuntimeError where xformers is missing."""
        for name, word, known in (
            ("backend", backend, get_args(Backend)),
            ("scales", scales, get_args(Scales)),
            ("product", product, get_args(Product)),
        ):
            if word not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {word!r}")
        if backend == "xformers":
            _xformers()
        self.backend, self.layer, self.scales, self.product = backend, layer, scales, product
        self.fell_back = False
        self.number = next(_numbers)
        # A tensor, as torch.compile makes a graph of its own for every int: one block's graph then serves all layers.
        self._layer = torch.tensor(self.number)
        _layers[self.number] = self

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_lens: Tensor | None = None,
        *,
        tail: int = 0,
        scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Softmax attention: out [B, L, H, D] in q's dtype.

        kv_lens  [B] int: see the module; None: every key is seen
        scale    of q . k; None: 1 / sqrt(D)
        causal   query i sees no key behind i; L == S then
        Raises ValueError for shapes that do not fit.
        """
        check(q, k, v, kv_lens, tail, causal)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._takes_sage(q, k):
            out, _ = torch.ops.motet.sage_attention(
                q, k, v, kv_lens, tail, scale, causal, self.scales, self.product, False, self._layer
            )
            return out  # type: ignore[no-any-return]
        if self.backend == "xformers":
            return _xformers_attention(q, k, v, kv_lens, tail=tail, scale=scale, causal=causal)
        return exact_attention(q, k, v, kv_lens, tail=tail, scale=scale, causal=causal)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        """A copy is a layer of its own: another number, not fallen back."""
        again = functools.partial(Attention, self.backend, layer=self.layer, scales=self.scales, product=self.product)
        return again, ()

    def _takes_sage(self, q: Tensor, k: Tensor) -> bool:
        if self.backend == "sage":
            return q.shape[-1] <= MAX_HEAD_DIM
        return self.backend == "auto" and q.is_cuda and q.shape[-1] <= MAX_HEAD_DIM and k.shape[1] >= AUTO_KEYS


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Attention] = (
    weakref.WeakValueDictionary()
)  # an op's arguments are plain values


def check(q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None, tail: int, causal: bool) -> None:
    """Raises ValueError where the shapes do not fit together."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"expected q [B, L, H, D] and k, v [B, S, K, D], got {_shapes(q, k, v)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % max(k.shape[2], 1):
        raise ValueError(f"rows, head dims or heads do not fit: {_shapes(q, k, v)}")
    if kv_lens is not None and kv_lens.shape != q.shape[:1]:
        raise ValueError(f"kv_lens: expected [{q.shape[0]}], got {list(kv_lens.shape)}")
    if not 0 <= tail <= k.shape[1]:
        raise ValueError(f"tail: expected 0 to {k.shape[1]}, got {tail}")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal: expected as many queries as keys, got {q.shape[1]} and {k.shape[1]}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)


# ------------------------------------------------------------------------------------------------------ exact attention


def visible_keys(kv_lens: Tensor, num_keys: int, tail: int) -> Tensor:
    """[B, S] bool: which keys each row sees."""
    index = torch.arange(num_keys, device=kv_lens.device)
    return (index < kv_lens[:, None]) | (index >= num_keys - tail)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None = None,
    *,
    tail: int = 0,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """As `Attention`, by torch's SDPA.

    On a CPU each ragged row is attended alone over its own keys, so that padding costs nothing and a row's numbers never
    depend on its neighbours'; on other devices, and while torch.compile traces, lengths become a mask.
    """
    if kv_lens is None:
        return _sdpa(q, k, v, None, scale, causal)
    num_keys = k.shape[1]
    if q.is_cpu and not torch.compiler.is_compiling():
        lengths = [min(max(int(n), 0), num_keys - tail) for n in kv_lens.tolist()]
        if all(n == num_keys - tail for n in lengths):
            return _sdpa(q, k, v, None, scale, causal)
        if not causal:
            return torch.cat([_row(q, k, v, row, n, tail, scale) for row, n in enumerate(lengths)])
    sees = visible_keys(kv_lens, num_keys, tail)
    # 0 * NaN would leak from a value that nobody sees, and so would NaN + -inf from such a key.
    k, v = (t.masked_fill(~sees[:, :, None, None], 0.0) for t in (k, v))
    mask = sees[:, None, None, :]
    if causal:
        mask = mask & torch.ones(num_keys, num_keys, dtype=torch.bool, device=q.device).tril()
    out = _sdpa(q, k, v, mask, scale, False)
    return torch.where(mask.any(-1).transpose(1, 2)[..., None], out, 0.0)  # a row of nothing: NaN in some backends


def _row(q: Tensor, k: Tensor, v: Tensor, row: int, length: int, tail: int, scale: float | None) -> Tensor:
    """One row of the batch over its `length` first and `tail` last keys: [1, L, H, D]."""
    if length + tail == 0:
        return torch.zeros_like(q[row : row + 1], memory_format=torch.contiguous_format)
    parts = []
    for t in (k[row : row + 1], v[row : row + 1]):
        parts.append(t[:, :length] if not tail else torch.cat([t[:, :length], t[:, t.shape[1] - tail :]], 1))
    return _sdpa(q[row : row + 1], parts[0], parts[1], None, scale, False)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None = None,
    *,
    tail: int = 0,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition in float64: out [B, L, H, D] and lse [B, H, L]. For tests."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    num_queries, num_keys, per_kv = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    lens = torch.full((q.shape[0],), num_keys) if kv_lens is None else kv_lens
    sees = visible_keys(lens, num_keys, tail)[:, None, None, :].expand(-1, 1, num_queries, -1)
    if causal:
        sees = sees & torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    keys, values = (t.double().repeat_interleave(per_kv, 2).transpose(1, 2) for t in (k, v))
    seen = sees.any(2).any(1)[:, None, :, None]
    keys, values = keys.masked_fill(~seen, 0.0), values.masked_fill(~seen, 0.0)
    scores = (q.double().transpose(1, 2) @ keys.transpose(2, 3) * scale).masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (weights @ values).transpose(1, 2), lse


# ------------------------------------------------------------------------------------------------------------- xformers


@functools.cache
def _xformers() -> object:
    if importlib.util.find_spec("xformers") is None:
        raise RuntimeError("backend xformers: it is not installed")
    return importlib.import_module("xformers.ops")


def _xformers_attention(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None, *, tail: int, scale: float, causal: bool
) -> Tensor:
    """By memory_efficient_attention, which wants 16 bits, every key seen and as many kv heads; else exact attention.

    Written against its documented signature, tested with a stand-in of that, not run on a GPU yet.
    """
    if kv_lens is not None or causal or q.shape[2] != k.shape[2]:
        return exact_attention(q, k, v, kv_lens, tail=tail, scale=scale, causal=causal)
    return _xformers().memory_efficient_attention(q, k, v, scale=scale)  # type: ignore[attr-defined, no-any-return]


# ------------------------------------------------------------------------------------------------------------- the op


def sage_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None = None,
    *,
    tail: int = 0,
    scale: float | None = None,
    causal: bool = False,
    scales: Scales = "thread",
    product: Product = "fp16",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """SageAttention without a guard, as an op that torch.compile leaves whole. Head dims up to 128.

    Returns out [B, L, H, D] in q's dtype and, with `return_lse`, lse [B, H, L] fp32: the natural log of the softmax's
    denominator, the smoothing put back, so that shares of the keys can be merged. Without: lse is empty.
    """
    check(q, k, v, kv_lens, tail, causal)
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"expected a head dim of at most {MAX_HEAD_DIM}, got {q.shape[-1]}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    op = torch.ops.motet.sage_attention
    return op(q, k, v, kv_lens, tail, scale, causal, scales, product, return_lse, None)  # type: ignore[no-any-return]


def _sage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None,
    tail: int,
    scale: float,
    causal: bool,
    scales: Scales,
    product: Product,
    return_lse: bool,
    layer: Tensor | None,
) -> tuple[Tensor, Tensor]:
    guarded = None if layer is None else _layers.get(int(layer))
    if guarded is not None and guarded.fell_back:
        return exact_attention(q, k, v, kv_lens, tail=tail, scale=scale, causal=causal), _no_lse(q)
    gpu = gpu_ops(q.device.type)
    run = sage_reference
    if gpu is not None and gpu.can_attend_dense(q, k, v):
        run = gpu.sage_attention
    out, lse = run(
        q, k, v, kv_lens, tail=tail, scale=scale, causal=causal, scales=scales, product=product, return_lse=return_lse
    )
    recording = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if guarded is not None and not recording and not bool(out.isfinite().all()):
        exact = exact_attention(q, k, v, kv_lens, tail=tail, scale=scale, causal=causal)
        if bool(exact.isfinite().all()):  # otherwise the input was broken, which is nobody's fault here
            guarded.fell_back = True
            log.warning("attention of %s: SageAttention left its range; exact from now on", guarded.layer or "a layer")
        out = exact
    return out, lse


def _no_lse(q: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _sage_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None,
    tail: int,
    scale: float,
    causal: bool,
    scales: Scales,
    product: Product,
    return_lse: bool,
    layer: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, num_queries, num_heads, _ = q.shape
    lse = (num_rows, num_heads, num_queries) if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(lse, dtype=torch.float32)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? kv_lens, SymInt tail, float scale, bool causal, str scales, str product,"
    " bool return_lse, Tensor? layer) -> (Tensor, Tensor)"
)
_op = torch.library.custom_op("motet::sage_attention", _sage, mutates_args=(), schema=_SCHEMA)
_op.register_fake(_sage_shapes)


# ---------------------------------------------------------------------------------------------------------- the reference


def quantize_int8(x: Tensor, side: Literal["q", "k"], scales: Scales) -> tuple[Tensor, Tensor]:
    """x [B, H, L, D] fp32 -> int8 [B, H, L, D] and the scale of each of its rows, fp32 [B, H, L, 1].

    A scale is max |x| / 127 over its rows (see `TILES`); halves round away from zero. Rows behind the last count as zeros.
    """
    tile, (outer, groups, inner) = TILES[side, scales]
    num_rows = x.shape[2]
    padded = F.pad(x, (0, 0, 0, -num_rows % tile))
    rows = padded.abs().amax(-1).unflatten(2, (-1, outer, groups, inner))
    top = rows.amax((3, 5), keepdim=True).expand_as(rows).flatten(2, 5)[:, :, :num_rows, None]
    scale = (top / LARGEST_INT8).clamp_min(TINY)
    steps = x / scale
    return ((steps.abs() + 0.5).floor() * steps.sign()).clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


def mean_key(k: Tensor, sees: Tensor | None) -> Tensor:
    """The mean [B, 1, K, D] fp32 of the keys a row sees, k [B, S, K, D], sees [B, S]; 0 where it sees none."""
    if sees is None:
        return k.float().mean(1, keepdim=True)
    total = k.float().masked_fill(~sees[:, :, None, None], 0.0).sum(1, keepdim=True)
    return total / sees.sum(1).clamp_min(1)[:, None, None, None]


def sage_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor | None = None,
    *,
    tail: int = 0,
    scale: float,
    causal: bool = False,
    scales: Scales = "thread",
    product: Product = "fp16",
    return_lse: bool = False,
    smooth: bool = True,
) -> tuple[Tensor, Tensor]:
    """`sage_attention` in plain torch on any device, block of keys by block of keys. `smooth` False: for comparison."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    per_kv = q.shape[2] // k.shape[2]
    sees = None if kv_lens is None else visible_keys(kv_lens, num_keys, tail)
    mean = mean_key(k, sees) if smooth else torch.zeros_like(k[:, :1], dtype=torch.float32)
    keys, values = k.float() - mean, v.float()
    if sees is not None:
        keys, values = (t.masked_fill(~sees[:, :, None, None], 0.0) for t in (keys, values))
    queries = q.float().transpose(1, 2)  # [B, H, L, D]
    q8, q_scale = quantize_int8(queries, "q", scales)
    k8, k_scale = (t.repeat_interleave(per_kv, 1) for t in quantize_int8(keys.transpose(1, 2), "k", scales))
    q_scale = q_scale * (scale * LOG2E)
    values = values.transpose(1, 2).repeat_interleave(per_kv, 1)
    v_scale: Tensor | float = 1.0
    if product == "fp8":
        v_scale = (values.abs().amax(2, keepdim=True) / LARGEST_E4M3).clamp_min(TINY)
        values = (values / v_scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float()
    else:
        values = values.half().float()
    top = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(queries)
    rows = torch.arange(num_queries, device=q.device)[:, None]
    for begin in range(0, num_keys, KEYS):
        block = slice(begin, min(begin + KEYS, num_keys))
        # Whole numbers below 2^24: exact in fp32.
        scores = q8.float() @ k8[:, :, block].float().transpose(2, 3) * q_scale * k_scale[:, :, block].transpose(2, 3)
        if sees is not None:
            scores = scores.masked_fill(~sees[:, None, None, block], -torch.inf)
        if causal:
            scores = scores.masked_fill(torch.arange(block.start, block.stop, device=q.device) > rows, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights, shrink = torch.exp2(scores - shift), torch.exp2(top - shift)
        total = total * shrink + weights.sum(-1, keepdim=True)
        if product == "fp8":
            part = (weights * LARGEST_E4M3).to(torch.float8_e4m3fn).float() @ values[:, :, block] / LARGEST_E4M3
        else:
            part = weights.half().float() @ values[:, :, block]
        acc, top = acc * shrink + part, new_top
    empty = total == 0
    out = acc / total.masked_fill(empty, 1.0) * v_scale
    out = out.transpose(1, 2).to(q.dtype).contiguous()
    if not return_lse:
        return out, _no_lse(q)
    lse = ((top + total.log2()) / LOG2E).squeeze(-1)
    return out, put_back(lse, q, mean, scale)


def put_back(lse: Tensor, q: Tensor, mean: Tensor, scale: float) -> Tensor:
    """lse [B, H, L] of smoothed keys -> of the keys themselves; mean [B, 1, K, D] fp32. -inf stays -inf."""
    mean = mean.repeat_interleave(q.shape[2] // mean.shape[2], 2)
    return lse + (q.float() * mean).sum(-1).transpose(1, 2) * scale
