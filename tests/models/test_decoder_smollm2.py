"""The packaged SmolLM2-135M-Instruct on our decoder against `transformers`, both from the same GGUF file, in fp32."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from motet.models.build import CausalModel, build_model
from motet.models.loader import open_weights, read_config, resolve
from motet.models.tokenizer import load_tokenizer

from .paged import PagedSequences

PATH = resolve("smollm2-135m-instruct").path
NUM_NEW = 128
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "The quick brown fox",
    "List three uses of copper.",
    "Why is the sky blue?",
    "Once upon a time in a small village",
    "2 + 2 =",
    "Translate 'good morning' into Spanish.",
    "Explain photosynthesis to a child.",
    "The year 1969 is known for",
    "Roses are red,",
    "SELECT name FROM users WHERE",
    "A recipe for pancakes:",
    "Dear Sir or Madam,",
    "How do airplanes fly?",
    "My favourite animal is",
    "In mathematics, a prime number",
    "Who wrote Hamlet?",
    "The opposite of cold is",
)


@functools.cache
def ours() -> CausalModel:
    return build_model(read_config(PATH), open_weights(PATH), dtype=torch.float32, weights="dequantize")


@functools.cache
def peer() -> Any:
    """The model of `transformers` with weights as its own GGUF reader dequantizes them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(PATH))["config"])
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=skeleton)["tensors"]
    model = LlamaForCausalLM(config)
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    model.tie_weights()
    return model.eval()


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    tokenizer = load_tokenizer(PATH)
    return tuple(tuple(tokenizer.encode(text)) for text in PROMPTS)


def test_logits_equal_transformers() -> None:
    ids = [i for prompt in prompts()[:6] for i in prompt]
    logits = PagedSequences(ours().kv_specs(), 1, len(ids), block_size=16).run(ours(), [(0, ids)])[0]
    with torch.inference_mode():
        expected = peer()(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max() <= 1e-3


def test_greedy_text_equals_transformers() -> None:
    """Twenty prompts in one batch, 128 tokens each. Teacher forcing: while every one of our tokens is the argmax of
    `transformers` given the tokens before it, both greedy texts are the same."""
    model = ours()
    sequences = PagedSequences(model.kv_specs(), len(PROMPTS), max(map(len, prompts())) + NUM_NEW, block_size=16)
    texts = [list(prompt) for prompt in prompts()]
    chunks: list[tuple[int, list[int]]] = [(i, text[:]) for i, text in enumerate(texts)]
    for _ in range(NUM_NEW):
        chosen = [int(logits[-1].argmax()) for logits in sequences.run(model, chunks)]
        chunks = [(i, [token]) for i, token in enumerate(chosen)]
        for text, token in zip(texts, chosen):
            text.append(token)
    with torch.inference_mode():
        for prompt, text in zip(prompts(), texts):
            theirs = peer()(torch.tensor([text[:-1]])).logits[0].argmax(-1).tolist()
            assert theirs[len(prompt) - 1 :] == text[len(prompt) :]


@pytest.mark.parametrize("quantized", ["q4_1", "int8", "int4"])
def test_low_precision_keeps_the_distribution(quantized: str) -> None:
    """bf16 compute over quantized weights: the mean KL divergence from fp32 stays small (nats per token)."""
    ids = [i for prompt in prompts() for i in prompt]
    whole = PagedSequences(ours().kv_specs(), 1, len(ids), block_size=16).run(ours(), [(0, ids)])[0]
    if quantized == "q4_1":
        low = build_model(read_config(PATH), open_weights(PATH), dtype=torch.bfloat16)
    else:
        low = build_model(
            read_config(PATH), open_weights(PATH), dtype=torch.bfloat16, weights="dequantize", quantize=quantized
        )  # type: ignore[arg-type]
    sequences = PagedSequences(low.kv_specs(), 1, len(ids), block_size=16, dtype=torch.bfloat16)
    got = sequences.run(low, [(0, ids)])[0].log_softmax(-1)
    expected = whole.log_softmax(-1)
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    assert divergence <= {"q4_1": 0.01, "int8": 0.02, "int4": 0.1}[quantized]
