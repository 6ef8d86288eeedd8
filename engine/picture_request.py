"""What a model allows of a request for pictures, and a request with every default filled in. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidRequest, UnsupportedParameter
from .types import Blob, ImageRequest

MAX_PICTURES = 10  # of one request
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """A model's card, as far as requests meet it.

    `guidance`: "cfg" computes a second row from the negative prompt; "embedded" is a number that the model was trained with;
    "none" for models that take neither. `sigmas`: few-step models come with theirs, and then the number of steps is fixed.
    """

    sizes: tuple[tuple[int, int], ...]  # width, height; the first is the default
    num_steps: int
    max_steps: int = 200
    guidance: Literal["cfg", "embedded", "none"] = "cfg"
    guidance_scale: float = 1.0
    max_guidance: float = 50.0
    solver: str
    solvers: tuple[str, ...]
    sigmas: tuple[float, ...] = ()
    max_prompt_chars: int = 4096
    takes_image: bool = True

    @property
    def few_step(self) -> bool:
        return bool(self.sigmas)


@dataclass(frozen=True, kw_only=True)
class PictureOrder:
    """A checked request: what is made, `begin` is the first step that runs (above 0 with an image only)."""

    prompt: str
    negative_prompt: str | None  # None: no second branch
    width: int
    height: int
    num_steps: int
    begin: int
    guidance_scale: float
    solver: str
    seeds: tuple[int, ...]
    image: Blob | None
    preview_every: int


def check_order(request: ImageRequest, rules: PictureRules) -> PictureOrder:
    """The order of a request. Raises InvalidRequest, or UnsupportedParameter for what the model has no use for."""
    if not request.prompt.strip():
        raise InvalidRequest("prompt: expected a description, got none", param="prompt")
    for name in ("prompt", "negative_prompt"):
        if len(getattr(request, name)) > rules.max_prompt_chars:
            raise InvalidRequest(f"{name}: expected at most {rules.max_prompt_chars} characters", param=name)
    size = (request.width, request.height)
    if size == (0, 0):
        size = rules.sizes[0]
    if size not in rules.sizes:
        menu = ", ".join(f"{w}x{h}" for w, h in rules.sizes)
        raise InvalidRequest(f"size: expected one of {menu}, got {size[0]}x{size[1]}", param="size")
    scale = rules.guidance_scale if request.guidance_scale is None else request.guidance_scale
    if not (math.isfinite(scale) and 0 <= scale <= rules.max_guidance):
        raise InvalidRequest(
            f"guidance_scale: expected 0 to {rules.max_guidance:g}, got {scale}", param="guidance_scale"
        )
    if rules.guidance == "none" and request.guidance_scale not in (None, rules.guidance_scale):
        raise UnsupportedParameter("guidance_scale: has no effect on this model", param="guidance_scale")
    branches = rules.guidance == "cfg" and scale > 1.0
    if request.negative_prompt and not branches:
        why = "at a guidance_scale of at most 1" if rules.guidance == "cfg" else "on this model"
        raise UnsupportedParameter(f"negative_prompt: has no effect {why}", param="negative_prompt")
    if not 1 <= request.n <= MAX_PICTURES:
        raise InvalidRequest(f"n: expected 1 to {MAX_PICTURES}, got {request.n}", param="n")
    if not 0 <= request.seed <= _MAX_SEED - MAX_PICTURES:
        raise InvalidRequest(f"seed: expected 0 to {_MAX_SEED - MAX_PICTURES}, got {request.seed}", param="seed")
    if request.preview_every < 0:
        raise InvalidRequest(f"preview_every: expected 0 or more, got {request.preview_every}", param="preview_every")
    num_steps = _num_steps(request, rules)
    return PictureOrder(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt if branches else None,
        width=size[0],
        height=size[1],
        num_steps=num_steps,
        begin=_begin(request, rules, size, num_steps),
        guidance_scale=scale,
        solver=_solver(request, rules),
        seeds=tuple(request.seed + index for index in range(request.n)),
        image=request.image,
        preview_every=request.preview_every,
    )


def _num_steps(request: ImageRequest, rules: PictureRules) -> int:
    if rules.few_step:
        if request.num_steps not in (0, len(rules.sigmas)):
            raise UnsupportedParameter(
                f"num_steps: this model takes exactly {len(rules.sigmas)}, got {request.num_steps}", param="num_steps"
            )
        return len(rules.sigmas)
    num_steps = request.num_steps or rules.num_steps
    if not 1 <= num_steps <= rules.max_steps:
        raise InvalidRequest(f"num_steps: expected 1 to {rules.max_steps}, got {num_steps}", param="num_steps")
    return num_steps


def _solver(request: ImageRequest, rules: PictureRules) -> str:
    solver = request.solver or rules.solver
    if solver not in rules.solvers:
        raise InvalidRequest(f"solver: expected one of {', '.join(rules.solvers)}, got {solver[:40]!r}", param="solver")
    return solver


def _begin(request: ImageRequest, rules: PictureRules, size: tuple[int, int], num_steps: int) -> int:
    """The first step of image-to-image: the last round(strength * steps) ones run, at least one."""
    if request.image is None:
        return 0
    if not rules.takes_image:
        raise UnsupportedParameter("image: this model makes pictures from text alone", param="image")
    if not (math.isfinite(request.strength) and 0 < request.strength <= 1):
        raise InvalidRequest(f"strength: expected above 0 and up to 1, got {request.strength}", param="strength")
    width, height = size
    image = request.image
    if image.dtype != "uint8" or tuple(image.shape) != (height, width, 3) or len(image.data) != height * width * 3:
        raise InvalidRequest(f"image: expected uint8 [{height}, {width}, 3]", param="image")
    return num_steps - max(1, min(num_steps, round(request.strength * num_steps)))
