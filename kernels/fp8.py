"""FP8 (e4m3) linear layers of denoisers: row-wise W8A8, W8A16 for protected steps, which layers stay as they are, files.

y = (x8 @ w8^T) * x_scale * w_scale + bias: one scale for each row of x, found while running, and one for each output, both
fp32, largest magnitude = 448. `torch._scaled_mm` multiplies, on a CPU too (there it is for tests: no CPU multiplies FP8).
The first and last steps of a denoising can be protected: `Steps.exact` makes the layers that share it dequantize their
weights and multiply 16 bits (W8A16). It is set once a step, so that all branches of a guidance agree.

Modulation, embedding and output layers lose most and cost least: `RULES` names those that keep their dtype, family by family.

A quantized file is a safetensors file whose header carries, under `_quantization_metadata`,
{"format": "rowwise-float8_e4m3fn", "layers": {name: "fp8" | "bf16"}}, one entry for each linear layer; an "fp8" layer has
`name.weight` e4m3 [out, in] and `name.weight_scale` fp32 [out]. What does not agree with that is refused as a whole.

What it does not know: families beyond the table, and whether a picture is still good: compare it with the exact one.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.errors import ModelLoadError
from .dispatch import gpu_ops
from .linear import LinearWeight, dequantize, quantize_fp8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
FORMAT, METADATA = "rowwise-float8_e4m3fn", "_quantization_metadata"
ALIGNED = 16  # in and out features of a layer that tensor cores take


# ----------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which linear layers of a family keep their dtype: patterns of fnmatch over dotted names.

    keep     always
    careful  also where quality goes before speed: what recipes with one scale a tensor had to leave out
    """

    keep: tuple[str, ...]
    careful: tuple[str, ...] = ()


_COMMON = (
    "norm_out.linear", "proj_out", "final_layer*",  # the output, once a step
    "*norm.linear", "*norm1.linear", "*norm1_context.linear", "*norm2.linear", "*modulation*", "adaln_single*",  # AdaLN
    "x_embedder*", "context_embedder*", "time_text_embed*", "time_embed*", "*timestep_embedder*", "*guidance_embedder*",
    "*text_embedder*", "*caption_projection*", "condition_embedder*", "patch_embedding*",
)  # fmt: skip

RULES: dict[str, Rules] = {
    "default": Rules(keep=_COMMON),
    "flux": Rules(keep=_COMMON, careful=("*.ff.*", "*.ff_context.*", "*.proj_mlp")),
    "qwen-image": Rules(keep=(*_COMMON, "img_in", "txt_in", "*img_mod*", "*txt_mod*", "*img_mlp.net.2")),
    # Quantizing all of Z-Image made noise of its pictures.
    "z-image": Rules(keep=(*_COMMON, "*adaLN_modulation*", "*_embedder*", "all_x_embedder*", "all_final_layer*")),
}


def rules_of(family: str) -> Rules:
    """The rules of a family, or the default ones, which keep every layer of modulation, embedding and output."""
    return RULES.get(family, RULES["default"])


def keeps(name: str, rules: Rules, *, careful: bool = False) -> bool:
    """Whether the layer of this dotted name stays as it is."""
    patterns = rules.keep + (rules.careful if careful else ())
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ------------------------------------------------------------------------------------------------------------- the layer


@dataclass(slots=True)
class Steps:
    """What the layers of one model share. The engine sets `exact` before a step that is protected."""

    exact: bool = False


