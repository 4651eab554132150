"""Several engines of one model: sessions stay where their history is, load is even, and a dead engine costs no client anything."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentserve.errors import SetupError
from tests.processes import wait_until
from tests.scripted import asked, assert_nothing_is_held
from tests.serving import Reply, Served, chat, serving
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, in_thread

pytestmark = pytest.mark.anyio
HEAD = "You are the coding agent of a shop.\n" + "".join(f"Rule {number}: run the tests of part {number}.\n" for number in range(150))


def upstreams(renderer: FormatRenderer, number: int = 2, **fields: Any) -> list[Upstream]:
    return [Upstream(renderer=renderer, kv=KvModel(num_blocks=8192, block_size=32, **fields)) for _ in range(number)]


@contextmanager
def fleet(engines: Sequence[Upstream], model_folder: Path, *, events: bool = True, **settings: Any) -> Iterator[Served]:
    """A server in front of `engines`."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(in_thread(engine))
        if events:
            told = [engine.engine.events for engine in engines]
            settings["engine_events"] = ",".join(each.endpoint for each in told if each)
            settings["engine_events_replay"] = ",".join(each.replay_endpoint for each in told if each)
        yield stack.enter_context(serving(",".join(engine.url for engine in engines), model_folder, **settings))


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def turn(served: Served, session: str, history: list[dict[str, Any]]) -> Reply:
    """One turn; its answer and a next message join `history`."""
    reply = await chat(served.url, history, stream=False, headers={"x-session-id": session})
    if reply.status == 200:
        history += [reply.message, say(f"Go on with {session}, step {len(history)}: " + "look again. " * 10)]
    return reply


@pytest.mark.case("UPS-07")
@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("number", [2, 3])
async def test_sessions_stick_and_the_load_is_even(renderer: FormatRenderer, model_folder: Path, events: bool, number: int) -> None:
    engines = upstreams(renderer, number)
    with fleet(engines, model_folder, events=events) as served:
        histories = {
            f"s{n}": [{"role": "system", "content": HEAD}, say(f"Job {n}. " + "read this. " * (40 + 7 * n % 90))] for n in range(24)
        }
        replies = []
        for _ in range(4):
            for session, history in histories.items():
                replies.append(await turn(served, session, history))
                await asyncio.sleep(0.002)  # the events of what was stored
    places: dict[str, Counter[int]] = {session: Counter() for session in histories}
    for place, engine in enumerate(engines):
        for request in asked(engine):
            places[request.headers["X-Session-ID"]][place] += 1
    stuck = sum(max(count.values()) for count in places.values())
    assert stuck >= 0.95 * len(replies)
    tokens = [sum(len(request.prompt_ids) for request in asked(engine)) for engine in engines]
    assert max(tokens) < 1.5 * min(tokens)
    cached = sum(request.num_cached_tokens or 0 for engine in engines for request in asked(engine))
    ceiling = sum(reply.usage["agentserve"]["ceiling_block_tokens"] for reply in replies if reply.usage)
    assert cached >= 0.9 * ceiling
    assert {reply.turn for reply in replies} == {"first", "exact"}


async def test_a_busy_engine_sends_a_turn_elsewhere_and_the_cause_is_told(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer, prefill_tokens_per_second=20_000)
    with fleet(engines, model_folder) as served:
        history = [{"role": "system", "content": HEAD}, say("First.")]
        await turn(served, "a", history)
        home = served.server.replicas.home(next(iter(served.server.namespaces.sessions())))
        home.uncached_tokens += 1_000_000  # as if others had come
        await asyncio.sleep(0.1)
        reply = await turn(served, "a", history)
        home.uncached_tokens -= 1_000_000
        assert reply.usage is not None
        missed = reply.usage["agentserve"]["missed_tokens"]
        assert missed["other_replica"] > 0.8 * reply.usage["prompt_tokens"]
        assert sum(missed.values()) == reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"]
        assert reply.turn == "exact"
    assert [len(asked(engine)) for engine in engines] == [1, 1]


@pytest.mark.case("UPS-02")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", [Script(status=500), Script(cut="rst"), Script(status=503, retry_after_seconds=1)])
async def test_a_dead_engine_costs_no_client_anything_and_comes_back(
    renderer: FormatRenderer, model_folder: Path, how: Script, stream: bool
) -> None:
    """It says that it is healthy all the time."""
    dead, well = upstreams(renderer)
    dead.default = how
    with fleet([dead, well], model_folder) as served:
        for number in range(20):
            reply = await chat(served.url, [say(f"hi {number}")], stream=stream)
            assert (reply.status, reply.error, reply.message["content"]) == (200, None, "ok")
        assert 1 <= len(dead.requests) - 1 <= 3 * (1 + (how.cut is not None))  # a cut connection is tried again at once
        text = served.server.metrics.text().decode()
        assert "agentserve_closed_engines 1.0" in text
        assert f"agentserve_moved_turns_total {served.server.replicas.num_moved_turns}.0" in text
        assert served.server.replicas.num_moved_turns >= 1
        before = len(dead.requests)
        dead.default = Script()
        deadline = time.monotonic() + 10
        while len(dead.requests) == before and time.monotonic() < deadline:
            await asyncio.sleep(0.3)
            assert (await chat(served.url, [say(f"again {time.monotonic()}")], stream=stream)).status == 200
        assert len(dead.requests) > before, "it is well again, and nobody asks it"
        assert (await chat(served.url, [say("and again")], stream=stream)).status == 200
        assert "agentserve_closed_engines 0.0" in served.server.metrics.text().decode()
        assert_nothing_is_held(served)


