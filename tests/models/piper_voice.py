"""A voice of ONNX in Piper's layout, so small that what it says can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

RATE = 16_000
PER_ID = 400  # samples of one id: 25 ms
SYMBOLS = ["_", "^", "$", " ", ".", ",", "?", *"abcdefghijklmnopqrstuvwxyz", "ə", "ˈ", "\u0301"]
TABLE = {symbol: [index] for index, symbol in enumerate(SYMBOLS)}


def write_voice(folder: Path, *, name: str = "tiny", speakers: int = 1, graph: bool = True, **changes: Any) -> Path:
    """X.onnx and X.onnx.json. An id sounds as PER_ID samples of id / 100 + speaker / 10, and noise of 0.01 * noise_scale."""
    path = folder / f"{name}.onnx"
    if graph:
        onnx.save(_graph(speakers), path)
    described = {
        "audio": {"sample_rate": RATE, "quality": "low"},
        "phoneme_type": "text",
        "phoneme_id_map": TABLE,
        "num_symbols": len(SYMBOLS),
        "num_speakers": speakers,
        "speaker_id_map": {} if speakers == 1 else {f"s{n}": n for n in range(speakers)},
        "language": {"code": "en_GB"},
        "inference": {"noise_scale": 0.5, "length_scale": 1.0, "noise_w": 0.8},
        "piper_version": "1.0.0",
    } | changes
    path.with_name(path.name + ".json").write_text(json.dumps(described))
    return path


def samples(prompt: list[int]) -> NDArray[np.float32]:
    """What the graph says without noise."""
    return np.repeat(np.array(prompt[1:], np.float32) / 100 + prompt[0] / 10, PER_ID)


def _graph(speakers: int) -> onnx.ModelProto:
    def constant(name: str, values: Any, dtype: str) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(np.array(values, dtype), name)

    make = helper.make_node
    nodes = [
        make("Cast", ["input"], ["floats"], to=TensorProto.FLOAT),
        make("Mul", ["floats", "hundredth"], ["levels"]),
        make("Unsqueeze", ["levels", "last"], ["column"]),
        make("Tile", ["column", "times"], ["tiled"]),
        make("Reshape", ["tiled", "shape"], ["loud"]),
        make("RandomNormalLike", ["loud"], ["random"]),
        make("Gather", ["scales", "first"], ["noise_scale"]),
        make("Mul", ["noise_scale", "hundredth"], ["noise_level"]),
        make("Mul", ["random", "noise_level"], ["noise"]),
        make("Add", ["loud", "noise"], ["single" if speakers > 1 else "output"]),
        make("Identity", ["input_lengths"], ["unused"]),
    ]
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.INT64, [1, "t"]),
        helper.make_tensor_value_info("input_lengths", TensorProto.INT64, [1]),
        helper.make_tensor_value_info("scales", TensorProto.FLOAT, [3]),
    ]
    if speakers > 1:
        inputs.append(helper.make_tensor_value_info("sid", TensorProto.INT64, [1]))
        nodes += [
            make("Cast", ["sid"], ["speaker"], to=TensorProto.FLOAT),
            make("Mul", ["speaker", "tenth"], ["shift"]),
            make("Add", ["single", "shift"], ["output"]),
        ]
    constants = [
        constant("hundredth", 0.01, "float32"), constant("tenth", 0.1, "float32"), constant("last", [2], "int64"),
        constant("times", [1, 1, PER_ID], "int64"), constant("shape", [1, 1, -1], "int64"), constant("first", 0, "int64"),
    ]  # fmt: skip
    outputs = [
        helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1, "n"]),
        helper.make_tensor_value_info("unused", TensorProto.INT64, [1]),
    ]
    graph = helper.make_graph(nodes, "voice", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
