"""Train the demo voice's codec, and turn speech into its codes.

    python demo/recipes/voice_codec.py FOLDER --minutes 12 --decoder-minutes 30 [--device cuda]

FOLDER holds `speech.s16` and `speech.tsv` (voice_speech.py). First the encoder and the codebooks learn together with a
guide decoder; then they are frozen, all speech is turned into codes (`tokens.npz`, `tokens.json`), and the decoder that
ships, of SNAC's shape, learns to speak them (`codec.safetensors`, `codec.json`). The language model can be trained beside
that last part. Checkpoints every five minutes; goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import voice_tokens as ids
from safetensors.torch import save_file
from torch import Tensor, nn
from voice_networks import (
    HOP,
    SAMPLE_RATE,
    GuideDecoder,
    MelEncoder,
    Quantizer,
    SnacDecoder,
    SpectralLoss,
)
from voice_speech import read_pronounced, read_table, samples_of

LATENT = 192
CLIP = 16_384  # samples of a training clip: 0.68 s
CLIPS = 12
CHECKPOINT_S = 300.0
LONGEST_STEP_S = 5.0  # what a step takes longer does not count: somebody had stopped the process


class Clips:
    """Random clips of the speech."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        self.samples, self.device = samples_of(folder), device
        self.rng = np.random.default_rng(seed)

    def draw(self, count: int, length: int = CLIP) -> Tensor:
        """fp32 [count, 1, length]."""
        starts = self.rng.integers(0, len(self.samples) - length, count)
        clips = np.stack([self.samples[start : start + length] for start in starts])
        return (torch.from_numpy(clips.astype(np.float32)) / 32768)[:, None].to(self.device)


class Stage:
    """A network that trains against the clock: rate warm-up and cosine, checkpoints, a log line now and then."""

    def __init__(self, name: str, folder: Path, network: nn.Module, *, minutes: float, rate: float) -> None:
        self.name, self.path, self.network = name, folder / f"{name}.ckpt", network
        self.budget_s, self.rate = minutes * 60, rate
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, betas=(0.8, 0.95), weight_decay=0.0)
        self.steps, self.spent_s = 0, 0.0
        if self.path.is_file():
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps, self.spent_s = state["steps"], state["spent_s"]
            print(f"{name} goes on after {self.spent_s:.0f} s, {self.steps} steps", flush=True)

    def run(self, loss_of: Callable[[], Tensor]) -> None:
        """Steps until the minutes are spent."""
        last = saved = time.monotonic()
        recent: list[float] = []
        while (share := self.spent_s / self.budget_s) < 1:
            falling = 1.0 if share < 0.3 else 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * (share - 0.3) / 0.7))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (self.steps + 1) / 50) * falling
            loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 2.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            now = time.monotonic()
            self.spent_s += min(now - last, LONGEST_STEP_S)
            last = now
            recent.append(float(loss.detach()))
            if self.steps % 50 == 0:
                heard = self.steps * CLIPS * CLIP / SAMPLE_RATE
                mean = sum(recent) / len(recent)
                print(
                    f"{self.name} {self.spent_s:.0f} s step {self.steps} loss {mean:.4f} "
                    f"{heard / self.spent_s:.1f} audio-s/s",
                    flush=True,
                )
                recent.clear()
            if time.monotonic() - saved > CHECKPOINT_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "spent_s": self.spent_s,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").rename(self.path)


