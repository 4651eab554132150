"""Values that no engine takes are refused by the name of the field that the client sent; so is what only the engine can judge."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.conversation import ToolChoice, TurnOptions
from agentserve.dialects.ranges import RANGES
from agentserve.dialects.refusals import in_clients_fields
from agentserve.errors import EngineRefused
from tests.scripted import asked, post
from tests.serving import Served
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
every_path = pytest.mark.parametrize("path", BODIES)

SCHEMA = {"type": "integer", "minimum": -(10**30)}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    "/v1/messages": ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "/v1/responses": ("text.format", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
}
"""Each dialect's own field for the form of an answer, with a schema that no engine is told."""

WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 7),
    ("top_k", -5),
    ("top_k", 10**20),
    ("min_p", 5),
    ("seed", 2**63),
    ("presence_penalty", 99),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("min_tokens", 10**30),
    ("priority", 10**30),
    ("priority", -(10**30)),
    ("allowed_token_ids", []),
    ("allowed_token_ids[1]", [0, -1]),
    ("stop_token_ids[0]", [10**25]),
    ("logit_bias", {"9" * 30: 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("bad_words", ["a", ""]),
    ("structured_outputs", {"json": SCHEMA}),
    ("vllm_xargs", {"x": [{"y": 2**64}]}),
]
GOOD: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 2),
    "top_p": (0.001, 1),
    "top_k": (-1, 0, 2**63 - 1),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.001, 1e9),
    "min_tokens": (0, 8),
    "priority": (-(2**63), 2**63 - 1),
}


def check_named(path: str, body: dict[str, Any], param: str) -> None:
    """The error names the field: in the message, and where the dialect has a `param`, there."""
    assert param in body["error"]["message"]
    assert len(body["error"]["message"]) < 200
    if path != "/v1/messages":
        assert body["error"]["param"] == param


@every_path
async def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(served: Served, upstream: Upstream, path: str) -> None:
    own, fields = FORMATS[path]
    for param, sent in [*((param, {param.partition("[")[0]: value}) for param, value in WRONG), (own, fields)]:
        refused = await post(served.url + path, {**BODIES[path], **sent})
        assert refused.status == 400, (param, sent)
        check_named(path, refused.body, param)
    assert not asked(upstream)


async def test_the_ends_of_every_range_are_good(served: Served, upstream: Upstream) -> None:
    assert set(GOOD) == set(RANGES)
    for number in range(3):
        fields = {name: values[min(number, len(values) - 1)] for name, values in GOOD.items()}
        reply = await post(f"{served.url}/v1/messages", {**BODIES["/v1/messages"], **fields, "logit_bias": {"2147483647": -100, "0": 1}})
        assert reply.status == 200, reply.body
        sent = asked(upstream)[-1].body
        assert {name: sent["sampling_params"].get(name, sent.get(name)) for name in fields} == fields


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("min_p must be in [0, 1], got 5.0.", None, ("min_p", "min_p must be in [0, 1], got 5.0.")),
        ("top_k must be at least 1.", "body.sampling_params.top_k", ("top_k", "top_k must be at least 1.")),
        ("can't serialize ints < -2**63 or > 2**64 - 1", None, (None, "the request holds an integer beyond 64 bits")),
        ("token_id(s) [7] in logit_bias contain out-of-vocab token ids.", "logit_bias", ("logit_bias", "token_id(s) [7] in logit_bias")),
        ("Invalid JSON schema: 'banana' is no type", None, ("text.format", "Invalid JSON schema: 'banana' is no type")),
        ("extra_args integers must be small.", "extra_args", ("vllm_xargs", "extra_args integers")),
        (
            "1 validation error:\n  {'type': 'value_error', 'loc': 'body.sampling_params', 'msg': 'Value error, Expected `int`'}",
            "body.sampling_params",
            (None, "the request: Expected `int`"),
        ),
        (
            "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.priority', 'msg': \"it isn't an int\", 'url': 'https://errors'}",
            "body.priority",
            ("priority", "priority: it isn't an int"),
        ),
        (
            "1 validation error for Chat\nmessages.0.content.1.image_url\n  Input should be a dictionary [type=dict_type, input_type=int]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/dict_type",
            None,
            ("input", "input: Input should be a dictionary"),
        ),
        ("the prompt is odd", None, (None, "the prompt is odd")),
    ],
)
def test_what_the_engine_refuses_is_told_in_the_clients_fields(message: str, param: str | None, told: tuple[str | None, str]) -> None:
    names = {"structured_outputs": "text.format", "messages": "input"}
    options = TurnOptions(sampling={"min_p": 5, "structured_outputs": {"json": {}}, "logit_bias": {"7": 1}}, names=names)
    error = in_clients_fields(EngineRefused(message, status=400, param=param), options)
    assert (error.param, error.message[: len(told[1])]) == told
    assert "pydantic" not in error.message
    assert "'loc'" not in error.message


