"""A packaged model whose big file lies in two packages: joined once into the user's cache, then used from there.

Package indexes limit a file's size, so its publisher cut it. The joined copy is complete or not there at all: it is
written under another name and renamed, so processes that start together do no harm.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from motet.engine.errors import ModelLoadError


def cache_folder() -> Path:
    """$MOTET_CACHE, else ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet")


def joined_folder(name: str, parts: Sequence[Path], others: Sequence[Path], *, file: str, sha256: str) -> Path:
    """The cached directory `name` with the parts joined to `file`, checked by hash, and copies of the others.

    Raises ModelLoadError when the parts are not what they should be or the cache cannot be written.
    """
    target = cache_folder() / "models" / f"{name}-{sha256[:12]}"
    if (target / file).is_file() and all((target / other.name).is_file() for other in others):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise ModelLoadError(
            f"{name}: the cache folder cannot be written ({error.__class__.__name__}); set MOTET_CACHE to one that can"
        ) from None
    try:
        seen = hashlib.sha256()
        with open(made / file, "wb") as out:
            for part in parts:
                with open(part, "rb") as source:
                    while piece := source.read(1 << 20):
                        seen.update(piece)
                        out.write(piece)
        if seen.hexdigest() != sha256:
            raise ModelLoadError(f"{name}: the installed parts of {file} are not those that were published")
        for other in others:
            shutil.copyfile(other, made / other.name)
        try:
            made.rename(target)
        except OSError:  # another process was first, or an incomplete folder is in the way
            if not (target / file).is_file():
                shutil.rmtree(target, ignore_errors=True)
                made.rename(target)
    except OSError as error:
        raise ModelLoadError(f"{name}: cannot be joined in the cache folder ({error.__class__.__name__})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target
