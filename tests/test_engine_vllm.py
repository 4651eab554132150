"""The vLLM adapter: what goes over the wire, and what every way of failing becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agentserve.dialects.errors import error_headers
from agentserve.engines import Chunk, GenerateRequest, Usage
from agentserve.engines.prometheus import kv_cache_usage, samples
from agentserve.engines.sse import SseParser
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_log import how_it_died
from agentserve.engines.vllm_wire import COMPLETIONS, GENERATE, Route, read_event, read_refusal
from agentserve.errors import EngineError, EngineRefused, EngineUnavailable, SetupError
from tests.raw_server import Connection, raw_server
from tests.upstream import Script, Upstream, UsageOverride

ROUTES = pytest.mark.parametrize("route", [GENERATE, COMPLETIONS], ids=["generate", "completions"])
TOKEN = b'{"choices":[{"index":0,"token_ids":[7]}]}'


def ask(ids: str = "1,2,3", max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    return GenerateRequest("request-1", (ids.encode(),), ids.count(",") + 1, max_tokens, **fields)


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(url, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def run(engine: VllmEngine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def collect(engine: VllmEngine, got: list[int]) -> None:
    async for chunk in engine.generate(ask()):
        got += chunk.ids


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


def start_up(
    generate: Callable[[Connection, bytes], Awaitable[bool]], *, probe_status: int = 400
) -> Callable[[Connection], Awaitable[None]]:
    """A server that starts as vLLM does and gives the generating requests to `generate`, which says whether to keep the connection."""
    answers = {
        "/v1/models": b'{"data":[{"id":"m","max_model_len":100}]}',
        "/version": b'{"version":"1"}',
        "/metrics": b"",
    }

    async def serve(connection: Connection) -> None:
        while (request := await connection.request()) is not None:
            if request.path in answers:
                await connection.answer(200, answers[request.path])
            elif request.body == b"{}":
                await connection.answer(probe_status, b"{}")
            elif not await generate(connection, request.path.encode()):
                return

    return serve


async def answered(connection: Connection) -> bool:
    """One token and the end, as a well engine sends them."""
    await connection.open_stream()
    await connection.send_event(TOKEN)
    await connection.end_stream()
    return True


# --- events


EVENTS = st.lists(st.binary(min_size=1).filter(lambda data: not {10, 13} & set(data)), max_size=8)


@pytest.mark.case("SSE-02")
@given(EVENTS, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(1, 40), min_size=1))
def test_events_are_the_same_however_their_bytes_are_cut(events: list[bytes], end: bytes, sizes: list[int]) -> None:
    stream = b": a comment" + end + end + b"".join(b"id: 1" + end + b"data: " + data + end + end for data in events)
    parser, got, at, number = SseParser(), list[bytes](), 0, 0
    while at < len(stream):
        size = sizes[number % len(sizes)]
        got += parser.feed(stream[at : at + size])
        at, number = at + size, number + 1
    assert got == events


@pytest.mark.case("SSE-02")
def test_an_event_of_megabytes_arrives_whole() -> None:
    data = b"x" * 3_000_000
    stream = b"data:" + data + b"\n\n"
    parser = SseParser()
    assert [event for at in range(0, len(stream), 4096) for event in parser.feed(stream[at : at + 4096])] == [data]


@pytest.mark.case("SSE-02")
def test_the_data_lines_of_one_event_are_joined() -> None:
    assert SseParser().feed(b"data: a\ndata:\ndata:  b\n\n") == [b"a\n\n b"]


def test_an_event_without_its_blank_line_is_not_delivered() -> None:
    assert SseParser().feed(b"data: half\n") == []


@pytest.mark.case("TRC-04")
@pytest.mark.parametrize(("details", "cached"), [(b'{"cached_tokens":0}', 0), (b'{"cached_tokens":5}', 5), (b"null", None)])
def test_no_cached_tokens_and_unknown_cached_tokens_stay_apart(details: bytes, cached: int | None) -> None:
    usage = b'{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":%b}' % details
    assert read_event(b'{"choices":[],"usage":%b}' % usage) == Chunk(usage=Usage(9, 4, cached))


def test_log_probabilities_of_both_routes_have_one_shape() -> None:
    chat = b'{"content":[{"token":"a","logprob":-1.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-1.5,"bytes":[97]}]}]}'
    completions = b'{"text_offset":[0],"token_logprobs":[-1.5],"tokens":["a"],"top_logprobs":[{"a":-1.5}]}'
    shapes = [read_event(b'{"choices":[{"token_ids":[1],"logprobs":%b}]}' % logprobs).logprobs for logprobs in (chat, completions)]
    assert shapes[0] == shapes[1] == msgspec.json.decode(chat)


@pytest.mark.parametrize(
    "message",
    [
        "The decoder prompt (length 8193) is longer than the maximum model length of 8192.",
        "This model's maximum context length is 8192 tokens. However, your prompt contains 8193 input tokens.",
    ],
)
def test_a_prompt_that_is_too_long_is_named_so_that_clients_compact(message: str) -> None:
    refusal = read_refusal(msgspec.json.encode({"error": {"message": message, "code": 400}}), 400)
    assert refusal.code == "context_length_exceeded"
    assert "maximum context length" in refusal.message
    assert message in refusal.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"top_p must be in (0, 1]","param":"top_p","code":400}}', "top_p must be in (0, 1]"),
        (b'{"object":"error","message":"old form","code":400}', "old form"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
    ],
)
def test_the_engines_own_words_survive_a_refusal(body: bytes, message: str) -> None:
    assert message in read_refusal(body, 400).message


DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""vLLM's own words."""


