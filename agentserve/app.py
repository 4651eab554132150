"""The ASGI application over a `Server`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from agentserve.dialects.errors import error_body, error_headers
from agentserve.errors import AgentserveError, ClientError, NotFound
from agentserve.routes import chat, operations, sessions
from agentserve.server import Server

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(server: Server, lifespan: Lifespan | None = None) -> FastAPI:
    """Routes and error answers. Every error leaves in the client's dialect."""
    app = FastAPI(title="agentserve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(chat.router(server))
    app.include_router(operations.router(server))
    app.include_router(sessions.router(server))

    @app.exception_handler(AgentserveError)
    async def known(_: Request, error: AgentserveError) -> Response:
        return _answer(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return _answer(NotFound(f"no route {path!r}", code="route_not_found"))
        refused = ClientError(f"{path!r}: {error.detail}")
        refused.status = error.status_code
        return _answer(refused)

    @app.exception_handler(Exception)
    async def ours(_: Request, __: Exception) -> Response:
        return _answer(AgentserveError("the server failed on this request; its log has the reason"))  # starlette logs and raises it on

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)

    return app


def _answer(error: AgentserveError) -> Response:
    return Response(
        msgspec.json.encode(error_body(error)), status_code=error.status, headers=error_headers(error), media_type="application/json"
    )
