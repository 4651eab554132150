"""What a rule is, and how volatile spans are cut out of a text so that the rest stays byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from model.conversation import Head

BLANKS = " \t"
MAX_CANDIDATES = 2048
"""Far above what a prompt holds; it bounds the cost of hostile text."""


class Action(StrEnum):
    """What becomes of what a rule matches."""

    DROP = "drop"
    """It never reaches the model."""
    MOVE = "move"
    """It leaves the head; the model reads its value in a note behind the newest message, again whenever it changes."""
    ORDER = "order"
    """It stays, in one fixed order."""
    PIN = "pin"
    """It stays in the order that was rendered first; other orders of the same are the same head."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A head after one rule: how many matches it had, how many characters they cover, and the text that moves."""

    head: Head
    count: int = 0
    num_characters: int = 0
    moved: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of volatile content. `matches` says in a line what is touched; everything else passes."""

    name: str
    action: Action
    reason: str
    matches: str
    apply: Callable[[Head], Applied]
    default: bool = True


Span: TypeAlias = tuple[int, int]
"""Start and end of a match in a text."""
Find: TypeAlias = Callable[[str], Sequence[Span]]
"""Matches in order of their place, apart from each other."""


def occurrences(text: str, stems: Iterable[str]) -> list[int]:
    """Where any of `stems` stands in `text`, in order, the first `MAX_CANDIDATES` of each.

    Rules look for their stems first: that costs a tenth of a regular expression over the whole text.
    """
    found: set[int] = set()
    for stem in stems:
        at, count = text.find(stem), 0
        while at >= 0 and count < MAX_CANDIDATES:
            found.add(at)
            at, count = text.find(stem, at + len(stem)), count + 1
    return sorted(found)[:MAX_CANDIDATES]


def line_start(text: str, at: int, reach: int) -> int | None:
    """Where the line of `at` begins, if that is at most `reach` characters before."""
    start = text.rfind("\n", max(0, at - reach - 1), at) + 1
    return start if start or at <= reach else None


def cutting(find: Find) -> Callable[[Head], Applied]:
    """A rule's `apply` that cuts what `find` finds in the system text."""
    return partial(_cut_head, find)


def _cut_head(find: Find, head: Head) -> Applied:
    spans = find(head.system)
    if not spans:
        return Applied(head)
    matched = [head.system[start:end].strip() for start, end in spans]
    text = cut(head.system, spans)
    return Applied(replace(head, system=text), len(spans), len(head.system) - len(text), "\n".join(dict.fromkeys(matched)))


def cut(text: str, spans: Iterable[Span]) -> str:
    """`text` without `spans`. What separated a span from its neighbours goes once, so that the rest reads as if it had never been there."""
    for start, end in reversed(_joined(text, spans)):
        left, right = _widened(text, start, end)
        text = text[:left] + text[right:]
    return text


def _joined(text: str, spans: Iterable[Span]) -> list[Span]:
    """Spans with nothing but white space between them as one: a list that grows by a tag a turn is cut once."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and (not (between := text[joined[-1][1] : start]) or between.isspace()):
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _widened(text: str, start: int, end: int) -> Span:
    """The span with the blanks or line breaks that go with it."""
    left, right = start, end
    while left and text[left - 1] in BLANKS:
        left -= 1
    while right < len(text) and text[right] in BLANKS:
        right += 1
    starts_line, ends_line = not left or text[left - 1] == "\n", right == len(text) or text[right] == "\n"
    if starts_line and ends_line:
        return _lines(text, left, right)
    if ends_line:
        return left, right
    return start, right


def _lines(text: str, left: int, right: int) -> Span:
    """Whole lines with their line breaks: between two neighbours the larger of the gaps on both sides stays, of at most a blank line."""
    before, after = left, right
    while before and text[before - 1] == "\n" and left - before < 2:
        before -= 1
    while after < len(text) and text[after] == "\n" and after - right < 2:
        after += 1
    if not before:
        return 0, after
    if after == len(text):
        return before, after
    return (left, after) if left - before >= after - right else (before, right)
