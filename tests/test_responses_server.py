"""The Responses routes over the scripted upstream: the grammar of the stream, stored responses, errors, and prompts that stay exact."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from model.conversation import ToolCall
from tests.scripted import Posted, asked, assert_nothing_is_held, post, starts_with
from tests.serving import Served, serving
from tests.upstream import FormatRenderer, Script, Upstream, in_thread

pytestmark = pytest.mark.anyio

SYSTEM = "You are the coding agent of a shop.\n" * 30
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    }
]
CALL = ToolCall("", "read_file", {"path": "ä.py", "lines": 3})
PART_OF = {"reasoning": "reasoning_text", "message": "output_text"}


async def ask(served: Served, given: Any, headers: dict[str, str] | None = None, **fields: Any) -> Posted:
    return await post(f"{served.url}/v1/responses", {"input": given, **fields}, headers)


async def fetch(method: str, url: str, headers: dict[str, str]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.request(method, url, headers=headers) as response:
        return response.status, await response.json()


def final(reply: Posted) -> dict[str, Any]:
    """The finished response of a stream or a whole answer."""
    response: dict[str, Any] = reply.events[-1]["response"] if reply.events else reply.body
    return response


def rebuild(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that a stream's deltas add up to; asserts the grammar on the way."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            text = ""
            assert event["item"]["status"] == "in_progress"
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            items[-1] = event["item"]
        elif kind.startswith("content_part."):
            assert event["part"]["type"] == PART_OF[item["type"]]
            assert event["part"]["text"] == text
        else:
            assert kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done")
            assert event.get("text", event.get("arguments")) == text
    return items


def parts(response: dict[str, Any]) -> list[tuple[str, Any]]:
    """Output items without their ids."""
    return [
        (item["type"], item["content"][0]["text"] if "content" in item else (item["name"], item["arguments"]))
        for item in response["output"]
    ]


@pytest.mark.case("SSE-09")
async def test_streamed_items_are_those_of_the_final_response_and_of_a_whole_answer(served: Served, upstream: Upstream) -> None:
    for script in (Script(say="Reading.", reason="Look.", calls=(CALL, CALL)), Script(say="", calls=(CALL,), ids_per_chunk=0), Script()):
        upstream.script(script, script)
        streamed = await ask(served, "go", tools=TOOLS, stream=True)
        assert streamed.types[-1] == "response.completed"
        response = final(streamed)
        assert response["output"] == rebuild(streamed.events)
        ids = [item["id"] for item in response["output"]]
        assert len(set(ids)) == len(ids)
        whole = await ask(served, "go", tools=TOOLS)
        assert parts(whole.body) == parts(response)
        assert whole.body["status"] == response["status"] == "completed"
        assert all(item["status"] == "completed" for item in response["output"])


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_is_that_of_the_engine(served: Served, upstream: Upstream, stream: bool) -> None:
    upstream.script(*[Script(say="one two three", reason="think about it")] * 2)
    for number in range(2):
        usage = final(await ask(served, "first " * 100, instructions=SYSTEM, stream=stream))["usage"]
        prompt = asked(upstream)[-1]
        assert usage["input_tokens"] == len(prompt.prompt_ids)
        assert usage["output_tokens"] == len(prompt.generated_ids)
        assert usage["total_tokens"] == len(prompt.prompt_ids) + len(prompt.generated_ids)
        assert usage["input_tokens_details"]["cached_tokens"] == prompt.num_cached_tokens
        assert 2 <= usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        assert bool(prompt.num_cached_tokens) == bool(number)


@pytest.mark.case("TOK-13")
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_cut_at_its_limit_is_incomplete(served: Served, upstream: Upstream, stream: bool) -> None:
    upstream.script(Script(say="one two three four five six"))
    reply = await ask(served, "go", max_output_tokens=3, stream=stream)
    response = final(reply)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][-1]["status"] == "incomplete"
    assert not stream or reply.types[-1] == "response.incomplete"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_over_previous_response_ids_stays_exact(served: Served, upstream: Upstream, stream: bool) -> None:
    given: Any = "Fix it."
    previous = None
    for number in range(6):
        upstream.script(Script(say=f"Turn {number}.", reason="Look.\n", calls=() if number % 2 else (CALL,)))
        reply = await ask(served, given, instructions=SYSTEM, tools=TOOLS, stream=stream, previous_response_id=previous)
        assert reply.headers["x-agentserve-turn"] == ("exact" if number else "first")
        response = final(reply)
        assert response["previous_response_id"] == previous
        previous = response["id"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "text"} for call in calls] or "Next."
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))
    assert served.server.namespaces.num_sessions == 1


async def test_two_turns_may_go_on_from_one_response(served: Served, upstream: Upstream) -> None:
    first = await ask(served, "hi")
    for text in ("left", "right"):
        reply = await ask(served, text, previous_response_id=first.body["id"])
        assert reply.status == 200
        assert starts_with(asked(upstream)[-1], asked(upstream)[0])


@pytest.mark.case("SES-10")
async def test_a_whole_history_of_items_without_ids_stays_exact(served: Served, upstream: Upstream) -> None:
    """As Codex sends it: nothing is stored, and items come back without id and status, reasoning without its text."""
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Open it."}]}]
    for number in range(4):
        upstream.script(Script(say=f"Turn {number}.", reason="Look.", calls=() if number % 2 else (CALL, CALL)))
        fields: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread-7"}
        reply = await ask(served, items, instructions=SYSTEM, tools=TOOLS, stream=True, tool_choice="auto", **fields)
        assert reply.headers["x-agentserve-turn"] == ("exact" if number else "first")
        for item in final(reply)["output"]:
            bare = {name: value for name, value in item.items() if name not in ("id", "status")}
            items.append({**bare, "content": None, "encrypted_content": None} if item["type"] == "reasoning" else bare)
        calls = [item for item in final(reply)["output"] if item["type"] == "function_call"]
        items += [{"type": "function_call_output", "call_id": call["call_id"], "output": call["call_id"]} for call in calls]
        if not calls:
            items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Next."}]})
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))
    assert len(served.server.responses) == 0
    assert {session.parent for session in served.server.namespaces.of(None).sessions.values()} == {"thread-7"}


async def test_items_that_are_kept_may_be_referred_to(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="Reading.", reason="Look.", calls=(CALL,)))
    first = (await ask(served, "go", tools=TOOLS)).body
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "text"}
    second = await ask(served, [{"role": "user", "content": "go"}, *references, output], tools=TOOLS)
    assert second.headers["x-agentserve-turn"] == "exact"
    assert starts_with(asked(upstream)[1], asked(upstream)[0])
    for unknown in ("msg_unknown", references[0]["id"] + "9", ""):
        refused = await ask(served, [{"type": "item_reference", "id": unknown}, output])
        assert (refused.status, refused.body["error"]["code"]) == (400, "item_not_found")


@pytest.mark.case("SES-10")
async def test_an_unknown_previous_response_is_an_error_and_never_an_answer_without_context(served: Served, upstream: Upstream) -> None:
    unstored = (await ask(served, "hi", store=False)).body["id"]
    for response_id in ("resp_unknown", unstored):
        for stream in (True, False):
            refused = await ask(served, "go on", previous_response_id=response_id, stream=stream)
            assert (refused.status, refused.body["error"]["code"]) == (400, "previous_response_not_found")
    assert len(asked(upstream)) == 1


async def test_stored_responses_can_be_read_and_deleted_by_their_own_key_only(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["key-a", "key-b"]) as served:
        mine, yours = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
        stored = (await ask(served, "hi", headers=mine)).body
        assert (await ask(served, "on", headers=yours, previous_response_id=stored["id"])).status == 400
        url = f"{served.url}/v1/responses/{stored['id']}"
        for method in ("GET", "DELETE"):
            assert (await fetch(method, url, yours))[0] == 404
        assert await fetch("GET", url, mine) == (200, stored)
        assert await fetch("DELETE", url, mine) == (200, {"id": stored["id"], "object": "response", "deleted": True})
        assert (await fetch("GET", url, mine))[0] == 404
        assert served.server.responses.num_bytes == 0


async def test_the_store_is_bounded(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, limits_stored_response_bytes=4000) as served:
        first = (await ask(served, "hi")).body["id"]
        for _ in range(5):
            last = (await ask(served, "word " * 100)).body["id"]
        assert 0 < served.server.responses.num_bytes <= 4000
        assert (await ask(served, "on", previous_response_id=first)).status == 400
        assert (await ask(served, "on", previous_response_id=last)).status == 200


async def test_a_stream_that_breaks_ends_in_response_failed(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="one two three four", error_after_chunks=2), Script(status=503))
    broken = await ask(served, "go", stream=True)
    assert (broken.types[0], broken.types[-1]) == ("response.created", "response.failed")
    assert [event["sequence_number"] for event in broken.events] == list(range(len(broken.events)))
    failed = final(broken)
    assert (failed["status"], failed["error"]["code"], failed["id"]) == ("failed", "server_error", broken.events[0]["response"]["id"])
    refused = await ask(served, "go", stream=True)
    assert (refused.status, refused.body["error"]["type"]) == (503, "engine_error")
    assert len(served.server.responses) == 0


@pytest.mark.case("SSE-03")
async def test_an_error_behind_keep_alives_is_still_a_whole_stream(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, limits_keep_alive_seconds=0.1) as served:
        upstream.script(Script(ttft_seconds=0.5, error_after_chunks=0), Script(say="late", ttft_seconds=0.5))
        failed = await ask(served, "go", stream=True)
        assert failed.types == ["response.created", "response.in_progress", "response.failed"]
        late = await ask(served, "go", stream=True)
        assert min(failed.num_comments, late.num_comments) >= 3
        assert parts(final(late)) == [("message", "late")]


@pytest.mark.case("PAR-03")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_too_long_leaves_the_session_as_it_was(renderer: FormatRenderer, model_folder: Path, stream: bool) -> None:
    with in_thread(Upstream(renderer=renderer, max_model_len=1024)) as upstream, serving(upstream.url, model_folder) as served:
        first = (await ask(served, "hi")).body["id"]
        refused = await ask(served, "word " * 3000, previous_response_id=first, stream=stream)
        assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
        shorter = await ask(served, "word", previous_response_id=first, stream=stream)
        assert shorter.headers["x-agentserve-turn"] == "exact"
        assert_nothing_is_held(served)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_client_runs_a_tool_loop(served: Served, upstream: Upstream, stream: bool) -> None:
    upstream.script(Script(say="Reading.", reason="Look.", calls=(CALL,)), Script(say="Done."))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": "go"}]
        fields: dict[str, Any] = {"model": "demo-model", "tools": TOOLS, "store": False}
        for expected in (["reasoning", "message", "function_call"], ["message"]):
            if stream:
                async with client.responses.stream(input=items, **fields) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(input=items, **fields)
            assert [item.type for item in response.output] == expected
            items += [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": call.arguments} for call in calls]
        assert response.output_text == "Done."
        assert response.usage.input_tokens == len(asked(upstream)[1].prompt_ids)
        assert starts_with(asked(upstream)[1], asked(upstream)[0])
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.create(model="demo-model", input="on", previous_response_id="resp_unknown")
        stored = await client.responses.create(model="demo-model", input="hi")
        assert (await client.responses.retrieve(stored.id)).output == stored.output
        await client.responses.delete(stored.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(stored.id)
