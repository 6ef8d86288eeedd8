"""Captions of each picture family equal what diffusers' own pipelines make of a prompt, and never depend on their batch."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5EncoderModel,
    T5TokenizerFast,
)

from motet.engine.errors import InvalidRequest, ModelLoadError
from motet.models.diffusion import Caption
from motet.models.diffusion_text import QWEN_TEMPLATE, ClipCaptions, FluxCaptions, QwenCaptions, Sd3Captions

from ..tiny import tiny_picture
from .picture_encoders import emoji, flux, qwen, sd3

CPU = torch.device("cpu")
PROMPTS = ["a red apple", "two small cats, on the left", "", "x " * 40]
CAPTIONS: dict[str, Any] = {"emoji": ClipCaptions, "flux": FluxCaptions, "sd3": Sd3Captions, "qwen": QwenCaptions}
LONG = "an owl " * 60  # beyond CLIP's 77 tokens, within T5's


@functools.cache
def made(family: str) -> Path:
    """A folder of text encoders with random weights, of hidden 16 to 40."""
    folder = Path(tempfile.mkdtemp(prefix=f"motet-tiny-{family}-"))
    if family == "emoji":
        emoji(folder)
    elif family == "flux":
        flux(folder)
    elif family == "sd3":
        sd3(folder)
    else:
        qwen(folder)
    return folder


def captions(family: str) -> Any:
    return CAPTIONS[family](made(family), CPU, torch.float32)


def part(family: str, cls: Any, name: str) -> Any:
    return cls.from_pretrained(made(family) / name)


def same(ours: Caption, words: torch.Tensor, vector: torch.Tensor | None) -> None:
    torch.testing.assert_close(ours.embeds, words, rtol=0, atol=1e-5)
    assert (ours.pooled is None) == (vector is None)
    if vector is not None:
        assert ours.pooled is not None
        torch.testing.assert_close(ours.pooled, vector, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["emoji", "flux", "sd3", "qwen"])
def test_a_caption_does_not_depend_on_its_batch(family: str) -> None:
    encode = captions(family)
    prompts = PROMPTS[:3]
    for prompt, one in zip(prompts, encode(prompts)):
        (alone,) = encode([prompt])
        assert alone.embeds.shape == one.embeds.shape
        same(one, alone.embeds, alone.pooled)
        assert one.embeds.untyped_storage().nbytes() == one.embeds.nbytes  # the batch is not kept alive


def test_words_of_motet_emoji() -> None:
    encode = captions("emoji")
    model = part("emoji", CLIPTextModel, "text_encoder")
    ids = [[1, 4, 5, 6, 3], [1, 7, 2, 9, 3], [1, 3]]  # "a red apple", "two ??? cats", the unconditional one
    for row, caption in zip(ids, encode(["a red apple", "two purple cats", ""])):
        out = model(torch.tensor([row]))
        same(caption, out.last_hidden_state[0], out.pooler_output[0])
    # As the recipe trains: padded to the last place, cut by the length.
    out = model(torch.tensor([ids[0] + [0] * 11]))
    same(encode(["a red apple"])[0], out.last_hidden_state[0, :5], out.pooler_output[0])


def test_a_prompt_beyond_the_position_table_is_refused() -> None:
    encode = captions("emoji")
    assert len(encode(["apple " * 14])[0].embeds) == encode.max_tokens == 16
    with pytest.raises(InvalidRequest, match="expected at most 16 tokens, got 17") as raised:
        encode(["a", "apple " * 15])
    assert raised.value.param == "prompt"


def test_flux_equals_its_pipeline() -> None:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline(
        scheduler=None,
        vae=None,
        transformer=None,
        text_encoder=part("flux", CLIPTextModel, "text_encoder"),
        tokenizer=part("flux", CLIPTokenizer, "tokenizer"),
        text_encoder_2=part("flux", T5EncoderModel, "text_encoder_2"),
        tokenizer_2=part("flux", T5TokenizerFast, "tokenizer_2"),
    )
    prompts = [*PROMPTS, LONG]
    with torch.no_grad():
        words, vectors, _ = pipeline.encode_prompt(prompts, device=CPU)
    assert words.shape == (5, 512, 24)
    encode = captions("flux")
    for row, caption in enumerate(encode(prompts)):
        same(caption, words[row], vectors[row])
    with pytest.raises(InvalidRequest, match="prompt: expected at most 512 tokens, got"):
        encode(["x " * 1000])


@pytest.mark.parametrize("with_t5", [True, False])
def test_sd3_equals_its_pipeline(with_t5: bool, tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    folder = made("sd3")
    transformer = SD3Transformer2DModel(
        sample_size=4, num_layers=1, attention_head_dim=4, num_attention_heads=2, joint_attention_dim=40,
        caption_projection_dim=8, pooled_projection_dim=28, pos_embed_max_size=4,
    )  # fmt: skip
    if not with_t5:
        shutil.copytree(folder, tmp_path / "sd3", ignore=shutil.ignore_patterns("*_3"))
        folder = tmp_path / "sd3"
        transformer.save_config(folder / "transformer")
    pipeline = StableDiffusion3Pipeline(
        scheduler=None,
        vae=None,
        transformer=transformer,
        text_encoder=part("sd3", CLIPTextModelWithProjection, "text_encoder"),
        tokenizer=part("sd3", CLIPTokenizer, "tokenizer"),
        text_encoder_2=part("sd3", CLIPTextModelWithProjection, "text_encoder_2"),
        tokenizer_2=part("sd3", CLIPTokenizer, "tokenizer_2"),
        text_encoder_3=part("sd3", T5EncoderModel, "text_encoder_3") if with_t5 else None,
        tokenizer_3=part("sd3", T5TokenizerFast, "tokenizer_3") if with_t5 else None,
    )
    prompts = ["a red apple", "two cats", "x " * 50]
    encode = Sd3Captions(folder, CPU, torch.float32)
    with torch.no_grad():
        words, without, vectors, vectors_without = pipeline.encode_prompt(prompts, None, None, device=CPU)
    assert words.shape == (3, 77 + 256, 40)
    for row, caption in enumerate(encode(prompts)):
        same(caption, words[row], vectors[row])
    same(encode([""])[0], without[0], vectors_without[0])
    most = 256 if with_t5 else 77
    with pytest.raises(InvalidRequest, match=f"prompt: expected at most {most} tokens, got"):
        encode(["a", "x " * 300])


def test_qwen_equals_its_pipeline() -> None:
    from diffusers import QwenImagePipeline

    tokenizer = part("qwen", Qwen2Tokenizer, "tokenizer")
    assert len(tokenizer(QWEN_TEMPLATE.split("{}")[0])["input_ids"]) == 34
    pipeline = QwenImagePipeline(
        scheduler=None,
        vae=None,
        transformer=None,
        text_encoder=part("qwen", Qwen2_5_VLForConditionalGeneration, "text_encoder"),
        tokenizer=tokenizer,
    )
    with torch.no_grad():
        words, mask = pipeline.encode_prompt(PROMPTS, device=CPU)
    encode = captions("qwen")
    found = encode(PROMPTS)
    assert [len(caption.embeds) for caption in found] == mask.sum(1).tolist()
    for row, caption in enumerate(found):
        same(caption, words[row, : len(caption.embeds)], None)
    assert not any("visual" in name or "lm_head" in name for name, _ in encode._encoder.named_parameters())
    with pytest.raises(InvalidRequest, match="prompt: expected at most 1024 tokens, got"):
        encode(["x" * 1100])


def test_braces_of_a_prompt_are_words() -> None:
    encode = captions("qwen")
    assert len(encode(["{}{0}{a!r}"])[0].embeds) == len(encode(["a" * 10])[0].embeds)


def test_loading_leaves_the_default_dtype_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's: engines that run, or load in other threads, would make tensors of it."""
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", seen.append)
    folder = tiny_picture(tmp_path / "tiny")
    seen.clear()
    captions = ClipCaptions(folder, CPU, torch.bfloat16)
    assert set(seen) <= {torch.float32}
    assert captions(["a red apple"])[0].embeds.dtype is torch.bfloat16


