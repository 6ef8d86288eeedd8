"""codec8: one batch of eight streams against the same streams one by one."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.llm_claims.setting import say
from motet.benchmarks.speech_claims.setting import CLAIMS, MAX_CODEC_SHARE, Setting
from motet.engine.codec_engine import CodecEngine
from motet.models.registry import resolve
from motet.models.snac import Snac
from motet.models.speech_format import load_format

NUM_STREAMS = 8
PIECE = 4  # frames of a push: what a stream speaks at a time


def codec_together(setting: Setting) -> Row:
    """Seconds of speech per second of work of the codec engine by itself."""
    torch.set_num_threads(setting.threads)
    path = resolve(setting.model).path
    codec = Snac.load(path / load_format(path).codec)
    sizes = codec.config
    frames = setting.sizes.codec_frames // PIECE * PIECE
    codes = np.random.default_rng(0).integers(0, sizes.codebook_size, (NUM_STREAMS, frames, sizes.codes_per_frame))
    engine = CodecEngine(codec, max_streams=NUM_STREAMS)
    audio_s = NUM_STREAMS * frames * sizes.frame_samples / sizes.sampling_rate
    speeds: dict[str, list[float]] = {"together": [], "one by one": []}
    _speak(engine, codes[:, : 2 * PIECE], together=True)  # warm
    for _ in range(setting.sizes.rounds):
        for name, times in speeds.items():
            began = time.perf_counter()
            _speak(engine, codes, together=name == "together")
            times.append(audio_s / (time.perf_counter() - began))
    ours, peer = median(speeds["together"]), median(speeds["one by one"])
    share = 1 / ours
    say(f"  codec: {ours:.0f} x real time in a batch of {NUM_STREAMS}, {peer:.0f} x one by one")
    row = claims.measured(
        CLAIMS["codec8"], ours, peer, ours_name=setting.model, peer_name="ours, one stream after another",
        runs=setting.sizes.rounds,
        why=f"pushes of {PIECE} frames; a stream costs {share:.3f} of real time (at most {MAX_CODEC_SHARE})",
    )  # fmt: skip
    if share > MAX_CODEC_SHARE:
        return claims.failed(CLAIMS["codec8"], f"too slow: {row.why}", ours=ours, runs=setting.sizes.rounds)
    return row


def _speak(engine: CodecEngine, codes: np.ndarray, *, together: bool) -> None:
    """Decode [streams, frames, K] in pieces, all streams in each step or one stream after another."""
    groups = [range(len(codes))] if together else [[stream] for stream in range(len(codes))]
    num_frames = codes.shape[1]
    for group in groups:
        for stream in group:
            engine.open(str(stream))
        for at in range(0, num_frames, PIECE):
            for stream in group:
                engine.push(str(stream), codes[stream, at : at + PIECE], last=at + PIECE >= num_frames)
            engine.step()
        while any(engine.pending(str(stream)) for stream in group):
            engine.step()
        for stream in group:
            engine.close(str(stream))
