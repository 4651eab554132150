"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import time
from secrets import token_hex

from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.deliveries import mark_of
from agentserve.dialects.anthropic import MessagesConversation, MessagesRequest, client_session, options, parse
from agentserve.dialects.anthropic_answer import MessagesAnswer
from agentserve.dialects.media_forms import MESSAGES_TYPES, hints_at_media, messages_media
from agentserve.dialects.sampling import body_session
from agentserve.headers import json_response
from agentserve.identity import grouped, identify
from agentserve.media import MediaChat
from agentserve.routes.appending import appending
from agentserve.routes.run import TurnRequest, answer
from agentserve.server import Server


def router(server: Server) -> APIRouter:
    """Anthropic's routes over `server`."""
    routes = APIRouter()

    async def read(request: Request) -> tuple[bytes, MessagesRequest]:
        limits = server.settings.limits
        body = await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        messages = parse(body)
        server.check_model(messages.model)
        return body, messages

    async def create(request: Request) -> Response:
        started = time.monotonic()
        namespace = server.namespace(request.headers)
        body, messages = await read(request)
        identity = grouped(identify(request.headers, body_session(messages)), client_session(messages) or messages.prompt_cache_key)
        mark = mark_of(request.headers, namespace.name, request.url.path, identity.session, body)
        after = await appending(server, namespace, request.headers, mark)
        conversation = MessagesConversation(messages, after.onto if after is not None else None)
        whole = server.passes_through
        may_hold = after is None and (whole or hints_at_media(body, MESSAGES_TYPES))
        parts = messages_media(messages.system, messages.messages, always=whole) if may_hold else None
        media = MediaChat(parts, conversation.tools()) if parts is not None else None
        answer_id = f"msg_{token_hex(12)}"
        onto = after.node if after is not None else None
        wanted = options(messages, answer_id)
        asked = TurnRequest(conversation, wanted, identity, bool(messages.stream), started, onto, mark=mark, media=media)
        writer = MessagesAnswer(answer_id, server.model_name, diagnosed=messages.diagnostics is not None)
        return answer(server, namespace, asked, writer)

    async def count_tokens(request: Request) -> Response:
        namespace = server.namespace(request.headers)
        _, messages = await read(request)
        after = await appending(server, namespace, request.headers)
        conversation = MessagesConversation(messages, after.onto if after is not None else None)
        num_tokens = await server.turns.count(conversation, namespace, after.node if after is not None else None)
        return json_response({"input_tokens": num_tokens})

    routes.add_route("/v1/messages", create, methods=["POST"])
    routes.add_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    return routes
