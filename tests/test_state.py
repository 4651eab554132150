"""Sessions in a real Valkey: any server takes the next turn, and nothing that happens to the store fails or delays one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from model.conversation import ToolCall
from tests.processes import wait_until
from tests.redis_server import RedisServer, running_redis
from tests.scripted import asked, assert_nothing_is_held, starts_with
from tests.serving import Served, chat, serving
from tests.test_turns import SYSTEM, TOOLS, result, user
from tests.upstream import FormatRenderer, LoggedRequest, Script, Upstream

pytestmark = pytest.mark.anyio

PATIENT = {"state_timeout_seconds": 5.0}
"""For tests of what is stored: a busy test machine must not look like a store that is gone."""
NAMED = {"x-session-id": "s"}


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def pair(upstream: Upstream, model_folder: Path, store: RedisServer) -> Iterator[tuple[Served, Served]]:
    """Two servers over one engine and one store."""
    with (
        serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as one,
        serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as other,
    ):
        yield one, other
        assert_nothing_is_held(one)
        assert_nothing_is_held(other)


def counted(served: Served, name: str, **labels: str) -> float:
    """A metric of the server; 0 for labels that were not seen yet."""
    return served.server.metrics.registry.get_sample_value(f"agentserve_{name}", labels) or 0.0


@pytest.mark.parametrize("headers", [NAMED, None], ids=["named", "found by its history"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_two_servers_that_take_turns_stay_exact(
    pair: tuple[Served, Served], upstream: Upstream, renderer: FormatRenderer, headers: dict[str, str] | None, stream: bool
) -> None:
    newline = renderer.encode("\n")
    messages = [SYSTEM, user("Fix the total.")]
    kinds = []
    for number in range(4):
        call = ToolCall("", "read_file", {"path": f"src/{number}.py", "lines": number})
        drift = (*renderer.encode("one"), *newline, *newline, *renderer.encode("two"), renderer.stop_id)  # its text encodes otherwise
        upstream.script(Script(say=f"Reading {number}.", reason="I need the file.\n", calls=(call,)), Script(ids=drift))
        first = await chat(pair[0].url, messages, stream=stream, tools=TOOLS, headers=headers)
        messages += [first.message, result(first.message["tool_calls"][0], f"line {number}\n")]
        second = await chat(pair[1].url, messages, stream=stream, tools=TOOLS, headers=headers)
        messages += [second.message, user("Next.")]
        kinds += [first.turn, second.turn]
    assert kinds == ["first", *["exact"] * 7]
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))
    ids = [list(served.server.namespaces.of(None).sessions) for served in pair]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 1


async def test_a_server_that_takes_over_tokenises_only_what_is_new(pair: tuple[Served, Served]) -> None:
    messages = [SYSTEM, user("a " * 500)]
    reply = await chat(pair[0].url, messages, stream=False, headers=NAMED)
    messages += [reply.message, user("and then?")]
    reply = await chat(pair[1].url, messages, stream=False, headers=NAMED)
    assert reply.usage is not None
    assert reply.usage["agentserve"]["encoded_tokens"] < 30
    assert reply.usage["agentserve"]["ceiling_tokens"] > 500
    assert reply.usage["prompt_tokens_details"]["cached_tokens"] > 500


async def test_a_restarted_server_goes_on_exactly(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    messages = [SYSTEM, user("hi")]
    for number in range(3):
        with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as served:
            reply = await chat(served.url, messages, stream=False, tools=TOOLS)
            assert reply.turn == ("exact" if number else "first")
            messages += [reply.message, user("more")]
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))


async def test_a_turn_writes_only_what_it_adds(pair: tuple[Served, Served], store: RedisServer) -> None:
    messages = [SYSTEM, user("a " * 2000)]
    sizes = []
    for _ in range(4):
        messages += [(await chat(pair[0].url, messages, stream=False, headers=NAMED)).message, user("on")]
        with store.client() as client:
            sizes.append([len(record) for record in client.lrange(store.keys("*:session:s")[0], 0, -1)])
    assert [len(size) for size in sizes] == [4, 6, 8, 10]  # a mark, the head, and two steps a turn
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(sizes))
    assert sum(sizes[3][4:]) < 1000


async def test_loads_saves_and_failures_are_counted(pair: tuple[Served, Served], store: RedisServer) -> None:
    messages = [SYSTEM, user("hi")]
    messages += [(await chat(pair[0].url, messages, stream=False)).message, user("on")]
    assert counted(pair[0], "state_loads_total", outcome="nothing") == 0  # a first turn has nothing to ask for
    assert (counted(pair[0], "state_saves_total"), counted(pair[0], "state_unsaved_sessions")) == (1, 0)
    messages += [(await chat(pair[1].url, messages, stream=False)).message, user("on")]
    assert counted(pair[1], "state_loads_total", outcome="found") == 1
    foreign = [user("hi"), {"role": "assistant", "content": "said elsewhere"}, user("on")]
    await chat(pair[1].url, foreign, stream=False)
    assert counted(pair[1], "state_loads_total", outcome="nothing") == 1
    assert counted(pair[1], "state_breaker_open") == 0
    store.kill()
    await chat(pair[1].url, messages, stream=False)
    assert counted(pair[1], "state_failures_total", reason="refused") >= 1
    assert (counted(pair[1], "state_breaker_open"), counted(pair[1], "state_unsaved_sessions")) == (1, 1)
    store.start()


async def test_every_key_expires(pair: tuple[Served, Served], store: RedisServer) -> None:
    await chat(pair[0].url, [user("hi")], stream=False)
    keys = store.keys()
    assert len(keys) >= 2  # a session's list, and what leads to it
    with store.client() as client:
        assert all(0 < client.ttl(key) <= 6 * 3600 for key in keys)


async def test_branches_of_a_session_are_all_taken_over(pair: tuple[Served, Served], upstream: Upstream) -> None:
    opening = [SYSTEM, user("hi")]
    first = await chat(pair[0].url, opening, stream=False, headers=NAMED)
    forks = []
    for text in ("left", "right"):
        upstream.script(Script(say=f"{text} it is"))
        history = [*opening, first.message, user(text)]
        forks.append([*history, (await chat(pair[0].url, history, stream=False, headers=NAMED)).message, user("on")])
    for number, fork in enumerate(forks):
        assert (await chat(pair[1].url, fork, stream=False, headers=NAMED)).turn == "exact"
        assert starts_with(asked(upstream)[-1], asked(upstream)[1 + number])


async def test_sessions_that_say_the_same_keep_their_own_ids_on_every_server(
    pair: tuple[Served, Served], upstream: Upstream, renderer: FormatRenderer
) -> None:
    newline = renderer.encode("\n")
    forms = [(*newline, *newline), tuple(renderer.encode("\n\n"))]
    assert len(set(forms)) == 2
    opening = [SYSTEM, user("hi")]
    replies = []
    for number, form in enumerate(forms):
        upstream.script(Script(ids=(*renderer.encode("one"), *form, *renderer.encode("two"), renderer.stop_id)))
        replies.append(await chat(pair[0].url, opening, stream=False, headers={"x-session-id": str(number)}))
    assert replies[0].message["content"] == replies[1].message["content"]
    for number, reply in enumerate(replies):
        await chat(pair[1].url, [*opening, reply.message, user("on")], stream=False, headers={"x-session-id": str(number)})
        assert starts_with(asked(upstream)[-1], asked(upstream)[number])


async def test_a_head_in_another_order_elsewhere_keeps_the_order_of_its_session(pair: tuple[Served, Served], upstream: Upstream) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "a_tool", "description": "It runs.", "parameters": {"type": "object"}}}]
    await chat(pair[1].url, [SYSTEM, user("another session")], stream=False, tools=tools[::-1])
    messages = [SYSTEM, user("hi")]
    messages += [(await chat(pair[0].url, messages, stream=False, tools=tools)).message, user("on")]
    reply = await chat(pair[1].url, messages, stream=False, tools=tools[::-1])
    assert reply.turn == "exact"
    assert starts_with(asked(upstream)[2], asked(upstream)[1])


async def test_a_head_that_changes_every_turn_is_found_and_its_notes_are_not_told_twice(
    pair: tuple[Served, Served], upstream: Upstream, renderer: FormatRenderer
) -> None:
    def asking(number: int, clock: str) -> list[dict[str, Any]]:
        head = f"x-anthropic-billing-header: cch={number};\n{SYSTEM['content']}\nCurrent time: {clock}\n"
        return [{"role": "system", "content": head}, *messages]

    messages = [user("hi")]
    for number, clock in enumerate(("10:00:00", "10:00:00", "10:00:00", "11:30:00")):
        reply = await chat(pair[number % 2].url, asking(number, clock), stream=False)
        assert reply.turn == ("exact" if number else "first")
        messages += [reply.message, user(f"step {number}")]
    requests = asked(upstream)
    assert all(starts_with(later, earlier) for earlier, later in pairwise(requests))
    told = [renderer.decode_bytes(request.prompt_ids) for request in requests]
    assert [(text.count(b"10:00:00"), text.count(b"11:30:00")) for text in told] == [(1, 0), (1, 0), (1, 0), (1, 1)]


async def test_messages_may_be_appended_on_any_server(pair: tuple[Served, Served], upstream: Upstream) -> None:
    await chat(pair[0].url, [SYSTEM, user("hi")], stream=False, headers=NAMED)
    for number in range(4):
        appended = {**NAMED, "x-agentserve-append": "true"}
        reply = await chat(pair[number % 2].url, [user(f"step {number}")], stream=False, headers=appended)
        assert reply.status == 200
    assert all(starts_with(later, earlier) for earlier, later in pairwise(asked(upstream)))


async def test_turns_at_once_on_two_servers_are_branches_that_both_go_on_from(pair: tuple[Served, Served], upstream: Upstream) -> None:
    messages = [SYSTEM, user("hi")]
    messages += [(await chat(pair[0].url, messages, stream=False, headers=NAMED)).message]
    forks = [[*messages, user(text)] for text in ("left", "right")]
    replies = await asyncio.gather(*(chat(one.url, fork, stream=False, headers=NAMED) for one, fork in zip(pair, forks, strict=True)))
    for one, fork, reply in zip(reversed(pair), forks, replies, strict=True):
        assert (await chat(one.url, [*fork, reply.message, user("on")], stream=False, headers=NAMED)).turn == "exact"
        assert any(starts_with(asked(upstream)[-1], before) for before in asked(upstream)[1:3])


@pytest.mark.parametrize("headers", [NAMED, None], ids=["named", "found by its history"])
async def test_any_walk_over_two_servers_keeps_each_branchs_ids(
    pair: tuple[Served, Served], upstream: Upstream, headers: dict[str, str] | None
) -> None:
    """Turns go on from any of the last answers, on any server."""
    rng = random.Random(7)
    histories: list[tuple[list[dict[str, Any]], LoggedRequest | None]] = [([SYSTEM], None)]
    for number in range(80):
        history, before = rng.choice(histories[-6:])
        upstream.script(Script(say=f"Answer {number}.", reason=rng.choice((None, "Hm.\n")), ids_per_chunk=3))
        asking = [*history, user(f"Question {number}?")]
        reply = await chat(rng.choice(pair).url, asking, stream=rng.random() < 0.5, headers=headers)
        answered = asked(upstream)[-1]
        assert before is None or starts_with(answered, before)
        histories.append(([*asking, reply.message], answered))
    for served in pair:
        assert counted(served, "turns_total", kind="inexact") == 0


async def test_a_digest_that_leads_to_another_session_costs_a_turn_from_text(pair: tuple[Served, Served], store: RedisServer) -> None:
    """As if the digests of two histories were equal: what is stored decides, not what led to it."""
    replies = {text: await chat(pair[0].url, [SYSTEM, user(text)], stream=False) for text in ("mine", "yours")}
    with store.client() as client:
        leads = {key: client.get(key) for key in store.keys("*:history:*")}
        assert len(set(leads.values())) == 2
        for key, session in leads.items():
            client.set(key, next(other for other in leads.values() if other != session) or b"")
    for text, reply in replies.items():
        later = await chat(pair[1].url, [SYSTEM, user(text), reply.message, user("on")], stream=False)
        assert (later.status, later.turn) == (200, "inexact" if text == "mine" else "exact")


async def test_a_deleted_session_is_nowhere(pair: tuple[Served, Served], store: RedisServer) -> None:
    await chat(pair[0].url, [user("hi")], stream=False, headers=NAMED)
    assert store.keys("*:session:*")
    async with aiohttp.ClientSession() as http:
        for status in (200, 404):
            async with http.delete(f"{pair[1].url}/v1/sessions/s") as response:  # which does not know it
                assert response.status == status
        assert not store.keys("*:session:*")
        async with http.delete(f"{pair[0].url}/v1/sessions/s") as response:
            assert response.status == 200


async def test_a_session_that_is_deleted_while_the_store_is_down_is_removed_when_it_is_back(
    pair: tuple[Served, Served], store: RedisServer
) -> None:
    await chat(pair[0].url, [user("hi")], stream=False, headers=NAMED)
    store.freeze()
    async with aiohttp.ClientSession() as http, http.delete(f"{pair[0].url}/v1/sessions/s") as response:
        assert response.status == 200
    store.thaw()
    assert wait_until(lambda: not store.keys("*:session:*"), seconds=20)


@pytest.mark.case("PAR-07")
async def test_nothing_crosses_api_keys(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    options: dict[str, Any] = {"api_keys": ["ours", "theirs"], "state_url": store.url, **PATIENT}
    messages = [SYSTEM, user("hi")]
    with serving(upstream.url, model_folder, **options) as served:
        reply = await chat(served.url, messages, stream=False, headers={**NAMED, "authorization": "Bearer ours"})
        assert (await chat(served.url, messages, stream=False, headers={"authorization": "Bearer ours"})).status == 200
    messages += [reply.message, user("on")]
    for headers in (NAMED, {}):
        with serving(upstream.url, model_folder, **options) as served:
            theirs = await chat(served.url, messages, stream=False, headers={**headers, "authorization": "Bearer theirs"})
            assert theirs.turn == "inexact"
            assert counted(served, "state_loads_total", outcome="found") == 0
            ours = await chat(served.url, messages, stream=False, headers={**headers, "authorization": "Bearer ours"})
            assert ours.turn == "exact"


@pytest.mark.parametrize("damage", ["another session's", "not a record", "no list"])
async def test_a_damaged_list_costs_a_turn_from_text_and_no_more(pair: tuple[Served, Served], store: RedisServer, damage: str) -> None:
    messages = [SYSTEM, user("hi")]
    replies = {name: await chat(pair[0].url, messages, stream=False, headers={"x-session-id": name}) for name in ("mine", "yours")}
    (mine,), (yours,) = store.keys("*:session:mine"), store.keys("*:session:yours")
    with store.client() as client:
        if damage == "another session's":
            client.copy(yours.decode(), mine.decode(), replace=True)
        elif damage == "not a record":
            client.rpush(mine, b"\xff\x00")
        else:
            client.set(mine, b"x")
    history = [*messages, replies["mine"].message, user("on")]
    reply = await chat(pair[1].url, history, stream=False, headers={"x-session-id": "mine"})
    assert (reply.status, reply.turn) == (200, "inexact")
    reason = "error" if damage == "no list" else "damaged"
    assert counted(pair[1], "state_failures_total", reason=reason) >= 1
    assert counted(pair[1], "state_breaker_open") == 0
    again = await chat(pair[1].url, [*history, reply.message, user("on")], stream=False, headers={"x-session-id": "mine"})
    assert again.turn == "exact"
    if damage != "no list":  # which is not ours to remove
        history += [reply.message, user("on"), again.message, user("on")]
        assert (await chat(pair[0].url, history, stream=False, headers={"x-session-id": "mine"})).turn == "exact"


@pytest.mark.case("OPS-04")
async def test_stored_turns_that_are_older_than_the_history_are_completed_from_text(
    pair: tuple[Served, Served], upstream: Upstream, store: RedisServer
) -> None:
    messages = [SYSTEM, user("hi")]
    replies = []
    for _ in range(2):
        replies.append(await chat(pair[0].url, messages, stream=False, headers=NAMED))
        messages += [replies[-1].message, user("on")]
    with store.client() as client:
        client.ltrim(store.keys("*:session:s")[0], 0, 3)  # as a replica has it that lost the last write
    late = await chat(pair[1].url, messages, stream=False, headers=NAMED)
    assert (late.status, late.turn) == (200, "inexact")
    assert starts_with(asked(upstream)[2], asked(upstream)[0])
    after = await chat(pair[1].url, [*messages, late.message, user("on")], stream=False, headers=NAMED)
    assert after.turn == "exact"


@pytest.mark.case("SES-09")
async def test_state_that_is_gone_is_rebuilt_once(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    messages = [SYSTEM]
    with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as served:
        for number in range(3):
            messages.append(user(f"step {number}"))
            messages.append((await chat(served.url, messages, stream=False)).message)
    with store.client() as client:
        client.flushall()
    with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as served:
        kinds = []
        for number in (4, 5):
            messages.append(user(f"step {number}"))
            reply = await chat(served.url, messages, stream=False)
            messages.append(reply.message)
            kinds.append(reply.turn)
        assert kinds == ["inexact", "exact"]
        assert counted(served, "turns_total", kind="inexact") == 1
    assert starts_with(asked(upstream)[-1], asked(upstream)[-2])


async def test_a_store_that_was_emptied_is_filled_again_by_the_next_turn(pair: tuple[Served, Served], store: RedisServer) -> None:
    messages = [SYSTEM, user("hi")]
    for number in range(4):
        reply = await chat(pair[number == 3].url, messages, stream=False, headers=NAMED)
        assert reply.turn == ("exact" if number else "first")
        messages += [reply.message, user("on")]
        if number == 1:
            with store.client() as client:
                client.flushall()


async def test_a_list_that_is_mostly_dead_is_cut(pair: tuple[Served, Served], store: RedisServer, upstream: Upstream) -> None:
    """Each edit of the first message is a branch, and a session keeps the last few."""
    for number in range(520):
        await chat(pair[0].url, [user(f"{number}")], stream=False, headers=NAMED)
    with store.client() as client:
        length = client.llen(store.keys("*:session:s")[0])
    assert length < 200
    last = await chat(pair[0].url, [user("519")], stream=False, headers=NAMED)
    reply = await chat(pair[1].url, [user("519"), last.message, user("on")], stream=False, headers=NAMED)
    assert reply.turn == "exact"


async def test_a_frozen_store_delays_few_turns_and_fails_none(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    async def session(served: Served, number: int) -> list[float]:
        headers = {"x-session-id": f"s{number}"}
        messages = [SYSTEM, user(f"session {number}")]
        seconds = []
        for turn in range(6):
            started = time.monotonic()
            reply = await chat(served.url, messages, stream=True, headers=headers)
            seconds.append(time.monotonic() - started)
            assert (reply.error, reply.turn) == (None, "exact" if turn else "first")
            messages += [reply.message, user("on")]
            await asyncio.sleep(0.05)
        return seconds

    with serving(upstream.url, model_folder, state_url=store.url) as served:
        await session(served, 0)
        store.freeze()
        for number in range(1, 3):
            await session(served, number)
        assert counted(served, "state_breaker_open") == 1
        before = served.server.metrics.registry.get_sample_value("agentserve_state_failures_total", {"reason": "timeout"})
        assert before is not None
        open_seconds = await session(served, 3)
        assert max(open_seconds) < 1.0
        store.thaw()
        assert wait_until(lambda: counted(served, "state_breaker_open") == 0, seconds=5)
        assert wait_until(lambda: len(store.keys("*:session:*")) == 4, seconds=5)  # what could not be written then is written now
        await session(served, 4)
        assert_nothing_is_held(served)


@pytest.mark.case("SES-09")
async def test_a_killed_store_that_comes_back_empty_fails_no_turn(pair: tuple[Served, Served], store: RedisServer) -> None:
    messages = [SYSTEM, user("hi")]
    kinds = []
    for number in range(6):
        reply = await chat(pair[0].url, messages, stream=False, headers=NAMED)
        kinds.append((reply.status, reply.turn))
        messages += [reply.message, user("on")]
        if number == 1:
            store.kill()
        if number == 3:
            assert counted(pair[0], "state_breaker_open") == 1
            store.start()
            assert wait_until(lambda: counted(pair[0], "state_breaker_open") == 0, seconds=5)
    assert kinds == [(200, "first"), *[(200, "exact")] * 5]
    assert wait_until(lambda: counted(pair[1], "state_breaker_open") == 0, seconds=5)
    assert (await chat(pair[1].url, messages, stream=False, headers=NAMED)).turn == "exact"


@pytest.mark.case("OPS-04")
async def test_a_master_that_became_a_replica_is_written_to_again_when_it_is_one_no_more(
    pair: tuple[Served, Served], store: RedisServer
) -> None:
    messages = [SYSTEM, user("hi")]
    with store.client() as client, running_redis() as other:
        for number in range(3):
            reply = await chat(pair[0].url, messages, stream=False, headers=NAMED)
            assert reply.status == 200
            messages += [reply.message, user("on")]
            if number == 0:
                client.replicaof("127.0.0.1", other.port)
        assert wait_until(lambda: counted(pair[0], "state_breaker_open") == 1, seconds=5)
        client.replicaof("NO", "ONE")
        assert wait_until(lambda: counted(pair[0], "state_breaker_open") == 0, seconds=2)
    assert wait_until(lambda: counted(pair[0], "state_unsaved_sessions") == 0, seconds=2)
    assert (await chat(pair[1].url, messages, stream=False, headers=NAMED)).turn == "exact"


async def test_a_full_store_that_evicts_fails_no_turn(pair: tuple[Served, Served], store: RedisServer) -> None:
    rng = random.Random(3)
    histories = [[SYSTEM, user("".join(rng.choices("abcdefgh ", k=20_000)))] for _ in range(30)]
    with store.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 200_000)
        for turn in range(2):
            for number, messages in enumerate(histories):
                reply = await chat(pair[0].url, messages, stream=False, headers={"x-session-id": f"s{number}"})
                assert (reply.status, reply.turn) == (200, "exact" if turn else "first")
                messages += [reply.message, user("on")]
        assert client.info("stats")["evicted_keys"] > 0
        assert len(store.keys("*:session:*")) < len(histories)
    last = await chat(pair[1].url, histories[-1], stream=False, headers={"x-session-id": "s29"})
    assert last.turn == "exact"


async def test_a_server_starts_without_its_store(upstream: Upstream, model_folder: Path, store: RedisServer) -> None:
    store.kill()
    with serving(upstream.url, model_folder, state_url=store.url, **PATIENT) as served:
        assert counted(served, "state_breaker_open") == 1
        messages = [SYSTEM, user("hi")]
        messages += [(await chat(served.url, messages, stream=False)).message, user("on")]
        assert (await chat(served.url, messages, stream=False)).turn == "exact"
        store.start()
        assert wait_until(lambda: len(store.keys("*:session:*")) == 1, seconds=5)
