"""What INT8 attention and FP8 layers give a denoiser on one GPU: single kernels, and a Flux shape of 1B with random weights.

    python benchmarks/gpu_diffusion.py [--json FILE] [--only CLAIM,...] [--toy] [--minutes 8]

Needs what benchmarks/gpu.py needs and runs as it does: torch, triton, numpy, nothing of ours installed. On the lent machine:

    command:   python3 benchmarks/gpu_diffusion.py --json $OUT/diffusion.json 2>&1 | tee $OUT/diffusion.log
    timeout_s: 600

Errors are RelL1 = sum |a - b| / sum |b| against exact attention over the same 16-bit q, k, v (gaussian; keys share a bias,
values a small one), and against the same model in bf16. Quantizing q, k, v counts in the time of attention; tokens of an
image of 1024 x 1024 are 4,096, and a caption's 512 come before them. Not run yet: the targets are goals.

    claim                              ours / peer                                                         target
    sage_{fp16,fp8}_{4k,16k,32k}_d{64,128}   TFLOP/s of SageAttention / of torch's SDPA, 24 heads          >= 1.0
    fp8_linear                         us for [3072, 12288] and 4,608 rows in FP8 / of torch in bf16       <= 0.65
    step_sage, step_fp8, step_both     ms of one step at 1024 x 1024 / the same in bf16 with SDPA          <= 1, 0.75, 0.7
    rows8_512                          images a second of 8 rows in one step at 512 x 512 / of one row     >= 1.1
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    _folder = tempfile.mkdtemp(prefix="motet-link-")
    os.symlink(Path(__file__).resolve().parent.parent, Path(_folder, "motet"))
    sys.path[0] = _folder  # as benchmarks/gpu.py does

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.benchmarks import gpu
from motet.benchmarks.gpu import BF16, DEVICE, Claim, Limits, Measure, Sizes
from motet.kernels.fp8 import fp8_linear, quantize_linears, rules_of
from motet.kernels.linear import quantize_fp8
from motet.kernels.sage_attention import Attention, Backend, Product, exact_attention, sage_attention

CAPTION, PICTURE, SMALL_PICTURE = 512, 4096, 1024
TOKENS = {"4k": 4096, "16k": 16384, "32k": 32768}


def rel_l1(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).abs().sum() / expected.float().abs().sum())


def is_full(sizes: Sizes) -> bool:
    return sizes is gpu.FULL


# --------------------------------------------------------------------------------------------------------- single kernels


def attention(product: Product, num_tokens: int, dim: int) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        tokens, heads = (num_tokens, 24) if is_full(sizes) else (96, 2)
        q, k, v = (torch.randn(1, tokens, heads, dim, device=DEVICE, dtype=BF16) for _ in range(3))
        k = k + 4 * torch.randn(1, 1, heads, dim, device=DEVICE, dtype=BF16)
        v = v + 0.2 * torch.randn(1, 1, heads, dim, device=DEVICE, dtype=BF16)
        error = rel_l1(sage_attention(q, k, v, product=product)[0], exact_attention(q, k, v))
        sage = gpu.seconds(lambda: sage_attention(q, k, v, product=product), sizes.repeats)
        sdpa = gpu.seconds(lambda: exact_attention(q, k, v), sizes.repeats)
        work = 4 * heads * tokens * tokens * dim / 1e12
        most = 0.04 if product == "fp8" else 0.02
        if not error <= most:
            raise ValueError(f"wrong results: RelL1 {error:.4f}, expected at most {most}")
        return Measure(
            ours=work / sage, peer=work / sdpa, peer_name="torch SDPA", unit="TFLOP/s",
            why=f"RelL1 {error:.4f}; {sage * 1e3:.3f} ms, SDPA {sdpa * 1e3:.3f} ms",
        )  # fmt: skip

    return measure


def linear(sizes: Sizes, limits: Limits) -> Measure:
    rows, width, out = (CAPTION + PICTURE, 3072, 12288) if is_full(sizes) else (20, 64, 48)
    x = torch.randn(rows, width, dtype=BF16, device=DEVICE)
    weight = torch.randn(out, width, dtype=BF16, device=DEVICE) * width**-0.5
    stored = quantize_fp8(weight).tensors
    error = rel_l1(fp8_linear(x, stored["weight"], stored["scale"]), F.linear(x, weight))
    ours = gpu.seconds(lambda: fp8_linear(x, stored["weight"], stored["scale"]), sizes.repeats)
    peer = gpu.seconds(lambda: F.linear(x, weight), sizes.repeats)
    if not error <= 0.06:
        raise ValueError(f"wrong results: RelL1 {error:.4f}")
    return Measure(ours=ours * 1e6, peer=peer * 1e6, peer_name="torch bf16", unit="us", why=f"RelL1 {error:.4f}")


# ----------------------------------------------------------------------------------------------------------- the denoiser


class Block(nn.Module):
    """A single-stream block of Flux: attention and MLP beside each other, one projection of both, modulated."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.ModuleDict({"linear": nn.Linear(width, 3 * width)})
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Linear(width, 4 * width)
        self.proj_out = nn.Linear(5 * width, width)
        self.attention = Attention("sdpa")

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate = self.norm["linear"](F.silu(time))[:, None].chunk(3, -1)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k = (F.rms_norm(to(h).unflatten(-1, (self.num_heads, -1)), (h.shape[-1] // self.num_heads,))
                for to in (self.to_q, self.to_k))  # fmt: skip
        mixed = self.attention(q, k, self.to_v(h).unflatten(-1, (self.num_heads, -1)))
        out: Tensor = x + gate * self.proj_out(
            torch.cat([mixed.flatten(2), F.gelu(self.mlp(h), approximate="tanh")], -1)
        )
        return out


class Denoiser(nn.Module):
    def __init__(self, width: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, time)
        return x


def denoiser(sizes: Sizes) -> Denoiser:
    """16 blocks of width 2,048, 16 heads of 128: 1.0B weights, the same ones at every call."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Denoiser(2048, 16, 16) if is_full(sizes) else Denoiser(64, 1, 2)
    return model.to(BF16).requires_grad_(False)


def inputs(sizes: Sizes, rows: int, picture: int) -> tuple[Tensor, Tensor]:
    tokens, width = (CAPTION + picture, 2048) if is_full(sizes) else (40, 64)
    return (
        torch.randn(rows, tokens, width, device=DEVICE, dtype=BF16),
        torch.randn(rows, width, device=DEVICE, dtype=BF16),
    )


def step(backend: Backend, *, fp8: bool) -> Callable[[Sizes, Limits], Measure]:
    def measure(sizes: Sizes, limits: Limits) -> Measure:
        model, (x, time) = denoiser(sizes), inputs(sizes, 1, PICTURE)
        exact = model(x, time)
        peer = gpu.seconds(lambda: model(x, time), sizes.repeats)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention = Attention(backend)
        if fp8:
            quantize_linears(model, rules_of("flux"))
        error = rel_l1(model(x, time) - x, exact - x)
        ours = gpu.seconds(lambda: model(x, time), sizes.repeats)
        return Measure(
            ours=ours * 1e3, peer=peer * 1e3, peer_name="bf16, SDPA", unit="ms",
            why=f"RelL1 of what the blocks add: {error:.4f}",
        )  # fmt: skip

    return measure


def rows8(sizes: Sizes, limits: Limits) -> Measure:
    model = denoiser(sizes)
    together, alone = inputs(sizes, 8, SMALL_PICTURE), inputs(sizes, 1, SMALL_PICTURE)
    eight = gpu.seconds(lambda: model(*together), sizes.repeats)
    one = gpu.seconds(lambda: model(*alone), sizes.repeats)
    return Measure(
        ours=8 / eight, peer=1 / one, peer_name="one row", unit="rows/s",
        why=f"a step of 8 rows in {eight * 1e3:.2f} ms, of one in {one * 1e3:.2f} ms",
    )  # fmt: skip


SAGE: tuple[Product, ...] = ("fp16", "fp8")
CLAIMS = (
    *(
        Claim(id=f"sage_{product}_{name}_d{dim}", better="higher", target=1.0, measure=attention(product, tokens, dim))
        for name, tokens in TOKENS.items()
        for dim in (64, 128)
        for product in SAGE
    ),
    Claim(id="fp8_linear", better="lower", target=0.65, measure=linear),
    Claim(id="step_sage", better="lower", target=1.0, measure=step("sage", fp8=False)),
    Claim(id="step_fp8", better="lower", target=0.75, measure=step("sdpa", fp8=True)),
    Claim(id="step_both", better="lower", target=0.7, measure=step("sage", fp8=True)),
    Claim(id="rows8_512", better="higher", target=1.1, measure=rows8),
)

if __name__ == "__main__":
    sys.exit(gpu.main(claims=CLAIMS, description=__doc__))
