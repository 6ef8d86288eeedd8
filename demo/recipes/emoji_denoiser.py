"""Train the demo picture model's denoiser, and its text encoder with it.

    python demo/recipes/emoji_denoiser.py FOLDER --minutes 40 [--device cuda]

FOLDER holds `vae` (emoji_codec.py). A Flux transformer of 5 M parameters in diffusers' own class, so that what is trained is
what is loaded; `fast_forward` computes the same with attention spelled out (on a CPU its gradient is the faster one by far),
fewer and wider matrix products and a mask over padded captions, compiled. Rectified flow (Liu et al. 2022) with logit-normal
times (Esser et al. 2024), a tenth of the captions empty for guidance. Batches are small first: at this size steps count, not
pictures. Latents are made once. Writes `FOLDER/transformer` and `FOLDER/text_encoder`. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from emoji_clock import Stage
from emoji_codec import CHANNELS, pictures
from emoji_scenes import SIDE, Scenes, held_out, words
from emoji_text import LENGTH, WIDTH, Meaning, encode, encoder, first_lesson, tokens, word_ids
from torch import Tensor, nn
from torch.nn import functional as F

GRID = SIDE // 8  # tokens of a side: 2 x 2 latents of 4 x 4 pixels
HEADS, HEAD_DIM = 3, 64
AXES = (16, 24, 24)
SEED = 5  # of the stream of scenes
MEANING_WEIGHT = 0.02  # of the text encoder's first lesson, while it learns with the denoiser
EMPTY = 0.1

Predict = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def denoiser() -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * CHANNELS,
        num_layers=1,
        num_single_layers=6,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=AXES,
    )
    start(model)
    return model


@torch.no_grad()
def start(model: FluxTransformer2DModel) -> None:
    """Weights to begin with: modulation that does nothing yet but lets half of every block through, and places that show.

    Flux knows where a token stands only by rotary angles between queries and keys. Large biases in both make every token look at
    the words by its place from the first step on; from small ones that took a pilot thousands of steps to grow.
    """
    for name, value in model.named_parameters():
        if ".norm1" in name or ".norm.linear" in name or name.startswith(("norm_out", "proj_out")):
            nn.init.zeros_(value)
        if name.endswith(("to_q.bias", "to_k.bias", "add_q_proj.bias", "add_k_proj.bias")):
            nn.init.normal_(value, std=0.7)
    for block in model.transformer_blocks:
        for modulation in (block.norm1.linear, block.norm1_context.linear):
            gates = modulation.bias.view(6, -1)
            gates[2], gates[5] = 0.5, 0.5
    for block in model.single_transformer_blocks:
        block.norm.linear.bias.view(3, -1)[2] = 0.5


# ------------------------------------------------------------------------------------------------------ the fast forward


def angles(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines [LENGTH + GRID ** 2, 1, HEAD_DIM / 2]: words at place 0, then the tokens of the picture by rows."""
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    places = torch.zeros(LENGTH + GRID**2, 3, dtype=torch.float64)
    places[LENGTH:, 1], places[LENGTH:, 2] = rows.flatten(), columns.flatten()
    turns = []
    for axis, dim in enumerate(AXES):
        frequencies = 10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turns.append(places[:, axis, None] * frequencies)
    turn = torch.cat(turns, 1)[:, None].to(device)
    return turn.cos().float(), turn.sin().float()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of neighbouring pairs: [B, L, H, D]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turn
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x.unflatten(-1, (-1, HEAD_DIM)).float(), (HEAD_DIM,), norm.weight, 1e-6)


def _attend(q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
    """[B, L, H, D] queries and keys, normed, and [B, L, H * D] values -> [B, L, H * D]. hidden: -inf at padding [B, 1, 1, L]."""
    v = v.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    q = (_turned(q, turn) * HEAD_DIM**-0.5).to(v.dtype).transpose(1, 2)
    k = _turned(k, turn).to(v.dtype).permute(0, 2, 3, 1)
    weights = ((q @ k).float() + hidden).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)


