"""The chat formats that this server speaks, and the choice of one: by the control tokens of a vocabulary, else by the model's template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.chat import ChatFormat
from model.chat.jinja_proof import load_jinja_format
from model.chat.jinja_template import NoTemplate
from model.chat.minimax_m3 import MiniMaxM3Format
from model.chat.passthrough import PassThrough
from model.tokenizer import MissingControlToken, Tokenizer

CHAT_FORMATS: dict[str, Callable[[Tokenizer], ChatFormat]] = {
    "minimax_m3": MiniMaxM3Format,
}
"""Formats that are written out here. They go first: they know their model's tool calls."""

FOLDER_FORMATS: dict[str, Callable[[Tokenizer, Path], ChatFormat]] = {
    "jinja": load_jinja_format,
}
"""Formats that are read from the model folder."""


class UnknownChatFormat(ValueError):
    """No known format fits the vocabulary, or none has the name; the message says what each one lacks."""


def detect_chat_format(tokenizer: Tokenizer, folder: Path | None = None) -> ChatFormat:
    """The first format of the tables that fits the vocabulary, or the model folder where it is given.

    Raises UnknownChatFormat, and UnstableTemplate or TemplateRefused for a template that cannot be served.
    """
    lacking = []
    for name, build in CHAT_FORMATS.items():
        try:
            return build(tokenizer)
        except MissingControlToken as error:
            lacking.append(f"{name}: {error}")
    if folder is not None:
        for name, load in FOLDER_FORMATS.items():
            try:
                return load(tokenizer, folder)
            except NoTemplate as error:
                lacking.append(f"{name}: {error}")
    raise UnknownChatFormat(f"no known chat format fits this model; known formats and what they lack: {'; '.join(lacking)}")


def chat_format(name: str, tokenizer: Tokenizer, folder: Path) -> ChatFormat:
    """The format of this name, "auto" for the one that fits. Raises as `detect_chat_format` does, and for a name that is not known."""
    if name == PassThrough.name:
        return PassThrough()
    if name == "auto":
        return detect_chat_format(tokenizer, folder)
    if name in CHAT_FORMATS:
        return CHAT_FORMATS[name](tokenizer)
    if name in FOLDER_FORMATS:
        return FOLDER_FORMATS[name](tokenizer, folder)
    raise UnknownChatFormat(_unknown(name))


def check_name(name: str) -> None:
    """Raises UnknownChatFormat where no format has this name."""
    if name not in _names():
        raise UnknownChatFormat(_unknown(name))


def _names() -> tuple[str, ...]:
    return ("auto", *CHAT_FORMATS, *FOLDER_FORMATS, PassThrough.name)


def _unknown(name: str) -> str:
    return f"unknown chat format {name!r}; known: {', '.join(_names())}"
