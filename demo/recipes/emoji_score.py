"""Score pictures of the held-out captions: background, position, size, and whether the nearest emoji is the one asked for.

    python demo/recipes/emoji_score.py OUT/motet-emoji [--count 200] [--steps 20] [--guidance 2] [--sheet sheet.png]
    python demo/recipes/emoji_score.py --truth                  # the true pictures: what the measure itself allows

Makes the pictures with diffusers' classes alone and an Euler loop, so that it also stands beside Motet's own;
`score(scenes, asked, pictures)` takes pictures from anywhere.

background: at least three corners are nearest to the colour asked for. The emoji is what differs from the corners. position:
its centroid is nearest to where it would be at that position. size: the root of its area is nearer to that of the size asked
for. top1: what is seen where it should be, against every emoji drawn there with the same tint on the same background; least
squares.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emoji_scenes import COLOURS, EDGE, POSITIONS, SIDE, SIZES, Pixels, Scene, Scenes, boxes, held_out, sheet
from torch import Tensor

APART = 48  # of 255: what differs from the background by more, in any channel, is emoji


@dataclass(frozen=True, slots=True)
class Score:
    """Shares, 0..1."""

    background: float
    position: float
    size: float
    top1: float
    top5: float

    def __str__(self) -> str:
        shares = f"background {self.background:.1%} position {self.position:.1%} size {self.size:.1%}"
        return f"{shares} top1 {self.top1:.1%} top5 {self.top5:.1%}"


def _corners(picture: Pixels) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Their mean colours [4, 3]."""
    ends = (slice(None, EDGE), slice(-EDGE, None))
    return np.stack([picture[rows, columns].mean((0, 1)) for rows in ends for columns in ends])


def _seen(picture: Pixels) -> tuple[float, float, float]:
    """Of what differs from the background: the centroid, root of the area. The middle and 0 if nothing does."""
    background = np.median(_corners(picture), 0)
    rows, columns = np.nonzero(np.abs(picture - background).max(-1) > APART)
    if not len(rows):
        return SIDE / 2, SIDE / 2, 0.0
    return float(rows.mean()), float(columns.mean()), float(np.sqrt(len(rows)))


def _rank(scenes: Scenes, scene: Scene, picture: Pixels) -> int:
    """How many emoji are nearer than the one asked for."""
    errors = np.zeros(len(scenes.index))
    for top, left, side in boxes(scene):
        drawings = scenes.drawings(scene.tint, side).astype(np.float64)
        behind = np.array(COLOURS[scene.background], np.float64)
        drawn = drawings[..., :3] + behind * (255 - drawings[..., 3:]) / 255
        errors += np.square(drawn - picture[top : top + side, left : left + side]).mean((1, 2, 3))
    return int((errors < errors[scenes.index[scene.emoji]]).sum())


def score(scenes: Scenes, asked: Sequence[Scene], pictures: Sequence[Pixels]) -> Score:
    """Pictures uint8 [64, 64, 3] against the scenes they should show."""
    colours = np.array(list(COLOURS.values()), np.float64)
    names = list(COLOURS)
    right: list[tuple[bool, bool, bool, bool, bool]] = []
    for scene, picture in zip(asked, pictures, strict=True):
        nearest = np.square(_corners(picture)[:, None] - colours).sum(-1).argmin(1)
        row, column, root = _seen(picture)
        at = {where: _seen(scenes.picture(replace(scene, position=where)))[:2] for where in POSITIONS}
        where = min(POSITIONS, key=lambda name: (at[name][0] - row) ** 2 + (at[name][1] - column) ** 2)
        roots = {size: _seen(scenes.picture(replace(scene, size=size)))[2] for size in SIZES}
        size = min(SIZES, key=lambda name: abs(roots[name] - root))
        rank = _rank(scenes, scene, picture)
        corners_right = int((nearest == names.index(scene.background)).sum()) >= 3
        right.append((corners_right, where == scene.position, size == scene.size, rank == 0, rank < 5))
    return Score(*(float(share) for share in np.array(right).mean(0)))


# ---------------------------------------------------------------------------------------------------------- the pictures


