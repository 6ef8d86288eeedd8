"""Nobody sends faster than the recogniser hears, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from motet.engine.types import Partial, Recognized, Segment, Speech
from motet.pipelines import live_pace
from motet.pipelines.live_pace import LivePace

RATE = 16_000


def speech(what: str, at_s: float) -> Speech:
    return Speech(request_id="r", what=what, sample=round(at_s * RATE))  # type: ignore[arg-type]


def told(*ends: float) -> Recognized:
    segments = [Segment(id=0, start=end - 1, end=end, text=" x") for end in ends]
    return Recognized(request_id="r", segments=segments)


def test_only_text_tells_how_far_it_has_come() -> None:
    pace = LivePace()
    pace.note(speech("started", 2.0))
    assert pace.heard_s == 2.0 and not pace.quiet
    pace.note(speech("stopped", 6.0))
    pace.note(speech("started", 7.0))  # heard by the detector; the text of what was before is still to come
    assert pace.heard_s == 2.0
    pace.note(told(3.0, 5.8))
    assert pace.heard_s == 5.8 and not pace.quiet
    pace.note(speech("stopped", 9.0))
    pace.note(told())  # it held no words
    assert pace.heard_s == 9.0 and pace.quiet
    pace.note(speech("started", 10.0))
    pace.note(Partial(request_id="r", committed=" a", start=12.0))
    assert pace.heard_s == 12.0


def test_waiting() -> None:
    async def main() -> None:
        pace = LivePace(10.0)
        await pace.wait(10.0)
        pace.note(speech("started", 0.0))
        waiting = asyncio.create_task(pace.wait(12.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        pace.note(told(1.9))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        pace.note(told(2.0))
        await asyncio.wait_for(waiting, 1)

    asyncio.run(main())


def test_quiet_is_passed_over_quickly_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pace = LivePace(10.0)
        started = time.monotonic()
        await asyncio.wait_for(pace.wait(15.0), 10)  # of fifteen seconds
        assert time.monotonic() - started > 0.2
        pace.note(speech("started", 5.0))
        monkeypatch.setattr(live_pace, "_LOST_TURN_S", 0.01)
        await asyncio.wait_for(pace.wait(25.0), 2)
        monkeypatch.setattr(live_pace, "_LOST_TURN_S", 100.0)
        waiting = asyncio.create_task(pace.wait(1e6))
        await asyncio.sleep(0.01)
        pace.end()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(main())
