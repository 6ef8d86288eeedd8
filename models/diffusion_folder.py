"""A picture model's folder -> its three stages and its card.

Two layouts: ours (`motet_image.json`) and that of diffusers (`model_index.json`); both have a folder for each part. Read are
JSON and safetensors: no pickles, no code, no class that is not in the tables below. Weights in float8_e4m3 without scales are
widened; a transformer that motet wrote in FP8 (kernels/fp8.py) stays so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Here, not in a function: both put another module in their place at the end of their import, so that a thread which waited for
# another one's import would go on with half of it.
import diffusers
import torch
import transformers  # noqa: F401
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine.errors import ModelLoadError
from ..kernels.fp8 import METADATA, Fp8Linear, Steps, load_fp8, quantize_linears, rules_of
from ..kernels.sage_attention import Backend
from .diffusion import Captions, Denoiser, LoadedPicture, Stages

OURS, THEIRS = "motet_image.json", "model_index.json"
_MAX_JSON = 1 << 20
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_MAX_SIDE = 4096
_BASE = re.compile(r"\.\./[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SIZES_OF_A_MEGAPIXEL = (
    (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """What diffusers' layout does not say of a family, as its pipeline defaults to it."""

    pipeline: str
    transformer: str
    autoencoders: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...] = _SIZES_OF_A_MEGAPIXEL
    steps: int
    guidance: str
    guidance_scale: float


FAMILIES = {
    "flux": Family(
        pipeline="FluxPipeline",
        transformer="FluxTransformer2DModel",
        autoencoders=("AutoencoderKL", "AutoencoderTiny"),
        steps=28,
        guidance="embedded",
        guidance_scale=3.5,
    ),
    "qwen-image": Family(
        pipeline="QwenImagePipeline",
        transformer="QwenImageTransformer2DModel",
        autoencoders=("AutoencoderKLQwenImage",),
        sizes=((1328, 1328), (1664, 928), (928, 1664), (1472, 1104), (1104, 1472), (1584, 1056), (1056, 1584)),
        steps=50,
        guidance="cfg",
        guidance_scale=4.0,
    ),
    "sd3": Family(
        pipeline="StableDiffusion3Pipeline",
        transformer="SD3Transformer2DModel",
        autoencoders=("AutoencoderKL", "AutoencoderTiny"),
        steps=28,
        guidance="cfg",
        guidance_scale=7.0,
    ),
}


def load_picture(
    path: Path,
    *,
    dtype: torch.dtype,
    devices: tuple[torch.device, torch.device, torch.device],
    attention: Backend = "auto",
    weights: Literal["auto", "fp8"] = "auto",
) -> LoadedPicture:
    """Reads a folder. `devices` of text encoders, denoiser, autoencoder; weights "fp8" quantizes the denoiser's linear layers.

    Raises ModelLoadError, which names the file or the field, for whatever cannot be read or is of a family not known here.
    """
    family, card, base = read_card(path)
    encode, denoise, decode = devices
    known = FAMILIES[family]
    model = load_part(path / "transformer", (known.transformer,), dtype, denoise)
    vae = load_part(base / "vae", known.autoencoders, dtype, decode)
    if weights == "fp8" and _fp8_steps(model) is None:
        if denoise.type == "cuda" and torch.cuda.get_device_capability(denoise) < (8, 9):
            raise ModelLoadError(f"weights=fp8: needs a device of compute capability 8.9 or above, not {denoise}")
        quantize_linears(model, rules_of(family))
    from .diffusion_vae import Autoencoder

    autoencoder = Autoencoder(vae, device=decode, dtype=dtype)
    if "latent_scale" in card and card["latent_scale"] != autoencoder.scale:
        raise ModelLoadError(f"{OURS}: latent_scale is {card['latent_scale']}, that of vae {autoencoder.scale}")
    captions = _captions(family, base, ours=(path / OURS).is_file(), device=encode, dtype=dtype)
    denoiser = _denoiser(family, model, autoencoder.scale, attention)
    for width, height in card["sizes"]:
        if (autoencoder.channels, height // autoencoder.scale, width // autoencoder.scale) != denoiser.latent_shape(
            width, height
        ):
            raise ModelLoadError(f"{path.name}: vae and transformer do not fit together at {width}x{height}")
    if family == "flux" and (path / THEIRS).is_file() and not model.config.guidance_embeds:
        # As FLUX.1-schnell: distilled to few steps, without guidance.
        card = {**card, "steps": 4, "guidance": "none", "guidance_scale": 1.0}
    return LoadedPicture(
        family=family,
        painter=Stages(captions, denoiser, autoencoder, devices=devices, steps=_fp8_steps(model)),
        card=card,
        dtype=dtype,
        weight_bytes=sum(_num_bytes(part) for part in (model, vae, *_modules_in(captions))),
    )


