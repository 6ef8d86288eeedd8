"""What a model says about itself to those who load, cache and schedule it. No tensors here.

`Shard` is the slice of a model that one rank holds; every model constructor takes it. `KVSpec` is what one layer needs
of the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

KVKind = Literal["full", "window", "latent", "cross", "state", "none"]


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """KV needs of one layer. `window` counts visible tokens (the row itself included) for kind "window"."""

    kind: KVKind
    num_kv_heads: int  # of this shard
    head_dim: int
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Layers with the same window, together."""

    window: int  # 0 = none
    kv_bytes: int  # of K and V of one kv index, over these layers
    products: int  # multiply-adds of one row with one kv index: q.k and p.v of all heads, over these layers


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step of this shard reads and multiplies; see engine/roofline.py."""

    num_layers: int
    layer_bytes: int  # weights of all layers
    layer_products: int  # multiply-adds of one row with them
    head_bytes: int
    head_products: int  # of one row with logits
    attention: tuple[AttentionWork, ...]


class Comm(Protocol):
    """Collectives among the ranks of one model. Tensors are changed in place or returned new, on every rank alike."""

    def all_reduce(self, x: object) -> object: ...
    def all_gather(self, x: object, dim: int) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The slice of the model that this rank holds. `layers` is a half-open range, None = all; `comm` None = alone."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    layers: tuple[int, int] | None = None
    comm: Comm | None = field(default=None, compare=False)


WHOLE = Shard()
