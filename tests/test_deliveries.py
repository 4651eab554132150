"""One retry is one generation: a request that its client marks as sent before joins, repeats or replaces; any other is a new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from agentserve.deliveries import Deliveries, Mark, mark_of
from agentserve.exchange import Exchange, Sink
from tests.processes import wait_until
from tests.scripted import Posted, asked, post
from tests.serving import Served, read_stream, serving
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio

ASK = [{"role": "user", "content": "Fix the cart."}]
BODY: dict[str, Any] = {"messages": ASK}
STREAM: dict[str, Any] = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
RETRY = {"x-stainless-retry-count": "1"}
FIRST = {"x-stainless-retry-count": "0"}
NAMED = {"x-agentserve-session": "task"}
APPEND = {**NAMED, "x-agentserve-append": "true"}
SLOW = Script(say="one two three four five six seven eight", itl_seconds=0.1)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": ASK},
    "/v1/messages": {"messages": ASK, "max_tokens": 50},
}


@asynccontextmanager
async def sent(served: Served, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
    data = msgspec.json.encode(body)
    async with aiohttp.ClientSession() as http, http.post(f"{served.url}/v1/chat/completions", data=data, headers=headers) as response:
        yield response


async def again(served: Served, body: dict[str, Any], **headers: str) -> tuple[dict[str, str], bytes]:
    async with sent(served, body, {**RETRY, **headers}) as response:
        assert response.status == 200
        return {name.lower(): value for name, value in response.headers.items()}, await response.read()


def retries(served: Served, outcome: str) -> float:
    value = served.server.metrics.registry.get_sample_value("agentserve_retries_total", {"outcome": outcome})
    return value or 0.0


async def test_a_retry_goes_on_with_the_stream_that_runs_from_its_first_byte(served: Served, upstream: Upstream) -> None:
    upstream.script(SLOW)
    async with sent(served, STREAM, FIRST) as first:
        await first.content.readany()
        headers, text = await again(served, STREAM)
        with pytest.raises(aiohttp.ClientError):
            await first.content.read()
    reply = read_stream(text, 200, headers)
    assert reply.message["content"] == SLOW.say
    assert reply.done
    assert headers["x-agentserve-retry"] == "joined"
    assert len(asked(upstream)) == 1
    assert retries(served, "joined") == 1


async def test_a_retry_of_an_answer_that_is_not_streamed_gets_it_too(served: Served, upstream: Upstream) -> None:
    upstream.script(SLOW)
    lost = asyncio.create_task(post(f"{served.url}/v1/chat/completions", BODY, FIRST))
    assert await asyncio.to_thread(wait_until, lambda: len(asked(upstream)) == 1, 5)
    headers, text = await again(served, BODY)
    assert msgspec.json.decode(text)["choices"][0]["message"]["content"] == SLOW.say
    assert headers["x-agentserve-retry"] == "joined"
    told = await lost
    assert (told.status, told.body["error"]["code"]) == (410, "sent_again")
    assert len(asked(upstream)) == 1


async def test_a_retry_of_a_retry_gets_it_as_well(served: Served, upstream: Upstream) -> None:
    upstream.script(SLOW)
    async with sent(served, STREAM, FIRST) as first:
        await first.content.readany()
        async with sent(served, STREAM, RETRY) as second:
            await second.content.readany()
            headers, text = await again(served, STREAM, **{"x-stainless-retry-count": "2"})
    assert read_stream(text, 200, headers).message["content"] == SLOW.say
    assert len(asked(upstream)) == 1


async def test_a_retry_that_leaves_stops_the_engine(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="word " * 500, itl_seconds=0.02))
    async with sent(served, STREAM, FIRST) as first:
        await first.content.readany()
        async with sent(served, STREAM, RETRY) as second:
            await second.content.readany()
            second.close()
            assert await asyncio.to_thread(wait_until, lambda: asked(upstream)[0].aborted_at is not None, 1.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_got_lost_is_given_again(served: Served, upstream: Upstream, path: str, stream: bool) -> None:
    body = {**PATHS[path], "stream": stream}
    data = msgspec.json.encode(body)
    texts = []
    for headers in (FIRST, RETRY, {"x-stainless-retry-count": "2"}):
        async with aiohttp.ClientSession() as http, http.post(served.url + path, data=data, headers=headers) as response:
            assert response.status == 200
            texts.append(await response.read())
            assert response.headers.get("x-agentserve-retry") == (None if headers is FIRST else "repeated")
    assert texts[0] == texts[1] == texts[2]
    assert len(asked(upstream)) == 1


@pytest.mark.parametrize("headers", [{}, FIRST, {"x-stainless-retry-count": "-1"}, {"x-stainless-retry-count": "many"}])
async def test_who_asks_again_without_the_mark_gets_another_answer(served: Served, upstream: Upstream, headers: dict[str, str]) -> None:
    upstream.script(Script(say="first"), Script(say="second"))
    one, two = [await post(f"{served.url}/v1/chat/completions", BODY, headers) for _ in range(2)]
    assert [reply.body["choices"][0]["message"]["content"] for reply in (one, two)] == ["first", "second"]
    assert two.headers["x-agentserve-turn"] != "exact"


async def test_a_retry_after_the_client_had_left_runs_alone(served: Served, upstream: Upstream) -> None:
    upstream.script(SLOW, Script(say="at last"))
    async with sent(served, STREAM, FIRST) as first:
        await first.content.readany()
    assert await asyncio.to_thread(wait_until, lambda: asked(upstream)[0].aborted_at is not None, 1.0)
    headers, text = await again(served, STREAM)
    assert read_stream(text, 200, headers).message["content"] == "at last"
    assert retries(served, "new") == 1


async def test_of_two_requests_that_ran_at_once_neither_is_disturbed(served: Served, upstream: Upstream) -> None:
    upstream.script(SLOW, SLOW, Script(say="third"))

    async def whole() -> Posted:
        return await post(f"{served.url}/v1/chat/completions", BODY, FIRST)

    both = [asyncio.create_task(whole()) for _ in range(2)]
    assert await asyncio.to_thread(wait_until, lambda: len(asked(upstream)) == 2, 5)
    _, text = await again(served, BODY)
    assert msgspec.json.decode(text)["choices"][0]["message"]["content"] == "third"
    assert [(await one).body["choices"][0]["message"]["content"] for one in both] == [SLOW.say] * 2


async def test_a_named_request_is_one_however_often_it_comes(served: Served, upstream: Upstream) -> None:
    url = f"{served.url}/v1/chat/completions"
    one, two = [await post(url, BODY, {"idempotency-key": "a"}) for _ in range(2)]
    assert one.body == two.body
    assert two.headers["x-agentserve-retry"] == "repeated"
    assert retries(served, "new") == 0
    other = await post(url, BODY, {"idempotency-key": "b"})
    assert "x-agentserve-retry" not in other.headers
    changed = await post(url, {**BODY, "seed": 1}, {"idempotency-key": "a"})
    assert "x-agentserve-retry" not in changed.headers
    assert len(asked(upstream)) == 3


async def test_answers_never_cross_keys_sessions_or_routes(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, api_keys=["key-one", "key-two"]) as served:
        for headers in ({"x-api-key": "key-one"}, {"x-api-key": "key-two"}, {"x-api-key": "key-one", "session-id": "s"}):
            answered, _ = await again(served, BODY, **headers)
            assert "x-agentserve-retry" not in answered
        assert len(asked(upstream)) == 3
        answered, _ = await again(served, BODY, **{"x-api-key": "key-two"})
        assert answered["x-agentserve-retry"] == "repeated"
    marks = {mark_of({}, space, path, session, b"x").key for space in "ab" for path in "cd" for session in (None, "e")}
    assert len(marks) == 8


async def test_the_same_messages_as_a_history_and_appended_are_two_requests(served: Served, upstream: Upstream) -> None:
    for headers in (NAMED, APPEND):
        lost = await post(f"{served.url}/v1/chat/completions", BODY, headers)
        answered, text = await again(served, BODY, **headers)
        assert (answered["x-agentserve-retry"], msgspec.json.decode(text)) == ("repeated", lost.body)
    _, text = await again(served, BODY, **NAMED)
    assert msgspec.json.decode(text)["id"] != lost.body["id"]
    assert len(asked(upstream)) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_what_is_appended_again_follows_what_it_followed_before(served: Served, upstream: Upstream, path: str) -> None:
    url, body = served.url + path, PATHS[path]
    upstream.script(Script(say="Go on."), Script(say="partly " * 50, error_after_chunks=2), Script(say="well"), Script(say="more"))
    await post(url, body, NAMED)
    broken = await post(url, body, APPEND)
    second = await post(url, body, {**APPEND, **RETRY})
    assert (broken.status, second.status, second.headers["x-agentserve-turn"]) == (502, 200, "retry")
    assert asked(upstream)[2].prompt_ids == asked(upstream)[1].prompt_ids
    third = await post(url, body, APPEND)
    assert third.headers["x-agentserve-turn"] == "exact", "who asks without the mark goes on from the latest answer"
    assert len(asked(upstream)[3].prompt_ids) > len(asked(upstream)[2].prompt_ids)


async def test_a_failure_is_not_repeated(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(status=503), Script(say="partly " * 50, error_after_chunks=2), Script(say="well"))
    refused = await post(f"{served.url}/v1/chat/completions", STREAM, FIRST)
    assert refused.status == 503
    _, broken = await again(served, STREAM)
    assert b'"error"' in broken
    headers, text = await again(served, STREAM)
    assert read_stream(text, 200, headers).message["content"] == "well"


async def test_the_sdks_own_retries_end_well_and_leave_one_generation_at_a_time(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(ttft_seconds=30), Script(say="ok"), Script(status=503), Script(say="ok"))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=1, timeout=0.5) as client:
        fields: dict[str, Any] = {"model": "demo-model", "messages": ASK}
        completion = await client.chat.completions.create(**fields)
    assert completion.choices[0].message.content == "ok"
    first, second = asked(upstream)
    assert first.aborted_at is not None
    assert first.aborted_at <= second.received_at
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=1) as other:
        message = await other.messages.create(model="demo-model", max_tokens=20, messages=[{"role": "user", "content": "hi"}])
    assert message.content[0].type == "text"
    assert len(asked(upstream)) == 4


async def test_an_answer_too_long_to_keep_is_made_again_alone(upstream: Upstream, model_folder: Path) -> None:
    upstream.script(SLOW, Script(say="short"))
    with serving(upstream.url, model_folder, limits_kept_answer_bytes=0) as served:
        async with sent(served, STREAM, FIRST) as first:
            await first.content.readany()
            headers, text = await again(served, STREAM)
        assert read_stream(text, 200, headers).message["content"] == "short"
        assert retries(served, "replaced") == 1
        one, two = asked(upstream)
        assert one.aborted_at is not None
        assert one.aborted_at <= two.received_at + 0.1
        assert served.server.deliveries.num_bytes == 0


class Answering:
    """Makes an answer of some bytes."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self.answered = False
        self.num_runs = 0

    async def handle(self, wire: Sink) -> None:
        self.num_runs += 1
        wire.prepare(200, {})
        for part in self._parts:
            await wire.write(part)
        self.answered = True
        await wire.write(b"end", more=False)


