"""Audio that nobody reads is bounded: the request is aborted, and what was unread stays readable."""

from __future__ import annotations

import asyncio
from typing import Any

from motet.engine.client import HostClient, Mailbox
from motet.engine.frames import Abort, Submit, ToHost
from motet.engine.types import Aborted, AnyEvent, Audio, Blob, Denoising, SpeechRequest

SECOND = bytes(48_000)


class Recorded(HostClient):
    """A client of no host: messages are kept, events come by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[ToHost] = []

    async def _reach(self) -> None: ...

    def _post(self, message: ToHost) -> None:
        self.posted.append(message)

    def _is_alive(self) -> bool:
        return True

    async def close(self) -> None: ...


def audio(seconds: int) -> AnyEvent:
    return Audio(request_id="x", pcm=SECOND * seconds)


def test_a_reader_who_never_reads_is_cut_off() -> None:
    async def scenario() -> None:
        client = Recorded()
        events: Any = client.submit(SpeechRequest(request_id="x", model="", utterances=[[1]]))
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert isinstance(client.posted[0], Submit)
        client._receive([audio(60)])
        assert len((await first).pcm) == 60 * 48_000
        for _ in range(12):  # 120 s unread are borne
            client._receive([audio(10)])
        assert len(client.posted) == 1
        for _ in range(5):
            client._receive([audio(10)])
        (abort,) = client.posted[1:]
        assert isinstance(abort, Abort) and abort.reason == "slow_reader"
        client._receive([Aborted(request_id="x", reason="slow_reader")])
        rest = [event async for event in events]
        assert len(rest) == 13 and isinstance(rest[-1], Aborted)

    asyncio.run(scenario())


def test_who_reads_may_hear_any_length() -> None:
    async def scenario() -> None:
        mailbox = Mailbox()
        for _ in range(10):
            mailbox.put(audio(100))
            await mailbox.take()
        assert not mailbox.overrun

    asyncio.run(scenario())


def test_of_unread_previews_the_newest_of_each_picture_is_kept() -> None:
    async def scenario() -> None:
        box, pixels = Mailbox(), Blob(dtype="uint8", shape=(1, 1, 3), data=b"abc")
        for step in range(1, 5):
            for index in range(2):
                shown = pixels if step < 4 else None
                box.put(Denoising(request_id="x", step=step, num_steps=9, index=index, preview=shown))
        events = await box.take()
        kept = [(e.step, e.index) for e in events if isinstance(e, Denoising) and e.preview is not None]
        assert kept == [(3, 0), (3, 1)] and len(events) == 8
        box.put(Denoising(request_id="x", step=5, num_steps=9, preview=pixels))
        assert events[4].preview is not None  # type: ignore[union-attr]  # what was read stays as it was

    asyncio.run(scenario())
