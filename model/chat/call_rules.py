"""Tool schemas as grammar rules, in the EBNF that engines take for structured output: what may stand in the markup of a call.

    r0 ::= Token(7) "<path>" text Token(7) "</path>"

`Token(id)` is exactly that id; `ExcludeToken(…)` any other than those, so free text never contains what structures the output. What a
schema says beyond types, `enum`, `const`, `properties`, `required` and `items` is left to the model: such a value may be any text or tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from model.conversation import Json, Tool

_TREE_NAME = "[A-Za-z_] [A-Za-z0-9_.-]*"
_SCALARS = {
    "string": "text",
    "integer": 'integer ::= "-"? ("0" | [1-9] [0-9]*)',
    "number": 'number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?',
    "boolean": 'boolean ::= "true" | "false"',
    "null": '""',
}


def literal(text: str) -> str:
    """`text` as a terminal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


class CallRules:
    """Collects rules. `mark` is the token in front of each tag of an element, `excluded` are the ids that no text may hold."""

    def __init__(self, mark: int, excluded: Iterable[int]) -> None:
        self._mark = f"Token({mark})"
        self._names: dict[str, str] = {}
        self._fixed: dict[str, str] = {"text": f"text ::= ExcludeToken({', '.join(map(str, sorted(excluded)))})*"}

    def text(self, root: str) -> str:
        """The whole grammar, whose start is the expression `root`."""
        own = (f"{name} ::= {expression}" for expression, name in self._names.items())
        return "\n".join([f"root ::= {root}", *own, *self._fixed.values()])

    def name(self, expression: str) -> str:
        """The name of a rule for `expression`; equal ones share it."""
        return self._names.setdefault(expression, f"r{len(self._names)}")

    def arguments(self, tool: Tool) -> str:
        """What may stand between the opening and the closing tag of a call of `tool`."""
        schema = tool.parameters or {}
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return f"{self._tree()}*"
        return self._object(schema, properties) or '""'

    def _object(self, schema: Mapping[str, Json], properties: Mapping[str, Json]) -> str:
        """The properties in the schema's order; the optional ones may be left out."""
        wanted = schema.get("required")
        required = wanted if isinstance(wanted, list) else []
        return " ".join(self._element(name, value) + ("" if name in required else "?") for name, value in properties.items())

    def _element(self, name: str, schema: Json) -> str:
        begin, end = literal(f"<{name}>"), literal(f"</{name}>")
        return self.name(f"{self._mark} {begin} {self._value(schema)} {self._mark} {end}")

    def _value(self, schema: Json) -> str:
        if not isinstance(schema, dict):
            return self._any()
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return self._choice(choices)
        return self._typed(schema)

    def _choice(self, choices: list[Json]) -> str:
        if any(isinstance(choice, dict | list) for choice in choices):
            return self._any()
        return "(" + " | ".join(literal(_spelled(choice)) for choice in choices) + ")"

    def _typed(self, schema: Mapping[str, Json]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [one for one in kind if one != "null"]
            kind = kinds[0] if len(kinds) == 1 else None
        properties = schema.get("properties")
        if kind == "object" and isinstance(properties, dict) and properties:
            return f"({self._object(schema, properties)})"
        if kind == "array" and "items" in schema:
            return self._element("item", schema["items"]) + ("+" if schema.get("minItems") else "*")
        return self._scalar(kind) if isinstance(kind, str) and kind in _SCALARS else self._any()

    def _scalar(self, kind: str) -> str:
        rule = _SCALARS[kind]
        if "::=" not in rule:
            return rule
        self._fixed[kind] = rule
        return kind

    def _any(self) -> str:
        self._tree()
        return "any"

    def _tree(self) -> str:
        """An element with any name and anything in it. Names that do not match are text to the parser."""
        self._fixed["any"] = "any ::= text | tree+"
        self._fixed["tree"] = f'tree ::= {self._mark} "<" word ">" any {self._mark} "</" word ">"'
        self._fixed["word"] = f"word ::= {_TREE_NAME}"
        return "tree"


def _spelled(value: Json) -> str:
    """A scalar as the markup spells it."""
    spell: Callable[[Json], str] = str if isinstance(value, str) else json.dumps
    return "" if value is None else spell(value)
