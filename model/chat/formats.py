"""The chat formats that this server speaks, and the choice of one by the control tokens that a vocabulary has."""

from __future__ import annotations

from collections.abc import Callable

from model.chat import ChatFormat
from model.chat.minimax_m3 import MiniMaxM3Format
from model.tokenizer import MissingControlToken, Tokenizer

CHAT_FORMATS: dict[str, Callable[[Tokenizer], ChatFormat]] = {
    "minimax_m3": MiniMaxM3Format,
}


class UnknownChatFormat(ValueError):
    """No known format fits the vocabulary; the message says what each one lacks."""


def detect_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The first format of the table whose control tokens the vocabulary has. Raises UnknownChatFormat."""
    lacking = []
    for name, build in CHAT_FORMATS.items():
        try:
            return build(tokenizer)
        except MissingControlToken as error:
            lacking.append(f"{name}: {error}")
    raise UnknownChatFormat(f"no known chat format fits this model; known formats and what they lack: {'; '.join(lacking)}")
