"""Distil the demo picture model: four steps without guidance instead of twenty with it.

    python demo/recipes/emoji_turbo.py FOLDER --minutes 12 [--device cuda]

FOLDER holds what emoji_denoiser.py wrote. The student starts as the teacher. From a noised picture at one of its four noise
levels it learns the straight way to where the teacher, guided, comes to in several small steps by the next level: progressive
distillation (Salimans and Ho 2022) in one round, with the guidance distilled too (Meng et al. 2023). The text encoder stays.
Writes `FOLDER/transformer_turbo`. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from emoji_clock import Stage
from emoji_denoiser import Batches, compiled, hidden_after, latents_of
from emoji_scenes import Scenes
from emoji_text import encode, tokens, word_ids
from torch import Tensor
from transformers import CLIPTextModel

SIGMAS = (1.0, 0.75, 0.5, 0.25)
TEACHER_STEPS = 3  # to each of the student's


def main() -> None:
    parser = argparse.ArgumentParser(description="Distil the demo picture model to four steps.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--guidance", type=float, default=2.0, help="of the teacher")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scenes", type=int, default=0, help="as in emoji_denoiser.py")
    parser.add_argument("--batch", type=int, default=0, help="(default: 16; on CUDA 256)")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    batch = options.batch or (256 if cuda else 16)
    scenes = Scenes(options.folder)
    vae = AutoencoderTiny.from_pretrained(options.folder / "vae").float().to(device).eval()
    text = (
        CLIPTextModel.from_pretrained(options.folder / "text_encoder").float().to(device).eval().requires_grad_(False)
    )
    teacher = FluxTransformer2DModel.from_pretrained(options.folder / "transformer").float().to(device)
    teacher.eval().requires_grad_(False)
    student = FluxTransformer2DModel.from_pretrained(options.folder / "transformer").float().to(device)
    stage = Stage("turbo", options.folder, student, minutes=options.minutes, rate=options.rate, mean_decay=0.998)
    torch.manual_seed(options.seed + stage.steps)
    if stage.share < 1:
        latents = latents_of(scenes, vae, options.folder, options.scenes or (400_000 if cuda else 49_152), device)
        batches = Batches(scenes, latents, options.seed + stage.steps)
        teach, learn = compiled(teacher, train=False), compiled(student)
        levels = torch.tensor([*SIGMAS, 0.0], device=device)
        empty_ids, empty_lengths = tokens([""] * batch, word_ids())
        with torch.no_grad():
            empty_read, empty_caption = encode(text, empty_ids.to(device))

        @torch.no_grad()
        def taught(
            x: Tensor, read: Tensor, caption: Tensor, lengths: Tensor, now: Tensor, then: Tensor, guide: Tensor
        ) -> Tensor:
            """Where the teacher comes to from `now` to `then`, fp32 [B] each; unguided where `guide` is 1."""
            read, caption = torch.cat([read, empty_read]), torch.cat([caption, empty_caption])
            hidden = hidden_after(torch.cat([lengths, empty_lengths])).to(device)
            step = (now - then) / TEACHER_STEPS
            for at in range(TEACHER_STEPS):
                times = now - at * step
                made = teach(torch.cat([x, x]), read, caption, torch.cat([times, times]), hidden).float()
                asked, without = made.chunk(2)
                x = x - step[:, None, None] * (without + guide[:, None, None] * (asked - without))
            return x

        def step() -> tuple[Tensor, int]:
            clean, ids, lengths, _ = batches.draw(batch)
            with torch.no_grad():
                read, caption = encode(text, ids.to(device))
            level = torch.randint(len(SIGMAS), (batch,), device=device)
            now, then = levels[level], levels[level + 1]
            when = now[:, None, None]
            x = (1 - when) * clean + when * torch.randn_like(clean)
            # An empty caption has nothing to be guided away from.
            guide = torch.where(lengths > 2, options.guidance, 1.0).to(device)
            end = taught(x, read, caption, lengths, now, then, guide)
            wanted = (x - end) / (now - then)[:, None, None]
            made = learn(x, read, caption, now, hidden_after(lengths).to(device)).float()
            return (made - wanted).square().mean(), batch

        stage.run(step)
    averaged = stage.averaged()
    assert isinstance(averaged, FluxTransformer2DModel)
    shutil.rmtree(options.folder / "transformer_turbo", ignore_errors=True)
    averaged.save_pretrained(options.folder / "transformer_turbo")


if __name__ == "__main__":
    main()
