"""Each canonicaliser rule alone: what it takes for volatile, and that everything else passes byte for byte."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.canonical.canonicaliser import Canonicaliser, choose
from agentserve.canonical.rules import Action
from agentserve.canonical.table import CANONICAL_RULES
from agentserve.errors import SetupError
from model.conversation import Head, Json, Tool, meaning

BEFORE, AFTER = "You are the coding agent of a shop.\nRule 1: keep changes small.", "Rule 2: answer in English."

TEXTS: dict[str, list[str]] = {
    "billing_line": [
        "x-anthropic-billing-header: cc_version=2.1.100.aa1; cc_entrypoint=cli; cch=a1b2c;",
        "x-anthropic-billing-header: cch=9f8e7",
        "  x-anthropic-billing-header:",
    ],
    "token_countdown": [
        "<total_tokens>900000 tokens left</total_tokens>",
        "<total_tokens>900000 tokens left</total_tokens>\n<total_tokens>897,412 tokens left</total_tokens>\n<total_tokens>1</total_tokens>",
        "<system_warning>Token usage: 35000/1000000; 965000 remaining</system_warning>",
        "Token usage: 35000/1000000; 965000 remaining",
        "Context left: 12 %",
        "88% of context remaining.",
    ],
    "git_status": [
        "gitStatus: branch main\n M src/cart.py\n?? notes.txt",
        "gitStatus: This is the git status at the start of the conversation.\nCurrent branch: main\n\n"
        "Main branch (you will usually use this for PRs): main\n\nStatus:\n(clean)\n\n"
        "Recent commits:\nabc1234 Add the cart\ndef56789 Begin",
        "## Git status\nOn branch main\nYour branch is up to date with 'origin/main'.\n\nChanges not staged for commit:\n"
        '  (use "git add <file>..." to update what will be committed)\n\tmodified:   a.py\n\nUntracked files:\n\tb.py\n\n'
        'no changes added to commit (use "git add" and/or "git commit -a")',
        "Git status:\n## main...origin/main [ahead 1]\nMM a.py",
        "<git_status>\nanything at all\n</git_status>",
    ],
    "clock": [
        "The current date and time is Tuesday, March 3, 2026 10:41 AM.",
        "The current time is Tue Mar 03 2026 10:41:00 GMT+0000 (Coordinated Universal Time)",
        "Current time: 10:41:05 UTC",
        "- Current date and time: 2026-03-03 10:41:22 +0100",
        "It is currently 2026-03-03T10:41:22.123Z.",
        "Current Date/Time (UTC): 2026-03-03 10:41",
        "Current date & time: Tue Mar  3 10:41:00 UTC 2026",
        "Conversation started: Tuesday, March 03, 2026 10:41 AM",
        "Timestamp: 2026-03-03T10:41:22+01:00",
        "Current timestamp: 1772534482",
        "<current_time>10:41</current_time>",
        "## Current Time\n2026-03-03 10:41 (Tuesday)",
        "**Current local time:** 10:41 PM",
        "Current time (Europe/Berlin): 10:41 Uhr",
    ],
    "date": [
        "Today's date: 2026-03-03",
        "  Today’s date: Tue Dec 16 2025",
        "Today's date is Tuesday, March 3, 2026 (formatted according to the user's locale).",
        "Today is March 3rd, 2026.",
        "Today is Monday.",
        "Current date: 03/03/2026",
        "The current date is 2026-03-03, and you are in Paris.",
        "The date today is 3 March 2026.",
        "Today is 2026年3月3日",
        "Date: 2026-03-03",
        "<date>2026-03-03</date>",
        "current_date = 2026-03-03",
    ],
    "session_lines": [
        "Log file: /tmp/s/0190-aaaa.jsonl",
        "Session ID: 5f0c9a7e-0001-4000-8000-000000000000",
        "  Working directory: /home/me/shop",
        "- Scratchpad directory: /tmp/agent/0190-aaaa",
        "cwd: /srv",
    ],
}

CONTENT = [
    "Update the date field: 2026-03-03 in tests.",
    "time: 5 seconds",
    "The current version is 3.2.1.",
    "Today we will write 10 tests.",
    "Now run 3 tests.",
    "Date: use ISO format, 2026-03-03",
    "The current date must be used.",
    "Released on 2026-03-03 10:41.",
    "Start time: 10:41",
    "Quote the line 'x-anthropic-billing-header: a' where it stands.",
    "Write <total_tokens> as a tag.",
    "Run git status often.\nGit status: do it before each commit.",
    "The context left of the cursor, 12 % of it.",
    "<memory>one paragraph, no list</memory>",
    "See log file: formats.md in docs.",
]


def only(name: str) -> Canonicaliser:
    return Canonicaliser([CANONICAL_RULES[name]])


def everything() -> Canonicaliser:
    return Canonicaliser(CANONICAL_RULES.values())


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in TEXTS.items() for line in lines])
@pytest.mark.parametrize("gap", ["\n", "\n\n"], ids=["lines", "paragraphs"])
def test_volatile_lines_leave_the_text_as_if_they_had_never_been_there(name: str, line: str, gap: str) -> None:
    rule = CANONICAL_RULES[name]
    for text, rest in (
        (f"{BEFORE}{gap}{line}{gap}{AFTER}", f"{BEFORE}{gap}{AFTER}"),
        (f"{line}{gap}{AFTER}", AFTER),
        (f"{BEFORE}{gap}{line}", BEFORE),
        (f"{BEFORE}{gap}{line}\n{line}", BEFORE),
    ):
        head, form = only(name).apply(Head(text))
        assert head.system == rest
        assert form.effects[name].count >= 1
        moved = {part.strip() for part in re.split("\n(?=[^\n]*)", form.values.get(name, "")) if part.strip()}
        assert moved == ({part.strip() for part in line.split("\n") if part.strip()} if rule.action is Action.MOVE else set())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("clock", "The current date and time is Tuesday, March 3, 2026 10:41 AM."),
        ("clock", "It is now 10:41 p.m. in Rome."),
        ("date", "Today's date is 2026-03-03, a Tuesday!"),
        ("token_countdown", "<total_tokens>900000 tokens left</total_tokens> <total_tokens>897412 tokens left</total_tokens>"),
    ],
)
def test_a_volatile_sentence_between_others_takes_only_itself_away(name: str, line: str) -> None:
    head, _ = only(name).apply(Head(f"{BEFORE} {line} {AFTER}\nMore."))
    assert head.system == f"{BEFORE} {AFTER}\nMore."


@pytest.mark.parametrize("name", ["clock", "date"])
@pytest.mark.parametrize("other", ["clock", "date"])
def test_clock_and_date_each_take_their_own(name: str, other: str) -> None:
    for line in TEXTS[other]:
        _, form = only(name).apply(Head(f"{BEFORE}\n{line}"))
        assert (name in form.effects) == (name == other), line


@pytest.mark.parametrize("text", CONTENT)
def test_content_that_looks_alike_stays(text: str) -> None:
    for system in (text, f"{BEFORE}\n{text}\n{AFTER}"):
        head, form = everything().apply(Head(system))
        assert head.system == system
        assert not form.effects


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Nd"]), max_size=300))
def test_text_without_a_known_value_passes_byte_for_byte(text: str) -> None:
    head, form = Canonicaliser(rule for rule in CANONICAL_RULES.values() if rule.action is not Action.ORDER).apply(Head(text))
    assert (head.system, form.effects) == (text, {})


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*CONTENT, BEFORE, AFTER, "", "- item", "1. two"]), min_size=1, max_size=8),
    st.lists(st.sampled_from([line for lines in TEXTS.values() for line in lines]), max_size=6),
    st.randoms(use_true_random=False),
)
def test_what_is_left_does_not_depend_on_the_volatile_lines_between(content: list[str], lines: list[str], rng: random.Random) -> None:
    content = ["First.", *content, "Last."]
    mixed = list(content)
    for line in lines:
        mixed.insert(rng.randrange(1, len(mixed)), line)
    head, _ = everything().apply(Head("\n".join(mixed)))
    again, form = everything().apply(head)
    assert [part for part in head.system.split("\n") if part] == [part for part in "\n".join(content).split("\n") if part]
    assert (again, form.effects) == (head, {})


@pytest.mark.parametrize(
    "unit",
    [
        "today ", "current date ", "Current time: 1:", "<date>1", "<total_tokens>1", "Git status:\n", "gitStatus: x\n\n", "<memory>\n- a\n",
        "<reminder>", "Date: 2026-03-03, ", "Token usage: 1/1; ", "2026-03-03 ", "x-anthropic-billing-header: ", "Session: ",
        "Today is 1 1 1 1 ",
    ],
)  # fmt: skip
@pytest.mark.timeout(30)
def test_hostile_text_of_a_megabyte_is_read_once(unit: str) -> None:
    """Anything worse than linear would take minutes."""
    head, _ = everything().apply(Head(unit * (1_000_000 // len(unit))))
    assert len(head.system) <= 1_000_000


def tool(name: str = "search", parameters: dict[str, Json] | None = None) -> Tool:
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {
            "q": {"type": "string", "description": "words"},
            "mode": {"enum": ["b", "a"], "default": {"y": 1, "x": [2, 1]}},
            "filter": {"anyOf": [{"type": "null"}, {"properties": {"b": {"type": "string"}, "a": {"type": "string"}}, "type": "object"}]},
        },
        "required": ["q", "filter"],
    }
    return Tool(name, f"Does {name}.", {**schema, **(parameters or {})})


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    return [shuffled(part, rng) for part in value] if isinstance(value, list) else value


@pytest.mark.case("PFX-10")
def test_schemas_with_keys_in_any_order_are_rendered_as_one() -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(200):
        head, form = only("schema_keys").apply(Head("s", (Tool("search", "Does.", shuffled(tool().parameters, rng)),)))
        seen.add((meaning(head), form.key))
        assert head.tools[0].parameters == tool().parameters
    assert len(seen) == 1
    (found,) = head.tools
    assert found.parameters is not None
    assert list(found.parameters) == ["type", "properties", "required"]
    properties = found.parameters["properties"]
    assert isinstance(properties, dict)
    assert list(properties) == ["q", "filter", "mode"]


@pytest.mark.case("PFX-10")
@pytest.mark.parametrize(
    "change", [{"required": ["filter", "q"]}, {"required": ["q"]}, {"title": "x"}, {"properties": {"mode": {"enum": ["a", "b"]}}}]
)
def test_the_order_of_list_values_has_a_meaning(change: dict[str, Json]) -> None:
    keys = {everything().apply(Head("s", (one,)))[1].key for one in (tool(), tool(parameters=change))}
    assert len(keys) == 2


def test_schemas_nested_beyond_any_use_are_left_alone() -> None:
    deep: Json = {"b": 1, "a": 2}
    for _ in range(300):
        deep = {"not": deep}
    head, _ = everything().apply(Head("", (Tool("deep", "", {"type": "object", "not": deep}),)))
    assert head.tools[0].parameters == {"type": "object", "not": deep}


@pytest.mark.case("PFX-08")
def test_a_cache_mark_in_a_schema_is_left_out_and_a_property_of_that_name_stays() -> None:
    named: dict[str, Json] = {"properties": {"cache_control": {"type": "string"}}}
    marks: list[Json] = [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None]
    for mark in marks:
        head, form = only("cache_control").apply(Head("", (Tool("a", "", {**named, "cache_control": mark}),)))
        assert head.tools[0].parameters == named
        assert form.effects["cache_control"].count == 1
    assert not only("cache_control").apply(Head("", (Tool("a", "", named),)))[1].effects


@pytest.mark.case("PFX-09")
def test_tools_in_any_order_have_one_key_and_another_set_has_another() -> None:
    a, b, c = tool("a"), tool("b"), tool("c")
    rule = only("tool_order")
    first, form = rule.apply(Head("s", (b, a)))
    other, again = rule.apply(Head("s", (a, b)))
    assert first.tools == (b, a)
    assert form.key == again.key
    assert rule.pinned(again, other, first).effects["tool_order"].count == 2
    assert not rule.pinned(form, first, first).effects
    assert len({rule.apply(Head("s", tools))[1].key for tools in ((a, b), (a, b, c), (a, c), (a,))}) == 4


MEMORIES = {
    "bullets": "<memories>\nWhat I know:\n- likes tea\n  and milk\n- lives in Rome\n- codes\n</memories>",
    "apart": "<relevant_memories>\n\n* likes tea\n\n* lives in Rome\n\n</relevant_memories>",
    "Open WebUI": "User Context:\n1. [2026-01-02]. likes tea\n2. [2026-01-03]. codes\n",
}


@pytest.mark.parametrize("text", MEMORIES.values(), ids=MEMORIES.keys())
def test_memories_in_any_order_are_rendered_as_one(text: str) -> None:
    found = re.search(r"(?m)^(- |\* |1\. )", text)
    assert found is not None
    start, mark = found.start(), found[0]
    end = text.rfind("\n</") if "</" in text else len(text)
    items = [item.rstrip() for item in re.split(r"(?m)^(?:- |\* |\d\. )", text[start:end])[1:]]
    gap = "\n\n" if mark == "* " else "\n"
    seen, rng = set(), random.Random(1)
    for _ in range(20):
        rng.shuffle(items)
        marks = [f"{number}. " if mark == "1. " else mark for number in range(1, len(items) + 1)]
        listed = gap.join(mark + item for mark, item in zip(marks, items, strict=True))
        head, _ = only("memory_order").apply(Head(f"{BEFORE}\n{text[:start]}{listed}{text[end:]}\n{AFTER}"))
        seen.add(head.system)
    assert len(seen) == 1
    assert sorted(next(iter(seen)).split()) == sorted(f"{BEFORE}\n{text}\n{AFTER}".split())


@pytest.mark.parametrize(
    "text",
    [
        "<memories>\n1. open the file\n1. close it\n</memories>",
        "<memories>\n- b\n  - nested\n- a\n</memories>",
        "<memories>\n- b\n- a\nBut first ask.\n</memories>",
        "<memories>\n## Taste\n- tea\n## Places\n- Rome\n</memories>",
        "<memory>\n- b\n- a\n</memory>",
        "<memories>\n- b\n- a",
        "User Context:\n2. b\n1. a",
    ],
)
def test_lists_that_may_mean_their_order_stay(text: str) -> None:
    assert only("memory_order").apply(Head(text))[0].system == text


@pytest.mark.parametrize("tag", ["system-reminder", "reminder"])
def test_reminders_that_stand_together_are_rendered_in_one_order(tag: str) -> None:
    blocks = [f"<{tag}>\n{text}\n</{tag}>" for text in ("Be brief.", "Add tests.", "Use tabs.")]
    seen, rng = set(), random.Random(2)
    for _ in range(12):
        rng.shuffle(blocks)
        head, _ = only("reminder_order").apply(Head(f"{BEFORE}\n" + "\n\n".join(blocks) + f"\n{AFTER}"))
        seen.add(head.system)
    assert len(seen) == 1
    apart = f"{blocks[0]}\nText between.\n{blocks[1]}"
    assert only("reminder_order").apply(Head(apart))[0].system == apart


def test_rules_are_chosen_by_name_and_an_unknown_name_is_refused() -> None:
    defaults = {name for name, rule in CANONICAL_RULES.items() if rule.default}
    assert set(choose("on", (), ()).names) == defaults
    assert set(choose("on", ("session_lines",), ("clock",)).names) == defaults - {"clock"} | {"session_lines"}
    assert choose("off", (), ()).names == ()
    with pytest.raises(SetupError, match=r"'clocks'.*billing_line"):
        choose("on", (), ("clocks",))
