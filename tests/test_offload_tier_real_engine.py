"""A real vLLM with an exclusive tier: the same answers from it as without, its blocks back when the GPU has lost them, the dead gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from admission.eviction.policy import Fate
from agentserve.engines.hints import PluginHints, PluginState, SessionHint, TurnHints
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.prometheus import sums
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions
from tests.conftest import SMALL_KV_TOKENS
from tests.plugin_site import plugin_entry_points
from tests.real_engine import CACHE_FOLDER, RealEngine, real_engine
from tests.test_plugin_real_engine import BLOCK, ask, crowded

NUM_SLOTS = 48
SLOT_BYTES = BLOCK * 512


@pytest.fixture(scope="module")
def tier_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """A vLLM whose KV cache holds 64 blocks, and 48 more behind it."""
    plugin = PluginOptions(tier_bytes=NUM_SLOTS * SLOT_BYTES)
    options = EmbeddedOptions(CACHE_FOLDER, kv_tokens=SMALL_KV_TOKENS, plugin=plugin)
    with plugin_entry_points(tmp_path_factory.mktemp("site")), real_engine(options) as running:
        yield running


async def state_of(hints: PluginHints) -> PluginState:
    state = await hints.state()
    assert state is not None
    assert state.is_ordering, state.off_because
    assert state.tier_off_because == ""
    assert state.num_tier_blocks == NUM_SLOTS
    return state


@pytest.mark.anyio
async def test_what_the_gpu_lost_comes_back_and_what_is_dead_does_not(small_engine: RealEngine, tier_engine: RealEngine) -> None:
    engine, hints, plain = VllmEngine(tier_engine.url), PluginHints(tier_engine.url), VllmEngine(small_engine.url)
    try:
        for one in (engine, hints, plain):
            await one.start()
        await back_and_dead(engine, hints, plain)
    finally:
        for one in (engine, hints, plain):
            await one.close()


async def back_and_dead(engine: VllmEngine, hints: PluginHints, plain: VllmEngine) -> None:
    carried = dict(hints.xargs(TurnHints(branch_id="")))
    prompts = {name: [(at * step) % 900 for at in range(26 * BLOCK + 5)] for name, step in (("x", 3), ("y", 7), ("z", 11), ("w", 17))}
    expected = {name: (await ask(plain, f"tier-{name}", ids, 12, {})).ids for name, ids in prompts.items()}

    cold = {name: await ask(engine, name, ids, 12, carried) for name, ids in prompts.items()}
    assert {name: answer.ids for name, answer in cold.items()} == expected
    full = await state_of(hints)
    assert full.num_kept_blocks > 40
    before = sums(await engine.metrics())["vllm:external_prefix_cache_hits_total"]
    again = await ask(engine, "x", prompts["x"], 13, carried)
    assert (again.ids[:12], again.num_cached_tokens) == (expected["x"], 26 * BLOCK)
    loaded = (await state_of(hints)).num_loaded_blocks
    assert loaded > 20
    assert sums(await engine.metrics())["vllm:external_prefix_cache_hits_total"] - before == loaded * BLOCK

    await ask(engine, "y", prompts["y"], 14, carried)
    kept = (await state_of(hints)).num_kept_blocks
    for name in "xzw":
        hints.tell(SessionHint(session_id=name, fate=Fate.ENDED))
    assert kept > 20
    left = await state_of(hints)
    for _ in range(1200):  # hints are on their way
        if not left.num_kept_blocks:
            break
        await asyncio.sleep(0.05)
        left = await state_of(hints)
    assert left.num_kept_blocks == 0
    assert left.num_dropped_blocks >= kept


@pytest.mark.anyio
async def test_answers_are_the_same_token_for_token_with_blocks_from_the_tier(small_engine: RealEngine, tier_engine: RealEngine) -> None:
    expected, _ = await crowded(small_engine.url, None)
    hints = PluginHints(tier_engine.url)
    await hints.start()
    before = await state_of(hints)
    ours, _ = await crowded(tier_engine.url, hints)
    after = await state_of(hints)
    await hints.close()
    assert [answer.ids for answer in ours] == [answer.ids for answer in expected]
    assert after.num_loaded_blocks - before.num_loaded_blocks > 20
    assert after.num_stored_blocks > after.num_loaded_blocks
