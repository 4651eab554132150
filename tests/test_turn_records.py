"""The record of a session's turns: kept within bounds, served to its own key, explained on the command line and to Anthropic's clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import pytest

from agentserve.engines.hints import PluginState
from agentserve.explain import CURES, SHORT_PROMPTS, Turn, advice
from agentserve.prompt import FlatPrompt
from agentserve.records import TurnLog, TurnRecord
from agentserve.routes.cache import describe_engine
from agentserve.sessions import Session, TurnKind
from prefix_cache.events import BlockStored, EventBatch
from prefix_cache.hits import Cause, account
from prefix_cache.tiers.exclusive import ExclusiveOffload
from tests.serving import Served, chat, serving
from tests.upstream import Upstream

SYSTEM = "You are the coding agent of a shop.\n" * 30
SECRET = "the word that is never kept"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def fetch(url: str, key: str = "") -> tuple[int, Any]:
    headers = {"x-api-key": key} if key else {}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as response:
        return response.status, msgspec.json.decode(await response.read())


async def play(served: Served, session: str, num_turns: int, **headers: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, user(SECRET)]
    for number in range(num_turns):
        reply = await chat(served.url, messages, stream=False, headers={"x-session-id": session, **headers})
        messages += [reply.message, user(f"step {number}")]
    messages[1] = user("changed")
    await chat(served.url, messages, stream=False, headers={"x-session-id": session, **headers})


@pytest.mark.anyio
async def test_the_turns_of_a_session_are_kept_and_paged(served: Served) -> None:
    await play(served, "task/7", 5)
    _, whole = await fetch(f"{served.url}/v1/sessions/task/7/turns")
    turns = whole["data"]
    assert [turn["number"] for turn in turns] == [1, 2, 3, 4, 5, 6]
    assert [turn["kind"] for turn in turns] == ["first", *["exact"] * 4, "edited"]
    assert not whole["has_more"]
    for turn in turns:
        assert sum(turn["missed_tokens"].values()) == turn["prompt_tokens"] - turn["cached_tokens"]
        assert turn["seconds"] >= turn["first_token_seconds"] >= 0
    assert all(later["ended_at"] >= earlier["ended_at"] for earlier, later in pairwise(turns))
    assert (turns[-1]["divergence"]["item"], turns[-2]["divergence"]) == (1, None)
    _, newest = await fetch(f"{served.url}/v1/sessions/task/7/turns?limit=2")
    _, older = await fetch(f"{served.url}/v1/sessions/task/7/turns?limit=3&before={newest['data'][0]['number']}")
    assert ([turn["number"] for turn in newest["data"]], newest["has_more"]) == ([5, 6], True)
    assert ([turn["number"] for turn in older["data"]], older["has_more"]) == ([2, 3, 4], True)
    assert SECRET not in msgspec.json.encode(whole).decode()
    for bad in ("limit=0", "limit=many", "limit=1001", "before=-1"):
        assert (await fetch(f"{served.url}/v1/sessions/task/7/turns?{bad}"))[0] == 400
    assert (await fetch(f"{served.url}/v1/sessions/unknown/turns"))[0] == 404


@pytest.mark.anyio
async def test_nobody_sees_the_turns_of_another_key(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["key-a", "key-b"]) as served:
        await play(served, "mine", 2, **{"x-api-key": "key-a"})
        mine, yours = [await fetch(f"{served.url}/v1/sessions/mine/turns", key) for key in ("key-a", "key-b")]
        assert (mine[0], len(mine[1]["data"]), yours[0]) == (200, 3, 404)
        assert (await fetch(f"{served.url}/v1/cache"))[0] == 401
        totals = [(await fetch(f"{served.url}/v1/cache", key))[1]["hits"]["prompt_tokens"] for key in ("key-a", "key-b")]
        assert totals == [sum(turn["prompt_tokens"] for turn in mine[1]["data"]), 0]


@pytest.mark.anyio
async def test_the_cache_tells_totals_and_drift(upstream: Upstream, model_folder: Path) -> None:
    assert upstream.engine.events is not None
    events = {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}
    with serving(upstream.url, model_folder, **events) as served:
        await play(served, "s", 3)
        async with aiohttp.ClientSession() as http, http.delete(f"{served.url}/v1/sessions/s") as response:
            assert response.status == 200
        _, cache = await fetch(f"{served.url}/v1/cache")
        (engine,) = cache["engines"]
        assert cache["hits"]["prompt_tokens"] > 0
        assert cache["hits"]["missed_tokens"]["new"] > 0
        assert (engine["block_size"], engine["capacity_tokens"], engine["computing_blocks"]) == (32, 4096 * 32, 0)
        mirror = engine["mirror"]
        assert mirror["resident_tokens"] > 0
        assert (mirror["suspect"], mirror["lost_batches"], mirror["event_block_size"]) == (False, 0, 32)


@pytest.mark.anyio
async def test_the_cache_shows_the_plugins_own_tier(upstream: Upstream, model_folder: Path) -> None:
    told: dict[str, Any] = dict.fromkeys((name for name in PluginState.__dataclass_fields__ if name.startswith("num_")), 0)
    state = PluginState(**{**told, "num_tier_blocks": 512, "num_kept_blocks": 3}, policy="lru", parameters={}, is_ordering=True)
    with serving(upstream.url, model_folder, offload_tier="exclusive") as served:
        _, cache = await fetch(f"{served.url}/v1/cache")
        first = served.server.replicas.first
    silent = cache["engines"][0]["offload"]
    assert (silent["kind"], silent["up"], silent["resident_tokens"]) == ("exclusive", None, None)  # the upstream has no plugin
    shown = describe_engine(first, state)["offload"]
    assert (shown["up"], shown["off_because"], shown["capacity_tokens"], shown["resident_tokens"]) == (True, None, 512 * 32, 3 * 32)
    assert (shown["announced_tokens"], shown["declining"]) == (None, None)  # the upstream has no events here
    off = describe_engine(first, replace(state, tier_off_because="no memory"))["offload"]
    assert (off["up"], off["off_because"]) == (False, "no memory")


@pytest.mark.anyio
async def test_the_cache_shows_what_the_plugins_own_tier_has_announced(upstream: Upstream, model_folder: Path) -> None:
    assert upstream.engine.events is not None
    events = {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}
    with serving(upstream.url, model_folder, offload_tier="exclusive", **events) as served:
        offload = served.server.books.offload
        assert isinstance(offload, ExclusiveOffload)
        offload.apply(EventBatch(0.0, [BlockStored([1, 2, 3], None, [], 0, medium="CPU")]), {1: b"one", 2: b"two"})
        _, cache = await fetch(f"{served.url}/v1/cache")
    shown = cache["engines"][0]["offload"]
    assert (shown["kind"], shown["up"], shown["resident_tokens"]) == ("exclusive", None, None)  # the upstream has no plugin
    assert (shown["announced_tokens"], shown["unresolved_chunks"], shown["declining"]) == (3 * 32, 1, False)


def record(number: int) -> TurnRecord:
    hits = account(num_prompt_tokens=10, ceiling=0, block_size=4, actual=0)
    return TurnRecord(number, TurnKind.EXACT, 0.0, 0.0, None, 0.0, "stop", 0, 0, hits, None)


def test_the_log_is_bounded_for_a_session_and_for_all() -> None:
    log = TurnLog(max_records=10, max_session_records=4)
    sessions = [Session(str(number), None, FlatPrompt(16), 0.0, 0.0) for number in range(4)]
    for number in range(1, 7):
        for session in sessions:
            log.add(session, record(number))
    kept = [[one.number for one in log.of(session)] for session in sessions]
    assert kept == [[5, 6], [5, 6], [4, 5, 6], [4, 5, 6]]
    assert len(log) == 10
    sessions.pop(0)
    for number in range(7, 30):
        log.add(sessions[0], record(number))
    assert [one.number for one in log.of(sessions[0])] == [26, 27, 28, 29]
    assert len(log) <= 10


def turn(missed: dict[Cause, int], **fields: Any) -> Turn:
    return Turn(1, "exact", 1000, 900, cached_tokens=1000 - sum(missed.values()), missed_tokens=missed, **fields)


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.NEW])
def test_the_advice_names_what_cost_most_and_its_cure(cause: Cause) -> None:
    said = advice([turn({Cause.NEW: 500, cause: 100}), turn({Cause.TAIL: 20})])
    assert CURES[cause] in said
    assert "100" in said or "120" in said


def test_one_block_prompts_are_not_advised_another_block_size_and_new_tokens_are_said_to_be_due() -> None:
    said = advice([turn({Cause.NEW: 904}), turn({Cause.NEW: 904, Cause.TAIL: 96}), turn({Cause.TAIL: 1000})])
    assert "1,808 tokens were new" in said
    assert SHORT_PROMPTS in said
    assert CURES[Cause.TAIL] in advice([turn({Cause.TAIL: 100})])


def test_without_avoidable_misses_or_figures_the_advice_says_so() -> None:
    assert "could have been a hit" in advice([turn({Cause.NEW: 5})])
    assert "--enable-prompt-tokens-details" in advice([Turn(1, "exact", 10, 10), Turn(1, "exact", 10, 10, finish_reason="abort")])
    assert "No turn ran to its end" in advice([Turn(1, "exact", 10, 10, finish_reason="abort")])


def explain(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "agentserve", "explain", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.anyio
async def test_explain_shows_the_turns_and_what_cost_most(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["key"]) as served:
        await play(served, "task", 3, **{"x-api-key": "key"})
        shown, as_json, unknown, locked, absent = await asyncio.gather(
            *(
                asyncio.to_thread(explain, *arguments)
                for arguments in (
                    ("task", "--url", served.url, "--api-key", "key"),
                    ("task", "--url", served.url, "--api-key", "key", "--json"),
                    ("nobody", "--url", served.url, "--api-key", "key"),
                    ("task", "--url", served.url),
                    ("task", "--url", "http://127.0.0.1:9"),
                )
            )
        )
    assert shown[0] == 0
    assert "Most was lost to client_edit" in shown[1]
    assert "text_changed" in shown[1].replace("\n", "")
    answer = msgspec.json.decode(as_json[1])
    assert (as_json[0], len(answer["turns"]), "client_edit" in answer["advice"]) == (0, 4, True)
    for (code, output), words in ((unknown, "'nobody'"), (locked, "--api-key"), (absent, "127.0.0.1:9")):
        assert code == 2
        assert words in output


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_what_changed_since_an_answer_is_told_as_anthropic_tells_it(served: Served, stream: bool) -> None:
    client = anthropic.AsyncAnthropic(base_url=served.url, api_key="x")
    tools: list[Any] = [{"name": "read", "input_schema": {"type": "object", "properties": {}}}]

    async def ask(previous: str | None, messages: list[Any], **fields: Any) -> Any:
        more: dict[str, Any] = {"system": SYSTEM, "tools": tools, **fields}
        asked = {"model": "demo-model", "max_tokens": 50, "messages": messages, "diagnostics": {"previous_message_id": previous}, **more}
        if not stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()

    async with client:
        first = await ask(None, [user("hi")])
        grown = [user("hi"), {"role": "assistant", "content": first.content[0].text}, user("go on")]
        assert first.diagnostics is None
        assert (await ask(first.id, grown)).diagnostics is None
        assert (await ask(first.id, [user("hi")])).diagnostics is None
        told = {
            "messages_changed": await ask(first.id, [user("hello"), *grown[1:]]),
            "system_changed": await ask(first.id, grown, system=f"{SYSTEM} Be brief."),
            "tools_changed": await ask(first.id, grown, tools=[]),
        }
        for kind, message in told.items():
            reason = message.diagnostics.cache_miss_reason
            assert (reason.type, reason.cache_missed_input_tokens > 0) == (kind, True)
        unknown = await ask("msg_of_another_server", grown)
        assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        plain = await client.messages.create(model="demo-model", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
        assert "diagnostics" not in plain.model_fields_set
