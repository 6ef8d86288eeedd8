"""Measure transformers' Whisper with our cuts: a worker with the commands of run_faster_whisper.py ("transcribe", "quit").

Run it with Motet's own python (its weights are read by Motet, and so are the cuts made):

    python run_transformers_whisper.py --model whisper-tiny.en [--dtype bfloat16] [--threads 2]

The same weights in `WhisperForConditionalGeneration`, the same voice detector and chunks as ours, batches of 8 windows
(sorted by length), greedy, without timestamps and without fallback: the least work that gives a text. The mode is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as HFWhisper

from motet.engine.segmenter import SegmenterOptions, chunks, speech_regions
from motet.kernels.linear import as_weight, dequantize
from motet.models.ctranslate2 import CTranslate2WhisperSource
from motet.models.registry import resolve
from motet.models.vad import SileroVAD
from motet.models.whisper import load_whisper

RATE = 16_000


class Engine:
    """One model of transformers on the CPU."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        path = resolve(name).path
        ours = load_whisper(path, dtype=torch.float32, device="cpu")  # for its tokenizer, rules and sizes alone
        sizes = ours.config
        self.tokens, self.tokenizer = ours.tokens, ours.tokenizer
        config = WhisperConfig(
            vocab_size=sizes.vocab_size, num_mel_bins=sizes.num_mels, d_model=sizes.hidden,
            encoder_layers=sizes.encoder_layers, decoder_layers=sizes.layers,
            encoder_attention_heads=sizes.encoder_heads, decoder_attention_heads=sizes.heads,
            encoder_ffn_dim=sizes.encoder_ffn, decoder_ffn_dim=sizes.decoder_ffn, attn_implementation="sdpa",
            pad_token_id=self.tokens.eot, bos_token_id=self.tokens.eot, eos_token_id=self.tokens.eot,
            decoder_start_token_id=self.tokens.sot,
        )  # fmt: skip
        source = CTranslate2WhisperSource(path)
        state = {
            key: dequantize(as_weight(value), torch.float32) if not isinstance(value, torch.Tensor) else value.float()
            for key in source.names()
            if not key.endswith("k_proj.bias")
            for value in [source.get(key)]
        }
        self.model: Any = HFWhisper(config).eval()
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        if unexpected or not set(missing) <= {"proj_out.weight"}:
            raise SystemExit(f"missing {missing}, unexpected {unexpected}")
        self.model.tie_weights()
        self.model = self.model.to(dtype)
        self.dtype = dtype
        self.features = WhisperFeatureExtractor(feature_size=sizes.num_mels)
        self.vad = SileroVAD.load()
        self.generation = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=224, eos_token_id=self.tokens.eot, pad_token_id=self.tokens.eot,
            decoder_start_token_id=self.tokens.sot, suppress_tokens=list(ours.suppress_tokens),
            begin_suppress_tokens=list(ours.begin_suppress), use_cache=True,
        )  # fmt: skip

    @torch.inference_mode()
    def transcribe(self, pcm: np.ndarray, batch_size: int) -> dict[str, Any]:
        """Transcribe float32 samples [T] and report text and time."""
        began = time.perf_counter()
        probs = self.vad.file(torch.from_numpy(pcm)).tolist()
        options = SegmenterOptions()
        pieces = chunks(speech_regions(probs, len(pcm), options), options.max_speech)
        order = sorted(range(len(pieces)), key=lambda at: pieces[at].end - pieces[at].start)
        texts = [""] * len(pieces)
        prompt = torch.tensor([self.tokens.prompt("en", timestamps=False)])
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            audio = [pcm[pieces[at].start : pieces[at].end] for at in group]
            mel = self.features(audio, sampling_rate=RATE, return_tensors="pt").input_features.to(self.dtype)
            # Whisper's own generate wants tables that a CTranslate2 directory lacks; the general one is all it calls.
            ids = GenerationMixin.generate(
                self.model, input_features=mel, generation_config=self.generation,
                decoder_input_ids=prompt.expand(len(group), -1),
            )  # fmt: skip
            for at, row in zip(group, ids[:, prompt.shape[1] :].tolist()):
                end = row.index(self.tokens.eot) if self.tokens.eot in row else len(row)
                texts[at] = self.tokenizer.decode(row[:end])
        return {
            "seconds": time.perf_counter() - began,
            "audio_seconds": len(pcm) / RATE,
            "text": "".join(texts).strip(),
            "language": "en",
            "segments": [[piece.start / RATE, piece.end / RATE, text] for piece, text in zip(pieces, texts)],
        }


def main() -> None:
    """Load, warm up, say `ready`, then answer commands until `quit` or the end of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name that Motet knows, with CTranslate2 weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    # Nobody but us may write into the answers: keep stdout for them, and point descriptor 1 at stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    engine = Engine(args.model, getattr(torch, args.dtype))
    engine.transcribe(np.random.default_rng(0).normal(0, 0.1, 2 * RATE).astype(np.float32), 8)
    say(
        {
            "ready": True,
            "name": "transformers with our cuts",
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "dtype": args.dtype,
            "threads": args.threads,
            "load_seconds": time.perf_counter() - began,
        }
    )
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            command = json.loads(line)
            if command.get("cmd") == "quit":
                break
            if command.get("cmd") != "transcribe":
                raise ValueError(f"no such command: {command.get('cmd')}")
            pcm = np.fromfile(command["file"], dtype="<f4")
            say(engine.transcribe(pcm, int(command.get("batch_size", 8))))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
