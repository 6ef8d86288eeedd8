"""benchmarks/quality.py at toy size, with teeth: a wrong weight on our side makes the claim fail."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from motet.benchmarks import claims, peer_worker, quality
from motet.benchmarks.peer_worker import PeerError
from motet.benchmarks.quality import CLAIMS, Sizes
from motet.engine.config import EngineConfig
from motet.engine.load import load_runner

from ..models.gguf_writing import write_gguf
from ..streaming.fake_engine import SPECIALS, write_tokenizer

SIZES = Sizes(windows=2, window=40, licence=40, chunk=16)
OPTIONS = argparse.Namespace(dtype="float32")


@pytest.fixture(scope="module")
def network() -> Any:
    """Two layers, all rows a multiple of 64, weights large enough that probabilities are far from equal."""
    config = transformers.LlamaConfig(
        vocab_size=256 + len(SPECIALS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 2:
                weight.mul_(5.0 if "embed" not in name else 20.0)
    return made


@pytest.fixture(scope="module")
def folder(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    network.save_pretrained(path)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def windows(folder: Path) -> list[list[int]]:
    return quality.read_text(folder, SIZES)


def test_the_text_is_the_licence_and_then_the_documentation(folder: Path, windows: list[list[int]]) -> None:
    text = [bytes(window).decode() for window in windows]
    assert quality.TEXT.read_text().startswith(text[0])
    assert text[1].startswith('The "assert" statement')
    assert [len(window) for window in windows] == [40, 40]
    assert quality.read_text(folder, SIZES) == windows


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_format_of_ours_is_as_good_as_its_own_weights(kind: str, folder: Path, windows: list[list[int]]) -> None:
    row = quality.measure(CLAIMS[f"ppl_{kind}"], kind, folder, windows, SIZES, OPTIONS)
    assert row.holds and row.ratio == pytest.approx(1.0, abs=2e-3), row
    assert row.why.count("row") >= 3 and "before quantization" in row.why


def test_the_reference_has_the_quantized_values(
    folder: Path, windows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the values before quantization the ratio is another one: the reference is not just any network."""
    row = quality.measure(CLAIMS["ppl_int4"], "int4", folder, windows, SIZES, OPTIONS)
    monkeypatch.setattr(quality, "requantize", lambda network, kind: None)
    other = quality.measure(CLAIMS["ppl_int4"], "int4", folder, windows, SIZES, OPTIONS)
    assert row.ratio is not None and other.ratio is not None and row.peer is not None and other.peer is not None
    assert abs(other.ratio - 1) > 5 * abs(row.ratio - 1) and abs(other.peer / row.peer - 1) > 1e-3


def test_a_damaged_weight_of_ours_fails_the_claim(
    folder: Path, windows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(name: str, config: EngineConfig) -> Any:
        loaded = load_runner(name, config)
        norm: Any = loaded.model.norm  # type: ignore[attr-defined]
        with torch.inference_mode():
            norm.weight.mul_(torch.linspace(0.5, 1.5, norm.weight.numel()))
        return loaded

    monkeypatch.setattr(quality, "load_runner", damaged)
    row = quality.measure(CLAIMS["ppl_int8"], "int8", folder, windows, SIZES, OPTIONS)
    assert not row.holds and row.ratio is not None and row.ratio > quality.TARGET


def test_all_paths_score_the_same_tokens_as_the_network(network: Any, folder: Path, windows: list[list[int]]) -> None:
    expected = quality.reference_scores(network, windows)
    loaded = load_runner(str(folder), EngineConfig(dtype="float32", device="cpu", num_blocks=16, max_num_seqs=4))
    found = quality.our_scores(loaded.runner, windows, len(loaded.groups), SIZES)
    assert [len(scores) for scores in found.values()] == [2, 2, 2]
    for scores in found.values():
        for ours, theirs in zip(scores, expected):
            assert ours == pytest.approx(theirs, abs=2e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_is_read_into_the_reference_as_it_is(
    kind: str, network: Any, folder: Path, windows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    path = write_gguf(tmp_path / f"toy.{kind}.gguf", network, kind)
    monkeypatch.setattr(quality.peers, "requantized", lambda packaged, kind: path)
    monkeypatch.setattr(quality, "from_gguf", lambda path: dequantized(path, folder, gguf))
    row = quality.measure(CLAIMS[f"ppl_{kind.lower()}"], kind.lower(), folder, windows, SIZES, OPTIONS)
    assert row.holds and row.ratio == pytest.approx(1.0, abs=2e-3), row


def dequantized(path: Path, folder: Path, gguf: Any) -> Any:
    """The toy as the `gguf` package reads it (transformers' own reader wants a tokenizer inside)."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    with torch.no_grad():
        for tensor in gguf.GGUFReader(str(path)).tensors:
            parts = tensor.name.split(".")
            if parts[0] == "blk" and parts[2] in names:
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
                getattr(network.model.layers[int(parts[1])].mlp, names[parts[2]]).weight.copy_(values)
            elif parts[0] in ("output", "token_embd") and parts[1] == "weight":
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
                target = network.lm_head if parts[0] == "output" else network.model.embed_tokens
                target.weight.copy_(values)
            elif parts[0] == "blk" and parts[2] in ("attn_v", "attn_output", "attn_q", "attn_k"):
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
                attention = network.model.layers[int(parts[1])].self_attn
                short = {"attn_v": "v_proj", "attn_output": "o_proj", "attn_q": "q_proj", "attn_k": "k_proj"}[parts[2]]
                heads = {"attn_q": 4, "attn_k": 2}.get(parts[2])
                if heads:  # llama.cpp's order of rotary rows
                    values = values.view(heads, 8, 2, -1).transpose(1, 2).reshape(values.shape)
                getattr(attention, short).weight.copy_(values)
    return network


def test_a_file_that_cannot_be_made_is_a_row_that_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Path:
        raise PeerError(f"{name} cannot be built (status 1): no compiler")

    monkeypatch.setattr(peer_worker, "build", absent)
    file = tmp_path / "rows.json"
    arguments = ["--rehearse", "--model", str(folder), "--only", "ppl_q8_0,ppl_int8", "--json", str(file)]
    assert quality.main(arguments) == 0
    first, second = json.loads(file.read_text())
    assert first["claim"] == "ppl_q8_0" and "no compiler" in first["why"] and first["holds"] is False
    assert second["ours"] > 1 and second["holds"] is False and second["why"].startswith("a rehearsal")
    assert set(first) == set(claims.KEYS)


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    assert quality.perplexity([[math.log(0.5)], [math.log(0.125), math.log(0.5)]]) == pytest.approx(2 ** (5 / 3))