def _side_by_side(x: Tensor, *layers: Any) -> list[Tensor]:
    """Linear layers of one input as one product."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    return list(F.linear(x, weight, bias).split([layer.weight.shape[0] for layer in layers], dim=-1))


def _shifted(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def fast_forward(
    model: FluxTransformer2DModel,
    latents: Tensor,
    read: Tensor,
    caption: Tensor,
    times: Tensor,
    hidden: Tensor,
    turn: tuple[Tensor, Tensor],
) -> Tensor:
    """What `model` computes, for captions padded to LENGTH.

    Args:
        latents: [B, 64, 16]; read: words [B, LENGTH, WIDTH]; caption: [B, WIDTH]; times: fp32 [B], 1 is noise.
        hidden: fp32 [B, 1, 1, LENGTH + 64], -inf at padding, else 0.
        turn: `angles()`.

    Returns:
        The velocity, noise minus picture: [B, 64, 16].
    """
    embed = model.time_text_embed
    frequencies = torch.exp(torch.arange(128, device=times.device) * (-math.log(10_000.0) / 128))
    phases = times[:, None] * 1000 * frequencies
    when = embed.timestep_embedder.linear_1(torch.cat([phases.cos(), phases.sin()], 1))
    steer = embed.timestep_embedder.linear_2(F.silu(when))
    steer = steer + embed.text_embedder.linear_2(F.silu(embed.text_embedder.linear_1(caption)))
    steer = F.silu(steer)
    x, c = model.x_embedder(latents), model.context_embedder(read)
    length = c.shape[1]
    for block in model.transformer_blocks:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = block.norm1.linear(steer).chunk(6, 1)
        c_shift, c_scale, c_gate, c_shift_mlp, c_scale_mlp, c_gate_mlp = block.norm1_context.linear(steer).chunk(6, 1)
        a = block.attn
        q, k, v = _side_by_side(_shifted(x, shift, scale), a.to_q, a.to_k, a.to_v)
        cq, ck, cv = _side_by_side(_shifted(c, c_shift, c_scale), a.add_q_proj, a.add_k_proj, a.add_v_proj)
        q = torch.cat([_normed(cq, a.norm_added_q), _normed(q, a.norm_q)], 1)
        k = torch.cat([_normed(ck, a.norm_added_k), _normed(k, a.norm_k)], 1)
        mixed = _attend(q, k, torch.cat([cv, v], 1), turn, hidden)
        x = x + gate[:, None] * a.to_out[0](mixed[:, length:])
        c = c + c_gate[:, None] * a.to_add_out(mixed[:, :length])
        for_mlp, for_c_mlp = _shifted(x, shift_mlp, scale_mlp), _shifted(c, c_shift_mlp, c_scale_mlp)
        x = x + gate_mlp[:, None] * block.ff.net[2](F.gelu(block.ff.net[0].proj(for_mlp), approximate="tanh"))
        inner = F.gelu(block.ff_context.net[0].proj(for_c_mlp), approximate="tanh")
        c = c + c_gate_mlp[:, None] * block.ff_context.net[2](inner)
    x = torch.cat([c, x], 1)
    for block in model.single_transformer_blocks:
        shift, scale, gate = block.norm.linear(steer).chunk(3, 1)
        a = block.attn
        q, k, v, inner = _side_by_side(_shifted(x, shift, scale), a.to_q, a.to_k, a.to_v, block.proj_mlp)
        mixed = _attend(_normed(q, a.norm_q), _normed(k, a.norm_k), v, turn, hidden)
        x = x + gate[:, None] * block.proj_out(torch.cat([mixed, F.gelu(inner, approximate="tanh")], -1))
    scale, shift = model.norm_out.linear(steer).chunk(2, 1)
    out: Tensor = model.proj_out(_shifted(x[:, length:], shift, scale))
    return out


def hidden_after(lengths: Tensor) -> Tensor:
    """Lengths of captions [B] -> the mask of `fast_forward`."""
    padding = torch.arange(LENGTH + GRID**2) >= lengths[:, None]
    padding[:, LENGTH:] = False
    return torch.zeros(padding.shape).masked_fill(padding, float("-inf"))[:, None, None]


def compiled(model: FluxTransformer2DModel, *, train: bool = True) -> Predict:
    """`fast_forward` of the model, compiled where a compiler is found. train: with gradients."""
    device = next(model.parameters()).device
    turn = angles(device)

    def predict(latents: Tensor, read: Tensor, caption: Tensor, times: Tensor, hidden: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return fast_forward(model, latents, read, caption, times, hidden, turn)

    if device.type != "cuda" and not shutil.which("g++"):
        return predict
    made: Predict = torch.compile(predict, dynamic=False)
    return made if train else torch.no_grad()(made)


# ------------------------------------------------------------------------------------------------------------- the data


def packed(latents: Tensor) -> Tensor:
    """[B, 4, 16, 16] -> tokens [B, 64, 16], each 2 x 2 latents, channel first, as Flux packs."""
    return latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def unpacked(rows: Tensor) -> Tensor:
    """The inverse of `packed`."""
    grid = rows.unflatten(1, (GRID, GRID)).unflatten(3, (CHANNELS, 2, 2))
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(rows), CHANNELS, 2 * GRID, 2 * GRID)


@torch.no_grad()
def encoded(vae: AutoencoderTiny, shown: Tensor) -> Tensor:
    """Pictures -> normalised latents as tokens, fp32."""
    latents = vae.encode(shown).latents
    return packed((latents - vae.config.shift_factor) * vae.config.scaling_factor)


@torch.no_grad()
def decoded(vae: AutoencoderTiny, rows: Tensor) -> Tensor:
    """Tokens -> pictures, uint8 [B, 64, 64, 3]."""
    made = vae.decode(unpacked(rows) / vae.config.scaling_factor + vae.config.shift_factor).sample
    return ((made.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)


def latents_of(scenes: Scenes, vae: AutoencoderTiny, folder: Path, count: int, device: torch.device) -> Tensor:
    """The first scenes of the stream as tokens, bf16 [count, 64, 16]; kept in `latents.pt` for this autoencoder."""
    path = folder / "latents.pt"
    weights = (folder / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    key = f"{hashlib.sha256(weights).hexdigest()} {count}"
    if path.is_file():
        kept = torch.load(path, map_location="cpu", weights_only=True)
        if kept["key"] == key:
            return kept["latents"].to(device)  # type: ignore[no-any-return]
    parts = []
    for begin in range(0, count, 256):
        shown = pictures(scenes, SEED, begin, min(256, count - begin), device)
        with torch.autocast(device.type, torch.bfloat16):
            parts.append(encoded(vae, shown.contiguous(memory_format=torch.channels_last)).to(torch.bfloat16))
    latents = torch.cat(parts)
    torch.save({"key": key, "latents": latents.cpu()}, path)
    return latents


class Batches:
    """Random scenes of the stream: their latents, and words for them that change every time."""

    def __init__(self, scenes: Scenes, latents: Tensor, seed: int) -> None:
        self.scenes, self.latents = scenes, latents
        self.drawn = [scenes.draw(SEED, index) for index in range(len(latents))]
        self.rng, self.ids = random.Random(seed), word_ids()

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Latents fp32 [count, 64, 16]; ids, lengths and the scenes' numbers. Some captions are empty."""
        chosen = [self.rng.randrange(len(self.drawn)) for _ in range(count)]
        said = ["" if self.rng.random() < EMPTY else words(self.drawn[at], self.rng) for at in chosen]
        ids, lengths = tokens(said, self.ids)
        return self.latents[chosen].float(), ids, lengths, chosen


