"""models/registry.py: the order of names, what is refused before the disk is touched, and what the hub may give."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from motet.engine.errors import InvalidRequest, ModelLoadError, ModelNotFound
from motet.models import registry
from motet.models.registry import ModelSpec, find, installed, resolve


def spec(model_id: str, path: Path) -> ModelSpec:
    return ModelSpec(
        id=model_id, kind="llm", locate=lambda: path, licence="Apache-2.0", summary="a test", num_parameters=1
    )


@pytest.fixture(autouse=True)
def no_packaged_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_packaged", lambda: ())
    monkeypatch.setattr(registry, "_registered", {})
    yield


def test_a_registered_id_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny").path == tmp_path / "tiny"
    registry.register(spec("tiny", Path("/elsewhere")))
    assert resolve("tiny").path == Path("/elsewhere") and [s.id for s in installed()] == ["tiny"]
    assert find("tiny") is not None and find("other") is None
    registry.unregister("tiny")
    registry.unregister("tiny")
    assert resolve("tiny").path == tmp_path / "tiny"


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "Some.Q4_1.gguf").write_bytes(b"")
    found = resolve(str(tmp_path / "Some.Q4_1.gguf"))
    assert (found.id, found.kind) == ("Some.Q4_1", "llm")
    folder = tmp_path / "whisper-x"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    assert (resolve(str(folder)).id, resolve(str(folder)).kind) == ("whisper-x", "asr")
    (folder / "config.json").write_text("[" * 100_000)
    assert resolve(str(folder)).kind == "llm"  # the loader will say what is wrong
    with pytest.raises(ModelNotFound, match="no GGUF file"):
        resolve(str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize("name", ["", " x", "x\n", "x\0y", "x" * 513, "\x1b[2J", "‮gpj"])
def test_names_that_are_no_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("the disk was touched")

    monkeypatch.setattr(Path, "is_dir", touched)
    with pytest.raises(InvalidRequest) as caught:
        resolve(name)
    assert caught.value.param == "model" and (not name.strip() or name not in caught.value.message)


@pytest.mark.parametrize(
    "name",
    [
        "../etc",
        "a/../b",
        "a/..",
        "a/b/c",
        "-x/y",
        "a/b..c",
        ".a/b",
        "http://x/y",
        "nothing-here",
        "a" * 400,
        "a/" + "b" * 200,
    ],
)
def test_what_is_no_hub_id_is_never_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object, **__: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_the_hub_gives_weights_and_words_but_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = resolve("owner/Name-1.5B")
    assert (found.id, found.path, asked["repo_id"]) == ("owner/Name-1.5B", tmp_path, "owner/Name-1.5B")
    weights = ["*.safetensors", "model.bin"]  # the latter is CTranslate2's, a format of plain arrays
    assert asked["allow_patterns"] == [weights[0], "*.json", "tokenizer.model", "*.jinja", weights[1], "vocabulary.txt"]
    assert "trust_remote_code" not in asked


def test_of_a_picture_model_its_parts_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of parts, nothing that lies beside them; and it is a model of pictures."""
    asked: list[dict[str, list[str]]] = []

    def snapshot(repo_id: str, **options: list[str]) -> str:
        (tmp_path / "model_index.json").write_text("{}")
        asked.append(options)
        return str(tmp_path)

    def taken(file: str) -> bool:
        rules = {"allow_patterns": asked[-1]["allow_patterns"], "ignore_patterns": asked[-1]["ignore_patterns"]}
        return list(huggingface_hub.utils.filter_repo_objects([file], **rules)) == [file]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("owner/pictures").kind == "image"
    assert asked[0] == {"allow_patterns": ["model_index.json"]}
    wanted = [
        "model_index.json", "transformer/config.json", "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
        "vae/diffusion_pytorch_model.safetensors", "text_encoder_2/model.safetensors.index.json", "tokenizer/merges.txt",
        "tokenizer_2/spiece.model", "tokenizer_2/special_tokens_map.json", "scheduler/scheduler_config.json",
    ]  # fmt: skip
    assert [file for file in wanted if not taken(file)] == []
    unwanted = [
        "flux1-dev.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "transformer/model.bin",
        "unet/diffusion_pytorch_model.safetensors", "transformer/onnx/config.json", "pipeline.py", "transformer/x.py",
    ]  # fmt: skip
    assert [file for file in unwanted if taken(file)] == []


def test_a_hub_that_is_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, told to stay offline (tests/conftest.py), with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not in the local cache"):
        resolve("motet-tests/no-such-model")


def test_any_trouble_with_the_hub_is_model_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ConnectionError("secret-host:443")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(ModelNotFound, match="owner/name") as caught:
        resolve("owner/name")
    assert "secret-host" not in caught.value.message


class Entry:
    """An entry point as importlib.metadata gives it."""

    def __init__(self, name: str, specs: list[ModelSpec] | Exception) -> None:
        self.name, self.specs = name, specs

    def load(self) -> object:
        if isinstance(self.specs, Exception):
            raise self.specs
        return lambda: self.specs


def test_packaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entries = [Entry("b", [spec("two", Path("/b"))]), Entry("a", [spec("one", Path("/a")), spec("two", Path("/a"))])]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == "motet.models" else [])
    registry._packaged.cache_clear()
    try:
        assert [(s.id, s.locate()) for s in installed()] == [("one", Path("/a")), ("two", Path("/a"))]
        registry._packaged.cache_clear()
        entries.append(Entry("c", RuntimeError("boom")))
        with pytest.raises(ModelLoadError, match=r"'c'.*RuntimeError"):
            installed()
    finally:
        registry._packaged.cache_clear()


def test_registry_and_gguf_reader_never_import_torch() -> None:
    code = (
        "import sys, motet.models.registry, motet.models.gguf, motet.models.gguf_families\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=60)
