"""Every kernel compiles for Hopper, in a process without the interpreter (no GPU needed, none used)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    "attention_kernel",
    "merge_kernel",
    "_store_kernel",
    "_rotary_kernel",
    "_copy_kernel",
    "_rms_norm_kernel",
    "_gated_kernel",
    "_sample_kernel",
    "_choose_kernel",
    "quantized_matmul_kernel",
    "dequantize_kernel",
    "quantize_rows_kernel",
    "reduce_kernel",
    "quantize_kernel",
    "values_kernel",
    "sage_kernel",
}


def test_kernels_compile_for_hopper() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MOTET_KERNELS")}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    # Prefill's products run on Hopper's own matrix instructions, and all of SageAttention's.
    assert any(name == "attention_kernel" and not line[-1].endswith("=0") for name, *line in lines)
    assert not any(name == "sage_kernel" and line[-1].endswith("=0") for name, *line in lines)
