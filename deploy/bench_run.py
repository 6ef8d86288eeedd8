"""A run of `motet bench llm`: finds or starts the server, warms it up, sends the load, reports. Ctrl-C reports what there is."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engine.errors import MotetError, Unavailable
from ..models.registry import find
from ..models.tokenizer import load_tokenizer
from ..pipelines.hub import default_model
from .bench import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS
from .bench_client import BenchClient, HttpError
from .bench_load import Arrivals, Encoder, Job, jobs
from .bench_report import Record, figures, table
from .config import ConfigError
from .demo import free_port, running_server


def run_llm(namespace: argparse.Namespace) -> int:
    """Exit status 0 when at least one request went well, 1 when none did, 130 after Ctrl-C."""
    if namespace.rate is not None and namespace.concurrency is not None:
        raise ConfigError("bench llm: --rate (open loop) or --concurrency (closed loop), not both")
    if namespace.arrival is not None and namespace.rate is None:
        raise ConfigError("bench llm: --arrival needs --rate")
    if namespace.json is not None and not namespace.json.resolve().parent.is_dir():
        raise ConfigError(f"bench llm: --json: no such folder: {namespace.json.parent}")
    with contextlib.ExitStack() as stack:
        url, model = namespace.url, namespace.model
        if url is None:
            model = model or default_model("llm")
            url = stack.enter_context(running_server(model, free_port()))
        try:
            client = BenchClient(url, api_key=namespace.api_key, timeout_s=namespace.timeout)
        except ValueError as error:
            raise ConfigError(f"bench llm: --url: {error}") from None
        bench = LLMBench(client, namespace, model)
        asyncio.run(bench.run())
        report = bench.report()
    print(f"\n{bench.title()}\n{table(report)}", flush=True)
    if namespace.json is not None:
        namespace.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if bench.interrupted:
        return 130
    return 0 if report["requests"]["completed"] else 1


class LLMBench:
    """One run: warm-up, then a loop. `report` can be asked for at any time after."""

    def __init__(self, client: BenchClient, options: argparse.Namespace, model: str | None) -> None:
        self.interrupted = False
        self._client = client
        self._options = options
        self._model = model or ""
        self._encoder: Encoder | None = None
        self._records: list[Record] = []
        self._on_their_way: set[int] = set()
        self._began = 0.0

    async def run(self) -> None:
        """Raises Unavailable when the server cannot be spoken to, before anything is measured."""
        loop = asyncio.get_running_loop()
        work = asyncio.current_task()
        assert work is not None

        def stop() -> None:
            self.interrupted = True
            work.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            async with self._client:
                await self._prepare()
                self._began = time.perf_counter()
                await self._measure()
        except asyncio.CancelledError:
            if not self.interrupted:
                raise
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def report(self) -> dict[str, Any]:
        options = self._options
        settings = {
            "url": self._client.url, "model": self._model, "loop": "open" if options.rate else "closed",
            "rate": options.rate, "arrival_variation": self._variation if options.rate else None,
            "concurrency": None if options.rate else self._concurrency, "isl": str(options.isl), "osl": str(options.osl),
            "warmup": options.warmup, "seed": options.seed, "duration": options.duration,
            "num_requests": self._limit, "exact_lengths": self._encoder is not None, "interrupted": self.interrupted,
        }  # fmt: skip
        return {"settings": settings, **figures(self._records, num_unfinished=len(self._on_their_way))}

    def title(self) -> str:
        options = self._options
        how = f"open loop, {options.rate:g} requests/s" if options.rate else f"closed loop, {self._concurrency} at once"
        unit = "tokens" if self._encoder is not None else "words"
        stopped = ", stopped early" if self.interrupted else ""
        return f"{self._model} at {self._client.url}: {how}, {options.isl} {unit} in, {options.osl} tokens out{stopped}"

    @property
    def _concurrency(self) -> int:
        return int(self._options.concurrency or DEFAULT_CONCURRENCY)

    @property
    def _variation(self) -> float:
        return 1.0 if self._options.arrival is None else float(self._options.arrival)

    @property
    def _limit(self) -> int | None:
        options = self._options
        return options.num_requests or (None if options.duration else DEFAULT_REQUESTS)

    async def _prepare(self) -> None:
        """Find the model and its tokenizer; send what does not count."""
        try:
            if not self._model:
                found = await self._client.models()
                if not found:
                    raise Unavailable(f"the server at {self._client.url} names no models; say which to ask for")
                self._model = found[0]
            self._encoder = _encoder(self._options.tokenizer, self._model)
            # Other prompts than those that count: a prefix cache must know none of these.
            warm = self._jobs(f"warm-up {self._options.seed}")
            for job, _ in zip(warm, range(self._options.warmup)):
                await self._client.complete(self._body(job))
        except HttpError as error:
            code = f" ({error.code})" if error.code.isdigit() else ""
            raise Unavailable(f"{self._client.url}: {error}{code}") from None

    async def _measure(self) -> None:
        source = self._jobs(self._options.seed)
        if self._options.rate:
            await self._open_loop(source)
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._closed_worker(source))

    def _jobs(self, seed: int | str) -> Iterator[Job]:
        options = self._options
        return jobs(isl=options.isl, osl=options.osl, seed=seed, encoder=self._encoder)

    def _may_send(self, job: Job) -> bool:
        duration = self._options.duration
        if duration is not None and time.perf_counter() - self._began >= duration:
            return False
        return self._limit is None or job.number < self._limit

    async def _closed_worker(self, source: Iterator[Job]) -> None:
        for job in source:
            if not self._may_send(job):
                return
            await self._send(job)

    async def _open_loop(self, source: Iterator[Job]) -> None:
        """Send at the drawn times, however many are on their way."""
        arrivals = Arrivals(rate=self._options.rate, variation=self._variation)
        async with asyncio.TaskGroup() as group:
            for job, due in zip(source, arrivals.times(random.Random(f"{self._options.seed}/arrivals"))):
                duration = self._options.duration
                if duration is not None and due >= duration:
                    return
                await asyncio.sleep(max(0.0, self._began + due - time.perf_counter()))
                if not self._may_send(job):
                    return
                group.create_task(self._send(job))

    async def _send(self, job: Job) -> None:
        """One request that counts."""
        self._on_their_way.add(job.number)
        body = self._body(job)
        sent = time.perf_counter()
        try:
            streamed = await self._client.complete(body)
        except HttpError as error:
            now = time.perf_counter()
            record = Record(
                number=job.number,
                sent=sent - self._began,
                ended=now - self._began,
                error=error.code,
                message=str(error),
            )
        else:
            record = Record(
                number=job.number,
                sent=sent - self._began,
                ended=streamed.ended - self._began,
                arrivals=tuple(arrival - self._began for arrival in streamed.arrivals),
                num_prompt_tokens=streamed.num_prompt_tokens,
                num_output_tokens=streamed.num_output_tokens,
            )
        self._on_their_way.discard(job.number)
        self._records.append(record)
        if record.error and sum(r.error == record.error for r in self._records) == 1:
            print(f"motet: request {job.number} failed ({record.error}): {record.message}", file=sys.stderr)

    def _body(self, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "prompt": job.prompt, "max_tokens": job.max_tokens, "stream": True,
            "temperature": self._options.temperature, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return body if self._options.stop_at_end else {**body, "ignore_eos": True}


def _encoder(wanted: str | None, model: str) -> Encoder | None:
    """The tokenizer of a model that is here; nothing is downloaded. Without one: None, unless it was asked for."""
    name = wanted or model
    spec = find(name)
    path = Path(name).expanduser()
    try:
        if spec is not None:
            return load_tokenizer(spec.locate())
        if path.exists():
            return load_tokenizer(path)
    except MotetError:
        if wanted is not None:
            raise
    if wanted is not None:
        raise ConfigError(f"bench llm: --tokenizer: no installed model, file or directory {wanted!r}")
    return None
