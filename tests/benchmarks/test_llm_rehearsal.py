"""The whole of benchmarks/llm.py but the peers, at sizes that mean nothing, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from motet.benchmarks import llm
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


def test_a_rehearsal_measures_every_claim_of_ours(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> Path:
        raise PeerError(f"{name} cannot be built (status 1): no compiler")

    monkeypatch.setattr(llm.peer_worker, "build", absent)
    monkeypatch.setattr(llm, "SETTLE_S", 0.0)
    arguments = ["--rehearse", "--model", str(model), "--dtype", "float32", "--weights", "auto", "--threads", "1"]
    assert llm.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["claim"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == list(llm.CLAIMS)
    for claim in ("streams16_vs_vllm", "streams16_vs_llamacpp"):
        row = rows[claim]
        assert row["peer"] is None and row["holds"] is False and "no compiler" in row["why"] and row["ours"] > 0, row
    assert rows["prefix_ttft"]["ratio"] > 0
    assert rows["server_ttft_ms"]["peer"] is None
    assert rows["server_ttft_ms"]["ratio"] == rows["server_ttft_ms"]["ours"]
    assert rows["server_throughput"]["peer"] > 0
    assert "client" in rows["server_throughput"]["why"]
    assert "float32" in capsys.readouterr().out
