"""A conversation as the clients of each dialect send it, and as the server reads it."""

from __future__ import annotations

from typing import TypeAlias

from agentserve.conversation import Conversation
from agentserve.dialects import anthropic, openai_chat, responses
from agentserve.errors import InvalidRequest
from benchmarks.ledger import forms
from benchmarks.ledger.forms import Body

__all__ = ["FORMS", "Body", "ChatForm", "Form", "MessagesForm", "ResponsesForm"]


def unkept(item_id: str) -> bytes:
    raise InvalidRequest(f"nothing is kept, so not {item_id!r}", param="input")


class ChatForm(forms.ChatForm):
    """As a chat client sends it."""

    def conversation(self, body: bytes) -> Conversation:
        request = openai_chat.parse(body)
        openai_chat.options(request)
        return openai_chat.ChatConversation(request)


class MessagesForm(forms.MessagesForm):
    """As Anthropic's clients send it."""

    def conversation(self, body: bytes) -> Conversation:
        request = anthropic.parse(body)
        anthropic.options(request)
        return anthropic.MessagesConversation(request)


class ResponsesForm(forms.ResponsesForm):
    """As Responses' clients send it."""

    def conversation(self, body: bytes) -> Conversation:
        request = responses.parse(body)
        responses.options(request)
        return responses.ResponsesConversation(request, (), responses.input_items(request, unkept))


Form: TypeAlias = ChatForm | MessagesForm | ResponsesForm
FORMS: tuple[Form, ...] = (ChatForm(), MessagesForm(), ResponsesForm())