def test_threads_share_a_tokenizer() -> None:
    """Fast tokenizers raise "Already borrowed" when padding and truncation of two calls meet."""
    encode = captions("flux")._clip_tokens
    expected = encode.of_length(["a red apple"], 77)
    wrong: list[object] = []

    def work(length: int) -> None:
        for _ in range(40):
            try:
                ids = encode.of_length(["a red apple"], length)
                assert torch.equal(ids, expected[:, :length]) or length < 77
                assert encode.ids(["a red apple"]) == [expected[0, :11].tolist()]
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in (77, 20, 9, 77)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _renamed(folder: Path, name: str, rename: Any) -> None:
    path = folder / name / "model.safetensors"
    save_file({rename(key): value for key, value in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("emoji", lambda name: f"text_model.{name}"),  # up to transformers 4
        ("qwen", lambda name: re.sub(r"^model\.", "model.language_model.", name)),  # from transformers 4.52 on
    ],
)
def test_names_of_other_times(family: str, rename: Any, tmp_path: Path) -> None:
    folder = tmp_path / family
    shutil.copytree(made(family), folder)
    _renamed(folder, "text_encoder", rename)
    (ours,), (expected,) = (
        CAPTIONS[family](folder, CPU, torch.float32)(["a red apple"]),
        captions(family)(["a red apple"]),
    )
    same(ours, expected.embeds, expected.pooled)


def broken(tmp_path: Path, change: Any) -> Path:
    folder = tmp_path / "emoji"
    shutil.copytree(made("emoji"), folder)
    change(folder)
    return folder


def _narrow(folder: Path) -> None:
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))


def _deep(folder: Path) -> None:
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def _pickled(folder: Path) -> None:
    (folder / "text_encoder" / "model.safetensors").unlink()
    torch.save(nn.Linear(1, 1).state_dict(), folder / "text_encoder" / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "expected a folder tokenizer"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{"), "tokenizer: not a tokenizer"),
        (lambda folder: shutil.rmtree(folder / "text_encoder"), "expected a folder text_encoder"),
        (lambda folder: (folder / "text_encoder" / "config.json").write_text("{"), "text_encoder: not a CLIPTextModel"),
        (_narrow, "1 mismatched weights"),
        (_deep, "16 missing weights"),
        (_pickled, "text_encoder: not a CLIPTextModel"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        ClipCaptions(broken(tmp_path, change), CPU, torch.float32)


def test_lengths_are_counted_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = captions("qwen")

    def never(**_: Any) -> Sequence[int]:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(encode, "_encoder", never)
    with pytest.raises(InvalidRequest):
        encode(["a", "y" * 5000])
