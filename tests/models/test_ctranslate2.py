"""models/ctranslate2.py: every stored type, and files that lie about themselves."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.errors import ModelLoadError
from motet.models.ctranslate2 import CTranslate2File, CTranslate2WhisperSource
from motet.models.registry import resolve
from motet.models.whisper import load_whisper

from .ctranslate2_writing import model_bytes, variable, write_whisper
from .whisper_models import TINY, small_hf, speech_like


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "model.bin"
    path.write_bytes(raw)
    return path


def test_types_and_aliases(tmp_path: Path) -> None:
    values = {
        "odd": torch.tensor([1], dtype=torch.int8),  # moves everything after it off alignment
        "a": torch.randn(3, 5),
        "b": torch.randn(2).half(),
        "c": torch.randn(4).bfloat16(),
        "d": torch.tensor(-7, dtype=torch.int32),
        "none": torch.zeros(0, 3),
    }
    file = CTranslate2File(write(tmp_path, model_bytes(values, {"e": "d"}, spec="Any")))
    assert file.spec == "Any"
    for name, value in values.items():
        assert torch.equal(file.get(name), value)
    assert file.scalar("e", 0) == -7 and file.scalar("absent", 9) == 9
    with pytest.raises(ModelLoadError, match="whole number"):
        file.scalar("b", 0)
    with pytest.raises(ModelLoadError, match="there is no"):
        file.get("absent")


@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16", "int16", "int8"])
def test_whisper_in_every_form(tmp_path: Path, form: str) -> None:
    """The same model through safetensors and through CTranslate2, but for the rounding of the form."""
    hf = small_hf()
    hf.save_pretrained(tmp_path / "hf")
    (tmp_path / "ct2").mkdir()
    write_whisper(tmp_path / "ct2", hf.state_dict(), heads=(2, 4), form=form)
    for name in ("hf", "ct2"):
        shutil.copy(TINY / "tokenizer.json", tmp_path / name / "tokenizer.json")
    assert resolve(str(tmp_path / "ct2")).kind == "asr"
    expected, found = load_whisper(tmp_path / "hf"), load_whisper(tmp_path / "ct2")
    assert found.config == expected.config
    mel = expected.log_mel([speech_like(1.0)])
    rows = []
    for model in (expected, found):
        cache = model.new_cache(1)
        model.set_audio(cache, [0], model.encode(mel))
        rows.append(model.logits(model.decode([50257, 4], [0, 0], [0, 1], cache)).log_softmax(-1))
    error = float((rows[0] - rows[1]).abs().max())
    assert error <= {"float32": 1e-5, "float16": 0.05, "bfloat16": 0.4, "int16": 0.4, "int8": 1.5}[form]
    if form == "int8":
        assert found._decoder[0].qkv.weight.format == "fp32"  # computes in fp32 with the exact values
        kept = load_whisper(tmp_path / "ct2", dtype=torch.bfloat16)
        assert kept._decoder[0].up.weight.format in ("int8", "bf16")


def test_slices_of_a_source(tmp_path: Path) -> None:
    hf = small_hf()
    write_whisper(tmp_path, hf.state_dict(), heads=(2, 4), form="float32")
    source = CTranslate2WhisperSource(tmp_path)
    name = "model.decoder.layers.1.encoder_attn.v_proj.weight"
    assert source.shape(name) == (64, 64)
    assert torch.equal(source.get(name), hf.state_dict()[name])  # type: ignore[arg-type]
    for dim in (0, 1):
        part = source.get_slice(name, dim, 3, 9)
        assert isinstance(part, torch.Tensor) and torch.equal(part, hf.state_dict()[name].narrow(dim, 3, 6))
    with pytest.raises(ModelLoadError, match="no slice"):
        source.get_slice(name, 0, 3, 65)
    with pytest.raises(ModelLoadError, match="no tensor"):
        source.get("model.decoder.layers.9.fc1.weight")


def bad_files() -> dict[str, bytes]:
    good = model_bytes({"a": torch.ones(2)})
    huge = good.replace(struct.pack("<BIBI", 1, 2, 0, 8), struct.pack("<BIBI", 1, 1 << 30, 0, 1 << 31))
    return {
        "empty": b"",
        "cut in the header": good[:9],
        "cut in the data": good[:-8],
        "no aliases": good[:-4],
        "old": model_bytes({}, version=2),
        "pickle": b"\x80\x02}q\x00.",
        "zip": b"PK\x03\x04" + bytes(60),
        "larger than the file": huge,
        "wrong size": good.replace(struct.pack("<BIBI", 1, 2, 0, 8), struct.pack("<BIBI", 1, 2, 0, 4)),
        "unknown type": good.replace(struct.pack("<BIBI", 1, 2, 0, 8), struct.pack("<BIBI", 1, 2, 9, 8)),
        "many dimensions": good.replace(struct.pack("<BIBI", 1, 2, 0, 8), struct.pack("<BIBI", 200, 2, 0, 8)),
        "many variables": struct.pack("<I", 6) + b"\2\0x\0" + struct.pack("<II", 1, 1 << 31),
        "twice": model_bytes({"a": torch.ones(2)}).replace(
            struct.pack("<II", 3, 1), struct.pack("<II", 3, 2)
        )[:-4] + variable("a", torch.ones(1)) + bytes(4),
        "alias to nothing": model_bytes({"a": torch.ones(2)}, {"b": "c"}),
    }  # fmt: skip


@pytest.mark.parametrize("what", bad_files())
def test_files_that_lie(tmp_path: Path, what: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^model\.bin: "):
        CTranslate2File(write(tmp_path, bad_files()[what]))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_damage_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int) -> None:
    raw = bytearray(model_bytes({"a": torch.ones(4, 4), "b": torch.ones(3).half()}, {"c": "a"}))
    raw[at % len(raw)] = byte
    path = write(tmp_path_factory.getbasetemp(), bytes(raw[: len(raw) - cut if cut < 40 else len(raw)]))
    try:
        file = CTranslate2File(path)
    except ModelLoadError:
        return
    for name in file.variables:
        file.get(name)


def test_other_models_and_missing_weights(tmp_path: Path) -> None:
    write(tmp_path, model_bytes({}, spec="TransformerSpec"))
    with pytest.raises(ModelLoadError, match="expected a Whisper model"):
        load_whisper(tmp_path)
    write(tmp_path, model_bytes({}))
    with pytest.raises(ModelLoadError, match="expected layers"):
        load_whisper(tmp_path)
    state = dict(small_hf().state_dict())
    write_whisper(tmp_path, state, heads=(2, 4), form="float32")
    (tmp_path / "model.bin").write_bytes(
        (tmp_path / "model.bin")
        .read_bytes()
        .replace(b"decoder/layer_1/ffn/linear_0/bias", b"decoder/layer_1/ffn/linear_0/bios")
    )
    shutil.copy(TINY / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"missing: model\.decoder\.layers\.1\.fc1\.bias"):
        load_whisper(tmp_path)
