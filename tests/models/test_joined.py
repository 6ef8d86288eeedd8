"""motet_demo/joined.py: a file in two packages becomes one in the cache, whole or not at all."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet.engine.errors import ModelLoadError
from motet_demo.joined import cache_folder, joined_folder

PARTS = (b"first " * 1000, b"second")
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], list[Path]]:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    parts = [tmp_path / f"part{at}" for at in range(len(PARTS))]
    for path, raw in zip(parts, PARTS):
        path.write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    return parts, [tmp_path / "config.json"]


def test_joined_once(sources: tuple[list[Path], list[Path]]) -> None:
    parts, others = sources
    folder = joined_folder("x", parts, others, file="model.bin", sha256=SHA256)
    assert (folder / "model.bin").read_bytes() == b"".join(PARTS) and (folder / "config.json").read_text() == "{}"
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [folder.name]
    parts[0].unlink()  # not read again
    assert joined_folder("x", parts, others, file="model.bin", sha256=SHA256) == folder


def test_starting_together(sources: tuple[list[Path], list[Path]]) -> None:
    parts, others = sources
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(joined_folder, "x", parts, others, file="m", sha256=SHA256) for _ in range(8)]
        folders = {call.result() for call in calls}
    assert len(folders) == 1 and (folders.pop() / "m").read_bytes() == b"".join(PARTS)
    assert len(list((cache_folder() / "models").iterdir())) == 1


def test_an_incomplete_folder_is_replaced(sources: tuple[list[Path], list[Path]]) -> None:
    parts, others = sources
    folder = joined_folder("x", parts, others, file="m", sha256=SHA256)
    (folder / "m").unlink()
    assert (joined_folder("x", parts, others, file="m", sha256=SHA256) / "m").is_file()


def test_wrong_parts_and_unwritable_cache(
    sources: tuple[list[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, others = sources
    parts[1].write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="not those that were published"):
        joined_folder("x", parts, others, file="m", sha256=SHA256)
    assert list((cache_folder() / "models").iterdir()) == []
    monkeypatch.setenv("MOTET_CACHE", str(parts[0]))  # a file
    with pytest.raises(ModelLoadError, match="MOTET_CACHE"):
        joined_folder("x", parts, others, file="m", sha256=SHA256)
    monkeypatch.delenv("MOTET_CACHE")
    assert cache_folder().parts[-2:] == (".cache", "motet")
