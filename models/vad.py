"""Silero's voice activity detector (16 kHz): how likely each window of 512 samples holds speech.

A learned STFT, four small convolutions, an LSTM over windows, one output. Files run the convolutions over many windows
at once and one LSTM call over their sequence; live streams run one batched step over all of them. Knows no thresholds:
what is speech, and where it is cut, is engine/segmenter.py's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..engine.errors import InvalidRequest, ModelLoadError, ModelNotFound
from .onnx_weights import read_onnx_weights
from .safetensors_source import SafetensorsSource

PCM: TypeAlias = Tensor | NDArray[np.float32] | NDArray[np.int16]

SAMPLE_RATE = 16000
WINDOW = 512  # samples per probability: 32 ms
CONTEXT = 64  # samples before a window that it also sees
HIDDEN = 128
_FRAME = 256  # samples of one STFT frame; the next is half of it later
_BINS = 129
_FRAMES = 4  # that a window gives
_PAD = CONTEXT  # the last frame is completed by reflection
_BLOCK = 1024  # windows whose convolutions run together: 33 s, some 15 MB of activations
_SEQUENCE = 18750  # windows of one LSTM call: 10 minutes

_SHAPES = {
    "stft_conv.weight": (2 * _BINS, 1, _FRAME),
    "conv1.weight": (128, _BINS, 3),
    "conv1.bias": (128,),
    "conv2.weight": (64, 128, 3),
    "conv2.bias": (64,),
    "conv3.weight": (64, 64, 3),
    "conv3.bias": (64,),
    "conv4.weight": (HIDDEN, 64, 3),
    "conv4.bias": (HIDDEN,),
    "lstm_cell.weight_ih": (4 * HIDDEN, HIDDEN),
    "lstm_cell.weight_hh": (4 * HIDDEN, HIDDEN),
    "lstm_cell.bias_ih": (4 * HIDDEN,),
    "lstm_cell.bias_hh": (4 * HIDDEN,),
    "final_conv.weight": (1, HIDDEN, 1),
    "final_conv.bias": (1,),
}
_ONNX_NAMES = {f"conv{i + 1}": f"encoder.{i}." for i in range(4)} | {"final_conv": "output."}


def packaged_weights() -> Path:
    """The weights inside the installed package silero-vad, which is not imported; ModelNotFound says how to get it."""
    spec = importlib.util.find_spec("silero_vad")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        # Not its silero_vad_16k.safetensors, which holds an older training.
        path = Path(folder, "data", "silero_vad_16k_sequence.onnx")
        if path.is_file():
            return path
    raise ModelNotFound(
        "the weights of the voice activity detector are not installed; run `make venv`, or: "
        "pip install --no-deps silero-vad==6.2.3"
    )


def _from_onnx(graph: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of `_SHAPES` for the initializers of the package's ONNX graph; what is not there is left out."""
    weights = {
        name: graph[theirs]
        for name in _SHAPES
        if (theirs := _ONNX_NAMES.get(name.split(".")[0], "") + name.split(".")[1]) in graph
    }
    gates = [tensor for name, tensor in graph.items() if "LSTM" in name]
    if [tuple(tensor.shape) for tensor in gates] == [(1, 512, 128), (1, 512, 128), (1, 1024)]:
        # ONNX orders the gates input, output, forget, cell; torch: input, forget, cell, output.
        parts = [*(tensor[0] for tensor in gates[:2]), *gates[2][0].chunk(2)]
        ordered = [torch.cat([part.chunk(4)[gate] for gate in (0, 2, 3, 1)]) for part in parts]
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights |= {f"lstm_cell.{name}": tensor for name, tensor in zip(names, ordered)}
    if "stft.forward_basis_buffer" in graph:
        weights["stft_conv.weight"] = graph["stft.forward_basis_buffer"]
    return weights


