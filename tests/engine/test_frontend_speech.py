"""Text to audio over a scripted engine: what is said when, how much is under way, errors, cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.engine.errors import ErrorInfo, InvalidRequest, ModelNotFound
from motet.engine.frontend.speech import AHEAD_S, SpeakRequest, SpeechEvent, SpeechFrontend, SpokenAudio
from motet.engine.types import Aborted, Done, Failed, SamplingParams

from .. import tiny
from ..pipelines.scripted_voice import MODEL, SECONDS_PER_ID, ScriptedVoice

LONG = "The river was wide and slow that year. " * 60


@pytest.fixture
def client(tmp_path: Path) -> ScriptedVoice:
    return ScriptedVoice(tmp_path)


def speak(client: ScriptedVoice, text: object, **options: object) -> list[SpeechEvent]:
    async def run() -> list[SpeechEvent]:
        request = SpeakRequest(model=MODEL, text=text, **options)  # type: ignore[arg-type]
        return [event async for event in SpeechFrontend(client).speak(request)]

    return asyncio.run(run())


async def pieces(*texts: str | None, gap_s: float = 0.0) -> AsyncIterator[str | None]:
    for text in texts:
        await asyncio.sleep(gap_s)
        yield text


def test_a_text_is_spelled_out_cut_and_spoken(client: ScriptedVoice) -> None:
    events = speak(client, "Dr. Lee paid $3. Then he left!")
    assert client.texts() == ["doctor lee paid three dollars.", "then he left."]
    assert not client.requests[0].open, "a short text is one message"
    audio = [event for event in events if isinstance(event, SpokenAudio)]
    assert [event.text for event in audio if event.text] == client.texts()
    assert [event.utterance for event in audio if event.last] == [0, 1]
    done = events[-1]
    assert isinstance(done, Done) and len(events) == len(audio) + 1
    assert done.audio_s == pytest.approx(sum(event.seconds for event in audio))
    num_ids = sum(map(len, client.requests[0].utterances))
    assert done.audio_s == pytest.approx(num_ids * SECONDS_PER_ID + 0.15, abs=0.01), "a pause between two sentences"


def test_one_word_joins_what_follows(client: ScriptedVoice) -> None:
    speak(client, "Yes. I do. No.")
    assert client.texts() == ["yes, i do.", "no."]


def test_letters_that_stand_alone_are_named(client: ScriptedVoice) -> None:
    speak(client, "The FBI came at 5 p.m. sharp.")
    assert client.texts() == ["the eff bee eye came at five pee em sharp."]


def test_the_first_utterance_of_a_long_sentence_is_short(client: ScriptedVoice) -> None:
    speak(client, "When the sun goes down, everybody walks along the river and looks at the boats.")
    assert client.texts()[0] == "when the sun goes down."


def test_what_is_under_way_is_bounded_by_what_the_reader_takes(client: ScriptedVoice) -> None:
    async def run() -> None:
        stream = SpeechFrontend(client).speak(SpeakRequest(model=MODEL, text=LONG))
        event = await anext(stream)
        assert isinstance(event, SpokenAudio)
        await asyncio.sleep(0.05)
        given = client.utterances[client.requests[0].request_id]
        assert 4 <= len(given) <= 12
        before, taken = len(given), 0.0
        while taken < AHEAD_S:
            event = await anext(stream)
            assert isinstance(event, SpokenAudio)
            taken += event.seconds
        await asyncio.sleep(0.05)
        assert before < len(given) <= 2 * before + 2
        rest = [event async for event in stream]
        assert isinstance(rest[-1], Done) and len(given) == 60

    asyncio.run(run())


def test_text_is_pulled_only_while_there_is_room(client: ScriptedVoice) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal pulled
        while True:
            pulled += 1
            yield "The river was wide and slow that year. "

    async def run() -> None:
        stream = SpeechFrontend(client).speak(SpeakRequest(model=MODEL, text=endless()))
        await anext(stream)
        await asyncio.sleep(0.05)
        assert pulled < 15
        await stream.aclose()
        await asyncio.sleep(0)
        assert client.num_running == 0

    asyncio.run(run())


def test_streamed_text_is_spoken_sentence_by_sentence(client: ScriptedVoice) -> None:
    words = "Good evening, my dear old friends. It is 7:05 p.m. now. Shall we go?".split(" ")
    speak(client, pieces(*[word + " " for word in words]))
    assert client.texts() == [
        "good evening, my dear old friends.",
        "it is seven oh five pee em now.",
        "shall we go?",
    ]
    assert client.requests[0].open


def test_streamed_text_begins_at_a_clause(client: ScriptedVoice) -> None:
    async def text() -> AsyncIterator[str]:
        yield "When the sun goes down, "
        while not client.num_made:  # it is spoken before the rest is known
            await asyncio.sleep(0.001)
        yield "we walk home."

    speak(client, text())
    assert client.texts() == ["when the sun goes down.", "we walk home."]


def test_text_that_pauses_is_spoken_as_it_is(client: ScriptedVoice) -> None:
    async def text() -> AsyncIterator[str]:
        yield "Half a sentence and"
        while not client.num_made:
            await asyncio.sleep(0.001)
        yield " its other half"

    speak(client, text(), idle_s=0.02)
    assert client.texts() == ["half a sentence and.", "its other half."]


def test_none_speaks_what_is_there(client: ScriptedVoice) -> None:
    speak(client, pieces("Half a sentence", None, None, "and the rest"), idle_s=60.0)
    assert client.texts() == ["half a sentence.", "and the rest."]


def test_a_slow_writer_is_waited_for(client: ScriptedVoice) -> None:
    speak(client, pieces("We go ", "home now. ", "They stay ", "here.", gap_s=0.01), idle_s=60.0)
    assert client.texts() == ["we go home now.", "they stay here."]


@pytest.mark.parametrize("text", ["", "  \n", "😀 🎉", "\x00\x01", "...", "日本語", "\ud800"])
def test_text_without_anything_to_say_is_refused(client: ScriptedVoice, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        speak(client, text)
    assert caught.value.param == "input" and not client.requests


def test_streamed_text_without_anything_to_say_fails(client: ScriptedVoice) -> None:
    (event,) = speak(client, pieces("", " ", "😀"))
    assert isinstance(event, Failed) and event.error.param == "input" and event.error.code == "empty_input"
    assert not client.requests


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"text": "a" * 100_000}, "input"),
        ({"text": 7}, "input"),
        ({"text": iter(["no async iterator"])}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"seed": 1 << 70}, "seed"),
        ({"idle_s": float("nan")}, "idle_s"),
        ({"params": SamplingParams(top_k=-5)}, "top_k"),
    ],
)
def test_requests_that_cannot_work_are_refused_before_submit(
    client: ScriptedVoice, options: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        speak(client, **{"text": "Hello there.", **options})
    assert caught.value.param == param and not client.requests


def test_a_piece_that_is_too_long_or_no_text_ends_the_request(client: ScriptedVoice) -> None:
    for wrong in ("a " * 20_000, 7):
        events = speak(client, pieces("All is well so far. ", wrong))  # type: ignore[arg-type]
        assert isinstance(events[-1], Failed) and events[-1].error.param == "input"
        assert client.num_running == 0


def test_models_that_do_not_speak(client: ScriptedVoice) -> None:
    client.kind = "llm"
    with pytest.raises(InvalidRequest, match="does not speak"):
        speak(client, "Hello there.")
    with pytest.raises(ModelNotFound):
        asyncio.run(anext(SpeechFrontend(client).speak(SpeakRequest(model="other", text="Hello"))))


def test_sampling_is_the_voices_own_until_something_is_given(client: ScriptedVoice) -> None:
    speak(client, "Hello there.", priority=3, cache_salt="a", deadline=1.5)
    speak(client, "Hello there.", seed=7, voice="default")
    speak(client, "Hello there.", params=SamplingParams(temperature=0.9, seed=1), temperature=0.5)
    first, second, third = client.requests
    assert first.params is None and (first.priority, first.cache_salt, first.deadline) == (3, "a", 1.5)
    assert second.params == SamplingParams(temperature=0.3, top_k=50, seed=7)
    assert third.params == SamplingParams(temperature=0.5, seed=1)


def test_failures_and_aborts_end_the_stream(client: ScriptedVoice) -> None:
    client.fail = ErrorInfo(kind="EngineDead", message="gone", code="engine_dead")
    events = speak(client, "Hello there.")
    assert isinstance(events[-1], Failed) and events[-1].error.code == "engine_dead"

    async def run() -> SpeechEvent:
        async for event in SpeechFrontend(client).speak(SpeakRequest(model=MODEL, text=LONG, request_id="mine")):
            if isinstance(event, SpokenAudio) and event.utterance == 1:
                await client.abort("mine")
            elif not isinstance(event, SpokenAudio):
                return event
        raise AssertionError

    assert isinstance(asyncio.run(run()), Aborted)


def test_what_an_iterator_raises_is_raised_and_the_request_aborted(client: ScriptedVoice) -> None:
    async def broken(before: str) -> AsyncIterator[str]:
        yield before
        raise LookupError("the writer broke")

    for before in ("A whole sentence is here. ", "half"):
        with pytest.raises(LookupError):
            speak(client, broken(before))
    assert len(client.aborted) == 1 and client.num_running == 0


def test_leaving_early_closes_everything(client: ScriptedVoice) -> None:
    closed = 0

    async def text() -> AsyncIterator[str]:
        nonlocal closed
        try:
            while True:
                yield "The river was wide. "
                await asyncio.sleep(0.001)
        finally:
            closed += 1

    async def run() -> None:
        frontend = SpeechFrontend(client)
        for _ in range(20):
            stream = frontend.speak(SpeakRequest(model=MODEL, text=text()))
            await anext(stream)
            await stream.aclose()
        waiting = asyncio.create_task(anext(frontend.speak(SpeakRequest(model=MODEL, text=pieces("a", gap_s=9)))))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert closed == 20 and client.num_running == 0 and len(client.ended) == 20


def test_a_voice_that_reads_any_text_gets_it_as_it_is(client: ScriptedVoice) -> None:
    """Case, digits and marks stay; layout and emoji go. Its tokenizer works off the event loop."""
    client.source = str(tiny.orpheus())
    text = "# Title\n\n**Dr. Lee** paid $3 🎉 <laugh>. Und später, ja?"
    for whole in (text, pieces(*text)):
        audio = [event for event in speak(client, whole, voice="leo") if isinstance(event, SpokenAudio)]
        said = [event.text for event in audio if event.text]
        assert said == ["Title", "Dr. Lee paid $3 <laugh>.", "Und später, ja?"]
    with pytest.raises(InvalidRequest, match="tara, leo"):
        speak(client, text, voice="ada")
