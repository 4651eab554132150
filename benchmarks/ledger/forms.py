"""A conversation as the clients of each dialect write it, and their reading of an answer, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from model.conversation import AssistantItem, Head, Item, SystemItem, ToolCall, ToolResultItem, UserItem

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How a client writes what it echoes. `arguments` gives the JSON text of a call's arguments; None: as its language prints them."""

    arguments: Callable[[ToolCall], str] | None = None
    reasoning_field: str = "reasoning"
    in_parts: bool = False
    """Assistant text as a list of parts (chat completions)."""


PLAIN = Style()


class Form(Protocol):
    """One dialect."""

    path: str

    def body(self, head: Head, items: Iterable[Item], style: Style = PLAIN) -> Body:
        """The request, but for `stream`."""
        ...

    def said(self, answer: Mapping[str, Any]) -> AssistantItem:
        """What a whole answer says."""
        ...

    def streamed(self, data: bytes) -> Body:
        """A stream put together to what a whole answer would have been, as the SDKs of the dialect do it."""
        ...

    def argument_texts(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """The JSON text of each call's arguments by the call's id."""
        ...


def events(data: bytes) -> Iterator[Body]:
    """The JSON events of a stream, comments left out."""
    for block in data.decode().split("\n\n"):
        _, found, text = block.rpartition("data: ")
        if found and not block.startswith(":") and text != "[DONE]":
            yield msgspec.json.decode(text)


class ChatForm:
    """OpenAI chat completions."""

    path = "/v1/chat/completions"

    def body(self, head: Head, items: Iterable[Item], style: Style = PLAIN) -> Body:
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in head.tools]
        messages = [{"role": "system", "content": head.system}] if head.system else []
        tools = [{"type": "function", "function": function} for function in functions]
        return {"messages": messages + [self._message(item, style) for item in items], "tools": tools}

    def said(self, answer: Mapping[str, Any]) -> AssistantItem:
        message = answer["choices"][0]["message"]
        forms = message.get("tool_calls", ())
        calls = [ToolCall(c["id"], c["function"]["name"], msgspec.json.decode(c["function"]["arguments"])) for c in forms]
        return AssistantItem(message["content"] or "", message.get("reasoning"), tuple(calls))

    def streamed(self, data: bytes) -> Body:
        message: Body = {"role": "assistant", "content": ""}
        whole: Body = {"choices": [{"message": message}]}
        for event in events(data):
            whole["usage"] = event.get("usage")
            for choice in event["choices"]:
                self._grow(message, choice["delta"])
        return whole

    def argument_texts(self, answer: Mapping[str, Any]) -> dict[str, str]:
        return {call["id"]: call["function"]["arguments"] for call in answer["choices"][0]["message"].get("tool_calls", ())}

    def _grow(self, message: Body, delta: Body) -> None:
        for name in ("content", "reasoning"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")

    def _message(self, item: Item, style: Style) -> Body:
        match item:
            case UserItem(text):
                return {"role": "user", "content": text}
            case SystemItem(text):
                return {"role": "system", "content": text}
            case ToolResultItem(call_id, text):
                return {"role": "tool", "tool_call_id": call_id, "content": text}
            case AssistantItem(text, reasoning, calls):
                message: Body = {"role": "assistant", "content": [{"type": "text", "text": text}] if style.in_parts else text}
                if reasoning is not None:
                    message[style.reasoning_field] = reasoning
                written = style.arguments or _printed
                functions = [{"name": call.name, "arguments": written(call)} for call in calls]
                forms = [{"id": call.id, "type": "function", "function": f} for call, f in zip(calls, functions, strict=True)]
                return {**message, "tool_calls": forms} if forms else message


class MessagesForm:
    """Anthropic Messages."""

    path = "/v1/messages"

    def body(self, head: Head, items: Iterable[Item], style: Style = PLAIN) -> Body:
        tools = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in head.tools]
        messages: list[Body] = []
        for item in items:
            message = self._message(item, style)
            if (
                isinstance(item, ToolResultItem)
                and messages
                and messages[-1]["role"] == "user"
                and isinstance(messages[-1]["content"], list)
            ):
                messages[-1]["content"] += message["content"]
            else:
                messages.append(message)
        return {"max_tokens": 64, "system": head.system, "messages": messages, "tools": tools}

    def said(self, answer: Mapping[str, Any]) -> AssistantItem:
        blocks = answer["content"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = tuple(ToolCall(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
        return AssistantItem("".join(b["text"] for b in blocks if b["type"] == "text"), thoughts[0] if thoughts else None, calls)

    def streamed(self, data: bytes) -> Body:
        blocks: list[Body] = []
        fragments: dict[int, str] = {}
        whole: Body = {"content": blocks}
        for event in events(data):
            match event["type"]:
                case "content_block_start":
                    blocks.append(event["content_block"])
                case "content_block_delta":
                    self._grow(blocks[event["index"]], event["delta"], fragments, event["index"])
                case "message_delta":
                    whole["usage"] = event["usage"]
        for index, text in fragments.items():
            blocks[index]["input"] = msgspec.json.decode(text or "{}")
        return whole

    def argument_texts(self, answer: Mapping[str, Any]) -> dict[str, str]:
        uses = (block for block in answer["content"] if block["type"] == "tool_use")
        return {block["id"]: msgspec.json.encode(block["input"]).decode() for block in uses}

    def _grow(self, block: Body, delta: Body, fragments: dict[int, str], index: int) -> None:
        if delta["type"] == "input_json_delta":
            fragments[index] = fragments.get(index, "") + delta["partial_json"]
            return
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] += delta[name]

    def _message(self, item: Item, style: Style) -> Body:
        match item:
            case UserItem(text):
                return {"role": "user", "content": text}
            case SystemItem(text):
                return {"role": "system", "content": text}
            case ToolResultItem(call_id, text):
                return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": text}]}
            case AssistantItem(text, reasoning, calls):
                blocks: list[Body] = [{"type": "thinking", "thinking": reasoning, "signature": "s"}] if reasoning is not None else []
                blocks += [{"type": "text", "text": text}] if text else []
                for call in calls:
                    written = call.arguments if style.arguments is None else msgspec.Raw(style.arguments(call).encode())
                    blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": written})
                return {"role": "assistant", "content": blocks}


class ResponsesForm:
    """OpenAI Responses."""

    path = "/v1/responses"

    def body(self, head: Head, items: Iterable[Item], style: Style = PLAIN) -> Body:
        tools = [{"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters} for t in head.tools]
        written = [form for item in items for form in self._forms(item, style)]
        return {"instructions": head.system or None, "input": written, "tools": tools}

    def said(self, answer: Mapping[str, Any]) -> AssistantItem:
        texts: dict[str, str] = {item["type"]: item["content"][0]["text"] for item in answer["output"] if item["type"] != "function_call"}
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        read = (ToolCall(call["call_id"], call["name"], msgspec.json.decode(call["arguments"])) for call in calls)
        return AssistantItem(texts.get("message", ""), texts.get("reasoning"), tuple(read))

    def streamed(self, data: bytes) -> Body:
        whole: Body = {}
        for event in events(data):
            if event["type"] == "response.completed":
                whole = event["response"]
        return whole

    def argument_texts(self, answer: Mapping[str, Any]) -> dict[str, str]:
        return {item["call_id"]: item["arguments"] for item in answer["output"] if item["type"] == "function_call"}

    def _forms(self, item: Item, style: Style) -> Iterator[Body]:
        match item:
            case UserItem(text):
                yield {"role": "user", "content": text}
            case SystemItem(text):
                yield {"role": "developer", "content": [{"type": "input_text", "text": text}]}
            case ToolResultItem(call_id, text):
                yield {"type": "function_call_output", "call_id": call_id, "output": text}
            case AssistantItem(text, reasoning, calls):
                if reasoning is not None:
                    yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]}
                if text or not (calls or reasoning):
                    yield {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
                for call in calls:
                    arguments = json.dumps(call.arguments, indent=1) if style.arguments is None else style.arguments(call)
                    yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


def _printed(call: ToolCall) -> str:
    return json.dumps(call.arguments)


FORMS: tuple[Form, ...] = (ChatForm(), MessagesForm(), ResponsesForm())