# ------------------------------------------------------------------------------------------------------------- training


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo picture model's denoiser.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="of these a twentieth at most goes to the text encoder's start"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scenes", type=int, default=0, help="whose latents are kept (default: 49152; on CUDA 400000)")
    parser.add_argument("--batch", type=int, default=0, help="(default: 16; on CUDA 256)")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    batch = options.batch or (256 if cuda else 16)
    scenes = Scenes(options.folder)
    vae = AutoencoderTiny.from_pretrained(options.folder / "vae").float().to(device).eval().requires_grad_(False)
    text, meaning, model = encoder().to(device), Meaning(scenes).to(device), denoiser().to(device)
    counts = {"denoiser": model, "text": text}
    shown = ", ".join(f"{name} {sum(p.numel() for p in of.parameters()) / 1e6:.2f} M" for name, of in counts.items())
    print(f"parameters: {shown}", flush=True)
    all_parts = nn.ModuleDict({"denoiser": model, "text": text, "meaning": meaning})
    if not (options.folder / "denoiser.ckpt").is_file():
        first_lesson(text, meaning, scenes, options.folder, minutes=options.minutes / 20)
    stage = Stage(
        "denoiser", options.folder, all_parts, minutes=options.minutes * 19 / 20, rate=options.rate, weight_decay=0.01
    )
    torch.manual_seed(options.seed + stage.steps)
    if stage.share < 1:
        latents = latents_of(scenes, vae, options.folder, options.scenes or (400_000 if cuda else 49_152), device)
        _train(stage, Batches(scenes, latents, options.seed + stage.steps), vae, batch)
    averaged: Any = stage.averaged()
    averaged["denoiser"].save_pretrained(options.folder / "transformer")
    averaged["text"].save_pretrained(options.folder / "text_encoder")


