"""Where a prompt leaves its history: each kind of change, told with its place, through the whole server."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from agentserve.divergence import Difference, divergence
from agentserve.ledger import Ledger
from agentserve.nodes import Node
from model.conversation import AssistantItem, Head, Item, ToolCall, UserItem
from tests.serving import Served, chat, serving
from tests.upstream import Script, Upstream

SYSTEM = {"role": "system", "content": "You are the coding agent of a shop.\n" * 10}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(answer: dict[str, Any], path: str) -> dict[str, Any]:
    call = answer["tool_calls"][0]
    return {**answer, "tool_calls": [{**call, "function": {**call["function"], "arguments": f'{{"path": "{path}"}}'}}]}


CHANGES: dict[str, Any] = {
    "system_changed": (0, "head", lambda m: [{**SYSTEM, "content": "You are another agent.\n"}, *m[1:]]),
    "text_changed": (1, "user", lambda m: [m[0], user("go there"), *m[2:]]),
    "reasoning_changed": (
        2,
        "assistant",
        lambda m: [*m[:2], {**m[2], "reasoning": "Otherwise.", "reasoning_content": "Otherwise."}, *m[3:]],
    ),
    "arguments_changed": (2, "assistant", lambda m: [*m[:2], called(m[2], "b.py"), *m[3:]]),
    "item_inserted": (5, "user", lambda m: [*m[:5], user("By the way."), *m[5:]]),
    "item_missing": (1, "user", lambda m: [m[0], *m[5:]]),
    "item_replaced": (4, "assistant", lambda m: [*m[:4], user("Summary of the above."), user("Now go on.")]),
}


@pytest.mark.anyio
@pytest.mark.parametrize("difference", [*CHANGES, "tools_changed", "turns_taken_back"])
async def test_each_kind_of_change_is_told_with_its_place(served: Served, upstream: Upstream, difference: str) -> None:
    named = {"x-session-id": "s"}
    upstream.script(Script(say="Reading.", reason="Look.", calls=(ToolCall("", "read_file", {"path": "a.py"}),)), Script(say="Done."))
    messages = [SYSTEM, user("go")]
    first = await chat(served.url, messages, stream=False, tools=[TOOL], headers=named)
    messages += [first.message, {"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "text"}]
    second = await chat(served.url, messages, stream=False, tools=[TOOL], headers=named)
    messages += [second.message, user("And now?")]
    third = await chat(served.url, messages, stream=False, tools=[TOOL], headers=named)
    assert all(reply.usage and "divergence" not in reply.usage["agentserve"] for reply in (first, second, third))

    tools = [TOOL, OTHER] if difference == "tools_changed" else [TOOL]
    item, kind, change = CHANGES.get(difference, (0, "head", lambda m: m))
    if difference == "turns_taken_back":
        item, kind = 6, "assistant"
    reply = await chat(served.url, change(messages), stream=False, tools=tools, headers=named)
    assert reply.usage is not None, reply
    left = reply.usage["agentserve"]["divergence"]
    assert (left["difference"], left["item"], left["item_kind"]) == (difference, item, kind)
    prompts = [request.prompt_ids for request in upstream.requests if request.prompt_ids]
    if difference != "turns_taken_back":
        assert prompts[-1][: left["token"]] == prompts[-2][: left["token"]]
        assert prompts[-1][left["token"]] != prompts[-2][left["token"]]
    assert left["lost_tokens"] > 0


@pytest.mark.anyio
async def test_what_a_rule_that_is_off_would_have_taken_out_is_told_as_volatile(upstream: Upstream, model_folder: Any) -> None:
    with serving(upstream.url, model_folder, canonicalise_mode="off") as served:
        for left in (9000, 8000):
            head = {"role": "system", "content": f"<total_tokens>{left} tokens left</total_tokens>\n" + SYSTEM["content"]}
            reply = await chat(served.url, [head, user("go")], stream=False)
        assert reply.usage is not None
        told = reply.usage["agentserve"]
        assert (told["divergence"]["difference"], told["divergence"]["item"]) == ("volatile_changed", 0)
        assert told["divergence"]["lost_tokens"] == told["missed_tokens"]["volatile"] > 0


def grow(ledger: Ledger, node: Node, *items: Item) -> Node:
    for item in items:
        text = item.text if isinstance(item, UserItem | AssistantItem) else ""
        node = ledger.append(node, (item,), array("I", map(ord, text)))
    return node


def test_the_token_is_the_first_that_differs_also_inside_an_item() -> None:
    ledger = Ledger()
    head = ledger.add_head(Head("s"), [1, 2, 3])
    old = grow(ledger, head, UserItem("abcdef"), AssistantItem("x"))
    left = divergence(old, grow(ledger, head, UserItem("abcxyz")))
    assert left is not None
    assert (left.difference, left.item, left.token, left.lost_tokens) == (Difference.TEXT_CHANGED, 1, 6, 4)
    assert divergence(old, grow(ledger, old, UserItem("more"))) is None


def test_a_message_that_is_said_often_is_not_taken_for_an_inserted_one() -> None:
    ledger = Ledger()
    head = ledger.add_head(Head("s"), [1])
    old = grow(ledger, head, UserItem("next"), AssistantItem("x"), UserItem("next"), AssistantItem("y"))
    left = divergence(old, grow(ledger, head, UserItem("changed"), AssistantItem("x"), UserItem("next")))
    assert left is not None
    assert (left.difference, left.item) == (Difference.TEXT_CHANGED, 1)
