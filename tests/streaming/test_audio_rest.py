"""/v1/audio/transcriptions and /translations: every format by OpenAI's client, then forms that no client would send."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from motet.engine.errors import EngineDead
from motet.pipelines.media import encode_wav
from motet.streaming import audio_words

from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_recogniser import RATE, sound
from .raw_http import Reply, connect, get, head, post, read_reply, send

PATH = "/v1/audio/transcriptions"
BOUNDARY = "b0undary"


def wav(*stretches_s: float) -> bytes:
    """Speech of these lengths, with half a second of silence after each."""
    return encode_wav(sum_of([sound(length, silence_s=0.5) for length in stretches_s]))


def sum_of(parts: list[Any]) -> Any:
    import numpy as np

    return np.concatenate(parts)


TWO = wav(1.0, 1.5)  # "one two", "one two three"


def form(*fields: tuple[str, str | bytes], file: bytes | None = TWO, end: bool = True) -> bytes:
    parts = b""
    for name, value in fields:
        data = value if isinstance(value, bytes) else value.encode()
        parts += f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'.encode() + data + b"\r\n"
    if file is not None:
        parts += f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="../a.wav"\r\n\r\n'.encode()
        parts += file + b"\r\n"
    return parts + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


def ask(server: Running, *fields: tuple[str, str | bytes], path: str = PATH, **options: Any) -> Reply:
    return post(server.port, path, form(*fields, **options), content_type=f"multipart/form-data; boundary={BOUNDARY}")


def upload(data: bytes = TWO) -> tuple[str, io.BytesIO]:
    return ("speech.wav", io.BytesIO(data))


# ----------------------------------------------------------------------------------------------------- openai's client


def test_json(server: Running) -> None:
    answer = server.client().audio.transcriptions.create(
        model=ASR, file=upload(), language="en", prompt="Numbers.", temperature=0.2, keywords=["Motet"]
    )
    assert answer.text == "one two one two three"
    assert answer.usage is not None and answer.usage.type == "duration" and abs(answer.usage.seconds - 3.5) < 0.01
    request = server.engine.audio[0]
    assert (request.options.language, request.options.prompt, request.options.hotwords) == ("en", "Numbers.", "Motet")
    assert request.options.temperatures == (0.2, 0.4, 0.6, 0.8, 1.0) and request.encoding == "f32"


def test_text_and_subtitles(server: Running) -> None:
    create = server.client().audio.transcriptions.create
    assert create(model=ASR, file=upload(), response_format="text") == "one two one two three\n"
    srt = create(model=ASR, file=upload(), response_format="srt")
    assert isinstance(srt, str) and srt.startswith("1\n00:00:00,000 --> 00:00:01,0") and "\n2\n" in srt
    vtt = create(model=ASR, file=upload(), response_format="vtt")
    assert isinstance(vtt, str) and vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.0")


def test_verbose_json(server: Running) -> None:
    create = server.client().audio.transcriptions.create
    answer = create(model=ASR, file=upload(), response_format="verbose_json")
    assert (answer.language, round(answer.duration, 1), answer.words) == ("english", 3.5, None)
    assert answer.segments is not None and [segment.text for segment in answer.segments] == [
        " one two",
        " one two three",
    ]
    assert answer.segments[0].avg_logprob == -0.25 and answer.segments[1].id == 1
    answer = create(
        model=ASR, file=upload(), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert answer.words is not None and [word.word for word in answer.words] == "one two one two three".split()
    assert answer.words[2].start == pytest.approx(1.5, abs=0.05) and answer.segments
    answer = create(model=ASR, file=upload(), response_format="verbose_json", timestamp_granularities=["word"])
    assert answer.words and answer.segments is None


def test_diarized_json(server: Running) -> None:
    voice = "data:audio/wav;base64," + base64.b64encode(wav(2.5)).decode()
    answer = server.client().audio.transcriptions.create(
        model=ASR,
        file=upload(),
        response_format="diarized_json",
        chunking_strategy={
            "type": "server_vad",
            "threshold": 0.4,
            "silence_duration_ms": 300,
            "prefix_padding_ms": 100,
        },
        known_speaker_names=["Ann"],
        known_speaker_references=[voice],
    )
    assert [(segment.speaker, segment.text) for segment in answer.segments] == [
        ("B", " one two"),
        ("A", " one two three"),
    ]
    options = server.engine.audio[0].options
    assert options.diarize and (options.vad_threshold, options.min_silence_s, options.speech_pad_s) == (0.4, 0.3, 0.1)
    assert options.known_speakers[0][0] == "Ann" and len(options.known_speakers[0][1]) == 3 * RATE * 4


@pytest.mark.parametrize("response_format", ["json", "diarized_json"])
def test_streaming(server: Running, response_format: Any) -> None:
    stream = server.client().audio.transcriptions.create(
        model=ASR, file=upload(), response_format=response_format, stream=True, chunking_strategy="auto"
    )
    got = list(stream)
    assert "".join(event.delta for event in got if event.type == "transcript.text.delta") == "one two one two three"
    assert got[-1].type == "transcript.text.done" and got[-1].text == "one two one two three"
    segments = [event for event in got if event.type == "transcript.text.segment"]
    assert [segment.speaker for segment in segments] == (["B", "A"] if response_format == "diarized_json" else [])


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own opinion of this route
def test_translations(server: Running) -> None:
    answer = server.client().audio.translations.create(model=ASR, file=upload(), response_format="verbose_json")
    assert answer.text == "one two one two three" and server.engine.audio[0].options.task == "translate"
    reply = ask(server, ("language", "de"), path="/v1/audio/translations")
    assert (reply.status, reply.error["param"]) == (400, "language")


def test_errors_reach_the_client_typed(server: Running) -> None:
    create = server.client().audio.transcriptions.create
    with pytest.raises(openai.BadRequestError, match="no sound file"):
        create(model=ASR, file=upload(b"nothing" * 1000))
    with pytest.raises(openai.NotFoundError):
        create(model="nobody", file=upload())
    with pytest.raises(openai.BadRequestError, match="cannot transcribe"):
        create(model=MODEL, file=upload())
    server.engine.submit_error = EngineDead("the engine ended")
    for stream in (True, False):
        with pytest.raises(openai.InternalServerError):
            create(model=ASR, file=upload(), stream=stream)
    with pytest.raises(openai.BadRequestError, match="cannot write text"):
        server.client().chat.completions.create(model=ASR, messages=[{"role": "user", "content": "hi"}])
    models = {model.id: model.model_extra for model in server.client().models.list()}
    assert "transcriptions" in models[ASR]["capabilities"]  # type: ignore[index]


# -------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    "fields",
    [
        [("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment")],
        [("timestamp_granularities", "word"), ("timestamp_granularities", "segment")],
        [("timestamp_granularities[0]", "word"), ("timestamp_granularities[1]", "segment")],
    ],
)
def test_lists_in_every_spelling(server: Running, fields: list[tuple[str, str]]) -> None:
    reply = ask(server, ("response_format", "verbose_json"), ("language", ""), *fields)
    answer = msgspec.json.decode(reply.body, type=audio_words.VerboseTranscription, strict=True)
    assert answer.words and answer.segments
    assert reply.headers["x-motet-model"] == ASR


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("modell", "x")], "modell"),
        ([("modell", "")], "modell"),
        ([("model", "")], "model"),
        ([("model[]", "x")], "model[]"),
        ([("[]", "x")], "[]"),
        ([("language", "en"), ("language", "de")], "language"),
        ([("language", "klingon")], "language"),
        ([("languages[]", "en"), ("languages[]", "de")], "languages"),
        ([("response_format", "xml")], "response_format"),
        ([("temperature", "2")], "temperature"),
        ([("temperature", "nan")], "temperature"),
        ([("stream", "perhaps")], "stream"),
        ([("stream", "true"), ("response_format", "srt")], "stream"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities"),
        ([("timestamp_granularities[]", "letter"), ("response_format", "verbose_json")], "timestamp_granularities[0]"),
        ([("include[]", "logprobs")], "include"),
        ([("chunking_strategy", "often")], "chunking_strategy"),
        ([("chunking_strategy", '{"type":"server_vad","x":1}')], "chunking_strategy.x"),
        ([("chunking_strategy", "{")], "chunking_strategy"),
        ([("chunking_strategy[type]", "server_vad"), ("chunking_strategy", "auto")], "chunking_strategy"),
        ([("known_speaker_names[]", "Ann")], "known_speaker_names"),
        ([("known_speaker_names[]", "A"), ("known_speaker_references[]", "x")], "known_speaker_names"),
        (
            [("response_format", "diarized_json"), ("known_speaker_names[]", "A"), ("known_speaker_references[]", "x")],
            "known_speaker_references",
        ),
        ([("prompt", b"\xff")], "prompt"),
    ],
)
def test_fields_that_cannot_be(server: Running, fields: list[tuple[str, str | bytes]], param: str) -> None:
    reply = ask(server, *fields)
    assert reply.status == (404 if fields == [("model", "")] else 400) and reply.error["param"] == param, reply
    assert not server.engine.audio


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"nonsense", 400),
        (form(file=None), 400),
        (form(end=False), 400),
        (form()[:200], 400),
        (form(file=b""), 400),
        (form(file=TWO[:30]), 400),
        (form(("file", "again")), 400),
        (form(*[("x" * 5000, "y")]), 400),
        (form(*[(f"f{i}", "") for i in range(600)]), 400),
        (b"--b0undary\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b0undary--\r\n", 400),
    ],
)
def test_forms_that_cannot_be(server: Running, body: bytes, status: int) -> None:
    reply = post(server.port, PATH, body, content_type=f"multipart/form-data; boundary={BOUNDARY}")
    assert reply.status == status and reply.error["message"]
    assert not server.engine.audio


def test_other_content_types(server: Running) -> None:
    assert post(server.port, PATH, {"file": "x"}).status == 415
    reply = post(server.port, PATH, form(), content_type="multipart/form-data")
    assert (reply.status, reply.error["code"]) == (400, "invalid_form")


def test_a_huge_upload_is_refused_at_once(start_server: Callable[..., Running]) -> None:
    server = start_server(max_upload_bytes=100_000, max_body_bytes=50_000)
    kind = {"content_type": f"multipart/form-data; boundary={BOUNDARY}"}
    with connect(server.port) as connection:  # claimed
        connection.sendall(head(PATH, length=10 * 2**30, **kind) + form(end=False)[:1000])
        reply = read_reply(connection)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    reply = post(server.port, PATH, form(file=bytes(120_000)), **kind)  # counted
    assert (reply.status, reply.error["param"]) == (413, "file")
    reply = post(server.port, PATH, form(("prompt", "x" * 60_000), file=None), **kind)
    assert (reply.status, reply.error["param"]) == (413, "prompt")
    with connect(server.port) as connection:  # neither claimed nor ever ending
        connection.sendall(head(PATH, transfer_encoding="chunked", **kind))
        start = form(end=False)[:150]
        connection.sendall(b"%x\r\n" % len(start) + start + b"\r\n")
        answer = threading.Event()

        def pour() -> None:
            piece = b"10000\r\n" + bytes(65536) + b"\r\n"
            try:
                for _ in range(1000):
                    if answer.is_set():
                        return
                    connection.sendall(piece)
            except OSError:
                pass

        thread = threading.Thread(target=pour, daemon=True)
        thread.start()
        assert read_reply(connection).status == 413
        answer.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    assert get(server.port, "/livez").status == 200


def test_uploads_together_are_bounded(start_server: Callable[..., Running]) -> None:
    server = start_server(max_uploads_bytes=3 * len(TWO) // 2)
    server.engine.first_s = 0.3
    body, kind = form(), f"multipart/form-data; boundary={BOUNDARY}"
    with connect(server.port) as connection:
        connection.sendall(head(PATH, length=len(body), content_type=kind) + body[:-1])
        time.sleep(0.1)
        reply = ask(server)
        assert (reply.status, reply.error["code"]) == (429, "server_overloaded")
        connection.sendall(body[-1:])
        assert read_reply(connection).status == 200
    assert ask(server).status == 200


def test_too_long_a_file_and_many_at_once(start_server: Callable[..., Running]) -> None:
    server = start_server(max_audio_s=3.0, max_decodes=1)
    reply = ask(server)
    assert (reply.status, reply.error["code"]) == (400, "audio_too_long")
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(server, file=wav(1.0)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [json.loads(reply.body)["text"] for reply in replies] == ["one two"] * 6


def test_a_long_file_reaches_the_engine_in_pieces(start_server: Callable[..., Running]) -> None:
    server = start_server(max_audio_s=150.0, max_uploads_bytes=1 << 23)
    long = encode_wav(sum_of([sound(1.0, silence_s=139.0), sound(1.0)]))  # 4.5 MB: s16
    for _ in range(3):  # the room for uploads is free again
        reply = ask(server, file=long)
        assert reply.status == 200 and json.loads(reply.body)["text"] == "one two one two"
        assert abs(json.loads(reply.body)["usage"]["seconds"] - 141.0) < 0.01
    request = server.engine.audio[0]
    assert request.in_pieces and request.encoding == "s16"
    assert server.engine.appended == 3 * (141 * RATE * 2 - 4 * 2**20)  # only the first 4 MB went with the request
    # What is wrong with the end of it is said as if it had been known from the beginning.
    longer = encode_wav(sum_of([sound(1.0, silence_s=159.0)]))
    for stream in ("true", "false"):
        reply = ask(server, ("stream", stream), file=longer)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "audio_too_long", "file")
    server.wait(lambda engine: not engine.live, "nothing is left of it")
    assert list(server.engine.ended.values()) == ["stop"] * 3 + ["abort: closed"] * 2


def test_the_engine_ends_while_a_long_file_comes(start_server: Callable[..., Running]) -> None:
    server = start_server()
    server.engine.submit_error = EngineDead("the engine ended")
    reply = ask(server, file=encode_wav(sound(1.0, silence_s=299.0)))
    assert (reply.status, reply.error["message"]) == (503, "the engine ended")
    server.engine.submit_error = None
    assert ask(server).status == 200


def test_long_silence_before_the_first_text_is_broken(start_server: Callable[..., Running]) -> None:
    server = start_server(sse_keep_alive_s=0.1)
    server.engine.first_s = 0.35
    body = ask(server, ("stream", "true")).body
    assert body.count(b": keep-alive\n\n") >= 2 and body.endswith(b"data: [DONE]\n\n")


def test_leaving_aborts_the_work(server: Running) -> None:
    server.engine.first_s = 5.0
    body = form(("stream", "true"))
    with connect(server.port) as connection:
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        connection.sendall(head(PATH, length=len(body), content_type=kind) + body)
        server.wait(lambda engine: len(engine.live) == 1, "the request is there")
    server.wait(lambda engine: not engine.live, "and gone")
    assert list(server.engine.ended.values()) == ["abort: disconnect"]
    with connect(server.port) as connection:  # in the middle of the upload
        connection.sendall(head(PATH, length=len(body), content_type=kind) + body[:1000])
    assert get(server.port, "/livez").status == 200


def test_metrics(server: Running) -> None:
    ask(server)
    text = get(server.port, "/metrics").body.decode()
    assert f'motet_asr_rtf_count{{model="{ASR}"}}' in text and f'motet_asr_audio_seconds_total{{model="{ASR}"}}' in text
    assert 'route="/v1/audio/transcriptions"' in text


def test_openapi_describes_the_form(server: Running) -> None:
    api = json.loads(get(server.port, "/openapi.json").body)
    operation = api["paths"][PATH]["post"]
    assert list(operation["requestBody"]["content"]) == ["multipart/form-data"]
    name = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = api["components"]["schemas"][name]
    assert schema["required"] == ["file"] and schema["properties"]["file"]["format"] == "binary"
    assert {"text/vtt", "application/x-subrip", "text/event-stream"} < set(operation["responses"]["200"]["content"])
    assert send(server.port, head(PATH, "GET")).status == 405
