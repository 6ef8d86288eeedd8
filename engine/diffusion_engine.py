"""Pictures as an engine of the host: three stages, and a denoiser whose batch changes between any two steps.

Encoding (text, and pictures for image-to-image) and decoding run in threads of their own (engine/stages.py) while the host's loop
denoises: one `step` is at most one denoise step of one batch, so that between steps the arbiter may let speech go first, a
request may join or leave, and an abort takes effect. A row of the batch is one guidance branch of one picture, with its own time,
guidance, caption length and solver; who is in the batch is engine/row_plan.py's choice. A row whose numbers go wrong, or that
raises, fails its own request and nobody else's.

Queues are bounded from both ends: requests beyond `max_requests` are refused, and nothing is denoised while more pictures than
the decoder's queue takes wait for it. Not thread-safe: the host's loop is the only caller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..kernels.fp8 import is_protected
from .blobs import from_blob, to_blob
from .errors import DuplicateRequest, InternalError, InvalidRequest, Overloaded, to_info
from .painter import BeginSolver, Painter, Rows, SolverRun
from .picture_request import PictureOrder, PictureRules, check_order
from .prompt_cache import PromptCache
from .row_plan import RowPlanner, Unit
from .stages import Job, Stage, Watch
from .step_cache import CacheConfig, RowCache, cached_forward, check_cache, row_cache
from .types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    Blob,
    Denoising,
    Done,
    EmbeddingSpan,
    Failed,
    ImageRequest,
    ModelInfo,
    Picture,
    Timing,
    Usage,
)

# How late the end of a stage's job may be seen when nobody else has work: a tenth of the time since it was handed in.
_MIN_POLL_S, _MAX_POLL_S = 0.0003, 0.004
Mask: TypeAlias = Callable[[int], tuple[bool, ...] | None]


@dataclass(kw_only=True, eq=False)
class _Making:
    """State of one request."""

    request: ImageRequest
    order: PictureOrder
    number: int
    arrival: float
    job: Job | None = None  # in the encode stage
    conds: tuple[Any, ...] = ()  # of each guidance branch
    image: torch.Tensor | None = None
    canvases: dict[int, _Canvas] = field(default_factory=dict)  # being denoised, by index
    num_left: int = 0  # pictures that have not been sent
    num_tokens: int = 0
    first_scheduled: float | None = None
    first_picture: float | None = None
    num_events: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, tuple[float, int]]:
        due = self.request.deadline
        return (self.request.priority, (float("inf") if due is None else self.arrival + due, self.number))

    def usage(self) -> Usage:
        return Usage(num_prompt_tokens=self.num_tokens)

    def stamp(self, event: AnyEvent) -> AnyEvent:
        event.attempt = self.request.attempt
        event.seq = self.num_events
        self.num_events += 1
        return event


@dataclass(kw_only=True, eq=False)
class _Canvas:
    """One picture while it is denoised. `latents` are fp32 on the denoiser's device, its noise comes from the CPU."""

    making: _Making
    index: int
    solver: SolverRun
    generator: torch.Generator
    latents: torch.Tensor
    step: int
    caches: list[RowCache] | None  # one per branch
    preview: Job | None = None

    def noise(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float32).to(self.latents.device)


@dataclass(frozen=True, eq=False)
class _Encoded:
    """What the encode stage gives: the embeddings of prompts that were not known, and the picture to begin from."""

    conds: dict[str, Any]
    image: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _ToDecode:
    """What a decode job is for; with `step` it is a preview."""

    making: _Making
    index: int
    step: int | None


@dataclass(kw_only=True)
class _Counters:
    num_requests: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_skipped_rows: int = 0
    num_pictures: int = 0
    num_previews: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    prompt_queries: int = 0
    prompt_hits: int = 0
    denoise_s: float = 0.0


