"""One long file: ours and each peer in its fastest mode, a turn each per round."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from motet.benchmarks import claims, peer_worker
from motet.benchmarks.asr_claims.setting import OPTIONS, WITHOUT_TIMES, Setting
from motet.benchmarks.claims import Claim, Row
from motet.benchmarks.llm_claims.setting import SETTLE_S, say
from motet.benchmarks.motet_recogniser import MotetRecogniser
from motet.benchmarks.peer_worker import PEERS, PeerError, PeerWorker
from motet.deploy.speech_demo import error_rate
from motet.models.registry import resolve
from motet.pipelines.media import SAMPLE_RATE

PEER = "faster-whisper"
OTHER_BATCH = 8  # of the other peers
OTHER_ROUNDS = 2  # turns that they get
MIN_OVER_OTHERS = 1.3
MAX_WER_LOSS = 0.003  # of ours over a peer's


@dataclass(kw_only=True)
class Rival:
    """A peer on the long file: how it is asked, and what it gave."""

    worker: PeerWorker
    command: dict[str, Any]
    remark: str = ""
    speeds: list[float] = field(default_factory=list)  # times real time
    text: str = ""

    def take_turn(self) -> None:
        told = self.worker.ask(self.command, timeout_s=600)
        self.speeds.append(told["audio_seconds"] / told["seconds"])
        self.text = told["text"]


def long_file(setting: Setting, engine: MotetRecogniser, *, claim: Claim) -> Row:
    """One long file: ours and each peer in its fastest mode, a turn each per round."""
    samples, text = setting.long_audio(setting.sizes.long_s)
    seconds = len(samples) / SAMPLE_RATE
    missing: dict[str, str] = {}
    rivals: dict[str, Rival] = {}
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-asr-"))) / "long.f32"
        samples.tofile(file)
        for name in (PEER, *setting.sizes.others):
            try:
                say(f"  {name}: building if absent, loading")
                worker = stack.enter_context(start_peer(name, engine.model, setting.threads))
                if name == PEER:
                    rivals[name] = calibrate(worker, file, setting.sizes.batch_sizes, text)
                else:
                    rivals[name] = calibrate(worker, file, (OTHER_BATCH,), None)
            except PeerError as error:
                missing[name] = str(error)
                say(f"  {name}: {error}")
        engine.transcribe(samples[: 60 * SAMPLE_RATE], OPTIONS)  # warm
        ours: list[float] = []
        our_text = ""
        for turn in range(setting.sizes.rounds):
            order = ["ours", *rivals]
            for name in order if turn % 2 == 0 else reversed(order):
                if name != "ours" and (name not in rivals or (name != PEER and turn >= OTHER_ROUNDS)):
                    continue
                time.sleep(SETTLE_S)
                if name == "ours":
                    answer = engine.transcribe(samples, WITHOUT_TIMES)
                    our_text = answer.text
                    ours.append(seconds / answer.seconds)
                    say(f"  round {turn + 1}: ours {ours[-1]:.1f} x real time")
                    continue
                try:
                    rivals[name].take_turn()
                    say(f"  round {turn + 1}: {name} {rivals[name].speeds[-1]:.1f} x real time")
                except PeerError as error:
                    missing[name] = str(error)
                    rivals.pop(name).worker.close()
    our_rate = error_rate([(text, our_text)])
    rates = {name: error_rate([(text, rival.text)]) for name, rival in rivals.items()}
    others = [
        f"{rival.worker.name}: {median(rival.speeds):.1f} x real time, {100 * rates[name]:.2f} %"
        for name, rival in rivals.items()
        if name != PEER
    ] + [f"{name}: {why}" for name, why in missing.items() if name != PEER]
    if PEER not in rivals:
        return claims.failed(
            claim, "; ".join([missing[PEER], f"our word error rate {100 * our_rate:.2f} %", *others]), ours=median(ours),
            peer_name=PEER, ours_name=engine.name, runs=len(ours),
        )  # fmt: skip
    peer = rivals[PEER]
    told = [
        f"{seconds:.0f} s, {setting.threads} threads",
        f"word error rate {100 * our_rate:.2f} % beside {100 * rates[PEER]:.2f} %",
        peer.remark,
        *others,
    ]
    row = claims.measured(
        claim, median(ours), median(peer.speeds), runs=len(ours), ours_name=engine.name, why="; ".join(told),
        peer_name=f"{peer.worker.name}, batches of {peer.command['batch_size']}",
    )  # fmt: skip
    slow = [
        name for name, rival in rivals.items() if name != PEER and median(ours) < MIN_OVER_OTHERS * median(rival.speeds)
    ]
    if our_rate > min(rates.values()) + MAX_WER_LOSS:
        row = dataclasses.replace(row, holds=False, why=f"our word error rate is too high; {row.why}")
    if slow:
        row = dataclasses.replace(row, holds=False, why=f"not {MIN_OVER_OTHERS} times {slow[0]}; {row.why}")
    return row


def start_peer(name: str, model: str, threads: int) -> PeerWorker:
    """A peer's worker on the same weights, loaded and warm. Raises PeerError."""
    path = resolve(model).path
    if not (path / "model.bin").is_file():
        raise PeerError(f"peers get CTranslate2 directories only, and {path.name} is none")
    if name == PEER:
        python = peer_worker.build(PEER) / "bin" / "python"
        return PeerWorker([python, PEERS / "run_faster_whisper.py", "--model-dir", path, "--threads", str(threads)])
    if name == "openvino-whisper":
        python = peer_worker.build(name) / "bin" / "python"
        folder = exported(model)
        return PeerWorker([python, PEERS / "run_openvino_whisper.py", "--hf-dir", folder, "--threads", str(threads)])
    return PeerWorker(
        [sys.executable, PEERS / "run_transformers_whisper.py", "--model", model, "--threads", str(threads)]
    )


def exported(model: str) -> Path:
    """The model as a Hugging Face directory. Raises PeerError."""
    command = [sys.executable, PEERS / "export_whisper.py", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise PeerError(f"the model cannot be exported: {done.stderr.strip().rpartition(chr(10))[2][:200]}")
    return Path(done.stdout.splitlines()[-1])


def calibrate(worker: PeerWorker, file: Path, batch_sizes: Sequence[int], text: str | None) -> Rival:
    """A rival that will run its fastest batched command; with `text`, its sequential mode is told of. Raises PeerError."""
    found: list[tuple[float, dict[str, Any]]] = []
    for batch_size in batch_sizes:
        # Without timestamps within a chunk, which is faster-whisper's default and faster.
        command = {
            "cmd": "transcribe", "mode": "batched", "batch_size": batch_size, "timestamps": False, "file": str(file),
        }  # fmt: skip
        told = worker.ask(command, timeout_s=600)
        found.append((told["seconds"], command))
        say(f"    batches of {batch_size}: {told['audio_seconds'] / told['seconds']:.1f} x real time")
    rival = Rival(worker=worker, command=min(found, key=lambda one: one[0])[1])
    if text is not None:
        told = worker.ask({"cmd": "transcribe", "mode": "sequential", "file": str(file)}, timeout_s=600)
        speed, rate = told["audio_seconds"] / told["seconds"], error_rate([(text, told["text"])])
        rival.remark = f"sequentially it has {speed:.1f} x real time, {100 * rate:.2f} %"
    return rival
