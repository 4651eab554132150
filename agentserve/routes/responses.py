"""POST /v1/responses, and GET and DELETE of a stored response."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.deliveries import mark_of
from agentserve.dialects.media_forms import responses_media
from agentserve.dialects.responses import ResponsesConversation, input_items, options, parse
from agentserve.dialects.responses_answer import NUMBER_DIGITS, ResponsesAnswer, response_of
from agentserve.dialects.responses_store import StoredResponse
from agentserve.dialects.sampling import body_session
from agentserve.headers import json_response
from agentserve.identity import grouped, identify
from agentserve.media import MediaChat
from agentserve.routes.run import TurnRequest, answer
from agentserve.server import Server
from agentserve.turns import Plan


def router(server: Server) -> APIRouter:
    """The Responses routes over `server`."""
    routes = APIRouter()
    store = server.responses

    async def create(request: Request) -> Response:
        started = time.monotonic()
        namespace = server.namespace(request.headers)
        limits = server.settings.limits
        body = await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        asked = parse(body)
        server.check_model(asked.model)
        previous = store.previous(namespace, asked.previous_response_id) if asked.previous_response_id is not None else None
        own = input_items(asked, lambda item_id: store.item(namespace, response_of(item_id), item_id))
        conversation = ResponsesConversation(asked, previous.history() if previous else (), own)
        session_id = body_session(asked) or (previous.session_id if previous else None)
        identity = grouped(identify(request.headers, session_id), asked.prompt_cache_key)

        def keep(plan: Plan, response: dict[str, Any]) -> None:
            if asked.store is not False:
                items = (*own, *map(msgspec.json.encode, response["output"]))
                store.add(namespace, StoredResponse(writer.id, plan.session_id, msgspec.json.encode(response), items, previous))

        writer = ResponsesAnswer(asked, token_hex(NUMBER_DIGITS // 2), server.model_name, int(datetime.now(UTC).timestamp()), keep)
        mark = mark_of(request.headers, namespace.name, request.url.path, identity.session, body)
        history = (*(previous.history() if previous else ()), *own)
        parts = responses_media(asked.instructions, history, always=server.passes_through)
        media = MediaChat(parts, conversation.tools()) if parts is not None else None
        turn = TurnRequest(conversation, options(asked), identity, bool(asked.stream), started, mark=mark, media=media)
        return answer(server, namespace, turn, writer)

    @routes.get("/v1/responses/{response_id}")
    async def stored(request: Request, response_id: str) -> Response:
        found = store.get(server.namespace(request.headers), response_id)
        return Response(found.body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        store.delete(server.namespace(request.headers), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    routes.add_route("/v1/responses", create, methods=["POST"])
    return routes
