"""Three dialects over one conversation and one ledger: what is said in one is understood in the others, and no body breaks a route."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.errors import ClientError
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem
from tests.dialect_forms import FORMS, Body, Form
from tests.processes import wait_until
from tests.scripted import asked, post, starts_with
from tests.serving import Served, chat
from tests.upstream import Script, Upstream

NAMES = ["chat", "messages", "responses"]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
spoken = texts.filter(bool)
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
objects = st.dictionaries(texts, json_values, max_size=3)
tools = st.builds(Tool, spoken, texts, objects)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Head, list[Item]]:
    head = Head(draw(texts), tuple(draw(st.lists(tools, max_size=2))))
    items: list[Item] = [UserItem(draw(texts))]
    for number in range(draw(st.integers(0, 3))):
        calls = tuple(ToolCall(f"c{number}{index}", draw(spoken), draw(objects)) for index in range(draw(st.sampled_from([0, 0, 1, 2]))))
        items.append(AssistantItem(draw(texts), draw(st.none() | spoken), calls))
        results = [ToolResultItem(call.id, draw(texts)) for call in calls if draw(st.sampled_from([True, True, False]))]
        items += results
        if not results or draw(st.booleans()):
            items.append(draw(st.builds(UserItem, texts) | st.builds(SystemItem, texts)))
    return head, items


def read(form: Form, body: bytes) -> tuple[Head, list[Item]]:
    conversation = form.conversation(body)
    return conversation.head(), [item for _, step in conversation.steps(0) for item in step]


@given(conversations())
@settings(max_examples=200, deadline=None)
def test_a_conversation_reads_the_same_in_every_dialect(conversation: tuple[Head, list[Item]]) -> None:
    for form in FORMS:
        assert read(form, json.dumps(form.body(*conversation)).encode()) == conversation


@given(conversations(), st.data())
@settings(max_examples=100, deadline=None)
def test_reading_on_from_any_step_gives_the_rest(conversation: tuple[Head, list[Item]], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    found = form.conversation(json.dumps(form.body(*conversation)).encode())
    steps = list(found.steps(0))
    number = data.draw(st.sampled_from([number for number, (end, _) in enumerate(steps) if end is not None]))
    end = steps[number][0]
    assert end is not None
    assert list(found.steps(end)) == steps[number + 1 :]


@pytest.mark.case("INP-07", "INP-09", "INP-10")
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize(
    "items",
    [
        [UserItem("a"), UserItem("b")],
        [AssistantItem("x"), UserItem("b")],
        [UserItem("a"), SystemItem("late")],
        [UserItem("a"), AssistantItem(""), UserItem("b")],
        [UserItem("")],
        [UserItem("a"), ToolResultItem("nope", "orphan")],
        [UserItem("a"), AssistantItem("", None, (ToolCall("c1", "f", {}),)), UserItem("never mind")],
        [
            UserItem("a"),
            AssistantItem("", None, (ToolCall("d", "f", {"p": 1}), ToolCall("d", "f", {"p": 2}))),
            *[ToolResultItem("d", "x")] * 2,
        ],
    ],
)
def test_histories_of_odd_order_are_read_as_they_stand(form: Form, items: list[Item]) -> None:
    assert read(form, json.dumps(form.body(Head("s"), items)).encode()) == (Head("s"), items)


@pytest.mark.case("INP-10")
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("items", [[], [SystemItem("s")], [UserItem("a"), AssistantItem("pre")]])
def test_a_history_that_asks_nothing_is_refused(form: Form, items: list[Item]) -> None:
    with pytest.raises(ClientError) as refused:
        read(form, json.dumps(form.body(Head(), items)).encode())
    assert (refused.value.status, refused.value.param) == (400, "input" if form is FORMS[2] else "messages")


def places(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all parts of a JSON value."""
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*path, key))


def change(data: st.DataObject, body: Body) -> None:
    """Replace, drop or repeat one part of `body`."""
    *above, last = data.draw(st.sampled_from(list(places(body))))
    parent: Any = body
    for key in above:
        parent = parent[key]
    match data.draw(st.sampled_from(["replace", "drop", "repeat"])):
        case "replace":
            parent[last] = data.draw(json_values)
        case "drop":
            del parent[last]
        case "repeat" if isinstance(parent, list) and isinstance(last, int):
            parent.insert(0, copy.deepcopy(parent[last]))


