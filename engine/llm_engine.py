"""The LLM engine: requests in, events out, one step at a time. Speaks token ids; text is the frontend's business.

A step reads: schedule, launch, result, land. With `depth` plans in flight the oldest is landed after a newer one was
launched. Not thread-safe: the host's loop is the only caller.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

from .cache.hashing import root_key
from .errors import ContextLengthExceeded, DuplicateRequest, InvalidRequest, to_info
from .executor import Executor, Handle
from .params import check_blob, check_request, check_side_ids
from .roofline import Roofline
from .scheduler import Output, Scheduler
from .sequence import Sequence, State
from .types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    Done,
    EmbeddingSpan,
    Failed,
    ModelInfo,
    Pooled,
    Request,
    StepPlan,
    StepResult,
    Timing,
    Tokens,
    Usage,
)


class LLMEngine:
    """One model on one executor. `clock` gives seconds, monotonic."""

    kind = "llm"

    def __init__(
        self,
        *,
        info: ModelInfo,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        depth: int = 0,
        flight_recorder: int = 64,
        input_timeout_s: float = 300.0,
        weight_epoch: int = 0,
        seed: int = 0,
        kv_dtype: str = "",
        roofline: Roofline | None = None,
    ) -> None:
        self.info = info
        self.roofline = roofline
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.last_error: Exception | None = None  # what failed the last failed step, for people who look
        self.flight_recorder: deque[tuple[StepPlan, StepResult | None]] = deque(maxlen=flight_recorder)
        self._clock = clock
        self._input_timeout_s = input_timeout_s
        self._weight_epoch = weight_epoch
        self._seed = seed
        self._kv_dtype = kv_dtype  # of a quantized cache: part of every block's key
        self._sequences: dict[str, Sequence] = {}
        self._flying: deque[tuple[StepPlan, Handle]] = deque()
        self._num_submitted = 0
        self._seconds_per_token = 0.0  # of large steps, for bounding a step to a slack

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequest (or a kind of it) when it can never run; nothing is kept then."""
        if not isinstance(request, Request):
            raise InvalidRequest(f"model {self.info.model!r} answers text requests, not audio", param="model")
        if request.request_id in self._sequences:
            raise DuplicateRequest("request_id: this id is already running", param="request_id")
        info, params = self.info, request.params
        check_request(
            request, max_model_len=info.max_model_len, vocab_size=info.vocab_size, hidden_size=info.hidden_size
        )
        if request.side or info.num_codebooks > 1:
            check_side_ids(request, info)
        generates = request.task == "generate"
        # Without max_tokens the output may grow to whatever fits; a number that was asked for must fit.
        room = min(info.max_model_len, self.scheduler.longest()) - len(request.prompt)
        max_output = (max(1, room) if params.max_tokens is None else params.max_tokens) if generates else 0
        if not self.scheduler.fits(len(request.prompt) + max_output):
            pool = self.scheduler.cache.pool
            raise ContextLengthExceeded(
                f"prompt ({len(request.prompt)} tokens) and output (up to {max_output}) need "
                f"{self.scheduler.cache.num_blocks_for(len(request.prompt) + max_output)} KV blocks of "
                f"{self.scheduler.cache.block_size} tokens; this engine has {pool.num_usable}",
                param="max_tokens",
            )
        self._num_submitted += 1
        now = self._clock()
        seq = Sequence(
            request=request,
            seed=params.seed if params.seed is not None else self._draw_seed(),
            order=self._num_submitted,
            arrival=now,
            priority=request.priority,
            token_ids=list(request.prompt),
            num_prompt=len(request.prompt),
            max_output=max_output,
            stop_ids=frozenset((*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids))),
            root=root_key(
                model=info.model,
                weight_epoch=self._weight_epoch,
                cache_salt=request.cache_salt,
                kv_dtype=self._kv_dtype,
            ),
            tables=self.scheduler.cache.new_tables(),
            embeddings=list(request.embeddings),
            input_open=request.open,
            input_since=now,
        )
        self._sequences[request.request_id] = seq
        self.scheduler.add(seq)

    def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        """More input for an open request. Raises InvalidRequest when it is not open, or no longer fits."""
        seq = self._sequences.get(request_id)
        if pcm:
            raise InvalidRequest("append: a language model takes token ids, not audio", param="pcm")
        if seq is None or not seq.input_open:
            raise InvalidRequest("append: this request is unknown or takes no more input", param="request_id")
        if token_ids and not (0 <= min(token_ids) and max(token_ids) < self.info.vocab_size):
            raise InvalidRequest(f"append: expected token ids in [0, {self.info.vocab_size})", param="token_ids")
        total = len(seq.token_ids) + len(token_ids)
        if last and not total:
            raise InvalidRequest("append: the request ends without any input", param="token_ids")
        if total >= self.info.max_model_len or not self.scheduler.fits(total + 1):
            raise ContextLengthExceeded(
                f"append: {total} input tokens leave no room for output in {self.info.max_model_len}", param="token_ids"
            )
        for span in embeddings or []:
            check_blob(span.blob)
            shape = span.blob.shape
            low, high = len(seq.token_ids), total
            if len(shape) != 2 or shape[1] != self.info.hidden_size or not low <= span.start <= high - shape[0]:
                raise InvalidRequest(
                    f"append: expected embeddings [n, {self.info.hidden_size}] within positions {low}..{high}, got "
                    f"{list(shape)} at {span.start}",
                    param="embeddings",
                )
        if seq.request.task == "generate":
            room = min(self.info.max_model_len, self.scheduler.longest()) - total
            asked = seq.request.params.max_tokens
            seq.max_output = room if asked is None else min(asked, room)
        seq.input_since = self._clock()
        self.scheduler.append(seq, token_ids, embeddings or [], last=last)

    def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None:
        """A new priority, or a new deadline in seconds from submit. Unknown ids are ignored: they may just have ended."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return
        if priority is not None:
            self.scheduler.reprioritize(seq, priority)
        if deadline is not None:
            seq.request.deadline = deadline

    def hold(self, request_id: str, held: bool) -> None:
        """Give a request no work until it is let go of; it keeps what it has. For engines built on this one."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.held = held

    def abort(self, request_id: str, reason: str) -> list[AnyEvent]:
        """End a request now, in whatever state. Gives its terminal event; nothing when it has already ended."""
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return []
        self.scheduler.finish(seq)
        return [self._stamp(seq, Aborted(request_id=request_id, reason=reason, usage=_usage(seq)))]

    # --------------------------------------------------------------------------------------------------- steps

    def has_work(self) -> bool:
        return bool(self._flying) or self.scheduler.has_work()

    def num_requests(self) -> int:
        return len(self._sequences)

    def next_deadline(self) -> float | None:
        """The earliest time at which somebody's first token is due, on this engine's clock."""
        due = [
            seq.arrival + seq.request.deadline
            for seq in self._sequences.values()
            if seq.request.deadline is not None and seq.first_token is None
        ]
        return min(due, default=None)

    def best_priority(self) -> int:
        """Priority of the most urgent request, for the arbiter."""
        return min((seq.priority for seq in self._sequences.values()), default=0)

    def next_timer(self) -> float | None:
        """When `step` should be called even without work: a lease or an input timeout ends."""
        waiting = [seq.input_since + self._input_timeout_s for seq in self._sequences.values() if seq.input_open]
        lease = self.scheduler.next_lease_end()
        return min([*waiting, *([lease] if lease is not None else [])], default=None)

    def step(self, slack_s: float | None = None) -> list[AnyEvent]:
        """Schedule, launch, result, land. `slack_s` bounds the step's length by lowering its token budget."""
        now = self._clock()
        events = self._end_starved(now)
        try:
            plan = self.scheduler.schedule(now, self._budget(slack_s))
            if plan is not None:
                self._flying.append((plan, self.executor.launch(plan)))
            if not self._flying or (plan is not None and len(self._flying) <= self.depth):
                return events
            plan, handle = self._flying.popleft()
            result = handle.result()
        except Exception as error:  # whatever a step raises ends the requests in it, never the engine
            return events + self._fail_in_flight(error)
        self.flight_recorder.append((plan, result))
        self._learn_speed(plan, result)
        if self.roofline is not None:
            self.roofline.observe(plan, result.seconds)
        for output in self.scheduler.land(plan, result, self._clock()):
            events.extend(self._events(output))
        return events

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics; counters only grow."""
        scheduler, pool, c = self.scheduler, self.scheduler.cache.pool, self.scheduler.counters
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "waiting_for_input": len(scheduler.hungry),
            "kv_usage": 1.0 - pool.num_free / pool.num_usable,
            "num_blocks": pool.num_blocks,
            "block_size": scheduler.cache.block_size,
            "cached_blocks": pool.num_cached,
            "prefix_queries": c.num_prefix_queries,
            "prefix_hits": c.num_prefix_hits,
            "preemptions": c.num_preemptions,
            "prompt_tokens": c.num_prompt_tokens,
            "generation_tokens": c.num_output_tokens,
            "drafted_tokens": c.num_drafted,
            "accepted_tokens": c.num_accepted,
            "steps": c.num_steps,
            "step_tokens": c.num_step_tokens,
            "roofline": self.roofline.fractions() if self.roofline is not None else {},
        }

    def close(self) -> None:
        self.executor.close()

    # -------------------------------------------------------------------------------------------------- insides

    def _events(self, output: Output) -> list[AnyEvent]:
        seq = output.sequence
        request_id = seq.request.request_id
        if self._sequences.get(request_id) is not seq:
            return []  # aborted between launch and landing
        events: list[AnyEvent] = []
        wants_prompt = seq.request.params.prompt_logprobs is not None and seq.num_events == 0 and not output.error
        if output.token_ids or wants_prompt:
            events.append(
                Tokens(
                    request_id=request_id,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    prompt_logprobs=seq.prompt_logprobs if wants_prompt else None,
                    num_cached_tokens=seq.num_cached,
                    side_ids=output.side_ids,
                )
            )
        if output.pooled is not None:
            events.append(Pooled(request_id=request_id, output=output.pooled))
        if output.error is not None:
            events.append(Failed(request_id=request_id, error=output.error))
        elif output.finish_reason is not None:
            now = self._clock()
            timing = Timing(
                queue_s=(seq.first_scheduled or now) - seq.arrival,
                first_token_s=(seq.first_token or now) - seq.arrival,
                total_s=now - seq.arrival,
            )
            events.append(
                Done(
                    request_id=request_id,
                    finish_reason=output.finish_reason,
                    stop_token=output.stop_token,
                    usage=_usage(seq),
                    timing=timing,
                )
            )
        if output.error is not None or output.finish_reason is not None:
            del self._sequences[request_id]
        return [self._stamp(seq, event) for event in events]

    def _stamp(self, seq: Sequence, event: AnyEvent) -> AnyEvent:
        event.attempt = seq.request.attempt
        event.seq = seq.num_events
        seq.num_events += 1
        return event

    def _end_starved(self, now: float) -> list[AnyEvent]:
        late = [
            request_id
            for request_id, seq in self._sequences.items()
            if seq.state is State.WAITING_FOR_INPUT and now - seq.input_since >= self._input_timeout_s
        ]
        return [event for request_id in late for event in self.abort(request_id, "input_timeout")]

    def _fail_in_flight(self, error: Exception) -> list[AnyEvent]:
        self._flying.clear()
        info = to_info(error)
        events: list[AnyEvent] = []
        for seq in self.scheduler.fail_in_flight():
            if self._sequences.pop(seq.request.request_id, None) is seq:
                events.append(self._stamp(seq, Failed(request_id=seq.request.request_id, error=info)))
        self.last_error = error
        return events

    def _budget(self, slack_s: float | None) -> int | None:
        if slack_s is None or not self._seconds_per_token:
            return None
        return max(len(self.scheduler.running), int(max(0.0, slack_s) / self._seconds_per_token))

    def _learn_speed(self, plan: StepPlan, result: StepResult) -> None:
        count = sum(step.num_tokens for step in plan.steps if step.layers is None)
        if count >= 32 and count == sum(step.num_tokens for step in plan.steps) and result.seconds > 0:
            new = result.seconds / count
            old = self._seconds_per_token or new
            self._seconds_per_token = 0.8 * old + 0.2 * new

    def _draw_seed(self) -> int:
        """A seed for a request that brought none: fixed by the engine's seed and the request's number."""
        data = f"{self._seed}:{self._num_submitted}".encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _usage(seq: Sequence) -> Usage:
    return Usage(num_prompt_tokens=seq.num_prompt, num_cached_tokens=seq.num_cached, num_output_tokens=seq.num_output)
