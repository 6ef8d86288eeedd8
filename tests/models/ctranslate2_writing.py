"""Writes CTranslate2's binary format, from its description alone, for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import torch

TYPES = {
    torch.float32: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.float16: 4,
    torch.bfloat16: 5,
}


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def variable(name: str, value: torch.Tensor) -> bytes:
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    head = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
    return string(name) + head + struct.pack("<BI", TYPES[value.dtype], len(raw)) + raw


def model_bytes(
    variables: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str] | None = None,
    *,
    spec: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    parts = [struct.pack("<I", version), string(spec), struct.pack("<II", 3, len(variables))]
    parts += [variable(name, value) for name, value in variables.items()]
    parts += [struct.pack("<I", len(aliases or {}))]
    parts += [string(name) + string(target) for name, target in (aliases or {}).items()]
    return b"".join(parts)


def quantized(weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """A matrix as the format keeps it: q and a scale (int8: a row's, int16: one); value = q / scale."""
    if form == "int16":
        scale = 1023 / weight.abs().amax()
        return {"": (weight * scale).round().to(torch.int16), "_scale": scale}
    flat = weight.flatten(1)
    scale = 127 / flat.abs().amax(1)
    return {"": (flat * scale[:, None]).round().to(torch.int8).view(weight.shape), "_scale": scale}


def whisper_variables(
    state: Mapping[str, torch.Tensor], *, heads: tuple[int, int], form: str
) -> dict[str, torch.Tensor]:
    """transformers' Whisper parameters under CTranslate2's names; `form` is float32, float16, bfloat16, int16 or int8.

    `heads` are the encoder's and the decoder's.
    """
    out: dict[str, torch.Tensor] = {
        "encoder/num_heads": torch.tensor(heads[0], dtype=torch.int16),
        "decoder/num_heads": torch.tensor(heads[1], dtype=torch.int16),
        "decoder/pre_norm": torch.tensor(1, dtype=torch.int8),
    }

    def put(name: str, value: torch.Tensor) -> None:
        if form in ("int8", "int16"):
            if name.endswith("/weight"):
                out.update({name + end: part for end, part in quantized(value, form).items()})
            else:
                out[name] = value
        else:
            out[name] = value.to(getattr(torch, form))

    def fused(target: str, *sources: str) -> None:
        put(target + "/weight", torch.cat([state[name + ".weight"] for name in sources]))
        put(
            target + "/bias",
            torch.cat([state.get(name + ".bias", torch.zeros(state[name + ".weight"].shape[0])) for name in sources]),
        )

    def norm(target: str, source: str) -> None:
        put(target + "/gamma", state[source + ".weight"])
        put(target + "/beta", state[source + ".bias"])

    for number in (1, 2):
        fused(f"encoder/conv{number}", f"model.encoder.conv{number}")
    for side in ("encoder", "decoder"):
        put(f"{side}/position_encodings/encodings", state[f"model.{side}.embed_positions.weight"])
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        layer = 0
        while f"model.{side}.layers.{layer}.fc1.weight" in state:
            here, there = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            fused(f"{here}/self_attention/linear_0", *(f"{there}.self_attn.{p}_proj" for p in "qkv"))
            fused(f"{here}/self_attention/linear_1", f"{there}.self_attn.out_proj")
            norm(f"{here}/self_attention/layer_norm", f"{there}.self_attn_layer_norm")
            if side == "decoder":
                fused(f"{here}/attention/linear_0", f"{there}.encoder_attn.q_proj")
                fused(f"{here}/attention/linear_1", *(f"{there}.encoder_attn.{p}_proj" for p in "kv"))
                fused(f"{here}/attention/linear_2", f"{there}.encoder_attn.out_proj")
                norm(f"{here}/attention/layer_norm", f"{there}.encoder_attn_layer_norm")
            fused(f"{here}/ffn/linear_0", f"{there}.fc1")
            fused(f"{here}/ffn/linear_1", f"{there}.fc2")
            norm(f"{here}/ffn/layer_norm", f"{there}.final_layer_norm")
            layer += 1
    put("decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"])
    return out


def write_whisper(folder: Path, state: Mapping[str, torch.Tensor], *, heads: tuple[int, int], form: str) -> None:
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (folder / "model.bin").write_bytes(model_bytes(whisper_variables(state, heads=heads, form=form), aliases))
