"""Train the demo picture model's autoencoder: 64 x 64 pixels to 16 x 16 latents of 4 channels and back.

    python demo/recipes/emoji_codec.py FOLDER --minutes 8 [--device cuda]

An `AutoencoderTiny` of diffusers, narrow, with blocks at its smallest size only: cheap to train and to run. A small loss keeps
every latent channel near mean 0 and deviation 1, so that the denoiser needs no statistics of its own; noise on the latents
makes the decoder forgive a denoiser's errors. Writes `FOLDER/vae` (config.json, bfloat16). Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from diffusers import AutoencoderTiny
from emoji_clock import Stage
from emoji_scenes import Scenes
from torch import Tensor, nn

BATCH = 32
CHANNELS = 4
WATCHED = 256  # pictures that measure it: of another seed


def autoencoder() -> AutoencoderTiny:
    """All blocks at the size of the latents. Begins as nearly linear, which halves the time to the first 20 dB."""
    vae = AutoencoderTiny(
        encoder_block_out_channels=(48, 48, 48),
        decoder_block_out_channels=(48, 48, 48),
        num_encoder_blocks=(0, 0, 2),
        num_decoder_blocks=(3, 0, 0),
        latent_channels=CHANNELS,
    )
    with torch.no_grad():
        for layer in [*vae.encoder.layers, *vae.decoder.layers]:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            elif hasattr(layer, "conv"):
                layer.conv[4].weight.mul_(0.1)
                nn.init.zeros_(layer.conv[4].bias)
        last = vae.decoder.layers[-1]
        last.weight.mul_(0.3)
        nn.init.constant_(last.bias, 0.5)
    return vae


def pictures(scenes: Scenes, seed: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Scenes of a stream as fp32 [count, 3, 64, 64] in -1..1."""
    stacked = torch.stack(
        [torch.from_numpy(scenes.picture(scenes.draw(seed, index))) for index in range(start, start + count)]
    )
    return stacked.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1


def distance(made: Tensor, wanted: Tensor) -> Tensor:
    """L1 of pixels, and of their differences to the next pixel: edges are what an emoji is known by."""
    error = made - wanted
    across, down = error.diff(dim=-1).abs().mean(), error.diff(dim=-2).abs().mean()
    return error.abs().mean() + 0.5 * (across + down) + 0.5 * error.square().mean()


@torch.no_grad()
def psnr(vae: AutoencoderTiny, shown: Tensor) -> float:
    """Of what comes back, in dB; values clipped."""
    made = vae.decode(vae.encode(shown).latents).sample.clamp(-1, 1)
    return -10 * math.log10(float((made - shown).square().mean()) / 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo picture model's autoencoder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    scenes = Scenes(options.folder)
    vae = autoencoder().to(device, memory_format=torch.channels_last)
    print(f"codec: {sum(parameter.numel() for parameter in vae.parameters()) / 1e6:.2f} M parameters", flush=True)
    stage = Stage("codec", options.folder, vae, minutes=options.minutes, rate=3e-3, mean_decay=0.998, warm_up=40)
    batch = BATCH if device.type == "cpu" else 8 * BATCH
    watched = pictures(scenes, options.seed + 1, 0, WATCHED, device)

    def step() -> tuple[Tensor, int]:
        shown = pictures(scenes, options.seed, stage.seen, batch, device).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            latents = vae.encoder(shown)
            made = vae.decoder(latents + 0.05 * torch.randn_like(latents))
        latents = latents.float().transpose(0, 1).flatten(1)
        unit = latents.mean(1).square().mean() + (latents.std(1) - 1).square().mean()
        return distance(made.float(), shown) + 0.1 * unit, batch

    stage.run(step, watch=lambda: f"PSNR {psnr(stage.averaged(), watched):.1f} dB", watch_s=60)
    averaged = stage.averaged()
    latents = averaged.encode(watched).latents
    by_channel = latents.transpose(0, 1).flatten(1)
    averaged.register_to_config(
        scaling_factor=round(1 / float(latents.std()), 4), shift_factor=round(float(latents.mean()), 4)
    )
    averaged.to(torch.bfloat16).save_pretrained(options.folder / "vae")
    shown = ", ".join(f"{mean:.2f} +- {std:.2f}" for mean, std in zip(by_channel.mean(1), by_channel.std(1)))
    print(f"codec: PSNR {psnr(averaged.float(), watched):.1f} dB, latents {shown}", flush=True)


if __name__ == "__main__":
    main()
