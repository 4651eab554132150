"""The state of the working tree, as agents paste it into their system text.

Forms: Claude Code's block behind "gitStatus:", the same under a heading or "Git status:", and `<git_status>` tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentserve.canonical.rules import Span, line_start, occurrences

_TAGS = ("git_status", "gitStatus", "git-status")
_STEMS = ("gitStatus", "it status", "it Status")
_MAX_OPENING = 32
_OPENING = re.compile(r"[ \t]{0,12}(?:#{1,4} )?(?:gitStatus|(?:Current )?[Gg]it [Ss]tatus)(?::[^\n]{0,400}|[ \t]{0,4}(?=\n))")
_LINE = re.compile(
    r"\n(?:[ \t]*(?=\n)"  # a blank line
    r"|[ MADRCUT?!]{2} \S[^\n]{0,400}|## [^\n]{1,200}\.\.\.[^\n]{1,200}"  # git status --porcelain, and its branch line
    r"|(?:Current branch|Main branch|Git user|Status|Recent commits|Branch|Untracked files|Unmerged paths|Staged|Unstaged|Modified)"
    r"\b[^\n:]{0,80}:[^\n]{0,400}"
    r"|\(clean\)|On branch [^\n]{1,200}|HEAD detached [^\n]{1,200}|Your branch [^\n]{1,200}|Changes [^\n]{1,80}:"
    r"|no changes added [^\n]{1,200}"
    r"|nothing (?:added to|to) commit[^\n]{0,200}|[ \t]+\((?:use|commit or) [^\n]{1,200}|\t[^\n]{1,400}"
    r"|[0-9a-f]{7,40} [^\n]{1,400}"  # git log --oneline
    r")(?=\n|\Z)"
)


def find_git_status(text: str) -> Sequence[Span]:
    """Blocks of git status, from their opening to the last line that git writes."""
    spans = sorted([*_tagged(text), *_blocks(text)])
    return [span for index, span in enumerate(spans) if not index or span[0] >= spans[index - 1][1]]


def _tagged(text: str) -> Iterator[Span]:
    for tag in _TAGS:
        start = text.find(f"<{tag}>")
        while start >= 0:
            end = text.find(f"</{tag}>", start)
            if end < 0:
                break
            end += len(tag) + 3
            yield start, end
            start = text.find(f"<{tag}>", end)


def _blocks(text: str) -> Iterator[Span]:
    starts = {start for at in occurrences(text, _STEMS) if (start := line_start(text, at, _MAX_OPENING)) is not None}
    for opening in filter(None, (_OPENING.match(text, start) for start in sorted(starts))):
        end = line_end = opening.end()
        num_lines = 0
        while (line := _LINE.match(text, line_end)) is not None:
            line_end = line.end()
            if line[0].strip():
                end, num_lines = line_end, num_lines + 1
        if num_lines or opening[0].lstrip().startswith("gitStatus:"):
            yield opening.start(), end
