"""Motet: one server and SDK for language, speech, vision and image models.

The rooms, from the ground up (a file imports from its own floor or a lower one):

    kernels/    tensor operations, one door each
    models/     networks, weights, tokenizers
    engine/     schedulers, caches, engines, hosts, clients
    pipelines/  the SDK
    streaming/  the server: REST, SSE, WebSocket
    deploy/     the command line
"""

from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Chat": "motet.pipelines.chat",
    "ImageGeneration": "motet.pipelines.image",
    "Speech": "motet.pipelines.speech",
    "Transcription": "motet.pipelines.transcription",
}


def __getattr__(name: str) -> Any:
    """Import SDK names on first use, so that `import motet` stays free of torch."""
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'motet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_EXPORTS, "__version__"])
