#!/usr/bin/env bash
# Make the pinned virtual environment of one peer: build.sh NAME, with NAME.txt (exact pins) beside this script.
#
# The environment is $MOTET_VENVS/NAME (default ~/.cache/motet/venvs/NAME). A stamp inside holds the sha256 of the pin
# file and of this script (for llamacpp, which is compiled for this processor, also of the processor's features); while
# it matches, nothing is done. A path is printed on the last line of stdout, everything else goes to stderr.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:-}
pins=$here/$name.txt
if [[ ! $name =~ ^[a-z0-9-]+$ || ! -f $pins ]]; then
    echo "usage: build.sh NAME, NAME one of: $(cd "$here" && ls ./*.txt | sed 's|^\./||; s|\.txt$||' | tr '\n' ' ')" >&2
    exit 2
fi

venvs=${MOTET_VENVS:-$HOME/.cache/motet/venvs}
venv=$venvs/$name
stamp=$venv/.motet-stamp
mkdir -p "$venvs"
exec 9>"$venvs/.$name.lock"
flock 9

want=$(
    {
        cat "$pins" "$here/build.sh"
        if [[ $name == llamacpp ]]; then
            uname -m
            grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
        fi
    } | sha256sum | cut -d' ' -f1
)
if [[ -x $venv/bin/python && $(cat "$stamp" 2>/dev/null) == "$want" ]]; then
    echo "$venv"
    exit 0
fi

echo "peer $name: building $venv" >&2
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >&2; }

build_llamacpp() {
    local source pin
    work=$(mktemp -d "$venvs/.build-$name.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    grep -v '^llama-cpp-python==' "$pins" >"$work/tools.txt"
    pin=$(grep '^llama-cpp-python==' "$pins")
    pip install -q --no-deps -r "$work/tools.txt"
    PATH=$venv/bin:$PATH pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$work" "$pin"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    source=$(echo "$work"/llama_cpp_python-*/)

    # gcc 12 declares only the first 8 of the 64 bytes of the AMX tile configuration as read by _tile_loadconfig, and
    # then drops the stores to the rest: every quantised model dies with SIGILL. Make the whole object "used" before.
    sed -i 's|^\( *\)_tile_loadconfig(&tc);|\1asm volatile("" :: "m"(tc) : "memory");\n&|' \
        "$source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    grep -q 'asm volatile("" :: "m"(tc)' "$source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    # Only the libraries: no common code, tools, server or multimodal part.
    sed -i 's/set(LLAMA_BUILD_COMMON ON /set(LLAMA_BUILD_COMMON OFF /' "$source/CMakeLists.txt"

    export CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"
    export CMAKE_BUILD_PARALLEL_LEVEL=${MOTET_BUILD_JOBS:-2}
    PATH=$venv/bin:$PATH pip install --no-deps --no-build-isolation "$source"
    "$venv/bin/python" -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())' >&2
}

# vLLM preloads a tcmalloc that lies in its libs folder (about 6 % more tokens a second here). Its wheel brings none, so
# take Debian's, unpacked but not installed; without apt the peer is built all the same and its worker says so.
fetch_tcmalloc() {
    local package=libtcmalloc-minimal4 version=2.10-1 libs
    local sum=464aa2e804b0d48300ad71edfe525599deed8765db4af7a8d9de60326dc8e4c7
    work=$(mktemp -d "$venvs/.build-$name.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    libs=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/libs
    if (cd "$work" && apt-get download -q "$package=$version" && sha256sum -c <<<"$sum  ${package}_${version}_amd64.deb" &&
        dpkg -x "${package}_${version}_amd64.deb" .) >&2; then
        mkdir -p "$libs"
        cp -L "$work"/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 "$libs/"
    else
        echo "peer $name: no tcmalloc, vLLM will run without" >&2
    fi
}

build_vllm() {
    local index=()
    # The CPU build of torch lies on disk in some places; elsewhere PyTorch's own index has it.
    compgen -G '/opt/wheels/torch-*+cpu-*.whl' >/dev/null ||
        index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    pip install -q --no-deps "${index[@]}" -r "$pins"
    fetch_tcmalloc
    "$venv/bin/python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)' >&2
}

case $name in
llamacpp) build_llamacpp ;;
vllm) build_vllm ;;
*) pip install -q --no-deps -r "$pins" ;;
esac

echo "$want" >"$stamp"
echo "$venv"
