"""POST /v1/responses, and GET and DELETE of a stored response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.conversation import APPEND
from agentserve.deliveries import mark_of
from agentserve.dialects.media_forms import responses_media
from agentserve.dialects.responses import ResponsesConversation, ResponsesRequest, input_items, item_references, options, parse
from agentserve.dialects.responses_answer import NUMBER_DIGITS, ResponsesAnswer, response_of
from agentserve.dialects.responses_store import StoredResponse, response_not_found
from agentserve.dialects.sampling import body_session
from agentserve.errors import Unsupported
from agentserve.headers import json_response
from agentserve.identity import grouped, identify
from agentserve.media import MediaChat
from agentserve.plans import Plan
from agentserve.routes.appending import appends
from agentserve.routes.run import TurnRequest, answer
from agentserve.server import Server
from agentserve.sessions import Namespace


def router(server: Server) -> APIRouter:
    """The Responses routes over `server`."""
    routes = APIRouter()
    store = server.responses

    async def create(request: Request) -> Response:
        started = time.monotonic()
        namespace = server.namespace(request.headers)
        limits = server.settings.limits
        body = await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        if appends(request.headers):  # what is stored of an answer would lack the history
            raise Unsupported(f"{APPEND} is not for Responses: go on from an answer with previous_response_id", param=APPEND)
        asked = parse(body)
        server.check_model(asked.model)
        await _load(server, namespace, asked)
        previous = store.previous(namespace, asked.previous_response_id) if asked.previous_response_id is not None else None
        own = input_items(asked, lambda item_id: store.item(namespace, response_of(item_id), item_id))
        conversation = ResponsesConversation(asked, previous.history() if previous else (), own)
        session_id = body_session(asked) or (previous.session_id if previous else None)
        identity = grouped(identify(request.headers, session_id), asked.prompt_cache_key)

        keeping = Keeping(server, namespace, asked, own, previous)
        writer = ResponsesAnswer(asked, token_hex(NUMBER_DIGITS // 2), server.model_name, int(datetime.now(UTC).timestamp()), keeping.keep)
        mark = mark_of(request.headers, namespace.name, request.url.path, identity.session, body)
        history = (*(previous.history() if previous else ()), *own)
        parts = responses_media(asked.instructions, history, always=server.passes_through)
        media = MediaChat(parts, conversation.tools()) if parts is not None else None
        turn = TurnRequest(
            conversation, options(asked), identity, bool(asked.stream), started, mark=mark, media=media, settled=keeping.settled
        )
        return answer(server, namespace, turn, writer)

    @routes.get("/v1/responses/{response_id}")
    async def stored(request: Request, response_id: str) -> Response:
        namespace, elsewhere = server.namespace(request.headers), server.stored_responses
        body = store.get(namespace, response_id).body if elsewhere is None else await elsewhere.body(namespace, response_id)
        if body is None:
            raise response_not_found(response_id)
        return Response(body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        namespace, elsewhere = server.namespace(request.headers), server.stored_responses
        if not (store.forget(namespace, response_id) if elsewhere is None else await elsewhere.delete(namespace, response_id)):
            raise response_not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    routes.add_route("/v1/responses", create, methods=["POST"])
    return routes


class Keeping:
    """Keeps one answer for those that build on it, unless its request says otherwise; `own` and `previous` as in `StoredResponse`."""

    def __init__(
        self, server: Server, namespace: Namespace, asked: ResponsesRequest, own: Sequence[bytes], previous: StoredResponse | None
    ) -> None:
        self._server = server
        self._namespace = namespace
        self._asked = asked
        self._own = own
        self._previous = previous
        self._kept: asyncio.Future[bool] | None = None

    def keep(self, plan: Plan, response: dict[str, Any]) -> None:
        """Called with the answer before its client can know of it."""
        if self._asked.store is False:
            return
        items = (*self._own, *map(msgspec.json.encode, response["output"]))
        kept = StoredResponse(response["id"], plan.session_id, msgspec.json.encode(response), items, self._previous)
        self._server.responses.add(self._namespace, kept)
        if self._server.stored_responses is not None:
            self._kept = self._server.stored_responses.keep(self._namespace, kept.id)

    async def settled(self) -> None:
        """Wait, not long, until any server can go on from it."""
        if self._kept is not None and self._server.stored_responses is not None:
            await self._server.stored_responses.settled(self._kept)


async def _load(server: Server, namespace: Namespace, asked: ResponsesRequest) -> None:
    """Let the store have what the request goes on from or refers to, if another server has it."""
    if server.stored_responses is not None:
        named = [response_of(item_id) for item_id in item_references(asked).values()]
        await server.stored_responses.load(namespace, [asked.previous_response_id, *named] if asked.previous_response_id else named)
