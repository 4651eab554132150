"""Volatile lines and tags that are known by their own wording."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentserve.canonical.rules import Span, line_start, occurrences

_BILLING = "x-anthropic-billing-header:"
_MAX_INDENT = 12
_MAX_LEAD = 48
"""Characters that may stand before a stem on its line."""
_TOTAL = re.compile(r"<total_tokens>[ \t]*[\d,._]{1,20}[ \t]*(?:tokens?[ \t]+(?:left|remaining))?[ \t]*</total_tokens>")
_USAGE = re.compile(
    r"[ \t]{0,12}(?:<system_warning>[ \t]*Token usage: [\d,]{1,20}/[\d,]{1,20}; [\d,]{1,20} remaining[ \t]*</system_warning>"
    r"|Token usage: [\d,]{1,20}/[\d,]{1,20}; [\d,]{1,20} remaining"
    r"|Context (?:used|left|remaining): ?[\d.,]{1,10} ?%|[\d.,]{1,10} ?% of context (?:used|left|remaining))[ \t.]{0,4}(?=\n|\Z)"
)
_USAGE_STEMS = ("Token usage: ", "Context used", "Context left", "Context remaining", "% of context")
_SESSION = re.compile(
    r"(?:current )?(?:log file|session(?:[ _-](?:id|file|path|log))?|transcript(?: path)?|conversation[ _-]id|thread[ _-]id|run[ _-]id|cwd"
    r"|working directory|scratch(?:pad)?(?: directory| path)?)[ \t]{0,4}[:=][ \t]{0,4}\S[^\n]{0,400}",
    re.IGNORECASE,
)
_SESSION_LINE = re.compile(r"^[ \t*•-]{0,12}(?=[csltrw])", re.IGNORECASE | re.MULTILINE)
_SESSION_WORDS = ("log file", "session", "transcript", "conversation", "thread", "run", "cwd", "working directory", "scratch")


def find_billing_lines(text: str) -> Sequence[Span]:
    """Lines that begin with the attribution header of Claude Code."""
    starts = [(line_start(text, at, _MAX_INDENT), at) for at in occurrences(text, [_BILLING])]
    return [(at, _line_end(text, at)) for start, at in starts if start is not None and not text[start:at].strip()]


def find_token_countdowns(text: str) -> Sequence[Span]:
    """Tags and whole lines that say how much of the context is left."""
    spans = [found.span() for found in _TOTAL.finditer(text)] if "<total_tokens>" in text else []
    lines = {line_start(text, at, _MAX_LEAD) for at in occurrences(text, _USAGE_STEMS)}
    spans += [found.span() for line in lines if line is not None and (found := _USAGE.match(text, line)) is not None]
    return sorted(spans)


def find_session_lines(text: str) -> Sequence[Span]:
    """Whole lines that name a place or an id of this session: log file, session id, working directory."""
    lowered = text.lower()
    if not any(word in lowered for word in _SESSION_WORDS):
        return []
    spans = []
    for line in _SESSION_LINE.finditer(text):
        found = _SESSION.match(text, line.end())
        if found is not None and found.end() == _line_end(text, found.end()):
            spans.append((line.start(), found.end()))
    return spans


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
