"""Words of the picture route: what a client may ask for, and every shape of the answers.

OpenAI's fields keep OpenAI's meaning; those that ask for what no model here does are in `NEUTRAL`, with the values that ask for
nothing. Pictures come in the answer itself, in base64: this server keeps none, so it has no URL to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from ..engine.errors import UnsupportedParameter
from ..engine.picture_request import MAX_PICTURES
from ..pipelines.picture_file import PictureFormat

MAX_PARTIAL_IMAGES = 3
Background: TypeAlias = Literal["transparent", "opaque", "auto"]
Quality: TypeAlias = Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"]
Size: TypeAlias = Annotated[str, Meta(max_length=20, extra_json_schema={"pattern": "^(auto|[0-9]+x[0-9]+)$"})]

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ("b64_json",),
    "background": ("auto", "opaque"),
    "quality": ("auto", "standard", "medium"),
    "style": ("vivid",),  # what OpenAI's clients send unasked
    "complexity": ("medium",),
    "frame_count": (),
    "frame_duration_ms": (),
    "svg": (),
}


class ImageCreate(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/images/generations."""

    prompt: str
    model: str | None = None  # null: the first model that makes pictures
    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] | None = None
    size: Size | None = None  # "WIDTHxHEIGHT" of the model's menu; "auto" and null: its first
    output_format: PictureFormat | None = None  # null: png
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None  # quality of jpeg and webp; null: 100
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None  # of each picture, in a stream

    # Ours. Null: the model's own; what has no effect on a model is refused.
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = (
        None  # the same seed gives the same picture; i of n has seed + i
    )
    negative_prompt: str | None = None
    steps: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    guidance_scale: float | None = None
    solver: Annotated[str, Meta(max_length=100)] | None = None
    image: str | None = None  # begin from this one: PNG, JPEG or WebP in base64, bare or as a data URL
    strength: Annotated[float, Meta(gt=0, le=1)] | None = None  # with an image: 1 forgets it, near 0 keeps it

    # Harmless: accepted, ignored.
    user: str | None = None
    safety_identifier: str | None = None
    moderation: Literal["low", "auto"] | None = None
    metadata: dict[str, Any] | None = None

    # Unsupported unless neutral; see NEUTRAL.
    response_format: Literal["url", "b64_json"] | None = None
    background: Background | None = None
    quality: Quality | None = None
    style: Literal["vivid", "natural"] | None = None
    complexity: Literal["low", "medium", "high"] | None = None
    frame_count: Any = None
    frame_duration_ms: Any = None
    svg: Any = None


class InputDetails(Struct, frozen=True, kw_only=True):
    text_tokens: int = 0
    image_tokens: int = 0


class PictureUsage(Struct, frozen=True, kw_only=True):
    """Tokens of the prompt. Pictures are not made of tokens: of output there are none."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    total_tokens: int = 0


class PictureBody(Struct, frozen=True, kw_only=True):
    b64_json: str
    seed: int  # makes this one again, alone


class ImagesResponse(Struct, frozen=True, kw_only=True):
    created: int
    data: list[PictureBody]
    usage: PictureUsage
    size: str
    output_format: PictureFormat
    background: Literal["opaque"] = "opaque"


class PartialImage(Struct, frozen=True, kw_only=True):
    """An event of the stream: what picture `index` looks like so far."""

    b64_json: str
    partial_image_index: int  # counts those of its picture from 0
    created_at: int
    size: str
    output_format: PictureFormat
    index: int = 0
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"
    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"


class ImageCompleted(Struct, frozen=True, kw_only=True):
    """A finished picture. The last of a request holds the usage of all."""

    b64_json: str
    created_at: int
    size: str
    output_format: PictureFormat
    usage: PictureUsage
    seed: int
    index: int = 0
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"
    type: Literal["image_generation.completed"] = "image_generation.completed"


def refuse_unsupported(request: ImageCreate) -> None:
    """Raise UnsupportedParameter for the first field that asks for what no model here does, or that asks for nothing."""
    if request.response_format == "url":
        raise UnsupportedParameter(
            "response_format: this server keeps no pictures that a URL could lead to; use 'b64_json'",
            param="response_format",
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            expected = f" (only {', '.join(map(repr, neutral))})" if neutral else ""
            raise UnsupportedParameter(f"{name}: not supported by this server{expected}", param=name)
    if request.output_compression not in (None, 100) and request.output_format in (None, "png"):
        raise UnsupportedParameter(
            "output_compression: has no effect on png, which loses nothing; use output_format 'jpeg' or 'webp'",
            param="output_compression",
        )
    if request.partial_images and not request.stream:
        raise UnsupportedParameter("partial_images: has no effect without stream", param="partial_images")
