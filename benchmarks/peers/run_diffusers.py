"""Measure diffusers' own loop on a picture model in motet-emoji's layout. A worker: JSON lines in, JSON lines out.

Run it with Motet's own python:

    python run_diffusers.py --model FOLDER [--dtype bfloat16] [--threads 2] [--compile]

Commands: {"cmd": "pictures", "prompts": [...], "seeds": [...], "steps": 20, "guidance": 2.0, "width": 64, "height": 64,
"batch": 1, "file": PATH} paints batches of so many pictures one after another and answers {"seconds": all, "times": [of each
batch]}; with "file" the pictures lie there as uint8 [N, H, W, 3] (numpy). {"cmd": "quit"} ends it.

The loop is that of diffusers' pipelines: prompt encoded, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel.forward with
its default attention processors, guidance's two branches in one batch (captions padded to the longer one, the padding masked),
AutoencoderTiny decodes. The empty prompt is encoded once, at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextModel


class Engine:
    """One model of diffusers on the CPU."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, compiled: bool) -> None:
        self.card = json.loads((folder / "motet_image.json").read_text())
        if self.card["family"] != "flux" or self.card.get("few_step"):
            raise SystemExit("this peer paints with models in motet-emoji's layout only")
        self.dtype = dtype
        model: Any = FluxTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
        self.model = model.eval()
        self.vae: Any = AutoencoderTiny.from_pretrained(folder / "vae", torch_dtype=dtype).eval()
        self.text: Any = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
        if compiled:
            self.model.compile_repeated_blocks()
        self.empty = self.encode("")

    def encode(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Words [L, D] and the caption's vector [D]."""
        ids = self.tokenizer(prompt, return_tensors="pt", truncation=True).input_ids
        out = self.text(input_ids=ids)
        return out.last_hidden_state[0], out.pooler_output[0]

    @torch.inference_mode()
    def paint(
        self, prompts: list[str], seeds: list[int], *, steps: int, guidance: float, width: int, height: int
    ) -> np.ndarray:
        """Pictures as one batch, uint8 [N, H, W, 3]."""
        count = len(prompts)
        captions = [self.encode(prompt) for prompt in prompts] + ([self.empty] * count if guidance > 1 else [])
        rows = len(captions)
        words = torch.nn.utils.rnn.pad_sequence([words for words, _ in captions], batch_first=True)
        pooled = torch.stack([vector for _, vector in captions])
        lengths = torch.tensor([len(words) for words, _ in captions])
        channels = self.model.config.in_channels // 4
        side = self.card["latent_scale"]
        high, wide = height // side // 2, width // side // 2
        noise = torch.stack(
            [torch.randn(channels, 2 * high, 2 * wide, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )
        packed = noise.view(count, channels, high, 2, wide, 2).permute(0, 2, 4, 1, 3, 5)
        latents = packed.reshape(count, high * wide, 4 * channels).to(self.dtype)
        places = torch.zeros(high, wide, 3)
        places[..., 1], places[..., 2] = torch.arange(high)[:, None], torch.arange(wide)[None]
        image_ids, text_ids = places.flatten(0, 1), torch.zeros(words.shape[1], 3)
        attention: dict[str, Any] = {}
        if len(set(lengths.tolist())) > 1:
            shown = torch.arange(words.shape[1]) < lengths[:, None]
            attention["attention_mask"] = torch.cat([shown, shown.new_ones(rows, high * wide)], 1)[:, None, None]
        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=self.card["shift"])
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist())
        for when in scheduler.timesteps:
            velocity = self.model(
                hidden_states=latents if rows == count else torch.cat([latents, latents]),
                timestep=when.expand(rows).to(self.dtype) / 1000,
                pooled_projections=pooled,
                encoder_hidden_states=words,
                txt_ids=text_ids,
                img_ids=image_ids,
                joint_attention_kwargs=attention,
                return_dict=False,
            )[0]
            if rows > count:
                asked, free = velocity.chunk(2)
                velocity = free + guidance * (asked - free)
            latents = scheduler.step(velocity, when, latents, return_dict=False)[0]
        unpacked = latents.view(count, high, wide, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        decoded = self.vae.decode(
            unpacked.reshape(count, channels, 2 * high, 2 * wide) / self.vae.config.scaling_factor, return_dict=False
        )[0]
        pixels: np.ndarray = (
            (decoded / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        )
        return pixels

    def pictures(self, command: dict[str, Any]) -> dict[str, Any]:
        """One after another, or in batches of `batch`."""
        how = {name: command[name] for name in ("steps", "guidance", "width", "height")}
        prompts, seeds, batch = command["prompts"], command["seeds"], int(command.get("batch", 1))
        times, painted = [], []
        for at in range(0, len(prompts), batch):
            began = time.perf_counter()
            painted.append(self.paint(prompts[at : at + batch], seeds[at : at + batch], **how))
            times.append(time.perf_counter() - began)
        if command.get("file"):
            with open(command["file"], "wb") as file:
                np.save(file, np.concatenate(painted))
        return {"seconds": sum(times), "times": times}


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with motet_image.json")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="compile each kind of block, as diffusers advises")
    args = parser.parse_args()

    # Nobody but us may write into the answers: keep stdout for them, and point descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    with torch.inference_mode():
        engine = Engine(args.model, getattr(torch, args.dtype), compiled=args.compile)
    width, height = engine.card["sizes"][0]
    for prompt in ("a warm-up", "another, which is longer"):
        engine.paint([prompt], [0], steps=2, guidance=2.0, width=width, height=height)
    say(
        {
            "ready": True,
            "name": "diffusers' own loop",
            "version": f"diffusers {diffusers.__version__}, torch {torch.__version__}",
            "dtype": args.dtype + (", blocks compiled" if args.compile else ""),
            "threads": args.threads,
            "load_seconds": time.perf_counter() - began,
        }
    )
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            command = json.loads(line)
            if command.get("cmd") == "quit":
                break
            if command.get("cmd") != "pictures":
                raise ValueError(f"no such command: {command.get('cmd')}")
            say(engine.pictures(command))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