def test_a_dead_engine_is_told_in_words_that_mean_something_to_a_client() -> None:
    refusal = read_refusal(msgspec.json.encode({"error": {"message": DEAD, "type": "InternalServerError", "code": 500}}), 500)
    assert (refusal.status, error_headers(refusal)) == (503, {"retry-after": "2"})
    assert "died" in refusal.message
    assert "stack trace" not in refusal.message
    assert [how_it_died(code) for code in (0, 137)] == ["its engine process is gone", "code 137"]


@pytest.mark.anyio
@pytest.mark.parametrize("num_chunks", [0, 2])
async def test_an_engine_that_dies_under_an_answer_is_unavailable(num_chunks: int) -> None:
    script = Script(ids=tuple(range(9)), error_after_chunks=num_chunks, message=DEAD)
    async with Upstream([script]) as upstream, started(upstream.url) as engine:
        with pytest.raises(EngineError, match="has died") as caught:
            await run(engine, ask())
    assert (caught.value.status, "stack trace" in caught.value.message) == (503, False)


# --- requests


@ROUTES
def test_prompt_ids_are_sent_as_the_ledger_keeps_them(route: Route) -> None:
    odd = "1,  2,\n3"
    body = b"".join(route.body(ask(odd, sampling={"temperature": 0.5}), "m"))
    assert odd.encode() in body
    decoded = msgspec.json.decode(body)
    assert (decoded.get("token_ids") or decoded["prompt"]) == [1, 2, 3]


@ROUTES
def test_hints_travel_under_the_names_of_each_route(route: Route) -> None:
    request = ask(priority=-3, cache_salt="salt", xargs={"hint": 1}, sampling={"temperature": 0.5, "max_tokens": 99}, max_tokens=4)
    body = msgspec.json.decode(b"".join(route.body(request, "m")))
    assert (body["priority"], body["cache_salt"], body["model"], body["request_id"]) == (-3, "salt", "m", "request-1")
    sampling = body["sampling_params"] if route is GENERATE else body
    assert (sampling["temperature"], sampling["max_tokens"]) == (0.5, 4)
    assert sampling["extra_args" if route is GENERATE else "vllm_xargs"] == {"hint": 1}


