"""Autoencoders against diffusers' own encode and decode; tiles against the whole; what makes a picture be decoded in tiles."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderTiny
from diffusers.image_processor import VaeImageProcessor
from torch.utils._python_dispatch import TorchDispatchMode

from motet.engine.errors import InternalError, InvalidRequest, ModelLoadError
from motet.models.diffusion_vae import Autoencoder, in_tiles, spans

CPU = torch.device("cpu")


def tiny(**changes: Any) -> AutoencoderTiny:
    torch.manual_seed(0)
    blocks: dict[str, Any] = {"encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 8)}
    blocks |= {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
    return AutoencoderTiny(**blocks, scaling_factor=0.7, shift_factor=0.2, **changes)


def kl(**changes: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "scaling_factor": 0.36,
        "shift_factor": 0.12,
    }
    return AutoencoderKL(**(settings | changes))


def qwen() -> AutoencoderKLQwenImage:
    torch.manual_seed(0)
    statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 2.0, 1.0]}
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}
    return AutoencoderKLQwenImage(**sizes, num_res_blocks=1, **statistics)


def theirs(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """As the pipelines of `diffusers` end: uint8 [B, H, W, 3]."""
    config = vae.config
    with torch.no_grad():
        if isinstance(vae, AutoencoderKLQwenImage):
            mean, deviation = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("latents_mean", "latents_std"))
            made = vae.decode((latents / (1 / deviation) + mean)[:, :, None]).sample[:, :, 0]
        else:
            made = vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0)).sample
    pictures = VaeImageProcessor(vae_scale_factor=4).postprocess(made, output_type="np")
    return torch.from_numpy((pictures * 255).round().astype("uint8"))


def their_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    shown = VaeImageProcessor(vae_scale_factor=4).preprocess(pixels.numpy()[None] / 255.0).float()
    config = vae.config
    with torch.no_grad():
        if isinstance(vae, AutoencoderTiny):
            latents = vae.encode(shown).latents
        elif isinstance(vae, AutoencoderKL):
            latents = vae.encode(shown).latent_dist.mode()
        else:
            latents = vae.encode(shown[:, :, None]).latent_dist.mode()[:, :, 0]
            mean, deviation = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("latents_mean", "latents_std"))
            return ((latents - mean) / deviation)[0]
    return ((latents - (config.shift_factor or 0.0)) * config.scaling_factor)[0]


@pytest.mark.parametrize(
    "make",
    [tiny, kl, qwen, lambda: kl(use_quant_conv=False, use_post_quant_conv=False, shift_factor=None)],
    ids=["tiny", "kl", "qwen", "kl_plain"],
)
def test_as_diffusers_has_it(make: Any) -> None:
    vae = make().eval()
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 6, 5, generator=generator) * 2
    pixels = torch.randint(256, (24, 32, 3), generator=generator, dtype=torch.uint8)
    pictures, encoded = theirs(vae, latents), their_latents(vae, pixels)
    ours = Autoencoder(vae, device=CPU, dtype=torch.float32)
    assert (ours.scale, ours.channels) == ((2, 4) if isinstance(vae, AutoencoderKL) else (4, 4))
    made = ours.decode(latents)
    assert made.shape == (2, 6 * ours.scale, 5 * ours.scale, 3) and made.dtype == torch.uint8
    assert made.float().std() > 3  # a picture, not one colour
    assert (made.int() - pictures.int()).abs().max() <= 1 and (made != pictures).float().mean() < 1e-3
    assert torch.allclose(ours.encode(pixels), encoded, atol=2e-5)


@pytest.mark.parametrize(("size", "tile"), [(40, 40), (41, 40), (128, 40), (200, 48), (57, 56)])
def test_spans_cover_a_line(size: int, tile: int) -> None:
    line = spans(size, tile)
    assert line[0].keep_start == 0 and line[-1].keep_stop == size
    assert all(span.stop - span.start <= tile and span.stop <= size for span in line)
    for before, after in zip(line, line[1:]):
        assert after.start > before.start
        assert before.keep_stop - after.keep_start >= 8  # they blend
        assert after.keep_start - after.start >= 4 and before.stop - before.keep_stop >= 4  # borders are thrown away


def test_tiles_of_convolutions_are_the_whole() -> None:
    ours = Autoencoder(tiny(), device=CPU, dtype=torch.float32)
    latents = torch.randn(1, 4, 40, 50, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        whole = ours._decoded(latents)
        # Nine cells: as far as this decoder's convolutions see.
        tiled = in_tiles(ours._decoded, latents, 36, reads=1, writes=4, halo=9, blend=6)
        assert torch.allclose(whole, tiled, atol=1e-5)
        # With the halo that is used: seams within what the far ends of convolutions weigh.
        tiled = in_tiles(ours._decoded, latents, 24, reads=1, writes=4)
        assert (whole - tiled).abs().mean() < 0.01 * whole.abs().mean()
        shown = torch.rand(1, 3, 160, 200, generator=torch.Generator().manual_seed(3)) * 2 - 1
        there = in_tiles(ours._encoded, shown, 24, reads=4, writes=1)
        assert (ours._encoded(shown) - there).abs().mean() < 0.02 * ours._encoded(shown).abs().mean()


def test_tiles_pass_into_each_other() -> None:
    """A tile that is brighter than its neighbour: the seam is a slope."""
    tiles = iter((0.0, 1.0))
    made = in_tiles(lambda cells: torch.full_like(cells, next(tiles)), torch.zeros(1, 1, 16, 48), 32, reads=1, writes=1)
    line = made[0, 0, 8]
    steps = line.diff()
    assert line[0] == 0 and line[-1] == 1
    assert (steps >= 0).all() and steps.max() < 0.15


def test_memory_decides() -> None:
    ours = Autoencoder(tiny(), device=CPU, dtype=torch.float32)
    assert ours.tile("decode", 16, 16) == 0  # there is room for that
    cells = ours.estimate("decode", 40, 40)
    assert ours.estimate("decode", 80, 80) == pytest.approx(4 * cells, rel=1e-6)
    ours = Autoencoder(tiny(), device=CPU, dtype=torch.float32, max_bytes=cells)
    assert ours.tile("decode", 40, 40) == 0 == ours.tile("decode", 16, 16)
    assert ours.tile("decode", 64, 48) == 40
    ours.max_bytes = 10**12
    assert ours.tile("decode", 64, 48) == 40  # what was chosen for a size stays
    ours = Autoencoder(tiny(), device=CPU, dtype=torch.float32, max_bytes=1)
    assert ours.tile("decode", 32, 32) == 0 and ours.tile("encode", 40, 32) == 32
    latents = torch.randn(2, 4, 40, 33, generator=torch.Generator().manual_seed(4))
    made = ours.decode(latents)
    assert made.shape == (2, 160, 132, 3)
    assert torch.equal(made[1:], ours.decode(latents[1:]))
    assert ours.encode(made[0]).shape == (4, 40, 33)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, of those made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("make", [tiny, lambda: kl(block_out_channels=(16, 32), norm_num_groups=8), qwen])
def test_the_estimate_is_near_what_is_used(make: Any) -> None:
    ours = Autoencoder(make(), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        with Alive() as alive:
            ours._decoded(torch.zeros(1, 4, 24, 24))
        assert alive.most < ours.estimate("decode", 24, 24) < 2 * alive.most
        with Alive() as alive:
            ours._encoded(torch.zeros(1, 3, 24 * ours.scale, 24 * ours.scale))
        assert alive.most < ours.estimate("encode", 24, 24) < 2 * alive.most


def test_threads_share_one() -> None:
    ours = Autoencoder(qwen(), device=CPU, dtype=torch.float32)
    latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    pixels = torch.randint(256, (32, 32, 3), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    alone = [ours.decode(row[None]) for row in latents]
    encoded = ours.encode(pixels)
    wrong: list[str] = []

    def work(at: int) -> None:
        for _ in range(5):
            if not torch.equal(ours.decode(latents[at : at + 1]), alone[at]):
                wrong.append("decode")
            if not torch.equal(ours.encode(pixels), encoded):
                wrong.append("encode")

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ModelLoadError, match="expected one of AutoencoderKL, .* found Linear"):
        Autoencoder(torch.nn.Linear(1, 1), device=CPU, dtype=torch.float32)
    with pytest.raises(ModelLoadError, match="latents_mean"):
        Autoencoder(kl(latents_mean=(0.0,), latents_std=(1.0,)), device=CPU, dtype=torch.float32)
    ours = Autoencoder(tiny(), device=CPU, dtype=torch.float32)
    with pytest.raises(InvalidRequest, match="multiples of 4"):
        ours.encode(torch.zeros(30, 32, 3, dtype=torch.uint8))
    with pytest.raises(InvalidRequest, match=r"\[B, 4, h, w\]"):
        ours.decode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(InternalError, match="out of range"):
        ours.decode(torch.full((1, 4, 8, 8), float("nan")))


def test_half_precision_where_it_holds() -> None:
    assert Autoencoder(kl(force_upcast=True), device=CPU, dtype=torch.float16).dtype == torch.float32
    assert Autoencoder(kl(force_upcast=True), device=CPU, dtype=torch.bfloat16).dtype == torch.bfloat16
    half = Autoencoder(tiny(), device=CPU, dtype=torch.bfloat16)
    whole = Autoencoder(tiny(), device=CPU, dtype=torch.float32)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    assert (half.decode(latents).int() - whole.decode(latents).int()).abs().float().mean() < 3
