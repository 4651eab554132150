"""One message of a chat completions request: its form, and the item that it is."""

from __future__ import annotations

from typing import Any

import msgspec

from agentserve.dialects.calls import parse_arguments
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Item, SystemItem, ToolCall, UserItem


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallForm(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallForm] | None = None
    tool_call_id: str | None = None


def item_of(message: Message, index: int) -> Item:
    """What the message says. Raises InvalidRequest for a role that there is not, Unsupported for a part that is no text."""
    match message.role:
        case "user":
            return UserItem(text_of(message, index))
        case "system" | "developer":
            return SystemItem(text_of(message, index))
        case "assistant":
            reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
            return AssistantItem(text_of(message, index), reasoning, tuple(_call(call) for call in message.tool_calls or ()))
    raise InvalidRequest(
        f"messages[{index}].role {message.role!r} is not known: use system, developer, user, assistant or tool",
        param=f"messages[{index}].role",
    )


def _call(form: CallForm) -> ToolCall:
    arguments = form.function.arguments
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    return ToolCall(form.id or "", form.function.name, arguments if arguments is not None else {})


def text_of(message: Message, index: int) -> str:
    """The message's text; parts are joined. Raises Unsupported for a part that is none."""
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in ("text", "input_text", "output_text"):
            texts.append(part.text or "")
        else:
            at = f"messages[{index}].content"
            raise Unsupported(f"{at} holds a part of type {part.type!r}: only text is supported", param=at)
    return "".join(texts)
