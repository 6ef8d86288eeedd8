"""A listener of /v1/audio/speech/stream who plays what comes at the speed of speech, and notes where it came too late."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import connect

from motet.benchmarks.motet_engine import EngineError

RATE = 24_000
_LONGEST_WAIT_S = 120.0


@dataclass(kw_only=True)
class Heard:
    """One passage as it arrived: (seconds since its text was sent, samples) of each piece, and the server's last word."""

    pieces: list[tuple[float, int]] = field(default_factory=list)
    utterance_ends: list[float] = field(
        default_factory=list
    )  # when each utterance was told to begin, from the second on
    done_s: float = 0.0
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def audio_s(self) -> float:
        return sum(count for _, count in self.pieces) / RATE

    @property
    def first_s(self) -> float:
        return self.pieces[0][0]

    def lateness_s(self) -> float:
        """How long a player that begins with the first piece had to wait in all for pieces that were not there yet."""
        clock, waited = self.pieces[0][0], 0.0
        for when, count in self.pieces:
            if when > clock:
                waited += when - clock
                clock = when
            clock += count / RATE
        return waited


async def listen(port: int, text: str, *, seed: int) -> Heard:
    """Send a text, take its speech by the default voice. Raises EngineError when the server tells of an error or hangs up."""
    query = urlencode({"format": "pcm", "seed": seed})
    heard = Heard()
    async with connect(f"ws://127.0.0.1:{port}/v1/audio/speech/stream?{query}", max_size=None) as socket:
        await socket.recv()  # ready
        began = time.perf_counter()
        await socket.send(json.dumps({"type": "text", "text": text}))
        await socket.send(json.dumps({"type": "end"}))
        while True:
            message = await asyncio.wait_for(socket.recv(), _LONGEST_WAIT_S)
            now = time.perf_counter() - began
            if isinstance(message, bytes):
                heard.pieces.append((now, len(message) // 2))
                continue
            told = json.loads(message)
            if told["type"] == "utterance" and told["index"]:
                heard.utterance_ends.append(now)
            elif told["type"] == "error":
                raise EngineError(f"the server says: {told['message']}")
            elif told["type"] == "done":
                heard.done_s, heard.done = now, told
                break
    if not heard.pieces:
        raise EngineError("no sound came")
    return heard
