"""Put the trained parts of the demo voice into the folder that Motet loads.

    python demo/recipes/voice_pack.py FOLDER OUT [--checkpoint]

FOLDER holds what voice_lm.py and voice_codec.py wrote. OUT becomes a voice: `speech.json` (letters, phones, order of the
codes, how to sample), `config.json` and `model.gguf` (the language model, Q8_0: half the size of bfloat16, and the form in
which it runs fastest on a CPU), `codec/config.json` and `codec/model.safetensors` (bfloat16; the codebooks float32).
With `--checkpoint` the language model is taken from its last checkpoint: to hear how far it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import voice_tokens as ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from voice_text import LETTERS

NAME = "motet-voice"
VOICE = "rms"
MAX_CHARS = 90
SAMPLING = {"temperature": 0.2, "top_k": 50}


def speech_config(strides: list[int], size: int) -> dict[str, Any]:
    """What Motet's models/speech_format.py reads."""
    return {
        "family": "motet-voice",
        "name": NAME,
        "voices": [VOICE],
        "default_voice": VOICE,
        "language": "en",
        "text": {"letters": LETTERS, "first": ids.FIRST_LETTER, "start": ids.SOT, "end": ids.EOT},
        "phones": {"names": list(ids.PHONES), "first": ids.FIRST_PHONE, "start": ids.SOP},
        "audio": {
            "start": ids.SOA,
            "end": ids.EOA,
            "first": ids.AUDIO,
            "size": size,
            "strides": strides,
            "order": "depth_first",
        },
        "sampling": SAMPLING,
        "phone_sampling": {"temperature": 0.0},
        "max_chars": MAX_CHARS,
        "codec": "codec",
    }


def write_gguf(tensors: dict[str, Tensor], config: dict[str, Any], path: Path) -> None:
    """A Llama as GGUF: matrices Q8_0, vectors float32. Query and key rows in GGUF's order for rotary pairs."""
    writer = gguf.GGUFWriter(path, "llama")
    heads = config["num_attention_heads"]
    writer.add_name(NAME)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        to = names.get_name(name, try_suffixes=(".weight",))
        assert to is not None, name
        if array.ndim == 1:
            writer.add_tensor(to, array.astype(np.float32))
        else:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(to, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(folder: Path, out: Path) -> None:
    """Write the voice. Overwrites what is there."""
    (out / "codec").mkdir(parents=True, exist_ok=True)
    layout = json.loads((folder / "tokens.json").read_text())
    config = json.loads((folder / "lm.json").read_text())
    (out / "speech.json").write_text(json.dumps(speech_config(layout["strides"], layout["size"]), indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_gguf(load_file(folder / "lm.safetensors"), config, out / "model.gguf")
    codec = {
        name: value.contiguous() if "codebook" in name else value.bfloat16().contiguous()
        for name, value in load_file(folder / "codec.safetensors").items()
    }
    save_file(codec, out / "codec" / "model.safetensors")
    (out / "codec" / "config.json").write_text((folder / "codec.json").read_text() + "\n")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {total / 1e6:.1f} MB", flush=True)


def export_checkpoint(folder: Path) -> None:
    """`lm.safetensors` and `lm.json` of a training that still runs."""
    from voice_lm import Shape, SpeechLM, export

    layout = json.loads((folder / "tokens.json").read_text())
    model = SpeechLM(Shape(), ids.vocabulary_size(layout["strides"], layout["size"]))
    model.load_state_dict(torch.load(folder / "lm.ckpt", map_location="cpu", weights_only=True)["model"])
    export(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Assemble the demo voice.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    if options.checkpoint:
        export_checkpoint(options.folder)
    pack(options.folder, options.out)


if __name__ == "__main__":
    main()
