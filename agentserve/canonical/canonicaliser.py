"""Applies the rules that are on to a head, and says what they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentserve.canonical.rules import Action, Rule
from agentserve.canonical.table import CANONICAL_RULES
from agentserve.canonical.tools import num_displaced
from agentserve.errors import SetupError
from model.conversation import Head, meaning


@dataclass(frozen=True, slots=True)
class Effect:
    """What a rule did to one head: matches, and the characters that they cover."""

    count: int
    num_characters: int


@dataclass(frozen=True, slots=True)
class Form:
    """What one client's head came to.

    Heads of one `key` are rendered once and shared; `alike` is the key as it would be with no default rule off. `values` holds by rule the
    text that moves to a note, `effects` what each rule that fired did.
    """

    key: bytes
    alike: bytes
    values: Mapping[str, str]
    effects: Mapping[str, Effect]

    def news(self, known: Mapping[str, str]) -> dict[str, str]:
        """The values that differ from those that the model has already read."""
        return {name: value for name, value in self.values.items() if known.get(name) != value}


NO_FORM = Form(b"", b"", {}, {})
"""Where a client sends no head, as what it sends is to follow a known node."""


class Canonicaliser:
    """The rules that are on. Holds no state: what is pinned is pinned by the ledger."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._all = tuple({rule.name: rule for rule in (*_defaults(), *self._rules)}.values())
        self.is_complete = len(self._all) == len(self._rules)
        """No default rule is off."""

    @property
    def names(self) -> tuple[str, ...]:
        """The rules that are on."""
        return tuple(rule.name for rule in self._rules)

    def apply(self, head: Head) -> tuple[Head, Form]:
        """The head to render, and its form."""
        effects: dict[str, Effect] = {}
        values: dict[str, str] = {}
        rendered = head
        for rule in self._rules:
            if rule.action is not Action.PIN:
                applied = rule.apply(rendered)
                rendered = applied.head
                if applied.count:
                    effects[rule.name] = Effect(applied.count, applied.num_characters)
                if rule.action is Action.MOVE and applied.moved:
                    values[rule.name] = applied.moved
        key = _key(rendered, self._rules)
        alike = key if self.is_complete else _key(_through(head, self._all), self._all)
        return rendered, Form(key, alike, values, effects)

    def pinned(self, form: Form, rendered: Head, first: Head) -> Form:
        """The form of a head that is rendered as `first`, which has the same key."""
        count = num_displaced(rendered.tools, first.tools)
        pins = [rule.name for rule in self._rules if rule.action is Action.PIN]
        return replace(form, effects={**form.effects, **dict.fromkeys(pins, Effect(count, 0))}) if count and pins else form

    def joining(self, one: Head, other: Head) -> str | None:
        """The rule, among those that are off, that alone would let the two heads be one; None if there is none."""
        off = [rule for rule in CANONICAL_RULES.values() if rule.name not in self.names]
        for rule in off:
            rules = [row for row in CANONICAL_RULES.values() if row is rule or row.name in self.names]
            if _key(_through(one, rules), rules) == _key(_through(other, rules), rules):
                return rule.name
        return None


def choose(mode: Literal["on", "off"], on: Sequence[str], off: Sequence[str]) -> Canonicaliser:
    """The canonicaliser of the settings. Raises SetupError for a rule that does not exist."""
    unknown = [name for name in (*on, *off) if name not in CANONICAL_RULES]
    if unknown:
        raise SetupError(f"unknown canonicaliser rule {unknown[0]!r}; known: {', '.join(CANONICAL_RULES)}")
    if mode == "off":
        return Canonicaliser(())
    return Canonicaliser(rule for rule in CANONICAL_RULES.values() if (rule.default or rule.name in on) and rule.name not in off)


def _defaults() -> list[Rule]:
    return [rule for rule in CANONICAL_RULES.values() if rule.default]


def _through(head: Head, rules: Iterable[Rule]) -> Head:
    for rule in rules:
        if rule.action is not Action.PIN:
            head = rule.apply(head).head
    return head


def _key(head: Head, rules: Iterable[Rule]) -> bytes:
    for rule in rules:
        if rule.action is Action.PIN:
            head = rule.apply(head).head
    return meaning(head)
