"""Which calls a turn may make, for models that write a call as one JSON object between two control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from model.conversation import Json, Tool


def structural_tag(
    tools: Sequence[Tool], call: tuple[int, int], reasoning: Sequence[Json], excluded: Sequence[int], *, required: bool, single: bool
) -> str:
    """The structural tag, as JSON text, of a turn: `reasoning`, then text where no call is required, then the calls.

    `call` are the ids around a call, `excluded` those that no text may hold.
    """
    one: Json = {"type": "or", "elements": [_call(tool, call) for tool in tools]}
    calls: Json = one if single else {"type": "plus", "content": one}
    behind: list[Json] = [calls]
    if not required:
        behind = [{"type": "any_tokens", "exclude_tokens": list(excluded)}, {"type": "optional", "content": calls}]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [*reasoning, *behind]}})


def reasoning_elements(think: tuple[int, int] | None, excluded: Sequence[int], *, begun: bool) -> list[Json]:
    """Reasoning ahead of what is said: it may be left out, but where the prompt has begun it."""
    if think is None:
        return []
    rest: list[Json] = [{"type": "any_tokens", "exclude_tokens": list(excluded)}, {"type": "token", "token": think[1]}]
    if begun:
        return rest
    whole: list[Json] = [{"type": "token", "token": think[0]}, *rest]
    return [{"type": "optional", "content": {"type": "sequence", "elements": whole}}]


def _call(tool: Tool, call: tuple[int, int]) -> Json:
    begin, end = call
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
        "required": ["name", "arguments"],
    }
    body: list[Json] = [
        {"type": "token", "token": begin},
        {"type": "const_string", "value": "\n"},
        {"type": "json_schema", "json_schema": schema},
        {"type": "const_string", "value": "\n"},
        {"type": "token", "token": end},
    ]
    return {"type": "sequence", "elements": body}
