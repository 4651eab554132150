"""The ASGI application over a `Server`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from agentserve.dialects import anthropic_errors, errors
from agentserve.errors import AgentserveError, ClientError, NotFound
from agentserve.routes import admin, cache, chat, messages, operations, responses, sessions
from agentserve.server import Server

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(server: Server, lifespan: Lifespan | None = None) -> FastAPI:
    """Routes and error answers. Every error leaves in the client's dialect."""
    app = FastAPI(title="agentserve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(chat.router(server))
    app.include_router(messages.router(server))
    app.include_router(responses.router(server))
    app.include_router(operations.router(server))
    app.include_router(admin.router(server))
    app.include_router(cache.router(server))  # before the sessions, whose ids may hold slashes
    app.include_router(sessions.router(server))

    @app.exception_handler(AgentserveError)
    async def known(request: Request, error: AgentserveError) -> Response:
        return _answer(request, error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return _answer(request, NotFound(f"no route {path!r}", code="route_not_found"))
        refused = ClientError(f"{path!r}: {error.detail}")
        refused.status = error.status_code
        answer = _answer(request, refused)
        answer.headers.update(error.headers or {})  # what a 405 allows
        return answer

    @app.exception_handler(Exception)
    async def ours(request: Request, _: Exception) -> Response:
        failed = AgentserveError("the server failed on this request; its log has the reason")
        return _answer(request, failed)  # starlette logs and raises it on

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)

    return app


class RefuseAll:
    """An application that takes in each request, answers it with `error` in the dialect of its path, and closes the connection."""

    def __init__(self, error: AgentserveError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI has it."""
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            async for _ in request.stream():
                pass  # closing on a client that still writes would reset the connection, and the answer with it
            answer = _answer(request, self._error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)


def _answer(request: Request, error: AgentserveError) -> Response:
    """`error` in the dialect of the path."""
    body = error_text(request.url.path, error)
    return Response(body, status_code=error.status, headers=errors.error_headers(error), media_type="application/json")


def error_text(path: str, error: AgentserveError) -> bytes:
    """The JSON of `error` in the dialect of the path."""
    dialect = anthropic_errors if path.startswith("/v1/messages") else errors
    return msgspec.json.encode(dialect.error_body(error))