class SileroVAD:
    """The network. Stateless: whoever calls keeps the state, `VADStreams` for many live streams."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """`weights` as the safetensors file names them. ModelLoadError names what is missing or has another shape."""
        wrong = [name for name, shape in _SHAPES.items() if name not in weights or weights[name].shape != shape]
        if wrong:
            raise ModelLoadError(f"these are not the weights of the 16 kHz detector; wrong or missing: {wrong[:4]}")
        held = {name: weights[name].detach().float().contiguous() for name in _SHAPES}
        # The first convolution is a Fourier transform under a window, real half first; an FFT is ten times faster.
        self._window = torch.hann_window(_FRAME)
        basis = torch.fft.rfft(torch.eye(_FRAME, dtype=torch.float64) * self._window)  # [256, 129]
        found = held["stft_conv.weight"][:, 0].t()
        if not torch.allclose(found, torch.cat([basis.real, basis.imag], 1).float(), atol=1e-4):
            raise ModelLoadError("these are not the weights of the 16 kHz detector: its first layer is another")
        # A convolution as a matrix product over taps laid side by side: [3 * in, out].
        self._taps = [held[f"conv{i}.weight"].permute(2, 1, 0).flatten(0, 1).contiguous() for i in (1, 2, 3, 4)]
        self._biases = [held[f"conv{i}.bias"] for i in (1, 2, 3, 4)]
        self.lstm = [held[f"lstm_cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        self._out = held["final_conv.weight"].flatten()  # [128]
        self._out_bias = float(held["final_conv.bias"])

    @classmethod
    def load(cls, path: Path | None = None) -> SileroVAD:
        """From an .onnx or .safetensors file; None: the one of the installed package silero-vad.

        Raises ModelNotFound when that is not installed, ModelLoadError when the file holds something else.
        """
        path = path or packaged_weights()
        if path.suffix == ".onnx":
            return cls(_from_onnx(read_onnx_weights(path)))
        source = SafetensorsSource([path])
        return cls({name: source.get(name) for name in source.names() & _SHAPES.keys()})

    def file(self, pcm: PCM) -> Tensor:
        """Probability per window of a whole recording: pcm [T] at 16 kHz -> [ceil(T / 512)] float32.

        `pcm` is float32 in [-1, 1] or int16; an array may be read-only. The last window is completed with zeros. Beyond
        `pcm` itself this holds some 40 MB, however long that is.
        """
        return self.scan().push(pcm)

    def scan(self) -> VADScan:
        """`file` in pieces, for those who must not be held up by it."""
        return VADScan(self)

    def features(self, windows: Tensor) -> Tensor:
        """Convolutions: windows [N, 64 + 512] with their left context -> [N, 128]. Rows do not see each other."""
        num, width = len(windows), CONTEXT + WINDOW
        # reflect: the sample before the last one follows it
        padded = torch.cat([windows, windows[:, width - 1 - _PAD : width - 1].flip(1)], 1)
        frames = padded.unfold(1, _FRAME, _FRAME // 2) * self._window  # [N, 4, 256]
        x = torch.fft.rfft(frames).abs().view(num, _FRAMES * _BINS)
        # Taps that would fall on padding are left out instead of multiplied by zero.
        x = self._conv(x, 0, ((0, 2), (0, 3), (1, 4), (2, 4)), first_taps=(1, 0, 0, 0))
        x = self._conv(x, 1, ((0, 2), (1, 4)), first_taps=(1, 0))
        x = self._conv(x, 2, ((0, 2),), first_taps=(1,))
        return self._conv(x, 3, ((0, 1),), first_taps=(1,))

    def _conv(self, x: Tensor, layer: int, spans: Sequence[tuple[int, int]], first_taps: Sequence[int]) -> Tensor:
        """One convolution and ReLU. x [N, positions * in]; output position i sees input positions spans[i]."""
        taps, bias = self._taps[layer], self._biases[layer]
        width = len(taps) // 3
        out = x.new_empty(len(x), len(spans), len(bias))
        for i, ((lo, hi), first) in enumerate(zip(spans, first_taps)):
            weight = taps[first * width : (first + hi - lo) * width]
            out[:, i] = torch.addmm(bias, x[:, lo * width : hi * width], weight)
        return out.relu_().flatten(1)

    def cell(self, seen: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the LSTM: seen, hidden, memory [N, 128] -> the new hidden and memory."""
        hidden, memory = torch.lstm_cell(seen, (hidden, memory), *self.lstm)
        return hidden, memory

    def probability(self, hidden: Tensor) -> Tensor:
        """Output: hidden [N, 128] -> [N]."""
        return torch.sigmoid(F.relu(hidden) @ self._out + self._out_bias)


