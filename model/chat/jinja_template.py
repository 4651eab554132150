"""A model's chat template, run as transformers runs it (`utils/chat_template_utils.py`): the same sandbox, filters and functions.

One function differs: `strftime_now` refuses, as a prompt that says the date is another prompt tomorrow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.chat import Unrenderable
from model.conversation import Json
from model.vocabulary import read_json

Message: TypeAlias = "dict[str, Any]"

_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What expressions of a template raise beside jinja2's own errors."""


class TemplateRefused(Unrenderable):
    """The template cannot be compiled, or does not take these messages; the message is the template's own."""


class NoTemplate(ValueError):
    """The model folder holds no chat template."""


class ChatTemplate:
    """A compiled template. `variables` are set in every rendering: the tokenizer's `bos_token` and the like."""

    def __init__(self, source: str, variables: Mapping[str, Json] | None = None) -> None:
        """Raises TemplateRefused."""
        self._source = source
        self._variables = dict(variables or {})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template cannot be compiled: {error}") from error

    def given(self, variables: Mapping[str, Json]) -> ChatTemplate:
        """The same template with more variables."""
        return ChatTemplate(self._source, {**self._variables, **variables})

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generation: bool = True) -> str:
        """The prompt as text, with the generation prompt if `generation`. Raises TemplateRefused."""
        try:
            return self._template.render(
                messages=list(messages), tools=list(tools) or None, documents=None, add_generation_prompt=generation, **self._variables
            )
        except (jinja2.TemplateError, *_PYTHON_ERRORS) as error:
            raise TemplateRefused(str(error) or repr(error)) from error


def read_template(folder: Path) -> ChatTemplate:
    """The chat template of a model folder: chat_template.jinja, else tokenizer_config.json's, of several "tool_use" before "default".

    Raises NoTemplate, TemplateRefused, OSError.
    """
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    variables: dict[str, Json] = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _from_config(config.get("chat_template"))
    if source is None:
        raise NoTemplate(f"{str(folder)!r} holds neither chat_template.jinja nor a chat_template in tokenizer_config.json")
    return ChatTemplate(source, variables)


def _from_config(found: object) -> str | None:
    if isinstance(found, list):
        by_name = {part.get("name"): part.get("template") for part in found if isinstance(part, dict)}
        found = by_name.get("tool_use") or by_name.get("default")
    return found if isinstance(found, str) else None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model said, renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(_: str) -> NoReturn:
    raise jinja2.TemplateError("it puts the date of today into the prompt (strftime_now)")
