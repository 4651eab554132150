"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing
from datetime import UTC, datetime
from secrets import token_hex

import structlog
from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.dialects.errors import error_body, error_headers
from agentserve.dialects.openai_chat import ChatConversation, ChatRequest, options, parse
from agentserve.dialects.openai_chat_answer import KEEP_ALIVE, ChatAnswer
from agentserve.errors import AgentserveError
from agentserve.exchange import Exchange, Wire
from agentserve.headers import EVENT_STREAM, JSON, plan_headers, write_json
from agentserve.identity import identify
from agentserve.server import Server
from agentserve.sessions import Namespace
from agentserve.turns import Outcome, Turn
from model.chat import Delta

_log = structlog.get_logger(__name__)


def router(server: Server) -> APIRouter:
    """The chat route over `server`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        started = time.monotonic()
        namespace = server.namespace(request.headers)
        limits = server.settings.limits
        body = await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)
        chat = parse(body)
        server.check_model(chat.model)
        run = _ChatRun(server, request, namespace, chat, started)
        return Exchange(run.handle, silence_seconds=limits.keep_alive_seconds, keep_alive=KEEP_ALIVE if chat.stream else None)

    return routes


class _ChatRun:
    """One chat request on its way through a turn."""

    def __init__(self, server: Server, request: Request, namespace: Namespace, chat: ChatRequest, started: float) -> None:
        self._server = server
        self._namespace = namespace
        self._chat = chat
        self._started = started
        self._conversation = ChatConversation(chat)
        self._options = options(chat)
        self._identity = identify(request.headers, chat.session_id)
        self._answer = ChatAnswer(f"chatcmpl-{token_hex(12)}", server.model_name, int(datetime.now(UTC).timestamp()))

    async def handle(self, wire: Wire) -> None:
        """Run the turn and write it; errors become a status, or an event once the stream has begun."""
        try:
            async with self._server.turns.turn(self._conversation, self._options, self._identity, self._namespace) as turn:
                if self._chat.stream:
                    await self._stream(wire, turn)
                else:
                    await self._whole(wire, turn)
        except AgentserveError as error:
            self._server.metrics.failed_turns.labels(error.kind).inc()
            if wire.started:
                await wire.write(self._answer.failure(error), more=False)
            else:
                await write_json(wire, error_body(error), status=error.status, headers=error_headers(error))

    async def _stream(self, wire: Wire, turn: Turn) -> None:
        wire.prepare(200, {**EVENT_STREAM, **plan_headers(turn.plan)})
        opened = False
        async with aclosing(turn.deltas(self._options.stop)) as steps:
            async for deltas in steps:
                event = self._answer.deltas(deltas)
                if not opened:
                    opened = True
                    self._first_token()
                    event = self._answer.opening() + event
                await wire.write(event)
        outcome = self._finished(turn)
        usage = self._chat.stream_options is not None and self._chat.stream_options.include_usage
        closing = self._answer.closing(turn.plan, outcome, include_usage=usage)
        await wire.write(closing if opened else self._answer.opening() + closing, more=False)

    async def _whole(self, wire: Wire, turn: Turn) -> None:
        said: list[Delta] = []
        async with aclosing(turn.deltas(self._options.stop)) as steps:
            async for deltas in steps:
                if not said:
                    self._first_token()
                said += deltas
        outcome = self._finished(turn)
        wire.prepare(200, {**JSON, **plan_headers(turn.plan, outcome.hits)})
        await wire.write(self._answer.whole(turn.plan, outcome, said), more=False)

    def _first_token(self) -> None:
        self._server.metrics.first_token.observe(time.monotonic() - self._started)

    def _finished(self, turn: Turn) -> Outcome:
        outcome = turn.outcome
        assert outcome is not None
        self._server.metrics.answered(turn.plan, outcome)
        _log.info(
            "turn",
            session=turn.plan.session_id,
            kind=turn.plan.kind.value,
            num_prompt_tokens=turn.plan.num_prompt_tokens,
            num_generated_tokens=outcome.num_generated_tokens,
            ceiling=outcome.hits.ceiling,
            num_cached_tokens=outcome.hits.actual,
            finish_reason=outcome.finish_reason,
            seconds=round(time.monotonic() - self._started, 4),
        )
        return outcome
