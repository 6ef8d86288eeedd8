"""Turn a GGUF into a Hugging Face directory with bf16 safetensors, for the peers that cannot read GGUF well.

    python export_hf.py --gguf model.gguf [--out DIR]

needs torch, transformers and gguf. The values are the GGUF's own, dequantised and rounded to bf16, so all
engines compute with the same weights. The default place is `models/smollm2-135m-instruct-bf16` beside
`$MOTET_VENVS`; the path is printed. A stamp with the sha256 of the GGUF and of this script makes a second run a
matter of hashing two files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from pathlib import Path

STAMP = "motet-export.sha256"


def default_out() -> Path:
    """Where the directory goes unless told otherwise."""
    venvs = os.environ.get("MOTET_VENVS") or "~/.cache/motet/venvs"
    return Path(venvs).expanduser().parent / "models" / "smollm2-135m-instruct-bf16"


def digest(gguf: Path) -> str:
    """The sha256 of the GGUF and of this script."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def export(gguf: Path, out: Path) -> None:
    """Write the directory, by way of a temporary one that is renamed when complete."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        # By hand, since from_pretrained(gguf_file=...) wants accelerate.
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        gguf_state = load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )
        missing, unexpected = model.load_state_dict(gguf_state["tensors"], strict=False)
        if unexpected or not set(missing) <= {"lm_head.weight"}:
            raise SystemExit(f"missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        model.save_pretrained(part, safe_serialization=True)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(part)
        (part / STAMP).write_text(digest(gguf) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main() -> None:
    """Export unless the directory already holds this GGUF."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=default_out())
    args = parser.parse_args()
    stamp = args.out / STAMP
    if not stamp.is_file() or stamp.read_text().strip() != digest(args.gguf):
        export(args.gguf, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
