"""The peers of the language engine: who there is, how each is started, and files that llama.cpp's quantizer makes for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from motet.benchmarks import peer_worker
from motet.benchmarks.peer_worker import PEERS, PeerError, PeerWorker

from .setting import Setting

# Contestant -> the environment it lives in. OpenVINO computes in f32 or bf16: which is faster depends on the job.
ENVIRONMENTS = {
    "vllm": "vllm",
    "llamacpp": "llamacpp",
    "openvino-f32": "openvino-genai",
    "openvino-bf16": "openvino-genai",
}
NAMES = tuple(dict.fromkeys(ENVIRONMENTS.values()))


def start(key: str, setting: Setting, *, gguf: Path | None = None, streams: int, context: int) -> PeerWorker:
    """A contestant's worker, loaded and warm; `gguf` other than the setting's for those that read one. Raises PeerError."""
    environment = ENVIRONMENTS[key]
    if environment not in setting.peers:
        raise PeerError(f"{environment} was left out (--peers)")
    python = peer_worker.build(environment) / "bin" / "python"
    common = ["--streams", str(streams), "--threads", str(setting.threads), "--context", str(context)]
    file = gguf or setting.path
    if environment == "llamacpp":
        return PeerWorker([python, PEERS / "run_llamacpp.py", "--gguf", file, *common])
    if environment == "openvino-genai":
        hint = key.removeprefix("openvino-")
        return PeerWorker([python, PEERS / "run_openvino.py", "--gguf", file, "--hint", hint, *common])
    # vLLM reads the same weights as bf16 safetensors; the exporter runs with our own Python.
    folder = made_by([sys.executable, PEERS / "export_hf.py", "--gguf", file], what=f"the weights for {key}")
    return PeerWorker([python, PEERS / "run_vllm.py", "--model-dir", folder, *common])


def requantized(gguf: Path, kind: str) -> Path:
    """The file in another type ("q4_0", "q8_0"), made by llama.cpp's quantizer unless it is there. Raises PeerError."""
    python = peer_worker.build("llamacpp") / "bin" / "python"
    return made_by([python, PEERS / "requantize.py", "--gguf", gguf, "--type", kind], what=f"a {kind} file")


def made_by(command: list[str | Path], *, what: str) -> Path:
    """The path that a program prints last. Raises PeerError with its last word."""
    done = subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode or not done.stdout.split():
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"{what} cannot be made: {said[-1][:200]}")
    return Path(done.stdout.strip().splitlines()[-1])
