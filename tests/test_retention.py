"""What the server knows of the life of its sessions, who hears of it, and what an operator may change while turns run and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from admission.eviction.policy import Fate
from agentserve.engines.hints import NoHints, SessionHint, TurnHints
from agentserve.errors import SetupError
from agentserve.policies import chosen
from agentserve.serve import follow
from agentserve.settings import load
from model.conversation import ToolCall
from tests.processes import wait_until
from tests.scripted import asked, assert_nothing_is_held, starts_with
from tests.serving import Served, chat, serving
from tests.test_metrics import values
from tests.test_turns import SYSTEM, user
from tests.upstream import LoggedRequest, Script, Upstream

pytestmark = pytest.mark.anyio

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]


class Heard(NoHints):
    """An engine's plugin that only listens."""

    def __init__(self) -> None:
        self.told: list[SessionHint] = []
        self.sent: list[TurnHints] = []

    def xargs(self, hints: TurnHints) -> Mapping[str, str]:
        self.sent.append(hints)
        return {"agentserve": "x"}

    def tell(self, *hints: SessionHint) -> None:
        self.told += hints

    def fates(self, session: str) -> list[Fate]:
        return [hint.fate for hint in self.told if hint.session_id == session and hint.fate is not None]


def xargs(request: LoggedRequest) -> dict[str, Any]:
    """What a request to the engine carries for plugins."""
    carried: dict[str, Any] = request.body["sampling_params"].get("extra_args") or {}
    return carried


async def ask(url: str, path: str, method: str = "GET", body: Any = None, key: str | None = None) -> tuple[int, Any]:
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    data = None if body is None else msgspec.json.encode(body)
    async with aiohttp.ClientSession() as http, http.request(method, url + path, data=data, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


async def say(served: Served, messages: list[dict[str, Any]], session: str, **headers: str) -> dict[str, Any]:
    named = {"x-agentserve-session": session, **{name.replace("_", "-"): value for name, value in headers.items()}}
    reply = await chat(served.url, messages, stream=False, headers=named, tools=TOOLS)
    assert reply.status == 200
    return reply.message


async def session(served: Served, name: str) -> dict[str, Any]:
    status, found = await ask(served.url, f"/v1/sessions/{name}")
    assert status == 200
    assert isinstance(found, dict)
    return found


async def test_a_session_shows_why_it_is_idle_and_when_it_is_expected(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="", calls=(ToolCall("", "bash", {"command": "ls"}),)), Script(say="Done."))
    call = await say(served, [SYSTEM, user("hi")], "s")
    found = await session(served, "s")
    assert (found["phase"], found["return_class"]) == ("tool_pending", "0~root/tool:steady:shell")
    assert 0 < found["expected_return_seconds"] < 3600
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a.py"}
    await say(served, [SYSTEM, user("hi"), call, result], "s")
    found = await session(served, "s")
    assert (found["phase"], found["return_class"]) == ("waiting", "0~root/end_turn:brisk")
    assert found["waiting_turns"] == 0


async def test_an_end_is_said_by_deletion_or_by_a_header_and_ends_the_place(served: Served) -> None:
    for name in ("deleted", "final", "stays"):
        await say(served, [SYSTEM, user("hi")], name)
    await say(served, [SYSTEM, user("hi"), user("bye")], "final", x_dynamo_session_final="true")
    assert (await ask(served.url, "/v1/sessions/deleted", "DELETE"))[0] == 200
    lifecycle = served.server.turns.retention.lifecycle
    assert [lifecycle.is_over(name) for name in ("deleted", "final", "stays")] == [True, True, False]
    assert (await session(served, "final"))["phase"] == "ended"
    assert values(served.server.metrics.text())['ended_sessions_total{how="said"}'] == 2
    await say(served, [SYSTEM, user("hi"), user("bye"), user("again")], "final")
    assert (await session(served, "final"))["phase"] == "waiting", "it is taken back when the session returns"