def is_protected(step: int, num_steps: int, *, first: int, last: int) -> bool:
    """Whether step 0..num_steps - 1 is among the first or last so many."""
    return step < first or step >= num_steps - last


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> e4m3 [M, K] and fp32 scales [M, 1]: a row's largest magnitude becomes 448, a row of zeros stays zeros.

    A row with NaN or an infinity stays broken.
    """
    # A compiler fuses the lines below as well as we do.
    if not torch.compiler.is_compiling() and (gpu := gpu_ops(x.device.type)) is not None and gpu.can_quantize_rows(x):
        return gpu.quantize_rows_on_gpu(x)  # type: ignore[no-any-return]
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(1e-12)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A8: x [..., in], weight e4m3 [out, in], scale fp32 [out] -> [..., out] in x's dtype. Any strides of x."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.shape[0]:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])
    quantized, row_scale = quantize_rows(rows)
    # On CUDA row-wise scales come with bf16 out and a bf16 bias alone.
    out_dtype = x.dtype if x.is_cpu else torch.bfloat16
    y: Tensor = torch._scaled_mm(
        quantized,
        weight.t(),
        scale_a=row_scale,
        scale_b=scale[None],
        bias=None if bias is None else bias.to(out_dtype),
        out_dtype=out_dtype,
    )
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def fp8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in fp32 over both rounded factors: what `fp8_linear` is tested against."""
    wide = x.float()
    row_scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1e-12)
    rounded = (wide / row_scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * row_scale
    return F.linear(rounded, weight.float() * scale[:, None], None if bias is None else bias.float()).to(x.dtype)


class Fp8Linear(nn.Module):
    """`nn.Linear` with an e4m3 weight [out, in] and a scale for each output, `weight_scale` fp32 [out]."""

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, steps: Steps) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.steps = steps
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, layer: nn.Linear, steps: Steps) -> Fp8Linear:
        """Quantizes a layer."""
        quantized = quantize_fp8(layer.weight.detach()).tensors
        bias = None if layer.bias is None else layer.bias.detach()
        return cls(quantized["weight"], quantized["scale"], bias, steps)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        if not self.steps.exact:
            return fp8_linear(x, self.weight, self.weight_scale, self.bias)
        tensors = {"weight": self.weight, "scale": self.weight_scale}
        stored = LinearWeight(
            format="fp8", tensors=tensors, out_features=self.out_features, in_features=self.in_features
        )
        return F.linear(x, dequantize(stored, x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Linear:
        """`module.to(dtype)` moves the weight and its scale to a device, but never converts them."""
        weight, scale = self.weight, self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype is not E4M3:
            self.weight = weight.to(self.weight.device)
        if self.weight_scale.dtype is not torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, fp8"


def quantize_linears(model: nn.Module, rules: Rules, *, careful: bool = False) -> tuple[Steps, dict[str, str]]:
    """Replaces the `nn.Linear` layers of a model, in place, by `Fp8Linear`, except those of the rules and odd sizes.

    Returns what the layers share and the map of the file: dotted name -> "fp8" or "bf16" (kept, whatever its dtype).
    """
    steps = Steps()
    layers: dict[str, str] = {}
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        odd = layer.in_features % ALIGNED or layer.out_features % ALIGNED
        layers[name] = "bf16" if odd or keeps(name, rules, careful=careful) else "fp8"
        if layers[name] == "fp8":
            _replace(model, name, Fp8Linear.of(layer, steps))
    return steps, layers


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


# ------------------------------------------------------------------------------------------------------------------ files


def save_fp8(model: nn.Module, layers: Mapping[str, str], path: Path) -> None:
    """Writes a model that `quantize_linears` changed, with its map. All or nothing: never half a file at `path`."""
    from safetensors.torch import save_file

    tensors = {name: t.detach().contiguous().clone() for name, t in model.state_dict().items()}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    metadata = {METADATA: json.dumps({"format": FORMAT, "layers": dict(layers)}, sort_keys=True), "format": "pt"}
    try:
        save_file(tensors, str(part), metadata=metadata)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_fp8(model: nn.Module, path: Path) -> Steps:
    """Fills a model, built with plain linear layers (a meta-built one too), from a quantized file, in place.

    Raises ModelLoadError, the model unchanged, where header, tensors and model do not agree in everything. Scales of
    activations (`name.input_scale`), which other writers add, are accepted and not used.
    """
    # Here, since the layers must run where only torch and Triton are installed (benchmarks/gpu_diffusion.py).
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name}: not a usable safetensors file: {str(error)[:200]}") from None
    layers = _read_layers(metadata, path.name)
    _check_layers(model, layers, tensors, path.name)
    for name in layers:
        tensors.pop(f"{name}.input_scale", None)
    steps = Steps()
    for name, kind in layers.items():
        if kind == "fp8":
            weight, scale = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
            _replace(model, name, Fp8Linear(weight, scale, tensors.pop(f"{name}.bias", None), steps))
    model.load_state_dict(tensors, strict=False, assign=True)  # names and shapes were compared above
    return steps


def _read_layers(metadata: Mapping[str, str], file: str) -> dict[str, str]:
    """The map of the header, checked for form."""
    if METADATA not in metadata:
        raise ModelLoadError(f"{file}: its header has no {METADATA}: not a quantized file")
    try:
        told = json.loads(metadata[METADATA])
    except ValueError:
        raise ModelLoadError(f"{file}: {METADATA} is not JSON") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        found = told.get("format") if isinstance(told, dict) else told
        raise ModelLoadError(f"{file}: expected the format {FORMAT!r}, got {str(found)[:80]!r}")
    layers = told.get("layers")
    if not isinstance(layers, dict) or not all(kind in ("fp8", "bf16") for kind in layers.values()):
        raise ModelLoadError(f"{file}: layers: expected a map of names to fp8 or bf16")
    return layers


def _check_layers(model: nn.Module, layers: dict[str, str], tensors: Mapping[str, Tensor], file: str) -> None:
    """Raises ModelLoadError at the first disagreement of the map, the tensors and the model."""

    def need(holds: bool, words: str) -> None:
        if not holds:
            raise ModelLoadError(f"{file}: {words}")

    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    need(layers.keys() == linears.keys(), _difference("the map of layers", layers.keys(), linears.keys()))
    expected = {name: t.shape for name, t in model.state_dict().items()}
    optional = {f"{name}.input_scale" for name, kind in layers.items() if kind == "fp8"}
    for name, kind in layers.items():
        if kind == "fp8":
            expected[f"{name}.weight_scale"] = torch.Size([linears[name].out_features])
    found = tensors.keys() - optional
    need(found == expected.keys(), _difference("its tensors", found, expected.keys()))
    for name, shape in expected.items():
        t = tensors[name]
        need(t.shape == shape, f"{name}: expected the shape {list(shape)}, got {list(t.shape)}")
        layer, _, last = name.rpartition(".")
        fp8 = layers.get(layer) == "fp8"
        if fp8 and last == "weight":
            need(t.dtype is E4M3, f"{name}: the map says fp8, the tensor is {t.dtype}")
            need(all(size % ALIGNED == 0 for size in t.shape), f"{name}: {list(t.shape)} are no multiples of {ALIGNED}")
        elif fp8 and last == "weight_scale":
            need(t.dtype is torch.float32, f"{name}: expected float32, got {t.dtype}")
            need(bool((t.isfinite() & (t > 0)).all()), f"{name}: expected positive numbers")
        else:
            need(t.dtype.itemsize > 1 or not t.is_floating_point(), f"{name}: {t.dtype} where the map says no fp8")
    for name in optional & tensors.keys():
        need(tensors[name].numel() == 1 and tensors[name].dtype is torch.float32, f"{name}: expected one float32")


def _difference(what: str, found: Any, expected: Any) -> str:
    missing, more = sorted(expected - found), sorted(found - expected)
    return (
        f"{what} and the model differ: {len(missing)} missing, first {str(missing[:1])[:100]}, "
        f"{len(more)} unknown, first {str(more[:1])[:100]}"
    )
