"""Proves, when it is loaded, that a Jinja template's prompts grow at their end only, and loads the format of a model folder.

For each conversation of a corpus and each prompt on its way:
- the pieces of head, items and opening, encoded step by step as the ledger does it, give the ids of the template's own whole prompt
  (and where the folder has a tokenizer.json, the ids that the tokenizers library gives for the template's text);
- so the prompt of a longer history starts with the stem of a shorter one;
- a turn of the model starts with the opening of the prompt that it answers, so it continues what was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import tokenizers

from model.chat import Piece
from model.chat.jinja import JinjaFormat, UnstableTemplate
from model.chat.jinja_template import TemplateRefused, read_template
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem
from model.tokenizer import Tokenizer

KEEP_REASONING: tuple[Mapping[str, Json], ...] = ({}, {"preserve_thinking": True}, {"clear_thinking": False})
"""Variables under which published templates keep the reasoning of earlier turns (Qwen3.6, GLM-4.7), tried in order."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation. `common`: a template that refuses its order is refused; else only what it renders is compared."""

    name: str
    head: Head
    items: tuple[Item, ...]
    common: bool = True


_TOOLS = (
    Tool("read_file", "Read a file: <path> “é”.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}),
    Tool("run", "", {"type": "object", "properties": {"command": {"type": "string"}, "seconds": {"type": "number"}}}),
)
_SYSTEM = Head("You are a coding agent.")
_READ = ToolCall("call_0000000000000000000000a1", "read_file", {"path": "src/é.py"})
_RUN = ToolCall("call_0000000000000000000000b2", "run", {"command": "ls -l\n", "seconds": 1.5, "deep": {"list": [1, None, True]}})
_ODD = "\n\n  漢字 e\u0301 🎉 {{ x }} {% y %} <b>&amp;</b> \\n \t\n\n"


def _rounds(reasoning: str | None, text: str, *calls: ToolCall) -> tuple[Item, ...]:
    """Three user messages; each of the first two is answered, by way of `calls` if there are some."""
    answered: list[Item] = []
    for some in (calls, calls[:1]) if calls else ():
        answered += [AssistantItem(text, reasoning, some), *(ToolResultItem(call.id, f"{call.name} done\n") for call in some)]
    answered.append(AssistantItem(text or "Done.", reasoning))
    return (UserItem("Do it."), *answered, UserItem("And now?"), *answered, UserItem("Thanks."))


PROBES: tuple[Probe, ...] = (
    Probe("plain", _SYSTEM, _rounds(None, "Yes.")),
    Probe("no system text", Head(), _rounds(None, "Yes.")),
    Probe("tools", Head(_SYSTEM.system, _TOOLS), _rounds(None, "", _READ)),
    Probe("tools without system text", Head("", _TOOLS), _rounds(None, "Let me look.", _READ)),
    Probe("two calls", Head(_SYSTEM.system, _TOOLS), _rounds(None, "", _RUN, _READ), common=False),
    Probe("reasoning", _SYSTEM, _rounds("Think.", "Yes.")),
    Probe("reasoning and calls", Head("", _TOOLS), _rounds("Think.", "Yes.", _READ)),
    Probe("odd texts", Head(_ODD), (UserItem(_ODD), AssistantItem(_ODD, None, (_READ,)), ToolResultItem(_READ.id, _ODD))),
    Probe("empty texts", Head(), (UserItem(""), AssistantItem("", None, (_READ,)), ToolResultItem(_READ.id, ""), AssistantItem("x"))),
    Probe("later system text", _SYSTEM, (UserItem("a"), AssistantItem("b"), SystemItem("c"), UserItem("d")), common=False),
    Probe("two users", _SYSTEM, (UserItem("a"), UserItem("b"), SystemItem("c"), UserItem("d")), common=False),
)
_EACH_KIND: tuple[Item, ...] = (
    UserItem("a"),
    SystemItem("b"),
    AssistantItem("c"),
    AssistantItem("", None, (_READ,)),
    ToolResultItem(_READ.id, "d"),
)


def load_jinja_format(tokenizer: Tokenizer, folder: Path) -> JinjaFormat:
    """The proved format of a model folder. Raises NoTemplate, TemplateRefused, UnstableTemplate, OSError."""
    template = read_template(folder)
    file = folder / "tokenizer.json"
    library = _library(file) if file.is_file() else None
    refused: UnstableTemplate | None = None
    for variables in KEEP_REASONING:
        try:
            chat = JinjaFormat(tokenizer, template.given(variables))
            prove(chat, tokenizer, library)
        except UnstableTemplate as error:
            refused = refused or error
        else:
            return chat
    assert refused is not None
    raise refused


def _library(file: Path) -> Callable[[str], list[int]]:
    reference = tokenizers.Tokenizer.from_file(str(file))

    def encode(text: str) -> list[int]:
        ids: list[int] = reference.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def prove(chat: JinjaFormat, tokenizer: Tokenizer, library: Callable[[str], list[int]] | None = None) -> None:
    """Raises UnstableTemplate at the first probe that shows a difference. `library` encodes a template's text, added tokens included."""
    for probe in PROBES:
        _prove(probe, chat, tokenizer, library)
    for one, other in product((None, *_EACH_KIND), _EACH_KIND):
        try:
            chat.item(other, one)
        except TemplateRefused as error:
            raise UnstableTemplate(f"{type(other).__name__} behind {type(one).__name__}", str(error)) from error
    if not any(_continues(chat, reasoning) for reasoning in ("Think.", None)):
        raise UnstableTemplate("generation prompt", "a turn in the history starts with something else than the generation prompt")


def _prove(probe: Probe, chat: JinjaFormat, tokenizer: Tokenizer, library: Callable[[str], list[int]] | None) -> None:
    for count in range(1, len(probe.items) + 1):
        items = probe.items[:count]
        try:
            pieces, text = chat.rendering(probe.head, items)
            ours = incremental_ids(chat, tokenizer, probe.head, items)
        except TemplateRefused as error:
            if probe.common:
                raise UnstableTemplate(probe.name, str(error)) from error
            continue
        if ours != tokenizer.encode_pieces(pieces):
            raise UnstableTemplate(probe.name, _difference(tokenizer, ours, tokenizer.encode_pieces(pieces), count))
        if library is not None and (theirs := library(text)) != ours:
            raise UnstableTemplate(probe.name, "the tokenizers library: " + _difference(tokenizer, ours, theirs, count))


def incremental_ids(chat: JinjaFormat, tokenizer: Tokenizer, head: Head, items: Sequence[Item]) -> list[int]:
    """The prompt of a conversation as the ledger makes it: head, steps and opening, each encoded apart."""
    parts = [chat.head(head), *steps(chat, items), chat.open_turn(items[-1] if items else None)]
    return [id for pieces in parts for id in tokenizer.encode_pieces(pieces)]


def steps(chat: JinjaFormat, items: Sequence[Item], previous: Item | None = None) -> Iterator[list[Piece]]:
    """The pieces of each step behind `previous`: tool results that stand together are one."""
    step: list[Piece] = []
    for item in items:
        if step and not (isinstance(item, ToolResultItem) and isinstance(previous, ToolResultItem)):
            yield step
            step = []
        step += chat.item(item, previous)
        previous = item
    yield step


def _continues(chat: JinjaFormat, reasoning: str | None) -> bool:
    opened = chat.open_turn(UserItem(""))
    said = chat.item(AssistantItem("Yes.", reasoning), UserItem(""))
    *whole, last = opened or [""]
    return said[: len(whole)] == whole and (said[len(whole)] == last or str(said[len(whole)]).startswith(str(last)))


def _difference(tokenizer: Tokenizer, ours: Sequence[int], theirs: Sequence[int], count: int) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    parts = (theirs[max(0, at - 8) : at], ours[at : at + 8], theirs[at : at + 8])
    context, left, right = (tokenizer.decode_bytes(ids).decode("utf-8", "replace") for ids in parts)
    return f"with {count} messages, after {context!r} it has {right!r} where messages that were rendered one by one have {left!r}"
