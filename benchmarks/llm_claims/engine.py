"""Claims about our engine beside itself: known prefixes, more streams, a long context, a long prompt in between."""

from __future__ import annotations

import dataclasses
import time
from statistics import median, quantiles

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.motet_engine import MotetEngine
from motet.engine.config import EngineConfig

from . import setting as shared
from .setting import CLAIMS, INT8_KV_TARGET, Setting, say


def prefix_ttft(setting: Setting, engine: MotetEngine) -> Row:
    """Time to first token after a known prefix, over the same without: each pair has a cache salt of its own."""
    sizes = setting.sizes
    claim = CLAIMS["prefix_ttft"]
    prefix = setting.text[: sizes.num_prefix]

    def prompt(number: int) -> list[int]:
        start = sizes.num_prefix + number * 7 % (len(setting.text) - sizes.num_prefix - sizes.num_tail)
        return prefix + setting.text[start : start + sizes.num_tail]

    for number in range(2):
        engine.one(prompt(number), salt="warm-up")
    least = sizes.num_prefix // setting.engine.block_size * setting.engine.block_size  # whole blocks are shared
    warm, cold = [], []
    for pair in range(2 * sizes.rounds):
        first = engine.one(prompt(2 * pair), salt=f"pair-{pair}")
        second = engine.one(prompt(2 * pair + 1), salt=f"pair-{pair}")
        if first.num_cached_tokens or second.num_cached_tokens < least:
            why = f"the cache gave {first.num_cached_tokens} ids cold and {second.num_cached_tokens} warm"
            return claims.failed(claim, why, ours_name=engine.name)
        cold.append(first.first_token_s * 1e3)
        warm.append(second.first_token_s * 1e3)
        say(f"  pair {pair + 1}: cold {cold[-1]:.1f} ms, warm {warm[-1]:.1f} ms")
    return claims.measured(
        claim,
        median(warm),
        median(cold),
        peer_name=f"{engine.name}, prefix not cached",
        ours_name=f"{engine.name}, prefix cached",
        runs=len(warm),
        why=f"{sizes.num_prefix} ids of prefix + {sizes.num_tail} new, {setting.threads} threads, no HTTP",
    )


def streams64(setting: Setting) -> Row:
    """Tokens per second of 64 prompts at once over that of 16, both ours."""
    sizes = setting.sizes
    say("ours: loading")
    config = dataclasses.replace(setting.engine, enable_prefix_caching=False)
    many: list[float] = []
    few: list[float] = []
    with MotetEngine(setting.model, config, threads=setting.threads) as engine:
        engine.streams(setting.prompts(0, sizes.many_streams), 4)
        for turn in range(sizes.rounds):
            for count in (
                (sizes.many_streams, sizes.num_streams) if turn % 2 == 0 else (sizes.num_streams, sizes.many_streams)
            ):
                time.sleep(shared.SETTLE_S)
                rate = engine.streams(setting.prompts(turn, count), sizes.num_new)
                (many if count == sizes.many_streams else few).append(rate)
                say(f"  round {turn + 1}: {count} streams {rate:.1f} tokens/s")
        return claims.measured(
            CLAIMS["streams64"], median(many), median(few), peer_name=f"ours with {sizes.num_streams} streams",
            ours_name=f"{engine.name}, {sizes.many_streams} streams", runs=sizes.rounds,
            why=f"{sizes.num_prompt} in, {sizes.num_new} out each, {setting.threads} threads, no prefix cache",
        )  # fmt: skip


