"""A command line as options: what a process was started with, where it does not say so itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


def options(arguments: Sequence[str]) -> dict[str, str]:
    """By name, with hyphens: `--name value` and `--name=value`; "true" for a bare `--name`, "false" for `--no-name`."""
    found: dict[str, str] = {}
    for index, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        if equals:
            found[name] = value
        elif not following.startswith("--"):
            found[name] = following
        elif name.startswith("no-"):
            found[name[3:]] = "false"
        else:
            found[name] = "true"
    return found


def as_json(text: str | None) -> dict[str, Any]:
    """The JSON object that an option holds; empty where it holds none."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def find(value: Any, name: str) -> Any:
    """The first value under the key `name` in nested JSON; None if there is none."""
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            found = find(part, name)
            if found is not None:
                return found
    return None
