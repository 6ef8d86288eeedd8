"""The written-down layout of a KV page, for those who move pages: tiers, transfers, other processes.

A canonical page is [layer, k|v, kv_head, token, dim] of one block of one group, K after rotary. Backends may keep another
order in memory and export and import this one. A page is only read where the digest of its layout is the reader's own.
"""

from __future__ import annotations

import hashlib

import msgspec


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree before a foreign page is read."""

    model: str
    weight_epoch: int
    num_layers: int  # per page
    num_kv_heads: int  # of this shard
    block_size: int
    head_dim: int
    dtype: str
    scale_bytes: int = 0  # of a quantized cache: each row of head_dim values ends with its scale (fp32, so 4)
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a canonical page, in elements of dtype (a byte each where there are scales)."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim + self.scale_bytes)

    @property
    def digest(self) -> bytes:
        """16 bytes that differ when any field differs."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()