@pytest.mark.parametrize(
    ("sampling", "text"),
    [({}, False), ({"stop": []}, False), ({"logprobs": None}, False), ({"stop": ["x"]}, True), ({"logprobs": 0}, True)],
)
def test_the_engine_decodes_text_only_where_it_is_read(sampling: dict[str, Any], text: bool) -> None:
    body = msgspec.json.decode(b"".join(GENERATE.body(ask(sampling=sampling), "m")))
    assert (body["output_mode"] == "text", body["sampling_params"]["detokenize"]) == (text, text)


# --- a conversation with the scripted upstream


@pytest.mark.anyio
@ROUTES
async def test_ids_and_usage_arrive_in_any_cutting(route: Route) -> None:
    script = Script(ids=tuple(range(40)), ids_per_chunk=3, bytes_per_write=7, usage=UsageOverride(num_cached_tokens=2))
    async with Upstream([script]) as upstream, started(upstream.url, route=route) as engine:
        chunks = await run(engine, ask(max_tokens=100, session_id="a session/ü"))
        assert ids_of(chunks) == list(range(40))
        assert chunks[-1].usage == Usage(3, 40, 2)
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        assert upstream.requests[-1].path == route.path
        assert upstream.requests[-1].headers["X-Session-ID"] == "a%20session/%C3%BC"


@pytest.mark.anyio
async def test_start_learns_what_the_engine_is() -> None:
    async with Upstream(model="m3", max_model_len=4096) as upstream, started(upstream.url + "/") as engine:
        assert (engine.info.model, engine.info.max_model_len) == ("m3", 4096)
        assert engine.info.name.startswith("vllm ")
        assert await engine.healthy()
        upstream.healthy = False
        assert not await engine.healthy()


@pytest.mark.anyio
async def test_a_key_is_sent_and_a_wrong_one_stops_the_start() -> None:
    async with Upstream(api_key="secret") as upstream:
        async with started(upstream.url, api_key="secret") as engine:
            assert ids_of(await run(engine, ask()))
        with pytest.raises(SetupError, match="API key"):
            async with started(upstream.url, api_key="wrong"):
                pass


@pytest.mark.anyio
async def test_a_model_that_is_not_served_stops_the_start() -> None:
    async with Upstream(model="m3") as upstream:
        with pytest.raises(SetupError, match="'m3'"):
            async with started(upstream.url, model="other"):
                pass


@pytest.mark.anyio
async def test_start_gives_up_at_its_time_limit() -> None:
    async with Upstream() as upstream:
        gone = upstream.url
    with pytest.raises(EngineUnavailable, match="Gave up"):
        async with started(gone, start_timeout_seconds=0.3):
            pass


@pytest.mark.anyio
async def test_start_waits_for_an_engine_that_is_still_loading() -> None:
    async with Upstream() as upstream:
        port = int(upstream.url.rpartition(":")[2])
    engine = VllmEngine(f"http://127.0.0.1:{port}", start_timeout_seconds=20)
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0.4)
    assert not start.done()

    async def no_generate(connection: Connection, path: bytes) -> bool:
        raise AssertionError(path)

    serve = start_up(no_generate)

    async def run_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(Connection(0, reader, writer))
        writer.close()

    async with await asyncio.start_server(run_connection, "127.0.0.1", port):
        await start
        assert engine.info.model == "m"
        await engine.close()


@pytest.mark.anyio
async def test_start_says_what_it_waits_for() -> None:
    async with Upstream() as upstream:
        gone = upstream.url
    said: asyncio.Queue[str] = asyncio.Queue()
    engine = VllmEngine(gone, start_timeout_seconds=60, progress=said.put_nowait)
    start = asyncio.create_task(engine.start())
    told = await said.get()
    assert f"waiting for the engine at {gone}" in told
    assert "60 s at most" in told
    assert "does not answer" in told
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await engine.close()


