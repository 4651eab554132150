"""Tools that mean the same, brought to one form. The order of list values (`required`, `enum`) has a meaning and stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from agentserve.canonical.rules import Applied
from model.conversation import Head, Json, Tool

_FIRST = ("$schema", "$ref", "type", "title", "description", "properties", "required")
"""Keys of a schema in the order in which people write them; the others follow by name."""
_RANK = {name: rank for rank, name in enumerate(_FIRST)}
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
)
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAX_DEPTH = 64
"""What is nested deeper keeps its order."""


def order_schema_keys(head: Head) -> Applied:
    """Write each schema's keys in one order: known keys as people write them, required properties first, other names sorted."""
    return _each_tool(head, lambda tool: replace(tool, parameters=_schema(tool.parameters, 0)) if tool.parameters else tool)


def drop_cache_control(head: Head) -> Applied:
    """Leave out cache marks that stand in a tool's schema; the dialects ignore those beside it."""
    return _each_tool(head, _without_mark)


def order_tools(head: Head) -> Applied:
    """Sort tools by name. Used to compare heads: what is rendered is the order that came first."""
    tools = tuple(sorted(head.tools, key=lambda tool: (tool.name, tool.description, json.dumps(tool.parameters))))
    count = sum(one.name != other.name for one, other in zip(tools, head.tools, strict=True))
    return Applied(replace(head, tools=tools), count)


def num_displaced(tools: Iterable[Tool], pinned: Iterable[Tool]) -> int:
    """How many tools stand in another place than in `pinned`."""
    return sum(one.name != other.name for one, other in zip(tools, pinned, strict=False))


def _each_tool(head: Head, change: Callable[[Tool], Tool]) -> Applied:
    tools, count, num_characters = [], 0, 0
    for tool in head.tools:
        changed = change(tool)
        # Equal dicts may differ in the order of their keys, which is what counts here.
        before, after = json.dumps(tool.parameters), json.dumps(changed.parameters)
        if before != after:
            count, num_characters = count + 1, num_characters + len(before)
        tools.append(changed)
    return Applied(replace(head, tools=tuple(tools)), count, num_characters) if count else Applied(head)


def _without_mark(tool: Tool) -> Tool:
    if not tool.parameters or not isinstance(tool.parameters.get("cache_control"), dict | None) or "cache_control" not in tool.parameters:
        return tool
    return replace(tool, parameters={name: value for name, value in tool.parameters.items() if name != "cache_control"})


def _schema(schema: Mapping[str, Json], depth: int) -> dict[str, Json]:
    if depth >= _MAX_DEPTH:
        return dict(schema)
    names = sorted(schema, key=lambda name: (_RANK.get(name, len(_RANK)), name))
    return {name: _value(name, schema[name], schema, depth + 1) for name in names}


def _value(name: str, value: Json, schema: Mapping[str, Json], depth: int) -> Json:
    if name in _NAMED_SCHEMAS and isinstance(value, dict):
        order = _required_first(value, schema.get("required") if name == "properties" else None)
        return {key: _maybe_schema(value[key], depth) for key in order}
    if name in _SCHEMA:
        return _maybe_schema(value, depth)
    if name in _SCHEMA_LISTS and isinstance(value, list):
        return [_maybe_schema(part, depth) for part in value]
    return _data(value, depth)


def _maybe_schema(value: Json, depth: int) -> Json:
    return _schema(value, depth) if isinstance(value, dict) else _data(value, depth)


def _required_first(properties: Mapping[str, Json], required: Json) -> list[str]:
    listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    rank = {name: place for place, name in reversed(list(enumerate(listed)))}
    return sorted(properties, key=lambda name: (rank.get(name, len(listed)), name))


def _data(value: Json, depth: int) -> Json:
    """A value that is no schema (default, const, enum): keys sorted, lists as they are."""
    if depth >= _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {name: _data(value[name], depth + 1) for name in sorted(value)}
    return [_data(part, depth + 1) for part in value] if isinstance(value, list) else value
