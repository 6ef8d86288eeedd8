"""With equal seeds and embeddings our latents are those of diffusers' own pipelines."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from motet.engine.diffusion_engine import DiffusionEngine
from motet.engine.picture_request import PictureRules
from motet.engine.solvers import Schedule, begin_solver
from motet.engine.types import Done, ImageRequest, ModelInfo
from motet.models.diffusion import Caption, Stages
from motet.models.diffusion_flux import FluxDenoiser

from ..tiny import lively
from .scripted_adapter import ends, run

CPU = torch.device("cpu")
INFO = ModelInfo(model="tiny", kind="image", source="", max_model_len=0, vocab_size=0, hidden_size=0)


class Given:
    """Captions by name, and an autoencoder that keeps what it is to decode."""

    scale, channels = 8, 4

    def __init__(self, captions: dict[str, Caption]) -> None:
        self.captions = captions
        self.latents: list[torch.Tensor] = []

    def __call__(self, prompts: Any) -> list[Caption]:
        return [self.captions[prompt] for prompt in prompts]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.latents.append(latents.clone())
        return torch.zeros(len(latents), 8, 8, 3, dtype=torch.uint8)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("true_guidance", [False, True])
def test_flux(true_guidance: bool) -> None:
    """Guidance embedded, as FLUX.1-dev, with levels shifted by size; or by a second row, as `true_cfg_scale` does."""
    generator = torch.Generator().manual_seed(0)
    captions = {
        name: Caption(torch.randn(7, 24, generator=generator), torch.randn(20, generator=generator))
        for name in ("yes", "no")
    }
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=not true_guidance, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    lively(model)
    model.eval()
    scheduler = {"shift": 3.0, "use_dynamic_shifting": not true_guidance}
    vae = diffusers.AutoencoderKL(latent_channels=4, block_out_channels=(8,) * 4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(**scheduler), vae, None, None, None, None, model
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs: Any = pipeline(
        prompt_embeds=captions["yes"].embeds[None],
        pooled_prompt_embeds=captions["yes"].pooled[None],
        negative_prompt_embeds=captions["no"].embeds[None] if true_guidance else None,
        negative_pooled_prompt_embeds=captions["no"].pooled[None] if true_guidance else None,
        true_cfg_scale=2.5 if true_guidance else 1.0,
        guidance_scale=2.5, width=64, height=32, num_inference_steps=5, output_type="latent",
        generator=torch.Generator().manual_seed(9),
    ).images  # fmt: skip
    given = Given(captions)
    rules = PictureRules(
        sizes=((64, 32),), num_steps=5, guidance="cfg" if true_guidance else "embedded", guidance_scale=2.5,
        solver="euler", solvers=("euler",),
    )  # fmt: skip
    schedule = Schedule.from_config({"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler})
    engine = DiffusionEngine(
        info=INFO, painter=Stages(given, FluxDenoiser(model, scale=8), given, devices=(CPU,) * 3), rules=rules,
        begin_solver=begin_solver(schedule), max_step_cost=1.0,
    )  # fmt: skip
    asked = ImageRequest(
        request_id="a", model="tiny", prompt="yes", negative_prompt="no" if true_guidance else "", seed=9
    )
    assert isinstance(ends(run(engine, asked))["a"], Done)
    engine.close()
    unpacked = pipeline._unpack_latents(theirs, 32, 64, pipeline.vae_scale_factor)
    torch.testing.assert_close(given.latents[-1], unpacked, rtol=1e-4, atol=1e-5)
