"""The scripted upstream keeps vLLM's wire contract, so that what passes against it passes against the real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat import OutputParser, Piece
from model.conversation import AssistantItem, Head, Item, Tool, ToolCall, UserItem
from tests.upstream import BlockCache, ByteRenderer, FormatRenderer, KvModel, NoRoom, Script, Upstream, UsageOverride, in_thread
from tests.upstream.cache import Allocation, BlockRemoved, BlockStored
from tests.upstream.events import END_OF_REPLAY

pytestmark = pytest.mark.anyio

GENERATE = "/inference/v1/generate"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def post(upstream: Upstream, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(upstream.url + path, json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        return response.status, answer


async def stream(upstream: Upstream, path: str, body: dict[str, Any]) -> list[Any]:
    """The decoded events; [DONE] as text."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as session, session.post(upstream.url + path, json=body | options) as response:
        payloads = [event.removeprefix(b"data: ") for event in (await response.read()).split(b"\n\n") if event]
    return [payload.decode() if payload == b"[DONE]" else msgspec.json.decode(payload) for payload in payloads]


async def until(happened: Callable[[], bool]) -> None:
    for _ in range(1000):
        if happened():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within 5 s")


def ask(ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": list(ids), "sampling_params": {"max_tokens": 64, **sampling}}


async def test_generate_answers_the_scripted_ids_and_logs_the_prompt() -> None:
    async with Upstream([Script(ids=(5, 6, 256))]) as upstream:
        status, answer = await post(upstream, GENERATE, ask([1, 2, 3]))
        assert status == 200
        assert answer["choices"][0]["token_ids"] == [5, 6, 256]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
        assert upstream.requests[0].prompt_ids == (1, 2, 3)
        assert upstream.requests[0].generated_ids == (5, 6, 256)


async def test_a_stream_ends_with_finish_reason_then_usage_then_done() -> None:
    async with Upstream([Script(ids=(5, 6, 7, 256), ids_per_chunk=3)]) as upstream:
        first, last, usage, done = await stream(upstream, GENERATE, ask([1]))
        assert [choice["token_ids"] for choice in first["choices"] + last["choices"]] == [[5, 6, 7], [256]]
        assert (first["choices"][0]["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "stop")
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert done == "[DONE]"


async def test_completions_returns_prompt_and_output_ids_on_request() -> None:
    async with Upstream([Script(say="hé"), Script(say="hé")]) as upstream:
        body = {"prompt": [1, 2], "max_tokens": 9, "return_token_ids": True}
        _, answer = await post(upstream, "/v1/completions", body)
        assert answer["choices"][0]["prompt_token_ids"] == [1, 2]
        assert answer["choices"][0]["token_ids"] == [*"hé".encode(), 256]
        events = await stream(upstream, "/v1/completions", body)
        assert [event["choices"][0]["text"] for event in events[:4]] == ["h", "", "é", ""]


async def test_chat_answers_text_reasoning_and_calls() -> None:
    call = ToolCall("call_1", "read_file", {"path": "a.py"})
    async with Upstream([Script(say="Look.", reason="Hm.", calls=(call,))]) as upstream:
        _, answer = await post(upstream, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Go"}]})
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Look.", "Hm.")
        assert message["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path":"a.py"}'}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("sampling", "ids", "finish", "stop_reason"),
    [
        ({"max_tokens": 3}, b"abc", "length", None),
        ({"max_tokens": 7, "ignore_eos": True}, b"abcdabc", "length", None),
        ({"stop": ["bc"]}, b"abc", "stop", "bc"),
        ({"stop_token_ids": [ord("b")]}, b"ab", "stop", ord("b")),
    ],
)
async def test_sampling_parameters_end_the_generation(sampling: dict[str, Any], ids: bytes, finish: str, stop_reason: object) -> None:
    async with Upstream([Script(say="abcd")]) as upstream:
        _, answer = await post(upstream, GENERATE, ask([1], **sampling))
        choice = answer["choices"][0]
        assert bytes(choice["token_ids"]) == ids
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop_reason)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_goes_away_is_logged_within_100_ms(streaming: bool) -> None:
    async with Upstream([Script(say="long", itl_seconds=30)]) as upstream, aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(upstream.url + GENERATE, json=ask([1]) | {"stream": streaming}))
        await until(lambda: bool(upstream.requests) and upstream.requests[0].num_sent_chunks >= streaming)
        left_at = time.monotonic()
        if streaming:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: upstream.requests[0].aborted_at is not None)
        assert (upstream.requests[0].aborted_at or 0.0) - left_at < 0.1
        assert upstream.requests[0].finished_at is None


