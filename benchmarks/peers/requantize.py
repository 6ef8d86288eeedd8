"""Turn a GGUF into one of another type with llama.cpp's own quantizer.

    python requantize.py --gguf model.gguf --type q4_0|q8_0 [--out FILE]

Run it with the python of the `llamacpp` peer environment. A file that is quantized already is dequantized first (so a
Q8_0 file made of a Q4_1 one holds its values almost exactly, a Q4_0 file loses a little); where llama.cpp's rules
keep a tensor at more bits (tied embeddings), so does this. The default place is `models/` beside `$MOTET_VENVS`; the
path is printed. A stamp beside the file, with the sha256 of the source and of this script and the quantizer's version,
makes a second run a matter of hashing one file.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path


def default_out(gguf: Path, kind: str) -> Path:
    """Where the file goes unless told otherwise: its name up to the type, then the new one."""
    venvs = os.environ.get("MOTET_VENVS") or "~/.cache/motet/venvs"
    return Path(venvs).expanduser().parent / "models" / f"{gguf.stem.partition('.')[0]}.{kind.upper()}.gguf"


def wanted_stamp(gguf: Path, kind: str) -> str:
    """What the file depends on, as one line."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return f"{total.hexdigest()} {kind} llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"


def requantize(gguf: Path, kind: str, out: Path) -> None:
    """Write the file, by way of a temporary one that is renamed when complete."""
    import llama_cpp

    ftypes = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = len(os.sched_getaffinity(0))
    params.ftype = ftypes[kind]
    params.allow_requantize = True
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        status = llama_cpp.llama_model_quantize(str(gguf).encode(), str(part).encode(), ctypes.byref(params))
        if status != 0:
            raise SystemExit(f"llama.cpp cannot quantize {gguf} to {kind}: status {status}")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    """Requantize unless the file is there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--type", choices=("q4_0", "q8_0"), required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or default_out(args.gguf, args.type)
    # llama.cpp prints what it does with every tensor: to stderr with it, stdout is for the path.
    answers = os.dup(1)
    os.dup2(2, 1)
    stamp = out.with_name(out.name + ".stamp")
    wanted = wanted_stamp(args.gguf, args.type)
    if not out.is_file() or not stamp.is_file() or stamp.read_text().strip() != wanted:
        stamp.unlink(missing_ok=True)
        requantize(args.gguf, args.type, out)
        stamp.write_text(wanted + "\n")
    sys.stdout.flush()
    os.write(answers, f"{out}\n".encode())


if __name__ == "__main__":
    main()