def context_4096(setting: Setting) -> Row:
    """Decoding after 4,096 tokens over decoding after 64, with keys and values as they are by default and as INT8.

    The row's figures are those of the default; it holds when both hold.
    """
    sizes = setting.sizes
    claim = CLAIMS["context_4096"]
    engines: dict[str, MotetEngine] = {}
    rates: dict[tuple[str, int], list[float]] = {}
    try:
        for kind, config in _kv_kinds(setting.engine).items():
            say(f"ours: loading, keys and values {kind}")
            engines[kind] = MotetEngine(setting.model, config, threads=setting.threads)
        lengths = (sizes.num_prompt, sizes.num_context)
        for engine in engines.values():
            for length in lengths:
                engine.one(setting.slice(0, length), max_tokens=1)  # its blocks stay: what follows only decodes
        for turn in range(sizes.rounds):
            for kind, engine in engines.items() if turn % 2 == 0 else reversed(engines.items()):
                time.sleep(shared.SETTLE_S)
                for length in lengths:
                    rate = _decode_rate(engine, setting.slice(0, length), sizes.num_new)
                    rates.setdefault((kind, length), []).append(rate)
                    say(f"  round {turn + 1}: keys and values {kind}, after {length} tokens {rate:.1f} tokens/s")
        name = engines["default"].name
    finally:
        for engine in engines.values():
            engine.close()
    figures = {key: median(found) for key, found in rates.items()}
    also, holds = _int8_told(figures, lengths)
    why = f"{sizes.num_new - 1} / (t{sizes.num_new} - t1), the prompt cached, {setting.threads} threads; {also}"
    row = claims.measured(
        claim, figures["default", sizes.num_context], figures["default", sizes.num_prompt],
        peer_name=f"ours after {sizes.num_prompt} tokens", ours_name=f"{name}, after {sizes.num_context} tokens",
        runs=sizes.rounds, why=why,
    )  # fmt: skip
    return dataclasses.replace(row, holds=row.holds and holds)


def _kv_kinds(config: EngineConfig) -> dict[str, EngineConfig]:
    """The configurations that differ in how keys and values lie in memory."""
    return {"default": config, "int8": dataclasses.replace(config, kv_dtype="int8")}


def _int8_told(figures: dict[tuple[str, int], float], lengths: tuple[int, int]) -> tuple[str, bool]:
    """What INT8 keys and values gave, and whether that reaches its own target."""
    short, long = (figures["int8", length] for length in lengths)
    holds = long / short >= INT8_KV_TARGET
    return (
        f"INT8 keys and values: {long:.1f} / {short:.1f} = {long / short:.3f}, "
        f"target {INT8_KV_TARGET:g}: {'holds' if holds else 'does NOT hold'}"
    ), holds


def _decode_rate(engine: MotetEngine, prompt: list[int], num_new: int) -> float:
    first = engine.one(prompt, max_tokens=1).seconds
    return (num_new - 1) / max(engine.one(prompt, max_tokens=num_new).seconds - first, 1e-9)


def itl_p99_under_prefill(setting: Setting, engine: MotetEngine) -> Row:
    """p99 of the pauses between tokens of 15 streams while a long prompt prefills, over the same while none does."""
    sizes = setting.sizes
    length = min(sizes.num_long, engine.info.max_model_len - 8)
    alone: list[float] = []
    beside: list[float] = []
    prefill_s: list[float] = []
    for turn in range(sizes.rounds + 1):
        pauses = engine.pauses(
            setting.prompts(turn, sizes.running), setting.slice(turn, length), idle_s=sizes.idle_s, salt=f"itl-{turn}"
        )
        if turn == 0:
            continue  # warm-up
        alone.append(p99(pauses.alone_s) * 1e3)
        beside.append(p99(pauses.beside_s) * 1e3)
        prefill_s.append(pauses.prefill_s)
        say(
            f"  round {turn}: p99 {alone[-1]:.1f} ms alone, {beside[-1]:.1f} ms beside {pauses.prefill_s:.2f} s of prefill"
        )
        time.sleep(shared.SETTLE_S)
    return claims.measured(
        CLAIMS["itl_p99_under_prefill"], median(beside), median(alone), peer_name="ours, no prompt in between",
        ours_name=f"{engine.name}, beside a prompt of {length} tokens", runs=sizes.rounds,
        why=f"{sizes.running} streams, {setting.threads} threads, no HTTP; the prompt's own first token after "
        f"{median(prefill_s):.2f} s",
    )  # fmt: skip


def p99(values: list[float]) -> float:
    """The 99th percentile, interpolated between the two values around it."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[98]