EXTRAS: Body = {
    "max_output_tokens": 4,
    "metadata": {"user_id": "u"},
    "output_config": {"format": None},
    "previous_response_id": None,
    "reasoning": {"effort": "low"},
    "response_format": {"type": "text"},
    "session_id": "s",
    "stop": ["x"],
    "stop_sequences": ["x"],
    "store": True,
    "stream": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
}


@given(conversations(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_body_is_read_or_refused(conversation: tuple[Head, list[Item]], data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    body = copy.deepcopy({**form.body(*conversation), **EXTRAS})
    for _ in range(data.draw(st.integers(1, 3))):
        change(data, body)
    with suppress(ClientError):  # anything else that is raised would be a server error
        read(form, json.dumps(body).encode())


@pytest.mark.anyio
@pytest.mark.parametrize("order", [(0, 1, 2, 0), (1, 2, 0, 1), (2, 0, 1, 2)], ids=["chat first", "messages first", "responses first"])
async def test_a_session_goes_on_from_dialect_to_dialect(served: Served, upstream: Upstream, order: tuple[int, ...]) -> None:
    schema: Any = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
    head = Head("You are the coding agent of a shop.\n" * 30, (Tool("read_file", "Read a file.", schema),))
    items: list[Item] = [UserItem("Fix the total.")]
    turns = []
    for number, form in enumerate(FORMS[index] for index in order * 2):
        calls = tuple(ToolCall("", "read_file", {"path": f"{name}.py", "lines": number}) for name in "ab")
        upstream.script(Script(say=f"Reading {number}. ünï", reason="Look.\n", calls=calls if number % 2 == 0 else ()))
        reply = await post(served.url + form.path, form.body(head, items))
        turns.append(reply.headers["x-agentserve-turn"])
        said = form.said(reply.body)
        assert (said.text, said.reasoning, len(said.calls)) == (f"Reading {number}. ünï", "Look.\n", 2 if number % 2 == 0 else 0)
        items.append(said)
        items += [ToolResultItem(call.id, f"text {number}") for call in said.calls] or [UserItem("Next.")]
    assert turns == ["first", *["exact"] * 7]
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))
    assert served.server.namespaces.num_sessions == 1


@pytest.mark.case("TOK-14")
@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
async def test_a_call_that_was_cut_is_no_tool_call_and_can_be_replayed(served: Served, upstream: Upstream, form: Form) -> None:
    upstream.script(Script(say="", calls=(ToolCall("", "run_cmd", {"cmd": "echo " + "a b c " * 100}),)))
    items: list[Item] = [UserItem("Run it.")]
    schema: Any = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    head = Head("s", (Tool("run_cmd", "Run.", schema),))
    reply = await post(served.url + form.path, {**form.body(head, items), "max_tokens": 100, "max_output_tokens": 100})
    body = reply.body
    ends = {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}
    assert ends[NAMES[FORMS.index(form)]] in (
        body.get("status"),
        body.get("stop_reason"),
        body.get("choices", [{}])[0].get("finish_reason"),
    )
    said = form.said(body)
    assert str(said.calls[0].arguments).startswith("{'cmd': 'echo a b")
    items += [said, ToolResultItem(said.calls[0].id, "error: bad arguments"), UserItem("try again")]
    again = await post(served.url + form.path, form.body(head, items))
    assert again.headers["x-agentserve-turn"] == "exact"
    assert starts_with(asked(upstream)[1], asked(upstream)[0])


@pytest.mark.case("PAR-08")
@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
async def test_fields_that_say_nothing_to_the_model_change_no_token(served: Served, upstream: Upstream, form: Form) -> None:
    body = form.body(Head("s"), [UserItem("hi")])
    silent: list[Body] = [
        {},
        {"tools": None},
        {"metadata": {"a": "b"}},
        {"user": "u1"},
        {"seed": 1},
        {"service_tier": "auto"},
        {"unknown_x": 1},
    ]
    for extra in (*silent, {"tool_choice": {"type": "auto"} if form.path == "/v1/messages" else "auto"}):
        assert (await post(served.url + form.path, {**body, **extra})).status == 200
    assert len({request.prompt_ids for request in asked(upstream)}) == 1


@pytest.mark.slow
@pytest.mark.case("SSE-01")
@pytest.mark.anyio
async def test_bytes_split_anywhere_give_whole_characters_in_every_stream(served: Served, upstream: Upstream) -> None:
    say, path = "北京 café 🛒 “q”", "目录/ü🙂.py"
    call = ToolCall("", "read_file", {"path": path})
    for size in range(1, 8):
        upstream.script(*[Script(say=say, calls=(call,), bytes_per_write=size)] * 3)
        message = (await chat(served.url, [{"role": "user", "content": "go"}], stream=True)).message
        assert (message["content"], path in message["tool_calls"][0]["function"]["arguments"]) == (say, True)
        messages = await post(f"{served.url}/v1/messages", {**FORMS[1].body(Head(), [UserItem("go")]), "stream": True})
        deltas = [event["delta"] for event in messages.events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == say
        assert path in "".join(delta.get("partial_json", "") for delta in deltas)
        responded = await post(f"{served.url}/v1/responses", {"input": "go", "stream": True})
        said = FORMS[2].said(responded.events[-1]["response"])
        assert (said.text, said.calls[0].arguments) == (say, {"path": path})


@pytest.mark.slow
@pytest.mark.case("SSE-05")
@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
async def test_a_client_that_leaves_stops_the_engine(served: Served, upstream: Upstream, form: Form, stream: bool) -> None:
    upstream.script(Script(say="word " * 500, itl_seconds=0.05))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await post(served.url + form.path, {**form.body(Head(), [UserItem("go")]), "max_tokens": 900, "stream": stream})
    left = time.monotonic()
    assert await asyncio.to_thread(wait_until, lambda: asked(upstream)[0].aborted_at is not None, seconds=2)
    assert (asked(upstream)[0].aborted_at or left) - left < 1


def raw_bodies() -> dict[str, bytes]:
    """Bodies that are wrong as bytes, or odd as JSON."""
    deep = b"[" * 20_000 + b"]" * 20_000
    return {
        "empty": b"",
        "not JSON": b"{",
        "not UTF-8": b'{"messages":[{"role":"user","content":"\xff"}],"input":"\xff","max_tokens":1}',
        "deep": b'{"messages":[],"input":[],"max_tokens":1,"x":' + deep + b"}",
        "deep tools": b'{"messages":[{"role":"user","content":"x"}],"input":"x","max_tokens":1,"tools":' + deep + b"}",
        "NaN": b'{"messages":[{"role":"user","content":"x"}],"input":"x","max_tokens":1,"temperature":NaN}',
        "too large": b'{"messages":[{"role":"user","content":"x"}],"input":"x","max_tokens":1,"temperature":1e999}',
        "a list": b"[]",
        "null": b"null",
    }


@pytest.mark.case("INP-05", "INP-06", "HTTP-06")
@pytest.mark.anyio
async def test_no_body_is_a_server_error(served: Served) -> None:
    for path in (*(form.path for form in FORMS), "/v1/messages/count_tokens"):
        for name, body in raw_bodies().items():
            reply = await post(served.url + path, body)
            assert 400 <= reply.status < 500, (path, name)
            assert reply.body["error"]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
async def test_lone_surrogates_and_repeated_keys_are_served(served: Served, upstream: Upstream, form: Form) -> None:
    body = json.dumps(form.body(Head("s"), [UserItem("mark")])).encode()
    assert (await post(served.url + form.path, body.replace(b'"mark"', b'"\\ud800mark"'))).status == 200
    assert "\ufffdmark" in upstream.renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode()
    repeated = body.replace(b'"content": "mark"', b'"content": "first", "content": "mark"')
    assert (await post(served.url + form.path, repeated)).status == 200
    assert "first" not in upstream.renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode()


def test_changed_bodies_never_break_a_route(served: Served) -> None:
    """The same over HTTP, where everything behind the parser has its say too."""
    with closing(HTTPConnection(served.url.removeprefix("http://"), timeout=20)) as connection:

        @given(conversations(), st.data())
        @settings(max_examples=60, deadline=None)
        def check(conversation: tuple[Head, list[Item]], data: st.DataObject) -> None:
            form = data.draw(st.sampled_from(FORMS))
            body = copy.deepcopy({**form.body(*conversation), **EXTRAS})
            change(data, body)
            connection.request("POST", form.path, json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200 or 400 <= response.status < 500, answer

        check()
