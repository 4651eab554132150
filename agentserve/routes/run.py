"""Runs one turn for a route and writes its answer in the route's dialect: streamed or whole, and errors before or after the first byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from agentserve.conversation import Conversation, TurnOptions
from agentserve.deliveries import Mark
from agentserve.dialects.errors import error_headers
from agentserve.dialects.refusals import in_clients_fields
from agentserve.errors import AgentserveError, EngineUnavailable
from agentserve.exchange import Exchange, Sink
from agentserve.headers import EVENT_STREAM, JSON, plan_headers, write_json
from agentserve.identity import Identity
from agentserve.media import MediaChat, MediaTurn
from agentserve.nodes import Node
from agentserve.plans import Outcome, Plan
from agentserve.routes.choices import generate_choices
from agentserve.server import Server
from agentserve.sessions import Namespace
from agentserve.turns import Turn
from model.chat import Delta
from prefix_cache.hits import TurnHits

_log = structlog.get_logger(__name__)


class AnswerWriter(Protocol):
    """Writes one answer in the grammar of a dialect. Stream methods give whole events, in the order opening, deltas…, closing."""

    @property
    def keep_alive(self) -> bytes:
        """What may be sent at any time between two events, also before the first."""
        ...

    def opening(self, plan: Plan) -> bytes:
        """The events ahead of the first delta."""
        ...

    def deltas(self, deltas: list[Delta]) -> bytes:
        """The events of one step."""
        ...

    def closing(self, plan: Plan, outcome: Outcome) -> bytes:
        """The events that end a stream well."""
        ...

    def failure(self, error: AgentserveError) -> bytes:
        """The events that end a stream that broke after its first byte; `opening` may not have been written."""
        ...

    def whole(self, plan: Plan, outcome: Outcome, deltas: Iterable[Delta]) -> bytes:
        """The body of an answer that is not streamed; `deltas` are all of it."""
        ...

    def refusal(self, error: AgentserveError) -> dict[str, Any]:
        """The body of an error status."""
        ...


class ChoicesWriter(AnswerWriter, Protocol):
    """Writes several answers to one prompt, each through a writer of its own."""

    def choice(self, index: int) -> ChoicesWriter:
        """The writer of one of them, for its opening and its deltas."""
        ...

    def finish(self, outcome: Outcome) -> bytes:
        """The events that end one of them."""
        ...

    def end(self, plan: Plan, outcomes: Sequence[Outcome]) -> bytes:
        """The events behind the last one."""
        ...

    def whole_choices(self, plan: Plan, choices: Sequence[tuple[Outcome, Sequence[Delta]]]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a route read from a request. `started`: when it came, monotonic seconds. `onto`: the node that the conversation follows."""

    conversation: Conversation
    options: TurnOptions
    identity: Identity
    stream: bool
    started: float
    onto: Node | None = None
    choices: ChoicesWriter | None = None
    """Writes the answer where more than one is asked for."""
    mark: Mark | None = None
    """Which request this is to a client that sends it again; None: it is not looked for."""
    media: MediaChat | None = None
    """The conversation in the engine's own form, where it holds what only the engine can render."""
    settled: Callable[[], Awaitable[None]] | None = None
    """Awaited between the making of an answer's end and its sending: what the client may go on from is then where any server finds it."""


def answer(server: Server, namespace: Namespace, asked: TurnRequest, writer: AnswerWriter) -> Exchange:
    """The response that runs the turn."""
    run = TurnRun(server, namespace, asked, writer)
    silence_seconds = server.settings.limits.keep_alive_seconds
    keep_alive = writer.keep_alive if asked.stream else None
    if asked.mark is not None:
        return server.deliveries.exchange(asked.mark, run, silence_seconds=silence_seconds, keep_alive=keep_alive)
    return Exchange(run.handle, silence_seconds=silence_seconds, keep_alive=keep_alive)


