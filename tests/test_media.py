"""Images: the engine's own chat route gets them in its form, from every dialect, and its answer comes back as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from agentserve.dialects.media_forms import chat_media, messages_media, responses_media
from agentserve.errors import Unsupported
from model.conversation import ToolCall
from tests.processes import wait_until
from tests.real_engine import RealEngine
from tests.scripted import post
from tests.serving import Served, chat, serving
from tests.upstream import LoggedRequest, Script, Upstream

pytestmark = pytest.mark.anyio

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "What is it?"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
CALL = ToolCall("call_7", "look", {"path": "a.png"})
ANSWER = Script(say="A dot.", reason="Small.", calls=(CALL,))

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "You see."}, {"role": "user", "content": [TEXT, IMAGE]}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 99,
        "temperature": 0.5,
    },
    "/v1/messages": {
        "system": "You see.",
        "messages": [{"role": "user", "content": [TEXT, {"type": "image", "source": SOURCE}]}],
        "tools": [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}],
        "max_tokens": 99,
        "temperature": 0.5,
    },
    "/v1/responses": {
        "instructions": "You see.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": URL}]}],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 99,
        "temperature": 0.5,
    },
}
PATHS = pytest.mark.parametrize("path", BODIES)


def passed(upstream: Upstream) -> list[LoggedRequest]:
    return [request for request in upstream.requests if request.path == "/v1/chat/completions"]


def without(value: Any, *names: str) -> Any:
    return {name: one for name, one in value.items() if name not in names}


@pytest.mark.case("INP-11")
@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_gets_the_same_chat_from_every_dialect(served: Served, upstream: Upstream, path: str, stream: bool) -> None:
    upstream.script(ANSWER)
    headers = {"x-agentserve-session": "s/1"}
    if path == "/v1/chat/completions":
        reply = await chat(served.url, stream=stream, headers=headers, **BODIES[path])
        seen = reply.headers
    else:
        seen = (await post(served.url + path, {**BODIES[path], "stream": stream}, headers)).headers
    [sent] = passed(upstream)
    assert sent.headers["X-Session-ID"] == "s/1"
    assert sent.body == {
        "model": "demo-model",
        "messages": [{"role": "system", "content": "You see."}, {"role": "user", "content": [TEXT, IMAGE]}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "max_tokens": 99,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not stream:
        assert seen["x-agentserve-turn"] == "passed"
        assert "x-agentserve-ceiling-tokens" not in seen
    assert served.server.namespaces.of(None).sessions["s/1"].num_by_kind == {"passed": 1}


async def test_the_answer_comes_back_in_each_dialect(served: Served, upstream: Upstream) -> None:
    upstream.script(ANSWER, ANSWER, ANSWER, ANSWER)
    whole = await chat(served.url, stream=False, **BODIES["/v1/chat/completions"])
    streamed = await chat(served.url, stream=True, **BODIES["/v1/chat/completions"])
    for reply in (whole, streamed):
        assert (reply.message["content"], reply.message["reasoning"]) == ("A dot.", "Small.")
        [call] = reply.message["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"path":"a.png"}'}
        assert reply.finish_reason == "tool_calls"
        assert reply.usage is not None
        assert reply.usage["agentserve"]["turn"] == "passed"
        assert reply.usage["prompt_tokens"] == len(passed(upstream)[0].prompt_ids)
    message = (await post(f"{served.url}/v1/messages", BODIES["/v1/messages"])).body
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"path": "a.png"}
    assert message["stop_reason"] == "tool_use"
    response = (await post(f"{served.url}/v1/responses", BODIES["/v1/responses"])).body
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]


@pytest.mark.case("INP-11")
async def test_hit_figures_know_nothing_of_them(served: Served, upstream: Upstream) -> None:
    await chat(served.url, stream=False, **BODIES["/v1/chat/completions"])
    assert served.server.books.totals.num_turns == 0
    assert served.server.namespaces.num_tokens == 0
    sample = served.server.metrics.registry.get_sample_value
    assert sample("agentserve_turns_total", {"kind": "passed"}) == 1
    assert sample("agentserve_prompt_tokens_total") == 0


async def test_a_conversation_stays_in_one_session_and_its_text_only_turns_are_exact(served: Served, upstream: Upstream) -> None:
    ask = BODIES["/v1/chat/completions"]["messages"]
    one = await chat(served.url, ask, stream=False)
    two = await chat(served.url, [*ask, one.message, {"role": "user", "content": "Sure?"}], stream=False)
    assert one.headers["x-agentserve-session"] == two.headers["x-agentserve-session"]
    assert two.turn == "passed"  # the image is still in its history
    other = await chat(served.url, [{"role": "user", "content": [{"type": "text", "text": 'No, it is "image_url".'}]}], stream=False)
    assert other.turn == "first"
    assert len(passed(upstream)) == 2


@pytest.mark.case("INP-11")
@PATHS
async def test_an_engine_that_takes_no_images_says_so_in_the_client_s_dialect(served: Served, upstream: Upstream, path: str) -> None:
    upstream.script(Script(status=400, message="At most 0 image(s) may be provided in one prompt."))
    reply = await post(served.url + path, BODIES[path])
    assert reply.status == 400
    assert "At most 0 image(s)" in reply.body["error"]["message"]
    assert (reply.body.get("type") == "error") == (path == "/v1/messages")


async def test_a_client_that_leaves_stops_the_engine(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="x" * 400, itl_seconds=0.05))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": "demo-model", "stream": True, **BODIES["/v1/chat/completions"]}
        stream: Any = await client.chat.completions.create(**fields)
        async for _ in stream:
            break
        await stream.close()
    assert wait_until(lambda: passed(upstream)[0].aborted_at is not None, seconds=1.5)


async def test_choices_and_stops_go_along_and_what_cannot_is_refused(served: Served, upstream: Upstream) -> None:
    body = BODIES["/v1/chat/completions"]
    await chat(served.url, stream=False, **body, stop=["END"], parallel_tool_calls=False, tool_choice="required")
    await chat(served.url, stream=False, **body, tool_choice={"type": "function", "function": {"name": "look"}})
    first, second = passed(upstream)
    assert (first.body["stop"], first.body["parallel_tool_calls"], first.body["tool_choice"]) == (["END"], False, "required")
    assert second.body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    for fields in ({"n": 2}, {"logprobs": True}, {"tool_choice": {"type": "function", "function": {"name": "other"}}}):
        assert (await post(f"{served.url}/v1/chat/completions", {**body, **fields})).status == 400
    assert len(passed(upstream)) == 2


def raws(values: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


def test_a_tool_that_shows_an_image_is_read_in_both_dialects() -> None:
    wanted = [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"path":"a"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "the picture"},
        {"role": "user", "content": [IMAGE]},
    ]
    assistant = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "c", "name": "look", "input": {"path": "a"}},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "the picture"}, {"type": "image", "source": SOURCE}],
    }
    history = [{"role": "user", "content": [TEXT]}, {"role": "assistant", "content": assistant}, {"role": "user", "content": [result]}]
    assert messages_media(msgspec.Raw(), raws(history)) == wanted
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is it?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"path":"a"}'},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "the picture"}, {"type": "input_image", "image_url": URL}],
        },
    ]
    assert responses_media(None, [bytes(raw) for raw in raws(items)]) == wanted


def test_text_alone_is_never_passed_on() -> None:
    spoken = {"role": "user", "content": 'Say "image_url", "image" and "input_image".'}
    named = {"role": "user", "content": [{"type": "text", "text": "x", "image": 1, "image_url": 2, "input_image": 3}]}
    for message in (spoken, named):
        assert chat_media(raws([message])) is None
        assert messages_media(msgspec.Raw(), raws([message])) is None
        assert responses_media(None, [bytes(raw) for raw in raws([message])]) is None


def test_media_without_a_form_in_chat_are_refused() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    with pytest.raises(Unsupported, match="document"):
        messages_media(msgspec.Raw(), raws([{"role": "user", "content": [pdf]}]))
    by_id = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
    with pytest.raises(Unsupported, match="image_url"):
        responses_media(None, [msgspec.json.encode(by_id)])
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Plain."}}
    assert messages_media(msgspec.Raw(), raws([{"role": "user", "content": [text]}])) == [
        {"role": "user", "content": [{"type": "text", "text": "Plain."}]}
    ]


@pytest.fixture(scope="module")
def real(engine: RealEngine) -> Iterator[Served]:
    with serving(engine.url, engine.model_folder, model_name="nano") as running:
        yield running


@pytest.mark.case("INP-11")
async def test_a_real_engine_without_eyes_refuses_and_goes_on(real: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {**BODIES["/v1/chat/completions"], "model": "nano"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**fields)
        assert "multimodal" in str(refused.value) or "image" in str(refused.value)
    async with anthropic.AsyncAnthropic(base_url=real.url, api_key="none", max_retries=0) as other:
        wanted: Any = {**without(BODIES["/v1/messages"], "temperature"), "model": "nano"}
        with pytest.raises(anthropic.BadRequestError):
            await other.messages.create(**wanted)
    reply = await chat(real.url, [{"role": "user", "content": "hi"}], stream=False, max_tokens=4, model="nano")
    assert reply.status == 200
