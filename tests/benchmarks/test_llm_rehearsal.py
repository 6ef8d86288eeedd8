"""The whole of benchmarks/llm.py but the peers, at sizes that mean nothing, on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from motet.benchmarks import llm, peer_worker
from motet.benchmarks.llm_claims import peers, setting, speed
from motet.benchmarks.peer_worker import PeerError

from ..streaming.fake_engine import SPECIALS, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers over bytes, with a tokenizer and a chat template."""
    config = transformers.LlamaConfig(
        vocab_size=256 + len(SPECIALS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config).eval()
    # All logits equal, so the lowest id wins: byte 0, a whole character. A first token of half one would be held back.
    torch.nn.init.zeros_(network.lm_head.weight)
    path = tmp_path_factory.mktemp("bytes")
    network.save_pretrained(path)
    return write_tokenizer(path)


def absent(name: str) -> Path:
    raise PeerError(f"{name} cannot be built (status 1): no compiler")


@pytest.fixture
def rehearse(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run some claims without peers; gives the rows of the JSON file by claim."""
    monkeypatch.setattr(peer_worker, "build", absent)
    monkeypatch.setattr(setting, "SETTLE_S", 0.0)

    def run(*names: str) -> dict[str, dict[str, Any]]:
        arguments = ["--rehearse", "--model", str(model), "--dtype", "float32", "--weights", "auto", "--threads", "1"]
        file = tmp_path / "rows.json"
        assert llm.main([*arguments, "--only", ",".join(names), "--json", str(file)]) == 0
        rows = {row["claim"]: row for row in json.loads(file.read_text())}
        assert set(rows) == set(names)
        assert all(row["why"].startswith("a rehearsal") and row["holds"] is False for row in rows.values())
        return rows

    return run


def test_every_claim_belongs_to_one_group() -> None:
    grouped = [name for names, _ in llm.groups() for name in names]
    assert sorted(grouped) == sorted(setting.CLAIMS)


def test_without_peers_ours_is_measured_and_the_row_says_why(
    rehearse: Callable[..., dict[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rehearse(*speed.PACKAGED, *speed.REQUANTIZED)
    for claim in speed.PACKAGED:
        row = rows[claim]
        assert row["peer"] is None and "no compiler" in row["why"] and row["ours"] > 0, row
    assert all(name in rows["prefill_1024"]["why"] for name in peers.NAMES if name != "openvino-genai")
    for claim in speed.REQUANTIZED:  # without llama.cpp there is no file to measure
        assert rows[claim]["ours"] is None and "no compiler" in rows[claim]["why"]
    assert "float32" in capsys.readouterr().out


def test_claims_beside_ourselves(rehearse: Callable[..., dict[str, dict[str, Any]]]) -> None:
    rows = rehearse("streams64", "context_4096", "prefix_ttft", "itl_p99_under_prefill")
    for row in rows.values():
        assert row["peer"] > 0 and row["ratio"] == pytest.approx(row["ours"] / row["peer"]), row
    assert "INT8" in rows["context_4096"]["why"]


def test_claims_about_whole_processes(rehearse: Callable[..., dict[str, dict[str, Any]]]) -> None:
    rows = rehearse("server_ttft_ms", "server_throughput", "rss_gb", "chat_start_s")
    for claim in ("server_ttft_ms", "rss_gb", "chat_start_s"):
        assert rows[claim]["peer"] is None and rows[claim]["ratio"] == rows[claim]["ours"]
    assert rows["server_throughput"]["peer"] > 0
    assert "client" in rows["server_throughput"]["why"]
    # A server and its engine, which has torch: more than nothing, less than the machine.
    assert 0.05 < rows["rss_gb"]["ours"] < 10 and "2 processes" in rows["rss_gb"]["why"]
    assert 0.1 < rows["chat_start_s"]["ours"] < 100


def test_a_peer_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        llm.main(["--peers", "vllm,abacus"])
    assert exit_.value.code == 2
    assert "abacus" in capsys.readouterr().err
