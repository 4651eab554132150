"""MiniMax-M3's chat format: rendering. Its output is parsed in `model.chat.minimax_m3_output`.

A prompt reads, with control tokens as the vocabulary spells them:

    ]~!b[]~b]system\\n{identity and thinking instructions}[e~[\\n
    ]~b]developer\\n{the client's system text, or a default}{tools}[e~[\\n
    ]~b]user\\n{text}[e~[\\n
    ]~b]ai\\n<mm:think>{reasoning}</mm:think>{text}]<]minimax[>[<tool_call>\\n … ]<]minimax[>[</tool_call>[e~[\\n
    ]~b]tool\\n<response>{result}</response>\\n<response>{result}</response>[e~[\\n
    ]~b]ai\\n

Sources of the rules. The published template was not at hand itself; independent public renderers of it agree on every rule below:
ms-swift (swift/template, agent_template: system and developer block, thinking modes, tool block, `<response>`, XML values), the
tinker-cookbook renderer of M3 (the same, and: reasoning is kept in all turns; `</mm:think>` opens a turn without reasoning; consecutive
tool results share one block; null arguments are left out; `[e~[\\n` after each block), llama.cpp's chat parser for M3 (generation prompts,
which markers are single tokens) and vLLM's parsers `minimax_m3` (tool markup, reasoning). The fixed words of the system block are part of
the format: the model was trained on them. One rule is ours, as no renderer shows one: a later system message is a developer block in its
place.

Two consecutive tool results share a block, so text of the second follows text of the first: their pieces are encoded together, and then
the ids are those of the template's text. Every other boundary between items is a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from model.chat import OutputParser, Piece
from model.chat.call_rules import CallRules, literal
from model.chat.minimax_m3_output import Markers, MiniMaxM3Parser, random_call_id
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem
from model.tokenizer import Tokenizer

ThinkingMode: TypeAlias = Literal["adaptive", "enabled", "disabled"]

BEGIN, BLOCK, END = "]~!b[", "]~b]", "[e~["
THINK, THINK_END = "<mm:think>", "</mm:think>"
NAMESPACE = "]<]minimax[>["
CALLS, CALLS_END = "<tool_call>", "</tool_call>"

IDENTITY = (
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. "
    "Founded in early 2022, MiniMax is a global AI foundation model company committed to advancing the frontiers of AI towards AGI."
)
THINKING_INSTRUCTIONS = (
    "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by step before responding. "
    "When thinking is enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. "
    "When thinking is disabled, begin your response directly after the </mm:think> prefix. "
    "When thinking is adaptive, decide on your own whether to think for the current turn.\n"
    "Current thinking mode: {mode}\n</thinking_instructions>"
)
THINKING_MODES: dict[ThinkingMode, str] = {
    "adaptive": (
        "adaptive. You are encouraged to think for complex decision-making, multi-step reasoning, or when analyzing function/tool results."
    ),
    "enabled": "enabled. You MUST think step by step before every response, including after receiving function/tool results.",
    "disabled": "disabled. Do not output any thinking process.",
}
DEFAULT_DEVELOPER = "You are a helpful assistant."
TOOLS_BEFORE = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
)
TOOLS_AFTER = (
    "</tools>\n\nTo call tools, wrap all invocations in a single {ns}<tool_call>{ns}</tool_call> block. "
    "Parameter values containing nested objects or arrays are recursively expanded into XML elements. Example:\n\n{ns}<tool_call>\n"
    '{ns}<invoke name="tool-name-1">{ns}<param-1>value-1{ns}</param-1>{ns}<param-2>{ns}<item>{ns}<key-a>val-a{ns}</key-a>'
    "{ns}<key-b>val-b{ns}</key-b>{ns}</item>{ns}</param-2>{ns}</invoke>\n"
    '{ns}<invoke name="tool-name-2">{ns}<param-1>value-1{ns}</param-1>{ns}</invoke>\n{ns}</tool_call>'
).replace("{ns}", NAMESPACE)

_MARKER = re.compile("(" + "|".join(re.escape(m) for m in (BEGIN, BLOCK, END, THINK, THINK_END, NAMESPACE, CALLS, CALLS_END)) + ")")


def thinking_instructions(mode: ThinkingMode) -> str:
    """The instructions of the system block for a thinking mode."""
    return THINKING_INSTRUCTIONS.replace("{mode}", THINKING_MODES[mode])


def function_json(tool: Tool) -> str:
    """The tool as the template's `tojson` writes it: Python's separators, keys in the client's order, non-ASCII characters as they are."""
    function: dict[str, Json] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return json.dumps(function, ensure_ascii=False)


