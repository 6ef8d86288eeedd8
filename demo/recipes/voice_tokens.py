"""What the demo voice's language model reads and writes: ids of letters, phones and codes, and the order of the codes.

An utterance is one sequence, in the manner of Orpheus:

    SOT  letters  EOT  SOP  phones  SOA  codes  EOA

The model writes the phones itself before it speaks: they are cheap, and it pronounces far better when it has spelled the
word out for itself. A frame of codes is as long as one code of the coarsest level; its codes come depth first, each level's
code before the finer ones it covers (SNAC's strides 4, 2, 1: c0 c1 c2 c2 c1 c2 c2; ours, 4, 2, 2: c0 c1 c2 c1 c2). Each place
in a frame has ids of its own, AUDIO + place * size + code, so that a mask by place is a range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from voice_text import LETTERS

PAD, SOT, EOT, SOP, SOA, EOA = range(6)
PHONES = (
    "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh uw v w y z zh"
).split()
FIRST_LETTER = 6
FIRST_PHONE = FIRST_LETTER + len(LETTERS)
AUDIO = 96  # first id of a code; room above for a few more letters
assert FIRST_PHONE + len(PHONES) <= AUDIO

Codes = NDArray[np.int64]
_LETTER_IDS = {letter: FIRST_LETTER + at for at, letter in enumerate(LETTERS)}
_PHONE_IDS = {phone: FIRST_PHONE + at for at, phone in enumerate(PHONES)}


def text_ids(text: str) -> list[int]:
    """SOT, a letter each, EOT. `text` has LETTERS only (KeyError else)."""
    return [SOT, *(_LETTER_IDS[letter] for letter in text), EOT]


def phone_ids(phones: Sequence[str]) -> list[int]:
    """SOP and the phones."""
    return [SOP, *(_PHONE_IDS[phone] for phone in phones)]


def places(strides: Sequence[int]) -> list[tuple[int, int]]:
    """The codes of a frame in their order: (level, how many of that level's codes come before it in the frame)."""
    counts = [0] * len(strides)
    order: list[tuple[int, int]] = []

    def descend(level: int) -> None:
        order.append((level, counts[level]))
        counts[level] += 1
        if level + 1 < len(strides):
            for _ in range(strides[level] // strides[level + 1]):
                descend(level + 1)

    descend(0)
    return order


def vocabulary_size(strides: Sequence[int], size: int) -> int:
    return AUDIO + len(places(strides)) * size


def flatten(codes: Sequence[Codes], strides: Sequence[int], size: int) -> Codes:
    """Codes of each level, [frames * strides[0] / stride] -> ids [frames * places]."""
    order = places(strides)
    num_frames = len(codes[0])
    out = np.empty((num_frames, len(order)), np.int64)
    for place, (level, nth) in enumerate(order):
        per_frame = strides[0] // strides[level]
        out[:, place] = codes[level][nth::per_frame] + AUDIO + place * size
    return out.reshape(-1)


def unflatten(ids: Sequence[int], strides: Sequence[int], size: int) -> list[Codes]:
    """The way back; an unfinished frame at the end is dropped. ValueError for an id out of its place's range."""
    order = places(strides)
    frames = np.asarray(ids[: len(ids) // len(order) * len(order)], np.int64).reshape(-1, len(order))
    frames = frames - AUDIO - np.arange(len(order)) * size
    if frames.size and not (0 <= frames.min() and frames.max() < size):
        raise ValueError("an id stands at a place of the frame that is not its own")
    codes: list[Codes] = []
    for level, stride in enumerate(strides):
        mine = [frames[:, place] for place, (at, _) in enumerate(order) if at == level]
        assert len(mine) == strides[0] // stride
        codes.append(np.stack(mine, axis=1).reshape(-1))
    return codes


def code_times_s(num_ids: int, strides: Sequence[int], frame_s: float) -> NDArray[np.float64]:
    """The middle of what each code covers, in seconds from the first."""
    order = places(strides)
    within = np.array([(nth + 0.5) * strides[level] / strides[0] for level, nth in order])
    frames = np.arange(-(-num_ids // len(order)))
    return ((frames[:, None] + within) * frame_s).reshape(-1)[:num_ids]
