"""The Responses request: forms of the same thing read the same; what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.conversation import TurnOptions
from agentserve.dialects.responses import ResponsesConversation, input_items, options, parse
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Head, Item, SystemItem, Tool, ToolCall, ToolResultItem, UserItem

USER = {"role": "user", "content": "hi"}


def unkept(item_id: str) -> bytes:
    raise InvalidRequest(f"nothing is kept, so not {item_id!r}", param="input")


def conversation(*own: Any, history: tuple[Any, ...] = (), **fields: Any) -> ResponsesConversation:
    request = parse(json.dumps({"input": list(own), **fields}).encode())
    return ResponsesConversation(request, [json.dumps(item).encode() for item in history], input_items(request, unkept))


def items(*own: Any) -> list[Item]:
    return [item for _, step in conversation(*own).steps(0) for item in step]


def read_all(body: bytes) -> None:
    request = parse(body)
    found = ResponsesConversation(request, (), input_items(request, unkept))
    found.head()
    found.steps(0)
    options(request)


def call(call_id: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments, **fields}


def output(call_id: str, value: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


@pytest.mark.parametrize(
    "given",
    [
        "a b",
        [{"role": "user", "content": "a b"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a "}, {"type": "input_text", "text": "b"}]}],
    ],
)
def test_input_as_text_or_items_is_the_same_message(given: Any) -> None:
    request = parse(json.dumps({"input": given}).encode())
    assert ResponsesConversation(request, (), input_items(request, unkept)).steps(0) == [(1, [UserItem("a b")])]


@pytest.mark.case("SES-10")
def test_items_of_one_turn_are_one_item_with_or_without_ids() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]}
    bare = [thought, said, call("c1", '{"n": 1}'), call("c2")]
    full = [{**item, "id": f"x{number}", "status": "completed"} for number, item in enumerate(bare)]
    expected = [AssistantItem("Reading.", "Look.", (ToolCall("c1", "f", {"n": 1}), ToolCall("c2", "f", {})))]
    results: list[Item] = [ToolResultItem("c1", "1"), ToolResultItem("c2", "2")]
    for forms in (bare, full):
        found = conversation(USER, *forms, output("c2", "2"), output("c1", [{"type": "input_text", "text": "1"}])).steps(0)
        assert found == [(1, [UserItem("hi")]), (5, expected), (7, results)]


@pytest.mark.parametrize("thought", [{"summary": []}, {"summary": [], "content": None, "encrypted_content": "opaque"}])
def test_reasoning_without_text_is_reasoning_left_out(thought: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "x"}
    assert items({"type": "reasoning", **thought}, said, USER)[0] == AssistantItem("x", None)


@pytest.mark.case("PFX-07")
def test_instructions_and_leading_system_messages_form_the_head_and_later_ones_keep_their_place() -> None:
    developer = {"role": "developer", "content": "two"}
    found = conversation(developer, USER, {"role": "system", "content": "late"}, USER, instructions="one")
    assert found.head() == Head("one\n\ntwo")
    assert [item for _, step in found.steps(0) for item in step] == [UserItem("hi"), SystemItem("late"), UserItem("hi")]


def test_functions_are_offered_and_hosted_tools_are_left_out() -> None:
    schema: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
    forms = [{"type": "web_search"}, {"type": "function", "name": "read", "description": "Read.", "parameters": schema, "strict": False}]
    assert conversation(USER, tools=forms).tools() == (Tool("read", "Read.", schema),)
    assert conversation(USER, tools=None).tools() == ()


def test_a_history_comes_first_and_errors_name_items_of_the_request() -> None:
    found = conversation(output("c", "x"), USER, history=(USER, call("c")))
    assert [item for _, step in found.steps(2) for item in step] == [ToolResultItem("c", "x"), UserItem("hi")]
    with pytest.raises(Unsupported) as refused:
        conversation({"type": "computer_call", "id": "x"}, history=(USER, call("c")))
    assert refused.value.param == "input[0]"


def test_reading_from_the_middle_still_knows_the_calls_before() -> None:
    found = conversation(USER, call("a"), call("b"), output("b", "B"), output("a", "A"))
    assert found.steps(3) == [(5, [ToolResultItem("a", "A"), ToolResultItem("b", "B")])]


def test_a_reference_stands_for_the_kept_item() -> None:
    kept = json.dumps({"type": "message", "id": "msg_1", "role": "assistant", "content": "said"}).encode()
    texts = [USER, {"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "an item_reference?"}]
    request = parse(json.dumps({"input": texts}).encode())
    found = ResponsesConversation(request, (), input_items(request, {"msg_1": kept}.__getitem__))
    assert [item for _, step in found.steps(0) for item in step] == [UserItem("hi"), AssistantItem("said"), UserItem("an item_reference?")]
    with pytest.raises(InvalidRequest):
        input_items(request, unkept)


def test_digests_agree_exactly_as_far_as_the_bytes_do() -> None:
    first, longer = conversation(USER, instructions="s"), conversation(USER, call("a"), output("a", ""), instructions="s")
    assert longer.chain[: len(first.chain)] == first.chain
    assert conversation(USER, instructions="t").chain[0] != first.chain[0]


def test_options_are_in_the_engines_names() -> None:
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"}
    request = parse(json.dumps({"input": "x", "max_output_tokens": 9, "temperature": 0, "text": form, "seed": 3, "stop": "END"}).encode())
    sampling: dict[str, Any] = {"temperature": 0, "seed": 3, "structured_outputs": {"json": {"type": "object"}}}
    assert options(request) == TurnOptions(9, sampling, ("END",))


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({}, None),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "banana", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "system", "content": "s"}]}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "x", "stop": [""]}, "stop"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "x", "text": {"format": "json"}}, "text.format"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], at: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_all(json.dumps(body).encode())
    assert refused.value.param == at


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "some"},
        {"tool_choice": {"type": "web_search"}},
        {"tools": [{"type": "custom", "name": "apply_patch"}]},
        {"input": [USER, call("c")]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        read_all(json.dumps({"input": "x", **fields}).encode())
