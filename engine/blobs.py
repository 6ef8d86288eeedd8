"""Tensors to bytes and back: `Blob` is how a tensor crosses a process, never pickle."""

from __future__ import annotations

import hashlib

import torch

from .errors import InvalidRequest
from .params import check_blob
from .types import Blob

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_blob(tensor: torch.Tensor) -> Blob:
    """Copy a tensor's values into a Blob. Raises InvalidRequest for a dtype that Blob has no name for."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidRequest(f"expected a tensor of {', '.join(_DTYPES)}, got {tensor.dtype}")
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return Blob(dtype=name, shape=tuple(tensor.shape), data=data, digest=digest)  # type: ignore[arg-type]


def from_blob(blob: Blob) -> torch.Tensor:
    """A tensor with the blob's values. Raises InvalidRequest when bytes and shape disagree, or the bytes lie elsewhere."""
    check_blob(blob)
    return torch.frombuffer(bytearray(blob.data), dtype=torch.uint8).view(_DTYPES[blob.dtype]).reshape(blob.shape)
