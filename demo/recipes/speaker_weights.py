"""Make `motet_demo/weights/speaker-ge2e.safetensors` from the wheel of resemblyzer 0.1.4 (Apache-2.0).

    pip download --no-deps resemblyzer==0.1.4
    python demo/recipes/speaker_weights.py Resemblyzer-0.1.4-py3-none-any.whl

The wheel is read as a zip file, never installed or imported; its checkpoint is unpickled with `weights_only=True`, and
only the network's tensors are kept (float16: half the size, vectors differ by less than 4e-6 of cosine). The wheel is
known by its hash; that of the output stands in `speaker-ge2e.md`, and a test compares.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

WHEEL_SHA256 = "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f"
CHECKPOINT = "resemblyzer/pretrained.pt"
OUTPUT = Path(__file__).resolve().parent.parent / "motet_demo" / "weights" / "speaker-ge2e.safetensors"


def tensors_of(wheel: bytes) -> dict[str, torch.Tensor]:
    """The encoder's tensors in float16 by the names of the package. ValueError when the wheel is another one."""
    if hashlib.sha256(wheel).hexdigest() != WHEEL_SHA256:
        raise ValueError("this is not the wheel of resemblyzer 0.1.4 (its SHA-256 differs)")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        checkpoint = torch.load(io.BytesIO(archive.read(CHECKPOINT)), map_location="cpu", weights_only=True)
    state = checkpoint["model_state"]
    # The two scalars of the training loss (similarity_weight, similarity_bias) and the optimizer stay behind.
    return {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in sorted(state.items())
        if name.startswith(("lstm.", "linear."))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert resemblyzer's speaker encoder to safetensors.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    # One key only: safetensors writes several in random order, and the file's hash shall be the same every time.
    about = (
        f"GE2E speaker encoder: {CHECKPOINT} of resemblyzer 0.1.4 (wheel sha256 {WHEEL_SHA256}), Apache-2.0; changed: "
        "float16, loss scalars and optimizer state removed"
    )
    data = save(tensors_of(arguments.wheel.read_bytes()), {"about": about})
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(data)
    print(f"{arguments.output.name}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