@pytest.mark.anyio
async def test_unknown_cached_tokens_are_warned_of_once() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0,"total_tokens":3}}\n\ndata: [DONE]\n\n'
    async with Upstream(default=Script(raw_sse=(usage,))) as upstream, started(upstream.url) as engine:
        with capture_logs() as logs:
            await run(engine, ask())
            await run(engine, ask())
    assert [log["cure"] for log in logs if log["log_level"] == "warning"] == ["start vLLM with --enable-prompt-tokens-details"]


@pytest.mark.anyio
async def test_a_refusal_keeps_its_status_and_message() -> None:
    async with Upstream([Script(status=400, message="no such luck")]) as upstream, started(upstream.url) as engine:
        with pytest.raises(EngineRefused, match="no such luck") as caught:
            await run(engine, ask())
    assert caught.value.status == 400


@pytest.mark.anyio
async def test_an_error_event_before_any_token_is_a_refusal() -> None:
    event = b'data: {"error": {"message": "Token id 99 is out of vocabulary", "param": null, "code": 400}}\n\ndata: [DONE]\n\n'
    async with Upstream([Script(raw_sse=(event,))]) as upstream, started(upstream.url) as engine:
        with pytest.raises(EngineRefused, match="out of vocabulary") as caught:
            await run(engine, ask())
    assert caught.value.status == 400


@pytest.mark.anyio
@pytest.mark.parametrize(
    "script",
    [
        Script(ids=(1, 2, 3, 4), cut="fin", cut_after_chunks=2),
        Script(ids=(1, 2, 3, 4), cut="rst", cut_after_chunks=2),
        Script(ids=(1, 2, 3, 4), error_after_chunks=2),
        Script(raw_sse=(b'data: {"choices":[{"token_ids":[1]}]}\n\n', b'data: {"choices":[{"token_ids":[2]}]}\n\n')),
        Script(raw_sse=(b'data: {"choices":[{"token_ids":[1,2]}]}\n\n', b"data: not json\n\n")),
    ],
    ids=["fin", "rst", "error event", "no [DONE]", "not an event"],
)
async def test_a_broken_stream_delivers_what_came_and_then_fails(script: Script) -> None:
    got: list[int] = []
    async with Upstream([script]) as upstream, started(upstream.url) as engine:
        with pytest.raises(EngineError) as caught:
            await collect(engine, got)
    assert got == [1, 2]
    assert not isinstance(caught.value, EngineUnavailable)


@pytest.mark.anyio
@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_an_engine_that_goes_before_its_first_token_twice_is_unavailable(cut: Any) -> None:
    async with Upstream([Script(cut=cut), Script(cut=cut)]) as upstream, started(upstream.url) as engine:
        with pytest.raises(EngineUnavailable):
            await run(engine, ask())


@pytest.mark.anyio
async def test_an_engine_that_is_gone_is_unavailable() -> None:
    async with Upstream() as upstream, started(upstream.url) as engine:
        await upstream.__aexit__()
        with pytest.raises(EngineUnavailable):
            await run(engine, ask())
        with pytest.raises(EngineUnavailable):
            await engine.metrics()
        assert not await engine.healthy()


@pytest.mark.anyio
async def test_metrics_pass_unchanged() -> None:
    async with Upstream() as upstream, started(upstream.url) as engine:
        assert await engine.metrics() == upstream.engine.metrics_text(upstream.model).encode()


# --- connections


@pytest.mark.anyio
@pytest.mark.parametrize("status", [403, 404])
async def test_an_engine_without_the_generate_route_is_asked_for_completions(status: int) -> None:
    paths: list[bytes] = []

    async def generate(connection: Connection, path: bytes) -> bool:
        paths.append(path)
        return await answered(connection)

    async with raw_server(start_up(generate, probe_status=status)) as url, started(url) as engine:
        assert ids_of(await run(engine, ask())) == [7]
    assert paths == [b"/v1/completions"]


