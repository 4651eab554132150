"""The chat request: forms of the same thing read the same; what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.conversation import TurnOptions
from agentserve.dialects.openai_chat import ChatConversation, options, parse
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Item, Json, SystemItem, ToolCall, ToolResultItem, UserItem

USER = {"role": "user", "content": "hi"}


def conversation(*messages: Any, **fields: Any) -> ChatConversation:
    return ChatConversation(parse(json.dumps({"messages": messages, **fields}).encode()))


def read_all(body: bytes) -> None:
    request = parse(body)
    found = ChatConversation(request)
    found.head()
    found.steps(0)
    options(request)


def items(*messages: Any) -> list[Item]:
    return [item for _, step in conversation(*messages).steps(0) for item in step]


@pytest.mark.parametrize(
    "content", ["a\n b", [{"type": "text", "text": "a\n b"}], [{"type": "text", "text": "a\n"}, {"type": "text", "text": " b"}]]
)
def test_text_and_parts_are_the_same_message(content: Any) -> None:
    assert items({"role": "user", "content": content}) == [UserItem("a\n b")]


@pytest.mark.case("TOK-07")
@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("arguments", ['{"n": 1}', ' {"n":1}\n', {"n": 1}])
def test_forms_of_a_call_are_the_same_call(content: Any, arguments: Any) -> None:
    message = {"role": "assistant", "content": content, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
    assert items(message, USER) == [AssistantItem("", None, (ToolCall("c", "f", {"n": 1}),)), UserItem("hi")]


@pytest.mark.case("TOK-09")
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_both_of_its_names(field: str) -> None:
    assert items({"role": "assistant", "content": "x", field: "r"}, USER)[0] == AssistantItem("x", "r")


@pytest.mark.case("TOK-14")
def test_arguments_that_are_not_json_stay_text_and_big_integers_stay_exact() -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{not json"}}]
    calls += [{"id": "b", "function": {"name": "f", "arguments": '{"n": 123456789012345678901234567890}'}}]
    found = items({"role": "assistant", "tool_calls": calls}, USER)[0]
    assert isinstance(found, AssistantItem)
    assert [call.arguments for call in found.calls] == ["{not json", {"n": 123456789012345678901234567890}]


@pytest.mark.case("PFX-07")
def test_only_leading_system_messages_form_the_head() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    system = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    found = conversation(*system, USER, {"role": "system", "content": "later"}, tools=[tool])
    assert found.head().system == "one\n\ntwo"
    assert [t.name for t in found.head().tools] == ["f"]
    assert [item for _, step in found.steps(0) for item in step] == [UserItem("hi"), SystemItem("later")]


@pytest.mark.case("INP-08")
def test_tool_results_stand_in_call_order_and_unknown_ones_behind() -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": i, "content": i.upper()} for i in ("x", "b", "a")]
    steps = conversation(USER, {"role": "assistant", "tool_calls": calls}, *results, USER).steps(0)
    assert [end for end, _ in steps] == [1, 2, 5, 6]
    assert steps[2][1] == [ToolResultItem("a", "A"), ToolResultItem("b", "B"), ToolResultItem("x", "X")]


def test_digests_agree_exactly_as_far_as_the_bytes_do() -> None:
    first = conversation({"role": "system", "content": "s"}, USER)
    longer = conversation({"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"}, USER)
    other = conversation({"role": "system", "content": "S"}, USER)
    assert longer.chain[:2] == first.chain
    assert not set(other.chain) & set(longer.chain)
    assert not set(conversation(USER, tools=[]).chain) & set(conversation(USER).chain)


def test_lone_surrogates_become_replacement_characters_and_pairs_stay() -> None:
    body = b'{"messages":[{"role":"user","content":"a\\ud800b \\ud83d\\ude00 \\\\ud800 \\udc00"}]}'
    (_, step), *_ = ChatConversation(parse(body)).steps(0)
    assert step == [UserItem("a\ufffdb \U0001f600 \\ud800 \ufffd")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b'{"messages": [', None),
        (b"[]", None),
        (b"{}", None),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [{"role": 7}]}', "messages[0].role"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}', "messages[0].content[0].text"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "messages[0]"),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "messages"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 1.5}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "max_tokens": true}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "max_completion_tokens": "7"}', "max_completion_tokens"),
        (b'{"messages": [{"role": "user"}], "stop": [""]}', "stop"),
        (b'{"messages": [{"role": "user"}], "n": 0}', "n"),
        (b'{"messages": [{"role": "user"}], "n": 129}', "n"),
        (b'{"messages": [{"role": "user"}], "top_logprobs": 2}', "top_logprobs"),
        (b'{"messages": [{"role": "user"}], "logprobs": true, "top_logprobs": 21}', "top_logprobs"),
        (b'{"messages": [{"role": "user"}], "tools": {}}', "tools"),
        (b'{"messages": [{"role": "user"}], "response_format": {"type": "xml"}}', "response_format"),
        (b'{"messages": ' + b"[" * 100_000, None),
        (b'{"messages": [{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", None),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_all(body)
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 0},
        {"tool_choice": "some"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [USER, {"role": "assistant", "content": "so far"}]},
        {"tools": [{"type": "web_search", "function": {"name": "w"}}]},
    ],
)
def test_what_is_not_supported_is_said_and_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="supported"):
        read_all(json.dumps({"messages": [USER], **fields}).encode())


def test_sampling_passes_under_the_engines_names_and_only_what_was_said() -> None:
    body = {"messages": [USER], "temperature": 0, "top_k": 5, "max_tokens": 9, "max_completion_tokens": 7, "stop": "X", "user": "u"}
    body |= {"ignore_eos": True, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}}
    got = options(parse(json.dumps(body).encode()))
    sampling: dict[str, Json] = {"temperature": 0, "top_k": 5, "ignore_eos": True, "structured_outputs": {"json": {"type": "object"}}}
    assert got == TurnOptions(7, sampling, ("X",))