class Learner(nn.Module):
    """Encoder, codebooks and guide decoder."""

    def __init__(self, strides: Sequence[int], size: int) -> None:
        super().__init__()
        self.encoder = MelEncoder(LATENT)
        self.quantizer = Quantizer(LATENT, [size] * len(strides), strides)
        self.decoder = GuideDecoder(LATENT)

    def forward(self, pcm: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1, T] -> what is heard of it, and the commitment loss."""
        with torch.autocast(pcm.device.type, torch.bfloat16):
            latents = self.encoder(pcm)
        quantized, _, loss = self.quantizer(latents.float())
        with torch.autocast(pcm.device.type, torch.bfloat16):
            return self.decoder(quantized), loss


@torch.no_grad()
def tokenize(learner: Learner, folder: Path, strides: Sequence[int], size: int, device: torch.device) -> None:
    """All speech as ids, beside its text and phones: `tokens.npz` (flat arrays with lengths) and `tokens.json`."""
    learner.eval()
    samples, table = samples_of(folder), read_table(folder)
    frame = strides[0] * HOP
    columns: dict[str, list[Any]] = {"text": [], "phones": [], "codes": [], "spoken": []}
    began = time.monotonic()
    for utterance in table:
        length = -(-utterance.length // frame) * frame
        pcm = np.zeros(length, np.float32)
        pcm[: utterance.length] = samples[utterance.start : utterance.start + utterance.length] / 32768
        latents = learner.encoder(torch.from_numpy(pcm)[None, None].to(device))
        _, codes, _ = learner.quantizer(latents)
        flat = ids.flatten([level[0].cpu().numpy() for level in codes], strides, size)
        times = ids.code_times_s(len(flat), strides, frame / SAMPLE_RATE)
        spoken = np.searchsorted(np.array(utterance.ends_s), times, side="right").clip(0, len(utterance.phones) - 1)
        columns["text"].append(ids.text_ids(utterance.text))
        columns["phones"].append(ids.phone_ids(utterance.phones))
        columns["codes"].append(flat)
        columns["spoken"].append(spoken)
    for phones, text in read_pronounced(folder):
        columns["text"].append(ids.text_ids(text))
        columns["phones"].append(ids.phone_ids(phones))
        columns["codes"].append(np.zeros(0, np.int64))
        columns["spoken"].append(np.zeros(0, np.int64))
    arrays = {name: np.concatenate(rows).astype(np.int16) for name, rows in columns.items()}
    arrays |= {f"{name}_len": np.array([len(row) for row in rows]) for name, rows in columns.items()}
    np.savez(folder / "tokens.npz", **arrays)
    layout = {"strides": list(strides), "size": size, "hop": HOP, "sample_rate": SAMPLE_RATE}
    (folder / "tokens.json").write_text(json.dumps(layout))
    seconds = sum(utterance.length for utterance in table) / SAMPLE_RATE
    taken_s = time.monotonic() - began
    print(
        f"codes: {len(table)} utterances, {arrays['codes'].size} ids, {seconds / taken_s:.0f} x real time", flush=True
    )


def export(learner: Learner, decoder: SnacDecoder, folder: Path, strides: Sequence[int], size: int) -> None:
    """`codec.safetensors` with the snac package's names (weight norm folded away) and `codec.json`."""
    # The package wraps the layers of each rate once more.
    tensors = {
        re.sub(r"^decoder\.model\.(\d+)\.(?=\d)", r"decoder.model.\1.block.", f"decoder.{name}"): value
        for name, value in decoder.state_dict().items()
    }
    for at, level in enumerate(learner.quantizer.levels):
        prefix = f"quantizer.quantizers.{at}."
        tensors |= {
            f"{prefix}codebook.weight": level.vectors,
            f"{prefix}out_proj.weight": level.out.weight,
            f"{prefix}out_proj.bias": level.out.bias,
        }
    save_file(
        {name: value.detach().cpu().float().contiguous() for name, value in tensors.items()},
        folder / "codec.safetensors",
    )
    config = {
        "sampling_rate": SAMPLE_RATE,
        "latent_dim": LATENT,
        "decoder_dim": 256,
        "decoder_rates": [8, 8, 4, 2],
        "codebook_size": size,
        "codebook_dim": 8,
        "vq_strides": list(strides),
        "attn_window_size": None,
        "noise": False,
        "depthwise": True,
    }
    (folder / "codec.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo voice's codec.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="for encoder, codebooks and guide decoder")
    parser.add_argument("--decoder-minutes", type=float, default=30.0, help="for the decoder that ships; 0: later")
    parser.add_argument("--strides", type=int, nargs="+", default=[4, 2, 2])
    parser.add_argument("--size", type=int, default=1024, help="codes of a level")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    clips = Clips(options.folder, device, options.seed)
    distance = SpectralLoss().to(device)

    learner = Learner(options.strides, options.size).to(device)
    stage = Stage("codec", options.folder, learner, minutes=options.minutes, rate=6e-4)

    def learn() -> Tensor:
        pcm = clips.draw(CLIPS)
        heard, commitment = learner(pcm)
        loss: Tensor = distance(heard, pcm) + 0.25 * commitment
        return loss

    stage.run(learn)
    if not (options.folder / "tokens.npz").is_file():
        tokenize(learner, options.folder, options.strides, options.size, device)
    if not options.decoder_minutes:
        return

    learner.eval().requires_grad_(False)
    decoder = SnacDecoder(LATENT).to(device)
    stage = Stage("decoder", options.folder, decoder, minutes=options.decoder_minutes, rate=1e-3)

    def speak() -> Tensor:
        pcm = clips.draw(CLIPS)
        with torch.no_grad():
            quantized, _, _ = learner.quantizer(learner.encoder(pcm))
        loss: Tensor = distance(decoder(quantized), pcm)
        return loss

    stage.run(speak)
    export(learner, decoder, options.folder, options.strides, options.size)


if __name__ == "__main__":
    main()
