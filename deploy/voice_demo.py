"""The speaking part of `motet demo`: the chat's answer is spoken to a file through the server, and Whisper reads it back.

Knows no engine: it is just a client of /v1/audio/speech and /v1/audio/transcriptions.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..engine.errors import Unavailable
from ..pipelines.media import SAMPLE_RATE, decode_audio
from .speech_demo import say, word_errors

PATH = Path("motet-demo.wav")
MAX_CHARS = 300  # of the answer, cut after a sentence


def run(voice: str, recogniser: str, answer: str, client: Any, *, path: Path = PATH) -> None:
    """Speak `answer`, write the sound to `path`, and print what the recogniser makes of it."""
    text = first_sentences(answer, MAX_CHARS)
    say(f"\n-- {voice} speaks the answer into {path}, {recogniser} listens")
    started, first_s = time.perf_counter(), None
    with client.audio.speech.with_streaming_response.create(
        model=voice, voice="default", input=text, response_format="wav"
    ) as response:
        with open(path, "wb") as file:
            for piece in response.iter_bytes():
                first_s = first_s or time.perf_counter() - started
                file.write(piece)
    total_s = time.perf_counter() - started
    seconds = len(decode_audio(path)) / SAMPLE_RATE
    if first_s is None or not seconds:
        raise Unavailable("the server spoke nothing")
    with open(path, "rb") as file:
        heard = client.audio.transcriptions.create(model=recogniser, file=file, language="en").text.strip()
    errors, words = word_errors(_plain(text), _plain(heard))
    say(f"   said:  {text}\n   heard: {heard}")
    rows = {
        "speech": f"{seconds:.1f} s",
        "first sound": f"{first_s * 1e3:.0f} ms",
        "real-time factor": f"{total_s / seconds:.3f}",
        "word error rate": f"{100 * errors / max(1, words):.1f} %",
    }
    say(f"\n{voice}")
    for name, cell in rows.items():
        say(f"{name:<40}{cell:>14}")


def first_sentences(text: str, limit: int) -> str:
    """As many whole sentences of `text` as `limit` characters hold; at least what the limit allows of the first."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    cut = max(text.rfind(mark, 0, limit) for mark in (". ", "! ", "? "))
    return text[: cut + 1] if cut > 0 else text[:limit].rpartition(" ")[0]


def _plain(text: str) -> str:
    """Compound words and figures are written in several ways that sound alike."""
    return text.replace("-", " ").replace("%", " percent")
