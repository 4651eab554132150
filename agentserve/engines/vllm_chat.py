"""vLLM's own chat route on the wire: the events of its streams as steps of an answer. No I/O.

Fields as in vLLM 0.32: `entrypoints/openai/chat_completion/protocol.py`.
"""

from __future__ import annotations

import msgspec

from agentserve.engines import ChatCallPart, ChatChunk
from agentserve.engines.vllm_wire import WireError, WireUsage, raise_error, read_usage

CHAT_PATH = "/v1/chat/completions"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: WireUsage | None = None
    error: WireError | None = None


_EVENT = msgspec.json.Decoder(_Event)


def read_chat_event(data: bytes) -> ChatChunk:
    """One event of a chat stream. Raises `EngineRefused` where it is an error, `msgspec.MsgspecError` where it is not such an event."""
    event = _EVENT.decode(data)
    if event.error is not None:
        raise_error(event.error)
    usage = None if event.usage is None else read_usage(event.usage)
    if not event.choices:
        return ChatChunk(usage=usage)
    choice = event.choices[0]
    delta = choice.delta
    return ChatChunk(
        text=delta.content or "",
        reasoning=delta.reasoning or delta.reasoning_content or "",
        calls=tuple(ChatCallPart(c.index, c.id, c.function.name, c.function.arguments or "") for c in delta.tool_calls or ()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=usage,
    )
