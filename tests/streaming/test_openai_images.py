"""/v1/images/generations: by OpenAI's client, whole and in events, then what no client should send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from PIL import Image

from motet.engine.errors import EngineDead, Overloaded
from motet.engine.types import ImageRequest
from motet.pipelines.picture_file import CONTENT_TYPES, encode
from motet.streaming import picturing
from motet.streaming.picture_words import ImageCompleted, ImagesResponse, PartialImage

from ..pipelines.picture_files import BROKEN, TOO_LARGE
from .conftest import Running
from .fake_engine import ASR, MODEL
from .fake_painter import CARD, IMAGE, colour
from .fake_voice import TTS
from .raw_http import connect, get, head, post, read_reply

PATH = "/v1/images/generations"
PAINT: dict[str, Any] = {"model": IMAGE, "prompt": "a red apple on a blue background", "seed": 5}
GREY = base64.b64encode(encode(np.full((40, 40, 3), 90, np.uint8))).decode()


def opened(text: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    image.load()
    return image


def generate(server: Running, **fields: Any) -> Any:
    with server.client() as client:
        return client.images.generate(**fields)


def asked(server: Running) -> list[ImageRequest]:
    """What reached the engine."""
    return [painter.request for painter in server.engine.painters.values()]


def streamed(server: Running, **fields: Any) -> list[PartialImage | ImageCompleted]:
    """The events of a stream, which ends as it should."""
    reply = post(server.port, PATH, {**PAINT, "stream": True, **fields})
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame for frame in reply.body.split(b"\n\n") if not frame.startswith(b":")]
    assert frames[-2:] == [b"data: [DONE]", b""]
    events: list[PartialImage | ImageCompleted] = []
    for frame in frames[:-2]:
        name, data = frame.split(b"\n")
        kind = PartialImage if name == b"event: image_generation.partial_image" else ImageCompleted
        events.append(msgspec.json.decode(data.removeprefix(b"data: "), type=kind))
        assert name == b"event: " + events[-1].type.encode()
    return events


# ----------------------------------------------------------------------------------------------------- openai's client


def test_a_picture(server: Running) -> None:
    with server.client(_strict_response_validation=True) as client:
        answer = client.images.generate(model=IMAGE, prompt=PAINT["prompt"], extra_body={"seed": 5})
    assert answer.data is not None and answer.data[0].b64_json is not None and answer.usage is not None
    image = opened(answer.data[0].b64_json)
    assert (image.format, image.size, image.getpixel((7, 9))) == ("PNG", (32, 32), colour(5))
    assert (answer.size, answer.output_format, answer.background) == ("32x32", "png", "opaque")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 0, 7)
    assert answer.usage.input_tokens_details.text_tokens == 7 and answer.created > 1.7e9
    assert answer.data[0].seed == 5  # type: ignore[attr-defined]


def test_several_pictures_stand_in_their_order(server: Running) -> None:
    answer = generate(server, prompt="a cat", n=3, size="48x32", extra_body={"seed": 11})
    assert answer.data is not None
    images = [opened(one.b64_json or "") for one in answer.data]
    assert [image.size for image in images] == [(48, 32)] * 3
    assert [image.getpixel((0, 0)) for image in images] == [colour(11 + index) for index in range(3)]
    assert [one.seed for one in answer.data] == [11, 12, 13]  # type: ignore[attr-defined]


def test_a_stream(server: Running) -> None:
    with server.client(_strict_response_validation=True) as client:
        stream = client.images.generate(
            model=IMAGE, prompt=PAINT["prompt"], stream=True, partial_images=3, extra_body={"seed": 5}
        )
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    target = np.array(colour(5))
    distances = []
    for index, event in enumerate(events):
        assert (event.size, event.output_format, event.background, event.quality) == ("32x32", "png", "opaque", "auto")
        if event.type == "image_generation.partial_image":
            assert event.partial_image_index == index
        else:
            assert (event.usage.input_tokens, event.usage.total_tokens) == (7, 7)
        distances.append(int(np.abs(np.array(opened(event.b64_json).getpixel((0, 0))) - target).sum()))
    assert distances == sorted(distances, reverse=True) and distances[0] > distances[-1] == 0


@pytest.mark.parametrize(
    ("steps", "partial", "seen"),
    [
        (8, 1, [4]),
        (8, 3, [2, 4, 6]),
        (20, 2, [7, 14]),
        (4, 2, [1, 3]),
        (4, 3, [1, 2, 3]),
        (2, 3, [1]),
        (1, 3, []),
        (8, 0, []),
    ],
)
def test_previews_are_spread_evenly(server: Running, steps: int, partial: int, seen: list[int]) -> None:
    events = streamed(server, steps=steps, partial_images=partial)
    # The fake's pictures come out of white in equal steps.
    channel = int(np.argmin(colour(5)))
    found = [255 - np.array(opened(event.b64_json))[0, 0, channel] for event in events]
    assert [round(steps * float(value) / (255 - colour(5)[channel])) for value in found] == [*seen, steps]
    (painter,) = server.engine.painters.values()
    assert painter.num_previews <= max(2 * partial, 0)  # few are decoded for nothing


def test_a_stream_of_several_pictures(server: Running) -> None:
    events = streamed(server, n=3, partial_images=1)
    partial = [event for event in events if isinstance(event, PartialImage)]
    completed = [event for event in events if isinstance(event, ImageCompleted)]
    assert [(event.index, event.partial_image_index) for event in partial] == [(0, 0), (1, 0), (2, 0)]
    assert sorted((event.index, event.seed) for event in completed) == [(0, 5), (1, 6), (2, 7)]
    assert [event.usage.input_tokens for event in completed] == [0, 0, 7]  # the last tells of all


@pytest.mark.parametrize("kind", list(CONTENT_TYPES))
def test_every_format(server: Running, kind: Any) -> None:
    answers = [
        generate(server, prompt="x", output_format=kind, output_compression=quality, extra_body={"seed": 5})
        for quality in ([100] if kind == "png" else [100, 10])
    ]
    for answer in answers:
        assert answer.output_format == kind and answer.data is not None
        image = opened(answer.data[0].b64_json or "")
        assert image.format == kind.upper()
        assert np.abs(np.array(image.getpixel((9, 9))) - colour(5)).max() < (1 if kind == "png" else 40)
    assert opened(streamed(server, output_format=kind, partial_images=1)[0].b64_json).format == kind.upper()


def test_files_are_made_and_opened_beside_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(picturing, "encode", noted)
    streamed(server, partial_images=2)
    assert len(threads) == 3
    done = threading.Event()
    server.loop.call_soon_threadsafe(lambda: (threads.append(threading.current_thread()), done.set()))
    assert done.wait(2) and threads[-1] not in threads[:-1]


def test_what_is_asked_reaches_the_engine(server: Running) -> None:
    everything = {
        "model": "default",
        "prompt": " a cat ",
        "n": 2,
        "size": "48x32",
        "seed": 2**63 - 11,
        "negative_prompt": "a dog",
        "steps": 6,
        "guidance_scale": 4.5,
        "solver": "lcm",
        "image": f"data:image/png;base64,{GREY}",
        "strength": 0.5,
        "stream": True,
        "partial_images": 1,
        "response_format": "b64_json",
        "background": "auto",
        "quality": "standard",
        "style": "vivid",
        "moderation": "low",
        "user": "u",
        "safety_identifier": "s",
        "metadata": {"a": 1},
    }
    assert post(server.port, PATH, everything).status == 200
    nothing = dict.fromkeys(everything, None) | {"prompt": "a cat"}
    assert post(server.port, PATH, nothing).status == 200
    first, second = asked(server)
    assert (first.prompt, first.negative_prompt, first.n, first.seed) == (" a cat ", "a dog", 2, 2**63 - 11)
    assert (first.width, first.height, first.num_steps, first.guidance_scale) == (48, 32, 6, 4.5)
    assert (first.solver, first.strength, first.preview_every) == ("lcm", 0.5, 2)
    assert first.image is not None and first.image.shape == (32, 48, 3) and set(first.image.data) == {90}
    assert (second.width, second.num_steps, second.guidance_scale, second.image) == (0, 0, None, None)
    assert second.seed < 2**32  # drawn


def test_seeds_are_drawn_and_told(server: Running) -> None:
    seeds = [generate(server, prompt="x").data[0].seed for _ in range(3)]  # type: ignore
    assert len(set(seeds)) == 3 and [request.seed for request in asked(server)] == seeds


def test_the_card(server: Running) -> None:
    model = json.loads(get(server.port, f"/v1/models/{IMAGE}").body)
    assert model["capabilities"] == ["images"] and model["state"] == "loaded"
    assert model["picture"] == {
        "sizes": ["32x32", "48x32"],
        "steps": 8,
        **{name: CARD[name] for name in ("max_steps", "few_step", "guidance", "guidance_scale", "solver", "solvers")},
        **{name: CARD[name] for name in ("max_prompt_chars", "takes_image")},
    }
    others = [model for model in json.loads(get(server.port, "/v1/models").body)["data"] if model["id"] != IMAGE]
    assert others and all("picture" not in model for model in others)


def test_openapi_tells_the_types(server: Running) -> None:
    operation = json.loads(get(server.port, "/openapi.json").body)["paths"][PATH]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    body = post(server.port, PATH, PAINT).body
    assert msgspec.json.decode(body, type=ImagesResponse).data[0].seed == 5


# ------------------------------------------------------------------------------------------- what no one should send


@pytest.mark.parametrize(
    ("change", "status", "param", "says"),
    [
        ({"prompt": ""}, 400, "prompt", "got none"),
        ({"prompt": " \n"}, 400, "prompt", "got none"),
        ({"prompt": "x" * 10_000}, 400, "prompt", "at most 2000 characters"),
        ({"prompt": None}, 400, "prompt", ""),
        ({"prompt": ["a"]}, 400, "prompt", ""),
        ({"negative_prompt": "x" * 10_000}, 400, "negative_prompt", "at most 2000 characters"),
        ({"negative_prompt": "a dog", "guidance_scale": 1.0}, 400, "negative_prompt", "no effect"),
        ({"size": "64x64"}, 400, "size", "one of 32x32, 48x32"),
        ({"size": "0x0"}, 400, "size", "above 0"),
        ({"size": "99999x99999"}, 400, "size", "one of 32x32"),
        ({"size": "large"}, 400, "size", "WIDTHxHEIGHT"),
        ({"size": "-32x32"}, 400, "size", "WIDTHxHEIGHT"),
        ({"size": "32x32" * 50}, 400, "size", ""),
        ({"size": 32}, 400, "size", ""),
        ({"steps": 0}, 400, "steps", ""),
        ({"steps": -3}, 400, "steps", ""),
        ({"steps": 10_000}, 400, "steps", "1 to 100"),
        ({"steps": "x"}, 400, "steps", ""),
        ({"steps": 4.5}, 400, "steps", ""),
        ({"steps": 10**30}, 400, "steps", ""),
        ({"guidance_scale": -1}, 400, "guidance_scale", "0 to 20"),
        ({"guidance_scale": 1e300}, 400, "guidance_scale", "0 to 20"),
        ({"guidance_scale": "high"}, 400, "guidance_scale", ""),
        ({"n": 0}, 400, "n", ""),
        ({"n": 11}, 400, "n", ""),
        ({"n": 10**9}, 400, "n", ""),
        ({"n": True}, 400, "n", ""),
        ({"seed": -1}, 400, "seed", ""),
        ({"seed": 2**63 - 1}, 400, "seed", "expected 0 to"),
        ({"seed": 2**70}, 400, "seed", ""),
        ({"solver": "magic"}, 400, "solver", "one of euler, lcm"),
        ({"strength": 0.5}, 400, "strength", "without an image"),
        ({"strength": 2, "image": GREY}, 400, "strength", ""),
        ({"strength": 0, "image": GREY}, 400, "strength", ""),
        ({"output_format": "gif"}, 400, "output_format", ""),
        ({"output_format": "jpg"}, 400, "output_format", ""),
        ({"output_compression": 101, "output_format": "jpeg"}, 400, "output_compression", ""),
        ({"output_compression": -1, "output_format": "jpeg"}, 400, "output_compression", ""),
        ({"output_compression": 50}, 400, "output_compression", "no effect on png"),
        ({"response_format": "url"}, 400, "response_format", "b64_json"),
        ({"response_format": "text"}, 400, "response_format", ""),
        ({"background": "transparent"}, 400, "background", "'opaque'"),
        ({"quality": "hd"}, 400, "quality", "'standard'"),
        ({"quality": "best"}, 400, "quality", ""),
        ({"style": "natural"}, 400, "style", "'vivid'"),
        ({"svg": {"model": "x"}}, 400, "svg", "not supported"),
        ({"frame_count": 4}, 400, "frame_count", "not supported"),
        ({"partial_images": 4, "stream": True}, 400, "partial_images", ""),
        ({"partial_images": -1, "stream": True}, 400, "partial_images", ""),
        ({"partial_images": 2}, 400, "partial_images", "without stream"),
        ({"stream": "yes"}, 400, "stream", ""),
        ({"loras": []}, 400, "loras", "unknown"),
        ({"image": 7}, 400, "image", ""),
        ({"image": ""}, 400, "image", "PNG, JPEG or WebP"),
        ({"image": "not base64!"}, 400, "image", "expected base64"),
        ({"image": "data:image/png,abc"}, 400, "image", "expected base64"),
        ({"image": "https://example.org/a.png"}, 400, "image", "not opened"),
        ({"image": "file:///etc/passwd"}, 400, "image", "not opened"),
        ({"model": "nobody"}, 404, "model", "not served"),
        ({"model": MODEL}, 400, "model", "cannot make pictures"),
        ({"model": ASR}, 400, "model", "cannot make pictures"),
        ({"model": TTS}, 400, "model", "cannot make pictures"),
    ],
)
def test_bad_values_are_named(server: Running, change: dict[str, Any], status: int, param: str, says: str) -> None:
    for stream in ({}, {"stream": True}):
        reply = post(server.port, PATH, {**PAINT, **stream, **change})
        if "partial_images" in change and stream and says:
            continue
        assert (reply.status, reply.error["param"]) == (status, param), reply
        assert says in reply.error["message"] and len(reply.error["message"]) < 300, reply
    assert not server.engine.painters or "partial_images" in change
    assert post(server.port, PATH, PAINT).status == 200


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["guidance_scale", "strength"])
def test_no_number_is_no_value(server: Running, word: str, field: str) -> None:
    reply = post(server.port, PATH, json.dumps({**PAINT, "image": GREY, field: 123.5}).replace("123.5", word).encode())
    assert (reply.status, reply.error["param"]) == (400, field)
    assert not server.engine.painters


@pytest.mark.parametrize("name", [*BROKEN, *TOO_LARGE])
def test_pictures_that_no_one_should_open(server: Running, name: str) -> None:
    data = (BROKEN | TOO_LARGE)[name]
    reply = post(server.port, PATH, {**PAINT, "image": base64.b64encode(data).decode(), "stream": True})
    code = "invalid_image" if name in BROKEN else "image_too_large"
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "image", code)
    assert not server.engine.painters and post(server.port, PATH, PAINT).status == 200


def test_other_models_need_no_negative_prompt_and_no_picture(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARD, "guidance", "none")
    monkeypatch.setitem(CARD, "takes_image", False)
    monkeypatch.setitem(CARD, "few_step", True)
    for change, says in (
        ({"negative_prompt": "a dog"}, "on this model"),
        ({"guidance_scale": 2.0}, "no effect"),
        ({"image": GREY}, "from text alone"),
        ({"steps": 7}, "steps: this model takes exactly 8"),
    ):
        reply = post(server.port, PATH, {**PAINT, **change})
        assert (reply.status, reply.error["param"]) == (400, next(iter(change))) and says in reply.error["message"]
    assert not server.engine.painters


def test_missing_and_broken_bodies(server: Running) -> None:
    assert post(server.port, PATH, {"model": IMAGE}).error["param"] == "prompt"
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"prompt":"\\ud800"}'):
        assert post(server.port, PATH, body).status == 400
    assert post(server.port, PATH, PAINT, content_type="text/plain").status == 415
    assert get(server.port, PATH).status == 405


def test_huge_bodies(start_server: Callable[..., Running]) -> None:
    server = start_server(max_body_bytes=1 << 20)
    reply = post(server.port, PATH, {**PAINT, "image": "A" * (2 << 20)})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert post(server.port, PATH, PAINT).status == 200


# ------------------------------------------------------------------------------------------------ failing and leaving


def test_failures(server: Running) -> None:
    server.engine.submit_error = EngineDead("the engine ended")
    for stream in (False, True):
        reply = post(server.port, PATH, {**PAINT, "stream": stream})
        assert (reply.status, reply.error["code"]) == (503, "engine_dead") and "retry-after" in reply.headers
    server.engine.submit_error, server.engine.fail_after = None, 5
    assert post(server.port, PATH, PAINT).status == 503
    with pytest.raises(openai.APIError) as caught:
        with server.client() as client:
            list(client.images.generate(prompt="x", stream=True, partial_images=3))
    assert caught.value.code == "engine_dead"


def test_leaving_ends_the_request_within_a_step(server: Running) -> None:
    server.engine.step_s = 0.05
    for stream in (True, False):
        body = json.dumps({**PAINT, "steps": 100, "stream": stream}).encode()
        for _ in range(2):
            with connect(server.port) as connection:
                connection.sendall(head(PATH, length=len(body)) + body)
                server.wait(lambda engine: any(painter.num_steps for painter in engine.painters.values()), "it begins")
                if stream:
                    connection.recv(4096)
    server.wait(lambda engine: not engine.live and len(engine.ended) == 4, "the requests are aborted")
    assert set(server.engine.ended.values()) == {"abort: disconnect"}
    assert all(painter.num_steps < 20 for painter in server.engine.painters.values())


def test_openai_s_client_leaves(server: Running) -> None:
    server.engine.step_s = 0.02
    with server.client() as client:
        stream = client.images.generate(prompt="x", stream=True, partial_images=3, extra_body={"steps": 100})
        next(iter(stream))
        stream.close()
    server.wait(lambda engine: not engine.live and len(engine.ended) == 1, "the engine is told")
    assert list(server.engine.ended.values()) == ["abort: disconnect"]


def test_too_many_wait(start_server: Callable[..., Running]) -> None:
    """A hundred at once where eight may wait: each is answered, those beyond are told when to come again."""
    server = start_server(max_queued_requests=8)
    server.engine.first_s = 0.3
    statuses: list[int] = []

    def ask() -> None:
        reply = post(server.port, PATH, PAINT)
        if reply.status == 429:
            assert reply.error["code"] == "server_overloaded" and int(reply.headers["retry-after"]) >= 1
        statuses.append(reply.status)

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 100 and set(statuses) == {200, 429} and statuses.count(200) >= 8
    assert post(server.port, PATH, {**PAINT, "n": 8}).status == 200


def test_pictures_to_begin_from_take_only_so_much_room(start_server: Callable[..., Running]) -> None:
    server = start_server(max_pictures_bytes=len(GREY) + 10)
    assert post(server.port, PATH, {**PAINT, "image": GREY}).status == 200
    reply = post(server.port, PATH, {**PAINT, "image": GREY + "A" * 20})
    assert (reply.status, reply.error["code"]) == (429, "server_overloaded")
    assert post(server.port, PATH, {**PAINT, "image": GREY}).status == 200  # what was refused holds no room


def test_the_engine_s_own_refusal_is_a_429(server: Running) -> None:
    server.engine.submit_error = Overloaded("64 requests for pictures wait already", retry_after_s=5.0)
    for stream in (False, True):
        reply = post(server.port, PATH, {**PAINT, "stream": stream})
        assert (reply.status, reply.headers["retry-after"]) == (429, "5")


def test_silence_is_broken_in_events(start_server: Callable[..., Running]) -> None:
    server = start_server(sse_keep_alive_s=0.05)
    server.engine.first_s, server.engine.step_s = 0.2, 0.03
    body = post(server.port, PATH, {**PAINT, "stream": True}).body
    assert body.startswith(b": keep-alive\n\n") and body.endswith(b"data: [DONE]\n\n")
    assert body.count(b": keep-alive") >= 5  # also while it is being made: nothing else is said then


def test_a_picture_and_a_chat_at_once(server: Running) -> None:
    server.engine.step_s = 0.005
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(post(server.port, PATH, PAINT))) for _ in range(3)]
    for thread in threads:
        thread.start()
    with server.client() as client:
        chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == server.engine.reply
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 3
    assert len({json.loads(answer.body)["data"][0]["b64_json"] for answer in answers}) == 1


def test_counted(server: Running) -> None:
    def value(name: str) -> float:
        text = get(server.port, "/metrics").body.decode()
        return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)))

    post(server.port, PATH, PAINT)
    success = f'motet_requests_success_total{{finished_reason="stop",model="{IMAGE}"}}'
    pictures = f'motet_diffusion_picture_seconds_count{{model="{IMAGE}"}}'
    before = value(success), value(pictures)
    post(server.port, PATH, {**PAINT, "n": 2})
    assert (value(success), value(pictures)) == (before[0] + 1, before[1] + 2)
    assert value(f'motet_request_latency_seconds_count{{model="{IMAGE}"}}') >= 2
    assert value("motet_queue_depth") == 0


def test_who_is_being_painted_waits_no_more(start_server: Callable[..., Running]) -> None:
    server = start_server(max_queued_requests=1)
    server.engine.step_s = 0.05
    answers: list[int] = []
    first = threading.Thread(target=lambda: answers.append(post(server.port, PATH, PAINT).status))
    first.start()
    server.wait(lambda engine: any(painter.num_steps > 1 for painter in engine.painters.values()), "it begins")
    assert b"motet_queue_depth 0.0" in get(server.port, "/metrics").body
    assert post(server.port, PATH, {**PAINT, "steps": 1}).status == 200 and not answers
    first.join()
    assert answers == [200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_tells_so(start_server: Callable[..., Running], stream: bool) -> None:
    server = start_server(shutdown_timeout_s=0.1)
    server.engine.step_s = 0.05
    body = json.dumps({**PAINT, "steps": 100, "stream": stream}).encode()
    with connect(server.port) as connection:
        connection.sendall(head(PATH, length=len(body)) + body)
        server.wait(lambda engine: any(painter.num_steps for painter in engine.painters.values()), "it begins")
        server.stop()
        reply = read_reply(connection)
    assert reply.status == (200 if stream else 503) and b'"code":"draining"' in reply.body
    assert list(server.engine.ended.values()) == ["abort: shutdown"]


def test_an_engine_that_ends_a_request_by_itself_is_told(server: Running) -> None:
    server.engine.step_s = 0.02
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.append(post(server.port, PATH, {**PAINT, "steps": 100})))
    asking.start()
    server.wait(lambda engine: any(painter.num_steps for painter in engine.painters.values()), "it begins")
    (request,) = asked(server)
    asyncio.run_coroutine_threadsafe(server.engine.abort(request.request_id, "deadline"), server.loop).result(2)
    asking.join()
    assert (replies[0].status, replies[0].error["code"]) == (504, "deadline_exceeded")
