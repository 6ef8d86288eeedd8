"""From a model name to a running engine: resolve, read, choose what "auto" means, build, warm up. Imports torch.

What was chosen is a `Resolved` object, printed and sent along in `ModelInfo.extra`; the configuration stays as it was.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.attention import row_width
from ..kernels.dispatch import cpu_ops
from ..kernels.linear import has_bf16_products, torch_multiplies_bf16
from ..models import loader
from ..models.build import CausalModel, build_model, is_ours
from ..models.decoder import Decoder
from ..models.spec import WHOLE, Shard
from .allocator import BlocksAhead, release_freed_memory, take_pages
from .cache.block_pool import BlockPool
from .cache.manager import CacheManager, KVGroup, make_groups
from .compatibility import check_config, verdict
from .config import EngineConfig, HostConfig
from .errors import ModelLoadError
from .executor import Executor, InlineExecutor
from .host import Engine
from .llm_engine import LLMEngine
from .model_runner import ModelRunner, PartModel
from .prefill_pace import PrefillPace
from .roofline import Peaks, Roofline, measure_peaks
from .scheduler import Scheduler
from .side_ids import MultiCodebook
from .speculation.ngram import NgramProposer
from .speculation.proposer import Proposer
from .step_profile import profile_if_asked
from .types import ModelInfo, NewSequence, SamplingParams, SequenceStep, StepPlan

_PEAKS: dict[tuple[str, bool], Peaks] = {}  # of this process, by device and kind of weights
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What "auto" and 0 became."""

    device: str
    dtype: str
    weights: str
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    kv_dtype: str
    kv_bytes: int
    weight_bytes: int
    depth: int
    graphs: str  # of decode steps: "cuda", "padded" or "off"
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class LoadedRunner:
    runner: ModelRunner
    model: CausalModel
    groups: list[KVGroup]
    resolved: Resolved
    eos_ids: tuple[int, ...]
    source: str


def build_engine(name: str, config: HostConfig, report: Callable[[str], None]) -> Engine:
    """Load the model called `name` for a host. Raises ModelNotFound or ModelLoadError."""
    if config.threads:
        torch.set_num_threads(config.threads)
    resolved = loader.resolve(name)
    kind, path = resolved.kind, resolved.path
    engine: Engine
    if kind == "llm":
        engine = load_llm(name, config.engine, report=report)
    elif kind == "asr":
        from .asr_load import load_asr

        engine = load_asr(name, config, report)
    elif kind == "tts" and path.suffix == ".onnx":
        from .synthesizer_engine import load_synthesizer

        engine = load_synthesizer(name, config, report)
    elif kind == "tts":
        from .speech_load import load_speech

        engine = load_speech(name, config, report)
    elif kind == "image":
        from .diffusion_load import load_image

        engine = load_image(name, config, report)
    else:
        raise ModelLoadError(
            f"model {name!r} is of kind {kind!r}; this version serves: llm, asr, tts, image", param="model"
        )
    release_freed_memory()
    return engine


