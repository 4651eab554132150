"""Which tools the model may or must call: as each dialect says it, as the engine is asked for it, and as a real engine keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.conversation import ToolChoice, TurnOptions
from agentserve.dialects.tool_choice import anthropic_tool_choice, openai_tool_choice
from agentserve.errors import InvalidRequest, Unsupported
from agentserve.tool_rules import NEVER, sampling_of
from model.chat.minimax_m3 import MiniMaxM3Format
from model.chat.tagged_calls import reasoning_elements, structural_tag
from model.conversation import Json, Tool, ToolCall
from model.tokenizer import Tokenizer
from tests.real_engine import RealEngine
from tests.scripted import asked, post, starts_with
from tests.serving import Served, chat, serving
from tests.upstream import Script, Upstream

MODES: dict[str, Json] = {
    "type": "object",
    "properties": {"mode": {"enum": ["fast", "slow"]}, "dry": {"type": "boolean"}},
    "required": ["mode", "dry"],
}
STOP: dict[str, Json] = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}
TOOLS = (Tool("build", "Build it.", MODES), Tool("halt", "", STOP))
CHAT_TOOLS = [{"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}} for t in TOOLS]
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # type: ignore[dict-item]
MESSAGES_TOOLS = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in TOOLS]
ASK = [{"role": "user", "content": "Build the shop."}]


@pytest.fixture(scope="module")
def m3(model_folder: Path) -> MiniMaxM3Format:
    return MiniMaxM3Format(Tokenizer.load(model_folder))


@pytest.mark.parametrize(
    ("choice", "parallel", "meant"),
    [
        (None, None, ToolChoice()),
        ("auto", True, ToolChoice()),
        ("auto", False, ToolChoice(single=True)),
        ("none", None, ToolChoice("none")),
        ("required", None, ToolChoice("required")),
        ("required", False, ToolChoice("required", single=True)),
        ({"type": "function", "function": {"name": "f"}}, None, ToolChoice("required", ("f",), single=True)),
        ({"type": "function", "name": "f"}, None, ToolChoice("required", ("f",), single=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}},
            None,
            ToolChoice("required", ("f",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, None, ToolChoice("auto", ("f",))),
    ],
)
def test_openai_s_forms_are_understood(choice: Any, parallel: bool | None, meant: ToolChoice) -> None:
    assert openai_tool_choice(choice, parallel) == meant


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(single=True)),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", single=True)),
        ({"type": "tool", "name": "f"}, ToolChoice("required", ("f",), single=True)),
    ],
)
def test_anthropic_s_forms_are_understood(choice: dict[str, Any] | None, meant: ToolChoice) -> None:
    assert anthropic_tool_choice(choice) == meant


@pytest.mark.parametrize(
    "choice", ["some", 3, {"type": "web_search"}, {"type": "function"}, {"type": "allowed_tools", "mode": "auto", "tools": []}]
)
def test_other_forms_are_refused(choice: Any) -> None:
    with pytest.raises((InvalidRequest, Unsupported)) as refused:
        openai_tool_choice(choice, None)
    assert refused.value.param == "tool_choice"


def test_a_schema_becomes_rules_of_its_own(m3: MiniMaxM3Format) -> None:
    values: dict[str, Json] = {
        "text": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "kind": {"enum": ['a "b"\n', 3, None, True]},
        "tags": {"type": "array", "items": {"type": "number"}},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        "free": {"anyOf": [{"type": "string"}]},
    }
    constraint = m3.call_constraint((Tool("f", "", {"properties": values, "required": ["text"]}),), required=True, single=True)
    grammar = str((constraint or {})["grammar"])
    lines = grammar.splitlines()
    mark = f"Token({m3.call_ids[0]})"
    assert lines[0].startswith("root ::= ")
    for line in (
        f'{mark} "<text>" text {mark} "</text>"',
        f'{mark} "<count>" integer {mark} "</count>"',
        f'{mark} "<kind>" ("a \\"b\\"\\n" | "3" | "" | "true") {mark} "</kind>"',
        f'{mark} "<item>" number {mark} "</item>"',
        f'{mark} "<on>" boolean {mark} "</on>"',
        f'{mark} "<free>" any {mark} "</free>"',
    ):
        assert any(found.endswith(f"::= {line}") for found in lines), line
    call = next(line for line in lines if '"<invoke name=' in line)
    assert call.count("?") == len(values) - 1  # all but the required one
    assert sum(line.startswith("text ::= ") for line in lines) == 1


def test_calls_in_json_are_constrained_by_a_structural_tag() -> None:
    thinking = reasoning_elements((1, 2), [1, 2, 3, 4], begun=False)
    for required, single in ((True, True), (True, False), (False, True)):
        tag = msgspec.json.decode(structural_tag(TOOLS, (3, 4), thinking, [1, 2, 3, 4], required=required, single=single))
        elements = tag["format"]["elements"]
        calls = elements[-1] if required else elements[-1]["content"]
        assert elements[0]["type"] == "optional"
        assert (elements[1]["type"] == "any_tokens") == (not required)
        assert calls["type"] == ("or" if single else "plus")
        schemas = [part for part in msgspec.json.encode(calls).decode().split('"const":')[1:]]
        assert [part.partition("}")[0] for part in schemas] == ['"build"', '"halt"']
    assert [e["type"] for e in reasoning_elements((1, 2), [1], begun=True)] == ["any_tokens", "token"]  # type: ignore[index, call-overload]


def test_none_bans_the_mark_of_a_call_and_keeps_the_client_s_bias(m3: MiniMaxM3Format) -> None:
    said = sampling_of(TurnOptions(sampling={"logit_bias": {"5": 1.0}}, tools=ToolChoice("none")), m3, TOOLS)
    assert said.fields["logit_bias"] == {"5": 1.0, str(m3.call_ids[0]): NEVER}
    assert not said.constrained


def test_a_limit_on_calls_leaves_the_client_s_own_structure_alone_and_a_required_call_does_not(m3: MiniMaxM3Format) -> None:
    asked_for: dict[str, Json] = {"structured_outputs": {"json_object": True}}
    limited = sampling_of(TurnOptions(sampling=asked_for, tools=ToolChoice(single=True)), m3, TOOLS)
    required = sampling_of(TurnOptions(sampling=asked_for, tools=ToolChoice("required")), m3, TOOLS)
    assert limited.fields == asked_for
    assert required.fields["structured_outputs"] != asked_for["structured_outputs"]
    assert required.constrained


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", ("nothing",)), ToolChoice("auto", ("nothing",))])
def test_a_call_of_nothing_that_is_offered_is_refused(m3: MiniMaxM3Format, choice: ToolChoice) -> None:
    with pytest.raises(InvalidRequest):
        sampling_of(TurnOptions(tools=choice), m3, TOOLS if choice.names else ())


FORCED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "halt"}}}),
    ("/v1/responses", {"input": ASK, "tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "halt"}}),
    ("/v1/messages", {"messages": ASK, "tools": MESSAGES_TOOLS, "max_tokens": 100, "tool_choice": {"type": "tool", "name": "halt"}}),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "body"), FORCED, ids=[path for path, _ in FORCED])
async def test_the_engine_is_asked_for_the_same_in_every_dialect(
    served: Served, upstream: Upstream, m3: MiniMaxM3Format, path: str, body: dict[str, Any]
) -> None:
    upstream.script(Script(say="", calls=(ToolCall("", "halt", {"now": True}),)))
    assert (await post(served.url + path, body)).status == 200
    sent = asked(upstream)[0].body
    wanted = m3.call_constraint(TOOLS[1:], required=True, single=True)
    assert sent["sampling_params"]["structured_outputs"] == wanted
    assert sent["reasoning_ended"] is True


@pytest.mark.anyio
async def test_a_choice_changes_no_token_and_a_free_one_asks_for_nothing(served: Served, upstream: Upstream) -> None:
    for choice in ("auto", "none", "required", CHAT_TOOLS[0] | {"function": {"name": "build"}}):
        await chat(served.url, ASK, stream=False, tools=CHAT_TOOLS, tool_choice=choice)
    sent = asked(upstream)
    assert len({request.prompt_ids for request in sent}) == 1
    assert "structured_outputs" not in sent[0].body["sampling_params"]
    assert "reasoning_ended" not in sent[0].body


@pytest.mark.anyio
async def test_a_tool_that_is_not_there_is_a_400(served: Served, upstream: Upstream) -> None:
    reply = await chat(served.url, ASK, stream=True, tool_choice="required")
    assert reply.error is not None
    assert reply.error["param"] == "tool_choice"
    assert not asked(upstream)


@pytest.fixture(scope="module")
def real(engine: RealEngine) -> Iterator[Served]:
    with serving(engine.url, engine.model_folder) as running:
        yield running


def no_thoughts(folder: Path) -> dict[str, float]:
    """Random weights would think for ever."""
    return {str(Tokenizer.load(folder).control_id("<mm:think>")): NEVER}


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_engine_makes_the_calls_that_it_must_and_the_session_stays_exact(
    real: Served, engine: RealEngine, stream: bool
) -> None:
    fields: dict[str, Any] = {"tools": CHAT_TOOLS, "max_tokens": 120, "logit_bias": no_thoughts(engine.model_folder)}
    for choice, names in (({"type": "function", "function": {"name": "halt"}}, {"halt"}), ("required", {"build", "halt"})):
        first = await chat(real.url, ASK, stream=stream, tool_choice=choice, parallel_tool_calls=False, **fields)
        assert first.finish_reason == "tool_calls", first
        [call] = first.message["tool_calls"]
        arguments = msgspec.json.decode(call["function"]["arguments"])
        assert call["function"]["name"] in names
        if call["function"]["name"] == "halt":
            assert isinstance(arguments.pop("now"), bool)
        else:
            assert arguments.pop("mode") in ("fast", "slow")
            assert isinstance(arguments.pop("dry"), bool)
        assert arguments == {}
        history = [*ASK, first.message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
        second = await chat(real.url, history, stream=stream, tool_choice="none", **{**fields, "max_tokens": 20})
        assert second.usage is not None
        assert second.usage["agentserve"]["turn"] == "exact"
        assert "tool_calls" not in second.message


@pytest.mark.anyio
async def test_prompts_of_forced_calls_go_on_from_each_other(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="", calls=(ToolCall("", "halt", {"now": True}),)))
    reply = await chat(served.url, ASK, stream=False, tools=CHAT_TOOLS, tool_choice="required")
    call = reply.message["tool_calls"][0]
    history = [*ASK, reply.message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    await chat(served.url, history, stream=False, tools=CHAT_TOOLS)
    first, second = asked(upstream)
    assert starts_with(second, first)
