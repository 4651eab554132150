"""Clocks and dates: a known label with a date or a time behind it, as agents write them into their system text.

"Today's date: 2026-03-03", "The current date and time is Tuesday, March 3, 2026 10:41 AM.", "<current_time>10:41</current_time>",
"## Current Time" over "2026-03-03 10:41 (Tuesday)". A date without such a label is content and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentserve.canonical.rules import Span, line_start, occurrences

_WORDS = ("oday", "urrent", "CURRENT", "tarted", "ate is", "ate and", "ime is", " is now")
_STEMS = (*_WORDS, "ate:", "ime:", "amp:", "ow:", "ate>", "ime>", "amp>")
"""Parts of the labels; every label holds one."""
_MAX_LABEL = 60
_MAX_SENTENCE = 200

_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:[ \u202f]?(?:[AaPp][Mm]|[AaPp]\.[Mm]\.))?(?:Z|[+-]\d{2}:?\d{2})?"
_ISO = r"\d{4}-\d{2}-\d{2}(?:T\d{2}:?\d{2}(?::?\d{2}(?:[.,]\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
_NUMERIC = r"\d{1,4}[/.]\d{1,2}[/.]\d{2,4}|\d{4}年\d{1,2}月\d{1,2}日"
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?"
    r"|Dec(?:ember)?)\.?"
)
_NUMBER = r"\d{1,2}(?:st|nd|rd|th)?|(?:19|20)\d{2}|1\d{9}(?:\d{3})?"
_ZONE = r"(?:UTC|GMT|[A-Z]{2,4}T|Z)(?:[+-]\d{1,2}(?::?\d{2})?)?|[+-]\d{2}:?\d{2}|[A-Z][a-z]{2,12}/[A-Z][A-Za-z_]{2,30}"
_WORD = r"at|of|the|\([^()\n]{1,60}\)"
_TOKEN = rf"(?:{_ISO}|{_NUMERIC}|{_TIME}|{_WEEKDAY}|{_MONTH}|{_NUMBER}|{_ZONE}|{_WORD})(?![\w:/])"
_VALUE = rf"(?P<value>{_TOKEN}(?:[ ,\u202f]{{1,2}}(?:- )?{_TOKEN}){{0,11}})"
_NAMED = (
    r"(?:the |your |user's )?(?:current|today(?:['’]?s)?|local|system)[ _-](?:(?:local|system|UTC|GMT)[ _-])?"
    r"(?:date[ _-]?time|date(?: ?(?:and|&|/) ?time)?|time(?: ?(?:and|&|/) ?date)?|timestamp|day)"
    r"|today|(?:the )?date (?:and time|today)|(?:it is|it's) (?:currently|now)|right now it is|the (?:date|time) is now"
    r"|(?:this )?(?:conversation|session|chat) (?:was )?started(?: at| on)?"
)
_BARE = r"(?:the )?(?:date|time)|datetime|timestamp|now|started (?:at|on)"
_LABEL = rf"(?i:(?P<named>{_NAMED})|(?P<bare>{_BARE}))(?: \([^()\n]{{1,30}}\))?"
_LABELLED = re.compile(rf"{_LABEL}[*_`]{{0,3}}(?P<is>(?: is(?: now)?| was)?)[ ]?(?P<colon>[:=]?)[*_`]{{0,3}}[ \t]{{0,4}}[\"'`]?{_VALUE}")
_HEADED = re.compile(rf"(?i:{_NAMED}|{_BARE})[*_: \t]{{0,4}}\n{{1,2}}[ \t*-]{{0,4}}{_VALUE}[*_`. \t]{{0,4}}(?=\n|\Z)")
_TAGGED = re.compile(rf"<((?i:(?:current|today|now)?[_-]?(?:date|time|datetime|date_time|timestamp)))>\s{{0,4}}{_VALUE}\s{{0,4}}</\1>")
_LEADING = re.compile(r"[ \t>*_#|•-]{0,12}")
_BOUNDARY = re.compile(r"(?:[.!?:;>|]|[.!?][\"')*_])[ \t]+|>")
_SENTENCE_END = re.compile(rf"[^\n<]{{0,{_MAX_SENTENCE}}}?(?:[.!?][\"'*_`)]{{0,2}}(?=[ \t\n]|\Z)|(?=\n|<|\Z))")
_CLOCK = re.compile(r"\d:\d{2}|T\d{4}|(?<!\d)1\d{9}")
_NEAR = re.compile(r"\d|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day")
"""What every value holds; labels without it near are not looked at further."""
_DATED = re.compile(rf"\d{{4}}|\d[/.]\d|\d:\d{{2}}|{_MONTH}[ ]\d|\d(?:st|nd|rd|th)? (?:of )?{_MONTH}|{_WEEKDAY}")


def find_clocks(text: str) -> Sequence[Span]:
    """Labelled values with a time of day, or in seconds since 1970."""
    return [(start, end) for start, end, value in _found(text) if _CLOCK.search(value)]


def find_dates(text: str) -> Sequence[Span]:
    """Labelled values without a time of day."""
    return [(start, end) for start, end, value in _found(text) if not _CLOCK.search(value)]


def _found(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and value of each match, in order."""
    last_end = 0
    for at in occurrences(text, _STEMS):
        if at < last_end or not _NEAR.search(text, at, at + _MAX_LABEL):
            continue
        found = _tagged(text, at) or _labelled(text, at)
        if found is not None and found[0] >= last_end:
            last_end = found[1]
            yield found


def _tagged(text: str, at: int) -> tuple[int, int, str] | None:
    start = text.rfind("<", max(0, at - _MAX_LABEL), at)
    found = _TAGGED.match(text, start) if start >= 0 else None
    return (found.start(), found.end(), found["value"]) if found and _DATED.search(found["value"]) else None


def _labelled(text: str, at: int) -> tuple[int, int, str] | None:
    start = line_start(text, at, _MAX_LABEL)
    begins_line = start is not None
    sentence = line = at - _MAX_LABEL if start is None else start
    for boundary in _BOUNDARY.finditer(text, line, at):
        sentence, begins_line = boundary.end(), False
    if sentence == line and not begins_line:
        return None
    leading = _LEADING.match(text, sentence)
    assert leading is not None
    headed = _HEADED.match(text, leading.end()) if begins_line and "#" in leading[0] else None
    if headed is not None:
        return (line, headed.end(), headed["value"]) if _DATED.search(headed["value"]) else None
    found = _LABELLED.match(text, leading.end())
    if found is None or not _DATED.search(found["value"]):
        return None
    end = _SENTENCE_END.match(text, found.end())
    if end is None or (found["bare"] and not _stands_alone(found, begins_line, end[0])):
        return None
    return line if begins_line else leading.end(), end.end(), found["value"]


def _stands_alone(found: re.Match[str], begins_line: bool, rest: str) -> bool:
    """Whether a label that is a common word is a line of its own with a whole date: "Date: 2026-03-03"."""
    return begins_line and bool(found["colon"] or found["is"]) and not rest.strip(" .*_`\"'") and bool(re.search(r"\d{4}", found["value"]))
