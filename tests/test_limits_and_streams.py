"""Token limits, tenants, usage, silence, slow readers and an engine that says no: as clients of each dialect see them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest
from structlog.testing import capture_logs

from agentserve.engines.prometheus import samples
from agentserve.engines.vllm import VllmEngine
from model.conversation import Head, ToolCall, UserItem
from tests.dialect_forms import FORMS, Body, Form
from tests.processes import wait_until
from tests.raw_client import post_head, raw_client
from tests.real_engine import RealEngine
from tests.scripted import asked, assert_nothing_is_held, post, starts_with
from tests.serving import Served, chat, serving
from tests.test_metrics import values
from tests.test_turns import SYSTEM, fetch, user
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, UsageOverride, in_thread

pytestmark = pytest.mark.anyio

every_form = pytest.mark.parametrize("form", FORMS, ids=["chat", "messages", "responses"])
LIMITS = {"/v1/chat/completions": "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}

WRONG_LIMITS: list[Any] = [0, -1, 1.5, "100", True, [], {}, -(10**30)]


def sent_limit(upstream: Upstream) -> int:
    limit: int = asked(upstream)[-1].body["sampling_params"]["max_tokens"]
    return limit


# Token limits


@pytest.mark.case("PAR-01")
async def test_without_a_limit_an_answer_may_fill_the_context_where_its_api_allows_that(served: Served, upstream: Upstream) -> None:
    limits: list[tuple[Body, int | None]] = [({}, None), ({"max_tokens": None}, None), ({"max_completion_tokens": None}, None)]
    limits += [({"max_completion_tokens": 7}, 7), ({"max_tokens": 9}, 9), ({"max_tokens": 9, "max_completion_tokens": 7}, 7)]
    for fields, limit in limits:
        assert (await chat(served.url, [user("hi")], stream=False, **fields)).status == 200
        assert sent_limit(upstream) == (limit or upstream.max_model_len - len(asked(upstream)[-1].prompt_ids))
    for fields in ({}, {"max_output_tokens": None}):
        assert (await post(f"{served.url}/v1/responses", {"input": "hi", **fields})).status == 200
        assert sent_limit(upstream) == upstream.max_model_len - len(asked(upstream)[-1].prompt_ids)
    before = len(asked(upstream))
    for fields in ({}, {"max_tokens": None}):
        refused = await post(f"{served.url}/v1/messages", {"messages": [user("hi")], **fields})
        assert (refused.status, refused.body["error"]["type"]) == (400, "invalid_request_error")
        assert "max_tokens" in refused.body["error"]["message"]
    assert len(asked(upstream)) == before


@pytest.mark.case("PAR-02")
@every_form
async def test_limits_that_are_none_are_refused_and_large_ones_are_cut(served: Served, upstream: Upstream, form: Form) -> None:
    field = LIMITS[form.path]
    for stream in (True, False):
        for wrong in WRONG_LIMITS:
            refused = await post(served.url + form.path, {**form.body(Head("s"), [UserItem("hi")]), field: wrong, "stream": stream})
            assert refused.status == 400, wrong
            assert refused.body["error"]["message"]
    assert not asked(upstream)
    for large in (upstream.max_model_len, 32_000_000, 10**12):
        assert (await post(served.url + form.path, {**form.body(Head("s"), [UserItem("hi")]), field: large})).status == 200
        assert sent_limit(upstream) == upstream.max_model_len - len(asked(upstream)[-1].prompt_ids)


@pytest.mark.case("PAR-03")
@pytest.mark.parametrize("stream", [True, False])
@every_form
async def test_a_prompt_that_is_too_long_leaves_its_session_ready_for_a_shorter_one(
    renderer: FormatRenderer, model_folder: Path, form: Form, stream: bool
) -> None:
    upstream = Upstream(renderer=renderer, kv=KvModel(num_blocks=256, block_size=32), max_model_len=1024)
    with in_thread(upstream), serving(upstream.url, model_folder) as served:
        items: list[Any] = [UserItem("hi")]
        items.append(form.said((await post(served.url + form.path, form.body(Head("s"), items))).body))
        for words in (2000, 6000):
            body = {**form.body(Head("s"), [*items, UserItem("word " * words)]), "stream": stream}
            refused = await post(served.url + form.path, body)
            assert refused.status == 400
            error = refused.body["error"]
            assert error.get("code") == "context_length_exceeded" or "prompt is too long" in error["message"]
        assert len(asked(upstream)) == 1
        shorter = await post(served.url + form.path, form.body(Head("s"), [*items, UserItem("summary")]))
        assert shorter.headers["x-agentserve-turn"] == "exact"
        assert starts_with(asked(upstream)[1], asked(upstream)[0])
        assert_nothing_is_held(served)


# Tenants


@pytest.mark.case("PAR-07")
@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
@every_form
async def test_a_tenant_cannot_choose_its_salt(upstream: Upstream, model_folder: Path, form: Form, share: bool) -> None:
    with serving(upstream.url, model_folder, api_keys=["key-one", "key-two"], share_prefixes=share) as served:
        body = form.body(Head("You are the coding agent of a shop.\n" * 30), [UserItem("hi")])
        for key in ("key-one", "key-two", "key-one"):
            for guess in ({}, {"cache_salt": "guess"}):
                reply = await post(served.url + form.path, {**body, **guess}, {"authorization": f"Bearer {key}"})
                assert reply.status == 200
    salts = [request.body.get("cache_salt") for request in asked(upstream)]
    cached = [bool(request.num_cached_tokens) for request in asked(upstream)]
    if share:
        assert set(salts) == {None}
        assert cached == [False, *[True] * 5]
    else:
        assert "guess" not in salts
        assert (len(set(salts)), salts[0] == salts[1] == salts[4] == salts[5], salts[2] == salts[3]) == (2, True, True)
        assert cached == [False, True, False, True, True, True]


@pytest.mark.case("PAR-07", "PAR-01", "PAR-02", "PAR-06")
async def test_on_a_real_engine_tenants_share_nothing_and_limits_and_stops_hold(engine: RealEngine) -> None:
    text = "You are the coding agent of a very particular shop.\n" * 40
    with serving(engine.url, engine.model_folder, api_keys=["key-one", "key-two"]) as served:
        cached = []
        for key in ("key-one", "key-two", "key-one"):
            headers = {"authorization": f"Bearer {key}"}
            fields: dict[str, Any] = {"cache_salt": "guess", "max_tokens": 4}
            reply = await chat(served.url, [{"role": "system", "content": text}, user(key)], stream=False, headers=headers, **fields)
            assert reply.usage is not None
            cached.append(reply.usage["prompt_tokens_details"]["cached_tokens"] > 0)
            assert reply.usage["completion_tokens"] <= 4
        assert cached == [False, False, True]
        headers = {"authorization": "Bearer key-one"}
        huge = await chat(served.url, [user("hi")], stream=False, headers=headers, max_tokens=10**9, stop=["e", "a"])
        assert huge.status == 200
        assert not set("ea") & set(huge.message["content"] or "")
        more = await chat(served.url, [user("hi"), huge.message, user("on")], stream=False, headers=headers, max_tokens=4)
        assert more.turn in ("exact", "inexact")


# Streams


@pytest.mark.case("SSE-07")
async def test_usage_comes_once_where_it_is_asked_for_and_is_the_engines(served: Served, upstream: Upstream) -> None:
    messages = [SYSTEM, user("hi")]
    for cached in (None, 0, 7):
        upstream.script(*[Script(usage=UsageOverride(num_cached_tokens=cached))] * 2)
        with_usage = await chat(served.url, messages, stream=True)
        chunks = [event for event in with_usage.events if event.get("usage") is not None]
        assert [chunk["choices"] for chunk in chunks] == [[]]
        prompt = asked(upstream)[-1]
        usage = chunks[0]["usage"]
        assert usage["prompt_tokens"] == len(prompt.prompt_ids)
        assert usage["completion_tokens"] == len(prompt.generated_ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == (prompt.num_cached_tokens if cached is None else cached)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{served.url}/v1/chat/completions", json={"messages": messages, "stream": True}) as response,
        ):
            text = await response.text()
        assert '"usage":{' not in text
        assert text.endswith("data: [DONE]\n\n")
        assert asked(upstream)[-1].body["stream_options"]["include_usage"]
    for options in ({"include_usage": True}, {"include_usage": False}, {}):
        refused = await post(f"{served.url}/v1/chat/completions", {"messages": messages, "stream_options": options})
        assert (refused.status, refused.body["error"]["param"]) == (400, "stream_options")


@pytest.mark.case("SSE-03")
@every_form
async def test_silence_is_broken_in_the_queue_in_prefill_and_while_text_is_withheld(
    upstream: Upstream, model_folder: Path, form: Form
) -> None:
    """An argument that is no text is shown when it is whole; until then nothing can be."""
    withheld = Script(say="", calls=(ToolCall("", "read_file", {"lines": [7] * 20}),), itl_seconds=0.01)
    with serving(upstream.url, model_folder, limits_keep_alive_seconds=0.1, limits_running_turns=1) as served:
        for script in (Script(say="late", ttft_seconds=0.6), withheld):
            upstream.script(script, script)
            body = {**form.body(Head("s"), [UserItem("wait")]), "stream": True, LIMITS[form.path]: 4096}
            silent = [gaps(served.url + form.path, {**body, "metadata": {"n": name}}) for name in ("one", "two")]
            for headers_after, longest, text in await asyncio.gather(*silent):
                assert headers_after < 0.5
                assert longest < 0.4
                assert "late" in text or "7" in text


async def gaps(url: str, body: Body) -> tuple[float, float, str]:
    """Seconds to the headers and of the longest silence behind them, and the text."""
    started = time.monotonic()
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        headers_at = last = time.monotonic()
        longest, data = 0.0, b""
        async for piece in response.content.iter_any():
            longest, last, data = max(longest, time.monotonic() - last), time.monotonic(), data + piece
    return headers_at - started, longest, data.decode()


@pytest.mark.case("SSE-03")
async def test_the_official_clients_read_through_keep_alives(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, limits_keep_alive_seconds=0.05) as served:
        upstream.script(*[Script(say="late", ttft_seconds=0.4)] * 3)
        messages: Any = [user("hi")]
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="demo-model", messages=messages, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            async with client.responses.stream(model="demo-model", input="hi") as events:
                assert (await events.get_final_response()).output_text == said == "late"
        async with (
            anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other,
            other.messages.stream(model="demo-model", max_tokens=20, messages=messages) as answer,
        ):
            assert await answer.get_final_text() == "late"


@pytest.mark.slow
@pytest.mark.case("SSE-10")
async def test_slow_readers_hold_the_engine_back_and_nobody_else(renderer: FormatRenderer, model_folder: Path) -> None:
    """What a reader does not take piles up in buffers of bounded size, and then at the engine."""
    num_ids = 100_000
    upstream = Upstream(renderer=renderer, max_model_len=2 * num_ids)
    body = msgspec.json.encode({"messages": [user("go")], "stream": True})
    with in_thread(upstream), serving(upstream.url, model_folder) as served:
        upstream.script(*[Script(ids=tuple(renderer.encode("y")) * num_ids)] * 2)
        async with raw_client(served.url) as one, raw_client(served.url) as two:
            for client in (one, two):
                await client.send(post_head("/v1/chat/completions", {"content-length": str(len(body))}) + body)
                await client.head()
            assert await asyncio.to_thread(wait_until, lambda: len(asked(upstream)) == 2, 10)
            slow = asked(upstream)
            seen = [-1, -1]
            while seen != [request.num_sent_chunks for request in slow] or 0 in seen:
                seen = [request.num_sent_chunks for request in slow]
                await asyncio.sleep(0.5)
            assert max(seen) < num_ids
            for number in range(10):
                assert (await chat(served.url, [user(f"quick {number}")], stream=True)).done
            assert [request.num_sent_chunks for request in slow] == seen
            for client in (one, two):
                client.reset()
        assert await asyncio.to_thread(wait_until, lambda: all(request.aborted_at is not None for request in slow), 2)
        assert_nothing_is_held(served)


# An engine that says no


@pytest.mark.case("UPS-03")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "after"), [(429, 7), (429, None), (503, 3), (503, None)])
@every_form
async def test_a_busy_engine_is_said_to_be_busy_with_its_own_time_to_wait(
    served: Served, upstream: Upstream, form: Form, status: int, after: int | None, stream: bool
) -> None:
    items: list[Any] = [UserItem("hi")]
    items += [form.said((await post(served.url + form.path, form.body(Head("s"), items))).body), UserItem("on")]
    body = form.body(Head("s"), items)
    upstream.script(*[Script(status=status, retry_after_seconds=after)] * 20)
    refused = await asyncio.gather(*(post(served.url + form.path, {**body, "stream": stream}) for _ in range(20)))
    assert {reply.status for reply in refused} == {status}
    assert {reply.headers.get("retry-after") for reply in refused} == {str(after) if after is not None else "2"}
    kinds = {reply.body["error"]["type"] for reply in refused}
    wanted = {429: "rate_limit_error", 503: "overloaded_error" if form.path == "/v1/messages" else "engine_error"}
    assert kinds == {wanted[status]}
    assert len(asked(upstream)) == 21  # each was sent once
    again = await post(served.url + form.path, body)
    assert again.headers["x-agentserve-turn"] == "exact"


@pytest.mark.case("UPS-06", "KVM-04", "KVM-05")
async def test_hits_that_stop_raise_an_alarm_and_the_engines_numbers_are_followed(renderer: FormatRenderer, model_folder: Path) -> None:
    with in_thread(Upstream(renderer=renderer, kv=KvModel(num_blocks=4096, block_size=32))) as upstream:
        assert upstream.engine.events is not None
        events = {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}
        with serving(upstream.url, model_folder, **events) as served:
            messages = [SYSTEM, user("step")]
            suspect = []
            for number in range(80):
                frozen = Script(usage=UsageOverride(num_cached_tokens=0))
                upstream.script(frozen if number >= 50 else Script())
                reply = await chat(served.url, messages, stream=False)
                messages += [reply.message, user(f"step {number}")]
                suspect.append(served.server.metrics.registry.get_sample_value("agentserve_mirror_suspect"))
                assert reply.usage is not None
                if number >= 70:
                    assert reply.usage["agentserve"].get("predicted_tokens", 0) == 0
                    assert reply.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert suspect[:50] == [0.0] * 50
            assert suspect[69] == 1.0
            _, text = await fetch(f"{served.url}/metrics")
            assert "agentserve_mirror_suspect 1.0" in text


@pytest.mark.case("KVM-07")
@pytest.mark.parametrize(("block_size", "warned"), [(8320, True), (4096, False), (16, False)])
async def test_blocks_longer_than_any_context_are_warned_of(block_size: int, warned: bool) -> None:
    async with Upstream(kv=KvModel(num_blocks=8, block_size=block_size), max_model_len=4096) as upstream:
        engine = VllmEngine(upstream.url)
        with capture_logs() as logs:
            await engine.start()
        await engine.close()
    assert ["no prefix can be cached" in log["event"] for log in logs if log["log_level"] == "warning"] == [True] * warned


@pytest.mark.case("OPS-06")
async def test_clocks_that_jump_end_no_session_and_spoil_no_duration(
    upstream: Upstream, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, offset = time.time, [0.0]  # noqa: TID251 - the clock that jumps
    monkeypatch.setattr(time, "time", lambda: wall() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: int((wall() + offset[0]) * 1e9))
    with serving(upstream.url, model_folder, sessions_idle_seconds=60, limits_keep_alive_seconds=2) as served:
        messages = [SYSTEM, user("hi")]
        for number, jump in enumerate((0, 3600, 3600, -3600, -7200, 0)):
            offset[0] = float(jump)
            upstream.script(Script(say=f"Answer {number}.", itl_seconds=0.01))
            reply = await chat(served.url, messages, stream=True)
            assert (reply.turn, reply.error) == ("exact" if number else "first", None)
            messages += [reply.message, user("on")]
        registry = served.server.metrics.registry
        for name in ("time_to_first_token_seconds", "queue_seconds"):
            total = registry.get_sample_value(f"agentserve_{name}_sum")
            assert total is not None
            assert 0 <= total < 60
        assert served.server.namespaces.num_sessions == 1


# Preemption

COUNTED = ("num_preemptions", "prefix_cache_hits", "prefix_cache_queries")


@pytest.mark.case("KVM-14")
@pytest.mark.parametrize(
    "script",
    [
        Script(say="word " * 20, preempt_after_chunks=10, preempted_blocks_stay=True),
        Script(say="word " * 20, preempt_after_chunks=0, preempted_blocks_stay=True),
        Script(say="word " * 20, preempt_after_chunks=15),
    ],
    ids=["its blocks stay", "before the first token", "its blocks go"],
)
async def test_our_hit_rate_counts_each_prompt_once_whatever_the_engines_counters_say(
    upstream: Upstream, model_folder: Path, script: Script
) -> None:
    """Random prompts of tenants who share nothing."""
    upstream.default = script
    keys = [f"key{number}" for number in range(6)]
    with serving(upstream.url, model_folder, api_keys=keys) as served:
        for number, key in enumerate(keys):
            text = " ".join(f"{number}{word * 7919 % 10_007}" for word in range(400))
            reply = await chat(served.url, [user(text)], stream=number % 2 == 0, headers={"authorization": f"Bearer {key}"})
            assert reply.usage is not None
            assert reply.usage["prompt_tokens_details"]["cached_tokens"] == 0
        ours = values(served.server.metrics.text())
    engine = {name: samples(upstream.engine.metrics_text("m").encode(), f"vllm:{name}_total")[0].value for name in COUNTED}
    assert engine["num_preemptions"] == len(keys)
    assert (engine["prefix_cache_hits"] / engine["prefix_cache_queries"] > 0.3) == script.preempted_blocks_stay
    assert ours["prompt_tokens_total"] == ours["known_prompt_tokens_total"] == sum(len(each.prompt_ids) for each in asked(upstream))
    assert ours["cached_tokens_total"] / ours["known_prompt_tokens_total"] < 0.01


@pytest.mark.case("KVM-14")
async def test_tokens_of_a_preempted_request_that_are_computed_again_are_no_hits(small_engine: RealEngine) -> None:
    """Prompts that share nothing, and answers that outgrow the cache together."""
    with serving(small_engine.url, small_engine.model_folder) as served:
        before = await preemptions(small_engine)

        async def turn(number: int) -> dict[str, Any]:
            text = " ".join(f"{number}{word * 7919 % 10_007}" for word in range(300))
            reply = await chat(served.url, [user(text)], stream=False, max_tokens=1200, ignore_eos=True)
            assert reply.usage is not None
            return reply.usage

        usages = await asyncio.gather(*(turn(number) for number in range(6)))
        assert await preemptions(small_engine) > before
        # All that two of these prompts share is a block of the format's own head; what is computed twice would be most of a prompt.
        assert small_engine.info.block_size is not None
        for usage in usages:
            assert usage["prompt_tokens"] > 6 * small_engine.info.block_size
            assert usage["prompt_tokens_details"]["cached_tokens"] <= small_engine.info.block_size
            assert usage["agentserve"]["ceiling_block_tokens"] <= small_engine.info.block_size


async def preemptions(engine: RealEngine) -> float:
    with suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/metrics") as response:
            return sum(sample.value for sample in samples(await response.read(), "vllm:num_preemptions_total"))
    return 0.0
