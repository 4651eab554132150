"""More sessions than the engine's cache holds, through the whole server: admission by working set keeps the hits that LRU loses."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import assert_nothing_is_held
from tests.serving import Served, chat, serving
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, in_thread

pytestmark = pytest.mark.anyio

NUM_SESSIONS, NUM_TURNS, GAP_SECONDS = 8, 5, 0.2
WORDS = "read the next file of the shop " * 260
"""About 2,000 tokens: four such sessions fit in the cache, eight do not."""


async def session(served: Served, number: int) -> tuple[int, int, float]:
    """Play one session: cached and prompt tokens of its turns but the first, and how long its first turn took, seconds."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Session {number}. {WORDS}"}]
    cached = prompt = 0
    first = 0.0
    for turn in range(NUM_TURNS):
        started = time.monotonic()
        headers = {"x-session-id": f"s{number}", **({"x-agentserve-final": "true"} if turn == NUM_TURNS - 1 else {})}
        reply = await chat(served.url, messages, stream=False, headers=headers)
        assert reply.status == 200
        assert reply.usage is not None
        if turn:
            cached += reply.usage["prompt_tokens_details"]["cached_tokens"]
            prompt += reply.usage["prompt_tokens"]
        else:
            first = time.monotonic() - started
        messages += [reply.message, {"role": "user", "content": f"Go on with {turn}: " + "look at it again. " * 12}]
        await asyncio.sleep(GAP_SECONDS)
    return cached, prompt, first


async def hit_rate(renderer: FormatRenderer, model_folder: Path, **settings: Any) -> tuple[float, float]:
    """Cached share of the prompts of turns from the second on, and the longest first turn, seconds."""
    kv = KvModel(num_blocks=640, block_size=16, prefill_tokens_per_second=20_000)
    with in_thread(Upstream(renderer=renderer, kv=kv, default=Script(say="Done."))) as upstream:
        assert upstream.engine.events is not None
        events = {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}
        with serving(upstream.url, model_folder, **events, **settings) as served:
            played = await asyncio.gather(*(session(served, number) for number in range(NUM_SESSIONS)))
            assert_nothing_is_held(served)
    return sum(cached for cached, _, _ in played) / sum(prompt for _, prompt, _ in played), max(first for _, _, first in played)


@pytest.mark.case("UPS-05")
async def test_a_set_of_sessions_that_fits_is_kept_and_nobody_starves(renderer: FormatRenderer, model_folder: Path) -> None:
    plain, _ = await hit_rate(renderer, model_folder)
    # The gate lets one session more in than fits in its share; here a session is a quarter of the cache.
    working_set = {"admission_policy": "working_set", "admission_parameters": "alpha=0.6,hold_seconds=60"}
    kept, longest = await hit_rate(renderer, model_folder, **working_set)
    assert plain < 0.3
    assert kept >= 0.85
    assert longest < 40, "the last session starts as soon as one before it is over"
