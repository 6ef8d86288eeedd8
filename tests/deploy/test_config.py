"""TOML and flags become one frozen tree; what is wrong is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from motet.deploy.cli import make_parser, resolve
from motet.deploy.config import ALIASES, ConfigError, MotetConfig, build, leaves, to_toml


def config(*arguments: str) -> MotetConfig:
    return resolve(make_parser().parse_args(["serve", *arguments]))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "motet.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_the_owners_defaults() -> None:
    tree = config()
    assert tree == build(MotetConfig, {})
    assert (tree.server.host, tree.server.port) == ("127.0.0.1", 8000)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[host]\nthreads = 3\n[host.engine]\nmax_num_seqs = 7\n[server]\nport = 9000\n")
    tree = config("some-model", "--config", file, "--port", "9001", "--preload")
    assert tree.server.port == 9001
    assert tree.host.threads == 3
    assert tree.host.preload
    assert tree.host.models == ("some-model",)
    assert tree.host.engine.max_num_seqs == 7


def test_printed_config_reads_back_to_the_same_tree(tmp_path: Path) -> None:
    tree = config("a", "b.gguf", "--dtype", "bfloat16", "--no-enable-prefix-caching", "--kv-cache-gb", "1.5")
    assert config("--config", write(tmp_path, to_toml(tree))) == tree


def test_keys_are_not_printed() -> None:
    text = to_toml(config("--api-key", "sk-secret"))
    assert "sk-secret" not in text
    assert "hidden" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", ["server.prot", "'port'"]),
        ("[sever]\nport = 1", ["sever", "'server'"]),
        ("[host.engine]\nmax_num_seq = 1", ["host.engine.max_num_seq", "'max_num_seqs'"]),
        ("[server]\nport = '1'", ["server.port", "whole number"]),
        ("[server]\nport = true", ["server.port", "whole number"]),
        ("[server]\nport = 70000", ["server", "70000"]),
        ("[host]\nmodels = 'one'", ["host.models", "list"]),
        ("[host.engine]\ndtype = 'float8'", ["host.engine.dtype", "'bfloat16'"]),
        ("[host.engine]\nkv_cache_gb = nan", ["kv_cache_gb", "number"]),
        ("host = 3", ["host", "table"]),
        ("[server", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config("--config", write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_binary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        config("--config", str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config("--config", str(tmp_path / "binary.toml"))


def test_the_usual_vllm_flags_are_accepted() -> None:
    tree = config(
        *("--host", "0.0.0.0", "--port", "1", "--api-key", "a", "--api-key", "b", "--max-model-len", "512"),
        *("--max-num-seqs", "5", "--max-num-batched-tokens", "64", "--dtype", "float32", "--block-size", "32"),
        *(
            "--no-enable-prefix-caching",
            "--seed",
            "9",
            "--tensor-parallel-size",
            "1",
            "--num-gpu-blocks-override",
            "99",
        ),
    )
    engine = tree.host.engine
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (512, 5, 64)
    assert (engine.dtype, engine.block_size, engine.enable_prefix_caching, engine.seed) == ("float32", 32, False, 9)
    assert engine.num_blocks == 99
    assert tree.server.api_keys == ("a", "b")


def test_every_alias_names_a_field() -> None:
    assert set(ALIASES.values()) <= {leaf.key for leaf in leaves()}


def test_the_comment_beside_a_field_is_its_help() -> None:
    helps = {leaf.key: leaf.help for leaf in leaves()}
    assert helps["host.engine.max_num_seqs"] == "sequences running at once"
    assert helps["server.port"] == "0: any free port"


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().server.port = 1  # type: ignore[misc]
