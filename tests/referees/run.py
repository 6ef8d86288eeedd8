"""Judges that are not ours: npm's `openai` client and `schemathesis`, against the real server on the packaged model, and
faster-whisper, which must hear the same text as we do in the same weights (same_text.py).

`make referees` runs this. Each referee lives in its own folder under $MOTET_VENVS (default ~/.cache/motet/venvs), made
from the pin file beside this script and reused while that is unchanged. Bounded: about five minutes when built.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from motet.deploy.demo import free_port, wait_ready
from motet.models.registry import installed

HERE = Path(__file__).resolve().parent
VENVS = Path(os.environ.get("MOTET_VENVS") or Path.home() / ".cache/motet/venvs")
MODEL = "smollm2-135m-instruct"
CONTEXT = 192  # tokens: a request without max_tokens ends within the fuzzer's patience
VOICE = "motet-voice"
SPEECH = "^/v1/audio/(speech|voices)$"  # what a server with a voice alone is asked for
PAINTER = "motet-emoji"
PICTURES = "^/v1/(images/generations|models)$"  # and one with a model of pictures alone
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,negative_data_rejection,unsupported_method"
)


def built(name: str, pins: Path, build: Callable[[Path], None]) -> Path:
    """The referee's folder, built anew when its pin file changed."""
    folder, want = VENVS / f"referee-{name}", hashlib.sha256(pins.read_bytes()).hexdigest()
    stamp = folder / ".motet-stamp"
    if stamp.is_file() and stamp.read_text() == want:
        return folder
    print(f"referee {name}: building {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder)
    stamp.write_text(want)
    return folder


def build_schemathesis(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--retries", "10", "install", "-q"]
    subprocess.run([*pip, "-r", str(HERE / "schemathesis.txt")], check=True)


def build_openai(folder: Path) -> None:
    shutil.copy(HERE / "package.json", folder)
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=peer", "--loglevel=error"]
    subprocess.run(["npm", "install", *flags], cwd=folder, check=True)


@contextlib.contextmanager
def running_server(model: str, *options: str) -> Iterator[str]:
    """`motet serve` on a packaged model, ready for requests; ended by SIGTERM. Gives its URL."""
    port = free_port()
    command = [sys.executable, "-m", "motet.deploy.cli", "serve", model, "--port", str(port), "--preload"]
    child = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL)
    try:
        wait_ready(child, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
        child.terminate()
        if child.wait(timeout=40) != 0:
            raise RuntimeError(f"the server ended with status {child.returncode}")
    finally:
        child.kill()
        child.wait()


def run_openai(folder: Path, url: str, **models: str) -> bool:
    """The script's checks of a model that writes (MODEL=...), speaks (VOICE=...) or makes pictures (IMAGE=...)."""
    shutil.copy(HERE / "openai_client.mjs", folder)
    environment = {**os.environ, "BASE_URL": f"{url}/v1", **models}
    return subprocess.run(["node", "openai_client.mjs"], cwd=folder, env=environment, timeout=300).returncode == 0


def run_schemathesis(folder: Path, url: str, *options: str) -> bool:
    """Requests from /openapi.json, valid and broken: no 5xx, no broken one accepted, answers as documented.

    One worker: two parse Python at once in the fuzzer, which CPython 3.11 answers with "recursion depth mismatch".
    """
    command = [str(folder / "bin/schemathesis"), "run", f"{url}/openapi.json", "--checks", CHECKS]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "1", "--workers", "1"]
    command += ["--request-timeout", "120", "--generation-database", "none", "--no-shrink", "--continue-on-failure"]
    return subprocess.run([*command, *options], cwd=folder, timeout=600).returncode == 0


def chosen(variable: str, packaged: str) -> str:
    """The model to be judged: the folder that the variable names, or the packaged one; "" when there is none."""
    return os.environ.get(variable) or (packaged if packaged in (spec.id for spec in installed()) else "")


def run_same_text() -> bool:
    return subprocess.run([sys.executable, str(HERE / "same_text.py")], timeout=600).returncode == 0


def main() -> int:
    verdicts: dict[str, bool] = {"faster-whisper's text": run_same_text()}
    with contextlib.ExitStack() as stack:
        fuzzer = built("schemathesis", HERE / "schemathesis.txt", build_schemathesis)
        client = built("openai-npm", HERE / "package.json", build_openai) if shutil.which("npm") else None
        url = stack.enter_context(running_server(MODEL, "--max-model-len", str(CONTEXT)))
        if client is None:
            print("referee openai-npm: npm is not installed here (Debian: apt-get install npm); not run", flush=True)
        else:
            verdicts["openai-npm"] = run_openai(client, url, MODEL=MODEL)
        verdicts["schemathesis"] = run_schemathesis(fuzzer, url)
        if client is not None:
            verdicts["openai-npm after the fuzzing"] = run_openai(client, url, MODEL=MODEL)
        stack.close()
        if voice := chosen("MOTET_VOICE", VOICE):
            url = stack.enter_context(running_server(voice))
            verdicts["schemathesis of speech"] = run_schemathesis(fuzzer, url, "--include-path-regex", SPEECH)
            if client is not None:
                verdicts["openai-npm on speech after the fuzzing"] = run_openai(client, url, VOICE="default")
            stack.close()
        if painter := chosen("MOTET_PICTURES", PAINTER):
            url = stack.enter_context(running_server(painter))
            verdicts["schemathesis of pictures"] = run_schemathesis(fuzzer, url, "--include-path-regex", PICTURES)
            if client is not None:
                verdicts["openai-npm on pictures after the fuzzing"] = run_openai(client, url, IMAGE="default")
    for name, held in verdicts.items():
        print(f"referee {name}: {'held' if held else 'FAILED'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