# ------------------------------------------------------------------------------------------------------------- the card


def read_card(path: Path) -> tuple[str, dict[str, Any], Path]:
    """The family, the card (models/diffusion.py LoadedPicture) and the folder of the parts that this one does not have."""
    if (path / OURS).is_file():
        return _our_card(path)
    if (path / THEIRS).is_file():
        return _their_card(path)
    raise ModelLoadError(f"{path.name}: neither {OURS} nor {THEIRS} is here")


def _our_card(path: Path) -> tuple[str, dict[str, Any], Path]:
    raw = _read_object(path / OURS)

    def field(name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        value = raw.get(name, default)
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds is bool):
            raise ModelLoadError(f"{OURS}: {name}: not a value that can be: {str(value)[:80]!r}")
        return value

    family = field("family", str)
    if family not in FAMILIES:
        raise ModelLoadError(f"{OURS}: family: expected one of {', '.join(FAMILIES)}, got {family[:40]!r}")
    sigmas = _numbers(field("sigmas", list, []), f"{OURS}: sigmas", most=1000)
    if any(not 0 < sigma <= 1 for sigma in sigmas) or any(a <= b for a, b in zip(sigmas, sigmas[1:])):
        raise ModelLoadError(f"{OURS}: sigmas: expected falling numbers above 0 and up to 1")
    scale = float(field("guidance_scale", (int, float), 1.0))
    steps = len(sigmas) or field("steps", int)
    if not 1 <= steps <= 1000 or not 0 <= scale <= 100:
        raise ModelLoadError(f"{OURS}: steps or guidance_scale out of range: {steps}, {scale}")
    few_step = field("few_step", bool, bool(sigmas))
    if few_step != bool(sigmas):
        raise ModelLoadError(f"{OURS}: few_step: a few-step model has sigmas, others have none")
    solver = field("solver", str, "euler")
    card = {
        "sizes": _sizes(field("sizes", list)),
        "latent_scale": field("latent_scale", int),
        "steps": steps,
        "guidance": raw.get("guidance", "none" if few_step else "cfg"),
        "guidance_scale": scale,
        "solver": {"flow_match_euler": "euler"}.get(solver, solver),
        "sigmas": sigmas,
        "few_step": few_step,
        "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": field("shift", (int, float), 1.0)},
    }
    if card["guidance"] not in ("cfg", "embedded", "none"):
        raise ModelLoadError(f"{OURS}: guidance: expected cfg, embedded or none, got {str(card['guidance'])[:40]!r}")
    return family, card, _base(path, raw.get("base"))


def _base(path: Path, told: Any) -> Path:
    """The folder beside this one that has the other parts. A model's folder names nothing further away."""
    if told is None:
        return path
    if not isinstance(told, str) or not _BASE.fullmatch(told) or ".." in told[3:]:
        raise ModelLoadError(f"{OURS}: base: expected a folder beside this one, '../name', got {str(told)[:80]!r}")
    base = path.parent / told.removeprefix("../")
    if base.resolve().parent != path.resolve().parent or not (base / OURS).is_file():
        raise ModelLoadError(f"{path.name}: its base {told!r} is not there: no {OURS} in it")
    return base


def _their_card(path: Path) -> tuple[str, dict[str, Any], Path]:
    index = _read_object(path / THEIRS)
    pipeline = index.get("_class_name")
    family = next((name for name, known in FAMILIES.items() if known.pipeline == pipeline), None)
    if family is None:
        served = ", ".join(known.pipeline for known in FAMILIES.values())
        raise ModelLoadError(f"{THEIRS}: {str(pipeline)[:60]!r} is not served; these are: {served}")
    known = FAMILIES[family]
    scheduler = _read_object(path / "scheduler" / "scheduler_config.json")
    return (
        family,
        {
            "sizes": [list(size) for size in known.sizes],
            "steps": known.steps,
            "guidance": known.guidance,
            "guidance_scale": known.guidance_scale,
            "solver": "euler",
            "sigmas": [],
            "few_step": False,
            "scheduler": scheduler,
        },
        path,
    )


def _sizes(told: Sequence[Any]) -> list[list[int]]:
    def fits(size: Any) -> bool:
        return (
            isinstance(size, list)
            and len(size) == 2
            and all(type(side) is int and 8 <= side <= _MAX_SIDE for side in size)
        )

    if not told or len(told) > 100 or not all(fits(size) for size in told):
        raise ModelLoadError(f"{OURS}: sizes: expected [[width, height], ...] of 8 to {_MAX_SIDE} pixels")
    return [list(size) for size in told]


def _numbers(told: Sequence[Any], what: str, *, most: int) -> list[float]:
    if len(told) > most or not all(type(one) in (int, float) for one in told):
        raise ModelLoadError(f"{what}: expected at most {most} numbers")
    return [float(one) for one in told]


