"""Put the trained parts of the demo picture model into the two folders that Motet loads.

    python demo/recipes/emoji_pack.py FOLDER OUT [--checkpoint] [--matrices bf16]

FOLDER holds what emoji_codec.py, emoji_denoiser.py and emoji_turbo.py wrote. OUT gets `motet-emoji` and, where it was distilled,
`motet-emoji-turbo`, laid out so that each part loads with its own class: `transformer` (diffusers' FluxTransformer2DModel),
`vae` (AutoencoderTiny), `text_encoder` (transformers' CLIPTextModel), `tokenizer`, and `motet_image.json` (family, sizes,
steps). The turbo folder holds its transformer only; its `base` names the folder of the rest. Matrices of the transformers are
float8_e4m3: half of bfloat16, without scales, so every loader reads them as any other dtype. With `--checkpoint` the denoiser
and the text encoder are taken from their last checkpoint: to see how far they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from emoji_denoiser import GRID, denoiser
from emoji_scenes import SIDE
from emoji_text import LENGTH, encoder, save
from emoji_turbo import SIGMAS
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

NAME = "motet-emoji"
LICENCE = "LICENSE-fluent-emoji.txt"  # of the drawings
WEIGHTS = "diffusion_pytorch_model.safetensors"
BASIC = {
    "family": "flux",
    "sizes": [[SIDE, SIDE]],
    "latent_scale": 4,  # pixels of a latent's side
    "tokens": GRID * GRID,
    "max_caption_tokens": LENGTH,
    "pooled": "text_encoder",  # its pooler_output steers, its last_hidden_state is read
    "solver": "euler",
    "shift": 1.0,
}


def copy_config(source: Path, to: Path) -> None:
    """`config.json` without the folder that it was loaded from."""
    config = json.loads((source / "config.json").read_text())
    config.pop("_name_or_path", None)
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_transformer(source: Path, to: Path, matrices: torch.dtype) -> None:
    """Config and weights, vectors bfloat16."""
    to.mkdir(parents=True, exist_ok=True)
    copy_config(source, to)
    tensors = load_file(source / WEIGHTS)
    cast = {key: value.to(matrices if value.dim() == 2 else torch.bfloat16) for key, value in tensors.items()}
    save_file(cast, to / WEIGHTS, metadata={"format": "pt"})


def write_config(out: Path, **fields: Any) -> None:
    (out / "motet_image.json").write_text(json.dumps({"name": out.name, **BASIC, **fields}, indent=1) + "\n")


def pack(folder: Path, out: Path, matrices: torch.dtype) -> None:
    """Write the folders. Overwrites what is there."""
    plain, turbo = out / NAME, out / f"{NAME}-turbo"
    for path in (plain, turbo):
        shutil.rmtree(path, ignore_errors=True)
    plain.mkdir(parents=True)
    write_transformer(folder / "transformer", plain / "transformer", matrices)
    AutoencoderTiny.from_pretrained(folder / "vae", torch_dtype=torch.bfloat16).save_pretrained(plain / "vae")
    copy_config(plain / "vae", plain / "vae")
    save(CLIPTextModel.from_pretrained(folder / "text_encoder"), plain)
    write_config(plain, steps=20, guidance_scale=2.0)
    if (folder / "transformer_turbo").is_dir():
        write_transformer(folder / "transformer_turbo", turbo / "transformer", matrices)
        few = {"steps": len(SIGMAS), "sigmas": list(SIGMAS), "guidance_scale": 1.0, "few_step": True}
        write_config(turbo, base=f"../{NAME}", **few)
    for path in (plain, turbo):
        if path.is_dir():
            shutil.copy(Path(__file__).with_name(LICENCE), path / LICENCE)
            total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            print(f"{path}: {total / 1e6:.2f} MB", flush=True)


def export_checkpoint(folder: Path) -> None:
    """`transformer` and `text_encoder` of a training that still runs."""
    mean = torch.load(folder / "denoiser.ckpt", map_location="cpu", weights_only=True)["mean"]
    parts: dict[str, FluxTransformer2DModel | CLIPTextModel] = {"denoiser": denoiser(), "text": encoder()}
    for name, to in (("denoiser", "transformer"), ("text", "text_encoder")):
        start = f"{name}."
        parts[name].load_state_dict(
            {key.removeprefix(start): value for key, value in mean.items() if key.startswith(start)}
        )
        parts[name].save_pretrained(folder / to)


def main() -> None:
    parser = argparse.ArgumentParser(description="Assemble the demo picture model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--matrices", choices=("fp8", "bf16"), default="fp8")
    options = parser.parse_args()
    if options.checkpoint:
        export_checkpoint(options.folder)
    pack(options.folder, options.out, torch.float8_e4m3fn if options.matrices == "fp8" else torch.bfloat16)


if __name__ == "__main__":
    main()