def load_llm(
    name: str,
    config: EngineConfig,
    *,
    report: Callable[[str], None] = lambda phase: None,
    clock: Callable[[], float] = time.monotonic,
    proposer: Proposer | None = None,
) -> LLMEngine:
    """A warm LLM engine. `proposer` overrides the configured speculation."""
    ranks = None
    shard = WHOLE
    if config.tp_size > 1:
        from .parallel.rank_executor import Ranks

        ranks = Ranks(config.tp_size, pick_device(config.device, 0))
        # Every rank must choose the same sizes; they cannot ask each other before they have started.
        blocks, length = _fixed_sizes(name, config)
        shard = ranks.start(name, config, blocks, length)
        loaded = load_runner(name, config, shard=shard, num_blocks=blocks, max_model_len=length, report=report)
    else:
        loaded = load_runner(name, config, shard=shard, report=report)
    resolved = loaded.resolved
    executor: Executor
    if ranks is not None:
        from .parallel.rank_executor import RankExecutor

        executor = RankExecutor(loaded.runner, ranks)
    else:
        executor = InlineExecutor(loaded.runner, threaded=resolved.depth > 0 and resolved.device == "cpu")
    codebooks = loaded.model if isinstance(loaded.model, MultiCodebook) else None
    if proposer is not None and codebooks is not None:
        raise ModelLoadError(f"speculation: {verdict('multi_codebook', 'speculation')[1]}")
    if proposer is None and config.speculation == "ngram":
        proposer = NgramProposer(num_drafts=config.num_speculative_tokens)
    if resolved.device == "cpu":
        num_backed = _num_in_resident_bytes(resolved)
        _take_pages(loaded.runner.pages, num_backed)
        arenas = [(page.data_ptr(), page[0].numel() * page.element_size()) for page in loaded.runner.pages]
        loaded.runner.blocks_ahead = BlocksAhead(arenas, num_blocks=resolved.num_blocks, num_backed=num_backed)
    scheduler = Scheduler(
        CacheManager(
            BlockPool(resolved.num_blocks, num_resident=_num_resident(config, resolved)),
            loaded.groups,
            config.block_size,
            caching=config.enable_prefix_caching,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        input_lease_s=config.input_lease_s,
        proposer=proposer,
        pace=PrefillPace(config.prefill_slowdown) if config.prefill_slowdown else None,
        part_layers=loaded.model.part_layers if isinstance(loaded.model, PartModel) else 0,
    )
    info = ModelInfo(
        model=name,
        kind="llm",
        source=loaded.source,
        max_model_len=resolved.max_model_len,
        vocab_size=loaded.model.vocab_size,
        hidden_size=loaded.model.hidden_size,
        eos_token_ids=loaded.eos_ids,
        dtype=resolved.dtype,
        weight_format=resolved.weights,
        num_codebooks=codebooks.num_codebooks if codebooks is not None else 1,
        num_codes=codebooks.num_codes if codebooks is not None else 0,
        extra=dataclasses.asdict(resolved),
    )
    engine = LLMEngine(
        info=info,
        scheduler=scheduler,
        executor=executor,
        clock=clock,
        depth=resolved.depth,
        flight_recorder=config.flight_recorder,
        input_timeout_s=config.input_timeout_s,
        seed=config.seed,
        kv_dtype=resolved.kv_dtype if config.kv_dtype != "auto" else "",
    )
    report("warm-up")
    _warm_up(executor, loaded.model.vocab_size, resolved, config.block_size, len(loaded.groups))
    engine.roofline = _roofline(loaded.model, loaded.runner.pages[0], resolved.device)
    profile_if_asked(engine)
    if resolved.graphs != "off":
        executor.call_all("pad_steps", capture=resolved.graphs == "cuda")
    report("ready")
    return engine


def load_runner(
    name: str,
    config: EngineConfig,
    *,
    shard: Shard = WHOLE,
    num_blocks: int = 0,
    max_model_len: int = 0,
    report: Callable[[str], None] = lambda phase: None,
) -> LoadedRunner:
    """One rank's model and runner. Sizes given here override the configured ones."""
    report("resolve")
    path = loader.resolve(name).path
    raw = loader.read_config(path)
    device = pick_device(config.device, shard.tp_rank)
    dtype = pick_dtype(config, device, own_products=is_ours(raw))
    if config.deterministic and (device.type != "cpu" or cpu_ops() is None):
        raise ModelLoadError(
            "deterministic: needs a CPU and the C++ kernels (`make venv` builds them where there is g++)"
        )
    if config.quantize == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ModelLoadError(f"quantize=fp8: needs a CUDA device of compute capability 8.9 or above, not {device}")
    report("weights")
    source = loader.open_weights(path)
    keeps = config.weights != "dequantize"
    model = build_model(
        raw,
        source,
        shard=shard,
        dtype=dtype,
        device=device,
        weights="keep" if keeps else "dequantize",
        quantize=config.quantize or None,
        invariant=config.deterministic,
    )
    report("cache")
    specs = model.kv_specs()
    try:
        groups = make_groups(specs)
    except ValueError as error:
        raise ModelLoadError(str(error)) from None
    cached = next((spec for spec in specs if spec.kind != "none"), None)
    if cached is None:
        raise ModelLoadError("this model has no attention layers to cache")
    try:
        notes = check_config(config, frozenset({"multi_codebook"} if isinstance(model, MultiCodebook) else ()))
    except ValueError as error:
        raise ModelLoadError(str(error)) from None
    page = max(len(group.layers) for group in groups)
    kv_dtype = torch.int8 if config.kv_dtype == "int8" else dtype
    row_bytes = row_width(cached.head_dim, kv_dtype) * kv_dtype.itemsize
    block_bytes = page * 2 * cached.num_kv_heads * config.block_size * row_bytes
    wanted_len = max_model_len or min(config.max_model_len or model.max_position, model.max_position)
    blocks = num_blocks or _num_blocks(config, block_bytes, wanted_len, len(groups), device)
    # A limit that the cache cannot hold would only be met later, by somebody's request.
    length = min(wanted_len, (blocks - 1) // len(groups) * config.block_size)
    if length < 2:
        raise ModelLoadError(f"num_blocks: {blocks} blocks hold no sequence of two tokens in {len(groups)} groups")
    is_multi = isinstance(model, MultiCodebook)
    eos_ids = model.eos_ids if isinstance(model, MultiCodebook) else loader.eos_token_ids(path)
    runner = ModelRunner(
        model,
        groups=groups,
        num_layers=len(specs),
        kv_shape=(cached.num_kv_heads, cached.head_dim),
        num_blocks=blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=length,
        eos_ids=eos_ids,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        agree=shard.comm.broadcast if shard.comm is not None else None,  # type: ignore[attr-defined]
    )
    on_cpu = device.type == "cpu"
    resolved = Resolved(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights=config.quantize or ("kept" if keeps else "dequantized"),
        max_model_len=length,
        max_num_batched_tokens=config.max_num_batched_tokens or (512 if on_cpu else 8192),
        num_blocks=blocks,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_bytes=blocks * block_bytes,
        weight_bytes=model.weight_bytes,
        depth=_depth(config, on_cpu),
        graphs="off" if is_multi else "padded" if config.graphs == "padded" else _recorded(config, device),
        notes=tuple(notes),
    )
    return LoadedRunner(runner=runner, model=model, groups=groups, resolved=resolved, eos_ids=eos_ids, source=str(path))


def pick_device(name: str, rank: int) -> torch.device:
    """The device that a name means for a rank. "auto": CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", rank)
    try:
        return torch.device(name)
    except RuntimeError:
        raise ModelLoadError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}", param="device") from None


def pick_dtype(config: EngineConfig, device: torch.device, *, own_products: bool = False) -> torch.dtype:
    """The dtype of activations and cache. "auto": bfloat16 where the hardware multiplies it, else float32.

    With `own_products` (a language model of ours) also on a CPU without such instructions: our kernels widen bfloat16 as they
    read it (AVX2), and quantized weights stay quantized. Half the memory of float32 or less, and decoding is bound by that.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if config.deterministic:
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16
    fast = torch_multiplies_bf16() and "avx512_bf16" in _cpu_flags()
    fast = fast or "amx_bf16" in _cpu_flags() or (own_products and has_bf16_products())
    return torch.bfloat16 if fast else torch.float32


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(line.split())


def _recorded(config: EngineConfig, device: torch.device) -> str:
    return "cuda" if config.graphs == "auto" and device.type == "cuda" and config.tp_size == 1 else "off"


def _depth(config: EngineConfig, on_cpu: bool) -> int:
    if config.speculation:
        return 0
    return config.depth if config.depth >= 0 else (0 if on_cpu else 1)


def _num_blocks(
    config: EngineConfig, block_bytes: int, max_model_len: int, num_groups: int, device: torch.device
) -> int:
    if config.num_blocks:
        return config.num_blocks
    most = config.max_num_seqs * num_groups * -(-max_model_len // config.block_size) + 1
    if config.kv_cache_gb:
        return max(2, int(config.kv_cache_gb * 2**30) // block_bytes)
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * 0.9)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    return max(2, min(most, free // block_bytes))


def _num_resident(config: EngineConfig, resolved: Resolved) -> int | None:
    """Blocks that idle prefixes may fill on a CPU when nobody has said how much memory is the cache's: 0.355 GiB."""
    if config.num_blocks or config.kv_cache_gb or resolved.device != "cpu":
        return None
    return _num_in_resident_bytes(resolved)


def _num_in_resident_bytes(resolved: Resolved) -> int:
    return int(resolved.num_blocks * min(1.0, 0.355 * 2**30 / resolved.kv_bytes))


def _take_pages(pages: Sequence[torch.Tensor], num_blocks: int) -> None:
    """Back the first `num_blocks` blocks of every layer with memory, in the background, those that come first at first."""
    parts = 16

    def work() -> None:
        for part in range(parts):
            begin, end = (num_blocks * at // parts for at in (part, part + 1))
            for page in pages:
                blocks = page[begin:end]
                if not take_pages(blocks.data_ptr(), blocks.numel() * blocks.element_size()):
                    return

    threading.Thread(target=work, name="motet-kv-pages", daemon=True).start()


def _fixed_sizes(name: str, config: EngineConfig) -> tuple[int, int]:
    """Blocks and context length that all ranks use. Without configured ones: modest defaults, the same everywhere."""
    raw = loader.read_config(loader.resolve(name).path)
    position = int(raw.get("max_position_embeddings") or 2048)
    length = min(config.max_model_len or position, position)
    return config.num_blocks or 4096, length


def _roofline(model: CausalModel, page: torch.Tensor, device: str) -> Roofline | None:
    """For models of ours; the machine's peaks are measured at the first of them, with the weights just loaded."""
    if not isinstance(model, Decoder):
        return None
    work = model.workload(page.shape[-1] * page.element_size())
    if work is None:
        return None
    quantized = any(weight.is_quantized for weight in model.matrices())
    if (device, quantized) not in _PEAKS:
        tensors = [tensor for weight in model.matrices() for tensor in weight.tensors.values()]
        _PEAKS[device, quantized] = measure_peaks(tensors, quantized=quantized, device=device)
    return Roofline(work, _PEAKS[device, quantized])


def _warm_up(executor: Executor, vocab_size: int, resolved: Resolved, block_size: int, num_groups: int) -> None:
    """Run prefills and a decode in slot 0 on null blocks, so that nobody's first token pays for lazy initialization.

    On CUDA three lengths, for the kernels of few, some and many rows are compiled at their first use.
    """
    most = min(resolved.max_model_len - 2, resolved.max_num_batched_tokens)
    for count in (16,) if resolved.device == "cpu" else (512, 128, 16):
        _warm_up_with(executor, vocab_size, max(2, min(count, most)), block_size, num_groups)


def _warm_up_with(executor: Executor, vocab_size: int, count: int, block_size: int, num_groups: int) -> None:
    sequence = NewSequence(
        slot=0,
        token_ids=[index % vocab_size for index in range(count)],
        num_prompt=count,
        # The null block takes every write; what it holds is never read by anybody's request.
        block_ids=[[0] * -(-(count + 2) // block_size) for _ in range(num_groups)],
        params=SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=0),
        seed=0,
    )
    executor.launch(
        StepPlan(step=-1, new=[sequence], steps=[SequenceStep(slot=0, start=0, num_tokens=count, sample=True)])
    ).result()
    executor.launch(StepPlan(step=-1, steps=[SequenceStep(slot=0, start=count, num_tokens=1, sample=True)])).result()
    executor.launch(StepPlan(step=-1, release=[0])).result()