class Painter:
    """A packed model through diffusers' and transformers' own classes. Guidance in one batch, Euler steps."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from diffusers import AutoencoderTiny, FluxTransformer2DModel
        from transformers import AutoTokenizer, CLIPTextModel

        self.config = json.loads((folder / "motet_image.json").read_text())
        base = folder / self.config.get("base", ".")
        self.device = torch.device(device)
        self.model = FluxTransformer2DModel.from_pretrained(folder / "transformer").float().to(device).eval()
        self.vae = AutoencoderTiny.from_pretrained(base / "vae").float().to(device).eval()
        self.text = CLIPTextModel.from_pretrained(base / "text_encoder").float().to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")

    @torch.no_grad()
    def paint(self, captions: Sequence[str], *, steps: int = 0, guidance: float = 0.0, seed: int = 0) -> list[Pixels]:
        """One picture each, in batches of 8 captions. 0: the model's own steps and guidance."""
        from emoji_denoiser import GRID, decoded

        guidance = guidance or self.config["guidance_scale"]
        sigmas = self.config.get("sigmas") if not steps else None
        sigmas = [*sigmas, 0.0] if sigmas else torch.linspace(1, 0, (steps or self.config["steps"]) + 1).tolist()
        places = torch.zeros(GRID**2, 3, device=self.device)
        places[:, 1] = torch.arange(GRID).repeat_interleave(GRID)
        places[:, 2] = torch.arange(GRID).repeat(GRID)
        found: list[Pixels] = []
        for begin in range(0, len(captions), 8):
            said = list(captions[begin : begin + 8])
            noise = torch.stack(
                [
                    torch.randn(GRID**2, 16, generator=torch.Generator().manual_seed(seed + begin + at))
                    for at in range(len(said))
                ]
            )
            x = noise.to(self.device)
            if guidance != 1:
                said += [""] * len(said)
            read = self.tokenizer(said, padding="max_length", truncation=True, return_tensors="pt").to(self.device)
            out = self.text(input_ids=read.input_ids)
            length = read.input_ids.shape[1]
            mask = torch.cat([read.attention_mask, torch.ones(len(said), GRID**2, device=self.device)], 1).bool()
            for now, then in zip(sigmas, sigmas[1:]):
                velocity: Tensor = self.model(
                    hidden_states=x if guidance == 1 else torch.cat([x, x]),
                    encoder_hidden_states=out.last_hidden_state,
                    pooled_projections=out.pooler_output,
                    timestep=torch.full((len(said),), now, device=self.device),
                    img_ids=places,
                    txt_ids=torch.zeros(length, 3, device=self.device),
                    joint_attention_kwargs={"attention_mask": mask[:, None, None]},
                    return_dict=False,
                )[0]
                if guidance != 1:
                    asked, empty = velocity.chunk(2)
                    velocity = empty + guidance * (asked - empty)
                x = x + (then - now) * velocity
            found += list(decoded(self.vae, x).cpu().numpy())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Score pictures of the held-out captions.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--guidance", type=float, nargs="+", default=[0.0])
    parser.add_argument("--sheet", type=Path, help="the first 32: true above, made below")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    scenes, kept = Scenes(), held_out()[: options.count]
    asked = [scene for _, scene in kept]
    true = [scenes.picture(scene) for scene in asked]
    if options.truth:
        print(f"true pictures: {score(scenes, asked, true)}")
    if options.model is None:
        return
    painter = Painter(options.model, options.device)
    for guidance in options.guidance:
        began = time.monotonic()
        made = painter.paint([said for said, _ in kept], steps=options.steps, guidance=guidance)
        taken = time.monotonic() - began
        how = (
            f"steps {options.steps or painter.config['steps']} guidance {guidance or painter.config['guidance_scale']}"
        )
        print(
            f"{options.model.name} {how}, {len(made)} captions: {score(scenes, asked, made)} ({taken:.0f} s)",
            flush=True,
        )
        if options.sheet:
            from PIL import Image

            rows = [row for at in range(0, min(32, len(made)), 8) for row in (true[at : at + 8], made[at : at + 8])]
            Image.fromarray(sheet([picture for row in rows for picture in row])).save(options.sheet)


if __name__ == "__main__":
    main()
