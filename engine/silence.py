"""Cuts what is not speech off both ends of an utterance while it streams by. Numpy only; what is in between is untouched.

Some voices begin with half a second of low noise: model output, not speech, and latency for whoever listens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_MOST = 100  # windows cut from the front at most: 1 s
_FRONT = 3  # quiet windows that stay before the first loud one
_HOLD = 30  # quiet windows held back, for they may be the end
_END = 5  # quiet windows that stay after the last loud one


class SilenceTrimmer:
    """One utterance, in windows of 10 ms. `below` is the RMS under which a window is quiet (full scale is 1)."""

    def __init__(self, below: float, *, sample_rate: int) -> None:
        self._below = below
        self._size = sample_rate // 100
        self._rest = np.zeros(0, np.float32)  # less than a window
        self._quiet: list[Samples] = []
        self._num_cut = 0
        self._speaks = False

    def push(self, pcm: Samples, *, last: bool = False) -> Samples:
        """What may go out when samples [n] have come. However they are cut into pieces, the same comes out."""
        out: list[Samples] = []
        pcm = np.concatenate((self._rest, pcm))
        whole = len(pcm) // self._size * self._size
        for window in pcm[:whole].reshape(-1, self._size):
            out += self._look(window)
        self._rest = pcm[whole:]
        if last:
            out += self._quiet[:_END]
            if len(self._quiet) <= _END:
                out.append(self._rest)
            self._quiet, self._rest = [], self._rest[:0]
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    def _look(self, window: Samples) -> list[Samples]:
        loud = float(np.sqrt(np.mean(window.astype(np.float64) ** 2))) >= self._below
        if not self._speaks and not loud and self._num_cut < _MOST:
            self._quiet.append(window)
            if len(self._quiet) > _FRONT:
                del self._quiet[0]
                self._num_cut += 1
            return []
        self._speaks = True
        if loud:
            out, self._quiet = [*self._quiet, window], []
            return out
        self._quiet.append(window)
        return [self._quiet.pop(0)] if len(self._quiet) > _HOLD else []
