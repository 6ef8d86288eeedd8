"""Configuration of engines and hosts: frozen, checked when made, never written back. Torch-free.

`EngineConfig` is one engine's; `HostConfig` is one process's. What "auto" became is a separate object (`resolved`), made
by the engine at load and shown by `motet serve --print-config` and in `ModelInfo.extra`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .compatibility import check_config

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One LLM engine. Zero and "auto" mean: chosen from model and machine at load."""

    dtype: Dtype = "auto"  # of activations; auto: bfloat16 where the CPU or GPU multiplies it, else float32
    weights: Literal["auto", "keep", "dequantize"] = "auto"  # quantized checkpoints: keep them so in memory, or not
    # of float checkpoints at load: int8 and int4 weights, or FP8 weights and activations (Ada, Hopper and later)
    quantize: Literal["", "int8", "int4", "fp8"] = ""
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: cuda where there is one
    max_model_len: int = 0  # tokens; 0: the model's own
    max_num_seqs: int = 64  # sequences running at once
    max_num_batched_tokens: int = 0  # token budget of one step; 0: 512 on CPU, 8192 on CUDA
    prefill_slowdown: float = (
        2.2  # a step with decodes may take so many times as long for the sake of prompts; 0: no limit
    )
    block_size: int = 16  # tokens per KV block
    kv_dtype: Literal["auto", "int8"] = (
        "auto"  # of the KV cache; auto: the activations'; int8: a scale per token and head
    )
    kv_cache_gb: float = 0.0  # GiB for KV blocks; 0: an eighth of free memory, at most max_num_seqs full contexts
    num_blocks: int = 0  # KV blocks, overrides kv_cache_gb
    enable_prefix_caching: bool = True
    depth: int = -1  # plans in flight: -1 auto (0 on CPU, 1 on CUDA)
    # plain decode steps at padded sizes: "auto" as CUDA graphs on CUDA; "padded" without recording, to look for trouble
    graphs: Literal["auto", "off", "padded"] = "auto"
    tp_size: int = 1
    speculation: Literal["", "ngram"] = ""
    num_speculative_tokens: int = 4
    deterministic: bool = False  # numbers independent of batch mates too; refused where a backend has none
    input_lease_s: float = 30.0  # how long an open request waiting for input keeps its blocks
    input_timeout_s: float = 300.0  # after so long without input it is aborted
    flight_recorder: int = 64  # plans and results kept for inspection
    seed: int = 0  # for requests without their own: mixed with a counter

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size: expected a power of two, got {self.block_size}")
        for name in ("max_model_len", "max_num_batched_tokens", "num_blocks", "num_speculative_tokens", "kv_cache_gb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("max_num_seqs", "tp_size", "flight_recorder"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.prefill_slowdown != 0 and not self.prefill_slowdown > 1:
            raise ValueError(f"prefill_slowdown: expected 0 or more than 1, got {self.prefill_slowdown}")
        if self.kv_dtype not in ("auto", "int8"):
            raise ValueError(f"kv_dtype: expected auto or int8, got {self.kv_dtype!r}")
        if self.num_blocks == 1:
            raise ValueError("num_blocks: expected at least 2 (block 0 is never handed out), got 1")
        check_config(self)


@dataclass(frozen=True, kw_only=True)
class PictureConfig:
    """What is particular to engines that make pictures; dtype and device are EngineConfig's."""

    # auto: SageAttention on CUDA where it pays, exact attention elsewhere
    image_attention: Literal["auto", "sdpa", "sage", "xformers"] = "auto"
    image_weights: Literal["auto", "fp8"] = "auto"  # of the denoiser; fp8: W8A8, what is sensitive keeps its dtype
    image_protected_steps: int = 1  # so many first and last steps of FP8 weights run with 16-bit activations
    image_cache: Literal["", "teacache", "first_block"] = ""  # leave blocks out at steps that would change little
    image_cache_threshold: float = 0.0  # of the relative change that is let pass; 0: off
    image_cache_coefficients: tuple[float, ...] = ()  # TeaCache's polynomial for this model, highest power first
    image_encode_device: str = ""  # of text encoders; empty: the engine's device
    image_decode_device: str = ""  # of the autoencoder; empty: the engine's device
    image_step_rows: int = 0  # rows of a step's batch in pictures of the default size; 0: measured at load
    image_compile: bool = False  # torch.compile each kind of block once, at load

    def __post_init__(self) -> None:
        if not 0 <= self.image_cache_threshold < float("inf"):
            raise ValueError(f"image_cache_threshold: expected 0 or more, got {self.image_cache_threshold}")
        if self.image_protected_steps < 0:
            raise ValueError(f"image_protected_steps: expected 0 or more, got {self.image_protected_steps}")
        if self.image_step_rows < 0:
            raise ValueError(f"image_step_rows: expected 0 or more, got {self.image_step_rows}")
        if len(self.image_cache_coefficients) not in (0, 5):
            raise ValueError(
                f"image_cache_coefficients: expected five numbers, got {len(self.image_cache_coefficients)}"
            )


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """One host process: one device, one or more engines."""

    models: tuple[str, ...] = ()  # what may be served; empty: every installed model
    served_model_name: tuple[str, ...] = ()  # what requests call `models`, one each; empty: an id made from each name
    preload: bool = False  # load all of `models` at start instead of at first use
    threads: int = 0  # CPU threads of one step; 0: all cores
    idle_unload_s: float = 0.0  # unload a model unused for so long; 0: never
    start_timeout_s: float = 120.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    pictures: PictureConfig = field(default_factory=PictureConfig)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads: expected 0 or more, got {self.threads}")
        if self.served_model_name and len(self.served_model_name) != len(self.models):
            raise ValueError(
                f"served_model_name: expected one for each of {len(self.models)} models, got {len(self.served_model_name)}"
            )
        if len(set(self.served_model_name)) != len(self.served_model_name):
            raise ValueError(f"served_model_name: expected different ids, got {list(self.served_model_name)}")

    def name_of(self, model_id: str) -> str | None:
        """The name to load for an id that a request used; None when it is not served. Without `models` every name is."""
        ids = self.served_model_name or self.models
        if not ids:
            return model_id
        return self.models[ids.index(model_id)] if model_id in ids else None
