"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from secrets import token_hex

from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.deliveries import mark_of
from agentserve.dialects.known_bodies import KnownBodies
from agentserve.dialects.media_forms import CHAT_TYPES, chat_media, hints_at_media
from agentserve.dialects.openai_chat import ChatConversation, options, parse, read
from agentserve.dialects.openai_chat_answer import ChatAnswer
from agentserve.dialects.sampling import body_session
from agentserve.identity import grouped, identify
from agentserve.media import MediaChat
from agentserve.routes.appending import appending
from agentserve.routes.run import TurnRequest, answer
from agentserve.server import Server


def router(server: Server) -> APIRouter:
    """The chat route over `server`."""
    routes = APIRouter()
    bodies = KnownBodies()
    whole = server.passes_through

    async def chat_completions(request: Request) -> Response:
        started = time.monotonic()
        namespace = server.namespace(request.headers)
        limits = server.settings.limits
        body = await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        mark = mark_of(request.headers, namespace.name, request.url.path, identify(request.headers).session, body)
        after = await appending(server, namespace, request.headers, mark)
        if after is not None:
            chat = parse(body)
            conversation = ChatConversation(chat, onto=after.onto)
        else:
            chat, conversation = read(body, bodies)
        server.check_model(chat.model)
        identity = grouped(identify(request.headers, body_session(chat)), chat.prompt_cache_key)
        include_usage = chat.stream_options is not None and chat.stream_options.include_usage
        created = int(datetime.now(UTC).timestamp())
        writer = ChatAnswer(f"chatcmpl-{token_hex(12)}", server.model_name, created, include_usage=include_usage)
        wanted = options(chat)
        choices = writer if wanted.num_choices > 1 else None
        messages = (
            chat_media(conversation.whole().messages, always=whole)
            if after is None and (whole or hints_at_media(body, CHAT_TYPES))
            else None
        )
        media = MediaChat(messages, conversation.whole().tools()) if messages is not None else None
        onto = after.node if after is not None else None
        asked = TurnRequest(conversation, wanted, identity, bool(chat.stream), started, onto, choices, mark, media)
        return answer(server, namespace, asked, writer)

    routes.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    return routes
