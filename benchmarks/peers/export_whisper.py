"""Turn a CTranslate2 Whisper directory into a Hugging Face directory, for the peers that cannot read the former.

    python export_whisper.py --model whisper-tiny.en [--out DIR]

Run it with Motet's own python. Weights are float32 of the same values. The default place is `models/NAME-hf` beside
`$MOTET_VENVS`; the path is printed on the last line. A stamp of `model.bin`'s sha256 and this script's makes a second run a
matter of hashing two files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path

from motet.models.registry import resolve

STAMP = "motet-export.sha256"


def default_out(model: str) -> Path:
    """Where the directory goes unless told otherwise."""
    venvs = os.environ.get("MOTET_VENVS") or "~/.cache/motet/venvs"
    return Path(venvs).expanduser().parent / "models" / f"{model}-hf"


def digest(source: Path) -> str:
    """The sha256 of the weights and of this script."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    with (source / "model.bin").open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def export(model: str, out: Path) -> None:
    """Write the directory, by way of a temporary one that is renamed when complete."""
    import torch
    from run_transformers_whisper import Engine

    source = resolve(model).path
    engine = Engine(model, torch.float32)
    tokens, generation = engine.tokens, engine.generation
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        engine.model.save_pretrained(part)
        engine.features.save_pretrained(part)
        shutil.copy(source / "tokenizer.json", part)
        end = "<|endoftext|>"
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end, "unk_token": end}
        (part / "tokenizer_config.json").write_text(json.dumps({**about, "pad_token": end, "model_max_length": 1024}))
        rules = {
            "bos_token_id": tokens.eot,
            "eos_token_id": tokens.eot,
            "pad_token_id": tokens.eot,
            "decoder_start_token_id": tokens.sot,
            "suppress_tokens": generation.suppress_tokens,
            "begin_suppress_tokens": generation.begin_suppress_tokens,
            "no_timestamps_token_id": tokens.no_timestamps,
            "prev_sot_token_id": tokens.startofprev,
            "max_initial_timestamp_index": 50,
            "max_length": 448,
            "return_timestamps": False,
            "is_multilingual": tokens.multilingual,
        }
        if tokens.multilingual:
            rules["lang_to_id"] = {f"<|{code}|>": number for code, number in dict(tokens.languages).items()}
            rules["task_to_id"] = {"transcribe": tokens.transcribe, "translate": tokens.translate}
        (part / "generation_config.json").write_text(json.dumps(rules))
        (part / STAMP).write_text(digest(source) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main() -> None:
    """Export unless the directory already holds these weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name that Motet knows, with CTranslate2 weights")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or default_out(args.model)
    stamp = out / STAMP
    if not stamp.is_file() or stamp.read_text().strip() != digest(resolve(args.model).path):
        export(args.model, out)
    print(out)


if __name__ == "__main__":
    main()
