"""The speaking side of the fake engine: every utterance is a tone of its own, as long as its text.

A prompt id lasts `SAY_S`, utterance i sounds at 300 + 100 i Hz, and pieces come as an engine's do: small first, larger later.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from motet.engine.types import Aborted, AnyEvent, Audio, Done, SpeechRequest, Timing, Usage

TTS = "fake-tts"
VOICE = "ann"
RATE = 24_000
SAY_S = 0.02
PIECES_S = (0.04, 0.08, 0.5)  # the first, the second, and all others
_CODES = 8  # of one id

LETTERS = "abcdefghijklmnopqrstuvwxyz ',.?"


def write_voice(folder: Path) -> Path:
    """The `speech.json` of a voice that reads letters."""
    written = {
        "family": "motet-voice",
        "name": TTS,
        "voices": [VOICE],
        "default_voice": VOICE,
        "language": "en",
        "text": {"letters": LETTERS, "first": 6, "start": 1, "end": 2},
        "phones": {"names": ["a", "b"], "first": 37, "start": 3},
        "audio": {"start": 4, "end": 5, "first": 96, "size": 16, "strides": [4, 2], "order": "depth_first"},
        "sampling": {"temperature": 0.3, "top_k": 50},
        "phone_sampling": {"temperature": 0.0},
        "max_chars": 90,
        "codec": "codec",
    }
    (folder / "speech.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


def words_of(prompt: list[int]) -> str:
    """What a prompt of this voice says."""
    return "".join(LETTERS[index - 6] for index in prompt if 6 <= index < 6 + len(LETTERS))


def length_s(prompt: list[int]) -> float:
    return len(prompt) * SAY_S


def tone(number: int, seconds: float) -> np.ndarray[Any, np.dtype[np.int16]]:
    at = np.arange(round(seconds * RATE)) / RATE
    return (8000 * np.sin(2 * np.pi * (300 + 100 * number) * at)).astype("<i2")


class FakeVoice:
    """One request's work."""

    def __init__(
        self,
        request: SpeechRequest,
        inbox: asyncio.Queue[tuple[list[int], bool]],
        stopped: Callable[[], str],
        step: Callable[[], Any],
    ) -> None:
        self.request = request
        self.inbox = inbox
        self.stopped = stopped
        self.step = step
        self.said: list[str] = []
        self.audio_s = 0.0
        self._num_prompt = self._num_output = 0

    async def events(self) -> AsyncIterator[AnyEvent]:
        async for prompt in self._prompts():
            number = len(self.said)
            self.said.append(words_of(prompt))
            self._num_prompt += len(prompt)
            async for piece in self._pieces(number, prompt):
                if reason := self.stopped():
                    yield Aborted(request_id=self.request.request_id, reason=reason, usage=self._usage())
                    return
                yield piece
        yield Done(
            request_id=self.request.request_id,
            finish_reason="stop",
            usage=self._usage(),
            timing=Timing(queue_s=0.001, first_token_s=0.002, total_s=0.01),
            audio_s=self.audio_s,
        )

    async def _prompts(self) -> AsyncIterator[list[int]]:
        for prompt in self.request.utterances:
            yield prompt
        last = not self.request.open
        while not last:
            prompt, last = await self.inbox.get()
            if prompt:
                yield prompt

    async def _pieces(self, number: int, prompt: list[int]) -> AsyncIterator[Audio]:
        sound = tone(number, length_s(prompt))
        at = count = 0
        while at < len(sound):
            await self.step()
            size = round(PIECES_S[min(count, 2)] * RATE)
            piece = sound[at : at + size]
            at, count = at + size, count + 1
            self.audio_s += len(piece) / RATE
            self._num_output += _CODES
            yield Audio(
                request_id=self.request.request_id, pcm=piece.tobytes(), utterance=number, last=at >= len(sound)
            )

    def _usage(self) -> Usage:
        return Usage(num_prompt_tokens=self._num_prompt, num_output_tokens=self._num_output)