@pytest.mark.parametrize(("how", "error"), [("fin", aiohttp.ClientPayloadError), ("rst", aiohttp.ClientError)])
async def test_a_cut_ends_the_body_in_its_middle(how: Any, error: type[Exception]) -> None:
    async with Upstream([Script(say="abc", cut=how, cut_after_chunks=2)]) as upstream, aiohttp.ClientSession() as session:
        with pytest.raises(error):
            async with session.post(upstream.url + GENERATE, json=ask([1]) | {"stream": True}) as response:
                await response.read()
        assert upstream.requests[0].num_sent_chunks == 2
        assert upstream.requests[0].aborted_at is None


async def test_a_scripted_status_carries_retry_after() -> None:
    async with Upstream([Script(status=503, retry_after_seconds=2)]) as upstream, aiohttp.ClientSession() as session:
        async with session.post(upstream.url + GENERATE, json=ask([1])) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "2")
        status, _ = await post(upstream, GENERATE, ask([1]))
        assert status == 200


async def test_raw_bytes_and_an_error_event_are_sent_as_scripted() -> None:
    scripts = [
        Script(raw_sse=(b": hi\r\n\r\n", b"data: [DO", b"NE]\r\n\r\n")),
        Script(say="abc", error_after_chunks=1, message="engine died"),
    ]
    async with Upstream(scripts) as upstream, aiohttp.ClientSession() as session:
        async with session.post(upstream.url + GENERATE, json=ask([1]) | {"stream": True}) as response:
            assert await response.read() == b": hi\r\n\r\ndata: [DONE]\r\n\r\n"
        events = await stream(upstream, GENERATE, ask([1]))
        assert events[1]["error"]["message"] == "engine died"
        assert events[2] == "[DONE]"


async def test_hidden_ids_and_reported_counts_differ_from_the_truth() -> None:
    script = Script(say="abc", drop_ids_in_chunks=frozenset({1}), usage=UsageOverride(num_cached_tokens=7))
    async with Upstream([script]) as upstream:
        events = await stream(upstream, GENERATE, ask([1]))
        assert [event["choices"][0]["token_ids"] for event in events[:4]] == [[97], [], [99], [256]]
        assert events[4]["usage"]["completion_tokens"] == 4
        assert events[4]["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


async def test_bad_requests_get_the_engines_status() -> None:
    async with Upstream(max_model_len=8, api_key="secret") as upstream:
        key = {"Authorization": "Bearer secret"}
        assert (await post(upstream, GENERATE, ask([1])))[0] == 401
        assert (await post(upstream, GENERATE, {"sampling_params": {}}, key))[0] == 400
        assert (await post(upstream, GENERATE, ask([1]) | {"model": "other"}, key))[0] == 404
        status, answer = await post(upstream, GENERATE, ask(range(9), max_tokens=1), key)
        assert status == 400
        assert "maximum context length is 8" in answer["error"]["message"]


async def test_the_last_user_text_chooses_the_script() -> None:
    by_last_user = {"slow": Script(say="one"), "fast": Script(say="two")}
    async with Upstream(by_last_user=by_last_user) as upstream:
        encode = ByteRenderer().encode
        for text, expected in [("slow", b"one"), ("slow then fast", b"two"), ("fast then slow", b"one"), ("neither", b"ok")]:
            _, answer = await post(upstream, GENERATE, ask(encode(text)))
            assert bytes(answer["choices"][0]["token_ids"][:-1]) == expected


async def test_other_routes_say_what_the_engine_is() -> None:
    async with Upstream(kv=KvModel(block_size=32, num_blocks=64)) as upstream, aiohttp.ClientSession() as session:
        await post(upstream, GENERATE, ask(range(64)))
        await post(upstream, GENERATE, ask(range(64)))
        models = await (await session.get(upstream.url + "/v1/models")).json()
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("demo-model", 131_072)
        assert (await (await session.get(upstream.url + "/version")).json()) == {"version": "0.32.0"}
        assert (await (await session.post(upstream.url + "/tokenize", json={"prompt": "ab"})).json())["tokens"] == [97, 98]
        metrics = await (await session.get(upstream.url + "/metrics")).text()
        info = 'block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="65",prefix_caching_hash_algo="sha256"'
        assert f"vllm:cache_config_info{{{info}}} 1.0" in metrics
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="demo-model"} 32.0' in metrics
        assert 'source="local_cache_hit"} 32.0' in metrics
        assert "# TYPE vllm:kv_cache_usage_perc gauge" in metrics
        upstream.healthy = False
        assert (await session.get(upstream.url + "/health")).status == 503


