"""Keys of KV blocks: a chain of digests over token ids and everything else that K and V depend on.

key_i = blake2b(key_{i-1}, ids of block i, typed extras that touch block i). The root holds model, weight epoch, salt and, of
a quantized cache, its format.
Extras are typed ("salt", "embeds", "side", "lora"), so that a salt can never equal an adapter's name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from ..types import EmbeddingSpan, SideIds

DIGEST_BYTES = 16


def root_key(*, model: str, weight_epoch: int, cache_salt: str, kv_dtype: str = "") -> bytes:
    """The parent of a sequence's first block. `kv_dtype` is empty unless the cache is quantized."""
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts = [("model", model), ("epoch", str(weight_epoch)), ("salt", cache_salt)]
    for kind, value in (*parts, *([("kv", kv_dtype)] if kv_dtype else [])):
        data = value.encode()
        h.update(f"{kind}:{len(data)}:".encode())
        h.update(data)
    return h.digest()


def embedding_extras(spans: Sequence[EmbeddingSpan], start: int, end: int) -> bytes:
    """What the side embeddings that touch positions [start, end) add to a key: digest and offset of each."""
    parts = []
    for span in spans:
        length = span.blob.shape[0]
        if span.start < end and span.start + length > start:
            digest = span.blob.digest or hashlib.blake2b(span.blob.data, digest_size=DIGEST_BYTES).digest()
            parts.append(b"embeds:" + digest + (span.start - start).to_bytes(8, "little", signed=True))
    return b"".join(parts)


def side_extras(side: Sequence[SideIds], start: int, end: int) -> bytes:
    """What the side ids of positions [start, end) add to a key: offset and ids of each run. Empty where there are none."""
    parts = []
    for span in side:
        low, high = max(span.start, start), min(span.start + len(span.ids), end)
        if low < high:
            ids = array("q", [i for row in span.ids[low - span.start : high - span.start] for i in row]).tobytes()
            parts.append(b"side:%d:%d:" % (low - start, high - low) + ids)
    return b"".join(parts)


def extend_chain(
    keys: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    spans: Sequence[EmbeddingSpan] = (),
    side: Sequence[SideIds] = (),
) -> None:
    """Append to `keys` the key of every full block of `token_ids` that has none yet. In place; O(new tokens)."""
    for index in range(len(keys), len(token_ids) // block_size):
        start = index * block_size
        h = hashlib.blake2b(keys[index - 1] if index else root, digest_size=DIGEST_BYTES)
        h.update(array("q", token_ids[start : start + block_size]).tobytes())
        if spans:
            h.update(embedding_extras(spans, start, start + block_size))
        if side:
            h.update(side_extras(side, start, start + block_size))
        keys.append(h.digest())
