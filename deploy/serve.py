"""`motet serve`: the configured server in this process, its engine host in a child process.

Joins the two: which models are listed, what the operator sees while they load. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import logging
import sys

from ..engine.client import EngineClient
from ..engine.errors import ModelNotFound, Unavailable
from ..engine.frames import Progress
from ..engine.process_client import ProcessClient
from ..models import registry
from ..streaming.config import ServedModel, ServerConfig
from ..streaming.server import run
from .config import MotetConfig


def serve(config: MotetConfig) -> int:
    """Serve until a signal; gives the exit status. Raises MotetError for an unknown model or a taken address."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    served = served_models(config.host.models, config.host.served_model_name)
    server = dataclasses.replace(config.server, models=tuple(served.values()))
    # The host refuses every other id, so that no request can name a file or a hub id of its own.
    ids = tuple(model.id for model in served.values())
    host = dataclasses.replace(config.host, models=tuple(served), served_model_name=ids)

    async def start() -> EngineClient:
        tell("starting the engine")
        client = await ProcessClient.start(host)
        client.on_progress = tell_progress
        if host.preload:
            try:
                for model in ids:
                    await client.load(model)
            except BaseException:
                await client.close()
                raise
        return client

    try:
        return run(server, start)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address(server)}: {error.strerror}", code="address") from error


def served_models(names: tuple[str, ...], ids: tuple[str, ...] = ()) -> dict[str, ServedModel]:
    """Names to load, and how `/v1/models` lists each; without names, every installed one whose weights are here.

    A file or directory is listed by its last part, never by its path. Raises ModelNotFound before anything is started.
    """
    if names:
        resolved = {name: registry.resolve(name) for name in names}
        chosen = dict(zip(names, ids)) if ids else {name: model.id for name, model in resolved.items()}
        return {name: ServedModel(id=chosen[name], kind=model.kind) for name, model in resolved.items()}
    found: dict[str, ServedModel] = {}
    missing = []
    for spec in registry.installed():
        if spec.kind in registry.PARTS:
            continue
        try:
            spec.locate()
        except ModelNotFound as error:
            missing.append(error)
        else:
            found[spec.id] = ServedModel(id=spec.id, kind=spec.kind)
    if not found:
        raise (
            missing[0]
            if missing
            else ModelNotFound(
                "no models are installed: name one (an id, a .gguf file, a directory), or run `make venv`"
            )
        )
    return found


def tell_progress(progress: Progress) -> None:
    tell(f"{progress.model}: {progress.phase} ({progress.seconds:.1f} s)")


def tell(line: str) -> None:
    print(f"motet: {line}", file=sys.stderr, flush=True)


def address(server: ServerConfig) -> str:
    return f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}"
