"""Folders of picture models: what is read, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.engine.errors import ModelLoadError
from motet.kernels.fp8 import Fp8Linear, quantize_linears, rules_of, save_fp8
from motet.models.diffusion_folder import load_picture, read_card
from motet.models.diffusion_text import ClipCaptions

from ..tiny import lively, tiny_picture

CPU = (torch.device("cpu"),) * 3
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """motet-emoji's layout; beside it "few" and its base."""
    root = tmp_path_factory.mktemp("pictures")
    tiny_picture(root / "few", few_step=True)
    return tiny_picture(root / "plain")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def load(path: Path, **options: Any) -> Any:
    return load_picture(path, dtype=torch.float32, devices=CPU, **options)


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_our_layout(made: Path) -> None:
    loaded = load(made)
    assert (loaded.family, loaded.dtype, loaded.card["steps"], loaded.card["guidance"]) == (
        "flux",
        torch.float32,
        4,
        "cfg",
    )
    painter = loaded.painter
    assert painter.latent_shape(64, 64) == (4, 16, 16) and hasattr(painter, "begin")
    (cond,) = painter.encode(["a red cat"])
    assert painter.num_tokens(cond) == 5 and painter.num_bytes(cond) == (5 + 1) * 32 * 4
    assert painter.decode(torch.zeros(1, 4, 16, 16)).shape == (1, 64, 64, 3)
    stored = load_file(made / "transformer" / WEIGHTS)
    name = "single_transformer_blocks.0.proj_mlp.weight"
    held = painter.denoiser.model.get_parameter(name)
    assert stored[name].dtype is torch.float8_e4m3fn and torch.equal(held, stored[name].float())
    assert loaded.weight_bytes > 4 * sum(tensor.numel() for tensor in stored.values())


def test_a_few_step_folder_has_the_rest_beside_it(made: Path) -> None:
    family, card, base = read_card(made.with_name("few"))
    assert (family, base) == ("flux", made.with_name("few-base"))
    assert (card["sigmas"], card["steps"], card["few_step"], card["guidance"]) == ([1.0, 0.5], 2, True, "none")
    assert load(made.with_name("few")).painter.latent_shape(64, 64) == (4, 16, 16)


@pytest.mark.parametrize(
    "base", ["/etc", "../../etc", "../a/../../b", "..", "../.", "../..", "../absent", "plain", 7, "../a\n"]
)
def test_a_base_leads_nowhere_else(folder: Path, base: Any) -> None:
    edit(folder / "motet_image.json", base=base)
    with pytest.raises(ModelLoadError, match="base"):
        read_card(folder)


def test_a_base_that_is_a_link_to_elsewhere_is_refused(folder: Path, made: Path) -> None:
    (folder.parent / "base").symlink_to(made)
    edit(folder / "motet_image.json", base="../base")
    with pytest.raises(ModelLoadError, match="base"):
        read_card(folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("family", "sdxl", "family"),
        ("family", None, "family"),
        ("sizes", [[64, 99999]], "sizes"),
        ("sizes", "64x64", "sizes"),
        ("sizes", [[64, True]], "sizes"),
        ("steps", 0, "steps"),
        ("steps", "4", "steps"),
        ("guidance_scale", float("nan"), "guidance_scale"),
        ("guidance", "loud", "guidance"),
        ("sigmas", [0.5, 1.0], "sigmas"),
        ("sigmas", [1.0, "x"], "sigmas"),
        ("few_step", True, "few_step"),
        ("latent_scale", 8, "latent_scale"),
    ],
)
def test_a_card_that_cannot_be(folder: Path, field: str, value: Any, said: str) -> None:
    edit(folder / "motet_image.json", **{field: value})
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "vae" / WEIGHTS).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="vae: 1 of 1 weight files are missing.*pickled"):
        load(folder)
    weights = folder / "transformer" / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=f"transformer/{WEIGHTS}: not a usable safetensors file"):
        load(folder)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    lost = tensors.pop("proj_out.weight")
    save_file(tensors, weights)
    with pytest.raises(ModelLoadError, match="1 weights are missing, first.*proj_out.weight"):
        load(folder)
    save_file(tensors | {"proj_out.weight": lost[:8].clone()}, weights)
    with pytest.raises(ModelLoadError, match=r"proj_out.weight: expected the shape \[16, 32\], got \[8, 32\]"):
        load(folder)
    (folder / "transformer" / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="transformer/config.json: not JSON"):
        load(folder)
    (folder / "transformer" / "config.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ModelLoadError, match="expected FluxTransformer2DModel"):
        load(folder)
    (folder / "motet_image.json").unlink()
    with pytest.raises(ModelLoadError, match="neither motet_image.json nor model_index.json"):
        load(folder)


def test_a_config_that_does_not_fit_its_class(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", num_layers="many")
    with pytest.raises(ModelLoadError, match="not a FluxTransformer2DModel"):
        load(folder)


def test_fp8_weights_are_made_or_read(folder: Path, made: Path) -> None:
    painter = load(made, weights="fp8").painter
    quantized = painter.denoiser.model
    painter.protect(True)
    layers_of_it = [layer for layer in quantized.modules() if isinstance(layer, Fp8Linear)]
    assert layers_of_it and all(layer.steps.exact for layer in layers_of_it)
    assert not hasattr(load(made).painter, "protect")
    kinds = {name: type(layer) for name, layer in quantized.named_modules() if hasattr(layer, "in_features")}
    assert kinds["single_transformer_blocks.0.proj_mlp"] is Fp8Linear
    assert kinds["proj_out"] is kinds["transformer_blocks.0.norm1.linear"] is torch.nn.Linear
    plain = load(made).painter.denoiser.model
    _, layers = quantize_linears(plain, rules_of("flux"))
    save_fp8(plain, layers, folder / "transformer" / WEIGHTS)
    again = load(folder).painter.denoiser.model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in quantized.state_dict().items())


def hub_layout(folder: Path, *, guided: bool) -> Path:
    """Flux as diffusers saves it, with CLIP and T5, tiny; weights of the transformer in shards."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=guided, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    lively(transformer)
    transformer.save_pretrained(folder / "transformer", max_shard_size="50KB")
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, shift_factor=0.1, scaling_factor=0.4,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    vae.save_pretrained(folder / "vae")
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": guided}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return folder


@pytest.mark.parametrize("guided", [True, False])
def test_diffusers_layout(guided: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_layout(tmp_path / "hub", guided=guided)
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 1
    # Its two text encoders have tests of their own.
    monkeypatch.setattr(
        "motet.models.diffusion_folder._captions", lambda *_, **__: ClipCaptions(made, CPU[0], torch.float32)
    )
    loaded = load(folder)
    assert loaded.painter.latent_shape(1024, 512) == (4, 256, 512)
    assert [1024, 1024] in loaded.card["sizes"] and loaded.card["scheduler"]["shift"] == 3.0
    told = (loaded.card["guidance"], loaded.card["steps"], loaded.card["guidance_scale"])
    assert told == (("embedded", 28, 3.5) if guided else ("none", 4, 1.0))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    with pytest.raises(ModelLoadError, match="StableDiffusionXLPipeline.*not served"):
        load(folder)


def test_an_index_names_plain_files_only(tmp_path: Path) -> None:
    folder = hub_layout(tmp_path / "hub", guided=True)
    index = folder / "transformer" / f"{WEIGHTS}.index.json"
    edit(index, weight_map={"x": "../../elsewhere.safetensors"})
    with pytest.raises(ModelLoadError, match="no plain"):
        load(folder)
