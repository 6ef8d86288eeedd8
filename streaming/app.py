"""The application: the table of routes and the layers around them, on `EngineClient` and `TextFrontend` alone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, WebSocketRoute

from ..engine.client import EngineClient
from ..pipelines.sound_file import CONTENT_TYPES
from .audio_stream import AudioStream
from .audio_words import (
    DiarizedTranscription,
    TextDelta,
    Transcription,
    TranscriptionForm,
    TranslationForm,
    VerboseTranscription,
)
from .auth import AuthMiddleware, KeyRing
from .config import ServerConfig
from .edge import EdgeMiddleware, HostMiddleware, answer_http_exception
from .exchange import Endpoint, Exchange
from .openai_audio import FILE, transcriptions, translations
from .openai_chat import chat_completions
from .openai_completions import completions
from .openai_images import generations
from .openai_models import get_model, list_models
from .openai_speech import speech, voices
from .openapi import Operation, document
from .picture_words import ImageCreate, ImagesResponse, PartialImage
from .probes import livez, metrics, ready, show_version
from .protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    ModelBody,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    Version,
    encode,
)
from .realtime import RealtimeSession
from .service import Service
from .session import SocketEndpoint
from .speech_stream import SpeechStream
from .speech_words import AudioDelta, SpeechCreate, VoiceList
from .tokens import detokenize, tokenize

_ENGINE_ERRORS = (404, 429, 500, 503, 504)
_SUBTITLES = ("text/plain", "application/x-subrip", "text/vtt")


def operations() -> list[Operation]:
    """Every route but /openapi.json itself."""
    table = [
        Operation(
            method="POST",
            path="/v1/chat/completions",
            handler=chat_completions,
            summary="Answer a chat.",
            request=ChatRequest,
            response=ChatCompletion,
            chunk=ChatChunk,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="POST",
            path="/v1/completions",
            handler=completions,
            summary="Continue prompts.",
            request=CompletionRequest,
            response=Completion,
            chunk=Completion,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="POST",
            path="/v1/audio/transcriptions",
            handler=transcriptions,
            summary="Speech to text.",
            request=TranscriptionForm,
            file_field=FILE,
            response=Transcription,
            responses=(VerboseTranscription, DiarizedTranscription),
            text_types=_SUBTITLES,
            chunk=TextDelta,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="POST",
            path="/v1/audio/translations",
            handler=translations,
            summary="Speech in any language to English text.",
            request=TranslationForm,
            file_field=FILE,
            response=Transcription,
            responses=(VerboseTranscription,),
            text_types=_SUBTITLES,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="POST",
            path="/v1/audio/speech",
            handler=speech,
            summary="Text to speech.",
            request=SpeechCreate,
            binary_types=tuple(CONTENT_TYPES.values()),
            chunk=AudioDelta,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="GET",
            path="/v1/audio/voices",
            handler=voices,
            summary="The voices that can speak here.",
            response=VoiceList,
            errors=(500, 503),
        ),
        Operation(
            method="POST",
            path="/v1/images/generations",
            handler=generations,
            summary="Text to pictures.",
            request=ImageCreate,
            response=ImagesResponse,
            chunk=PartialImage,
            errors=_ENGINE_ERRORS,
        ),
        Operation(
            method="GET", path="/v1/models", handler=list_models, summary="The models served here.", response=ModelList
        ),
        Operation(
            method="GET",
            path="/v1/models/{model:path}",
            handler=get_model,
            summary="One model.",
            response=ModelBody,
            errors=(404,),
        ),
    ]
    for prefix in ("", "/v1"):
        table += [
            Operation(
                method="POST",
                path=f"{prefix}/tokenize",
                handler=tokenize,
                summary="Text or messages to ids.",
                request=TokenizeRequest,
                response=TokenizeResponse,
                errors=_ENGINE_ERRORS,
            ),
            Operation(
                method="POST",
                path=f"{prefix}/detokenize",
                handler=detokenize,
                summary="Ids to text.",
                request=DetokenizeRequest,
                response=DetokenizeResponse,
                errors=_ENGINE_ERRORS,
            ),
        ]
    table += [
        Operation(
            method="GET", path="/livez", handler=livez, summary="The process answers.", response=Health, open=True
        ),
        *(
            Operation(
                method="GET",
                path=path,
                handler=ready,
                summary="The server takes requests.",
                response=Health,
                answers_503=True,
                open=True,
            )
            for path in ("/readyz", "/health", "/ping")
        ),
        Operation(
            method="GET", path="/version", handler=show_version, summary="The version of motet.", response=Version
        ),
        Operation(
            method="GET", path="/metrics", handler=metrics, summary="Prometheus metrics.", media_type="text/plain"
        ),
    ]
    return table


def create_app(client: EngineClient | None, config: ServerConfig, *, service: Service | None = None) -> Starlette:
    """The ASGI application over one engine client. Without a client it answers 503 until `service.attach(client)`.

    Raises ValueError or OSError for keys that cannot be used.
    """
    service = service or Service(config)
    keys = KeyRing(config.api_keys, config.api_key_file)
    if client is not None:
        service.attach(client)
    table = operations()
    openapi = encode(document(table, title="Motet", version=_version(), secured=bool(keys)))

    async def show_openapi(exchange: Exchange) -> None:
        await exchange.send_bytes(openapi)

    routes: list[BaseRoute] = [
        Route(operation.path, Endpoint(operation.path, operation.handler), methods=[operation.method])
        for operation in table
    ]
    routes.append(Route("/openapi.json", Endpoint("/openapi.json", show_openapi), methods=["GET"]))
    sockets = (AudioStream, SpeechStream, RealtimeSession)
    routes += [WebSocketRoute(session.route, SocketEndpoint(session)) for session in sockets]
    layers = [Middleware(EdgeMiddleware, service=service)]
    if config.allowed_hosts:
        layers.append(Middleware(HostMiddleware, allowed=config.allowed_hosts))
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "openai-processing-ms", "retry-after", "x-motet-model"],
            )
        )
    layers.append(Middleware(AuthMiddleware, keys=keys))
    app = Starlette(routes=routes, middleware=layers, exception_handlers={HTTPException: answer_http_exception})
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _version() -> str:
    try:
        return version("motet")
    except PackageNotFoundError:
        return "0"
