"""Tiny random models on disk, and a loop that runs requests through an engine to the end."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from motet.engine.config import EngineConfig
from motet.engine.llm_engine import LLMEngine
from motet.engine.load import load_llm
from motet.engine.types import TERMINAL, AnyEvent, Done, Request, SamplingParams, StepPlan, Tokens
from motet.kernels.dispatch import cpu_ops

VOCAB = 128
EOS = 2
_ids = itertools.count()


@functools.cache
def llama() -> Path:
    """Two layers of full attention, hidden 32, vocabulary 128; weights large enough that greedy text varies."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=EOS, bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(transformers.LlamaForCausalLM, config)


@functools.cache
def windowed() -> Path:
    """Four layers: window, full, window, full (window of 12 tokens): two KV groups."""
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=12, eos_token_id=EOS,
        bos_token_id=1, query_pre_attn_scalar=8,
    )  # fmt: skip
    return _save(transformers.Gemma2ForCausalLM, config)


def engine(path: Path | None = None, *, proposer: Any = None, clock: Any = None, **config: Any) -> LLMEngine:
    """A float32 CPU engine over a tiny model: 4-token blocks, 64 of them, unless told otherwise."""
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "deterministic": cpu_ops() is not None,
        "block_size": 4, "num_blocks": 257, "max_num_seqs": 8,
        "max_num_batched_tokens": 64, "depth": 0, "flight_recorder": 4096,
    } | config  # fmt: skip
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    return load_llm(str(path or llama()), EngineConfig(**settings), proposer=proposer, **more)


def request(prompt: Iterable[int], *, name: str = "", **params: Any) -> Request:
    """A greedy request of 16 tokens, unless told otherwise. Fields of Request may be given too."""
    fields = {key: params.pop(key) for key in list(params) if key in Request.__struct_fields__}
    settings = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    return Request(
        request_id=name or f"r{next(_ids)}",
        model="tiny",
        prompt=list(prompt),
        params=SamplingParams(**settings),
        **fields,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Seeded random ids, no EOS among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def drain(running: LLMEngine, *, check: bool = True, max_steps: int = 5000) -> list[AnyEvent]:
    """Step until there is no work; the block pool's invariants hold after each step."""
    events = []
    for _ in range(max_steps):
        if not running.has_work():
            return events
        events += running.step()
        if check:
            running.scheduler.cache.pool.check()
    raise AssertionError(f"still working after {max_steps} steps")


def run(running: LLMEngine, requests: list[Request]) -> dict[str, list[AnyEvent]]:
    """Submit together, drain, and group the events. Each request must end in exactly one terminal event, numbered in order."""
    for item in requests:
        running.submit(item)
    by_id: dict[str, list[AnyEvent]] = {item.request_id: [] for item in requests}
    for event in drain(running):
        by_id[event.request_id].append(event)
    for events in by_id.values():
        assert [isinstance(event, TERMINAL) for event in events] == [False] * (len(events) - 1) + [True]
        assert [event.seq for event in events] == list(range(len(events)))
    return by_id


def tokens(events: list[AnyEvent]) -> list[int]:
    """All output ids of one request."""
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def answers(running: LLMEngine, requests: list[Request]) -> list[list[int]]:
    """Output ids of each request, in order; all must end well."""
    by_id = run(running, requests)
    for events in by_id.values():
        assert isinstance(events[-1], Done), events[-1]
    return [tokens(by_id[item.request_id]) for item in requests]


def one(running: LLMEngine, item: Request) -> list[int]:
    return answers(running, [item])[0]


def plans(running: LLMEngine) -> list[StepPlan]:
    """What the flight recorder holds."""
    return [plan for plan, _ in running.flight_recorder]


def all_free(running: LLMEngine) -> bool:
    """No block is leaked, no slot is taken, no request is remembered."""
    pool = running.scheduler.cache.pool
    pool.check()
    return pool.num_free == pool.num_usable and running.num_requests() == 0 and not running.scheduler.running


def _save(cls: Any, config: Any) -> Path:
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # the default 0.02 gives nearly flat logits
    path = Path(tempfile.mkdtemp(prefix="motet-tiny-"))
    model.save_pretrained(path)
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": EOS}))
    return path
