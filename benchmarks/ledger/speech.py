"""What the agents and models of generated sessions say."""

from __future__ import annotations

import random

from benchmarks.history import code
from model.conversation import AssistantItem, Head, Item, Json, Tool, ToolCall, ToolResultItem, UserItem

_STRING: Json = {"type": "string", "description": "as it stands"}
_CHANGE: Json = {"type": "object", "properties": {"line": {"type": "integer"}, "text": _STRING}}
_WORDS = ("cart", "Größe", "合計", "naïve", "🙂 ok", "tab\there", 'quote "x"', "a<b>c</b>", "line\nbreak", "C:\\path", "total")


def _tool(name: str, **properties: Json) -> Tool:
    required: list[Json] = [next(iter(properties))]
    schema: dict[str, Json] = {"type": "object", "properties": properties, "required": required}
    return Tool(name, f"Does {name.replace('_', ' ')}.", schema)


TOOLS = (
    _tool("read_file", path=_STRING, offset={"type": "integer"}, whole={"type": "boolean"}),
    _tool("search", pattern=_STRING, paths={"type": "array", "items": _STRING}),
    _tool("edit_file", path=_STRING, changes={"type": "array", "items": _CHANGE}),
    _tool("run_command", command=_STRING, timeout={"type": "number"}, env={"type": "object", "additionalProperties": _STRING}),
)


def head(product: int, num_bytes: int) -> Head:
    """The head of an agent product: rules of about `num_bytes`, and tools."""
    rng = random.Random(f"product {product}")
    return Head(f"You are the coding agent number {product} of a shop.\n" + code(rng, num_bytes), TOOLS)


def question(rng: random.Random, num_bytes: int) -> UserItem:
    """What a user says."""
    return UserItem(f"Task {rng.getrandbits(48):x}: {rng.choice(_WORDS)}\n" + code(rng, rng.randrange(num_bytes // 4, num_bytes)))


def following(answer: AssistantItem, rng: random.Random, num_bytes: int) -> list[Item]:
    """What comes after `answer`: the results of its calls, in any order, or the user's next words."""
    if not answer.calls:
        return [question(rng, num_bytes)]
    size = num_bytes // len(answer.calls)
    results: list[Item] = [
        ToolResultItem(call.id, f"{rng.choice(_WORDS)}\n{code(rng, rng.randrange(size // 4, size))}") for call in answer.calls
    ]
    rng.shuffle(results)
    return results


def answer(rng: random.Random, num_bytes: int) -> AssistantItem:
    """What the model says: reasoning (mostly), text, no call to three calls."""
    reasoning = f"{rng.choice(_WORDS)}: {code(rng, rng.randrange(num_bytes // 2))}." if rng.random() < 0.8 else None
    calls = tuple(_call(rng) for _ in range(rng.choice((0, 1, 1, 1, 2, 3))))
    text = f"{rng.choice(_WORDS)} {rng.getrandbits(48):x}. {code(rng, rng.randrange(num_bytes // 4))}!"
    return AssistantItem(text, reasoning, calls)


def _call(rng: random.Random) -> ToolCall:
    path = f"src/{rng.choice(_WORDS)}/{rng.getrandbits(20):x}.py"
    arguments: dict[str, dict[str, Json]] = {
        "read_file": {"path": path, "offset": rng.randrange(10_000), "whole": rng.random() < 0.5},
        "search": {"pattern": rng.choice(_WORDS), "paths": [path, rng.choice(_WORDS)]},
        "edit_file": {"path": path, "changes": [{"line": rng.randrange(99), "text": rng.choice(_WORDS)} for _ in range(2)]},
        "run_command": {"command": rng.choice(_WORDS), "timeout": rng.choice((0.5, 30.0, 1e21, 2.25)), "env": {"A": "1", "B": path}},
    }
    name = rng.choice(list(arguments))
    return ToolCall("", name, arguments[name])
