"""Against diffusers' own loop: one picture, and eight at once; and a late one against the same engine with fixed batches."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.diffusion_claims.setting import CLAIMS, Setting
from motet.benchmarks.llm_claims.setting import SETTLE_S, say
from motet.benchmarks.motet_painter import MotetPainter
from motet.benchmarks.peer_worker import PEERS, PeerError, PeerWorker
from motet.models.registry import resolve


class Diffusers:
    """The peer: a process with diffusers' own loop over the same weights."""

    def __init__(self, setting: Setting, ours: MotetPainter) -> None:
        """Raises PeerError."""
        path = resolve(setting.model).path
        if not (path / "motet_image.json").is_file():
            raise PeerError(
                f"diffusers' loop is written out for motet-emoji's layout only, and {path.name} has another"
            )
        command: list[str | Path] = [
            sys.executable, PEERS / "run_diffusers.py", "--model", path, "--dtype", ours.info.dtype, "--threads",
            str(setting.threads), *(["--compile"] if setting.pictures.image_compile else []),
        ]  # fmt: skip
        extra = ours.info.extra
        self._how = {
            "cmd": "pictures", "steps": setting.sizes.steps, "guidance": extra["guidance_scale"],
            "width": extra["sizes"][0][0], "height": extra["sizes"][0][1],
        }  # fmt: skip
        self._worker = PeerWorker(command)

    def __enter__(self) -> Diffusers:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()

    @property
    def name(self) -> str:
        return self._worker.name

    def seconds(self, prompts: Sequence[str], *, batch: int = 1, file: Path | None = None) -> float:
        """Of all pictures, `batch` at once, seeds 0, 1..., as diffusers' process counts them."""
        command = self._how | {"prompts": list(prompts), "seeds": list(range(len(prompts))), "batch": batch}
        told = self._worker.ask(command | ({"file": str(file)} if file else {}), timeout_s=600)
        return float(told["seconds"])


def how(setting: Setting, ours: MotetPainter) -> str:
    """What both sides have in common."""
    width, height = ours.info.extra["sizes"][0]
    made = "blocks compiled" if setting.pictures.image_compile else "eager"
    guidance = ours.info.extra["guidance_scale"]
    return f"{width} x {height}, {setting.sizes.steps} steps, guidance {guidance:g}, {made}, {setting.threads} threads"


def one_image(setting: Setting, ours: MotetPainter, peer: Diffusers) -> Row:
    """From the request to the pixels."""
    apart = difference(setting, ours, peer)
    our_s: list[float] = []
    peer_s: list[float] = []
    for turn in range(setting.sizes.rounds):
        prompts = setting.fresh(3)
        for who in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            time.sleep(SETTLE_S)
            if who == "ours":
                our_s.append(median(ours.paint(prompt, seed=seed).seconds for seed, prompt in enumerate(prompts)))
            else:
                peer_s.append(peer.seconds(prompts) / len(prompts))
        say(f"  round {turn + 1}: ours {our_s[-1] * 1e3:.0f} ms, diffusers {peer_s[-1] * 1e3:.0f} ms")
    return claims.measured(
        CLAIMS["one_image"], 1 / median(our_s), 1 / median(peer_s), ours_name=ours.name, peer_name=peer.name,
        runs=len(our_s),
        why=f"{how(setting, ours)}; ours {median(our_s) * 1e3:.0f} ms through its process's socket, diffusers "
        f"{median(peer_s) * 1e3:.0f} ms in its process; {apart}",
    )  # fmt: skip


def difference(setting: Setting, ours: MotetPainter, peer: Diffusers) -> str:
    """Both paint the same pictures: how far apart they are."""
    prompts = setting.fresh(2)
    with tempfile.TemporaryDirectory(prefix="motet-diffusion-") as folder:
        file = Path(folder) / "pictures.npy"
        peer.seconds(prompts, file=file)
        theirs = np.load(file)
    found = [ours.paint(prompt, seed=seed).pixels for seed, prompt in enumerate(prompts)]
    return f"their pictures differ by {np.abs(np.stack(found).astype(int) - theirs).mean():.2f} of 255 on average"


def concurrent8(setting: Setting, ours: MotetPainter, peer: Diffusers) -> Row:
    count = setting.sizes.num_together
    ours.together(setting.fresh(count))
    peer.seconds(setting.fresh(1))
    our_s: list[float] = []
    peer_s: list[float] = []
    for turn in range(setting.sizes.rounds):
        prompts = setting.fresh(count)
        for who in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            time.sleep(SETTLE_S)
            if who == "ours":
                our_s.append(ours.together(prompts)[1])
            else:
                peer_s.append(peer.seconds(prompts))
        say(f"  round {turn + 1}: ours {count / our_s[-1]:.1f}, diffusers {count / peer_s[-1]:.1f} pictures/s")
    return claims.measured(
        CLAIMS["concurrent8"], count / median(our_s), count / median(peer_s), ours_name=f"{ours.name}, {count} at once",
        peer_name=f"{peer.name}, one after another", runs=len(our_s),
        why=f"{how(setting, ours)}; batches of at most {ours.info.extra['step_rows']} rows",
    )  # fmt: skip


def late_joiner(setting: Setting, ours: MotetPainter, peer: Diffusers) -> Row:
    """A batch runs; one more picture is asked for at a moment drawn at random while it does. Everybody has the same moments.

    Diffusers batches requests: the late one's time is what is left of its batch then, and its own after that.
    """
    sizes, draw = setting.sizes, random.Random(0)
    count = sizes.num_running
    ours.together(setting.fresh(count))
    peer.seconds(setting.fresh(count), batch=count)
    batch_s = median(ours.together(setting.fresh(count))[1] for _ in range(3))
    taken: dict[str, list[float]] = {"joins": [], "waits": [], "diffusers": []}
    batches: list[float] = []
    for turn in range(sizes.num_late):
        after_s = draw.uniform(0, batch_s)
        for who in taken if turn % 2 == 0 else reversed(taken):
            prompts = setting.fresh(count + 1)
            if who == "diffusers":
                batches.append(peer.seconds(prompts[1:], batch=count))
                seconds = max(0.0, batches[-1] - after_s) + peer.seconds(prompts[:1])
            else:
                seconds = ours.late(prompts[1:], prompts[0], after_s=after_s, waits=who == "waits")
            taken[who].append(seconds)
    late = {who: sorted(times) for who, times in taken.items()}
    told = {who: f"{p95(times) * 1e3:.0f} ms (median {median(times) * 1e3:.0f})" for who, times in late.items()}
    say(f"  late: joins {told['joins']}, would wait {told['waits']}; diffusers {told['diffusers']}")
    return claims.measured(
        CLAIMS["late_joiner"], p95(late["joins"]), p95(late["diffusers"]), ours_name=f"{ours.name}, joins between steps",
        peer_name=f"{peer.name}, batches of requests, where it waits until the batch is over", runs=sizes.num_late,
        why=f"p95; {how(setting, ours)}; a batch of {count} takes us {batch_s * 1e3:.0f} ms, diffusers "
        f"{median(batches) * 1e3:.0f} ms; medians {median(late['joins']) * 1e3:.0f} and "
        f"{median(late['diffusers']) * 1e3:.0f} ms; our own engine, made to wait like that: {told['waits']}",
    )  # fmt: skip


def p95(ordered: Sequence[float]) -> float:
    """The value below which 95 % of sorted ones lie."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
