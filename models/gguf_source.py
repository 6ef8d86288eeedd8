"""Weights from a GGUF file under their Hugging Face names.

Q4_0, Q4_1 and Q8_0 matrices stay quantized (`LinearWeight` over the mapped bytes); F32, F16 and BF16 come as they are;
the K-quants come as fp32. What the converter did to a family's tensors is undone here: llama's row order of q and k
(rows only, so that it works on quantized rows too) and the 1 that Gemma's norms had added.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.errors import ModelLoadError
from ..kernels.linear import Format, LinearWeight, from_blocks, slice_cols
from .gguf import GGUFFile, dequantize
from .gguf_families import Origin, family_of, gguf_config, hf_names

_KEPT: dict[str, Format] = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}


class GGUFSource:
    """A `WeightSource` (models/loader.py) over one GGUF file."""

    def __init__(self, path: Path, *, keep_quantized: bool = True) -> None:
        """`keep_quantized=False` gives every tensor as a plain Tensor (fp32 where the file is quantized)."""
        self.file = GGUFFile(path)
        self.config = gguf_config(self.file)
        self._family = family_of(self.file)
        self._origins = hf_names(self.file, self._family)
        self._keep = keep_quantized

    def names(self) -> set[str]:
        return set(self._origins)

    def _origin(self, name: str) -> Origin:
        if name not in self._origins:
            raise ModelLoadError(f"{self.file.path.name}: the weights hold no tensor named {name[:120]!r}")
        return self._origins[name]

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self._origin(name)
        shape = self.file.tensors[origin.tensor].shape
        return shape if origin.expert is None else shape[1:]

    def get(self, name: str) -> Tensor | LinearWeight:
        return self._read(name, None)

    def get_slice(self, name: str, dim: int, lo: int, hi: int) -> Tensor | LinearWeight:
        shape = self.shape(name)
        if not 0 <= dim < len(shape) or not 0 <= lo <= hi <= shape[dim]:
            raise ModelLoadError(
                f"tensor {name[:80]!r} of shape {list(shape)} has no slice {lo}:{hi} in dimension {dim}"
            )
        return self._read(name, (dim, lo, hi))

    def _read(self, name: str, cut: tuple[int, int, int] | None) -> Tensor | LinearWeight:
        origin, shape = self._origin(name), self.shape(name)
        kind = self.file.tensors[origin.tensor].type
        blocks = self.file.blocks(origin.tensor)  # [*shape[:-1], blocks, bytes], a view
        if origin.expert is not None:
            blocks = blocks[origin.expert]
        if self._family.permuted and (rows := self._permuted_heads(name, shape[0])):
            blocks = np.ascontiguousarray(_undo_permutation(blocks, rows))
        if len(shape) >= 2 and cut is not None and cut[0] < len(shape) - 1:  # rows: cut before anything is computed
            blocks = blocks[(slice(None),) * cut[0] + (slice(cut[1], cut[2]),)]
            cut = None
        if self._keep and len(shape) == 2 and kind.name in _KEPT:
            weight = from_blocks(_KEPT[kind.name], torch.from_numpy(blocks))
            aligned = cut is None or not (cut[1] % 32 or cut[2] % 32)
            if aligned:
                return weight if cut is None else slice_cols(weight, cut[1], cut[2])
        if kind.name == "BF16":
            raw = np.ascontiguousarray(blocks).view(np.int16).reshape(blocks.shape[:-1])  # blocks of one number
            tensor = torch.from_numpy(raw).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(dequantize(blocks, kind))
        if cut is not None:
            tensor = tensor.narrow(cut[0], cut[1], cut[2] - cut[1])
        if self._family.norm_plus_one and name.endswith("norm.weight"):
            tensor = tensor - 1
        return tensor

    def _permuted_heads(self, name: str, num_rows: int) -> int:
        """How many heads the rows of this tensor belong to, or 0 when its rows are in order."""
        stem = name.rpartition(".")[0]
        if stem.endswith(".self_attn.q_proj"):
            heads = int(self.config["num_attention_heads"])
        elif stem.endswith(".self_attn.k_proj"):
            heads = int(self.config["num_key_value_heads"])
        else:
            return 0
        if num_rows % (2 * heads):
            raise ModelLoadError(f"{self.file.path.name}: {name}: {num_rows} rows do not divide among {heads} heads")
        return heads


def _undo_permutation(blocks: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows (2 i, 2 i + 1) of each head were (i, i + d/2) before the converter; works on any trailing shape.

    A 1-D bias is one "row" of blocks, [rows, 1 number]; its elements lie along axis 0 as well.
    """
    rows = blocks.shape[0]
    return blocks.reshape(heads, rows // heads // 2, 2, *blocks.shape[1:]).swapaxes(1, 2).reshape(blocks.shape)
