"""Lists whose order says nothing: memories that a search brings in any order, reminders that hooks write in any order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from agentserve.canonical.rules import Applied, Span
from model.conversation import Head

_MEMORY_TAGS = ("memories", "user_memories", "relevant_memories", "memory_context", "memory-context")
_MEMORY_HEADING = "User Context:\n"
"""What Open WebUI puts over its memories."""
_REMINDER_TAGS = ("system-reminder", "reminder")
_BULLET = re.compile(r"^(?P<indent>[ \t]{0,8})[-*•][ \t]+", re.MULTILINE)
_NUMBER = re.compile(r"^(?P<indent>)\d{1,4}\. (?=\[)", re.MULTILINE)
_NUMBERED = re.compile(r"(?:\d{1,4}\. \[[^\n]*(?:\n|\Z))+")


def order_memories(head: Head) -> Applied:
    """Sort the items of each list of memories: bullets between tags, and the dated lines of Open WebUI, whose numbers stay in order."""
    if "emor" not in head.system and _MEMORY_HEADING not in head.system:
        return Applied(head)
    lists = [(span, _BULLET) for tag in _MEMORY_TAGS for span in _inside(head.system, tag)]
    at = head.system.find(_MEMORY_HEADING)
    listed = _NUMBERED.match(head.system, at + len(_MEMORY_HEADING)) if at >= 0 else None
    if listed is not None:
        lists.append((listed.span(), _NUMBER))
    lists.sort(key=lambda row: row[0])
    apart = [row for index, row in enumerate(lists) if not index or row[0][0] >= lists[index - 1][0][1]]
    return _replaced(head, [(span, _sorted_items(head.system[slice(*span)], item)) for span, item in apart])


def order_reminders(head: Head) -> Applied:
    """Sort reminder blocks that stand together, with nothing but white space between them."""
    runs: list[list[Span]] = []
    for tag in _REMINDER_TAGS:
        width = len(tag)
        for inner_start, inner_end in _inside(head.system, tag):
            start, end = inner_start - width - 2, inner_end + width + 3
            if runs and runs[-1][-1][1] <= start and not head.system[runs[-1][-1][1] : start].strip():
                runs[-1].append((start, end))
            else:
                runs.append([(start, end)])
    edits = []
    for run in runs:
        blocks = [head.system[start:end] for start, end in run]
        gaps = [head.system[before[1] : after[0]] for before, after in pairwise(run)]
        edits.append(((run[0][0], run[-1][1]), "".join(map("".join, zip(sorted(blocks), [*gaps, ""], strict=True)))))
    return _replaced(head, sorted(edits))


def _inside(text: str, tag: str) -> Iterator[Span]:
    """What stands between <tag> and the next </tag>."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start)
        if end < 0:
            return
        yield start + len(opening), end
        start = text.find(opening, end)


def _replaced(head: Head, edits: Sequence[tuple[Span, str]]) -> Applied:
    """The head with each span's text replaced; spans that stay as they are do not count."""
    text, parts, at, count, num_characters = head.system, [], 0, 0, 0
    for (start, end), new in edits:
        if new != text[start:end]:
            parts += [text[at:start], new]
            at, count, num_characters = end, count + 1, num_characters + end - start
    if not count:
        return Applied(head)
    return Applied(replace(head, system="".join([*parts, text[at:]])), count, num_characters)


def _sorted_items(text: str, item: re.Pattern[str]) -> str:
    """`text` with the items of its list sorted; each place keeps its own mark and the white space behind it.

    Text before the first item stays. A text that goes on behind the list, or whose items differ in their indentation, stays as it is.
    """
    marks = list(item.finditer(text))
    if len(marks) < 2 or len({mark["indent"] for mark in marks}) > 1:
        return text
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    items = [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]
    indent = marks[0]["indent"]
    if any(line.strip() and not line.startswith((indent + " ", indent + "\t")) for part in items for line in part.split("\n")[1:]):
        return text
    bodies = [part.rstrip() for part in items]
    gaps = [part[len(body) :] for part, body in zip(items, bodies, strict=True)]
    places = zip(marks, sorted(bodies), gaps, strict=True)
    return text[: marks[0].start()] + "".join(mark[0] + body + gap for mark, body, gap in places)
