"""Anthropic's routes over the scripted upstream: the grammar of the stream, token counts, errors, and prompts that stay exact."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import msgspec
import pytest

from model.conversation import Json, ToolCall
from tests.processes import wait_until
from tests.scripted import Posted, asked, assert_nothing_is_held, post, starts_with
from tests.serving import Served, serving
from tests.upstream import FormatRenderer, Script, Upstream, in_thread

pytestmark = pytest.mark.anyio

SYSTEM = "You are the coding agent of a shop.\n" * 30
TOOLS: list[dict[str, Any]] = [
    {
        "name": "read_file",
        "description": "Read a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    }
]
DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json", "signature_delta": "signature"}
DELTAS_OF = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def echo(body: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": body["content"]}


def results(body: dict[str, Any], text: str) -> dict[str, Any]:
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    return user([{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call in calls])


async def ask(served: Served, *messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> Posted:
    return await post(f"{served.url}/v1/messages", {"max_tokens": 512, "messages": messages, **fields}, headers)


def rebuild(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; asserts the grammar on the way."""
    events = [event for event in events if event["type"] != "ping"]
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    opened: dict[str, Any] | None = None
    texts: dict[str, str] = {}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None
            assert event["index"] == len(message["content"])
            opened, texts = event["content_block"], {}
        elif event["type"] == "content_block_delta":
            assert opened is not None
            kind = event["delta"]["type"]
            assert kind in DELTAS_OF[opened["type"]]
            assert "signature" not in texts, "nothing follows a signature"
            field = DELTA_FIELDS[kind]
            texts[field] = texts.get(field, "") + event["delta"][field]
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"])}
            assert opened is not None
            arguments = texts.pop("partial_json", None)
            message["content"].append({**opened, **texts, **({"input": msgspec.json.decode(arguments)} if arguments else {})})
            opened = None
    assert opened is None
    return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}


def random_script(random: Random) -> Script:
    words = ["one ", "zwei, ", "三", "🙂", "\n\n", "<b>", "{", '"', "\\", "]~b]"]

    def text() -> str:
        return "x" + "".join(random.choices(words, k=random.randrange(1, 12))) + "y"

    def value(depth: int) -> Json:
        plain: list[Json] = [text(), random.randrange(-(10**6), 10**20), True, 2.5]
        return random.choice(plain) if depth == 0 or random.random() < 0.6 else {"a": value(depth - 1), "b": [value(depth - 1)]}

    calls = tuple(ToolCall("", random.choice(["read_file", "other"]), {"k": value(2)}) for _ in range(random.choice([0, 0, 1, 3])))
    return Script(
        say=random.choice(["", text()]), reason=random.choice([None, text()]), calls=calls, ids_per_chunk=random.choice([1, 2, 7, 0])
    )


@pytest.mark.case("SSE-08")
async def test_streams_keep_the_grammar_and_add_up_to_what_is_sent_whole(served: Served, upstream: Upstream) -> None:
    random = Random(11)
    for _ in range(40):
        script = random_script(random)
        upstream.script(script, script)
        streamed = rebuild((await ask(served, user("go"), tools=TOOLS, stream=True)).events)
        whole = (await ask(served, user("go"), tools=TOOLS)).body
        for block in (*streamed["content"], *whole["content"]):
            if block["type"] == "tool_use":
                assert block.pop("id")
        assert streamed["content"] == whole["content"]
        assert streamed["stop_reason"] == whole["stop_reason"] == ("tool_use" if script.calls else "end_turn")
        said = {block["type"]: block.get("text", block.get("thinking")) for block in whole["content"]}
        assert (said.get("thinking"), said.get("text", "")) == (script.reason, script.say)
        assert [block["name"] for block in whole["content"] if block["type"] == "tool_use"] == [call.name for call in script.calls]


@pytest.mark.case("SSE-08")
async def test_a_call_without_arguments_is_an_empty_object(served: Served, upstream: Upstream) -> None:
    upstream.script(*[Script(say="", calls=(ToolCall("", "list", {}),))] * 2)
    streamed = await ask(served, user("go"), stream=True)
    fragments = [event["delta"]["partial_json"] for event in streamed.events if event["type"] == "content_block_delta"]
    assert "".join(fragments) == "{}"
    assert (await ask(served, user("go"))).body["content"][0]["input"] == {}


@pytest.mark.case("SSE-08")
@pytest.mark.parametrize("stream", [True, False])
async def test_token_counts_add_up_to_the_prompt(served: Served, upstream: Upstream, stream: bool) -> None:
    messages = [user("first " * 100)]
    for _ in range(3):
        reply = await ask(served, *messages, system=SYSTEM, tools=TOOLS, stream=stream)
        body = rebuild(reply.events) if stream else reply.body
        usage = body["usage"]
        prompt = asked(upstream)[-1]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == len(prompt.prompt_ids)
        assert usage["cache_read_input_tokens"] == prompt.num_cached_tokens
        assert usage["output_tokens"] == len(prompt.generated_ids)
        messages += [echo(body), user("more")]
    assert usage["cache_read_input_tokens"] > 0