@pytest.mark.case("UPS-04")
@pytest.mark.anyio
async def test_a_request_into_a_connection_that_the_engine_had_closed_is_sent_once_more() -> None:
    seen: list[int] = []

    async def generate(connection: Connection, _: bytes) -> bool:
        seen.append(connection.number)
        if connection.number == 0:  # the connection of the start: reused, and closed without a byte
            return False
        return await answered(connection)

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        assert ids_of(await run(engine, ask())) == [7]
    assert seen == [0, 1]


@pytest.mark.case("UPS-04")
@pytest.mark.anyio
@pytest.mark.parametrize("how", ["reset", "close", "after headers"])
async def test_a_fresh_connection_that_ends_before_the_first_token_is_tried_once_more(how: str) -> None:
    """However it ends, the client has seen nothing: it gets one whole answer, and the second attempt is counted."""
    seen: list[int] = []

    async def generate(connection: Connection, _: bytes) -> bool:
        seen.append(connection.number)
        if len(seen) == 1:
            if how == "after headers":
                await connection.open_stream()
            if how == "reset":
                connection.reset()
            return False
        return await answered(connection)

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        assert ids_of(await run(engine, ask())) == [7]
        assert (len(seen), engine.num_retries) == (2, 1)


@pytest.mark.case("UPS-04")
@pytest.mark.anyio
async def test_an_answer_that_breaks_off_after_its_first_token_is_not_asked_for_again() -> None:
    seen: list[int] = []

    async def generate(connection: Connection, _: bytes) -> bool:
        seen.append(connection.number)
        await connection.open_stream()
        await connection.send_event(TOKEN)
        return False

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        with pytest.raises(EngineError, match="in the middle"):
            await run(engine, ask())
    assert (len(seen), engine.num_retries) == (1, 0)


@pytest.mark.case("UPS-04")
@pytest.mark.anyio
async def test_a_request_is_never_sent_a_third_time() -> None:
    seen: list[int] = []

    async def generate(connection: Connection, _: bytes) -> bool:
        seen.append(connection.number)
        return False

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        with pytest.raises(EngineUnavailable):
            await run(engine, ask())
    assert seen == [0, 1]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_a_generation_closes_its_connection_at_once(how: str) -> None:
    first_seen, closed = asyncio.Event(), asyncio.Event()

    async def generate(connection: Connection, _: bytes) -> bool:
        await connection.open_stream()
        await connection.send_event(TOKEN)
        await connection.closed_by_client()
        closed.set()
        return False

    async def consume(engine: VllmEngine) -> None:
        async with aclosing(engine.generate(ask())) as chunks:
            async for _ in chunks:
                first_seen.set()
                if how == "close":
                    return

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        task = asyncio.create_task(consume(engine))
        await asyncio.wait_for(first_seen.wait(), 5)
        if how == "cancel":
            task.cancel()
        await asyncio.wait_for(closed.wait(), 1)
        await asyncio.wait([task])


@pytest.mark.anyio
async def test_a_finished_generation_gives_its_connection_back() -> None:
    numbers: list[int] = []

    async def generate(connection: Connection, _: bytes) -> bool:
        numbers.append(connection.number)
        return await answered(connection)

    async with raw_server(start_up(generate)) as url, started(url) as engine:
        for _ in range(3):
            await run(engine, ask())
    assert numbers == [0, 0, 0]


# --- metrics

METRICS = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a \\"b\\", {c}"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 7.5e-01
vllm:kv_cache_usage_perc_other 9
plain_total 3.0
"""


def test_a_sample_is_found_with_its_labels() -> None:
    assert [(s.labels, s.value) for s in samples(METRICS, "vllm:kv_cache_usage_perc")] == [
        ({"engine": "0", "model_name": 'a "b", {c}'}, 0.25),
        ({"engine": "1", "model_name": "a"}, 0.75),
    ]
    assert [s.value for s in samples(METRICS, "plain_total")] == [3.0]
    assert samples(METRICS, "absent") == []


def test_kv_usage_is_the_mean_of_the_ranks_and_unknown_where_it_is_not_said() -> None:
    assert kv_cache_usage(METRICS) == 0.5
    assert kv_cache_usage(b"") is None
