"""A microphone as an iterator of 16-bit PCM, where this machine has one.

Asks the package `sounddevice` if it is installed, else ALSA through PyAV. Neither is needed by anything else.
"""

from __future__ import annotations

import importlib
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engine.errors import Unavailable
from .pcm import RATE

PIECE_S = 0.1
MOST_WAITING = 600  # pieces that nobody has taken yet: a minute
_DEVICES = Path("/dev/snd")
_ALSA_CONFIG = Path("/usr/share/alsa/alsa.conf")


def microphone() -> Iterator[bytes]:
    """Pieces of 0.1 s, 16 kHz mono, until the iterator is closed. Raises Unavailable, at once, where there is none."""
    try:
        sounddevice = importlib.import_module("sounddevice")
    except (ImportError, OSError) as error:  # OSError: the package is here, PortAudio is not
        why = "PortAudio is missing" if isinstance(error, OSError) else "sounddevice is not installed"
        return _alsa(why)
    return _portaudio(sounddevice)


def _portaudio(sounddevice: Any) -> Iterator[bytes]:
    pieces: queue.Queue[bytes] = queue.Queue(MOST_WAITING)

    def heard(data: Any, num_frames: int, time: Any, status: Any) -> None:
        if pieces.full():
            pieces.get_nowait()  # nobody listens: the oldest goes
        pieces.put_nowait(bytes(data))

    try:
        stream = sounddevice.RawInputStream(
            samplerate=RATE, channels=1, dtype="int16", blocksize=int(RATE * PIECE_S), callback=heard
        )
        stream.start()
    except sounddevice.PortAudioError as error:
        raise Unavailable(f"the microphone cannot be opened: {error}", code="no_microphone") from None

    def read() -> Iterator[bytes]:
        with stream:
            while True:
                yield pieces.get()

    return read()


def _alsa(why: str) -> Iterator[bytes]:
    """The default device of ALSA; its rate and channels are its own."""
    if not any(_DEVICES.glob("pcm*c")):
        raise Unavailable(
            f"no microphone here: {why}, and ALSA has no capture device; try `pip install sounddevice`, or name a file",
            code="no_microphone",
        )
    import av

    if _ALSA_CONFIG.is_file():  # the wheel's own ALSA looks elsewhere
        os.environ.setdefault("ALSA_CONFIG_PATH", str(_ALSA_CONFIG))
    try:
        device = av.open("default", format="alsa")
    except (OSError, ValueError) as error:
        raise Unavailable(f"the microphone cannot be opened through ALSA: {error}", code="no_microphone") from None

    def read() -> Iterator[bytes]:
        to_mono = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        with device:
            for frame in device.decode(audio=0):
                for piece in to_mono.resample(frame):
                    yield piece.to_ndarray().tobytes()

    return read()
