"""How many voices one GPU can carry: an Orpheus-3B shape and SNAC's 24 kHz decoder, both with random weights.

    python benchmarks/gpu_speech.py [--json FILE] [--only CLAIM,...] [--toy] [--minutes 8]

Needs what benchmarks/gpu.py needs and runs as it does: torch, triton, numpy, nothing of ours installed. On the lent machine:

    command:   python3 benchmarks/gpu_speech.py --json $OUT/speech.json 2>&1 | tee $OUT/speech.log
    timeout_s: 600

A stream needs 82.03 tokens and 11.72 codec frames for each second of speech. A number of streams is carried when the decode
steps and codec steps of one second take no more than a second, one after the other: steps as CUDA graphs with sampling
(temperature 0.6, top-p 0.9), context 1,024 each; the codec in steps of one frame for every stream. The largest number of
those tried counts. What schedules them, the Python between the steps, is not in this figure.

    claim         ours / peer                                                                         target
    streams_bf16  streams carried / the goal of 300                                                   >= 1
    streams_fp8   the same with FP8 weights / the goal of 450                                         >= 1
    codec_batch   seconds of speech per second, 32 streams in one step / one after another            >= 3
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _folder = tempfile.mkdtemp(prefix="motet-link-")
    os.symlink(Path(__file__).resolve().parent.parent, Path(_folder, "motet"))
    sys.path[0] = _folder  # as benchmarks/gpu.py does

import torch

from motet.benchmarks import gpu
from motet.benchmarks.gpu import BF16, DEVICE, ON_GPU, Claim, DeviceSource, Limits, Measure, Sizes
from motet.kernels.sampling import sample
from motet.models.decoder import Decoder
from motet.models.decoder_config import DecoderConfig
from motet.models.parameters import Shapes, parameter_shapes
from motet.models.snac import Snac
from motet.models.snac_config import SnacConfig
from motet.models.snac_streams import SnacStreams
from motet.models.weight_reader import WeightReader

TOKENS_PER_S, FRAMES_PER_S = 7 * 24_000 / 2048, 24_000 / 2048
ORPHEUS = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 156_940, "tie_word_embeddings": True,
}  # fmt: skip
SNAC = {
    "sampling_rate": 24_000, "encoder_dim": 48, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2], "attn_window_size": None, "codebook_size": 4096, "codebook_dim": 8,
    "vq_strides": [4, 2, 1], "noise": True, "depthwise": True,
}  # fmt: skip
TRIED, TRIED_TOY = (64, 128, 200, 250, 300, 350, 400, 450, 500, 600, 700), (2, 3)
BATCH = 32


class _Random(DeviceSource):
    """Random weights of any shape."""

    def get(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) < 3:
            return super().get(name)
        if name.endswith(".alpha"):
            return torch.ones(shape, dtype=BF16, device=DEVICE)
        return torch.randn(shape, dtype=BF16, device=DEVICE) * (shape[1] * shape[2]) ** -0.5


def orpheus(sizes: Sizes, quantize: Any) -> Decoder:
    shape = ORPHEUS if sizes is gpu.FULL else gpu.TOY
    config = DecoderConfig.from_dict(
        {**shape, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192}
    )
    shapes: Shapes = parameter_shapes(config)
    model = Decoder(config, dtype=BF16, device=DEVICE)
    model.load(WeightReader(DeviceSource(shapes), shapes, dtype=BF16, device=DEVICE, quantize=quantize))
    return model


def snac(sizes: Sizes) -> Snac:
    small = {} if sizes is gpu.FULL else {"encoder_dim": 4, "decoder_dim": 32, "codebook_size": 16}
    config = SnacConfig.read({**SNAC, **small})
    return Snac(config, _Random(config.shapes(encoder=False)), device=DEVICE)


def codec_seconds(codec: Snac, num_streams: int, repeats: int) -> float:
    """Of one step that decodes a frame of each stream."""
    streams = SnacStreams(codec, num_streams)
    for slot in range(num_streams):
        streams.reset(slot, slot)
    config = codec.config
    frames = torch.randint(0, config.codebook_size, (num_streams, 1, config.codes_per_frame), device=DEVICE)
    slots = list(range(num_streams))
    return gpu.seconds(lambda: streams.step(slots, frames), repeats, record=False)


def lm_seconds(model: Decoder, num_seqs: int, sizes: Sizes) -> float:
    """Of one decode step, sampling included."""
    spec = model.kv_specs()[0]
    kvs = [gpu.make_cache(num_seqs, sizes.context, spec.num_kv_heads, spec.head_dim) for _ in model.blocks]
    batch, groups = gpu.make_batch(num_seqs, 1, sizes.context), [0] * len(kvs)
    ids = torch.randint(0, model.vocab_size, (num_seqs,), device=DEVICE)
    rows = replace(gpu.greedy(num_seqs, 0.6), top_p=torch.full((num_seqs,), 0.9, device=DEVICE), any_top_p=True)

    def step() -> torch.Tensor:
        return sample(model.logits(model.forward(model.embed(ids), batch, kvs, groups)), rows)

    return gpu.seconds(step, sizes.repeats)


def streams(quantize: str | None, goal: int) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        model, codec = orpheus(sizes, quantize), snac(sizes)
        best, told = 0, ""
        for num in TRIED if sizes is gpu.FULL else TRIED_TOY:
            if ON_GPU:
                torch.cuda.empty_cache()
            lm_s, codec_s = lm_seconds(model, num, sizes), codec_seconds(codec, num, sizes.repeats)
            share = TOKENS_PER_S * lm_s + FRAMES_PER_S * codec_s
            if share > 1 and sizes is gpu.FULL:
                told += f"; {num} would take {share:.2f} s a second"
                break
            best = num
            told = f"LM step {lm_s * 1e3:.2f} ms, codec step {codec_s * 1e3:.2f} ms: {share:.2f} s a second"
        return Measure(ours=best, peer=goal, peer_name="goal", unit="streams", why=told)

    return measure


def codec_batch(sizes: Sizes, limits: Limits) -> Measure:
    codec = snac(sizes)
    together, alone = codec_seconds(codec, BATCH, sizes.repeats), codec_seconds(codec, 1, sizes.repeats)
    return Measure(
        ours=BATCH / FRAMES_PER_S / together, peer=1 / FRAMES_PER_S / alone, peer_name="one by one", unit="x real time",
        why=f"a frame of {BATCH} streams in {together * 1e3:.2f} ms, of one in {alone * 1e3:.2f} ms",
    )  # fmt: skip


CLAIMS = (
    Claim(id="streams_bf16", better="higher", target=1.0, measure=streams(None, 300)),
    Claim(id="streams_fp8", better="higher", target=1.0, measure=streams("fp8", 450)),
    Claim(id="codec_batch", better="higher", target=3.0, measure=codec_batch),
)

if __name__ == "__main__":
    sys.exit(gpu.main(claims=CLAIMS, description=__doc__))
