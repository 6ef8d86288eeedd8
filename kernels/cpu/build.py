"""Builds and loads the C++ kernels: `python -m motet.kernels.cpu.build`.

One library for all CPUs of an architecture: the kernels are compiled once per instruction set and chosen at run time.
The file is named after its sources, torch's version and the flags, so a stale one is never loaded. It lies in `_build/`
beside this file, or in $MOTET_CACHE/kernels (default ~/.cache/motet/kernels) where that is not writable. Needs a C++20
compiler ($CXX, else g++, c++ or clang++), no Python headers and no build tool.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
# Compiled once, with torch's headers.
OPERATORS = ("ops.cpp", "attention.cpp", "dense.cpp", "linear.cpp", "bf16.cpp", "layers.cpp", "snake_ops.cpp",
             "joint.cpp")  # fmt: skip
HEADERS = ("ops.h", "attend.h", "few.h", "pairs.h", "turn.h", "dense.h", "rows.h", "vector.h", "kernels.h", "gemm.h",
           "bytes.h", "tiles.h", "snake.h", "joint.h")  # fmt: skip
SOURCES = (*OPERATORS, "table.cpp", "snake.cpp", "int8.cpp", *HEADERS)
KERNEL_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
OPS_FLAGS = ("-O2", "-Wno-psabi", "-Wno-unknown-pragmas")
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-g0")
COMPILE_TIMEOUT_S = 300.0

_why_not = ""


def instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Compiler flags of each instruction set that is built for a machine type."""
    if machine in ("x86_64", "AMD64"):
        avx512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
        return {
            "plain": (),
            "avx2": ("-mavx2", "-mfma"),
            "avx512": avx512,
            "avx512bf16": (*avx512, "-mavx512bf16", "-mavx512vnni"),
        }
    return {"plain": ()}


def int8_instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """The same for int8.cpp, to which only the instructions that multiply bytes matter.

    Products and sums stay apart where they are written apart, so that every set rounds activations to the same steps.
    """
    apart = ("-ffp-contract=off",)
    if machine in ("x86_64", "AMD64"):
        avx2 = (*apart, "-mavx2", "-mfma", "-mf16c")
        avx512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
        return {"plain": apart, "avx2": avx2, "avxvnni": (*avx2, "-mavxvnni"), "avx512vnni": (*avx2, *avx512)}
    return {"plain": apart}


def library_name() -> str:
    """File name of the library for these sources, this torch and this machine type."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    sets = (instruction_sets(platform.machine()), int8_instruction_sets(platform.machine()))
    digest.update(repr((torch.__version__, platform.machine(), sets, KERNEL_FLAGS, OPS_FLAGS, COMMON_FLAGS)).encode())
    return f"motet_cpu-{digest.hexdigest()[:16]}.so"


def folders() -> list[Path]:
    """Where a library may lie, best first."""
    cache = os.environ.get("MOTET_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "motet")
    return [HERE / "_build", Path(cache) / "kernels"]


def compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def build(verbose: bool = False) -> Path:
    """Compiles the library unless it is there already, and returns its path. Raises RuntimeError saying what failed."""
    name = library_name()
    for folder in folders():
        if (folder / name).exists():
            return folder / name
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler (looked for $CXX, g++, c++, clang++)")
    folder = _writable(folders())
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together compile once
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(cxx, Path(work), Path(work) / name, verbose)
                os.replace(Path(work) / name, folder / name)
    return folder / name


def _writable(candidates: list[Path]) -> Path:
    """The first folder that can be made and written. Raises RuntimeError when there is none."""
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise RuntimeError(f"no writable folder among {', '.join(map(str, candidates))}")


def _compile(cxx: str, work: Path, target: Path, verbose: bool) -> None:
    """Compiles every object side by side and links them."""
    package = Path(torch.__file__).parent
    include = [f"-isystem{package / 'include'}", f"-isystem{package / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    commands = []
    for source in OPERATORS:
        optimize = KERNEL_FLAGS if source == "linear.cpp" else OPS_FLAGS  # linear.cpp holds its own kernels
        made = str(work / f"{source}.o")
        commands.append([cxx, *COMMON_FLAGS, *optimize, abi, *include, "-c", str(HERE / source), "-o", made])
    kinds = (
        ("table", "table.cpp", instruction_sets(platform.machine())),
        ("snake", "snake.cpp", instruction_sets(platform.machine())),
        ("int8", "int8.cpp", int8_instruction_sets(platform.machine())),
    )
    for kind, source, sets in kinds:
        for name, flags in sets.items():
            names = (f"-DMOTET_TABLE={kind}_{name}", f'-DMOTET_NAME="{name}"')
            made = str(work / f"{kind}_{name}.o")
            commands.append([cxx, *COMMON_FLAGS, *KERNEL_FLAGS, *flags, *names, "-c", str(HERE / source), "-o", made])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run(command, verbose), commands))
    objects = [command[-1] for command in commands]
    libraries = [f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([cxx, "-shared", "-fopenmp", *objects, *libraries, "-o", str(target)], verbose)


def _run(command: list[str], verbose: bool) -> None:
    if verbose:
        print(" ".join(command), file=sys.stderr)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()[-2000:]}")


@functools.cache
def load() -> bool:
    """Loads torch.ops.motet_cpu, building it if need be. False where that cannot be done; `why_not` says why."""
    global _why_not
    try:
        torch.ops.load_library(str(build()))
    except (RuntimeError, OSError) as error:
        _why_not = str(error)
        return False
    return True


def why_not() -> str:
    """Why `load` returned False; empty otherwise."""
    return _why_not


def main() -> int:
    """Command line: builds, loads, says where the library lies. Exit 0 also without a compiler: torch stands in."""
    try:
        path = build(verbose="-v" in sys.argv)
    except RuntimeError as error:
        print(f"C++ kernels not built, plain torch will be used: {error}")
        return 0
    if not load():
        print(f"C++ kernels built but not loadable, plain torch will be used: {why_not()}")
        return 0
    print(f"C++ kernels: {path} ({torch.ops.motet_cpu.instruction_set()})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
