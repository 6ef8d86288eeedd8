"""The wheel holds exactly the package, nothing of the checkout around it, and every room imports from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["kernels", "models", "engine", "pipelines", "streaming", "deploy"]
DATA_SUFFIXES = {".cpp", ".h", ".html", ".js", ".css", ".svg"}


def package_files() -> set[str]:
    """Every file that belongs in the wheel, as the tree has it: "motet/engine/types.py"."""
    files = {ROOT / "__init__.py", ROOT / "py.typed"}
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*"):
            hidden = any(part.startswith(("_build", "__pycache__", ".")) for part in path.relative_to(ROOT).parts)
            if path.is_file() and not hidden and (path.suffix == ".py" or path.suffix in DATA_SUFFIXES):
                files.add(path)
    return {f"motet/{path.relative_to(ROOT)}" for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network, from a copy of what a build needs (the checkout stays clean)."""
    source = tmp_path_factory.mktemp("source")
    for name in ["__init__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name in [*FLOORS, "tests", "benchmarks", "demo"]:
        (source / name).symlink_to(ROOT / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("motet-*.whl")
    return path


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == package_files()


def test_the_listed_packages_are_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {"motet"} | {
        ".".join(["motet", *path.parent.relative_to(ROOT).parts])
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(folders)


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "motet = motet.deploy.cli:main" in entry_points


def test_every_room_imports_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in package_files()
        # ops.py wants the built library, which is not in the wheel; gpu/ wants Triton.
        if name.endswith(".py") and not name.startswith(("motet/kernels/gpu/", "motet/kernels/cpu/ops"))
    )
    code = (
        "import importlib, sys\n"
        # The editable install's finder would lead back to the checkout.
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')"
        " and '__editable__' not in getattr(f, '__name__', '') and 'Editable' not in getattr(f, '__name__', '')]\n"
        f"sys.path.insert(0, {str(tmp_path / 'unpacked')!r})\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
