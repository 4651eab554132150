"""Turns that the engine's own chat route renders: those with images or other media, as this server knows text only, or with the chat format
`passthrough` all of them.

Nothing of such a turn is in the ledger, so it is not exact, has no ceiling and no prediction, and counts in no hit rate. It takes a ticket,
goes out under its session's name and is aborted when its client leaves, as any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import xxhash

from admission.requests import AdmissionRequest
from agentserve.conversation import ToolChoice, TurnOptions
from agentserve.dialects.calls import parse_arguments
from agentserve.engines import ChatCallPart, ChatChunk, ChatEngine, ChatRequest, Usage
from agentserve.errors import EngineError, InvalidRequest, Unsupported
from agentserve.identity import Identity
from agentserve.plans import Outcome, Plan
from agentserve.replicas import Replicas
from agentserve.sessions import Namespace, Namespaces, Session, TurnKind
from model.chat import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from model.conversation import AssistantItem, Json, Tool, ToolCall
from prefix_cache.hits import TurnHits

UNTOLD_ANSWER_TOKENS = 1024
"""Charged for an answer whose length the client does not limit."""


@dataclass(frozen=True, slots=True)
class MediaChat:
    """A conversation in the engine's own chat form: `messages` as JSON values, and the tools offered."""

    messages: list[Json]
    tools: tuple[Tool, ...] = ()

    def body(self, options: TurnOptions, model: str, salt: str | None) -> bytes:
        """The request's JSON. Raises InvalidRequest and Unsupported."""
        if options.num_choices > 1 or options.logprobs is not None:
            raise Unsupported("neither n > 1 nor logprobs are supported where the engine renders the conversation", param="messages")
        fields: dict[str, Json] = {**options.sampling, "model": model, "messages": self.messages, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        known: dict[str, Json] = {
            "stop": list(options.stop) or None,
            "max_tokens": options.max_tokens,
            "priority": options.priority,
            "cache_salt": salt,
            "vllm_xargs": dict(options.xargs) or None,
            **self._tool_fields(options.tools),
        }
        return msgspec.json.encode({**fields, **{name: value for name, value in known.items() if value is not None}})

    def _tool_fields(self, choice: ToolChoice) -> dict[str, Json]:
        """A choice among some tools offers the engine only those."""
        wanted = [tool for tool in self.tools if choice.names is None or tool.name in choice.names]
        if len(wanted) < len(choice.names or ()) or (choice.mode == "required" and not wanted):
            raise InvalidRequest("tool_choice asks for a tool that is not offered", param="tool_choice")
        if not wanted:
            return {}
        named: Json = {"type": "function", "function": {"name": wanted[0].name}}
        mode: Json = named if choice.mode == "required" and choice.names is not None and len(wanted) == 1 else choice.mode
        return {"tools": [_function(tool) for tool in wanted], "tool_choice": mode, "parallel_tool_calls": False if choice.single else None}

    @property
    def name(self) -> str:
        """Names the session of a conversation whose client does not: by its first message behind the system text."""
        first = next((m for m in self.messages if isinstance(m, dict) and m.get("role") not in ("system", "developer")), None)
        return f"media-{xxhash.xxh3_128_hexdigest(msgspec.json.encode(first))}"


def _function(tool: Tool) -> Json:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    parts: list[str] = field(default_factory=list)


class MediaTurn:
    """A turn that holds its ticket, as `Turn`. `plan` knows the prompt's tokens once the engine has said them."""

    def __init__(self, engine: ChatEngine, session: Session, request: ChatRequest) -> None:
        self._engine = engine
        self._session = session
        self._request = request
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._last = ChatChunk()
        self.outcome: Outcome | None = None
        self.plan = Plan(session.id, TurnKind.PASSED, 0, 0, _hits(None))

    async def deltas(self, stop: tuple[str, ...] = ()) -> AsyncGenerator[list[Delta], None]:
        """What the engine says; it sees to `stop` by itself."""
        async with aclosing(self._engine.chat(self._request)) as chunks:
            async for chunk in chunks:
                shown = self._take(chunk)
                if shown:
                    yield shown
        if self._last.finish_reason is None:
            raise EngineError("the engine ended the stream without a finish reason")
        empty: list[Delta] = [CallArguments(index, "{}") for index, call in self._calls.items() if not "".join(call.parts).strip()]
        if empty:
            yield empty
        self._end()

    @property
    def num_generated_tokens(self) -> int | None:
        """None: the engine has not said yet."""
        return None if self._last.usage is None else self._last.usage.num_generated_tokens

    def _take(self, chunk: ChatChunk) -> list[Delta]:
        if chunk.finish_reason is not None or chunk.usage is not None:
            before = self._last
            self._last = ChatChunk(
                finish_reason=chunk.finish_reason or before.finish_reason,
                stop_reason=chunk.stop_reason if chunk.stop_reason is not None else before.stop_reason,
                usage=chunk.usage or before.usage,
            )
        shown: list[Delta] = []
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
            shown.append(ReasoningDelta(chunk.reasoning))
        if chunk.text:
            self._text.append(chunk.text)
            shown.append(TextDelta(chunk.text))
        for part in chunk.calls:
            shown += self._call(part)
        return shown

    def _call(self, part: ChatCallPart) -> list[Delta]:
        shown: list[Delta] = []
        call = self._calls.get(part.index)
        if call is None:
            call = self._calls[part.index] = _Call(part.id or f"call_{part.index}", part.name or "")
            shown.append(CallStart(part.index, call.id, call.name))
        if part.arguments:
            call.parts.append(part.arguments)
            shown.append(CallArguments(part.index, part.arguments))
        return shown

    def _end(self) -> None:
        usage, last = self._last.usage, self._last
        calls = tuple(ToolCall(call.id, call.name, parse_arguments("".join(call.parts))) for call in self._calls.values())
        item = AssistantItem("".join(self._text), "".join(self._reasoning) or None, calls)
        hits = _hits(usage)
        self.plan = Plan(self._session.id, TurnKind.PASSED, hits.num_prompt_tokens, 0, hits)
        num_generated = usage.num_generated_tokens if usage is not None else 0
        self.outcome = Outcome(item, last.finish_reason or "stop", last.stop_reason, num_generated, usage, hits)
        self._session.count_turn(TurnKind.PASSED)


def _hits(usage: Usage | None) -> TurnHits:
    """What the engine says, and nothing else: what could have been a hit is not known."""
    return TurnHits(usage.num_prompt_tokens if usage else 0, 0, None, None, usage.num_cached_tokens if usage else None, None)


class MediaTurns:
    """Runs them. One per server."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        namespaces: Namespaces,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._replicas = replicas
        self._namespaces = namespaces
        self._clock = clock
        self._new_id = new_id

    @asynccontextmanager
    async def turn(self, chat: MediaChat, options: TurnOptions, identity: Identity, namespace: Namespace) -> AsyncIterator[MediaTurn]:
        """A turn that holds its ticket; everything is given back when the `with` ends."""
        body = chat.body(options, self._replicas.first.engine.info.model, namespace.salt)
        named = Identity(identity.session or chat.name, identity.parent)
        session = namespace.resolve(named, None, self._clock(), self._new_id)
        replica = self._replicas.home(session)
        engine = replica.engine
        if not isinstance(engine, ChatEngine):
            raise Unsupported("messages with media are not supported: the engine has no chat route of its own", param="messages")
        session.running += 1
        try:
            charge = (options.max_tokens or UNTOLD_ANSWER_TOKENS) + sum(map(_text_tokens, chat.messages))
            with replica.running(charge):
                async with replica.room.ticket(AdmissionRequest(self._new_id(), session.id, charge, 0)):
                    yield MediaTurn(engine, session, ChatRequest(body, session.id))
        finally:
            session.running -= 1
            session.used = self._clock()
            self._namespaces.trim(session.used)


def _text_tokens(value: Json) -> int:
    """About how many tokens the texts in a message have; an encoded picture is no text."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value) // 4
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_text_tokens, parts))