async def test_cached_tokens_that_the_engine_does_not_report_are_absent_and_not_zero(renderer: FormatRenderer, model_folder: Path) -> None:
    with in_thread(Upstream(renderer=renderer)) as upstream, serving(upstream.url, model_folder) as served:
        usage = (await ask(served, user("hi"))).body["usage"]
        assert usage["input_tokens"] == len(asked(upstream)[0].prompt_ids)
        assert not {"cache_read_input_tokens", "cache_creation_input_tokens"} & set(usage)


@pytest.mark.case("TOK-13", "PAR-06")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_a_turn_is_named(served: Served, upstream: Upstream, stream: bool) -> None:
    upstream.script(*[Script(say="The quick brown fox jumps")] * 3)
    cases: list[tuple[dict[str, Any], tuple[str, str | None], str | None]] = [
        ({"stop_sequences": ["zzz", "own fox"]}, ("stop_sequence", "own fox"), "The quick br"),
        ({"max_tokens": 2}, ("max_tokens", None), None),
        ({}, ("end_turn", None), "The quick brown fox jumps"),
    ]
    for fields, end, text in cases:
        reply = await ask(served, user("go"), stream=stream, **fields)
        body = rebuild(reply.events) if stream else reply.body
        assert (body["stop_reason"], body["stop_sequence"]) == end
        assert text is None or body["content"] == [{"type": "text", "text": text}]


@pytest.mark.case("PFX-07", "PFX-08", "TOK-11")
async def test_a_session_with_tools_reasoning_marks_and_late_system_messages_stays_exact(served: Served, upstream: Upstream) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [user([{"type": "text", "text": "Fix it.", **mark}]), {"role": "system", "content": "used: 1 %"}]
    for number in range(4):
        call = ToolCall("", "read_file", {"path": f"{number}.py", "lines": number})
        upstream.script(Script(say=f"Reading {number}.", reason="Look.\n", calls=(call, call)), Script(say="Done.  \n\n"))
        system: Any = [{"type": "text", "text": SYSTEM, **mark}] if number % 2 else SYSTEM
        stream = bool(number % 2)
        for more in ("results", "text"):
            reply = await ask(served, *messages, system=system, tools=TOOLS, stream=stream)
            assert reply.headers["x-agentserve-turn"] == ("first" if len(messages) == 2 else "exact")
            body = rebuild(reply.events) if stream else reply.body
            if more == "results":
                messages += [echo(body), results(body, "line")]
            else:
                trimmed = [{**block, "text": block["text"].strip()} for block in body["content"]]
                messages[0] = user("Fix it.")
                messages += [{"role": "assistant", "content": trimmed}, user([{"type": "text", "text": "Next. ", **mark}])]
                messages.append({"role": "system", "content": [{"type": "text", "text": f"used: {number} %"}]})
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))


@pytest.mark.case("TOK-08", "TOK-09")
async def test_thinking_may_come_back_or_be_left_out(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="It returns 0.", reason="Check the empty case."))
    body = (await ask(served, user("go"))).body
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    assert body["content"][0]["signature"]
    for form in (body["content"], body["content"][1:]):
        reply = await ask(served, user("go"), {"role": "assistant", "content": form}, user("on"))
        assert reply.headers["x-agentserve-turn"] in ("exact", "retry")
        assert starts_with(asked(upstream)[-1], asked(upstream)[0])


@pytest.mark.case("HTTP-06")
async def test_counted_tokens_are_those_of_the_turn_and_counting_leaves_nothing(served: Served, upstream: Upstream) -> None:
    url = f"{served.url}/v1/messages/count_tokens"
    messages = [user("first " * 50)]
    for number in range(3):
        before = served.server.namespaces.num_tokens
        counted = await post(url, {"messages": messages, "system": SYSTEM, "tools": TOOLS})
        again = await post(url, {"messages": messages, "system": SYSTEM, "tools": TOOLS})
        assert counted.body == again.body
        assert served.server.namespaces.num_tokens == before
        assert len(asked(upstream)) == number
        assert served.server.namespaces.num_sessions == (1 if number else 0)
        reply = await ask(served, *messages, system=SYSTEM, tools=TOOLS)
        assert reply.headers["x-agentserve-turn"] == ("exact" if number else "first")
        assert counted.body == {"input_tokens": len(asked(upstream)[-1].prompt_ids)}
        messages += [echo(reply.body), user([{"type": "text", "text": "more"}])]


