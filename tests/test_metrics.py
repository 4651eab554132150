"""The metrics: each name on /metrics grows by what its definition in docs/reference/metrics.md says, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest

from agentserve.canonical.canonicaliser import Effect
from agentserve.divergence import Difference, Divergence
from agentserve.engines import Usage
from agentserve.heads import HeadBreak
from agentserve.metrics import Metrics
from agentserve.plans import Outcome, Plan
from agentserve.sessions import TurnKind
from model.chat.minimax_m3 import MiniMaxM3Format
from model.conversation import AssistantItem
from model.tokenizer import Tokenizer
from prefix_cache.events import BlockRemoved, BlockStored, EventBatch
from prefix_cache.hits import Cause, TurnHits, account
from prefix_cache.tiers.exclusive import ExclusiveOffload
from prefix_cache.tiers.offload import Offload
from tests.processes import wait_until
from tests.serving import chat, serving
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, in_thread


def values(text: bytes) -> dict[str, float]:
    """The samples of /metrics by name and labels, without the times of creation."""
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if line.startswith("agentserve_")]
    return {name.removeprefix("agentserve_"): float(value) for name, _, value in lines if "_created" not in name}


def turn(hits: TurnHits) -> tuple[Plan, Outcome]:
    plan = Plan("s", TurnKind.EXACT, hits.num_prompt_tokens, 30, hits, {"clock": Effect(2, 40)})
    usage = Usage(hits.num_prompt_tokens, 7, hits.actual)
    return plan, Outcome(AssistantItem("x"), "stop", None, 7, usage, hits)


def counted(*hits: TurnHits) -> dict[str, float]:
    metrics = Metrics()
    for each in hits:
        metrics.answered(*turn(each))
    return values(metrics.text())


def test_an_answered_turn_is_counted_in_every_sum() -> None:
    hits = account(
        num_prompt_tokens=1000,
        ceiling=900,
        block_size=128,
        actual=640,
        predicted=768,
        confirmed_evicted=200,
        external_predicted=100,
        external=90,
    )
    found = counted(hits, hits)
    sums = {"prompt_tokens": 2000, "encoded_tokens": 60, "generated_tokens": 14, "ceiling_tokens": 1800, "ceiling_block_tokens": 1792}
    sums |= {"external_predicted_tokens": 200, "external_tokens": 180}
    sums |= {"predicted_tokens": 1536, "cached_tokens": 1280, "known_prompt_tokens": 2000}
    assert {name: found[f"{name}_total"] for name in sums} == sums
    assert found['turns_total{kind="exact"}'] == 2
    assert (found['canonicalised_total{rule="clock"}'], found['canonicalised_characters_total{rule="clock"}']) == (4, 80)
    missed = {cause: found[f'missed_tokens_total{{cause="{cause}"}}'] for cause in Cause}
    assert missed == dict.fromkeys(Cause, 0) | {Cause.NEW: 200, Cause.TAIL: 8, Cause.EVICTED: 400, Cause.UNKNOWN: 112}
    assert sum(missed.values()) + found["cached_tokens_total"] == found["known_prompt_tokens_total"]


def test_what_the_engine_does_not_say_is_in_no_sum() -> None:
    found = counted(account(num_prompt_tokens=1000, ceiling=900, block_size=None))
    assert (found["prompt_tokens_total"], found["ceiling_tokens_total"]) == (1000, 900)
    assert (found["external_predicted_tokens_total"], found["external_tokens_total"]) == (0, 0)
    unknown = ("ceiling_block_tokens", "predicted_tokens", "cached_tokens", "known_prompt_tokens")
    assert [found[f"{name}_total"] for name in unknown] == [0, 0, 0, 0]
    assert not any(found[f'missed_tokens_total{{cause="{cause}"}}'] for cause in Cause)


def test_what_was_changed_is_counted() -> None:
    metrics = Metrics()
    plan, outcome = turn(account(num_prompt_tokens=1000, ceiling=900, block_size=None))
    left = Divergence(Difference.TOOLS_CHANGED, 0, "head", 40, 50, ("+find",))
    for line in (1, None, None):
        metrics.answered(replace(plan, divergence=left, head_break=HeadBreak(line, (), 1, 2, None)), outcome)
    metrics.answered(plan, outcome)
    found = values(metrics.text())
    assert found['divergences_total{difference="tools_changed"}'] == 3
    assert (found['broken_heads_total{place="line"}'], found['broken_heads_total{place="tools"}']) == (1, 2)


@pytest.fixture
def upstream(model_folder: Path) -> Iterator[Upstream]:
    tokenizer = Tokenizer.load(model_folder)
    renderer = FormatRenderer(MiniMaxM3Format(tokenizer), tokenizer)
    with in_thread(Upstream(renderer=renderer, kv=KvModel(num_blocks=4096, block_size=32))) as running:
        yield running


@pytest.mark.anyio
async def test_times_and_gauges_follow_the_turns(upstream: Upstream, model_folder: Path) -> None:
    events = upstream.engine.events
    assert events is not None
    endpoints = {"engine_events": events.endpoint, "engine_events_replay": events.replay_endpoint}
    with serving(upstream.url, model_folder, limits_running_turns=1, **endpoints) as served:
        metrics, mirror = served.server.metrics, served.server.books.mirror
        assert mirror is not None
        upstream.script(*[Script(say="done", ttft_seconds=0.5)] * 2)
        both = [asyncio.create_task(chat(served.url, [{"role": "user", "content": str(i) * 200}], stream=True)) for i in range(2)]
        assert await asyncio.to_thread(wait_until, lambda: values(metrics.text())["waiting_turns"] == 1, 5)
        replies = [await each for each in both]
        prompts = [reply.usage["prompt_tokens"] for reply in replies if reply.usage]
        # The events of both answers, which share a head: the last of them may come after the answer.
        assert await asyncio.to_thread(wait_until, lambda: mirror.num_resident_tokens > max(prompts), 5)
        found = values(metrics.text())
    assert (found["waiting_turns"], found["sessions"], found["mirror_suspect"]) == (0, 2, 0)
    assert (found["queue_seconds_count"], found["time_to_first_token_seconds_count"]) == (2, 2)
    assert 0.4 < found["queue_seconds_sum"] < 5.0  # one waited for the other's half second
    assert 1.0 < found["time_to_first_token_seconds_sum"] - found["queue_seconds_sum"] + 0.1 < 10.0
    assert max(prompts) < found["ceiling_index_tokens"] < found["ledger_tokens"] < sum(prompts) + 100
    assert found["kv_resident_tokens"] == mirror.num_resident_tokens


@pytest.mark.anyio
async def test_the_tiers_gauges_follow_what_is_told_of_it(upstream: Upstream, model_folder: Path) -> None:
    events = upstream.engine.events
    assert events is not None
    endpoints = {"engine_events": events.endpoint, "engine_events_replay": events.replay_endpoint}
    with serving(upstream.url, model_folder, offload_tier="lmcache", **endpoints) as served:
        metrics, offload = served.server.metrics, served.server.books.offload
        assert isinstance(offload, Offload)
        stored = BlockStored([1], None, list(range(256)), 256, medium="CPU")
        offload.apply(EventBatch(0.0, [stored]))
        first = values(metrics.text())
        offload.stopped()
        second = values(metrics.text())
    assert (first["offload_resident_tokens"], first["offload_up"]) == (256, 1)
    assert (second["offload_resident_tokens"], second["offload_up"]) == (0, 0)


@pytest.mark.anyio
async def test_an_exclusive_tiers_gauge_counts_its_blocks_and_it_has_no_server(upstream: Upstream, model_folder: Path) -> None:
    events = upstream.engine.events
    assert events is not None
    endpoints = {"engine_events": events.endpoint, "engine_events_replay": events.replay_endpoint}
    with serving(upstream.url, model_folder, offload_tier="exclusive", **endpoints) as served:
        metrics, offload = served.server.metrics, served.server.books.offload
        assert isinstance(offload, ExclusiveOffload)
        stored, removed = BlockStored([1, 2, 3], None, [], 0, medium="CPU"), BlockRemoved([2], medium="CPU")
        offload.apply(EventBatch(0.0, [stored, removed]), {1: b"one", 2: b"two"})
        found = values(metrics.text())
    assert found["offload_resident_tokens"] == 2 * 32
    assert not any(name.startswith(("offload_up", "offload_lookups")) for name in found)


@pytest.mark.anyio
async def test_a_failed_turn_is_counted_by_the_type_of_its_error(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder) as served:
        upstream.script(Script(status=500, message="boom"))
        reply = await chat(served.url, [{"role": "user", "content": "hi"}], stream=False)
        found = values(served.server.metrics.text())
    assert reply.error is not None
    assert found[f'failed_turns_total{{kind="{reply.error["type"]}"}}'] == 1
    assert not any(name.startswith("turns_total") for name in found)


@pytest.mark.case("UPS-04")
@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_that_ends_before_the_first_token_costs_the_client_nothing(
    upstream: Upstream, model_folder: Path, stream: bool
) -> None:
    with serving(upstream.url, model_folder) as served:
        upstream.script(Script(cut="rst"), Script(say="Whole."))
        reply = await chat(served.url, [{"role": "user", "content": "hi"}], stream=stream)
        assert reply.message["content"] == "Whole."
        assert values(served.server.metrics.text())["engine_retries_total"] == 1


@pytest.mark.anyio
async def test_stored_responses_are_measured_until_they_are_deleted(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder) as served:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{served.url}/v1/responses", json={"input": "hi"}) as response:
                body = await response.read()
            stored = values(served.server.metrics.text())["stored_response_bytes"]
            async with http.delete(f"{served.url}/v1/responses/{msgspec.json.decode(body)['id']}") as response:
                assert response.status == 200
        assert len(body) < stored < 3 * len(body)
        assert values(served.server.metrics.text())["stored_response_bytes"] == 0
