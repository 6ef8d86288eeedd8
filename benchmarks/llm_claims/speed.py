"""Claims about speed beside other engines: many streams, prefill, decode, each on the same weights in the same rounds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from motet.benchmarks import claims
from motet.benchmarks.claims import Row
from motet.benchmarks.motet_engine import MotetEngine
from motet.benchmarks.peer_worker import PeerError

from . import peers
from .contest import OURS, Contestant, Event, Ours, Outcome, Peer, compete
from .setting import CLAIMS, Setting, say

VERSUS = {"streams16_vs_vllm": "vllm", "streams16_vs_llamacpp": "llamacpp"}
VERSUS_BEST = {"streams16_vs_best": "streams", "prefill_1024": "prefill"}
PACKAGED = (*VERSUS, *VERSUS_BEST, "decode_q4_1")  # on the packaged file
REQUANTIZED = {"decode_q4_0": "q4_0", "decode_q8_0": "q8_0"}


def measure_packaged(setting: Setting, wanted: list[str]) -> list[Row]:
    """All of `PACKAGED` that is wanted: every engine has a turn per round."""
    sizes = setting.sizes
    everybody = any(name in VERSUS_BEST for name in wanted)
    keys = [
        key
        for key in peers.ENVIRONMENTS
        if everybody or key in {VERSUS.get(name) for name in wanted} or (key == "llamacpp" and "decode_q4_1" in wanted)
    ]
    longest = max(sizes.num_prompt + sizes.num_new, sizes.num_prefill + 1 if "prefill_1024" in wanted else 0)
    context = -(-longest // 256) * 256
    events = []
    if any(name.startswith("streams16") for name in wanted):
        events.append(_streams(setting))
    if "prefill_1024" in wanted:
        events.append(_prefill(setting))
    if "decode_q4_1" in wanted:
        events.append(_decode(setting))
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        missing: dict[str, str] = {}
        for key in keys:
            try:
                say(f"{key}: building if absent, loading")
                worker = peers.start(key, setting, streams=sizes.num_streams, context=context)
                contestants[key] = Peer(stack.enter_context(worker))
            except PeerError as error:
                say(f"  {error}")
                missing[key] = str(error)
        contestants[OURS] = stack.enter_context(_ours(setting, setting.model))
        outcome = compete(contestants, events, rounds=sizes.rounds)
    outcome.lost = missing | outcome.lost
    many = (
        f"{sizes.num_streams} x ({sizes.num_prompt} in, {sizes.num_new} out), {setting.threads} threads each, "
        f"no prefix cache; {outcome.idle}"
    )
    rows = []
    for name in wanted:
        if name in VERSUS:
            rows.append(_versus(name, outcome, "streams", VERSUS[name], many))
        elif name == "decode_q4_1":
            rows.append(_versus(name, outcome, "decode", "llamacpp", _decode_told(setting)))
        else:
            what = many if name == "streams16_vs_best" else f"{sizes.num_prefill} tokens / time of one new token"
            rows.append(_versus(name, outcome, VERSUS_BEST[name], None, what))
    return rows


def measure_requantized(setting: Setting, wanted: list[str]) -> list[Row]:
    """Decoding from files of other types, beside llama.cpp on the same file. Without llama.cpp there are no such files."""
    rows = []
    for name in wanted:
        kind = REQUANTIZED[name]
        try:
            say(f"llamacpp: building if absent, {kind}")
            if "llamacpp" not in setting.peers:
                raise PeerError("llamacpp was left out (--peers)")
            file = peers.requantized(setting.path, kind)
            rows.append(_one_file(setting, name, file))
        except PeerError as error:
            say(f"  {error}")
            rows.append(claims.failed(CLAIMS[name], str(error), peer_name="llamacpp"))
    return rows


def _one_file(setting: Setting, name: str, file: Path) -> Row:
    """Raises PeerError."""
    sizes = setting.sizes
    context = -(-(sizes.num_prompt + sizes.num_new) // 256) * 256
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(peers.start("llamacpp", setting, gguf=file, streams=1, context=context))
        contestants: dict[str, Contestant] = {
            "llamacpp": Peer(worker),
            OURS: stack.enter_context(_ours(setting, str(file))),
        }
        outcome = compete(contestants, [_decode(setting)], rounds=sizes.rounds)
    return _versus(name, outcome, "decode", "llamacpp", f"{file.name}; {_decode_told(setting)}")


@contextlib.contextmanager
def _ours(setting: Setting, model: str) -> Iterator[Ours]:
    """Our engine, warm. Nothing may be remembered from one turn to the next, here as in the peers."""
    say("ours: loading")
    config = dataclasses.replace(setting.engine, enable_prefix_caching=False)
    with MotetEngine(model, config, threads=setting.threads) as engine:
        engine.streams(setting.prompts(0), 4)
        engine.one(setting.slice(0, setting.sizes.num_prompt), max_tokens=4)
        yield Ours(engine)


def _streams(setting: Setting) -> Event:
    return Event(name="streams", measure=lambda who, turn: who.streams(setting.prompts(turn), setting.sizes.num_new))


def _prefill(setting: Setting) -> Event:
    length = setting.sizes.num_prefill

    def measure(who: Contestant, number: int) -> float:
        return length / who.seconds(setting.slice(number, length), 1)

    return Event(name="prefill", measure=measure, repeats=3)


def _decode(setting: Setting) -> Event:
    sizes = setting.sizes

    def measure(who: Contestant, number: int) -> float:
        prompt = setting.slice(number, sizes.num_prompt)
        first = who.seconds(prompt, 1)
        return (sizes.num_new - 1) / max(who.seconds(prompt, sizes.num_new) - first, 1e-9)

    return Event(name="decode", measure=measure, who=frozenset({OURS, "llamacpp"}), repeats=2)


def _decode_told(setting: Setting) -> str:
    sizes = setting.sizes
    return (
        f"{sizes.num_new - 1} / (t{sizes.num_new} - t1) after a {sizes.num_prompt}-token prompt, "
        f"{setting.threads} threads each"
    )


def _versus(name: str, outcome: Outcome, event: str, peer: str | None, what: str) -> Row:
    """The row of ours beside one peer, or beside the best of those that were there."""
    claim = CLAIMS[name]
    ours = outcome.median(event, OURS)
    assert ours is not None
    key = peer or outcome.best_peer(event)
    theirs = None if key is None else outcome.median(event, key)
    if key is None or theirs is None:
        why = outcome.lost.get(peer, "") if peer else outcome.told(event)
        return claims.failed(
            claim, why or "no peer was there", ours=ours, peer_name=peer, ours_name=outcome.names[OURS]
        )
    why = what if peer else f"{what}; best of: {outcome.told(event)}"
    return claims.measured(
        claim, ours, theirs, peer_name=outcome.names[key], ours_name=outcome.names[OURS], runs=outcome.runs(event),
        why=why,
    )  # fmt: skip
