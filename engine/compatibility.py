"""Which techniques go together: one table, read by config checks, docs and tests.

"works": nothing to do; "refused": the configuration is an error; "off": the second technique is switched off, and the
resolved configuration says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .config import EngineConfig

Verdict = Literal["works", "refused", "off"]

# (technique, technique): (verdict, why)
TABLE: dict[tuple[str, str], tuple[Verdict, str]] = {
    ("speculation", "overlap"): ("off", "a proposer must see token N before it drafts N+1"),
    ("speculation", "prefix_caching"): ("works", "unverified drafts are never published"),
    ("speculation", "tensor_parallel"): ("works", "every rank accepts by the same broadcast samples"),
    ("prompt_logprobs", "prefix_caching"): ("off", "cached positions have no logits: such requests skip the lookup"),
    ("mean_pooling", "prefix_caching"): ("off", "cached positions have no hidden rows: such requests skip the lookup"),
    ("open_input", "prefix_caching"): ("works", "the ids known at admission are looked up"),
    ("int8", "tensor_parallel"): ("works", "each rank quantizes its own slice"),
    ("int4", "tensor_parallel"): ("works", "slices are aligned to groups"),
    ("fp8", "tensor_parallel"): ("works", "each rank quantizes its own slice"),
    ("fp8", "cpu"): ("refused", "CPUs here multiply no FP8: use int8"),
    ("fp8", "float32"): ("refused", "FP8 products come out as bfloat16"),
    ("fp8", "float16"): ("refused", "FP8 products come out as bfloat16"),
    ("kv_int8", "prefix_caching"): ("works", "the cache's format is part of a block's key"),
    ("kv_int8", "speculation"): ("works", "a row carries its scale, so accepted rows move whole"),
    ("kv_int8", "tensor_parallel"): ("works", "scales are per head"),
    ("kv_int8", "deterministic"): ("works", "a token is quantized by itself, whatever its batch"),
    ("window_layers", "prefix_caching"): ("works", "a hit must hold on every KV group"),
    ("tensor_parallel", "cuda_graphs"): ("off", "collectives inside recordings are not verified"),
    ("deterministic", "cuda"): ("refused", "no batch-invariant kernels on CUDA yet"),
    ("deterministic", "bfloat16"): ("refused", "row-invariant multiplication exists for float32 only"),
    ("deterministic", "float16"): ("refused", "row-invariant multiplication exists for float32 only"),
    ("deterministic", "int8"): ("refused", "row-invariant multiplication exists for float32 only"),
    ("deterministic", "int4"): ("refused", "row-invariant multiplication exists for float32 only"),
    ("deterministic", "fp8"): ("refused", "row-invariant multiplication exists for float32 only"),
    ("float16", "cpu"): ("refused", "CPUs here multiply float16 slower than float32: use bfloat16 or float32"),
    ("multi_codebook", "speculation"): ("refused", "a draft would have to guess every codebook of its position"),
    ("multi_codebook", "tensor_parallel"): ("refused", "the depth decoder is not split over ranks"),
    ("multi_codebook", "cuda_graphs"): ("off", "recordings take no side ids"),
    ("multi_codebook", "prefix_caching"): ("works", "side ids are part of a block's key"),
    ("multi_codebook", "overlap"): ("works", "side ids are written with the primary id, before anybody has seen it"),
}


def verdict(a: str, b: str) -> tuple[Verdict, str]:
    """The table's word on a pair, in either order; a pair that is not listed works."""
    return TABLE.get((a, b)) or TABLE.get((b, a)) or ("works", "")


def techniques(config: EngineConfig) -> set[str]:
    """Names of the techniques that a configuration asks for."""
    asked = {
        "speculation": bool(config.speculation),
        "overlap": config.depth > 0,
        "prefix_caching": config.enable_prefix_caching,
        "tensor_parallel": config.tp_size > 1,
        "deterministic": config.deterministic,
        "int8": config.quantize == "int8",
        "int4": config.quantize == "int4",
        "fp8": config.quantize == "fp8",
        "kv_int8": config.kv_dtype == "int8",
        "float32": config.dtype == "float32",
        "bfloat16": config.dtype == "bfloat16",
        "float16": config.dtype == "float16",
        "cuda_graphs": config.graphs == "auto" and config.device != "cpu",
        "cuda": config.device.startswith("cuda"),
        "cpu": config.device == "cpu",
    }
    return {name for name, on in asked.items() if on}


def check_config(config: EngineConfig, also: frozenset[str] = frozenset()) -> list[str]:
    """Raise ValueError for a refused pair; return a line for each technique that goes off by itself.

    `also` names what a loaded model brings along ("multi_codebook").
    """
    names = techniques(config) | also
    notes = []
    for (a, b), (word, why) in TABLE.items():
        if a in names and b in names:
            if word == "refused":
                raise ValueError(f"{a} with {b} is refused: {why}")
            if word == "off":
                notes.append(f"{b} is off because of {a}: {why}")
    return notes
