"""A conversation as the clients of each dialect send it, and their reading of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from agentserve.conversation import Conversation
from agentserve.dialects import anthropic, openai_chat, responses
from agentserve.errors import InvalidRequest
from model.conversation import AssistantItem, Head, Item, SystemItem, ToolCall, ToolResultItem, UserItem

Body: TypeAlias = dict[str, Any]


def unkept(item_id: str) -> bytes:
    raise InvalidRequest(f"nothing is kept, so not {item_id!r}", param="input")


class ChatForm:
    """A conversation as a chat client sends it."""

    path = "/v1/chat/completions"

    def body(self, head: Head, items: list[Item]) -> Body:
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in head.tools]
        messages = [{"role": "system", "content": head.system}] if head.system else []
        tools = [{"type": "function", "function": function} for function in functions]
        return {"messages": messages + [self._message(item) for item in items], "tools": tools}

    def conversation(self, body: bytes) -> Conversation:
        request = openai_chat.parse(body)
        openai_chat.options(request)
        return openai_chat.ChatConversation(request)

    def said(self, answer: Body) -> AssistantItem:
        message = answer["choices"][0]["message"]
        forms = message.get("tool_calls", ())
        calls = [ToolCall(c["id"], c["function"]["name"], msgspec.json.decode(c["function"]["arguments"])) for c in forms]
        return AssistantItem(message["content"] or "", message.get("reasoning"), tuple(calls))

    def _message(self, item: Item) -> Body:
        match item:
            case UserItem(text):
                return {"role": "user", "content": text}
            case SystemItem(text):
                return {"role": "system", "content": text}
            case ToolResultItem(call_id, text):
                return {"role": "tool", "tool_call_id": call_id, "content": text}
            case AssistantItem(text, reasoning, calls):
                message: Body = {"role": "assistant", "content": text}
                if reasoning is not None:
                    message["reasoning"] = reasoning
                functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
                forms = [{"id": call.id, "type": "function", "function": f} for call, f in zip(calls, functions, strict=True)]
                return {**message, "tool_calls": forms} if forms else message


class MessagesForm:
    """A conversation as Anthropic's clients send it."""

    path = "/v1/messages"

    def body(self, head: Head, items: list[Item]) -> Body:
        tools = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in head.tools]
        messages: list[Body] = []
        for item in items:
            message = self._message(item)
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

    def conversation(self, body: bytes) -> Conversation:
        request = anthropic.parse(body)
        anthropic.options(request)
        return anthropic.MessagesConversation(request)

    def said(self, answer: Body) -> AssistantItem:
        blocks = answer["content"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        calls = tuple(ToolCall(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
        return AssistantItem("".join(b["text"] for b in blocks if b["type"] == "text"), thoughts[0] if thoughts else None, calls)

    def _message(self, item: Item) -> Body:
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
                blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in calls]
                return {"role": "assistant", "content": blocks}


class ResponsesForm:
    """A conversation as Responses' clients send it."""

    path = "/v1/responses"

    def body(self, head: Head, items: list[Item]) -> Body:
        tools = [{"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters} for t in head.tools]
        return {"instructions": head.system or None, "input": [form for item in items for form in self._forms(item)], "tools": tools}

    def conversation(self, body: bytes) -> Conversation:
        request = responses.parse(body)
        responses.options(request)
        return responses.ResponsesConversation(request, (), responses.input_items(request, unkept))

    def said(self, answer: Body) -> AssistantItem:
        texts: dict[str, str] = {item["type"]: item["content"][0]["text"] for item in answer["output"] if item["type"] != "function_call"}
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        read = (ToolCall(call["call_id"], call["name"], msgspec.json.decode(call["arguments"])) for call in calls)
        return AssistantItem(texts.get("message", ""), texts.get("reasoning"), tuple(read))

    def _forms(self, item: Item) -> Iterator[Body]:
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
                    arguments = json.dumps(call.arguments, indent=1)
                    yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


Form: TypeAlias = ChatForm | MessagesForm | ResponsesForm
FORMS: tuple[Form, ...] = (ChatForm(), MessagesForm(), ResponsesForm())
