"""models/gguf.py: the reader and the block formats against the `gguf` package, and damaged files of every kind."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.engine.errors import ModelLoadError
from motet.models import gguf as reader
from motet.models.gguf import TYPES, GGUFFile

QUANTIZED = ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")


def write(path: Path, version: int = 3) -> Path:
    """A small GGUF with every kind of metadata and five tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße 🙂")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.words", ["x", "", "ĠĠ"])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5), np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 8)).astype(np.float16))
    for name in ("Q4_1", "Q8_0", "BF16"):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(rng.standard_normal((4, 64), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        data = bytearray(path.read_bytes())
        data[4:8] = struct.pack("<I", version)
        path.write_bytes(data)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_the_reference_reads(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "small.gguf", version)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(str(path))
    assert ours.version == version
    for key, item in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == item.contents(), key
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(ours.array(tensor.name), want.reshape(ours.tensors[tensor.name].shape))


@pytest.mark.parametrize("name", QUANTIZED)
def test_block_formats_are_bit_for_bit_the_reference(name: str) -> None:
    kind = next(t for t in TYPES.values() if t.name == name)
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (7, 40, kind.num_bytes), np.uint8)
    with np.errstate(all="ignore"):  # random bytes are now and then infinite scales
        want = gguf.quants.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[name])
        got = reader.dequantize(blocks, kind)
    assert got.dtype == np.float32 and got.shape == (7, 40 * kind.size)
    np.testing.assert_array_equal(got.view(np.uint32)[np.isfinite(want)], want.view(np.uint32)[np.isfinite(want)])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_block_types_have_the_reference_sizes() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.size, kind.num_bytes)


def test_a_large_vocabulary_parses_fast(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "v.gguf"), "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"Ġtoken{i}" for i in range(50_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    best = 9.0
    for _ in range(3):
        start = time.process_time()
        file = GGUFFile(tmp_path / "v.gguf")
        best = min(best, time.process_time() - start)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 50_000
    assert best < 0.3


# ------------------------------------------------------------------------------------------------------------ bad files


def refused(path: Path) -> str:
    """The message with which a file is refused; it must come fast and name the file, never its folder."""
    start = time.process_time()
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert time.process_time() - start < 2
    assert path.name in caught.value.message and str(path.parent) not in caught.value.message
    return caught.value.message


def test_not_a_gguf(tmp_path: Path) -> None:
    for data in (
        b"",
        b"GGU",
        b"GGUF",
        b"PK\x03\x04" * 100,
        b"GGUF" + struct.pack("<I", 1) + bytes(64),
        b"GGUF" + struct.pack(">I", 3) + bytes(64),
    ):
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        refused(path)
    refused(tmp_path / "absent.gguf")
    refused(tmp_path)


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(data) - 40, 7), len(data) - 33]:
        cut.write_bytes(data[:length])
        refused(cut)


def header(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "data",
    [
        header(1 << 62, 0),
        header(0, 1 << 62),
        header(0, 1, struct.pack("<Q", 1 << 63) + b"key"),
        header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(64)),  # an array of 2^60 numbers
        header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(64)),  # of strings
        header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ", 9, 1) * 400),  # nested
        header(0, 1, text(b"k") + struct.pack("<I", 77) + bytes(64)),
        header(0, 1, text(b"k") + struct.pack("<IQ", 8, 1 << 50) + bytes(64)),
        header(0, 2, (text(b"k") + struct.pack("<II", 4, 1)) * 2),  # a key twice
        header(0, 1, text(b"\xff\xfe") + struct.pack("<II", 4, 1) + bytes(32)),
        header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 1 << 61, 0, 0) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<I4QIQ", 4, *[1 << 40] * 4, 0, 0) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<I", 900) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(64)),  # half a block
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 63) + bytes(64)),
        header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 3) + bytes(64)),  # not aligned
        header(2, 0, (text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + bytes(64)),  # a tensor twice
    ],
)
def test_lying_lengths_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(data)
    refused(path)


def test_an_unreadable_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 32, 20, 0) + bytes(64)))
    assert "IQ4_NL" in refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_never_does_worse_than_an_error(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
        with np.errstate(all="ignore"):
            for name in file.tensors:
                file.array(name)
    except ModelLoadError:
        pass
