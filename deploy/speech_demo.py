"""The spoken part of `motet demo`: human recordings through the live server, over WebSocket as a microphone would send them.

Also what measures that: a client of /v1/audio/stream that keeps a microphone's time, and word error rates. Knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import MotetError, Unavailable
from ..pipelines.media import SAMPLE_RATE, decode_audio, encode_wav, to_s16

FRAME = SAMPLE_RATE // 50  # samples of one message: 20 ms
SILENCE_S = 0.3  # after which the demo's server takes a sentence to be over
GAP_S = 0.5  # between clips that are joined
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A recording [T] at 16 kHz and what is said in it."""

    name: str
    samples: NDArray[np.float32]
    text: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


@dataclass(kw_only=True)
class Heard:
    """What came back of one stream: messages, each with the seconds since the stream's first sample was spoken."""

    log: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [(when, message) for when, message in self.log if message["type"] == kind]

    @property
    def text(self) -> str:
        return "".join(message["text"] for _, message in self.of("segment")).strip()


def clips() -> list[Clip]:
    """The recordings of motet-demo. Raises Unavailable where it is not installed."""
    try:
        from motet_demo import clips as packaged
    except ImportError as error:
        raise Unavailable("the recordings are not installed; `make venv` installs motet-demo") from error
    return [Clip(name=Path(path).stem, samples=decode_audio(path), text=text) for path, text in packaged()]


def run(url: str, model: str, client: Any) -> None:
    """All recordings at once, each over its own WebSocket; then the same as one uploaded file. Prints what came."""
    spoken = clips()
    seconds = sum(clip.seconds for clip in spoken)
    say(f"\n-- {len(spoken)} recordings of human speech at once, each over its own WebSocket, at the speed of speech")
    heard = asyncio.run(_all(url, model, spoken))
    latencies = []
    for clip, one in zip(spoken, heard):
        errors, words = word_errors(clip.text, one.text)
        latency = final_latency_s(clip.samples, one)
        latencies.append(latency)
        say(f"   {one.text}   [{errors} of {words} words wrong, {latency * 1e3:.0f} ms after the last sound]")
    live = error_rate([(clip.text, one.text) for clip, one in zip(spoken, heard)])

    file = ("clips.wav", encode_wav(join([clip.samples for clip in spoken], GAP_S)), "audio/wav")
    started = time.perf_counter()
    answer = client.audio.transcriptions.create(model=model, file=file)
    upload_s = time.perf_counter() - started
    length_s = seconds + GAP_S * len(spoken)
    upload = error_rate([(" ".join(clip.text for clip in spoken), answer.text)])
    say(f"\n{model:<40}{'live':>14}{'uploaded file':>16}")
    rows = {
        "audio": (f"{seconds:.0f} s", f"{length_s:.0f} s"),
        "word error rate": (f"{100 * live:.1f} %", f"{100 * upload:.1f} %"),
        "text after the last sound, median": (f"{median(latencies) * 1e3:.0f} ms", "-"),
        "   of that, waiting for silence": (f"{SILENCE_S * 1e3:.0f} ms", "-"),
        "real-time factor": ("1 (ten streams)", f"{upload_s / length_s:.3f}"),
    }
    for name, cells in rows.items():
        say(f"{name:<40}{cells[0]:>14}{cells[1]:>16}")


async def _all(url: str, model: str, spoken: Sequence[Clip]) -> list[Heard]:
    return await asyncio.gather(
        *(stream(url, model, clip.samples, silence_s=SILENCE_S, language="en") for clip in spoken)
    )


# ---------------------------------------------------------------------------------------------------------- the client


