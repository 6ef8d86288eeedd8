"""Codec frames in, sound out: many live streams through one codec, batched.

    engine.open(id, seed)                       a stream gets a slot of state
    engine.push(id, frames [T, K], last)        its next frames; the caller decides how many are worth a step
    for piece in engine.step(): ...             everything that waits, in as few calls as are fast
    engine.close(id)                            at its end, or in its midst

A step decodes what waits of the streams it is given, at most `most_frames` of each, so the caller bounds a step by what it
pushes and whom it names: little and often while a listener is about to run out, more at a time later on. How streams share
calls is `rounds`, which knows no tensors. Behind the last frame follow a few empty ones that push out what the codec, which
looks ahead, still holds; they count as waiting. Pieces, batch mates and slots never change a stream's sound beyond rounding.

It knows no requests, no deadlines and no clock: engine/speech_engine.py does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..models.snac import Snac
from ..models.snac_streams import SnacStreams
from .errors import DuplicateRequest, InvalidRequest, Overloaded

# Frames that go through the codec together. Beyond, a CPU's caches hold a layer's rows no longer (measured: 0.5 ms a frame for
# 16, 0.6 for 64 and 1.2 for one); a GPU has room, and pays for each call.
_TOGETHER = {"cpu": 16, "cuda": 1024}


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """What a step made of one stream: samples fp32 [n] in -1..1, n may be 0; `done` with the last of them."""

    id: str
    pcm: NDArray[np.float32]
    done: bool


@dataclass(slots=True, eq=False)
class _Stream:
    slot: int
    frames: deque[NDArray[np.int64]] = field(default_factory=deque)  # each [t, K]
    num_pushed: int = 0
    num_waiting: int = 0
    ended: bool = False

    def take(self, num_frames: int) -> NDArray[np.int64]:
        """The next frames [num_frames, K] of those that wait."""
        parts = []
        self.num_waiting -= num_frames
        while num_frames:
            part = self.frames.popleft()
            if len(part) > num_frames:
                self.frames.appendleft(part[num_frames:])
                part = part[:num_frames]
            parts.append(part)
            num_frames -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rounds(waiting: Sequence[int], together: int) -> Iterator[tuple[list[int], int]]:
    """Which streams go through the codec together, and how many frames of each: (indices, frames), until none waits.

    Streams before frames: a call takes as many streams as it may, since rows of one call cost least when they are few of
    many; then as many frames as all of them have and as leave the call at `together` frames.
    """
    left = {at: count for at, count in enumerate(waiting) if count > 0}
    while left:
        group = sorted(left, key=lambda at: (-left[at], at))[:together]
        count = max(1, min(together // len(group), min(left[at] for at in group)))
        yield sorted(group), count
        for at in group:
            left[at] -= count
            if not left[at]:
                del left[at]


class CodecEngine:
    """One codec and the slots of its streams. Not thread-safe: one loop calls it."""

    def __init__(self, codec: Snac, *, max_streams: int, most_frames: int = 16, together: int = 0) -> None:
        """most_frames: of one stream in a step; together: frames of a call, 0: what suits the device."""
        self.codec, self.max_streams, self.most_frames = codec, max_streams, most_frames
        self._together = together or _TOGETHER.get(codec.device.type, 64)
        self._state = SnacStreams(codec, max_streams)
        self._free = list(reversed(range(max_streams)))
        self._streams: dict[str, _Stream] = {}
        # Codes of the empty frames: any do, nothing of them is heard.
        self._empty = np.zeros((codec.config.flush_frames, codec.config.codes_per_frame), np.int64)
        self.counters = dict.fromkeys(("steps", "calls", "frames"), 0)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def state_bytes(self) -> int:
        """Of all slots, for the memory budget."""
        return self._state.num_bytes

    def pending(self, id: str) -> int:
        """Frames of a stream that wait, with the empty ones behind its end."""
        return self._streams[id].num_waiting

    def open(self, id: str, seed: int = 0) -> None:
        """A new stream; `seed` is of the codec's noise. Raises DuplicateRequest, and Overloaded without a free slot."""
        if id in self._streams:
            raise DuplicateRequest(f"stream {id!r} is open already")
        if not self._free:
            raise Overloaded(f"all {self.max_streams} streams of the codec are taken")
        stream = _Stream(self._free.pop())
        self._state.reset(stream.slot, seed)
        self._streams[id] = stream

    def push(self, id: str, frames: Any, last: bool = False) -> None:
        """The next frames of a stream, integers [T, K]; T may be 0. Nothing but nothing may follow `last`.

        Raises InvalidRequest for another shape and for codes that the codec has not.
        """
        stream, config = self._streams[id], self.codec.config
        rows = np.asarray(frames)
        if rows.ndim != 2 or rows.shape[1] != config.codes_per_frame or rows.dtype.kind not in "iu":
            raise InvalidRequest(
                f"frames are integers of shape [frames, {config.codes_per_frame}], got {rows.dtype} {list(rows.shape)}",
                param="frames",
            )
        if rows.size and not (0 <= rows.min() and rows.max() < config.codebook_size):
            raise InvalidRequest(f"codes lie in 0..{config.codebook_size - 1}", param="frames")
        if stream.ended:
            if len(rows):
                raise InvalidRequest("the stream has had its last frame", param="frames")
            return
        if len(rows):
            self._put(stream, rows.astype(np.int64))
            stream.num_pushed += len(rows)
        if last:
            stream.ended = True
            self._state.end(stream.slot, stream.num_pushed)
            if stream.num_pushed:
                self._put(stream, self._empty)

    def _put(self, stream: _Stream, rows: NDArray[np.int64]) -> None:
        stream.frames.append(rows)
        stream.num_waiting += len(rows)

    def step(self, ids: Sequence[str] | None = None) -> list[Decoded]:
        """Decode what waits of these streams (None: of all): one piece for each that had something, or that is done."""
        chosen = [(id, self._streams[id]) for id in (self._streams if ids is None else ids)]
        chosen = [(id, stream) for id, stream in chosen if stream.num_waiting or stream.ended]
        made: list[list[torch.Tensor]] = [[] for _ in chosen]
        for group, count in rounds([min(stream.num_waiting, self.most_frames) for _, stream in chosen], self._together):
            streams = [chosen[at][1] for at in group]
            frames = torch.from_numpy(np.stack([stream.take(count) for stream in streams])).to(self.codec.device)
            for at, pcm in zip(group, self._state.step([stream.slot for stream in streams], frames)):
                made[at].append(pcm)
            self.counters["calls"] += 1
            self.counters["frames"] += count * len(group)
        self.counters["steps"] += bool(chosen)
        return [
            Decoded(id, samples, stream.ended and not stream.num_waiting)
            for (id, stream), samples in zip(chosen, _on_host(made))
        ]

    def close(self, id: str) -> None:
        """Forget a stream, whatever waits of it; its slot is free at once."""
        self._free.append(self._streams.pop(id).slot)


def _on_host(made: Sequence[Sequence[torch.Tensor]]) -> list[NDArray[np.float32]]:
    """Pieces of each stream -> its samples; one copy from the device, after all calls are queued."""
    parts = [piece for pieces in made for piece in pieces]
    if not parts:
        return [np.zeros(0, np.float32) for _ in made]
    samples = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([sum(len(piece) for piece in pieces) for pieces in made])
    return np.split(samples, ends[:-1])
