"""The routes that say how the server is: /livez, /readyz, /health, /ping, /version, /metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..engine.metrics import CONTENT_TYPE
from .exchange import Exchange
from .protocol import Health, Version


async def livez(exchange: Exchange) -> None:
    """200 as long as the process answers, also while it drains."""
    await exchange.send_struct(Health(status="ok"))


async def ready(exchange: Exchange) -> None:
    """200 while the server takes requests and the engine answers; else 503 and why."""
    service = exchange.service
    if service.state in ("draining", "closed"):
        health = Health(status="draining")
    elif service.state == "starting":
        health = Health(status="engine_down" if service.failure else "starting")
    else:
        report = await service.health()
        if report is None or not report.get("alive"):
            health = Health(status="engine_down")
        else:
            models = {str(model): str(state) for model, state in report.get("models", {}).items()}
            health = Health(status="ok" if report.get("ready", True) else "starting", models=models)
    if health.status == "ok":
        await exchange.send_struct(health)
    else:
        await exchange.send_struct(health, status=503, headers=[(b"retry-after", b"2")])


async def show_version(exchange: Exchange) -> None:
    try:
        found = version("motet")
    except PackageNotFoundError:
        found = "unknown"
    await exchange.send_struct(Version(version=found))


async def metrics(exchange: Exchange) -> None:
    service = exchange.service
    health = await service.health() or {}
    service.metrics.set_engine_stats(await service.stats(), restarts=int(health.get("restarts", 0)))
    await exchange.send_bytes(service.metrics.render(), CONTENT_TYPE.encode())
