"""Tiny random models on disk, and a loop that runs requests through an engine to the end."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

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


LETTERS = "abcdefghijklmnopqrstuvwxyz ',.?"
PHONES = ["pau", "aa", "b", "k", "s", "t"]
# A small Orpheus: its text vocabulary is the letters and a few words; its ids of special tokens follow them.
_ORPHEUS = {"before": [50], "after": [51, 52, 53, 54], "between": [55]}


@functools.cache
def voice() -> Path:
    """A random voice of family motet-voice: see `tiny_voice`."""
    return tiny_voice(Path(tempfile.mkdtemp(prefix="motet-tiny-voice-")))


@functools.cache
def orpheus() -> Path:
    """A random voice of family orpheus with ids of its own, and a configured EOS that is a code (wrong, as the real one is)."""
    return tiny_voice(Path(tempfile.mkdtemp(prefix="motet-tiny-orpheus-")), family="orpheus", strides=(4, 2, 1))


@functools.cache
def neutts() -> Path:
    """A random voice of family neutts: one level of codes, two references."""
    return tiny_voice(Path(tempfile.mkdtemp(prefix="motet-tiny-neutts-")), family="neutts", strides=(4,))


def tiny_voice(
    folder: Path, *, family: str = "motet-voice", strides: tuple[int, ...] = (4, 2), size: int = 16, **more: Any
) -> Path:
    """Write a voice with random weights to `folder`: an LM of 2 layers, hidden 64, and a SNAC decoder of width 32 whose frame
    is 2048 samples. `more` goes into speech.json."""
    places = {(4, 2): 3, (4, 2, 1): 7, (4,): 1}[strides]
    first = 96
    speech: dict[str, Any] = {"family": family, "name": "tiny", "language": "en", "codec": "codec"}
    speech["audio"] = {"start": 4, "end": 5, "first": first, "size": size, "strides": strides, "order": "depth_first"}
    if family == "motet-voice":
        speech |= {
            "voices": ["rms"],
            "default_voice": "rms",
            "text": {"letters": LETTERS, "first": 6, "start": 1, "end": 2},
            "phones": {"names": PHONES, "first": 37, "start": 3},
            "sampling": {"temperature": 0.3, "top_k": 50},
            "phone_sampling": {"temperature": 0.0},
            "max_chars": 90,
        }
    else:
        _write_tokenizer(folder)
        speech |= {"voices": ["tara", "leo"], "prompt": _ORPHEUS}
    if family == "neutts":
        speech["prompt"] = {"before": "user:<|TEXT|>", "after": "<|END|>"}
        speech["references"] = {"tara": {"text": "hello", "codes": [3, 0, 7]}, "leo": {"text": "no", "codes": [5]}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speech.json").write_text(json.dumps(speech | more))
    config = transformers.LlamaConfig(
        vocab_size=first + places * size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=first + 1,
        bos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    _save(transformers.LlamaForCausalLM, config, folder, eos=first + 1)
    _write_codec(folder / "codec", strides, size)
    return folder


def _write_tokenizer(folder: Path) -> None:
    words = ["[UNK]", "<|begin_of_text|>", *LETTERS, "tara", "leo", "hello", ":", "<|TEXT|>", "<|END|>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("tara|leo|hello|."), "isolated")
    backend.add_special_tokens(["<|begin_of_text|>", "<|TEXT|>", "<|END|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))


def _write_codec(folder: Path, strides: tuple[int, ...], size: int) -> None:
    """SNAC's decoder and quantizers under the names of the public weights, weight norm folded."""
    generator = torch.Generator().manual_seed(1)
    latent, width, rates = 16, 32, (8, 8, 4, 2)
    tensors: dict[str, torch.Tensor] = {}

    def conv(name: str, out: int, into: int, kernel: int, *, transposed: bool = False, gain: float = 1.0) -> None:
        shape = (into, out, kernel) if transposed else (out, into, kernel)
        fan = into * (2 if transposed else kernel)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * gain * fan**-0.5
        tensors[f"{name}.bias"] = torch.zeros(out)

    for level in range(len(strides)):
        tensors[f"quantizer.quantizers.{level}.codebook.weight"] = torch.randn(size, 8, generator=generator)
        conv(f"quantizer.quantizers.{level}.out_proj", latent, 8, 1)
    conv("decoder.model.0", latent, 1, 7)
    conv("decoder.model.1", width, latent, 1)
    for block, rate in enumerate(rates):
        into, out = width >> block, width >> block + 1
        name = f"decoder.model.{block + 2}.block"
        tensors[f"{name}.0.alpha"] = torch.ones(1, into, 1)
        conv(f"{name}.1", out, into, 2 * rate, transposed=True)
        for unit in range(2, 5):
            tensors[f"{name}.{unit}.block.0.alpha"] = torch.ones(1, out, 1)
            conv(f"{name}.{unit}.block.1", out, 1, 7)
            tensors[f"{name}.{unit}.block.2.alpha"] = torch.ones(1, out, 1)
            conv(f"{name}.{unit}.block.3", out, out, 1)
    last = width >> len(rates)
    tensors["decoder.model.6.alpha"] = torch.ones(1, last, 1)
    conv("decoder.model.7", 1, last, 7, gain=0.1)
    config = {
        "sampling_rate": 24000, "latent_dim": latent, "decoder_dim": width, "decoder_rates": rates,
        "codebook_size": size, "codebook_dim": 8, "vq_strides": strides, "attn_window_size": None, "noise": False,
        "depthwise": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


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


def _save(cls: Any, config: Any, path: Path | None = None, eos: int = EOS) -> Path:
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # the default 0.02 gives nearly flat logits
    path = path or Path(tempfile.mkdtemp(prefix="motet-tiny-"))
    model.save_pretrained(path)
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": eos}))
    return path


PICTURE_WORDS = (
    "a",
    "an",
    "one",
    "two",
    "small",
    "big",
    "red",
    "green",
    "blue",
    "apple",
    "cat",
    "on",
    "the",
    "background",
)


def tiny_picture(folder: Path, *, few_step: bool = False) -> Path:
    """Write a picture model in motet-emoji's layout with random weights to `folder`: pictures of 64 x 64, latents [4, 16, 16],
    captions of at most 16 ids. With `few_step` the folder has a transformer and its `base`, `<folder>-base`, has the rest."""
    from diffusers import AutoencoderTiny, FluxTransformer2DModel

    folder.mkdir(parents=True, exist_ok=True)
    card = {
        "name": folder.name, "family": "flux", "sizes": [[64, 64]], "latent_scale": 4, "tokens": 64,
        "max_caption_tokens": 16, "pooled": "text_encoder", "solver": "euler", "shift": 1.0,
    }  # fmt: skip
    if few_step:
        base = tiny_picture(folder.with_name(f"{folder.name}-base"))
        card |= {
            "steps": 2, "sigmas": [1.0, 0.5], "guidance_scale": 1.0, "few_step": True, "base": f"../{base.name}",
        }  # fmt: skip
    else:
        card |= {"steps": 4, "guidance_scale": 2.0}
    (folder / "motet_image.json").write_text(json.dumps(card))
    denoiser = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=False, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    lively(denoiser, seed=2 if few_step else 1)
    matrices = {
        name: value.to(torch.float8_e4m3fn if value.dim() == 2 else torch.bfloat16)
        for name, value in denoiser.state_dict().items()
    }
    denoiser.save_config(folder / "transformer")
    save_file(matrices, folder / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    if few_step:
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)  # its own start: with lively weights pictures would be all black and white
        vae = AutoencoderTiny(
            encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8), num_encoder_blocks=(0, 0, 1),
            num_decoder_blocks=(1, 0, 0), latent_channels=4,
        )  # fmt: skip
    torch.nn.Module.to(vae, torch.bfloat16).save_pretrained(folder / "vae")
    _write_words(folder / "tokenizer")
    config = transformers.CLIPTextConfig(
        vocab_size=len(PICTURE_WORDS) + 4, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, hidden_act="gelu", projection_dim=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=3,
    )  # fmt: skip
    text = transformers.CLIPTextModel(config)
    lively(text, seed=3)
    text.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return folder


@torch.no_grad()
def lively(model: torch.nn.Module, *, seed: int = 0) -> None:
    """Random weights in place of all, zero-initialised ones too: otherwise a test of equality compares zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * (parameter[0].numel() ** -0.5))
        else:
            parameter.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise)


def _write_words(folder: Path) -> None:
    """A tokenizer of words, each an id, as motet-emoji has."""
    known = {word: at for at, word in enumerate(("<pad>", "<s>", "<unk>", "</s>", *PICTURE_WORDS))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_max_length=16,
    ).save_pretrained(folder)  # fmt: skip