async def test_the_engines_plugin_hears_of_classes_ends_and_joined_subagents(served: Served, upstream: Upstream) -> None:
    heard = Heard()
    served.server.replicas.first.hints = heard
    upstream.script(Script(say="", calls=(ToolCall("", "bash", {"command": "ls"}),)), Script(say="Found."), Script(say="Done."))
    call = await say(served, [SYSTEM, user("hi")], "root")
    await say(served, [SYSTEM, user("look")], "child", x_agentserve_parent="root")
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a.py"}
    await say(served, [SYSTEM, user("hi"), call, result], "root")
    assert heard.fates("child") == [Fate.PRESUMED]  # few of them come back once they have answered
    assert next(hint.return_class for hint in heard.told if hint.session_id == "root" and hint.return_class) == "0~root/tool:steady:shell"
    assert [xargs(request)["agentserve"] for request in asked(upstream)] == ["x", "x", "x"]
    assert heard.sent[0].branch_id == heard.sent[2].branch_id
    await ask(served.url, "/v1/sessions/root", "DELETE")
    assert heard.fates("root") == [Fate.ENDED]


@pytest.mark.case("SES-07")
@pytest.mark.parametrize(
    ("named", "fields", "fate"),
    [
        (True, {}, Fate.ONE_SHOT),
        (True, {"max_tokens": 2000}, Fate.ONE_SHOT),
        (False, {"max_tokens": 16}, Fate.ONE_SHOT),
        (False, {"max_tokens": 64}, Fate.ONE_SHOT),
        (False, {"max_tokens": 1, "tools": TOOLS}, Fate.ONE_SHOT),
        (True, {"max_tokens": 16, "tools": TOOLS}, Fate.LIVE),
        (False, {"max_tokens": 500}, Fate.LIVE),
        (False, {}, Fate.LIVE),
    ],
)
async def test_a_side_request_is_told_to_the_engine_as_one_and_leaves_the_session_as_it_is(
    served: Served, upstream: Upstream, named: bool, fields: dict[str, Any], fate: Fate
) -> None:
    heard = Heard()
    served.server.replicas.first.hints = heard
    history = [SYSTEM, user("hi")]
    history += [await say(served, history, "s"), user("on")]
    phase = await session(served, "s")
    headers = {"x-agentserve-session": "s"} if named else {}
    title = [{"role": "system", "content": "Title maker."}, user("Title for: hi")]
    assert (await chat(served.url, title, stream=False, headers=headers, **fields)).status == 200
    assert [hints.fate for hints in heard.sent] == [Fate.LIVE, fate]
    if fate is Fate.ONE_SHOT:
        assert (await session(served, "s"))["return_class"] == phase["return_class"]
        assert len(served.server.turns.retention.lifecycle) == 1
    await say(served, history, "s")
    first, _, last = asked(upstream)
    assert starts_with(last, first)
    assert heard.sent[-1].fate is Fate.LIVE
    assert heard.sent[-1].branch_id == heard.sent[0].branch_id


@pytest.mark.case("SES-05")
@pytest.mark.parametrize("named", [True, False], ids=["in the session's name", "nameless"])
async def test_a_compaction_in_place_hits_all_and_one_of_the_old_style_is_a_side_request(
    served: Served, upstream: Upstream, named: bool
) -> None:
    heard = Heard()
    served.server.replicas.first.hints = heard
    history = [SYSTEM, user("Step 0.")]
    for step in range(3):
        history += [await say(served, history, "s"), user(f"Step {step + 1}. " + "data " * 100)]
    before = asked(upstream)[-1]
    await say(served, [*history, user("Summarise the work so far for a new session.")], "s")  # in place
    flat = "\n".join(f"{each['role']}: {each['content']}" for each in history[1:])
    summariser = [{"role": "system", "content": "You write summaries."}, user(flat)]
    headers = {"x-agentserve-session": "s"} if named else {}
    assert (await chat(served.url, summariser, stream=False, headers=headers, max_tokens=64)).status == 200
    await say(served, [SYSTEM, user("So far: all is done.")], "new")
    await say(served, history, "s")
    in_place, _, new, after = asked(upstream)[-4:]
    assert starts_with(in_place, before)
    assert starts_with(after, before)
    block = 32
    could = (len(before.prompt_ids) + len(before.generated_ids) - 1) // block * block  # the last token that was generated has no KV yet
    assert in_place.num_cached_tokens == could
    assert after.num_cached_tokens is not None
    assert after.num_cached_tokens >= could
    head = next(at for at, pair in enumerate(zip(new.prompt_ids, before.prompt_ids, strict=False)) if pair[0] != pair[1])
    assert new.num_cached_tokens == head // block * block > 200
    assert [hints.fate for hints in heard.sent[-4:]] == [Fate.LIVE, Fate.ONE_SHOT, Fate.LIVE, Fate.LIVE]


