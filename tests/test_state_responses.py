"""Stored Responses in a real Valkey: any server goes on from them, a deletion is one everywhere, and a store that fails fails no turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.dialects.responses_store import ResponseStore, StoredResponse
from agentserve.sessions import Namespace
from agentserve.state import responses as response_state
from agentserve.state import stored as session_state
from agentserve.state.breaker import Failure
from agentserve.state.codec import Damaged
from agentserve.state.link import RedisLink
from agentserve.state.responses import StoredResponses
from agentserve.state.responses_codec import (
    MAX_BYTES,
    Left,
    Owner,
    ResponseBody,
    bury,
    decode_body,
    decode_record,
    encode_body,
    encode_record,
    left_of,
)
from model.conversation import ToolCall
from tests.processes import wait_until
from tests.redis_server import RedisServer, running_redis
from tests.scripted import Posted, asked, assert_nothing_is_held, starts_with
from tests.serving import Served, serving
from tests.test_responses_server import SYSTEM, TOOLS, ask, fetch, final
from tests.test_state import PATIENT, counted
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def pair(upstream: Upstream, model_folder: Path, store: RedisServer) -> Iterator[tuple[Served, Served]]:
    """Two servers over one engine and one store."""
    options: dict[str, Any] = {"state_url": store.url, **PATIENT}
    with serving(upstream.url, model_folder, **options) as one, serving(upstream.url, model_folder, **options) as other:
        yield one, other
        assert_nothing_is_held(one)
        assert_nothing_is_held(other)


async def chain(served: Served, length: int, previous: str | None = None) -> list[str]:
    """The ids of responses each of which goes on from the one before it."""
    ids = []
    for number in range(length):
        reply = await ask(served, f"step {number}", previous_response_id=previous)
        assert reply.status == 200
        previous = reply.body["id"]
        ids.append(previous)
    return ids


def refusal(reply: Posted) -> tuple[int, str]:
    return reply.status, reply.body["error"]["code"]


UNKNOWN = (400, "previous_response_not_found")


def commands(store: RedisServer) -> dict[str, int]:
    """How often each command was called so far."""
    with store.client() as client:
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in client.info("commandstats").items()}


async def test_two_servers_that_take_turns_over_previous_response_ids_stay_exact(pair: tuple[Served, Served], upstream: Upstream) -> None:
    given: Any = "Fix it."
    previous = None
    for number in range(20):
        calls = () if number % 3 else (ToolCall("", "read_file", {"path": f"{number}.py", "lines": number}),)
        upstream.script(Script(say=f"Turn {number}.", reason="Look.\n", calls=calls))
        fields: dict[str, Any] = {"instructions": SYSTEM, "tools": TOOLS, "stream": bool(number % 4 < 2), "previous_response_id": previous}
        reply = await ask(pair[number % 2], given, **fields)
        assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "exact" if number else "first")
        response = final(reply)
        previous = response["id"]
        called = [item for item in response["output"] if item["type"] == "function_call"]
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "text"} for call in called] or "Next."
    assert len(asked(upstream)) == 20
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))
    sessions = [list(served.server.namespaces.of(None).sessions) for served in pair]
    assert sessions[0] == sessions[1]
    assert len(sessions[0]) == 1


async def test_a_restarted_server_goes_on_from_its_responses(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    previous = None
    for number in range(3):
        with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as served:
            reply = await ask(served, f"step {number}", previous_response_id=previous)
            assert reply.headers["x-agentserve-turn"] == ("exact" if number else "first")
            previous = reply.body["id"]
            assert await fetch("GET", f"{served.url}/v1/responses/{previous}", {}) == (200, reply.body)
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))


async def test_a_response_is_read_and_its_items_are_referred_to_on_any_server(pair: tuple[Served, Served], upstream: Upstream) -> None:
    upstream.script(Script(say="Reading.", reason="Look.", calls=(ToolCall("", "read_file", {"path": "a", "lines": 1}),)))
    first = (await ask(pair[0], "go", tools=TOOLS)).body
    assert await fetch("GET", f"{pair[1].url}/v1/responses/{first['id']}", {}) == (200, first)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "text"}
    reply = await ask(pair[1], [{"type": "message", "role": "user", "content": "go"}, *references, output], tools=TOOLS)
    assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "exact")
    unknown = await ask(pair[1], [{"type": "item_reference", "id": f"msg_{token_hex(25)}"}, output])
    assert refusal(unknown) == (400, "item_not_found")
    assert (await fetch("GET", f"{pair[1].url}/v1/responses/{first['id']}", {})) == (200, first)  # also once its items are in memory


async def test_a_long_chain_comes_back_with_one_question_for_all_that_it_builds_on(
    pair: tuple[Served, Served], store: RedisServer, upstream: Upstream
) -> None:
    ids = await chain(pair[0], 60)
    before = commands(store)
    reply = await ask(pair[1], "on", previous_response_id=ids[-1])
    assert reply.headers["x-agentserve-turn"] == "exact"
    after = commands(store)
    asked_for = {name: after.get(name, 0) - before.get(name, 0) for name in ("get", "getrange", "mget", "lrange")}
    assert asked_for == {"get": 0, "getrange": 1, "mget": 2, "lrange": 1}  # its own record, its predecessors', and the session
    assert starts_with(asked(upstream)[-1], asked(upstream)[-2])
    (later,) = await chain(pair[0], 1, ids[-1])
    assert (await ask(pair[1], "on", previous_response_id=later)).status == 200
    assert commands(store)["mget"] == after["mget"] + 1  # its predecessors have come before
    between = await ask(pair[1], "aside", previous_response_id=ids[30])
    assert (between.status, commands(store)["mget"]) == (200, after["mget"] + 1)  # what has come with a chain is here


async def test_loads_and_saves_of_responses_are_counted(pair: tuple[Served, Served]) -> None:
    ids = await chain(pair[0], 2)
    assert (counted(pair[0], "state_response_saves_total"), counted(pair[0], "state_unsaved_sessions")) == (2, 0)
    assert counted(pair[0], "state_response_loads_total", outcome="found") == 0
    assert (await ask(pair[1], "on", previous_response_id=ids[-1])).status == 200
    assert refusal(await ask(pair[1], "on", previous_response_id=f"resp_{token_hex(24)}")) == UNKNOWN
    assert refusal(await ask(pair[1], "on", previous_response_id="no id of ours")) == UNKNOWN
    assert [counted(pair[1], "state_response_loads_total", outcome=outcome) for outcome in ("found", "nothing")] == [1, 1]


async def test_what_is_not_to_be_stored_is_not(pair: tuple[Served, Served], store: RedisServer) -> None:
    reply = await ask(pair[0], "hi", store=False)
    assert not store.keys("*:response*")
    for served in pair:
        assert refusal(await ask(served, "on", previous_response_id=reply.body["id"])) == UNKNOWN


@pytest.mark.case("PAR-07")
async def test_no_response_crosses_api_keys(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    options: dict[str, Any] = {"api_keys": ["ours", "theirs"], "state_url": store.url, **PATIENT}
    ours, theirs = {"authorization": "Bearer ours"}, {"authorization": "Bearer theirs"}
    with serving(upstream.url, model_folder, **options) as served:
        mine = (await ask(served, "hi", headers=ours)).body["id"]
        await ask(served, "hi", headers=theirs)
        names = [served.server.namespaces.of(key).name for key in ("ours", "theirs")]
    with serving(upstream.url, model_folder, **options) as served:
        url = f"{served.url}/v1/responses/{mine}"
        for method in ("GET", "DELETE"):
            assert (await fetch(method, url, theirs))[0] == 404
        assert refusal(await ask(served, "on", headers=theirs, previous_response_id=mine)) == UNKNOWN
        with store.client() as client:  # not even where it stands under their name
            for key in store.keys(f"*{names[0]}*:response*"):
                client.copy(key.decode(), key.decode().replace(names[0], names[1]), replace=True)
        assert (await fetch("GET", url, theirs))[0] == 404
        assert refusal(await ask(served, "on", headers=theirs, previous_response_id=mine)) == UNKNOWN
        assert counted(served, "state_failures_total", reason="damaged") >= 1
        assert (await ask(served, "on", headers=ours, previous_response_id=mine)).status == 200


@pytest.mark.parametrize("by", [0, 1], ids=["by the server that made it", "by another"])
async def test_what_is_deleted_on_one_server_is_gone_on_all_and_what_builds_on_it_stays_whole(
    pair: tuple[Served, Served], upstream: Upstream, model_folder: Path, store: RedisServer, by: int
) -> None:
    ids = await chain(pair[0], 3)
    assert (await ask(pair[1], "aside", previous_response_id=ids[2])).status == 200  # both have all of them in memory
    for response_id in (ids[1], (await chain(pair[0], 1))[0]):
        urls = [f"{served.url}/v1/responses/{response_id}" for served in pair]
        assert (await fetch("DELETE", urls[by], {}))[0] == 200
        for number in (1 - by, by):
            assert refusal(await ask(pair[number], "on", previous_response_id=response_id)) == UNKNOWN
            assert (await fetch("GET", urls[number], {}))[0] == 404
            assert (await fetch("DELETE", urls[number], {}))[0] == 404
        assert not store.keys(f"*:response-body:{response_id}")
    with store.client() as client:
        assert client.strlen(store.keys(f"*:response:{response_id}")[0]) == 2  # nobody builds on it: nothing is left of what it said
    with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as third:
        reply = await ask(third, "on", previous_response_id=ids[2])
        assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "edited")  # a branch beside the one of before
        assert starts_with(asked(upstream)[-1], asked(upstream)[2])
        assert refusal(await ask(third, "on", previous_response_id=ids[1])) == UNKNOWN


@pytest.mark.parametrize("down", ["frozen", "gone"])
async def test_a_deletion_while_the_store_is_down_is_done_when_it_is_back(
    upstream: Upstream, model_folder: Path, store: RedisServer, down: str
) -> None:
    options: dict[str, Any] = {"state_url": store.url}
    with serving(upstream.url, model_folder, **options) as one, serving(upstream.url, model_folder, **options, **PATIENT) as other:
        (response_id,) = await chain(one, 1)
        assert wait_until(lambda: bool(store.keys("*:response-body:*")), seconds=5)
        if down == "frozen":
            store.freeze()
        else:
            store.kill()
        assert (await fetch("DELETE", f"{one.url}/v1/responses/{response_id}", {}))[0] == 200
        assert refusal(await ask(one, "on", previous_response_id=response_id)) == UNKNOWN
        if down == "frozen":
            store.thaw()
        else:
            store.start()
        assert wait_until(lambda: _length(store, response_id) == 2, seconds=20)
        assert wait_until(lambda: counted(other, "state_breaker_open") == 0, seconds=5)
        assert not store.keys("*:response-body:*")
        assert refusal(await ask(other, "on", previous_response_id=response_id)) == UNKNOWN
        assert refusal(await ask(one, "on", previous_response_id=response_id)) == UNKNOWN


def _length(store: RedisServer, response_id: str) -> int:
    with store.client() as client:
        return sum(client.strlen(key) for key in store.keys(f"*:response:{response_id}"))


async def test_a_frozen_store_costs_a_turn_no_more_than_its_timeout(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    with (
        serving(upstream.url, model_folder, state_url=store.url, state_timeout_seconds=0.5) as one,
        serving(upstream.url, model_folder, state_url=store.url, state_timeout_seconds=0.5) as other,
    ):
        ids = await chain(one, 2)
        store.freeze()
        started = time.monotonic()
        assert refusal(await ask(other, "on", previous_response_id=ids[-1])) == UNKNOWN  # in no memory that can be reached
        assert time.monotonic() - started < 1.5
        started = time.monotonic()
        ids += await chain(one, 1, ids[-1])
        assert time.monotonic() - started < 2.0  # one question, and one wait for its two writes
        for _ in range(4):
            ids += await chain(one, 1, ids[-1])
        assert wait_until(lambda: counted(one, "state_breaker_open") == 1, seconds=10)
        started = time.monotonic()
        ids += await chain(one, 1, ids[-1])
        assert (await fetch("GET", f"{one.url}/v1/responses/{ids[-1]}", {}))[0] == 200
        assert time.monotonic() - started < 0.5
        store.thaw()
        assert wait_until(lambda: counted(one, "state_unsaved_sessions") == 0, seconds=20)
        assert wait_until(lambda: counted(other, "state_breaker_open") == 0, seconds=5)
        reply = await ask(other, "on", previous_response_id=ids[-1])
        assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "exact")
        assert starts_with(asked(upstream)[-1], asked(upstream)[-2])


@pytest.mark.case("SES-09")
@pytest.mark.parametrize("loss", ["emptied", "the first is evicted", "killed"])
async def test_a_chain_that_the_store_has_lost_is_refused_elsewhere_until_a_turn_completes_it(
    pair: tuple[Served, Served], store: RedisServer, upstream: Upstream, loss: str
) -> None:
    ids = await chain(pair[0], 3)
    if loss == "killed":
        store.kill()
        store.start()
    with store.client() as client:
        if loss == "emptied":
            client.flushall()
        elif loss == "the first is evicted":
            client.delete(*store.keys(f"*:response:{ids[0]}"))
    assert refusal(await ask(pair[1], "on", previous_response_id=ids[-1])) == UNKNOWN
    assert wait_until(lambda: counted(pair[0], "state_breaker_open") == 0, seconds=5)
    ids += await chain(pair[0], 1, ids[-1])
    assert wait_until(lambda: counted(pair[0], "state_unsaved_sessions") == 0, seconds=10)
    assert wait_until(lambda: counted(pair[1], "state_breaker_open") == 0, seconds=5)
    reply = await ask(pair[1], "on", previous_response_id=ids[-1])
    assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "exact")
    assert starts_with(asked(upstream)[-1], asked(upstream)[-2])


@pytest.mark.parametrize(("damage", "place"), [("no record", 0), ("cut off", -1), ("another's", 0), ("no text", -1)])
async def test_a_damaged_record_is_removed_and_told_and_costs_no_more(
    pair: tuple[Served, Served], store: RedisServer, damage: str, place: int
) -> None:
    ids = await chain(pair[0], 2)
    (key,), (another,) = store.keys(f"*:response:{ids[place]}"), store.keys(f"*:response:{(await chain(pair[0], 1))[0]}")
    with store.client() as client:
        if damage == "no record":
            client.set(key, b"\xff" * 50)
        elif damage == "cut off":
            client.set(key, (client.get(key) or b"")[:-20])
        elif damage == "another's":
            client.copy(another.decode(), key.decode(), replace=True)
        else:
            client.delete(key)
            client.rpush(key, b"x")
    assert refusal(await ask(pair[1], "on", previous_response_id=ids[-1])) == UNKNOWN
    assert counted(pair[1], "state_breaker_open") == 0
    if damage != "no text":  # which is not ours to remove
        assert counted(pair[1], "state_failures_total", reason="damaged") == 1
        assert wait_until(lambda: not store.keys(f"*:response:{ids[place]}"), seconds=5)
        assert refusal(await ask(pair[1], "on", previous_response_id=ids[-1])) == UNKNOWN
        later = await chain(pair[0], 1, ids[-1])
        assert (await ask(pair[1], "on", previous_response_id=later[0])).status == 200
    assert (await ask(pair[0], "on", previous_response_id=ids[-1])).status == 200


async def test_a_damaged_body_is_no_answer(pair: tuple[Served, Served], store: RedisServer) -> None:
    (response_id,) = await chain(pair[0], 1)
    with store.client() as client:
        client.set(store.keys("*:response-body:*")[0], b"\xff\x00")
    assert (await fetch("GET", f"{pair[1].url}/v1/responses/{response_id}", {}))[0] == 404
    assert counted(pair[1], "state_failures_total", reason="damaged") == 1
    assert (await fetch("GET", f"{pair[0].url}/v1/responses/{response_id}", {}))[0] == 200


async def test_a_full_store_that_evicts_fails_no_turn_that_goes_on_from_memory(pair: tuple[Served, Served], store: RedisServer) -> None:
    with store.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 60_000)
        ids: list[str | None] = [None] * 3
        for number in range(6):
            for at, previous in enumerate(ids):
                reply = await ask(pair[0], token_hex(1500), previous_response_id=previous)
                assert (reply.status, reply.headers["x-agentserve-turn"]) == (200, "exact" if number else "first")
                ids[at] = reply.body["id"]
        assert client.info("stats")["evicted_keys"] > 0
    for previous in ids:
        reply = await ask(pair[1], "on", previous_response_id=previous)
        assert reply.status == 200 or refusal(reply) == UNKNOWN
        assert reply.status != 200 or reply.headers["x-agentserve-turn"] in ("exact", "inexact")


# below: the store without a server in front, on this test's own event loop


@asynccontextmanager
async def stored(
    url: str, failures: list[Failure], *, max_bytes: int = 64 << 20, clock: Callable[[], float] = time.monotonic, waits: float = 5.0
) -> AsyncIterator[tuple[ResponseStore, StoredResponses]]:
    memory = ResponseStore(max_bytes)
    tell = session_state.Listeners(lambda _, __: None, lambda _: None, lambda: None, failures.append)
    times: dict[str, float] = {"ttl_seconds": 80.0, "timeout_seconds": waits}
    sessions = session_state.StoredSessions(RedisLink(url, failures.append), b"d" * 16, tell, time.monotonic, **times)
    listeners = response_state.Listeners(lambda _: None, lambda: None, failures.append)
    await sessions.start()
    try:
        yield memory, StoredResponses(memory, sessions, listeners, clock, **times)
    finally:
        await sessions.close()


def made(previous: StoredResponse | None = None, item: bytes = b'"said"') -> StoredResponse:
    return StoredResponse(f"resp_{token_hex(24)}", "session", b"{}", (item,), previous)


async def test_what_a_chain_builds_on_lives_as_long_as_the_chain(store: RedisServer) -> None:
    """A chain is prolonged when an eighth of its time has gone, and what is stored lives for so much longer than it must."""
    now = 1000.0
    namespace = Namespace(None, 16)
    async with stored(store.url, [], clock=lambda: now) as (memory, responses):
        last: StoredResponse | None = None
        with store.client() as client:
            for age, is_prolonged in ((0.0, False), (9.0, False), (11.0, True), (20.0, False), (22.0, True)):
                now = 1000.0 + age
                last = made(last)
                memory.add(namespace, last)
                await responses.keep(namespace, last.id)
                first = [key for one in (last.predecessors() or [last])[:1] for key in store.keys(f"*:response*:{one.id}")]
                assert len(first) == 2
                assert age == 0 or len(last.predecessors()) == 1 or all((client.pttl(key) > 1000) == is_prolonged for key in first)
                for key in first:
                    client.pexpire(key, 1000)
            assert all(0 < client.pttl(key) <= 90_000 for key in store.keys("*:response*"))


async def test_a_turn_waits_for_its_write_once_and_not_for_long(store: RedisServer) -> None:
    namespace = Namespace(None, 16)
    async with stored(store.url, [], waits=0.5) as (memory, responses):

        async def seconds_until_settled() -> tuple[float, bool]:
            response = made()
            memory.add(namespace, response)
            started = time.monotonic()
            kept = responses.keep(namespace, response.id)
            await responses.settled(kept)
            return time.monotonic() - started, kept.done()

        with store.client() as client:
            client.client_pause(200, all=False)
        paused, is_written = await seconds_until_settled()
        assert paused > 0.1
        assert is_written
        store.freeze()
        first, second = await seconds_until_settled(), await seconds_until_settled()
        store.thaw()
        assert 0.4 < first[0] < 1.5
        assert second[0] < 0.3  # the one before has waited for the same store
        assert not first[1]
        assert not second[1]


async def test_what_is_too_large_for_the_store_stays_here_with_all_that_builds_on_it(store: RedisServer) -> None:
    failures: list[Failure] = []
    namespace = Namespace(None, 16)
    async with stored(store.url, failures) as (memory, responses):
        large = made(item=token_bytes(MAX_BYTES + 1))
        for response in (large, made(large), alone := made()):
            memory.add(namespace, response)
            await responses.keep(namespace, response.id)
        assert store.keys("*:response:*") == store.keys(f"*:response:{alone.id}") != []
        assert not failures


async def test_a_response_that_is_deleted_elsewhere_while_a_turn_goes_on_from_it_is_kept_for_that_turns_answer(store: RedisServer) -> None:
    failures: list[Failure] = []
    namespace = Namespace(None, 16)
    async with stored(store.url, failures) as (here, mine), stored(store.url, failures) as (there, yours):
        first = made()
        here.add(namespace, first)
        await mine.keep(namespace, first.id)
        assert await yours.delete(namespace, first.id)
        second = made(first)
        here.add(namespace, second)
        await mine.keep(namespace, second.id)
        await yours.load(namespace, [first.id, second.id])
        found = there.find(namespace, second.id)
        assert found is not None
        assert found.history() == second.history()
        assert there.find(namespace, first.id) is None
        await mine.load(namespace, [first.id])
        assert here.find(namespace, first.id) is None
        assert not failures


async def test_what_is_about_to_be_deleted_does_not_come_back(store: RedisServer) -> None:
    namespace = Namespace(None, 16)
    async with stored(store.url, []) as (memory, responses):
        response = made()
        memory.add(namespace, response)
        await responses.keep(namespace, response.id)
        deletion = asyncio.create_task(responses.delete(namespace, response.id))
        await asyncio.sleep(0)  # it is asked for, and not done
        await responses.load(namespace, [response.id])
        assert memory.find(namespace, response.id) is None
        assert await deletion


async def test_what_memory_has_no_room_for_comes_back_from_the_store(store: RedisServer) -> None:
    namespace = Namespace(None, 16)
    async with stored(store.url, [], max_bytes=30) as (memory, responses):
        first = made()
        for response in (first, *(made() for _ in range(5))):
            memory.add(namespace, response)
            await responses.keep(namespace, response.id)
        assert memory.find(namespace, first.id) is None
        await responses.load(namespace, [first.id])
        found = memory.find(namespace, first.id)
        assert found is not None
        assert found.items == first.items
        assert await responses.body(namespace, first.id) == first.body
        assert memory.num_bytes <= 30


OWNER = Owner(b"deployment", "key", f"resp_{'0' * 48}")
ids = st.lists(st.binary(min_size=24, max_size=24).map(lambda number: f"resp_{number.hex()}"), max_size=5)


@settings(max_examples=50)
@given(st.lists(st.binary(), max_size=5), st.sampled_from([Left.ALL, Left.ITEMS]), st.booleans(), st.text(max_size=20))
def test_a_record_is_read_as_it_was_written_and_by_its_owner_only(items: list[bytes], left: Left, followed: bool, session: str) -> None:
    data = encode_record(OWNER, session, items, left, followed=followed)
    record = decode_record(data, OWNER)
    assert (record.session, record.items, record.left) == (session, tuple(items), left)
    for other in (Owner(b"other", "key", OWNER.id), Owner(b"deployment", "other", OWNER.id), Owner(b"deployment", "key", "other")):
        with pytest.raises(Damaged):
            decode_record(data, other)
    buried = bury(data)
    assert left_of(buried) is (Left.ITEMS if followed or left is Left.ITEMS else Left.NOTHING)
    assert bury(buried) == buried


@given(st.binary(min_size=2), st.integers(0, 200), st.integers(0, 255))
def test_no_damage_to_a_record_is_anything_but_damaged(noise: bytes, place: int, value: int) -> None:
    record = encode_record(OWNER, "session", [b"item"], Left.ALL, followed=False)
    changed = bytearray(record)
    changed[place % len(record)] = value
    for data in (noise, bytes(changed), record[: place % len(record)]):
        try:
            if left_of(data) is not Left.UNKNOWN:
                decode_record(data, OWNER)
        except Damaged:
            pass


@settings(max_examples=50)
@given(ids, st.none() | st.binary(), st.integers(0, 200), st.integers(0, 255))
def test_a_body_is_read_as_it_was_written_or_is_damaged(before: list[str], body: bytes | None, place: int, value: int) -> None:
    data = encode_body(OWNER, body, before)
    assert decode_body(data, OWNER) == ResponseBody(body, before)
    with pytest.raises(Damaged):
        decode_body(data, Owner(b"deployment", "other", OWNER.id))
    changed = bytearray(data)
    changed[place % len(data)] = value
    for noise in (bytes(changed), data[: place % len(data)]):
        with suppress(Damaged):
            decode_body(noise, OWNER)