async def test_turns_that_a_dead_engine_leaves_are_shared_out_among_the_others(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer, 3)
    dead, *others = engines
    dead.default = Script(status=500, ttft_seconds=2.0)  # all have been sent by then, also on a busy machine
    for engine in others:
        engine.default = Script(ttft_seconds=2.5)
    with fleet(engines, model_folder, events=False) as served:
        replies = await asyncio.gather(*(chat(served.url, [say(f"job {number}")], stream=False) for number in range(18)))
        assert {reply.status for reply in replies} == {200}
        assert served.server.replicas.num_moved_turns >= 4
        shares = [len(asked(engine)) for engine in others]
        assert max(shares) - min(shares) <= 3, shares
        # A client has its answer a moment before the server is through with the turn.
        assert await asyncio.to_thread(wait_until, lambda: all(replica.load == 0 for replica in served.server.replicas), 10)


async def test_where_no_engine_is_left_the_last_error_is_told(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer)
    for engine in engines:
        engine.default = Script(status=500, message="out of order")
    with fleet(engines, model_folder) as served:
        replies = [await chat(served.url, [say("hi")], stream=False) for _ in range(3)]
        assert [reply.status for reply in replies] == [502] * 3
        for engine in engines:
            engine.default = Script(status=400, message="never heard of it")
        before = sum(len(asked(engine)) for engine in engines)
        assert (await chat(served.url, [say("hi")], stream=False)).status == 400
        assert sum(len(asked(engine)) for engine in engines) == before + 1, "what an engine refuses, another refuses too"
        assert_nothing_is_held(served)


@pytest.mark.case("UPS-02")
async def test_a_slow_health_route_kills_no_engine(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer)
    engines[0].healthy = False
    with fleet(engines, model_folder) as served:
        for number in range(6):
            assert (await chat(served.url, [say(f"hi {number}")], stream=False)).status == 200
        assert all(asked(engine) for engine in engines)
        async with aiohttp.ClientSession() as http, http.get(f"{served.url}/ready") as response:
            assert response.status == 200, "one that answers is enough"


async def test_an_answer_that_breaks_off_is_not_moved(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer)
    for engine in engines:
        engine.default = Script(say="one two three", cut="rst", cut_after_chunks=2)
    with fleet(engines, model_folder) as served:
        reply = await chat(served.url, [say("hi")], stream=True)
        assert reply.error is not None
        assert sum(len(asked(engine)) for engine in engines) == 1
        assert_nothing_is_held(served)


async def test_a_session_survives_the_death_of_its_engine_exactly(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer)
    with fleet(engines, model_folder) as served:
        history = [{"role": "system", "content": HEAD}, say("First.")]
        await turn(served, "a", history)
        first = next(engine for engine in engines if asked(engine))
        first.default = Script(status=500)
        reply = await turn(served, "a", history)
        other = next(engine for engine in engines if engine is not first)
        assert (reply.status, reply.turn, len(asked(other))) == (200, "exact", 1)
        known = asked(first)[0]
        assert asked(other)[0].prompt_ids[: len(known.prompt_ids)] == known.prompt_ids
        assert sum(reply.usage["agentserve"]["missed_tokens"].values()) == reply.usage["prompt_tokens"] if reply.usage else False
        again = await turn(served, "a", history)
        assert (again.turn, len(asked(other))) == ("exact", 2), "it stays where it is now"


@pytest.mark.parametrize(("field", "value"), [("model", "another"), ("max_model_len", 1024)])
async def test_engines_that_differ_are_refused(renderer: FormatRenderer, model_folder: Path, field: str, value: Any) -> None:
    engines = upstreams(renderer)
    setattr(engines[1], field, value)
    with pytest.raises(SetupError, match=field), fleet(engines, model_folder):
        pass


async def test_every_engine_needs_its_events(renderer: FormatRenderer, model_folder: Path) -> None:
    with pytest.raises(SetupError, match="one for each"), fleet(upstreams(renderer), model_folder, events=False, engine_events="tcp://a:1"):
        pass


async def test_the_cache_lists_every_engine(renderer: FormatRenderer, model_folder: Path) -> None:
    engines = upstreams(renderer)
    with fleet(engines, model_folder) as served:
        async with aiohttp.ClientSession() as http, http.get(f"{served.url}/v1/cache") as response:
            shown = (await response.json())["engines"]
        async with aiohttp.ClientSession() as http, http.get(f"{served.url}/version") as response:
            version = await response.json()
    assert [engine["url"] for engine in shown] == version["engine_urls"] == [engine.url for engine in engines]
    assert all(engine["open"] for engine in shown)