async def test_without_a_plugin_requests_to_the_engine_are_what_they_were(served: Served, upstream: Upstream) -> None:
    await say(served, [SYSTEM, user("hi")], "s")
    assert not xargs(asked(upstream)[0])


async def test_a_turn_that_breaks_off_leaves_its_session_idle(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="slow", ttft_seconds=5.0))
    task = asyncio.create_task(say(served, [SYSTEM, user("hi")], "s"))
    assert await asyncio.to_thread(wait_until, lambda: bool(asked(upstream)), 5)
    task.cancel()
    lifecycle = served.server.turns.retention.lifecycle
    assert await asyncio.to_thread(wait_until, lambda: lifecycle.phase("s").value == "waiting", 5)
    lifecycle.check_integrity()


async def test_tenants_do_not_meet_in_the_lifecycle(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["one", "two"]) as served:
        for key in ("one", "two"):
            await say(served, [SYSTEM, user("hi")], "same", authorization=f"Bearer {key}")
        assert len(served.server.turns.retention.lifecycle) == 2
        assert (await ask(served.url, "/v1/sessions/same", "DELETE", key="one"))[0] == 200
        assert len(served.server.turns.retention.lifecycle) == 1
        assert (await ask(served.url, "/v1/sessions/same", key="two"))[1]["phase"] == "waiting"
        assert_nothing_is_held(served)


# The operator


async def test_the_operators_routes_need_the_operators_key(served: Served, upstream: Upstream, model_folder: Path) -> None:
    status, body = await ask(served.url, "/v1/admin/policies", key="any")
    assert status == 401
    assert "--admin-key" in body["error"]["message"]
    with serving(upstream.url, model_folder, api_keys=["client"], admin_key="boss") as guarded:
        for path, method in (("/v1/admin/policies", "GET"), ("/v1/admin/policies", "PUT"), ("/v1/admin/waiting", "GET")):
            for key in (None, "client", "bos"):
                assert (await ask(guarded.url, path, method, {}, key))[0] == 401
        assert (await ask(guarded.url, "/v1/admin/waiting/x", "DELETE", key="client"))[0] == 401
        assert (await ask(guarded.url, "/v1/admin/policies", key="boss"))[0] == 200
        assert (await ask(guarded.url, "/v1/sessions", key="boss"))[0] == 401


async def test_policies_change_under_running_and_waiting_turns(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, admin_key="boss", limits_running_turns=1, alignment_twin_blocks=0) as served:
        upstream.script(Script(say="one", ttft_seconds=0.6))
        turns = [asyncio.create_task(say(served, [SYSTEM, user(name)], name)) for name in ("a", "b", "c")]
        assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.first.room.num_waiting == 2, 5)
        wanted = {"admission": {"policy": "working_set", "parameters": {"alpha": 0.8}}}
        status, now = await ask(served.url, "/v1/admin/policies", "PUT", wanted, "boss")
        assert status == 200
        shown = now["admission"]
        assert (shown["policy"], shown["parameters"]["alpha"], shown["waiting_turns"]) == ("working_set", 0.8, 2)
        assert shown["budget_tokens"] == int(0.8 * 4096 * 32)
        await asyncio.gather(*turns)
        assert (await ask(served.url, "/v1/cache"))[1]["admission"]["members"] == 3
        assert (await session(served, "a"))["has_place"]
        found = values(served.server.metrics.text())
        assert found["admission_members"] == 3
        assert found["admission_budget_tokens"] == pytest.approx(0.8 * 4096 * 32)
        assert found["admission_in_use_tokens"] == served.server.replicas.first.room.state().in_use_tokens > 0
        assert found["lost_hints"] == 0
        assert_nothing_is_held(served)


