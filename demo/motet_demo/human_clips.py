"""Ten short recordings of human speech with their texts, for the demo and the tests.

CC-BY-SA-3.0, Digium, Inc. and contributors; voice of Allison Smith (clips/LICENSE.md).
"""

from __future__ import annotations

import json
from pathlib import Path

_FOLDER = Path(__file__).parent / "clips"


def clips() -> list[tuple[Path, str]]:
    """(FLAC file, 16 kHz mono; what is said in it) of every clip, by name. 48 s of one voice in all.

    Compare texts after lower-casing and removing punctuation.
    """
    texts: dict[str, str] = json.loads((_FOLDER / "transcripts.json").read_text(encoding="utf-8"))
    return [(_FOLDER / name, text) for name, text in sorted(texts.items())]
