"""Models, health and metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from agentserve.errors import EngineError, EngineUnavailable
from agentserve.headers import json_response
from agentserve.server import Server


def router(server: Server) -> APIRouter:
    """The routes beside the dialects."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        server.namespace(request.headers)
        return json_response({"object": "list", "data": [_model(server)]})

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        server.namespace(request.headers)
        server.check_model(name)
        return json_response(_model(server))

    @routes.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @routes.get("/ready")
    async def ready() -> Response:
        if not any(await asyncio.gather(*(replica.engine.healthy() for replica in server.replicas))):
            raise EngineUnavailable("no engine answers" if len(server.replicas) > 1 else "the engine does not answer")
        return json_response({"status": "ready", "engine": server.engine.info.name, "model": server.model_name})

    @routes.get("/version")
    async def version_() -> Response:
        info = server.engine.info
        urls = [replica.engine.url for replica in server.replicas]
        return json_response({"version": version("agentserve"), "engine": info.name, "engine_url": urls[0], "engine_urls": urls})

    @routes.get("/metrics")
    async def metrics() -> Response:
        engine = b""
        if len(server.replicas) == 1:  # the samples of several would stand there under equal names
            with suppress(EngineError):
                engine = await server.engine.metrics()
        return Response(server.metrics.text() + engine, media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _model(server: Server) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "agentserve",
        "max_model_len": server.engine.info.max_model_len,
    }
