"""How far a recogniser has come with a live stream, read from its events: so that nobody sends faster than it hears.

A stream that comes from a file or a buffer has no clock of its own. Plain arithmetic; knows no sockets and no samples.
"""

from __future__ import annotations

import asyncio

from ..engine.types import AnyEvent, Partial, Recognized, Speech

# Audio that may be with the engine before it tells that it has come so far; twice the longest segment, half of what the
# engine bears.
MOST_AHEAD_S = 60.0
_RATE = 16_000
_SLACK_S = 0.5  # a segment's text may end a little before its speech was taken to stop
_QUIET_TURN_S = 0.05  # in which the engine surely hears a second that holds no speech
_LOST_TURN_S = 10.0  # without any news: go on by a second rather than wait for ever


class LivePace:
    """Feed it every event with `note`; `wait` before sending more. Used on one event loop."""

    def __init__(self, most_ahead_s: float = MOST_AHEAD_S) -> None:
        self.heard_s = 0.0  # of the stream: text was told of all speech before
        self.ended = False
        self._most_ahead_s = most_ahead_s
        self._speaking = False
        self._to_tell: list[float] = []  # ends of speech whose text is still to come
        self._news = asyncio.Event()

    @property
    def quiet(self) -> bool:
        """No speech is open, and of all speech the text was told: nothing tells how far the engine has heard."""
        return not self._speaking and not self._to_tell

    def note(self, event: AnyEvent) -> None:
        match event:
            case Speech(what="started"):
                self._speaking = True
                if not self._to_tell:
                    self._reach(event.sample / _RATE)
            case Speech():
                self._speaking = False
                self._to_tell.append(event.sample / _RATE)
            case Partial() if not self._to_tell:
                self._reach(event.start)
            case Recognized():
                if event.segments:
                    end = event.segments[-1].end
                    self._reach(end)
                    self._to_tell = [stop for stop in self._to_tell if stop > end + _SLACK_S]
                elif self._to_tell:  # speech that held no words
                    self._reach(self._to_tell.pop(0))
        self._news.set()

    def end(self) -> None:
        """The request is over: nobody waits any longer."""
        self.ended = True
        self._news.set()

    async def wait(self, sent_s: float) -> None:
        """Return once the engine is near enough for audio up to `sent_s`."""
        while sent_s - self.heard_s > self._most_ahead_s and not self.ended:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), _QUIET_TURN_S if self.quiet else _LOST_TURN_S)
            except TimeoutError:
                self.heard_s += 1.0

    def _reach(self, at_s: float) -> None:
        self.heard_s = max(self.heard_s, at_s)
