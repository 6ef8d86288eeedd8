"""Picture files: pixels to PNG, JPEG and WebP, and such files back to pixels, under limits. Pillow is imported where it is used.

Nothing in a header is believed: the format comes from the list of three and the size is checked before a pixel is decoded. No
torch; runs in any thread. A server opens strangers' files in a process of its own (decoder_process.py).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

PictureFormat: TypeAlias = Literal["png", "jpeg", "webp"]
Pixels: TypeAlias = NDArray[np.uint8]  # [height, width, 3]
CONTENT_TYPES: dict[str, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}

MAX_BYTES = 32 * 1024 * 1024  # of a file
MAX_PIXELS = 40_000_000  # of a file: 160 MB when it is decoded, and up to three times as much on the way
MAX_SIDE = 32_768
_OPENED = ("PNG", "JPEG", "WEBP")
_FINE_CHROMA = 90  # quality from which colours are kept at full resolution


def encode(pixels: Pixels, format: PictureFormat = "png", compression: int = 100) -> bytes:
    """uint8 [H, W, 3] as a file. `compression` is the quality of JPEG and WebP, 0 to 100; PNG loses nothing and ignores it.

    Raises InvalidRequest for a format, a compression or pixels that are none of these.
    """
    if format not in CONTENT_TYPES:
        raise InvalidRequest(
            f"output_format: expected one of {', '.join(CONTENT_TYPES)}, got {str(format)[:40]!r}",
            param="output_format",
        )
    if not 0 <= compression <= 100:
        raise InvalidRequest(f"output_compression: expected 0 to 100, got {compression}", param="output_compression")
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise InvalidRequest(f"expected uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}")
    from PIL import Image

    options: dict[str, Any] = {}
    if format == "jpeg":
        options = {"quality": compression, "subsampling": 0 if compression >= _FINE_CHROMA else 2}
    elif format == "webp":
        options = {"quality": compression}
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format.upper(), **options)
    return file.getvalue()


def open_picture(data: bytes, width: int, height: int, *, max_bytes: int = MAX_BYTES) -> Pixels:
    """A PNG, JPEG or WebP file as uint8 [height, width, 3]: turned as its camera says, scaled until it covers that size, what
    stands over cut off evenly, what is transparent made white. Of an animation the first picture.

    Raises InvalidRequest, param "image", with a code: invalid_image (nothing known, damaged), image_too_large.
    """
    if len(data) > max_bytes:
        _refuse(f"the file has {len(data)} bytes; at most {max_bytes} are taken", "image_too_large")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_OPENED) as opened:
            if opened.width * opened.height > MAX_PIXELS or max(opened.size) > MAX_SIDE:
                _refuse(
                    f"the picture has {opened.width}x{opened.height} pixels; at most {MAX_PIXELS} are taken, "
                    f"{MAX_SIDE} a side",
                    "image_too_large",
                )
            side = 2 * max(width, height)
            opened.draft("RGB", (side, side))  # a large JPEG is decoded at a half, a quarter or an eighth of its size
            opened.load()
            return fit(opened, width, height)
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        _refuse(f"the picture has more than {MAX_PIXELS} pixels", "image_too_large")
    except Exception as error:  # Pillow has no class of its own for what is wrong with a file
        _refuse(f"this is no PNG, JPEG or WebP file that can be read ({error.__class__.__name__})", "invalid_image")


def fit(image: Image.Image, width: int, height: int) -> Pixels:
    """A picture of any mode and size as uint8 [height, width, 3], as `open_picture` does it. The picture stays as it is."""
    from PIL import ExifTags, ImageOps

    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be copied
        image = ImageOps.exif_transpose(image)
    return _as_rgb(_covering(_eight_bits(image), width, height))


def prepare_opening() -> None:
    """Have all that `open_picture` needs in memory: a process that forks does so once."""
    from PIL import Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401

    open_picture(encode(np.zeros((2, 2, 3), np.uint8)), 1, 1)


def _refuse(why: str, code: str) -> NoReturn:
    raise InvalidRequest(f"image: {why}", param="image", code=code)


def _eight_bits(image: Image.Image) -> Image.Image:
    """RGB or RGBA, whatever it was; sixteen bits a pixel lose the lower eight."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _covering(image: Image.Image, width: int, height: int) -> Image.Image:
    """Scaled to the least size that covers width x height, and the middle of that."""
    from PIL import Image

    scale = max(width / image.width, height / image.height)
    if image.size == (width, height):
        return image
    cut_x, cut_y = (image.width - width / scale) / 2, (image.height - height / scale) / 2
    box = (
        max(cut_x, 0.0),
        max(cut_y, 0.0),
        min(image.width - cut_x, image.width),
        min(image.height - cut_y, image.height),
    )
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=3.0)


def _as_rgb(image: Image.Image) -> Pixels:
    from PIL import Image

    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image).convert("RGB")
    return np.array(image, np.uint8)
