"""The Messages request: forms of the same thing read the same; what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.conversation import TurnOptions
from agentserve.dialects.anthropic import MessagesConversation, client_session, options, parse
from agentserve.errors import InvalidRequest, Unsupported
from agentserve.identity import Identity, grouped
from model.conversation import AssistantItem, Head, Item, SystemItem, Tool, ToolCall, ToolResultItem, UserItem

USER = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def conversation(*messages: Any, **fields: Any) -> MessagesConversation:
    return MessagesConversation(parse(json.dumps({"messages": messages, "max_tokens": 8, **fields}).encode()))


def items(*messages: Any) -> list[Item]:
    return [item for _, step in conversation(*messages).steps(0) for item in step]


def read_all(body: bytes) -> None:
    request = parse(body)
    found = MessagesConversation(request)
    found.head()
    found.steps(0)
    options(request)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("content", ["a\n b", [text("a\n b")], [text("a\n b", **MARK)], [text("a\n"), text(" b", citations=None)]])
def test_text_and_blocks_are_the_same_message_with_or_without_cache_marks(content: Any) -> None:
    assert items({"role": "user", "content": content}) == [UserItem("a\n b")]


@pytest.mark.case("PFX-08")
@pytest.mark.parametrize("system", ["s", [text("s")], [text("s", **MARK)], [text(""), text("s")]])
def test_a_system_text_and_one_block_are_the_same_head(system: Any) -> None:
    assert conversation(USER, system=system).head() == Head("s")


def test_system_blocks_and_leading_system_messages_are_joined_by_blank_lines() -> None:
    found = conversation({"role": "system", "content": "three"}, USER, system=[text("one"), text("two")])
    assert found.head().system == "one\n\ntwo\n\nthree"


@pytest.mark.case("PFX-07")
def test_a_later_system_message_keeps_its_place() -> None:
    late = {"role": "system", "content": [text("used: 1 %")]}
    found = conversation(USER, late, {"role": "assistant", "content": "ok"}, USER, system="s")
    assert found.head().system == "s"
    assert items(USER, late, USER) == [UserItem("hi"), SystemItem("used: 1 %"), UserItem("hi")]


def test_tools_are_those_of_the_other_dialects() -> None:
    schema: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
    forms = [
        {"name": "read", "description": "Read.", "input_schema": schema, **MARK},
        {"type": "custom", "name": "bare", "input_schema": {}},
    ]
    assert conversation(USER, tools=forms).tools() == (Tool("read", "Read.", schema), Tool("bare", "", {}))
    assert conversation(USER, tools=None).tools() == conversation(USER, tools=[]).tools() == ()


def test_an_assistant_message_is_reasoning_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Look ", "signature": "x"},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "thinking", "thinking": "first."},
        text("Reading."),
        {"type": "tool_use", "id": "c1", "name": "read", "input": {"n": 123456789012345678901234567890, "t": True}},
        {"type": "tool_use", "id": "c2", "name": "list", "input": {}},
    ]
    calls = (ToolCall("c1", "read", {"n": 123456789012345678901234567890, "t": True}), ToolCall("c2", "list", {}))
    assert items({"role": "assistant", "content": blocks}, USER)[0] == AssistantItem("Reading.", "Look first.", calls)
    assert items({"role": "assistant", "content": "x"}, USER)[0] == AssistantItem("x", None)
    assert items({"role": "assistant", "content": blocks[1:2]}, USER)[0] == AssistantItem("", None)


@pytest.mark.case("INP-08")
def test_results_stand_before_the_text_of_their_message_and_in_call_order() -> None:
    calls: list[Any] = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": i, "content": [text(i.upper())], "is_error": True} for i in ("x", "b", "a")]
    found = conversation(USER, {"role": "assistant", "content": calls}, {"role": "user", "content": [text("also"), *results]}, USER).steps(
        0
    )
    assert [end for end, _ in found] == [1, 2, None, 3, 4]
    assert found[2][1] == [ToolResultItem("a", "A"), ToolResultItem("b", "B"), ToolResultItem("x", "X")]
    assert found[3][1] == [UserItem("also")]


def test_results_in_messages_of_their_own_are_one_step() -> None:
    calls: list[Any] = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b")]
    results = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": i}]} for i in ("b", "a")]
    found = conversation(USER, {"role": "assistant", "content": calls}, *results).steps(0)
    assert found[2:] == [(4, [ToolResultItem("a", "a"), ToolResultItem("b", "b")])]


def test_reading_from_the_middle_still_knows_the_calls_before() -> None:
    calls: list[Any] = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": i} for i in ("b", "a")]
    found = conversation(USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results})
    assert found.steps(2) == [(3, [ToolResultItem("a", ""), ToolResultItem("b", "")])]


def test_digests_agree_exactly_as_far_as_the_bytes_do() -> None:
    first, longer = conversation(USER, system="s"), conversation(USER, {"role": "assistant", "content": "a"}, USER, system="s")
    assert longer.chain[: len(first.chain)] == first.chain
    assert conversation(USER, system="t").chain[0] != first.chain[0]


def test_options_are_in_the_engines_names() -> None:
    schema = {"type": "object"}
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_k": 5,
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    fields |= {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "ignore_eos": True, "priority": 2}
    request = parse(json.dumps({"messages": [USER], "max_tokens": 9, **fields}).encode())
    sampling: dict[str, Any] = {"temperature": 0, "top_k": 5, "ignore_eos": True, "structured_outputs": {"json": schema}}
    assert options(request) == TurnOptions(9, sampling, ("END",), 2)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_ab12_account__session_6f1c-77", "6f1c-77"),
        ('{"device_id":"d","session_id":"6f1c-77"}', "6f1c-77"),
        ('{"device_id":"d"}', None),
        ("{not json_session_6f1c", "6f1c"),
        ("somebody", None),
        (7, None),
        (None, None),
    ],
)
def test_the_clients_session_is_found_in_user_id(user_id: Any, session: str | None) -> None:
    assert client_session(parse(json.dumps({"messages": [USER], "metadata": {"user_id": user_id}}).encode())) == session


def test_an_id_that_sub_agents_share_is_a_parent_and_never_a_session() -> None:
    assert grouped(Identity(), "s") == Identity(None, "s")
    assert grouped(Identity("own"), "s") == Identity("own")
    assert grouped(Identity(), "line\nbreak") == Identity()


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({"messages": [USER]}, "max_tokens"),
        ({"messages": [], "max_tokens": 1}, "messages"),
        ({"messages": [{"role": "system", "content": "s"}], "max_tokens": 1}, "messages"),
        ({"messages": [{"role": "banana", "content": "s"}, USER], "max_tokens": 1}, "messages[0].role"),
        ({"messages": [{"role": "user"}], "max_tokens": 1}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}], "max_tokens": 1}, "messages[0].content[0].text"),
        ({"messages": [USER], "max_tokens": 1, "system": 3}, "system"),
        ({"messages": [USER], "max_tokens": 1, "tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"messages": [USER], "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [USER], "max_tokens": 1, "output_config": {"format": {"type": "x"}}}, "output_config.format"),
        *(({"messages": [USER], "max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "100", True)),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_all(json.dumps(body).encode())
    assert refused.value.param == at


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "some"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [USER, {"role": "assistant", "content": "pre"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        read_all(json.dumps({"messages": [USER], "max_tokens": 1, **fields}).encode())
