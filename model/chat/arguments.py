"""Tool arguments from markup: text and elements become JSON values by the tool's JSON schema.

The order in which a text is tried against the types that its schema allows is vLLM's (null, integer, number, boolean, object, array,
string), so that the same output gives the same call behind either server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from model.conversation import Json

Element: TypeAlias = "str | list[tuple[str, Element]]"
"""The content of an element: its text, or its children by name in order."""

MAX_DEPTH = 64
"""Values inside values, the argument included; what is deeper stays text."""
MIXED_TEXT = "$text"
"""The field for text that stands between child elements, as in vLLM."""

_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,1000}\s*")  # Python refuses to parse integers beyond 4,300 digits
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
_UNPARSED = object()


def schema_types(schema: Json) -> frozenset[str]:
    """The JSON types that `schema` allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    types = {name for name in _as_list(schema.get("type")) if isinstance(name, str)}
    types |= {_type_of(value) for value in _as_list(schema.get("enum"))}
    for field in ("anyOf", "oneOf", "allOf"):
        types = types.union(*map(schema_types, _as_list(schema.get(field))))
    if not types:
        types |= {"array"} if "items" in schema else set()
        types |= {"object"} if "properties" in schema or "additionalProperties" in schema else set()
    return frozenset(types)


def is_plain_string(schema: Json) -> bool:
    """Whether a value of `schema` can only be a string, so that its text can be shown while it grows."""
    return schema_types(schema) == {"string"}


def property_schema(schema: Json, name: str) -> Json:
    """The schema of property `name` in an object schema; None where it does not say."""
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    additional = schema.get("additionalProperties")
    return additional if isinstance(additional, dict) else None


def convert(value: Element, schema: Json) -> Json:
    """The JSON value of an element's content. What fits no allowed type stays a string; without a schema all text does."""
    types = schema_types(schema)
    if isinstance(value, str):
        return _convert_text(value, types)
    names = {name for name, _ in value}
    array = _alternative(schema, "array")
    if array is not None or ("object" not in types and names == {"item"}):
        items = array.get("items") if array is not None else None
        return [convert(child, items) for _, child in value]
    return _convert_object(value, _alternative(schema, "object"))


def _convert_object(children: Iterable[tuple[str, Element]], schema: Json) -> dict[str, Json]:
    """Children as an object; a name that comes again makes a list of its values."""
    values: dict[str, list[Json]] = {}
    for name, child in children:
        values.setdefault(name, []).append(convert(child, property_schema(schema, name)))
    return {name: found[0] if len(found) == 1 else found for name, found in values.items()}


def _convert_text(text: str, types: frozenset[str]) -> Json:
    if not text.strip() and "string" not in types and types & {"array", "object"}:
        return [] if "array" in types else {}
    for name, parse in _PARSERS.items():
        if name in types:
            value = parse(text)
            if value is not _UNPARSED:
                return value  # type: ignore[return-value]  # the sentinel is excluded above
    return text


def _parse_integer(text: str) -> object:
    return int(text) if _INTEGER.fullmatch(text) else _UNPARSED


def _parse_number(text: str) -> object:
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else _UNPARSED


def _parse_boolean(text: str) -> object:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), _UNPARSED)


def _parse_json(text: str) -> object:
    try:
        value = msgspec.json.decode(text.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return _UNPARSED
    return value if isinstance(value, dict | list) and is_shallow(value) else _UNPARSED


def is_shallow(value: Json) -> bool:
    """Whether `value` has at most MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())]
        if not level:
            return True
    return False


_PARSERS: dict[str, Callable[[str], object]] = {
    "null": lambda text: None if text.strip().lower() == "null" else _UNPARSED,
    "integer": _parse_integer,
    "number": _parse_number,
    "boolean": _parse_boolean,
    "object": _parse_json,
    "array": _parse_json,
    "string": lambda text: text,
}


def _alternative(schema: Json, kind: str) -> dict[str, Json] | None:
    """The first part of `schema` (itself, or one of its alternatives) that allows `kind`."""
    if not isinstance(schema, dict) or kind not in schema_types(schema):
        return None
    for field in ("anyOf", "oneOf", "allOf"):
        for choice in _as_list(schema.get(field)):
            found = _alternative(choice, kind)
            if found is not None:
                return found
    return schema


def _as_list(value: Json) -> list[Json]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _type_of(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