async def test_a_change_that_cannot_be_made_says_why_and_changes_nothing(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, admin_key="boss") as served:
        wrong: list[tuple[Any, int, str]] = [
            ({}, 400, "admission"),
            ({"admission": {"policy": "none"}}, 400, "kv_budget"),
            ({"admission": {"policy": "working_set", "parameters": {"alpha": 9}}}, 400, "0.3 to 1.5"),
            ({"admission": {"policy": "fcfs", "parameters": {"alpha": 1}}}, 400, "cold_tokens"),
            ({"admission": {"policy": "fcfs", "more": 1}}, 400, "more"),
            ({"eviction": {"policy": "farthest_next_use"}}, 400, "class_hazard"),
            ({"admission": {"policy": "kv_budget"}, "eviction": {"policy": "lru", "parameters": {"x": 1}}}, 400, "none"),
            ({"eviction": {"policy": "class_hazard"}}, 503, "plugin"),
            ({"admission": {"policy": "kv_budget"}, "eviction": {"policy": "class_hazard"}}, 503, "plugin"),
        ]
        for body, expected, hint in wrong:
            status, answer = await ask(served.url, "/v1/admin/policies", "PUT", body, "boss")
            assert (status, hint in answer["error"]["message"]) == (expected, True), answer
            assert served.server.policies.admission.policy == "fcfs"
        shown = (await ask(served.url, "/v1/admin/policies", key="boss"))[1]
        assert shown["eviction"] is None


async def test_waiting_turns_are_listed_and_can_be_cancelled(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, admin_key="boss", limits_running_turns=1, alignment_twin_blocks=0) as served:
        upstream.script(Script(say="one", ttft_seconds=0.6))
        first = asyncio.create_task(say(served, [SYSTEM, user("a")], "a"))
        assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.first.room.num_tickets == 1, 5)
        second = asyncio.create_task(chat(served.url, [user("b")], stream=False, headers={"x-agentserve-session": "b"}))
        assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.first.room.num_waiting == 1, 5)
        (waiting,) = (await ask(served.url, "/v1/admin/waiting", key="boss"))[1]["data"]
        assert (waiting["session_id"], waiting["is_member"]) == ("b", False)
        assert (await session(served, "b"))["waiting_turns"] == 1
        assert (await ask(served.url, f"/v1/admin/waiting/{waiting['id']}", "DELETE", key="boss"))[0] == 200
        reply = await second
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) > 0
        assert (await ask(served.url, f"/v1/admin/waiting/{waiting['id']}", "DELETE", key="boss"))[0] == 404
        await first
        assert_nothing_is_held(served)


async def test_the_settings_file_is_followed_and_a_broken_one_is_not(served: Served, tmp_path: Path) -> None:
    config = tmp_path / "agentserve.toml"
    config.write_text('[admission]\npolicy = "working_set"\nparameters = ["alpha=0.7", "tau_seconds=60"]\n')
    loop_policies = served.server.policies

    def on_the_servers_loop() -> None:
        follow(served.server, lambda: load({}, config))

    on_the_servers_loop()
    assert (loop_policies.admission.policy, dict(loop_policies.admission.parameters)) == ("working_set", {"alpha": 0.7, "tau_seconds": 60})
    for broken in ('[admission]\npolicy = "nothing"\n', "not toml", '[admission]\npolicy = "fcfs"\nparameters = ["alpha"]\n'):
        config.write_text(broken)
        on_the_servers_loop()
        assert loop_policies.admission.policy == "working_set"


@pytest.mark.parametrize("text", ["alpha", "alpha=", "alpha=much", "alpha=nan", "beta=1", "alpha=7"])
async def test_parameters_that_mean_nothing_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(SetupError):
        chosen("working_set", [text])