@pytest.mark.case("SES-02")
async def test_agents_that_share_a_user_id_are_sessions_of_one_parent_and_do_not_wait_for_each_other(
    served: Served, upstream: Upstream
) -> None:
    upstream.script(Script(say="slow", ttft_seconds=1.0))
    shared = {"metadata": {"user_id": "user_1_account__session_77"}}
    slow = asyncio.ensure_future(ask(served, user("slow"), system="main", **shared))
    await asyncio.to_thread(wait_until, lambda: len(asked(upstream)) == 1, seconds=5)
    fast = await ask(served, user("fast"), system="other", **shared)
    assert not slow.done()
    names = {reply.headers["x-agentserve-session"] for reply in (fast, await slow)}
    assert len(names) == 2
    assert {served.server.namespaces.of(None).sessions[name].parent for name in names} == {"77"}


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", b"{", 400, "invalid_request_error"),
        ("/v1/messages", b'{"messages":[{"role":"user","content":"\xff\xfe"}],"max_tokens":1}', 400, "invalid_request_error"),
        ("/v1/messages", {"messages": [user("hi")]}, 400, "invalid_request_error"),
        ("/v1/messages", {"messages": [user("hi")], "max_tokens": 1, "model": "other"}, 404, "not_found_error"),
        ("/v1/messages", b"x" * 4096, 413, "request_too_large"),
        ("/v1/messages/count_tokens", {"messages": []}, 400, "invalid_request_error"),
        ("/v1/messages/other", {}, 404, "not_found_error"),
    ],
)
async def test_errors_have_anthropics_form(upstream: Upstream, model_folder: Path, path: str, body: Any, status: int, kind: str) -> None:
    with serving(upstream.url, model_folder, limits_body_bytes=2048) as served:
        reply = await post(served.url + path, body)
        assert (reply.status, reply.body["type"], reply.body["error"]["type"]) == (status, "error", kind)
        assert reply.body["error"]["message"]
        assert not asked(upstream)
        assert served.server.namespaces.num_tokens == 0


@pytest.mark.case("PAR-02", "PAR-03")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_know(
    renderer: FormatRenderer, model_folder: Path, stream: bool
) -> None:
    with in_thread(Upstream(renderer=renderer, max_model_len=1024)) as upstream, serving(upstream.url, model_folder) as served:
        first = await ask(served, user("hi"), max_tokens=32_000, stream=stream)
        assert first.status == 200
        assert asked(upstream)[0].body["sampling_params"]["max_tokens"] == 1024 - len(asked(upstream)[0].prompt_ids)
        refused = await ask(served, user("word " * 3000), stream=stream)
        assert refused.status == 400
        error = refused.body["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(" tokens > 1024 maximum")
        assert_nothing_is_held(served)


async def test_a_stream_that_breaks_ends_in_an_error_event(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="one two three four", error_after_chunks=2), Script(status=503))
    broken = await ask(served, user("go"), stream=True)
    assert (broken.types[0], broken.types[-1]) == ("message_start", "error")
    assert broken.events[-1]["error"]["type"] == "api_error"
    refused = await ask(served, user("go"), stream=True)
    assert (refused.status, refused.body["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.case("SSE-03")
async def test_pings_break_the_silence_in_the_queue_and_in_prefill(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, limits_keep_alive_seconds=0.1, limits_running_turns=1) as served:
        upstream.script(Script(say="late", ttft_seconds=0.6), Script(say="later", ttft_seconds=0.6), Script(status=400))
        first, second = await asyncio.gather(*(ask(served, user(name), stream=True) for name in ("one", "two")))
        assert sorted(reply.types.count("ping") >= 8 for reply in (first, second)) == [False, True]
        for reply in (first, second):
            assert reply.types[:3] == ["ping"] * 3
            assert rebuild(reply.events)["stop_reason"] == "end_turn"
        assert (await ask(served, user("bad"), stream=True)).status == 400


async def test_keys_may_come_in_either_header(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["key-a"]) as served:
        for headers in ({"x-api-key": "key-a"}, {"authorization": "Bearer key-a"}):
            assert (await ask(served, user("hi"), headers=headers)).status == 200
        refused = await ask(served, user("hi"), headers={"x-api-key": "other"})
        assert (refused.status, refused.body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.case("SSE-08")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_client_reads_turns_counts_and_errors(served: Served, upstream: Upstream, stream: bool) -> None:
    call = ToolCall("", "read_file", {"path": "ä.py", "lines": 3})
    upstream.script(Script(say="Reading.", reason="Look.", calls=(call,)), Script(say="Done."))
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [user("go")]
        for expected in ("tool_use", "end_turn"):
            fields: dict[str, Any] = {"model": "demo-model", "max_tokens": 200, "messages": messages, "tools": TOOLS}
            counted = await client.messages.count_tokens(**{name: value for name, value in fields.items() if name != "max_tokens"})
            if stream:
                async with client.messages.stream(**fields) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**fields)
            assert message.stop_reason == expected
            usage = message.usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(asked(upstream)[-1].prompt_ids)
            calls = [block for block in message.content if block.type == "tool_use"]
            assert [block.input for block in calls] == ([call.arguments] if expected == "tool_use" else [])
            messages.append({"role": "assistant", "content": [block.model_dump(mode="json", by_alias=True) for block in message.content]})
            messages.append(user([{"type": "tool_result", "tool_use_id": block.id, "content": "text"} for block in calls]))
        assert starts_with(asked(upstream)[1], asked(upstream)[0])
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