class DiffusionEngine:
    """One model. `clock` gives seconds, monotonic; `max_step_cost` is in the painter's unit; `mask` plans TeaCache; of a painter
    with FP8 weights the first and last `protected_steps` of each picture are computed in 16 bits."""

    kind = "image"

    def __init__(
        self,
        *,
        info: ModelInfo,
        painter: Painter,
        rules: PictureRules,
        begin_solver: BeginSolver,
        max_step_cost: float,
        max_rows: int = 64,
        max_requests: int = 64,
        stage_bound: int = 4,
        prompt_cache_bytes: int = 64 * 2**20,
        cache: CacheConfig | None = None,
        mask: Mask | None = None,
        protected_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.rules = rules
        self.painter = painter
        self.counters = _Counters()
        self.last_error: BaseException | None = None
        self.cache = check_cache(cache, few_step=rules.few_step, has_blocks=hasattr(painter, "begin"))
        self.prompts = PromptCache(prompt_cache_bytes, painter.num_bytes)
        self.planner = RowPlanner(max_step_cost=max_step_cost, max_rows=max_rows)
        self._mask = mask
        self._protected_steps = protected_steps if hasattr(painter, "protect") else 0
        self._begin_solver = begin_solver
        self._max_requests = max_requests
        self._clock = clock
        encode_device, self._device, decode_device = painter.devices
        self.encoder = Stage("encode", encode_device, bound=stage_bound)
        self.decoder = Stage("decode", decode_device, bound=stage_bound)
        self._requests: dict[str, _Making] = {}
        self._to_encode: list[_Making] = []
        self._to_decode: deque[tuple[_ToDecode, torch.Tensor]] = deque()
        self._cost_s: float | None = None  # seconds of one unit of cost, lately
        self._watch: Watch | None = None
        self._handed_in = 0.0  # when a stage got its last job

    def watch(self, watch: Watch | None) -> None:
        """Tell `watch` of every job of the stages ("encode", "decode", from their threads), of every step ("denoise")."""
        self._watch = self.encoder.watch = self.decoder.watch = watch

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: AnyRequest) -> None:
        """Start a request. Raises InvalidRequest (or a kind of it) when it can never work, Overloaded; nothing is kept then."""
        if not isinstance(request, ImageRequest):
            raise InvalidRequest(f"model {self.info.model!r} makes pictures and takes image requests", param="model")
        if request.request_id in self._requests:
            raise DuplicateRequest("request_id: this id is already running", param="request_id")
        order = check_order(request, self.rules)
        if len(self._requests) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests for pictures wait already", retry_after_s=5.0)
        self.counters.num_requests += 1
        making = _Making(
            request=request,
            order=order,
            number=self.counters.num_requests,
            arrival=self._clock(),
            num_left=len(order.seeds),
        )
        self._requests[request.request_id] = making
        self._to_encode.append(making)

    def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        """Requests for pictures take nothing more. Raises InvalidRequest."""
        raise InvalidRequest("append: a request for pictures takes no more input", param="request_id")

    def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        """A new priority or deadline of what has not been encoded yet; pictures that run keep theirs. Unknown ids are ignored."""
        making = self._requests.get(request_id)
        if making is None:
            return
        if priority is not None:
            making.request.priority = priority
        if deadline is not None:
            making.request.deadline = deadline

    def abort(self, request_id: str, reason: str) -> list[AnyEvent]:
        """End a request now: no later step computes its rows. What a stage is at is finished and dropped."""
        making = self._requests.get(request_id)
        if making is None:
            return []
        usage = making.usage()
        self._drop(making)
        return [making.stamp(Aborted(request_id=request_id, reason=reason, usage=usage))]

    # ------------------------------------------------------------------------------------------- for the arbiter

    def has_work(self) -> bool:
        """Whether a step would do something now; what the stages are at is no work for the loop."""
        if self.encoder.has_finished or self.decoder.has_finished:
            return True
        if self._to_encode and self.encoder.has_room or self._to_decode and self.decoder.has_room:
            return True
        return self._may_denoise()

    def next_deadline(self) -> float | None:
        """None: nobody listens to a picture in real time, so that speech goes first whenever it is due."""
        return None

    def best_priority(self) -> int:
        return min((making.request.priority for making in self._requests.values()), default=0)

    def num_requests(self) -> int:
        return len(self._requests)

    def next_timer(self) -> float | None:
        """A look at the stages soon, while they are at something."""
        busy = self.encoder.num_inside or self.decoder.num_inside
        if not busy:
            return None
        now = self._clock()
        return now + min(_MAX_POLL_S, max(_MIN_POLL_S, (now - self._handed_in) / 10))

    # ---------------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def step(self, slack_s: float | None = None) -> list[AnyEvent]:
        """Tell what the stages have finished, give them more, and denoise one step of one batch: a smaller one (a picture at
        least) where a step of all would take longer than `slack_s`, by what steps took lately."""
        events: list[AnyEvent] = []
        for job in self.decoder.take():
            events += self._decoded(job)
        for job in self.encoder.take():
            events += self._encoded(job)
        self._feed()
        if self._may_denoise():
            for unit in self.planner.admit():
                events += self._join(unit)
            most = None if slack_s is None or not self._cost_s else slack_s / self._cost_s
            units = self.planner.next_step(most)
            if units:
                events += self._denoise(units)
            self._feed()
        return events

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; counters only grow."""
        c = self.counters
        running = sum(bool(making.canvases) for making in self._requests.values())
        return {
            "running": running,
            "waiting": len(self._requests) - running,
            "requests": len(self._requests),
            "prompt_tokens": c.num_prompt_tokens,
            "diffusion_steps": c.num_steps,
            "diffusion_rows": c.num_rows,
            "diffusion_skipped_rows": c.num_skipped_rows,
            "diffusion_running_rows": self.planner.num_rows,
            "pictures": c.num_pictures,
            "picture_previews": c.num_previews,
            "failed_pictures": c.num_failed,
            "prompt_cache_queries": c.prompt_queries,
            "prompt_cache_hits": c.prompt_hits,
            "encode_seconds": self.encoder.busy_s,
            "denoise_seconds": c.denoise_s,
            "decode_seconds": self.decoder.busy_s,
        }

    def close(self) -> None:
        """Forget all requests and end the stages; what they are at is not waited for."""
        for making in list(self._requests.values()):
            self._drop(making)
        self.encoder.close()
        self.decoder.close()

    # ---------------------------------------------------------------------------------------------- encode stage

    def _feed(self) -> None:
        """Work for the stages that have room."""
        while self._to_encode and self.encoder.has_room:
            making = min(self._to_encode, key=lambda one: one.rank)
            self._to_encode.remove(making)
            making.job = Job(owner=making, work=self._encoding(making))
            self.encoder.offer(making.job)
            self._handed_in = self._clock()
        while self._to_decode and self.decoder.has_room:
            what, latents = self._to_decode.popleft()
            self._offer_decoding(what, latents)

    def _prompts(self, making: _Making) -> list[str]:
        order = making.order
        return [order.prompt] if order.negative_prompt is None else [order.prompt, order.negative_prompt]

    def _encoding(self, making: _Making) -> Callable[[], _Encoded]:
        """The encode stage's work for a request. Known prompts travel along, so that they cannot be forgotten meanwhile."""
        known: dict[str, Any] = {}
        for prompt in self._prompts(making):
            self.counters.prompt_queries += 1
            cond = self.prompts.get(prompt)
            if cond is not None:
                self.counters.prompt_hits += 1
                known[prompt] = cond
        unknown = list(dict.fromkeys(prompt for prompt in self._prompts(making) if prompt not in known))
        painter, image = self.painter, making.order.image

        def work() -> _Encoded:
            conds = dict(zip(unknown, painter.encode(unknown))) if unknown else {}
            return _Encoded(known | conds, None if image is None else painter.encode_image(from_blob(image)))

        return work

    def _encoded(self, job: Job) -> list[AnyEvent]:
        """A request's prompts are encoded: its pictures wait for the denoiser."""
        making: _Making = job.owner
        making.job = None
        if self._requests.get(making.id) is not making:
            return []
        if job.error is not None:
            return self._fail(making, job.error)
        encoded: _Encoded = job.result
        for prompt, cond in encoded.conds.items():
            self.prompts.put(prompt, cond)
        making.conds = tuple(encoded.conds[prompt] for prompt in self._prompts(making))
        making.image = encoded.image
        order, painter = making.order, self.painter
        tokens = [painter.num_tokens(cond) for cond in making.conds]
        making.num_tokens = tokens[0]
        self.counters.num_prompt_tokens += tokens[0]
        cost = sum(painter.cost(order.width, order.height, count) for count in tokens)
        cached = row_cache(self.cache, order.num_steps - order.begin) is not None
        for index in range(len(order.seeds)):
            unit = Unit(
                name=(making.id, index),
                key=(painter.batch_key(order.width, order.height), cached),
                rows=len(making.conds),
                cost=cost,
                priority=making.request.priority,
                order=making.rank[1],
            )
            self.planner.add(unit)
        return []

    # --------------------------------------------------------------------------------------------- denoise stage

    def _may_denoise(self) -> bool:
        """Not while finished pictures wait for room at the decoder: that is what bounds the latents under way."""
        return not self._to_decode and bool(self.planner.num_running or self.planner.num_waiting)

    def _join(self, unit: Unit) -> list[AnyEvent]:
        """A picture's latents come to be, from its own generator."""
        request_id, index = unit.name
        making = self._requests.get(request_id)
        if making is None:  # a sibling has failed just now
            return []
        order = making.order
        try:
            shape = self.painter.latent_shape(order.width, order.height)
            generator = torch.Generator("cpu").manual_seed(order.seeds[index])
            solver = self._begin_solver(order, shape)
            noise = torch.randn(shape, generator=generator, dtype=torch.float32).to(self._device)
            latents = solver.start(noise, making.image)
        except Exception as error:
            return self._fail(making, error)
        num_steps = order.num_steps - order.begin
        mask = self._mask(order.num_steps) if self._mask is not None and not order.begin else None
        caches = [row_cache(self.cache, num_steps, mask) for _ in making.conds]
        making.canvases[index] = _Canvas(
            making=making,
            index=index,
            solver=solver,
            generator=generator,
            latents=latents,
            step=order.begin,
            caches=[cache for cache in caches if cache is not None] or None,
        )
        if making.first_scheduled is None:
            making.first_scheduled = self._clock()
        return []

    def _denoise(self, units: Sequence[Unit]) -> list[AnyEvent]:
        """One step of these pictures."""
        began = self._clock()
        canvases = [
            making.canvases[unit.name[1]] for unit in units if (making := self._requests.get(unit.name[0])) is not None
        ]
        if not canvases:
            return []
        events: list[AnyEvent] = []
        for canvas, outcome in zip(canvases, self._predict(canvases)):
            making = canvas.making
            if self._requests.get(making.id) is not making:
                continue  # a sibling in this very batch has failed
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                events += self._advance(canvas, outcome)
            except Exception as error:
                events += self._fail(making, error)
        seconds = self._clock() - began
        if self._watch is not None:
            now = time.perf_counter()
            self._watch("denoise", now - seconds, now)
        self.counters.num_steps += 1
        self.counters.num_rows += sum(unit.rows for unit in units)
        self.counters.denoise_s += seconds
        per_cost = seconds / max(1e-9, sum(unit.cost for unit in units))
        self._cost_s = per_cost if self._cost_s is None else 0.8 * self._cost_s + 0.2 * per_cost
        return events

    def _predict(self, canvases: Sequence[_Canvas]) -> Sequence[torch.Tensor | BaseException]:
        """Each picture's guided prediction, or what went wrong with it. Pictures at protected steps take a pass of their own, so
        that nobody's numbers depend on where its neighbours are."""
        if not (count := self._protected_steps):
            return self._predict_together(canvases)
        outcomes: dict[_Canvas, torch.Tensor | BaseException] = {}
        for exact in (True, False):
            group = [
                canvas
                for canvas in canvases
                if is_protected(canvas.step, canvas.making.order.num_steps, first=count, last=count) is exact
            ]
            if group:
                self.painter.protect(exact)  # type: ignore[attr-defined]
                outcomes.update(zip(group, self._predict_together(group)))
        return [outcomes[canvas] for canvas in canvases]

    def _predict_together(self, canvases: Sequence[_Canvas]) -> Sequence[torch.Tensor | BaseException]:
        try:
            rows = self._rows(canvases)
            if canvases[0].caches is not None:
                caches = [cache for canvas in canvases for cache in canvas.caches or ()]
                prediction = cached_forward(self.painter, rows, caches)  # type: ignore[arg-type]
                self.counters.num_skipped_rows += sum(not cache.decisions[-1] for cache in caches)
            else:
                prediction = self.painter.forward(rows)
            if len(prediction) != len(rows):
                raise InternalError(f"expected {len(rows)} predictions, got {len(prediction)}")
            prediction = prediction.float()
            finite = torch.isfinite(prediction.flatten(1)).all(1).tolist()  # the step's one wait for the device
        except Exception as error:
            self.last_error = error
            for canvas in canvases:
                self._forget_past(canvas)
            if len(canvases) == 1:
                return [error]
            # Whoever it was fails alone: each picture once more, by itself.
            return [self._predict_together([canvas])[0] for canvas in canvases]
        outcomes: list[torch.Tensor | BaseException] = []
        at = 0
        for canvas in canvases:
            count = len(canvas.making.conds)
            if all(finite[at : at + count]):
                outcomes.append(guided(self.painter, prediction[at : at + count], canvas.making.order.guidance_scale))
            else:
                outcomes.append(InternalError("the model's numbers went out of range", code="not_finite"))
            at += count
        return outcomes

    @staticmethod
    def _forget_past(canvas: _Canvas) -> None:
        """After a step that failed half way: caches as new, which compute it."""
        step = canvas.step - canvas.making.order.begin
        if canvas.caches is not None:
            canvas.caches = [RowCache(cache.config, cache.num_steps, step=step) for cache in canvas.caches]

    def _rows(self, canvases: Sequence[_Canvas]) -> Rows:
        latents, times, guidance, conds = [], [], [], []
        for canvas in canvases:
            scaled = canvas.solver.scale(canvas.latents, canvas.step)
            for cond in canvas.making.conds:
                latents.append(scaled)
                times.append(canvas.solver.time(canvas.step))
                guidance.append(canvas.making.order.guidance_scale)
                conds.append(cond)
        order = canvases[0].making.order
        return Rows(
            latents=torch.stack(latents),
            times=torch.tensor(times, dtype=torch.float32, device=self._device),
            guidance=torch.tensor(guidance, dtype=torch.float32, device=self._device),
            conds=conds,
            width=order.width,
            height=order.height,
        )

    def _advance(self, canvas: _Canvas, prediction: torch.Tensor) -> list[AnyEvent]:
        """The solver's step of one picture; its last one sends it to the decoder."""
        making, order = canvas.making, canvas.making.order
        noise = canvas.noise(canvas.latents.shape) if canvas.solver.takes_noise(canvas.step) else None
        canvas.latents, seen = canvas.solver.advance(canvas.latents, prediction, canvas.step, noise)
        canvas.step += 1
        done, total = canvas.step - order.begin, order.num_steps - order.begin
        event = Denoising(request_id=making.id, step=done, num_steps=total, index=canvas.index)
        events = [making.stamp(event)]
        if done == total:
            del making.canvases[canvas.index]
            self.planner.remove((making.id, canvas.index))
            self._to_decode.append((_ToDecode(making, canvas.index, None), canvas.latents))
        elif order.preview_every and done % order.preview_every == 0:
            waits = canvas.preview is not None and not (canvas.preview.result is not None or canvas.preview.error)
            # A preview is never waited for: without room at the decoder it is left out.
            if not waits and self.decoder.has_room and not self._to_decode:
                canvas.preview = self._offer_decoding(_ToDecode(making, canvas.index, done), seen)
        return events

    # ---------------------------------------------------------------------------------------------- decode stage

    def _offer_decoding(self, what: _ToDecode, latents: torch.Tensor) -> Job:
        painter = self.painter

        def work() -> Blob | None:
            if self._requests.get(what.making.id) is not what.making:
                return None  # aborted meanwhile
            return to_blob(painter.decode(latents[None])[0])

        job = Job(owner=what, work=work, after=self.decoder.mark())
        self.decoder.offer(job)
        self._handed_in = self._clock()
        return job

    def _decoded(self, job: Job) -> list[AnyEvent]:
        """A picture or a preview for its reader."""
        what: _ToDecode = job.owner
        making = what.making
        if self._requests.get(making.id) is not making:
            return []
        if job.error is not None:
            if what.step is None:
                return self._fail(making, job.error)
            self.last_error = job.error
            return []
        order, image = making.order, job.result
        if what.step is not None:
            self.counters.num_previews += 1
            total = order.num_steps - order.begin
            event = Denoising(request_id=making.id, step=what.step, num_steps=total, index=what.index, preview=image)
            return [making.stamp(event)]
        now = self._clock()
        self.counters.num_pictures += 1
        making.num_left -= 1
        if making.first_picture is None:
            making.first_picture = now
        picture = Picture(request_id=making.id, index=what.index, seed=order.seeds[what.index], image=image)
        events = [making.stamp(picture)]
        if not making.num_left:
            timing = Timing(
                queue_s=(making.first_scheduled or now) - making.arrival,
                first_token_s=making.first_picture - making.arrival,
                total_s=now - making.arrival,
            )
            self._drop(making)
            done = Done(request_id=making.id, finish_reason="stop", usage=making.usage(), timing=timing)
            events.append(making.stamp(done))
        return events

    # --------------------------------------------------------------------------------------------------- endings

    def _fail(self, making: _Making, error: BaseException) -> list[AnyEvent]:
        self.last_error = error
        self.counters.num_failed += 1
        self._drop(making)
        return [making.stamp(Failed(request_id=making.id, error=to_info(error)))]

    def _drop(self, making: _Making) -> None:
        """Forget a request wherever it is."""
        del self._requests[making.id]
        if making in self._to_encode:
            self._to_encode.remove(making)
        if making.job is not None:
            making.job.cancelled = True
        for index in range(len(making.order.seeds)):
            self.planner.remove((making.id, index))
        making.canvases.clear()
        making.conds, making.image = (), None
        self._to_decode = deque(entry for entry in self._to_decode if entry[0].making is not making)


def guided(painter: Painter, prediction: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance over a picture's branches [1 or 2, ...]: with the prompt, with the negative one. Plain, unless the
    painter has a `guide` of its own."""
    if len(prediction) == 1:
        return prediction[0]
    with_prompt, without = prediction[0], prediction[1]
    guide = getattr(painter, "guide", None)
    if guide is not None:
        return guide(with_prompt, without, scale)  # type: ignore[no-any-return]
    return without + scale * (with_prompt - without)
