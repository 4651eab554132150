"""Heads that sessions could share: where a new one leaves a known one is told, and what would join them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from agentserve.canonical.canonicaliser import choose
from agentserve.heads import HeadBreak, changed_tools, head_break
from agentserve.ledger import Ledger
from agentserve.nodes import Node
from model.conversation import Head, Tool
from tests.serving import Served, chat, serving
from tests.upstream import Upstream

RULES = "".join(f"Rule {number}: keep the shop's code as its tests want it.\n" for number in range(60))
READ = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": {"type": "object"}}}
FIND = {"type": "function", "function": {"name": "mcp__docs__find", "description": "Find a page.", "parameters": {"type": "object"}}}


async def first_turn(served: Served, system: str, session: str, tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The account of a new session's first turn."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Job of {session}."}]
    reply = await chat(served.url, messages, stream=False, tools=tools or [READ], headers={"x-session-id": session})
    assert reply.usage is not None
    account: dict[str, Any] = reply.usage["agentserve"]
    return account


@pytest.mark.case("PFX-14")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("line", "number", "rule"),
    [
        ("Log file: /tmp/s/0190-{}.jsonl\n", 1, "session_lines"),
        ("The job is called {} today.\n", 1, None),
        ("Rule 0: keep the shop's code as its tests want it.\nScratchpad: /tmp/{}\n", 2, "session_lines"),
    ],
)
async def test_a_line_that_keeps_two_sessions_apart_is_named(served: Served, line: str, number: int, rule: str | None) -> None:
    first = await first_turn(served, line.format("aaaa") + RULES, "a")
    second = await first_turn(served, line.format("bbbb") + RULES, "b")
    assert "head_break" not in first
    broken = second["head_break"]
    assert (broken["line"], broken["tools"], broken["rule"]) == (number, [], rule)
    assert broken["broken_tokens"] > 4 * broken["shared_tokens"]
    again = await first_turn(served, line.format("bbbb") + RULES, "c")
    assert "head_break" not in again, "a head that is known is not broken"


@pytest.mark.case("PFX-14")
@pytest.mark.anyio
async def test_with_the_rule_on_there_is_no_break(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, canonicalise_on=["session_lines"]) as served:
        for session in ("a", "b"):
            account = await first_turn(served, f"Log file: /tmp/s/{session}.jsonl\n{RULES}", session)
            assert "head_break" not in account


@pytest.mark.case("PFX-11")
@pytest.mark.anyio
async def test_tools_that_come_and_go_are_named(served: Served) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]
    accounts = []
    for number, tools in enumerate([[READ], [READ, FIND], [READ], [READ, FIND], [READ, FIND]]):
        messages.append({"role": "user", "content": f"turn {number}"})
        reply = await chat(served.url, messages, stream=False, tools=tools, headers={"x-session-id": "s"})
        assert reply.usage is not None
        accounts.append(reply.usage["agentserve"])
        messages.append(reply.message)
    assert accounts[1]["head_break"]["tools"] == ["+mcp__docs__find"]
    assert accounts[1]["head_break"]["line"] is None
    changes = [account.get("divergence", {}) for account in accounts]
    assert [change.get("difference") for change in changes] == [None, "tools_changed", "tools_changed", "tools_changed", None]
    assert [change.get("tools") for change in changes[1:4]] == [["+mcp__docs__find"], ["-mcp__docs__find"], ["+mcp__docs__find"]]
    assert all("head_break" not in account for account in accounts[2:]), "these heads are known"


def node(ledger: Ledger, head: Head, *ids: int) -> Node:
    return ledger.add_head(head, array("I", ids))


def test_the_nearest_head_is_compared_and_an_unlike_one_never() -> None:
    ledger, rules = Ledger(), choose("on", (), ())
    node(ledger, Head("a\nb\nc\nd\n"), 1, 2, 3, 4)
    node(ledger, Head("a\nb\nx\ny\n"), 1, 2, 8, 9)
    node(ledger, Head("another agent's words altogether\n"), 7)
    new = Head("a\nb\nc\nz\n")
    assert head_break(new, [1, 2, 3, 6], ledger.heads(), rules) == HeadBreak(4, (), 3, 1, None)
    assert head_break(Head("nothing of these\n"), [5], ledger.heads(), rules) is None
    assert head_break(new, [1, 2, 3, 6], Ledger().heads(), rules) is None


def test_tools_are_told_by_name_in_order() -> None:
    was = Head("", (Tool("b"), Tool("c", "Old."), Tool("d")))
    now = Head("", (Tool("c", "New."), Tool("a"), Tool("d")))
    assert changed_tools(was, now) == ("+a", "-b", "~c")
    assert changed_tools(now, now) == ()
