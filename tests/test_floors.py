"""The rules of the house, read from the source: who may import whom, what may not exist, what stays free of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["kernels", "models", "engine", "pipelines", "streaming", "deploy"]
# The one file that every floor may name: the tree of errors, which itself imports nothing of ours.
FOR_EVERYBODY = {"engine.errors"}
MAX_LINES = 650

# What the server's process imports (it never imports torch), and what its floors are written on.
TORCH_FREE = [
    "motet",
    "motet.engine.types",
    "motet.engine.errors",
    "motet.engine.client",
    "motet.engine.config",
    "motet.engine.metrics",
    "motet.engine.segmenter",
    "motet.engine.speaking",
    "motet.engine.speech_params",
    "motet.engine.frontend.pictures",
    "motet.engine.frontend.speech",
    "motet.engine.frontend.text",
    "motet.models.registry",
    "motet.models.spec",
    "motet.models.speech_format",
    "motet.models.tokenizer",
    "motet.models.gguf",
    "motet.pipelines.types",
    "motet.pipelines.hub",
    "motet.pipelines.image",
    "motet.pipelines.picture_file",
    "motet.pipelines.chat",
    "motet.pipelines.media",
    "motet.pipelines.sound_file",
    "motet.pipelines.speech",
    "motet.streaming.app",
    "motet.streaming.config",
    "motet.streaming.protocol",
    "motet.streaming.server",
    "motet.deploy.cli",
    "motet.deploy.config",
    "motet.deploy.demo",
    "motet.deploy.image",
    "motet.deploy.picture_demo",
    "motet.deploy.serve",
    "motet.deploy.speak",
]


def floor_files() -> list[Path]:
    """Every Python file of the package's floors."""
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    assert len(files) > 20
    return files


def imports(path: Path) -> Iterator[tuple[int, int, str, list[str]]]:
    """(line, level, module, names) of every import of a file; level 0 is absolute."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or "", [alias.name for alias in node.names]


def targets(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted path under the root) of every relative import: "models.decoder"."""
    package = path.relative_to(ROOT).parent.parts
    for line, level, module, names in imports(path):
        if level == 0:
            continue
        base = package[: len(package) - (level - 1)]
        assert level - 1 <= len(package), f"{path}:{line} climbs out of the package"
        dotted = [*base, *(module.split(".") if module else [])]
        if dotted:
            yield line, ".".join(dotted)
        else:  # from .. import models
            yield from ((line, name) for name in names)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_from_itself_and_below(floor: str) -> None:
    allowed = {*FLOORS[: FLOORS.index(floor) + 1], "__version__"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for path in floor_files()
        if path.relative_to(ROOT).parts[0] == floor
        for line, target in targets(path)
        if target.split(".")[0] not in allowed and target not in FOR_EVERYBODY
    ]
    assert not wrong, "\n".join(wrong)


def test_what_everybody_may_import_imports_nothing_of_ours() -> None:
    for module in FOR_EVERYBODY:
        assert list(targets(ROOT / (module.replace(".", "/") + ".py"))) == []


def test_floors_name_each_other_relatively() -> None:
    """`import engine` or `from motet...` would bring a second copy of every class to life, or hide a floor from us."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in floor_files()
        for line, level, module, _ in imports(path)
        if level == 0 and module.split(".")[0] in {*FLOORS, "motet"}
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_and_benchmarks_use_the_public_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for folder in ("tests", "benchmarks", "demo")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, level, module, _ in imports(path)
        if level == 0 and module.split(".")[0] in FLOORS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_vague_rooms() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "base", "misc"}
    found = [path for path in floor_files() if vague & {path.stem, path.parent.name}]
    assert not found


def test_the_root_has_one_python_file() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    module = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    at_import = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.level]
    assert not at_import, "a relative import in the root would run when a stranger imports our folder"


@pytest.mark.parametrize("floor", ["kernels", "models", "engine", "streaming"])
def test_doorsteps_hold_a_docstring_and_nothing_else(floor: str) -> None:
    """transformers looks for a package called `kernels` by importing it, and may find ours."""
    (only,) = ast.parse((ROOT / floor / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant) and isinstance(only.value.value, str)


def test_no_file_holds_two_nouns() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in floor_files()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in floor_files() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent


def test_the_walk_through_the_code_is_true() -> None:
    """Files and names that README.md and CONTRIBUTING.md mention exist: `engine/host.py::EngineHost`."""
    mention = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|txt))(?:::(\w+))?`")
    mentions = [
        match
        for name in ("README.md", "CONTRIBUTING.md")
        for match in mention.findall((ROOT / name).read_text("utf-8"))
    ]
    assert len(mentions) > 25
    for path, name in mentions:
        assert (ROOT / path).is_file(), path
        if name:
            assert re.search(rf"^(class|async def|def) {name}\b", (ROOT / path).read_text("utf-8"), re.M), (
                f"{path}::{name}"
            )


def test_dependencies_are_declared_and_used() -> None:
    """Every absolute import of the package is a dependency, and every dependency is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = re.compile(r"[A-Za-z0-9_-]+")
    required = {name.match(line)[0].replace("-", "_") for line in project["dependencies"]}  # type: ignore[index]
    required = {{"pillow": "PIL"}.get(line, line) for line in required}  # the one that is imported by another name
    # imported only where they are asked for
    optional = {"openai", "triton", "xformers", "onnxruntime", "motet_demo", "setuptools"}
    imported = {
        module.split(".")[0] for path in floor_files() for _, level, module, _ in imports(path) if level == 0 and module
    } - set(sys.stdlib_module_names)
    assert imported - required - optional == set(), "imported, not declared"
    # uvicorn and starlette pick them up by name
    by_others = {"uvloop", "httptools", "websockets", "python_multipart"} - imported
    assert required - imported - by_others == set(), "declared, not imported"


def run_python(code: str, *, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_server_side_stays_free_of_torch(tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
        "    assert 'transformers' not in sys.modules, name + ' imports transformers'\n"
    )
    run_python(code, cwd=tmp_path)


def test_transformers_and_diffusers_do_not_wake_our_rooms() -> None:
    """With the root first on the path, as in a shell in the checkout, `import kernels` finds ours: nothing must load.

    Both probe for the package of that name.
    """
    code = (
        "import sys\n"
        f"assert sys.path[0] == '' or sys.path.insert(0, {str(ROOT)!r}) is None\n"
        "from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM\n"
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING\n"
        "from diffusers import AutoencoderKL, AutoencoderTiny, FluxTransformer2DModel, SD3Transformer2DModel\n"
        "rooms = [n for n in sys.modules if n.startswith(('kernels.', 'models.', 'engine.'))]\n"
        "assert not rooms, rooms\n"
    )
    run_python(code, cwd=ROOT)


def test_importing_motet_is_cheap(tmp_path: Path) -> None:
    code = "import sys, motet\nassert 'motet.engine' not in sys.modules\nassert 'Chat' in dir(motet)\n"
    run_python(code, cwd=tmp_path)