class VADScan:
    """One recording, heard in pieces of any number of windows: the probabilities do not depend on where it is cut."""

    def __init__(self, vad: SileroVAD) -> None:
        self._vad = vad
        self._context = torch.zeros(CONTEXT)
        self._state = (torch.zeros(1, 1, HIDDEN), torch.zeros(1, 1, HIDDEN))

    @torch.inference_mode()
    def push(self, pcm: PCM) -> Tensor:
        """The next samples [T], float32 or int16; whole windows, but for the last piece -> [ceil(T / 512)] float32.

        Raises InvalidRequest for other types and shapes. A minute takes some 25 ms on one core.
        """
        if pcm.ndim != 1 or pcm.dtype not in (torch.float32, torch.int16, np.float32, np.int16):
            raise InvalidRequest(
                f"audio is float32 or int16 of one dimension, not {pcm.dtype} of {pcm.ndim}", param="pcm"
            )
        num_windows = -(-len(pcm) // WINDOW)
        probs = torch.empty(num_windows)
        for lo in range(0, num_windows, _SEQUENCE):
            hi = min(lo + _SEQUENCE, num_windows)
            seen = torch.empty(hi - lo, HIDDEN)
            for start in range(lo, hi, _BLOCK):
                end = min(start + _BLOCK, hi)
                windows = self._windows(pcm, start, end)
                seen[start - lo : end - lo] = self._vad.features(windows)
            hidden, h, c = torch.lstm(seen[:, None], self._state, self._vad.lstm, True, 1, 0.0, False, False, False)
            self._state = (h, c)
            probs[lo:hi] = self._vad.probability(hidden[:, 0])
        if num_windows:
            self._context = windows[-1, -CONTEXT:].clone()
        return probs

    def _windows(self, pcm: PCM, start: int, end: int) -> Tensor:
        """Windows start..end with the context to their left, zeros after the end: [end - start, 576] float32."""
        lo, hi = start * WINDOW - CONTEXT, end * WINDOW
        part = pcm[max(lo, 0) : hi]
        held = part if isinstance(part, Tensor) else torch.from_numpy(part.copy())
        samples = held if held.dtype == torch.float32 else held.float() * (1 / 32768)
        before = [self._context] if lo < 0 else []
        after = [samples.new_zeros(hi - len(pcm))] if hi > len(pcm) else []
        return torch.cat([*before, samples, *after]).unfold(0, CONTEXT + WINDOW, WINDOW)


class VADStreams:
    """The state of up to `num` live streams, by slot: 1.3 KB each. Give `reset` a slot before its next stream."""

    def __init__(self, vad: SileroVAD, num: int) -> None:
        self.vad = vad
        self.num = num
        self._context = torch.zeros(num, CONTEXT)
        self._hidden = torch.zeros(num, HIDDEN)
        self._memory = torch.zeros(num, HIDDEN)

    def reset(self, slot: int) -> None:
        for state in (self._context, self._hidden, self._memory):
            state[slot] = 0

    @torch.inference_mode()
    def step(self, slots: Sequence[int], windows: Tensor) -> list[float]:
        """The next window of each of these streams: windows [N, 512] float32 -> N probabilities, as `file` gives them."""
        return [probs[0] for probs in self.run(slots, list(windows))]

    @torch.inference_mode()
    def run(self, slots: Sequence[int], pieces: Sequence[Tensor]) -> list[list[float]]:
        """The next windows of different streams: pieces[i] [n_i * 512] float32, n_i >= 1 -> n_i probabilities each.

        Convolutions of all windows run together; the LSTM takes as many steps as the longest piece has windows. A sample
        that is no number counts as zero, so that it cannot stay in the state.
        """
        assert len(set(slots)) == len(slots) == len(pieces), "each stream once"
        assert all(len(piece) and len(piece) % WINDOW == 0 for piece in pieces), "whole windows"
        if not slots:
            return []
        order = sorted(range(len(slots)), key=lambda i: -len(pieces[i]))  # longest first: the rest drops off at the end
        rows = torch.tensor([slots[i] for i in order])
        counts = [len(pieces[i]) // WINDOW for i in order]
        widths = [CONTEXT + count * WINDOW for count in counts]
        audio = torch.cat([part for row, i in zip(rows, order) for part in (self._context[row], pieces[i])])
        audio = torch.nan_to_num(audio, 0.0, 0.0, 0.0)
        parts = audio.split(widths)
        self._context[rows] = torch.stack([part[-CONTEXT:] for part in parts])
        seen = self.vad.features(torch.cat([part.unfold(0, CONTEXT + WINDOW, WINDOW) for part in parts]))
        firsts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        hidden, memory = self._hidden[rows], self._memory[rows]
        probs: list[list[float]] = [[] for _ in slots]
        active = len(order)
        for t in range(counts[0]):
            while counts[active - 1] <= t:
                active -= 1
            hidden[:active], memory[:active] = self.vad.cell(
                seen[firsts[:active] + t], hidden[:active], memory[:active]
            )
            for i, prob in zip(order, self.vad.probability(hidden[:active]).tolist()):
                probs[i].append(prob)
        self._hidden[rows], self._memory[rows] = hidden, memory
        return probs