def _train(stage: Stage, batches: Batches, vae: AutoencoderTiny, batch: int) -> None:
    parts: Any = stage.network
    model, text, meaning = parts["denoiser"], parts["text"], parts["meaning"]
    device = next(model.parameters()).device
    predict = compiled(model)

    def loss_of(clean: Tensor, ids: Tensor, lengths: Tensor, times: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error of the velocity, and the captions' vectors."""
        when = times[:, None, None]
        read, caption = encode(text, ids.to(device))
        made = predict((1 - when) * clean + when * noise, read, caption, times, hidden_after(lengths).to(device))
        return (made.float() - (noise - clean)).square().mean(), caption

    def step() -> tuple[Tensor, int]:
        # One, two, at the end four small batches to a step: many steps first, quiet ones last.
        repeats = 1 if stage.share < 0.5 else 2 if stage.share < 0.8 else 4
        total = torch.zeros((), device=device)
        for _ in range(repeats):
            clean, ids, lengths, chosen = batches.draw(batch)
            times = torch.sigmoid(torch.randn(batch, device=device))
            loss, caption = loss_of(clean, ids, lengths, times, torch.randn_like(clean))
            named = lengths > 2
            labels = meaning.labels([batches.drawn[at] for at in chosen])[named].to(device)
            total = total + (loss + MEANING_WEIGHT * meaning(caption[named.to(device)], labels)) / repeats
        return total, batch * repeats

    kept = held_out()
    generator = torch.Generator().manual_seed(7)
    shown = np.stack([batches.scenes.picture(scene) for _, scene in kept])
    clean = encoded(vae, (torch.from_numpy(shown).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1))
    ids, lengths = tokens([said for said, _ in kept], word_ids())
    times = torch.sigmoid(torch.randn(len(kept), generator=generator)).to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)

    @torch.no_grad()
    def watch() -> str:
        """The loss on the held-out list, with the mean weights, always at the same times and noise."""
        own = {key: value.clone() for key, value in stage.network.state_dict().items()}
        stage.network.load_state_dict(stage.mean)
        losses = []
        for at in range(0, len(kept) - batch + 1, batch):
            part = slice(at, at + batch)
            # With gradients on: what was compiled for training is not compiled once more.
            with torch.enable_grad():
                loss, _ = loss_of(clean[part], ids[part], lengths[part], times[part], noise[part])
            losses.append(float(loss))
        stage.network.load_state_dict(own)
        return f"held out {sum(losses) / len(losses):.4f}" if losses else ""

    stage.run(step, watch=watch, watch_s=60)


if __name__ == "__main__":
    main()
