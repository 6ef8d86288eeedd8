"""step_cache: leaving blocks out at steps that would change little, against computing all of them.

Thresholds are chosen on pictures of their own: of all that keep the bound there, the fastest is then measured on the held-out
captions, and the next one where it breaks the bound on these.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

import torch

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.diffusion_claims.in_process import Studio, studio
from motet.benchmarks.diffusion_claims.setting import CLAIMS, Setting, Sizes, held_out
from motet.benchmarks.llm_claims.setting import say
from motet.engine.step_cache import CacheConfig

_FIRST_SEED = 1000  # of calibration: no picture of these is measured


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a cache did on some pictures. `error`: mean relative L1 distance of final latents; `skipped`: share of rows."""

    config: CacheConfig
    error: float
    skipped: float
    plain_s: list[float]
    cached_s: list[float]

    def __str__(self) -> str:
        return f"{self.config.policy} {self.config.threshold:g}: error {self.error:.4f}, {self.skipped:.0%} left out"


def step_cache(setting: Setting) -> Row:
    sizes, captions = setting.sizes, held_out()
    measured, others = captions[: sizes.num_held_out], captions[sizes.num_held_out :][: sizes.num_calibration]
    with studio(setting) as made:
        coefficients = made.coefficients(others, seed=_FIRST_SEED)
        exact = [made.paint(caption, _FIRST_SEED + seed) for seed, caption in enumerate(others)]
        found = []
        for config in candidates(sizes, coefficients):
            tried = compare(made, config, others, _FIRST_SEED, exact=exact)
            say(f"  {tried}")
            found.append(tried)
        able = sorted(
            (one for one in found if one.error <= sizes.max_error and one.skipped), key=lambda one: median(one.cached_s)
        )
        told = f"tried {', '.join(str(one.threshold) for one in candidates(sizes, coefficients))}"
        if not able:
            return claims.failed(CLAIMS["step_cache"], f"none keeps the bound of {sizes.max_error}; {told}")
        for one in able:
            best = compare(made, one.config, measured, 0)
            say(f"  held out: {best}")
            if best.error <= sizes.max_error:
                break
        count = min(sizes.num_together, len(measured))
        plain_s, cached_s = at_once(made, best.config, measured, count)
        width, height = made.engine.rules.sizes[0]
        dtype = made.engine.info.dtype
    alone = median(best.plain_s) / median(best.cached_s)
    row = claims.measured(
        CLAIMS["step_cache"], count / median(cached_s), count / median(plain_s), runs=len(measured),
        ours_name=f"motet {dtype}, {best.config.policy} {best.config.threshold:g}, {count} at once",
        peer_name="the same engine, every block of every step",
        why=f"{width} x {height}, {sizes.steps} steps, {setting.threads} threads, in the engine's process; mean relative L1 of "
        f"final latents {best.error:.4f} (at most {sizes.max_error}) over {len(measured)} held-out captions, {best.skipped:.0%} "
        f"of rows left out; one picture at a time {alone:.2f} times as fast ({median(best.cached_s) * 1e3:.0f} ms beside "
        f"{median(best.plain_s) * 1e3:.0f}); threshold chosen on {len(others)} other captions; runs are pictures",
    )  # fmt: skip
    if best.error > sizes.max_error:
        return claims.failed(CLAIMS["step_cache"], f"the bound breaks on the held-out ones; {row.why}", ours=row.ours)
    return row


def at_once(made: Studio, config: CacheConfig, captions: list[str], count: int) -> tuple[list[float], list[float]]:
    """Seconds of groups of `count` pictures without and with the cache, in turns."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    made.together(captions[:count], 0)  # warm
    for turn, start in enumerate(range(0, len(captions) - count + 1, count)):
        for cached in (True, False) if turn % 2 else (False, True):
            made.engine.cache = config if cached else None
            taken[cached].append(made.together(captions[start : start + count], start))
    made.engine.cache = None
    return taken[False], taken[True]


def candidates(sizes: Sizes, coefficients: tuple[float, ...]) -> list[CacheConfig]:
    return [CacheConfig(policy="first_block", threshold=threshold) for threshold in sizes.first_block] + [
        CacheConfig(policy="teacache", threshold=threshold, coefficients=coefficients) for threshold in sizes.teacache
    ]


def compare(
    made: Studio,
    config: CacheConfig,
    captions: list[str],
    first_seed: int,
    *,
    exact: list[tuple[float, torch.Tensor]] | None = None,
) -> Tried:
    """Each picture with the cache and, unless it is there already, without, in turns."""
    engine = made.engine
    plain_s, cached_s, errors = [], [], []
    num_rows, num_skipped = engine.counters.num_rows, engine.counters.num_skipped_rows
    rows_of_exact = 0
    for seed, caption in enumerate(captions):
        taken: dict[bool, tuple[float, torch.Tensor]] = {}
        for cached in (True, False) if seed % 2 else (False, True):
            if not cached and exact is not None:
                taken[cached] = exact[seed]
                continue
            engine.cache = config if cached else None
            before = engine.counters.num_rows
            taken[cached] = made.paint(caption, first_seed + seed)
            if not cached:
                rows_of_exact += engine.counters.num_rows - before
        engine.cache = None
        plain_s.append(taken[False][0])
        cached_s.append(taken[True][0])
        apart = (taken[True][1] - taken[False][1]).abs().sum() / taken[False][1].abs().sum()
        errors.append(apart.item())
    rows = engine.counters.num_rows - num_rows - rows_of_exact
    return Tried(
        config=config,
        error=mean(errors),
        skipped=(engine.counters.num_skipped_rows - num_skipped) / max(1, rows),
        plain_s=plain_s,
        cached_s=cached_s,
    )
