"""How fast a client's audio is passed on: as far ahead as allowed of what the engine says it has dealt with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from motet.engine.client import EngineClient
from motet.engine.types import AnyEvent, AudioRequest, Done, Partial, Recognized, Segment, Speech, TranscribeOptions
from motet.streaming.live_stream import RATE, LiveStream

SECOND = b"\0" * 4 * RATE


class ScriptedClient:
    """An engine that says what the test puts in."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.appended = 0  # samples

    async def load(self, model: str) -> None:
        pass

    async def submit(self, request: AudioRequest) -> AsyncIterator[AnyEvent]:
        while True:
            yield (event := await self.told.get())
            if isinstance(event, Done):
                return

    async def append(self, request_id: str, ids: list[int], *, pcm: bytes, last: bool = False) -> None:
        self.appended += len(pcm) // 4

    async def abort(self, request_id: str, reason: str) -> None:
        pass


def segment(end: float) -> Segment:
    return Segment(id=0, start=0.0, end=end, text=" w")


@pytest.mark.parametrize(
    ("events", "heard_s"),
    [
        ([], 0),
        # Speech that waits to be decoded is ahead of its marks: the engine counts it as not dealt with.
        (
            [
                {"what": "started", "sample": 2 * RATE, "upto": 2.0},
                {"what": "stopped", "sample": 30 * RATE, "upto": 2.0},
            ],
            2,
        ),
        ([{"what": "started", "sample": 40 * RATE, "upto": 2.0}], 2),
        ([{"segments": [segment(27.0)], "upto": 30.0}], 30),
        ([{"segments": [], "upto": 30.0}], 30),  # it held no words
        ([{"committed": " w", "start": 12.0}], 12),
    ],
)
def test_marks_of_speech_are_not_what_was_dealt_with(
    events: list[dict[str, Any]], heard_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client = ScriptedClient()
        stream = LiveStream(cast(EngineClient, client), "m", TranscribeOptions(), max_ahead_s=5.0)
        await stream.start()
        # The stream's own clock stands still: only events let audio pass.
        monkeypatch.setattr(stream, "_started", 1e12)
        ids = {"request_id": stream.request.request_id}
        for fields in events:
            kind = Speech if "what" in fields else Recognized if "upto" in fields else Partial
            client.told.put_nowait(kind(**ids, **fields))

        async def listen() -> None:
            async for _ in stream.events():
                pass

        async def speak() -> None:
            for _ in range(60):
                await stream.push(SECOND)

        listening, speaking = asyncio.create_task(listen()), asyncio.create_task(speak())
        for _ in range(300):
            await asyncio.sleep(0)
        assert client.appended == (heard_s + 5 + 1) * RATE and not speaking.done()
        client.told.put_nowait(Recognized(**ids, segments=[], upto=60.0))
        await asyncio.wait_for(speaking, 10)
        client.told.put_nowait(Done(**ids, finish_reason="stop"))
        await asyncio.wait_for(listening, 10)

    asyncio.run(main())
