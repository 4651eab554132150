"""x-agentserve-append: only what follows a session's latest answer is sent, and never answered without its context."""

from __future__ import annotations

from typing import Any

import pytest

from model.conversation import ToolCall
from tests.scripted import asked, post
from tests.serving import Served
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio

NAMED = {"x-agentserve-session": "task"}
APPEND = {**NAMED, "x-agentserve-append": "true"}
TOOLS = [{"name": "read_file", "description": "Read.", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "on"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "on"}], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "on"}], "max_tokens": 8},
    "/v1/responses": {"input": "on"},
}
every_path = pytest.mark.parametrize("path", BODIES)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_messages_go_on_from_the_sessions_latest_answer(served: Served, upstream: Upstream) -> None:
    url = f"{served.url}/v1/messages"
    upstream.script(Script(say="Reading.", calls=tuple(ToolCall("", "read_file", {"path": name}) for name in ("a", "b"))))
    whole: dict[str, Any] = {"system": "You are an agent.", "tools": TOOLS, "max_tokens": 512}
    first = await post(url, {**whole, "messages": [user("go")]}, NAMED)
    calls = [block for block in first.body["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"text of {call['input']['path']}"} for call in calls]
    counted = await post(f"{url}/count_tokens", {"messages": [user(results[::-1])]}, APPEND)
    second = await post(url, {"messages": [user(results[::-1])], "max_tokens": 8}, APPEND)
    said = [{"role": "assistant", "content": reply.body["content"]} for reply in (first, second)]
    history = [user("go"), said[0], user(results), said[1], user("and now?")]
    third = await post(url, {"messages": [user("and now?")], "max_tokens": 8}, APPEND)
    again = await post(url, {**whole, "messages": history}, NAMED)
    assert [reply.headers["x-agentserve-turn"] for reply in (first, second, third, again)] == ["first", "exact", "exact", "retry"]
    assert asked(upstream)[-1].prompt_ids == asked(upstream)[-2].prompt_ids
    assert counted.body["input_tokens"] == len(asked(upstream)[1].prompt_ids)


@every_path
async def test_who_appends_to_nothing_or_says_neither_yes_nor_no_is_refused(served: Served, upstream: Upstream, path: str) -> None:
    url, body = served.url + path, BODIES[path]
    refusals = [
        await post(url, body, {**NAMED, "x-agentserve-append": value} if named else {"x-agentserve-append": value})
        for value, named in (("true", True), ("true", False), ("1", True), ("zz", False), ("", False))
    ]
    unknown = 400 if path == "/v1/responses" else 404
    assert [refusal.status for refusal in refusals] == [unknown, 400, 400, 400, 400]
    for refusal in refusals:
        assert ("code" in refusal.body["error"]) != path.startswith("/v1/messages"), "not in the client's dialect"
    assert "x-agentserve-append" in refusals[2].body["error"]["message"]
    assert not asked(upstream)
    assert (await post(url, body, {"x-agentserve-append": "False"})).status == 200


async def test_responses_name_their_own_way_to_go_on(served: Served) -> None:
    refused = await post(f"{served.url}/v1/responses", BODIES["/v1/responses"], APPEND)
    assert (refused.status, refused.body["error"]["param"]) == (400, "x-agentserve-append")
    assert "previous_response_id" in refused.body["error"]["message"]
