"""An engine that speaks the real events and knows no model: it says a given text, byte by byte. No torch.

As a script it is a whole server over that engine, for tests that need a process of their own:
`python fake_engine.py PORT [--step-s S] [--load-s S]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from motet.engine.errors import EngineDead, ErrorInfo, MotetError
from motet.engine.types import (
    Aborted,
    AnyEvent,
    AnyRequest,
    AudioRequest,
    Done,
    EmbeddingSpan,
    Failed,
    ImageRequest,
    ModelInfo,
    Request,
    SpeechRequest,
    Timing,
    TokenLogprob,
    Tokens,
    Usage,
)

MODEL = "fake"
ASR = "fake-asr"
SPECIALS = ["<|im_start|>", "<|im_end|>"]
END = 257  # <|im_end|>
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """The letters that byte-level tokenizers write for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer.json whose id i is byte i, with a ChatML template."""
    vocab = {letter: index for index, letter in enumerate(byte_letters())}
    added = [
        {
            "id": 256 + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"eos_token": SPECIALS[1], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    from fake_painter import CARD, IMAGE, FakePainter
    from fake_recogniser import FakeRecogniser
    from fake_voice import TTS, FakeVoice, write_voice
else:
    from .fake_painter import CARD, IMAGE, FakePainter
    from .fake_recogniser import FakeRecogniser
    from .fake_voice import TTS, FakeVoice, write_voice


class FakeEngine:
    """An EngineClient. Attributes may be changed while it runs; `live` and `ended` tell what became of requests."""

    def __init__(self, source: Path, *, reply: str = "Hello, wörld! 🎉", step_s: float = 0.0) -> None:
        self.drained = self.closed = False
        self.info = ModelInfo(
            model=MODEL,
            kind="llm",
            source=str(source),
            max_model_len=4096,
            vocab_size=258,
            hidden_size=16,
            eos_token_ids=(END,),
        )
        self._tokens = 0
        self.reset(reply=reply, step_s=step_s)

    def reset(self, *, reply: str = "Hello, wörld! 🎉", step_s: float = 0.0) -> None:
        """As if new, for the next test."""
        self.reply = reply
        self.step_s = step_s
        self.first_s = 0.0  # before the first token
        self.tokens_per_step = 1
        self.fail_after: int | None = None  # tokens
        self.submit_error: MotetError | None = None
        self.refuse_first: int | None = None  # how many requests get `submit_error`; None: all
        self.alive = True
        self.answer_s = 0.0  # how long stats and health take
        self.live: dict[str, AnyRequest] = {}
        self.ended: dict[str, str] = {}  # id -> "stop", "length", "abort: reason", "failed"
        self.requests: list[Request] = []
        self.audio: list[AudioRequest] = []
        self.appended = 0  # bytes of live audio
        self.hold_audio = False  # live audio is not looked at
        self.inboxes: dict[str, asyncio.Queue[tuple[bytes, bool]]] = {}
        self.voices: dict[str, FakeVoice] = {}  # those that have spoken, in their order
        self.painters: dict[str, FakePainter] = {}  # those that have painted, in their order
        self._stops: dict[str, str] = {}

    async def submit(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        assert request.request_id not in self.live, "the server makes ids that differ"
        self.live[request.request_id] = request
        how = "abort: closed"
        try:
            async for event in self._events(request):
                if isinstance(event, Done):
                    how = event.finish_reason
                elif isinstance(event, Failed):
                    how = "failed"
                elif isinstance(event, Aborted):
                    how = f"abort: {event.reason}"
                yield event
        finally:
            if how == "abort: closed" and request.request_id in self._stops:
                how = f"abort: {self._stops[request.request_id]}"
            del self.live[request.request_id]
            self.inboxes.pop(request.request_id, None)
            self.ended[request.request_id] = how

    def _events(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        if isinstance(request, AudioRequest):
            return self._hear(request)
        if isinstance(request, ImageRequest):
            return self._paint(request)
        return self._speak(request) if isinstance(request, SpeechRequest) else self._say(request)

    async def _speak(self, request: SpeechRequest) -> AsyncIterator[AnyEvent]:
        async def step() -> None:
            await asyncio.sleep(self.step_s)

        def stopped() -> str:
            return self._stops.get(request.request_id, "")

        voice = self.voices[request.request_id] = FakeVoice(request, asyncio.Queue(), stopped, step)
        if self.submit_error is not None:
            yield Failed(request_id=request.request_id, error=self.submit_error.info())
            return
        await asyncio.sleep(self.first_s)
        count = 0
        async for event in voice.events():
            if self.fail_after is not None and count >= self.fail_after:
                error = ErrorInfo(kind="EngineDead", message="the engine ended", code="engine_dead")
                yield Failed(request_id=request.request_id, error=error)
                return
            count += 1
            yield event

    async def _paint(self, request: ImageRequest) -> AsyncIterator[AnyEvent]:
        async def step() -> None:
            await asyncio.sleep(self.step_s)

        painter = FakePainter(request, lambda: self._stops.get(request.request_id, ""), step)
        self.painters[request.request_id] = painter
        if self.submit_error is not None:
            yield Failed(request_id=request.request_id, error=self.submit_error.info())
            return
        await asyncio.sleep(self.first_s)
        async for event in painter.events(self.fail_after):
            yield event

    async def _hear(self, request: AudioRequest) -> AsyncIterator[AnyEvent]:
        self.audio.append(request)
        inbox = self.inboxes[request.request_id] = asyncio.Queue()
        if self.submit_error is not None:
            yield Failed(request_id=request.request_id, error=self.submit_error.info())
            return
        await asyncio.sleep(self.first_s)
        while self.hold_audio:
            await asyncio.sleep(0.01)
        heard = FakeRecogniser(request, inbox, lambda: self._stops.get(request.request_id, ""))
        async for event in heard.events():
            await asyncio.sleep(self.step_s)
            yield event

    async def _say(self, request: Request) -> AsyncIterator[AnyEvent]:
        self.requests.append(request)
        params, request_id = request.params, request.request_id
        if self.submit_error is not None and (self.refuse_first is None or len(self.requests) <= self.refuse_first):
            yield Failed(request_id=request_id, error=self.submit_error.info())
            return
        await asyncio.sleep(self.first_s)
        data = self.reply.encode()
        limit = params.max_tokens if params.max_tokens is not None else 1 << 30
        sent, seq, reason = 0, 0, "stop"
        first: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            first = [None, *(self._logprob(token, params.prompt_logprobs) for token in request.prompt[1:])]
        if limit == 0 and first is not None:  # only the prompt's scores are wanted
            yield Tokens(request_id=request_id, seq=0, token_ids=[], prompt_logprobs=first)
            seq = 1
        while sent < limit and (params.ignore_eos or sent < len(data)):
            await asyncio.sleep(self.step_s)
            if request_id in self._stops:
                yield Aborted(request_id=request_id, reason=self._stops[request_id], usage=self._usage(request, sent))
                return
            if self.fail_after is not None and sent >= self.fail_after:
                error = ErrorInfo(kind="EngineDead", message="the engine ended", code="engine_dead")
                yield Failed(request_id=request_id, error=error)
                return
            count = min(self.tokens_per_step, limit - sent, len(data) if params.ignore_eos else len(data) - sent)
            ids = [data[(sent + i) % len(data)] for i in range(count)]
            sent += count
            self._tokens += count
            logprobs = None if params.logprobs is None else [self._logprob(token, params.logprobs) for token in ids]
            yield Tokens(request_id=request_id, seq=seq, token_ids=ids, logprobs=logprobs, prompt_logprobs=first)
            seq, first = seq + 1, None
        if sent >= limit and not (sent == len(data) and not params.ignore_eos):
            reason = "length"
        yield Done(
            request_id=request_id,
            seq=seq,
            finish_reason="length" if reason == "length" else "stop",
            stop_token=END if reason == "stop" else None,
            usage=self._usage(request, sent),
            timing=Timing(queue_s=0.001, first_token_s=0.002, total_s=0.01),
        )

    @staticmethod
    def _logprob(token: int, k: int) -> TokenLogprob:
        top = [(token + i) % 256 for i in range(k)]
        return TokenLogprob(token, -0.5, 1, top, [-0.5 - i for i in range(k)])

    @staticmethod
    def _usage(request: Request, sent: int) -> Usage:
        return Usage(num_prompt_tokens=len(request.prompt), num_cached_tokens=1, num_output_tokens=sent)

    async def append(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        embeddings: list[EmbeddingSpan] | None = None,
        pcm: bytes = b"",
        last: bool = False,
    ) -> None:
        self.appended += len(pcm)
        if request_id in self.inboxes:
            self.inboxes[request_id].put_nowait((pcm, last))
        if request_id in self.voices:
            self.voices[request_id].inbox.put_nowait((token_ids, last))

    async def update(self, request_id: str, *, priority: int | None = None, deadline: float | None = None) -> None: ...

    async def abort(self, request_id: str, reason: str = "client") -> None:
        self._stops.setdefault(request_id, reason)
        if request_id in self.inboxes:
            self.inboxes[request_id].put_nowait((b"", True))
        if request_id in self.voices:
            self.voices[request_id].inbox.put_nowait(([], True))

    async def load(self, model: str) -> ModelInfo:
        if not self.alive:
            raise EngineDead("the engine is not running")
        kind = {MODEL: "llm", TTS: "tts", IMAGE: "image"}.get(model, "asr")
        extra = CARD if model == IMAGE else {}
        return self.info if model == MODEL else msgspec.structs.replace(self.info, model=model, kind=kind, extra=extra)

    async def stats(self) -> dict[str, Any]:
        await asyncio.sleep(self.answer_s)
        return {
            "models": {
                MODEL: {
                    "running": len(self.live),
                    "waiting": 0,
                    "kv_usage": 0.25,
                    "num_blocks": 64,
                    "block_size": 16,
                    "prefix_queries": 10,
                    "prefix_hits": 5,
                    "preemptions": 1,
                    "prompt_tokens": 100,
                    "generation_tokens": self._tokens,
                }
            }
        }

    async def health(self) -> dict[str, Any]:
        await asyncio.sleep(self.answer_s)
        return {"alive": self.alive, "ready": self.alive, "models": {MODEL: "loaded", IMAGE: "loaded"}, "restarts": 0}

    async def drain(self, timeout_s: float) -> None:
        self.drained = True

    async def close(self) -> None:
        self.closed = True


def main() -> int:
    from motet.streaming.config import ServedModel, ServerConfig
    from motet.streaming.server import run

    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--shutdown-timeout-s", type=float, default=20.0)
    parser.add_argument("--reply", default="Hello, wörld! 🎉")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = write_voice(write_tokenizer(Path(folder)))

        async def start() -> FakeEngine:
            await asyncio.sleep(arguments.load_s)
            return FakeEngine(source, step_s=arguments.step_s, reply=arguments.reply)

        config = ServerConfig(
            port=arguments.port,
            models=(ServedModel(id=MODEL), ServedModel(id=ASR, kind="asr"), ServedModel(id=TTS, kind="tts")),
            shutdown_timeout_s=arguments.shutdown_timeout_s,
        )
        code = run(config, start)
        heavy = [name for name in ("torch", "transformers") if name in sys.modules]
        print(f"heavy modules: {heavy}", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