async def stream(
    url: str,
    model: str,
    samples: NDArray[np.float32],
    *,
    silence_s: float,
    tail_s: float = 2.0,
    partials_s: float = 0.0,
    language: str | None = None,
    pace: float = 1.0,
    frame: int = FRAME,
) -> Heard:
    """Speak float32 [T] into /v1/audio/stream, then `tail_s` of quiet; gives what was heard.

    `pace` 1 is the speed of speech: a frame (of so many samples) leaves when a microphone would have it. 0 is as fast as the
    server reads.
    `url` is the server's http:// address. Raises MotetError for what the server refuses.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    query: dict[str, Any] = {"model": model, "encoding": "s16", "rate": SAMPLE_RATE, "silence": round(silence_s * 1e3)}
    if partials_s:
        query["partials"] = round(partials_s * 1e3)
    if language:
        query["language"] = language
    address = f"ws{url.removeprefix('http')}/v1/audio/stream?{urlencode(query)}"
    data = to_s16(np.concatenate([samples, np.zeros(round(tail_s * SAMPLE_RATE), np.float32)]))
    heard = Heard()
    try:
        async with connect(address, max_size=1 << 24, close_timeout=2, proxy=None) as socket:
            first = json.loads(await asyncio.wait_for(socket.recv(), _LONGEST_WAIT_S))
            if first.get("type") != "ready":
                raise Unavailable(f"the server says {str(first)[:200]}")
            started = time.perf_counter()
            speaking = asyncio.create_task(_speak(socket, data, started, pace, frame))
            try:
                await _listen(socket, heard, started, _LONGEST_WAIT_S + len(data) / 2 / SAMPLE_RATE)
            finally:
                speaking.cancel()
                with contextlib.suppress(asyncio.CancelledError, WebSocketException):
                    await speaking
    except (OSError, TimeoutError, WebSocketException) as error:
        raise Unavailable(f"the stream broke off: {error.__class__.__name__}: {str(error)[:200]}") from None
    return heard


async def _speak(socket: Any, data: bytes, started: float, pace: float, frame: int) -> None:
    for start in range(0, len(data), 2 * frame):
        piece = data[start : start + 2 * frame]
        if pace:
            due = started + (start + len(piece)) / 2 / SAMPLE_RATE / pace
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
        await socket.send(piece)
    await socket.send('{"type": "end"}')


async def _listen(socket: Any, heard: Heard, started: float, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        async for data in socket:
            message = json.loads(data)
            heard.log.append((time.perf_counter() - started, message))
            if message["type"] == "error":
                raise MotetError(f"the server refuses the stream: {message.get('message')}", code=message.get("code"))
            if message["type"] == "done":
                return
    raise Unavailable("the stream ended without its end")


# ------------------------------------------------------------------------------------------------------------- measures


def final_latency_s(samples: NDArray[np.float32], heard: Heard) -> float:
    """Seconds from the last sound of a recording to the segment that holds its last words."""
    segments = heard.of("segment")
    if not segments:
        raise Unavailable("nothing was heard")
    return segments[-1][0] - last_sound(samples) / SAMPLE_RATE


def last_sound(samples: NDArray[np.float32]) -> int:
    """The sample after the last 10 ms that are louder than a fiftieth (-34 dB) of the loudest."""
    frame = SAMPLE_RATE // 100
    count = len(samples) // frame
    loudness = np.sqrt(np.square(samples[: count * frame].reshape(count, frame)).mean(1))
    loud = np.flatnonzero(loudness > loudness.max(initial=0.0) / 50)
    return int(loud[-1] + 1) * frame if len(loud) else len(samples)


def join(parts: Sequence[NDArray[np.float32]], gap_s: float) -> NDArray[np.float32]:
    """Recordings one after the other, each followed by silence."""
    gap = np.zeros(round(gap_s * SAMPLE_RATE), np.float32)
    return np.concatenate([piece for part in parts for piece in (part, gap)])


def words_of(text: str) -> list[str]:
    """Words to be compared: lower case, letters, digits and apostrophes only."""
    return re.sub(r"[^\w' ]|_", " ", text.lower().replace("’", "'")).split()


def word_errors(expected: str, heard: str) -> tuple[int, int]:
    """(substitutions, deletions and insertions of the cheapest way from one text to the other, words expected)."""
    want, got = words_of(expected), words_of(heard)
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1], len(want)


def error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Word error rate over (expected, heard): all errors over all expected words."""
    counts = [word_errors(expected, heard) for expected, heard in pairs]
    return sum(errors for errors, _ in counts) / max(1, sum(words for _, words in counts))


def say(text: str) -> None:
    print(text, flush=True)