class MiniMaxM3Format:
    """The format over one vocabulary. Raises MissingControlToken if that lacks a control token of M3."""

    name = "minimax_m3"

    def __init__(
        self, tokenizer: Tokenizer, *, thinking: ThinkingMode = "adaptive", new_call_id: Callable[[], str] = random_call_id
    ) -> None:
        """`thinking` is the template's `thinking_mode`; `new_call_id` names the calls that are parsed."""
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._new_call_id = new_call_id
        self._block, self._end = tokenizer.control_id(BLOCK), tokenizer.control_id(END)
        self._think, self._think_end = tokenizer.control_id(THINK), tokenizer.control_id(THINK_END)
        self._namespace = tokenizer.control_id(NAMESPACE)
        self._begin = tokenizer.control_id(BEGIN)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((self._end, *tokenizer.eos_ids)))
        self.call_ids: tuple[int, ...] = (self._namespace,)
        words = self._own(IDENTITY + thinking_instructions(thinking))
        self._system = [self._begin, self._block, "system\n", *words, self._end, "\n", self._block, "developer\n"]
        self._tools_after = self._own(TOOLS_AFTER)
        self._calls, self._calls_end = self._own(CALLS + "\n"), self._own(CALLS_END)
        self._markers = Markers(self._think, self._think_end, self._namespace, self._hidden_ids())

    def head(self, head: Head) -> list[Piece]:
        pieces = [*self._system, head.system or DEFAULT_DEVELOPER]
        if head.tools:
            pieces.append(TOOLS_BEFORE)
            pieces.extend(f"<tool>{function_json(tool)}</tool>\n" for tool in head.tools)
            pieces.extend(self._tools_after)
        return pieces

    def item(self, item: Item, previous: Item | None) -> list[Piece]:
        match item:
            case UserItem(text):
                return [*self._close(previous), self._block, "user\n", text]
            case SystemItem(text):
                return [*self._close(previous), self._block, "developer\n", text]
            case ToolResultItem(_, text):
                if isinstance(previous, ToolResultItem):
                    return ["\n<response>", text, "</response>"]
                return [*self._close(previous), self._block, "tool\n<response>", text, "</response>"]
            case AssistantItem():
                return [*self._close(previous), self._block, "ai\n", *self._assistant(item), self._end]

    def open_turn(self, previous: Item | None) -> list[Piece]:
        prefix: dict[ThinkingMode, list[Piece]] = {"adaptive": [], "enabled": [self._think], "disabled": [self._think_end]}
        return [*self._close(previous), self._block, "ai\n", *prefix[self._thinking]]

    def close_turn(self, last_id: int | None) -> list[Piece]:
        return [] if last_id == self._end else [self._end]

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return MiniMaxM3Parser(
            self._tokenizer.token_bytes, self._markers, tools, self._new_call_id, starts_in_reasoning=self._thinking == "enabled"
        )

    def call_constraint(self, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Json] | None:
        rules = CallRules(self._namespace, {*self._tokenizer.control.values(), *self.stop_ids})
        mark = f"Token({self._namespace})"
        begins, ends = literal('<invoke name="'), literal("</invoke>\n")
        calls = " | ".join(
            rules.name(f"{mark} {begins} {literal(tool.name + chr(34) + '>')} {rules.arguments(tool)} {mark} {ends}") for tool in tools
        )
        block = f"{mark} {_terminals(self._calls)} ({calls}){'' if single else '+'} {mark} {_terminals(self._calls_end)}"
        thought = f"text Token({self._think_end})"
        before: dict[ThinkingMode, str] = {
            "adaptive": f"(Token({self._think}) {thought} | Token({self._think_end}))?",
            "enabled": thought,
            "disabled": "",
        }
        return {"grammar": rules.text(f"{before[self._thinking]} {block if required else f'text ({block})?'}")}

    def _close(self, previous: Item | None) -> list[Piece]:
        """What ends the block before. A turn of the model ended itself, or `close_turn` did: only the line break is left."""
        match previous:
            case AssistantItem():
                return ["\n"]
            case _:
                return [self._end, "\n"]

    def _assistant(self, item: AssistantItem) -> list[Piece]:
        pieces: list[Piece] = [self._think, item.reasoning, self._think_end] if item.reasoning else [self._think_end]
        pieces.append(item.text)
        if item.calls:
            pieces += [self._namespace, *self._calls]
            for call in item.calls:
                pieces += self._call(call)
            pieces += [self._namespace, *self._calls_end]
        return pieces

    def _call(self, call: ToolCall) -> list[Piece]:
        body = [call.arguments] if isinstance(call.arguments, str) else self._value(call.arguments)
        return [self._namespace, f'<invoke name="{call.name}">', *body, self._namespace, "</invoke>\n"]

    def _value(self, value: Json) -> list[Piece]:
        match value:
            case None:
                return []
            case bool():
                return ["true" if value else "false"]
            case dict():
                return [piece for name, child in value.items() if child is not None for piece in self._element(name, child)]
            case list():
                return [piece for child in value for piece in self._element("item", child)]
            case _:
                return [str(value)]

    def _element(self, name: str, value: Json) -> list[Piece]:
        return [self._namespace, f"<{name}>", *self._value(value), self._namespace, f"</{name}>"]

    def _own(self, words: str) -> list[Piece]:
        """The format's own words, with the markers in them as control tokens (where the vocabulary has them as such)."""
        control = self._tokenizer.control
        return [control.get(part, part) for part in _MARKER.split(words) if part]

    def _hidden_ids(self) -> frozenset[int]:
        shown = {self._think, self._think_end, self._namespace, *(p for p in (*self._calls, *self._calls_end) if isinstance(p, int))}
        return (self._tokenizer.special_ids | {self._begin, self._block, *self.stop_ids}) - shown


def _terminals(pieces: Sequence[Piece]) -> str:
    return " ".join(literal(piece) if isinstance(piece, str) else f"Token({piece})" for piece in pieces)