def test_synchronous_callers_reach_it_in_a_thread() -> None:
    async def call(upstream: Upstream) -> int:
        return (await post(upstream, GENERATE, ask([1])))[0]

    with in_thread(Upstream()) as upstream:
        assert asyncio.run(call(upstream)) == 200
        assert upstream.requests[0].prompt_ids == (1,)


async def cached_tokens(upstream: Upstream, ids: Sequence[int], num_output: int = 1, salt: str | None = None) -> int:
    upstream.script(Script(ids=tuple(range(1000, 1000 + num_output))))
    body = ask(ids) | ({"cache_salt": salt} if salt else {})
    _, answer = await post(upstream, GENERATE, body)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def test_hits_are_whole_blocks_without_the_last_prompt_token() -> None:
    """The figures are a real vLLM's, measured with blocks of 32."""
    async with Upstream(kv=KvModel(block_size=32, num_blocks=64)) as upstream:
        prompt = list(range(320))
        assert await cached_tokens(upstream, prompt, num_output=40) == 0
        assert await cached_tokens(upstream, prompt) == 288
        assert await cached_tokens(upstream, [*prompt, 7]) == 320
        assert await cached_tokens(upstream, [*prompt, *range(1000, 1040), *range(32)]) == 352
        assert await cached_tokens(upstream, prompt, salt="tenant") == 0
        assert await cached_tokens(upstream, prompt, salt="tenant") == 288


async def test_prefill_time_follows_the_tokens_that_miss() -> None:
    async with Upstream(kv=KvModel(num_blocks=100, prefill_tokens_per_second=2000)) as upstream:
        started = time.monotonic()
        await cached_tokens(upstream, range(400))
        cold = time.monotonic() - started
        await cached_tokens(upstream, range(400))
        assert cold >= 0.2
        assert time.monotonic() - started - cold < cold / 2


async def test_a_request_waits_until_its_blocks_are_free() -> None:
    async with Upstream([Script(ids=(1, 2), itl_seconds=0.3)], kv=KvModel(block_size=16, num_blocks=4)) as upstream:
        first = asyncio.create_task(post(upstream, GENERATE, ask(range(60))))
        await asyncio.sleep(0.1)
        await post(upstream, GENERATE, ask(range(100, 140)))
        assert first.done()
        assert (await post(upstream, GENERATE, ask(range(65))))[0] == 400


async def test_published_events_with_replay_give_the_resident_blocks() -> None:
    async with Upstream(kv=KvModel(block_size=4, num_blocks=8)) as upstream:
        events = upstream.engine.events
        assert events is not None
        await cached_tokens(upstream, range(12))
        events.lose(1)
        await cached_tokens(upstream, range(50, 62))
        await cached_tokens(upstream, range(80, 92))
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as replay:
            replay.connect(events.replay_endpoint)
            await replay.send_multipart([b"", (0).to_bytes(8, "big")])
            resident: set[int] = set()
            numbers = []
            while (frames := await replay.recv_multipart())[2] != END_OF_REPLAY:
                assert frames[1] == b"kv-events"
                numbers.append(int.from_bytes(frames[2], "big"))
                for event in msgspec.msgpack.decode(frames[3])[1]:
                    change = resident.update if event["type"] == "BlockStored" else resident.difference_update
                    change(event["block_hashes"])
        assert numbers == list(range(len(numbers)))
        assert upstream.engine.cache is not None
        assert len(resident) == upstream.engine.cache.num_resident_blocks
        assert events.num_lost == 1


async def test_a_subscriber_sees_a_lost_batch_as_a_gap_in_the_numbers() -> None:
    async with Upstream(kv=KvModel(block_size=4, num_blocks=64)) as upstream:
        events = upstream.engine.events
        assert events is not None
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.connect(events.endpoint)
            subscriber.subscribe(b"kv-events")
            await asyncio.sleep(0.2)
            for start in (0, 100, 200):
                events.lose(1 if start == 100 else 0)
                await cached_tokens(upstream, range(start, start + 4))
            received = [await subscriber.recv_multipart() for _ in range(2)]
        assert [int.from_bytes(number, "big") for _, number, _ in received] == [0, 2]
        (stored,) = msgspec.msgpack.decode(received[1][2])[1]
        assert stored["token_ids"] == [200, 201, 202, 203]
        assert (stored["parent_block_hash"], stored["block_size"], stored["medium"]) == (None, 4, "GPU")


Prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 12), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(Prompts)
def test_the_pool_never_evicts_what_runs_and_its_events_tell_its_content(steps: list[tuple[int, int, int, bool]]) -> None:
    cache, running, resident = BlockCache(KvModel(block_size=4, num_blocks=24)), list[Allocation](), dict[int, int]()
    for session, num_prompt, num_output, release in steps:
        ids = [session] * num_prompt
        try:
            allocation = cache.allocate(ids, num_output, None, None)
        except NoRoom:
            continue
        if allocation is not None:
            cache.store(allocation, num_prompt)
            for token in range(num_output):
                cache.append(allocation, [token])
            running.append(allocation)
        if running and (release or allocation is None):
            cache.free(running.pop(0))
        for event in cache.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            for key in event.block_hashes:
                resident[key] = resident.get(key, 0) + (1 if isinstance(event, BlockStored) else -1)
        assert sum(resident.values()) == cache.num_resident_blocks
        for held in running:
            assert all(resident[key] > 0 for key in held.hashes[: held.num_stored_blocks])
    for held in running:
        cache.free(held)
    assert cache.usage == 0


class BracketFormat:
    """A chat format of brackets: `<role ... >`, whose generation prompt may open the reasoning."""

    name = "bracket"
    stop_ids: tuple[int, ...] = (1,)
    call_ids: tuple[int, ...] = ()

    def __init__(self, opens_reasoning: bool) -> None:
        self._opening: list[Piece] = ["assistant:", "think("] if opens_reasoning else ["assistant:"]

    def head(self, head: Head) -> list[Piece]:
        return [0, head.system]

    def item(self, item: Item, previous: Item | None) -> list[Piece]:
        assert isinstance(item, AssistantItem)
        reasoning: list[Piece] = [] if item.reasoning is None else [f"think({item.reasoning})"]
        return [1, "assistant:", *reasoning, item.text, 1]

    def open_turn(self, previous: Item | None) -> list[Piece]:
        return [1, *self._opening]

    def close_turn(self, last_id: int | None) -> list[Piece]:
        return []

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        raise NotImplementedError

    def call_constraint(self, tools: Sequence[Tool], *, required: bool, single: bool) -> None:
        return None


class PieceBytes(ByteRenderer):
    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        return [token for piece in pieces for token in ([piece] if isinstance(piece, int) else self.encode(piece))]


@pytest.mark.parametrize(
    ("opens_reasoning", "item", "generated"),
    [
        (False, AssistantItem("Hi"), "Hi"),
        (False, AssistantItem("Hi", "Hm"), "think(Hm)Hi"),
        (True, AssistantItem("Hi", "Hm"), "Hm)Hi"),
        (True, AssistantItem("Hi"), ")Hi"),
    ],
)
def test_a_format_renders_what_follows_its_generation_prompt(opens_reasoning: bool, item: AssistantItem, generated: str) -> None:
    renderer = FormatRenderer(BracketFormat(opens_reasoning), PieceBytes())
    assert bytes(renderer.render(item)).decode() == generated
    assert BracketFormat(opens_reasoning).open_turn(UserItem(""))[0] == renderer.stop_id


@pytest.mark.engine
# Importing torch and vLLM warns of their own affairs.
@pytest.mark.filterwarnings("default")
async def test_every_body_is_one_that_vllm_itself_defines() -> None:
    """Each key we send exists in vLLM's own response models, and each model accepts our body."""
    from vllm.entrypoints.openai.completion import protocol as completions
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as generate

    cases: list[tuple[str, dict[str, Any], Any, Any]] = [
        (GENERATE, ask([1, 2]), generate.GenerateTokensResponse, generate.GenerateTokensStreamResponse),
        (GENERATE, ask([1]) | {"output_mode": "text"}, generate.GenerateTextResponse, generate.GenerateTextStreamResponse),
        ("/v1/completions", {"prompt": [1, 2]}, completions.CompletionResponse, completions.CompletionStreamResponse),
    ]
    async with Upstream() as upstream:
        for path, body, full_model, event_model in cases:
            _, answer = await post(upstream, path, body | {"return_token_ids": True})
            events = await stream(upstream, path, body | {"return_token_ids": True})
            for data, model in [(answer, full_model), *[(event, event_model) for event in events[:-1]]]:
                parsed = model.model_validate(data)
                assert set(data) <= set(type(parsed).model_fields)
                for choice, sent in zip(parsed.choices, data["choices"], strict=True):
                    assert set(sent) <= set(type(choice).model_fields)
