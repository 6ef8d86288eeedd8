"""Between a weight source and the layers that ask it for their slices.

A `WeightReader` hands a layer the rows and columns of its shard: fused, converted and packed for compute, with shapes
checked against what the config promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..engine.errors import ModelLoadError
from ..kernels.linear import (
    LinearWeight,
    as_weight,
    concat_rows,
    dequantize,
    from_tensor,
    prepare,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    slice_cols,
)
from .loader import WeightSource
from .parameters import Shapes

WeightsMode = Literal["keep", "dequantize"]
Quantize = Literal["int8", "int4", "fp8"]
INT4_GROUP = 32


class Rows:
    """Rows lo..hi of the parameter NAME.weight (and NAME.bias); `hi` None = all of them."""

    __slots__ = ("hi", "lo", "name")

    def __init__(self, name: str, lo: int = 0, hi: int | None = None) -> None:
        self.name = name
        self.lo = lo
        self.hi = hi


class WeightReader:
    """Gives layers their weights, and counts their bytes.

    weights   "keep" leaves quantized matrices quantized, "dequantize" turns them into `dtype`
    quantize  turns float matrices into int8, int4 or fp8; the head becomes int8, which costs little and keeps quality
    invariant  has matrices multiply so that a row's result never depends on how many rows there are
    """

    def __init__(
        self,
        source: WeightSource,
        shapes: Shapes,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weights: WeightsMode = "keep",
        quantize: Quantize | None = None,
        invariant: bool = False,
    ) -> None:
        self.source = source
        self.shapes = shapes
        self.dtype = dtype
        self.device = torch.device(device)
        self.weights = weights
        self.quantize = quantize
        self.invariant = invariant
        self.num_bytes = 0

    def vector(self, name: str, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        """Entries lo..hi of a norm weight or bias, in the model's dtype."""
        value = self._take(name, 0, lo, hi)
        if isinstance(value, LinearWeight):
            raise ModelLoadError(f"{name}: expected a vector, got a quantized matrix")
        value = value.to(self.device, self.dtype).contiguous()
        self.num_bytes += value.numel() * value.element_size()
        return value

    def bias(self, parts: Sequence[Rows]) -> torch.Tensor:
        """The biases of the parts, one after the other."""
        biases = [self.vector(part.name + ".bias", part.lo, part.hi) for part in parts]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def matrix(
        self, parts: Sequence[Rows], *, columns: tuple[int, int] | None = None, is_head: bool = False
    ) -> tuple[LinearWeight, ...]:
        """The parts' rows, one below the other, packed for compute: one weight, or one per part where formats differ.

        `columns` cuts the inputs; of a part with its own row range, the rows are read and the columns cut from them.
        """
        stored = [self._stored(part, columns, is_head) for part in parts]
        if len(stored) > 1 and len({(weight.format, weight.group) for weight in stored}) == 1:
            stored = [concat_rows(stored)]
        prepared = tuple(prepare(weight, self.dtype, self.device, invariant=self.invariant) for weight in stored)
        self.num_bytes += sum(weight.num_bytes for weight in prepared)
        return prepared

    def table(self, name: str, lo: int, hi: int) -> LinearWeight:
        """Embedding rows lo..hi: looked up row by row, so blocks stay as stored; floats come in the model's dtype."""
        weight = self._as_weight(name, self._take(name + ".weight", 0, lo, hi))
        if not weight.is_quantized or self.weights == "dequantize" or self.device.type != "cpu":
            weight = from_tensor(dequantize(weight, self.dtype).to(self.device))
        self.num_bytes += weight.num_bytes
        return weight

    def _stored(self, part: Rows, columns: tuple[int, int] | None, is_head: bool) -> LinearWeight:
        """One part in storage layout: sliced, then dequantized or quantized as asked."""
        name = part.name + ".weight"
        if columns is not None and part.hi is None:
            weight = self._as_weight(name, self._take(name, 1, *columns))
        else:
            weight = self._as_weight(name, self._take(name, 0, part.lo, part.hi))
            if columns is not None:
                weight = slice_cols(weight, *columns)
        if weight.is_quantized:
            if self.weights == "keep":
                return weight
            weight = from_tensor(dequantize(weight, self.dtype))
        if self.quantize == "fp8" and not is_head:
            return quantize_fp8(weight.tensors["weight"])
        if self.quantize in ("int8", "fp8") or (
            self.quantize == "int4" and (is_head or weight.in_features % INT4_GROUP)
        ):
            return quantize_int8(weight.tensors["weight"])
        if self.quantize == "int4":
            return quantize_int4(weight.tensors["weight"], INT4_GROUP)
        return weight

    def _as_weight(self, name: str, value: torch.Tensor | LinearWeight) -> LinearWeight:
        try:
            return as_weight(value)
        except ValueError as error:
            raise ModelLoadError(f"{name}: {error}") from None

    def _take(self, name: str, dim: int, lo: int, hi: int | None) -> torch.Tensor | LinearWeight:
        """The slice lo..hi of dim, whole when it spans the parameter, with its shape checked."""
        expected = list(self.shapes[name])
        whole = hi is None or (lo == 0 and hi == expected[dim])
        if hi is not None:
            expected[dim] = hi - lo
        try:
            value = self.source.get(name) if hi is None or whole else self.source.get_slice(name, dim, lo, hi)
        except (IndexError, KeyError, RuntimeError) as error:
            raise ModelLoadError(f"{name}: cannot be read: {error}") from None
        except ValueError as error:  # a shard's edge inside a block
            raise error if isinstance(error, ModelLoadError) else ModelLoadError(f"{name}: {error}") from None
        shape = [value.out_features, value.in_features] if isinstance(value, LinearWeight) else list(value.shape)
        if shape != expected:
            raise ModelLoadError(f"{name}: expected shape {expected}, got {shape}")
        return value
