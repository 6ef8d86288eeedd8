"""FP8 layers: against the exact product of the rounded factors, protected steps, rules by name, files that fail closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from motet.engine.errors import ModelLoadError
from motet.kernels import fp8
from motet.kernels.fp8 import Fp8Linear, Steps, fp8_linear, keeps, load_fp8, quantize_linears, rules_of, save_fp8
from motet.kernels.linear import quantize_fp8


def rel(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).norm() / expected.norm())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({"linear": nn.Linear(32, 64)})
        self.to_q = nn.Linear(32, 48)
        self.odd = nn.Linear(48, 20)
        self.ff = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.Linear(32, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ff(self.odd(self.to_q(x))) + self.norm1["linear"](x)
        return out


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(16, 32)
        self.blocks = nn.ModuleList([Block()])
        self.proj_out = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj_out(self.blocks[0](self.x_embedder(x)))
        return out


def toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy().bfloat16()


# ------------------------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_multiplies_what_both_sides_were_rounded_to(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-3, 1, 48)[:, None]  # outputs of many sizes
    x = (torch.randn(2, 5, 64, generator=generator) * torch.logspace(-2, 2, 5)[:, None]).to(dtype)
    b = torch.randn(48, generator=generator).to(dtype) if bias else None
    stored = quantize_fp8(weight).tensors
    got = fp8_linear(x, stored["weight"], stored["scale"], b)
    assert got.shape == (2, 5, 48) and got.dtype is dtype
    assert rel(got, fp8.fp8_linear_reference(x, stored["weight"], stored["scale"], b)) < 4e-3
    if b is None:  # rounding a large bias to bf16 would hide the rest
        size = x.float().norm(dim=-1, keepdim=True) * weight.norm(dim=1) / 8  # of a sum of 64 random products
        errors = ((got.float() - x.float() @ weight.T) / size).flatten(0, 1)
        # 4 bits of mantissa on both sides: each rounds by 0.026 in the mean; no output is much worse off than others.
        assert float(errors.square().mean(0).sqrt().max()) < 0.08 and float(errors.square().mean().sqrt()) < 0.04


def test_views_and_no_rows_and_zeros_and_nan() -> None:
    stored = quantize_fp8(torch.randn(32, 16)).tensors
    x = torch.randn(16, 6).T  # its rows are not contiguous
    assert torch.equal(
        fp8_linear(x, stored["weight"], stored["scale"]), fp8_linear(x.contiguous(), stored["weight"], stored["scale"])
    )
    assert fp8_linear(x[:0], stored["weight"], stored["scale"]).shape == (0, 32)
    x = x.clone()
    x[1], x[2, 3] = 0.0, torch.nan
    out = fp8_linear(x, stored["weight"], stored["scale"])
    assert not out[1].any() and out[2].isnan().all() and out[3:].isfinite().all()


def test_a_rows_numbers_do_not_depend_on_the_other_rows() -> None:
    stored = quantize_fp8(torch.randn(32, 64)).tensors
    x = torch.randn(3, 64)
    alone = fp8_linear(x[:1], stored["weight"], stored["scale"])
    loud = torch.cat([x[:1], 1e4 * x[1:]])
    torch.testing.assert_close(fp8_linear(loud, stored["weight"], stored["scale"])[:1], alone, atol=1e-5, rtol=1e-5)


def test_protected_steps_multiply_exact_activations() -> None:
    layer = nn.Linear(64, 32)
    steps = Steps()
    quantized = Fp8Linear.of(layer, steps)
    x = torch.randn(7, 64)
    rounded = quantized.weight.float() * quantized.weight_scale[:, None]
    fast = quantized(x)
    steps.exact = True
    torch.testing.assert_close(quantized(x), nn.functional.linear(x, rounded, layer.bias))
    assert rel(quantized(x), layer(x)) < rel(fast, layer(x))
    assert [fp8.is_protected(i, 6, first=1, last=2) for i in range(6)] == [True, False, False, False, True, True]


def test_conversions_of_the_model_leave_fp8_alone() -> None:
    layer = Fp8Linear.of(nn.Linear(32, 16), Steps()).to(torch.bfloat16)
    assert layer.weight.dtype is torch.float8_e4m3fn and layer.weight_scale.dtype is torch.float32
    assert layer.bias is not None and layer.bias.dtype is torch.bfloat16


def test_torch_compile_meets_no_break() -> None:
    layer = Fp8Linear.of(nn.Linear(32, 16), Steps())
    x = torch.randn(4, 32)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


# ----------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("family", "name", "kept", "careful"),
    [
        ("flux", "transformer_blocks.0.norm1.linear", True, True),
        ("flux", "transformer_blocks.0.norm1_context.linear", True, True),
        ("flux", "single_transformer_blocks.3.norm.linear", True, True),
        ("flux", "time_text_embed.timestep_embedder.linear_1", True, True),
        ("flux", "x_embedder", True, True),
        ("flux", "proj_out", True, True),
        ("flux", "single_transformer_blocks.3.proj_out", False, False),
        ("flux", "single_transformer_blocks.3.proj_mlp", False, True),
        ("flux", "transformer_blocks.0.ff.net.2", False, True),
        ("flux", "transformer_blocks.0.attn.to_q", False, False),
        ("qwen-image", "transformer_blocks.1.img_mod.1", True, True),
        ("qwen-image", "transformer_blocks.1.img_mlp.net.2", True, True),
        ("qwen-image", "transformer_blocks.1.txt_mlp.net.2", False, False),
        ("never heard of", "blocks.1.attn.to_v", False, False),
        ("never heard of", "norm_out.linear", True, True),
    ],
)
def test_rules(family: str, name: str, kept: bool, careful: bool) -> None:
    assert keeps(name, rules_of(family)) is kept
    assert keeps(name, rules_of(family), careful=True) is careful


def test_a_model_is_quantized_where_the_rules_let_it() -> None:
    model, exact = toy(), toy()
    _, layers = quantize_linears(model, rules_of("flux"))
    assert {name for name, kind in layers.items() if kind == "fp8"} == {"blocks.0.to_q", "blocks.0.ff.2"}
    assert layers["blocks.0.odd"] == layers["blocks.0.norm1.linear"] == layers["proj_out"] == "bf16"
    x = torch.randn(9, 16).bfloat16()
    assert 0 < rel(model(x), exact(x)) < 0.05
    _, careful = quantize_linears(toy(), rules_of("flux"), careful=True)
    assert careful["blocks.0.ff.2"] == "bf16"


# ----------------------------------------------------------------------------------------------------------------- files


def written(folder: Path) -> tuple[Path, nn.Module]:
    model = toy()
    _, layers = quantize_linears(model, rules_of("flux"))
    save_fp8(model, layers, folder / "model.safetensors")
    return folder / "model.safetensors", model


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(str(path), framework="pt") as file:
        told = json.loads(file.metadata()["_quantization_metadata"])
        assert file.get_tensor("blocks.0.to_q.weight_scale").shape == (48,)
    assert told["format"] == "rowwise-float8_e4m3fn" and told["layers"]["blocks.0.to_q"] == "fp8"
    x = torch.randn(3, 16).bfloat16()
    for again in (toy(seed=1), Toy().to("meta")):
        steps = load_fp8(again, path)
        assert torch.equal(again(x), model(x))
        steps.exact = True
        assert not torch.equal(again(x), model(x))


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({}, {"drop": True}, "no _quantization_metadata"),
        ({}, {"format": "nvfp4"}, "expected the format"),
        ({}, {"layers": {"proj_out": "int8"}}, "layers: expected a map"),
        ({}, {"without": "blocks.0.odd"}, "map of layers and the model differ: 1 missing"),
        ({}, {"more": "blocks.9.to_q"}, "1 unknown, first .'blocks.9.to_q'"),
        ({"blocks.0.to_q.weight_scale": None}, {}, "its tensors and the model differ: 1 missing"),
        ({"blocks.0.to_q.weight_scale": torch.ones(1)}, {}, r"expected the shape \[48\], got \[1\]"),
        ({"blocks.0.to_q.weight_scale": torch.zeros(48)}, {}, "expected positive numbers"),
        ({"blocks.0.to_q.weight_scale": torch.ones(48).half()}, {}, "expected float32"),
        ({"blocks.0.to_q.weight": torch.ones(48, 32)}, {}, "the map says fp8"),
        ({"proj_out.weight": torch.ones(16, 64).to(torch.float8_e4m3fn)}, {}, "where the map says no fp8"),
        ({"proj_out.weight_scale": torch.ones(16)}, {}, "1 unknown"),
        ({"blocks.0.to_q.input_scale": torch.ones(2)}, {}, "expected one float32"),
    ],
)
def test_a_file_that_disagrees_is_refused(tmp_path: Path, tensors: Change, metadata: Change, words: str) -> None:
    path, _ = written(tmp_path)
    with safe_open(str(path), framework="pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}
        told = json.loads(file.metadata()["_quantization_metadata"])
    held = {name: t for name, t in (held | tensors).items() if t is not None}
    told["layers"].pop(metadata.get("without"), None)
    if "more" in metadata:
        told["layers"][metadata["more"]] = "fp8"
    told |= {key: value for key, value in metadata.items() if key in ("format", "layers")}
    save_file(held, str(path), metadata={} if "drop" in metadata else {"_quantization_metadata": json.dumps(told)})
    model = toy(seed=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ModelLoadError, match=words):
        load_fp8(model, path)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())


def test_scales_of_activations_are_accepted_and_no_file_is_an_error(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    with safe_open(str(path), framework="pt") as file:
        held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    save_file(held | {"blocks.0.to_q.input_scale": torch.ones(1)}, str(path), metadata=metadata)
    again = toy(seed=1)
    load_fp8(again, path)
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(again(x), model(x))
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelLoadError, match="not a usable safetensors file"):
        load_fp8(toy(), tmp_path / "broken.safetensors")
