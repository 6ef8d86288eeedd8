"""SNAC against its package, in pieces against whole, and what it says about weights that do not fit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.models.parameters import TensorSource
from motet.models.snac import Snac
from motet.models.snac_config import SnacConfig
from motet.models.snac_streams import SnacStreams, _noise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses torch.jit
    import snac as package
    from snac import layers as package_layers

TINY: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 4,
    "encoder_rates": [2, 3, 4],
    "latent_dim": None,
    "decoder_dim": 128,
    "decoder_rates": [4, 3, 2],
    "attn_window_size": None,
    "codebook_size": 64,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": False,
    "depthwise": True,
}


def theirs(**changes: Any) -> tuple[dict[str, Any], Any]:
    """A config, and the package's codec of random weights that matter: biases, alphas and norms as training leaves them."""
    torch.manual_seed(0)
    config = TINY | changes
    model = package.SNAC(**config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("alpha"):
                parameter.uniform_(0.3, 3.0)
            elif name.endswith("original0"):
                parameter.mul_(1.5 * torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return config, model


def ours(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Snac:
    return Snac(SnacConfig.read(config), TensorSource(tensors))


def codes_of(codec: Snac, batch: int, num_frames: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = codec.config.codebook_size
    return [
        torch.randint(size, (batch, num_frames * count), generator=generator) for count in codec.config.codes_per_level
    ]


@pytest.mark.parametrize(
    "changes", [{}, {"depthwise": False, "decoder_dim": 32}, {"vq_strides": [4, 2], "decoder_dim": 256}], ids=str
)
def test_package_says_the_same(changes: dict[str, Any]) -> None:
    config, reference = theirs(**changes)
    codec = ours(config, reference.state_dict())
    codes = codes_of(codec, 2, 9)
    with torch.no_grad():
        want = reference.decode(codes)[:, 0]
    torch.testing.assert_close(codec.decode(codes), want, atol=2e-5, rtol=0)
    assert want.std() > 0.05
    pcm = torch.randn(2, 1000) * 0.3
    with torch.no_grad():
        heard = reference.encode(pcm[:, None])
    for level, expected in zip(codec.encode(pcm), heard, strict=True):
        assert torch.equal(level, expected)


def test_noise_is_the_packages_but_for_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reference = theirs(noise=True)
    codec = ours(config, reference.state_dict())
    codes = codes_of(codec, 2, 5)
    blocks = iter(range(3))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        noise = _noise((3, 4), (0, 0), x.shape[2], next(blocks), x.device).transpose(1, 2)
        return x + noise * self.linear(x)

    monkeypatch.setattr(package_layers.NoiseBlock, "forward", forward)
    with torch.no_grad():
        want = reference.decode(codes)[:, 0]
    torch.testing.assert_close(codec.decode(codes, seeds=(3, 4)), want, atol=2e-5, rtol=0)
    assert (codec.decode(codes) - want).abs().max() > 1e-3


def test_noise_is_normal_and_depends_on_position_alone() -> None:
    device = torch.device("cpu")
    noise = _noise((1, 2), (0, 0), 50_000, 0, device)[..., 0]
    assert noise.mean(1).abs().max() < 0.02 and (noise.std(1) - 1).abs().max() < 0.02
    assert torch.corrcoef(torch.cat([noise, noise[:1].roll(1, 1)]))[0, 1:].abs().max() < 0.02
    assert torch.equal(_noise((2,), (700,), 60, 0, device)[0, :, 0], noise[1, 700:760])
    assert not torch.equal(_noise((2,), (700,), 60, 1, device)[0, :, 0], noise[1, 700:760])


@pytest.mark.parametrize(
    "changes", [{}, {"noise": True}, {"depthwise": False, "decoder_dim": 16}, {"vq_strides": [2, 1]}], ids=str
)
def test_pieces_equal_the_whole(changes: dict[str, Any]) -> None:
    config, reference = theirs(**changes)
    codec = ours(config, reference.state_dict())
    num_frames, flush = 14, codec.config.flush_frames
    codes = codes_of(codec, 3, num_frames)
    whole = codec.decode(codes, seeds=(5, 6, 7))
    frames = torch.nn.functional.pad(codec.frames(codes), (0, 0, 0, flush))
    for sizes in ([1] * (num_frames + flush), [1, 2, 5, 3, num_frames + flush - 11], [num_frames + flush]):
        streams = SnacStreams(codec, 5)
        slots = [4, 0, 2]
        for slot, seed in zip(slots, (5, 6, 7)):
            streams.reset(slot, seed)
        made: list[list[torch.Tensor]] = [[], [], []]
        fed = 0
        for size in sizes:
            if fed < num_frames <= fed + size:
                for slot in slots:
                    streams.end(slot, num_frames)
            for at, samples in enumerate(streams.step(slots, frames[:, fed : fed + size])):
                made[at].append(samples)
            fed += size
        for at, pieces in enumerate(made):
            torch.testing.assert_close(torch.cat(pieces), whole[at], atol=1e-5, rtol=0)


def test_streams_that_begin_and_end_apart_do_not_hear_each_other() -> None:
    config, reference = theirs(noise=True)
    codec = ours(config, reference.state_dict())
    flush = codec.config.flush_frames
    first, second = codes_of(codec, 1, 8, 1), codes_of(codec, 1, 6, 2)
    streams = SnacStreams(codec, 2)
    made: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for round_ in range(2):  # the slots are used again
        made = {0: [], 1: []}
        frames = [torch.nn.functional.pad(codec.frames(codes)[0], (0, 0, 0, flush)) for codes in (first, second)]
        streams.reset(0, 1)
        for step in range(20):
            if step == 3:
                streams.reset(1, 2)
            if step == 7:
                streams.end(0, 8)
            if step == 8:
                streams.end(1, 6)
            slots = [slot for slot, at in ((0, step), (1, step - 3)) if 0 <= at < len(frames[slot])]
            if round_:
                slots.reverse()
            if slots:
                rows = torch.stack([frames[slot][step - 3 * slot] for slot in slots])[:, None]
                for slot, samples in zip(slots, streams.step(slots, rows)):
                    made[slot].append(samples)
    torch.testing.assert_close(torch.cat(made[0]), codec.decode(first, seeds=(1,))[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(made[1]), codec.decode(second, seeds=(2,))[0], atol=1e-5, rtol=0)


def test_every_spelling_of_weight_norm(tmp_path: Path) -> None:
    config, reference = theirs()
    state = reference.state_dict()
    old = {
        name.replace(".parametrizations.weight.original0", ".weight_g").replace(
            ".parametrizations.weight.original1", ".weight_v"
        ): value
        for name, value in state.items()
    }
    for module in list(reference.modules()):
        if hasattr(module, "parametrizations"):
            torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    plain = {name: value.contiguous() for name, value in reference.state_dict().items()}
    save_file(plain, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    codec = Snac.load(tmp_path)
    assert codec.has_encoder and codec.config.hop == 24 and codec.config.latent_dim == 32
    codes = codes_of(codec, 1, 4)
    for tensors in (state, old):
        torch.testing.assert_close(ours(config, tensors).decode(codes), codec.decode(codes))


def test_weights_that_do_not_fit() -> None:
    config, reference = theirs()
    state = reference.state_dict()
    decoder = {
        name: value for name, value in state.items() if not name.startswith("encoder.") and "in_proj" not in name
    }
    codec = ours({**config, "latent_dim": 32, "encoder_dim": None}, decoder)
    assert not codec.has_encoder
    with pytest.raises(InvalidRequest, match="only decode"):
        codec.encode(torch.zeros(1, 100))
    lost = dict(state)
    del lost["decoder.model.1.parametrizations.weight.original0"]
    with pytest.raises(ModelLoadError, match=r"1 missing: decoder.model.1.weight; 1 unexpected: .*original1"):
        ours(config, lost)
    with pytest.raises(ModelLoadError, match=r"1 unexpected: decoder.model.99.alpha"):
        ours(config, state | {"decoder.model.99.alpha": torch.ones(1)})
    with pytest.raises(ModelLoadError, match=r"codebook.weight: expected shape \[32, 4\], got \[64, 4\]"):
        ours({**config, "codebook_size": 32}, state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_window_size": 32}, "attn_window_size: codecs with local attention"),
        ({"vq_strides": [4, 3]}, "each must divide the first"),
        ({"decoder_rates": []}, "decoder_rates: expected a list"),
        ({"decoder_dim": 20}, "cannot be halved"),
        ({"codebook_size": "many"}, "codebook_size: expected a positive integer"),
        ({"noise": None}, "noise: expected true or false"),
        ({"encoder_rates": [2, 2, 2]}, "do not fit"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        SnacConfig.read(TINY | changes)


def test_codes_that_are_refused() -> None:
    config, reference = theirs()
    codec = ours(config, reference.state_dict())
    codes = codes_of(codec, 1, 3)
    for wrong in (codes[:2], [codes[0], codes[1][:, :5], codes[2]], [codes[0][:, :0], *codes[1:]]):
        with pytest.raises(InvalidRequest):
            codec.decode(wrong)
    codes[2][0, 1] = 64
    with pytest.raises(InvalidRequest, match=r"0\.\.63"):
        codec.decode(codes)


def test_public_codec_is_known() -> None:
    config = SnacConfig.read(
        TINY
        | {
            "encoder_dim": 48,
            "encoder_rates": [2, 4, 8, 8],
            "decoder_dim": 1024,
            "decoder_rates": [8, 8, 4, 2],
            "codebook_size": 4096,
            "codebook_dim": 8,
            "noise": True,
        }
    )
    assert config.latent_dim == 768 and config.frame_samples == 2048 and config.codes_per_frame == 7
    with torch.device("meta"):
        reference = package.SNAC(**json.loads(json.dumps(TINY)) | {
            "encoder_dim": 48, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 1024, "decoder_rates": [8, 8, 4, 2],
            "codebook_size": 4096, "codebook_dim": 8, "noise": True,
        })  # fmt: skip
    found = {
        name.replace(".parametrizations.weight.original1", ".weight"): tuple(value.shape)
        for name, value in reference.state_dict().items()
        if not name.endswith("original0")
    }
    assert config.shapes(encoder=True) == found
