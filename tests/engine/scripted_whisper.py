"""A recogniser that says what a script tells it, in the shape of models/whisper.py; and a detector of loudness.

A window is known by its first sample: `scripts[round(1000 * sample)]` lists, for each attempt at it, the ids it says. Attempts
are counted by the prompts computed for the window. Every call is written down, and slots are checked for misuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from motet.models.whisper_tokens import WhisperTokens

TOKENS = WhisperTokens.of_vocabulary(51864)
BEGIN, EOT = TOKENS.timestamp_begin, TOKENS.eot
_NONE = -1


def at(seconds: float) -> int:
    return BEGIN + round(seconds / 0.02)


class WordTokenizer:
    """Id n is the word " wn"."""

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split() if word[1:].isdigit()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids if i < EOT)

    def split_to_words(self, ids: Sequence[int], language: str = "en") -> tuple[list[str], list[list[int]]]:
        return [f" w{i}" for i in ids], [[i] for i in ids]


class ScriptedWhisper:
    def __init__(self, scripts: dict[int, list[list[int]]], *, tokens: WhisperTokens = TOKENS) -> None:
        self.scripts = scripts
        self.tokens = tokens
        self.tokenizer = WordTokenizer()
        self.config = SimpleNamespace(vocab_size=51864, num_text_positions=448, num_audio_positions=1500, hidden=4)
        self.suppress_tokens = (EOT + 1,)
        self.begin_suppress = (EOT,)
        self.device = torch.device("cpu")
        self.attempts: dict[int, int] = {}
        self.prompts: list[list[int]] = []
        self.batches: list[int] = []  # slots in each decode
        self.languages: dict[int, dict[str, float]] = {}
        self.fail_on: int | None = None  # this window's rows raise
        self.nan_on: int | None = None

    def log_mel(self, pcm: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([clip[0] * 1000 for clip in pcm]).round()[:, None, None].expand(-1, 1, 3000)

    def encode(self, mel: torch.Tensor) -> torch.Tensor:
        return mel[:, 0, 0]

    def new_cache(self, num_slots: int, num_audio: int) -> Any:
        return SimpleNamespace(
            tokens=torch.full((num_slots, 448), _NONE),
            windows=[0] * num_audio,
            audio_slot=[0] * num_slots,
            num_bytes=0,
            attempt=[0] * num_slots,
        )

    def set_audio(self, cache: Any, slots: Sequence[int], features: torch.Tensor) -> None:
        for slot, window in zip(slots, features.tolist(), strict=True):
            cache.windows[slot] = int(window)

    def copy_slots(self, cache: Any, src: Sequence[int], dst: Sequence[int], num_tokens: int) -> None:
        cache.tokens[list(dst), :num_tokens] = cache.tokens[list(src), :num_tokens].clone()
        for a, b in zip(src, dst, strict=True):
            cache.attempt[b] = cache.attempt[a]
            assert cache.audio_slot[a] == cache.audio_slot[b]

    def decode(self, ids: Sequence[int], slots: Sequence[int], positions: Sequence[int], cache: Any) -> torch.Tensor:
        self.batches.append(len(set(slots)))
        rows = []
        for i, slot, position in zip(ids, slots, positions, strict=True):
            window = cache.windows[cache.audio_slot[slot]]
            if window == self.fail_on:
                raise RuntimeError("scripted failure")
            if position == 0:
                cache.tokens[slot] = _NONE
                cache.attempt[slot] = self.attempts[window] = self.attempts.get(window, -1) + 1
            assert position == 0 or cache.tokens[slot, position - 1] != _NONE, "a gap in a slot"
            cache.tokens[slot, position] = i
            rows.append([window, slot, position, cache.attempt[slot]])
        self._cache = cache
        self.prompts += [list(ids)] if 0 in positions else []
        return torch.tensor(rows, dtype=torch.float64)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(hidden), 51864), -30.0)
        for row, (window, slot, position, attempt) in zip(out, hidden.long().tolist(), strict=True):
            said = self._cache.tokens[slot, : position + 1].tolist()
            if window == self.nan_on:
                row[:] = torch.nan
                continue
            if said == [self.tokens.sot] and window in self.languages:
                for code, probability in self.languages[window].items():
                    row[self.tokens.languages[code]] = torch.tensor(probability).log() + 20
                continue
            first = said.index(self.tokens.sot) + (3 if self.tokens.multilingual else 1)
            if len(said) < first:
                continue
            script = self.scripts[window]
            script_ids = [*script[min(attempt, len(script) - 1)], self.tokens.eot]
            row[script_ids[min(len(said) - first, len(script_ids) - 1)]] = 30.0
        return out

    def alignment(self, cache: Any, slot: int, num_tokens: int, num_frames: int, *, start: int = 0) -> torch.Tensor:
        """Each row looks at the frame ten times its index."""
        frames = torch.arange(num_frames).float()
        centres = torch.arange(num_tokens).float()[:, None] * 10 + 2
        return torch.softmax(-((frames - centres) ** 2), dim=-1)[None]


class LoudnessDetector:
    """Speech is what is not zero. Serves as SileroVAD and as VADStreams."""

    def __init__(self, num: int = 4) -> None:
        self.num = num

    def file(self, pcm: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(pcm, (0, -len(pcm) % 512))
        return (padded.view(-1, 512).abs().amax(1) > 0).float()

    def reset(self, slot: int) -> None:
        pass

    def run(self, slots: Sequence[int], pieces: Sequence[torch.Tensor]) -> list[list[float]]:
        return [self.file(piece).tolist() for piece in pieces]
