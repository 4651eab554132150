"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from secrets import token_bytes, token_hex

from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.deliveries import mark_of
from agentserve.dialects.known_bodies import KnownBodies
from agentserve.dialects.media_forms import CHAT_TYPES, chat_media, hints_at_media
from agentserve.dialects.openai_chat import ChatConversation, Onto, options, parse, read
from agentserve.dialects.openai_chat_answer import ChatAnswer
from agentserve.dialects.sampling import body_session
from agentserve.errors import InvalidRequest, NotFound
from agentserve.identity import Identity, grouped, identify
from agentserve.ledger import Node
from agentserve.media import MediaChat
from agentserve.routes.run import TurnRequest, answer
from agentserve.server import Server
from agentserve.sessions import Namespace
from model.conversation import AssistantItem

APPEND = "x-agentserve-append"
"""Request header: "true" says that the messages are only those that follow the session's latest answer."""


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
        onto = None
        if request.headers.get(APPEND) == "true":
            chat, session_id = parse(body), identify(request.headers).session
            if server.turns.stored is not None and session_id is not None:  # the latest answer may be another server's
                await server.turns.stored.load(namespace, Identity(session_id), ())
            onto = tip(namespace, session_id)
            calls = onto.shape.calls if isinstance(onto.shape, AssistantItem) else ()
            conversation = ChatConversation(chat, onto=Onto(token_bytes(16), calls))
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
            if onto is None and (whole or hints_at_media(body, CHAT_TYPES))
            else None
        )
        media = MediaChat(messages, conversation.whole().tools()) if messages is not None else None
        mark = mark_of(request.headers, namespace.name, request.url.path, identity.session, body)
        asked = TurnRequest(conversation, wanted, identity, bool(chat.stream), started, onto, choices, mark, media)
        return answer(server, namespace, asked, writer)

    routes.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    return routes


def tip(namespace: Namespace, session_id: str | None) -> Node:
    """Where appended messages go on. Raises InvalidRequest without a session id, NotFound for a session that holds nothing."""
    if session_id is None:
        raise InvalidRequest(f"{APPEND} needs a session: name it in a header such as x-agentserve-session")
    session = namespace.sessions.get(session_id)
    node = session.tip if session is not None else None
    if node is None:
        raise NotFound(f"no session {session_id!r} to append to: send the whole history", code="session_not_found")
    return node
