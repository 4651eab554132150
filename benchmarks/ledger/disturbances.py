"""What clients do to a head from request to request, by the canonicaliser rule that deals with it.

Every rule has a row (a test holds it), so a new rule takes part in the sessions of the benchmark and of the tests once it has its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar, cast

from agentserve.canonical.rules import Action
from agentserve.canonical.table import CANONICAL_RULES
from model.conversation import Head, Json

T = TypeVar("T")
Disturbance = Callable[[Head, int], Head]
"""The head as it is sent when its volatile content has changed so many times."""


def _before(line: Callable[[int], str]) -> Disturbance:
    return lambda head, n: replace(head, system=f"{line(n)}\n\n{head.system}")


def _after(line: Callable[[int], str]) -> Disturbance:
    return lambda head, n: replace(head, system=f"{head.system}\n\n{line(n)}")


def _each_schema(change: Callable[[dict[str, Json], int], dict[str, Json]]) -> Disturbance:
    def disturbed(head: Head, n: int) -> Head:
        return replace(head, tools=tuple(replace(tool, parameters=change(tool.parameters or {}, n)) for tool in head.tools))

    return disturbed


def shuffled(items: Iterable[T], n: int) -> list[T]:
    """The n-th random order of `items`."""
    listed = list(items)
    random.Random(n).shuffle(listed)
    return listed


def keys_in_any_order(value: Json, n: int) -> Json:
    """`value` with the keys of all its objects in the n-th random order."""
    if isinstance(value, dict):
        return {name: keys_in_any_order(value[name], n) for name in shuffled(value, n)}
    return [keys_in_any_order(part, n) for part in value] if isinstance(value, list) else value


def _marked(schema: dict[str, Json], n: int) -> dict[str, Json]:
    return {**schema, "cache_control": {"type": "ephemeral", "ttl": f"{n}h"}} if n % 2 else schema


def _reordered_tools(head: Head, n: int) -> Head:
    return replace(head, tools=tuple(shuffled(head.tools, n)))


_TOTAL = "<total_tokens>{} tokens left</total_tokens>"
_MEMORIES = ("The user likes short functions.", "The user's shop is in Rome.", "Tests run with pytest.", "The user writes British English.")
_REMINDERS = ("Be brief.", "Add a test for each change.", "Do not commit.")

DISTURBANCES: Mapping[str, Disturbance] = {
    "billing_line": _before(lambda n: f"x-anthropic-billing-header: cc_version=2.1.100.aa1; cc_entrypoint=cli; cch={n:05x};"),
    "token_countdown": _after(lambda n: "\n".join(_TOTAL.format(900_000 - 2_588 * i) for i in range(n + 1))),
    "git_status": _after(
        lambda n: "gitStatus: branch main\n M src/cart.py\n" + "\n".join(f" M src/part_{i}.py" for i in range(max(0, n - 6), n + 1))
    ),
    "clock": _after(lambda n: f"The current date and time is Tuesday, March 3, 2026 {8 + n // 60 % 12}:{n % 60:02d} AM."),
    "date": _before(lambda n: f"Today's date: 2026-{1 + n // 28 % 12:02d}-{1 + n % 28:02d}"),
    "session_lines": _after(lambda n: f"Log file: /var/log/agent/0190-{n:04x}.jsonl"),
    "memory_order": _after(lambda n: "<memories>\n" + "\n".join(f"- {memory}" for memory in shuffled(_MEMORIES, n)) + "\n</memories>"),
    "reminder_order": _after(lambda n: "\n".join(f"<reminder>{text}</reminder>" for text in shuffled(_REMINDERS, n))),
    "cache_control": _each_schema(_marked),
    "schema_keys": _each_schema(lambda schema, n: cast(dict[str, Json], keys_in_any_order(schema, n))),
    "tool_order": _reordered_tools,
}


def disturb(head: Head, rules: Iterable[str], moved: int, others: int) -> Head:
    """`head` as a client sends it with the volatile content of `rules`.

    What a rule moves (a clock, a git status) has changed `moved` times, what it drops or orders `others` times.
    """
    for name in rules:
        head = DISTURBANCES[name](head, moved if CANONICAL_RULES[name].action is Action.MOVE else others)
    return head