class TurnRun:
    """One request on its way through a turn."""

    def __init__(self, server: Server, namespace: Namespace, asked: TurnRequest, writer: AnswerWriter) -> None:
        self._server = server
        self._namespace = namespace
        self._asked = asked
        self._writer = writer
        self._open: list[Turn | MediaTurn] = []
        """Turns that have begun and have no line in the log yet."""
        self._is_told = False
        self.answered = False
        """Whether a whole answer was made."""

    async def handle(self, wire: Sink) -> None:
        """Run the turn and write it; errors become a status, or an event once the stream has begun."""
        asked = self._asked
        if asked.stream:
            wire.prepare(200, EVENT_STREAM)  # so that keep-alives can be sent while the turn waits for its ticket
        try:
            async with self._turn() as turn:
                self._open.append(turn)
                if asked.choices is not None and isinstance(turn, Turn):
                    await self._choices(wire, turn, asked.choices)
                else:
                    await (self._stream(wire, turn) if asked.stream else self._whole(wire, turn))
                self.answered = True
        except asyncio.CancelledError:
            why = "client_left" if wire.client_left else "stopped"
            self._server.metrics.failed_turns.labels(why).inc()
            self._broke_off("abort", why=why)
            if not wire.client_left:
                await self._refuse(wire, EngineUnavailable("this server is stopping; try again"))
            raise
        except AgentserveError as raised:
            error = in_clients_fields(raised, asked.options)
            self._server.metrics.failed_turns.labels(error.kind).inc()
            # The engine's fault is told; a refusal may quote what the client has said, which no log has.
            reason = {} if error.status < 500 else {"reason": error.message}
            self._broke_off("error", why=error.kind, status=error.status, **reason)
            await self._refuse(wire, error)

    async def _refuse(self, wire: Sink, error: AgentserveError) -> None:
        if wire.started:
            await wire.write(self._writer.failure(error), more=False)
        else:
            await write_json(wire, self._writer.refusal(error), status=error.status, headers=error_headers(error))

    def _turn(self) -> AbstractAsyncContextManager[Turn | MediaTurn]:
        asked = self._asked
        if asked.media is not None:
            return self._server.media.turn(asked.media, asked.options, asked.identity, self._namespace)
        return self._server.turns.turn(asked.conversation, asked.options, asked.identity, self._namespace, asked.onto)

    async def _stream(self, wire: Sink, turn: Turn | MediaTurn) -> None:
        if not wire.started:
            wire.prepare(200, {**EVENT_STREAM, **plan_headers(turn.plan)})
        opened = False
        async with aclosing(turn.deltas(self._asked.options.stop)) as steps:
            async for deltas in steps:
                if opened:
                    await wire.write(self._writer.deltas(deltas))
                    continue
                opened = True
                self._first_token()
                await wire.write(self._writer.opening(turn.plan) + self._writer.deltas(deltas))
        outcome = self._finished(turn)
        opening = b"" if opened else self._writer.opening(turn.plan)
        closing = self._writer.closing(turn.plan, outcome)
        await self._settled()
        await wire.write(opening + closing, more=False)

    async def _whole(self, wire: Sink, turn: Turn | MediaTurn) -> None:
        said: list[Delta] = []
        async with aclosing(turn.deltas(self._asked.options.stop)) as steps:
            async for deltas in steps:
                if not said:
                    self._first_token()
                said += deltas
        outcome = self._finished(turn)
        wire.prepare(200, {**JSON, **plan_headers(turn.plan, outcome.hits)})
        whole = self._writer.whole(turn.plan, outcome, said)
        await self._settled()
        await wire.write(whole, more=False)

    async def _choices(self, wire: Sink, turn: Turn, writer: ChoicesWriter) -> None:
        options = self._asked.options
        said: list[list[Delta]] = [[] for _ in range(options.num_choices)]
        outcomes: dict[int, Outcome] = {}
        if self._asked.stream and not wire.started:
            wire.prepare(200, {**EVENT_STREAM, **plan_headers(turn.plan)})

        async def take(index: int, choice: Turn, deltas: list[Delta] | None) -> None:
            mine, events = writer.choice(index), b""
            if choice not in self._open and index not in outcomes:
                self._open.append(choice)
            if deltas is None:
                outcomes[index] = self._finished(choice)
            elif not any(said):
                self._first_token()
            if self._asked.stream:
                events = b"" if said[index] else mine.opening(choice.plan)
                events += mine.deltas(deltas) if deltas is not None else mine.finish(outcomes[index])
            said[index] += deltas or ()
            if events:
                await wire.write(events)

        await generate_choices(turn, options.num_choices, options.stop, take)
        ordered = [(outcomes[index], deltas) for index, deltas in enumerate(said)]
        if self._asked.stream:
            await wire.write(writer.end(turn.plan, [outcome for outcome, _ in ordered]), more=False)
            return
        wire.prepare(200, {**JSON, **plan_headers(turn.plan, ordered[0][0].hits)})
        await wire.write(writer.whole_choices(turn.plan, ordered), more=False)

    async def _settled(self) -> None:
        if self._asked.settled is not None:
            await self._asked.settled()

    def _first_token(self) -> None:
        self._server.metrics.first_token.observe(time.monotonic() - self._asked.started)

    def _finished(self, turn: Turn | MediaTurn) -> Outcome:
        outcome = turn.outcome
        assert outcome is not None
        self._server.metrics.answered(turn.plan, outcome)
        self._open.remove(turn)
        self._tell(turn.plan, outcome.hits, outcome.num_generated_tokens, outcome.finish_reason)
        return outcome

    def _broke_off(self, finish_reason: str, **more: str | int) -> None:
        """Tell of each turn that has no whole answer; also of a request whose turn had not begun, as while it waited."""
        for turn in self._open:
            self._tell(turn.plan, turn.plan.hits, turn.num_generated_tokens, finish_reason, **more)
        if not self._is_told:
            seconds = round(time.monotonic() - self._asked.started, 4)
            _log.info("turn", session=self._asked.identity.session, finish_reason=finish_reason, seconds=seconds, **more)

    def _tell(self, plan: Plan, hits: TurnHits, num_generated_tokens: int | None, finish_reason: str, **more: str | int) -> None:
        self._is_told = True
        _log.info(
            "turn",
            session=plan.session_id,
            kind=plan.kind.value,
            edited_message=plan.edited_message,
            num_prompt_tokens=plan.num_prompt_tokens,
            num_generated_tokens=num_generated_tokens,
            ceiling=hits.ceiling,
            num_cached_tokens=hits.actual,
            finish_reason=finish_reason,
            seconds=round(time.monotonic() - self._asked.started, 4),
            **more,
        )