def test_a_grammar_that_only_the_tools_can_have_caused_is_the_tools() -> None:
    refused = EngineRefused("Invalid JSON schema", status=400)
    assert in_clients_fields(refused, TurnOptions(tools=ToolChoice("required"))).param == "tools"
    busy = EngineRefused("no grammar now", status=503)
    assert in_clients_fields(busy, TurnOptions(tools=ToolChoice("required"))).param is None


@every_path
async def test_an_engines_refusal_reaches_the_client_with_its_own_field(served: Served, upstream: Upstream, path: str) -> None:
    own, fields = FORMATS[path]
    kind = "'banana' is no type"
    upstream.script(Script(status=400, message=f"Invalid JSON schema: {kind}"))
    sent = replaced(fields, SCHEMA, {"type": "banana"})
    refused = await post(served.url + path, {**BODIES[path], **sent})
    assert (refused.status, kind in refused.body["error"]["message"]) == (400, True)
    if path != "/v1/messages":
        assert refused.body["error"]["param"] == own


def replaced(value: Any, old: Any, new: Any) -> Any:
    if value == old:
        return new
    return {key: replaced(one, old, new) for key, one in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": 5}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "video_url", "video_url": []}, "video_url"),
        ({"type": "input_audio", "input_audio": "x"}, "input_audio"),
    ],
)
async def test_media_in_no_form_are_refused_by_their_place(served: Served, upstream: Upstream, part: Any, param: str) -> None:
    content = [{"type": "text", "text": "What?"}, part]
    refused = await post(f"{served.url}/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert refused.status == 400
    assert refused.body["error"]["param"] == f"messages[0].content[1].{param}"
    assert not asked(upstream)


@pytest.mark.parametrize("source", [5, {"type": "url", "url": 5}, {"type": "base64", "media_type": "image/png", "data": 5}, None])
async def test_images_in_no_form_are_refused_in_messages(served: Served, upstream: Upstream, source: Any) -> None:
    content = [{"type": "image", "source": source}]
    refused = await post(f"{served.url}/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": content}]})
    assert (refused.status, refused.body["error"]["type"]) == (400, "invalid_request_error")
    assert "image" in refused.body["error"]["message"]
    assert not asked(upstream)


@pytest.mark.parametrize(
    ("path", "tool", "param"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
        ("/v1/messages", {"name": "", "input_schema": {}}, "tools[1].name"),
        ("/v1/responses", {"type": "function", "name": ""}, "tools"),
    ],
)
async def test_a_tool_without_a_name_is_refused(served: Served, upstream: Upstream, path: str, tool: Any, param: str) -> None:
    named = {**tool, "function": {"name": "f"}} if "function" in tool else {**tool, "name": "f"}
    refused = await post(served.url + path, {**BODIES[path], "tools": [named, tool]})
    assert refused.status == 400
    assert "name" in refused.body["error"]["message"]
    assert param in (refused.body["error"].get("param"), refused.body["error"]["message"].split()[0])
    assert (await post(served.url + path, {**BODIES[path], "tools": [named]})).status == 200