def _read_object(path: Path) -> dict[str, Any]:
    where = f"{path.parent.name}/{path.name}"
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelLoadError(f"{where}: larger than {_MAX_JSON} bytes")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{where}: cannot be read ({error.__class__.__name__})") from None
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{where}: not JSON") from None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{where}: expected a JSON object")
    return found


# ------------------------------------------------------------------------------------------------------------ the parts


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters begin without memory, which their weights bring; what a module computes for itself is computed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def load_part(folder: Path, classes: Sequence[str], dtype: torch.dtype, device: torch.device) -> Any:
    """A module of diffusers with its weights, to be run only. `classes` it may be of. Raises ModelLoadError."""
    config = _read_object(folder / "config.json")
    name = str(config.get("_class_name"))
    if name not in classes:
        raise ModelLoadError(f"{folder.name}/config.json: expected {' or '.join(classes)}, got {name[:60]!r}")
    if config.get("quantization_config"):
        raise ModelLoadError(f"{folder.name}/config.json: weights quantized by other programs are not read")
    files = _weight_files(folder)
    with _quiet():
        try:
            with _EmptyOnMeta():
                module: nn.Module = getattr(diffusers, name).from_config(config)
        except Exception as error:  # whatever a class says to values that do not fit it
            raise ModelLoadError(
                f"{folder.name}/config.json: not a {name} ({error.__class__.__name__}: {str(error)[:120]})"
            ) from None
    if _header(files[0]).get(METADATA):
        if len(files) > 1:
            raise ModelLoadError(f"{folder.name}: FP8 weights of motet are one file")
        load_fp8(module, files[0])
    else:
        _fill(module, files, dtype, folder.name)
    return module.to(device).eval().requires_grad_(False)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / f"{_WEIGHTS}.index.json"
    if index.is_file():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelLoadError(f"{folder.name}/{index.name}: expected a weight_map")
        files = sorted({str(file) for file in names.values()})
        for file in files:
            if not file.endswith(".safetensors") or file != Path(file).name:
                raise ModelLoadError(f"{folder.name}/{index.name}: {file[:80]!r} is no plain *.safetensors name")
    else:
        files = [_WEIGHTS]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder.name}: {len(missing)} of {len(files)} weight files are missing, first {missing[0][:120]} "
            "(pickled weights, .bin and .pt, are not read)"
        )
    return [folder / file for file in files]


def _header(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path.parent.name}/{path.name}: not a usable safetensors file: {str(error)[:160]}"
        ) from None


def _fill(module: nn.Module, files: Sequence[Path], dtype: torch.dtype, part: str) -> None:
    """Gives a module its weights as `dtype`. Raises ModelLoadError, before anything is read, where names or shapes differ."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():
                if name in found:
                    raise ModelLoadError(f"{part}: the tensor {name[:80]!r} is in two files")
                found[name] = tuple(file.get_slice(name).get_shape())
    missing, more = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or more:
        raise ModelLoadError(
            f"{part}: {len(missing)} weights are missing, first {str(missing[:1])[:100]}, "
            f"{len(more)} are unknown, first {str(more[:1])[:100]}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(f"{part}: {name}: expected the shape {list(shape)}, got {list(found[name])}")
    tensors: dict[str, Tensor] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    module.load_state_dict(tensors, strict=True, assign=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """diffusers logs what its class does not know of a config; a model of a later version has such."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _captions(family: str, base: Path, *, ours: bool, device: torch.device, dtype: torch.dtype) -> Captions:
    from .diffusion_text import ClipCaptions, FluxCaptions, QwenCaptions, Sd3Captions

    if ours and family == "flux":
        return ClipCaptions(base, device, dtype)
    kinds: dict[str, Callable[[Path, torch.device, torch.dtype], Captions]] = {
        "flux": FluxCaptions,
        "qwen-image": QwenCaptions,
        "sd3": Sd3Captions,
    }
    return kinds[family](base, device, dtype)


def _denoiser(family: str, model: Any, scale: int, attention: Backend) -> Denoiser:
    if family == "flux":
        from .diffusion_flux import FluxDenoiser

        return FluxDenoiser(model, scale=scale, attention=attention)
    if family == "qwen-image":
        from .diffusion_qwen import QwenDenoiser

        return QwenDenoiser(model, scale=scale, attention=attention)
    from .diffusion_sd3 import Sd3Denoiser

    return Sd3Denoiser(model, scale=scale, attention=attention)


def _fp8_steps(model: nn.Module) -> Steps | None:
    """What the FP8 layers of a model share; None where it has none."""
    return next((layer.steps for layer in model.modules() if isinstance(layer, Fp8Linear)), None)


def _modules_in(holder: object) -> list[nn.Module]:
    return [value for value in vars(holder).values() if isinstance(value, nn.Module)]


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
