"""Heads that sessions could share but for a line: which known head a new one is most like, and where the two part.

A head stands before everything else, so one line of its own keeps a session from every block that others have computed behind it.
Lines are compared, never told: a break is a line's number, names of tools, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from agentserve.canonical.canonicaliser import Canonicaliser
from agentserve.nodes import Node
from model.conversation import Head

MAX_LOOKED_AT = 8
"""Known heads that a new one is compared with, the latest first."""
MIN_ALIKE = 0.5
"""Share of a head's characters that another must have too: with less in common they are different heads, not one that is broken."""


@dataclass(frozen=True, slots=True)
class HeadBreak:
    """Where a new head leaves the known one that is most like it.

    `line` of the system text, from 1; None where that is the same and the tools differ. `tools`: names that came (+), went (-) or changed
    (~). `shared_tokens` stand before the break, `broken_tokens` of the head behind it. `rule`: the canonicaliser's that would join the two.
    """

    line: int | None
    tools: tuple[str, ...]
    shared_tokens: int
    broken_tokens: int
    rule: str | None


def head_break(new: Head, ids: Sequence[int], known: Iterable[Node], canonicaliser: Canonicaliser) -> HeadBreak | None:
    """The break of `new`, rendered as `ids`, from the nearest of `known`, the latest first; None if it is like none of them."""
    lines = Counter(_lines(new.system))
    size = sum(len(line) * count for line, count in lines.items())
    nearest, most = None, MIN_ALIKE * max(size, 1)
    for node in islice(known, MAX_LOOKED_AT):
        alike = sum(len(line) * min(count, lines[line]) for line, count in Counter(_lines(node.head.system)).items())
        if alike >= most and (nearest is None or alike > most):
            nearest, most = node, alike
    if nearest is None:
        return None
    shared = num_equal(nearest.ids, ids)
    rule = canonicaliser.joining(nearest.head, new)
    return HeadBreak(_line(nearest.head, new), changed_tools(nearest.head, new), shared, len(ids) - shared, rule)


def changed_tools(old: Head, new: Head) -> tuple[str, ...]:
    """Names of tools that came ("+name"), went ("-name"), or have another description or schema ("~name"), in order of names."""
    was, now = ({tool.name: tool for tool in head.tools} for head in (old, new))
    marks = [f"{'+' if name not in was else '-' if name not in now else '~'}{name}" for name in was | now if was.get(name) != now.get(name)]
    return tuple(sorted(marks, key=lambda mark: mark[1:]))


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Ids that both begin with."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _line(old: Head, new: Head) -> int | None:
    was, now = _lines(old.system), _lines(new.system)
    same = next((number for number, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    return None if was == now else same + 1