class Peer:
    """A client's side of an exchange; one that does not read holds up every write."""

    def __init__(self, *, reads: bool = True) -> None:
        self.received = b""
        self._reads = asyncio.Event()
        if reads:
            self._reads.set()

    async def send(self, message: Any) -> None:
        await self._reads.wait()
        self.received += message.get("body", b"")

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def follow(self, exchange: Exchange) -> None:
        await exchange({"type": "http"}, self.receive, self.send)


def kept(max_bytes: int, clock: Any = lambda: 0.0) -> Deliveries:
    return Deliveries(max_bytes, 10.0, clock, lambda _: None)


async def test_a_connection_that_hangs_does_not_hold_up_the_one_that_takes_over() -> None:
    deliveries, run = kept(1 << 20), Answering(b"one ", b"two ")
    stuck, alive = Peer(reads=False), Peer()
    first = asyncio.create_task(stuck.follow(deliveries.exchange(Mark(b"k"), run, silence_seconds=9, keep_alive=None)))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(alive.follow(deliveries.exchange(Mark(b"k", True), run, silence_seconds=9, keep_alive=None)), 2)
    await asyncio.wait_for(first, 2)
    assert alive.received == b"one two end"
    assert stuck.received == b""
    assert run.num_runs == 1


async def test_what_is_kept_is_bounded_in_bytes_and_in_time() -> None:
    now = 0.0
    deliveries = kept(160, lambda: now)
    runs = [Answering(b"%02d----" % number) for number in range(40)]
    for number, run in enumerate(runs):
        await Peer().follow(deliveries.exchange(Mark(b"%d" % number), run, silence_seconds=9, keep_alive=None))
        assert deliveries.num_bytes <= 160
    last = Peer()
    await last.follow(deliveries.exchange(Mark(b"39", True), runs[39], silence_seconds=9, keep_alive=None))
    await Peer().follow(deliveries.exchange(Mark(b"0", True), runs[0], silence_seconds=9, keep_alive=None))
    assert last.received == b"39----end"
    assert (runs[39].num_runs, runs[0].num_runs) == (1, 2)
    now = 11.0
    await Peer().follow(deliveries.exchange(Mark(b"39", True), runs[39], silence_seconds=9, keep_alive=None))
    assert runs[39].num_runs == 2
    assert deliveries.num_bytes == 9
