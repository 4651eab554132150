"""Models, health and metrics."""

from __future__ import annotations

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
        if not await server.engine.healthy():
            raise EngineUnavailable("the engine does not answer")
        return json_response({"status": "ready", "engine": server.engine.info.name, "model": server.model_name})

    @routes.get("/version")
    async def version_() -> Response:
        info = server.engine.info
        return json_response({"version": version("agentserve"), "engine": info.name, "engine_url": server.engine.url})

    @routes.get("/metrics")
    async def metrics() -> Response:
        try:
            engine = await server.engine.metrics()
        except EngineError:
            engine = b""
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
