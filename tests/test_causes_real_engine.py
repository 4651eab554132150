"""Causes on a real vLLM: twins that are computed side by side, turns that preempt each other, and nothing unknown near capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from agentserve.engines.prometheus import samples
from agentserve.engines.vllm_command import EmbeddedOptions
from tests.real_engine import CACHE_FOLDER, RealEngine, real_engine
from tests.serving import Reply, Served, chat, serving

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

TEXT = "def total(items):\n    return sum(item.price * item.count for item in items)\n"
KV_TOKENS = 8192


@pytest.fixture(scope="module")
def crowded() -> Iterator[RealEngine]:
    """A vLLM with room for few turns, which computes several long prompts side by side, a block of each in a step."""
    options = EmbeddedOptions(
        CACHE_FOLDER, kv_tokens=KV_TOKENS, max_num_batched_tokens=512, extra_args=("--long-prefill-token-threshold", "128")
    )
    with real_engine(options) as running:
        yield running


@pytest.fixture
def served(crowded: RealEngine) -> Iterator[Served]:
    events = {"engine_events": crowded.events_endpoint, "engine_events_replay": crowded.replay_endpoint}
    with serving(crowded.url, crowded.model_folder, **events, alignment_twin_blocks=0) as running:  # twins would wait for one another
        yield running
        assert len(running.server.books.in_flight) == 0


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def account(reply: Reply) -> dict[str, Any]:
    """The account of a turn, after a look at the sum of its causes."""
    assert reply.usage is not None, reply
    told: dict[str, Any] = reply.usage["agentserve"]
    cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
    assert sum(told.get("missed_tokens", {}).values()) == reply.usage["prompt_tokens"] - cached
    return told


async def preemptions(served: Served) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{served.server.engine.url}/metrics") as response:
        return sum(sample.value for sample in samples(await response.read(), "vllm:num_preemptions_total"))


async def test_twins_that_vllm_computes_side_by_side_miss_their_head_in_flight(served: Served) -> None:
    causes: dict[str, int] = {}
    for attempt in range(10):  # on a busy machine the first twin may be done before the others have been sent
        head = {"role": "system", "content": f"Twins {attempt}.\n" + TEXT * 100}
        told = await asyncio.gather(*(chat(served.url, [head, user(f"Twin {n}.")], stream=True, max_tokens=4) for n in range(3)))
        for reply in told:
            for cause, tokens in account(reply)["missed_tokens"].items():
                causes[cause] = causes.get(cause, 0) + tokens
        if "in_flight" in causes:
            break
    assert causes["in_flight"] > 1000, causes
    assert "unknown" not in causes
    alone = await chat(served.url, [head, user("And me.")], stream=True, max_tokens=4)
    assert "in_flight" not in account(alone)["missed_tokens"]


async def test_preempted_turns_tell_what_they_computed_twice_and_others_tell_nothing(served: Served) -> None:
    calm = [await chat(served.url, [user(f"Calm {n}. " + TEXT * 40)], stream=True, max_tokens=20) for n in range(8)]
    assert not any(account(reply).get("recomputed_tokens") for reply in calm)
    num_recomputed = 0
    for attempt in range(6):  # on a busy machine the events may lag so far behind that nobody can tell what was computed twice
        before = await preemptions(served)
        asked = [[user(f"Agent {attempt}.{n}. " + TEXT * 40)] for n in range(7)]
        replies = await asyncio.gather(*(chat(served.url, messages, stream=True, max_tokens=700, ignore_eos=True) for messages in asked))
        told = [account(reply).get("recomputed_tokens", 0) for reply in replies]
        assert 0 in told, "the turn that is served first is never preempted"
        if await preemptions(served) > before and (num_recomputed := sum(told)):
            break
    assert num_recomputed > 0


async def test_near_capacity_hardly_anything_is_unknown(served: Served) -> None:
    histories = [[user(f"Session {number}. " + TEXT * 80)] for number in range(6)]
    causes: dict[str, int] = {}
    for _ in range(5):
        replies = await asyncio.gather(*(chat(served.url, history, stream=True, max_tokens=30) for history in histories))
        for history, reply in zip(histories, replies, strict=True):
            history += [reply.message, user("Go on.")]
            for cause, tokens in account(reply).get("missed_tokens", {}).items():
                causes[cause] = causes.get(cause, 0) + tokens
    assert causes["evicted"] > 1000, causes
    assert causes.get("unknown", 0) <= 0.01 * sum(causes.values()), causes
