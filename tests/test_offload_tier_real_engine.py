"""A real vLLM with an exclusive tier: the same answers from it as without, its blocks back when the GPU has lost them, the dead gone."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest

from admission.eviction.policy import Fate
from agentserve.engines.hints import PluginHints, PluginState, SessionHint, TurnHints
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.prometheus import sums
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions
from prefix_cache.blocks import HashChain
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.exclusive import ExclusiveOffload
from tests.conftest import SMALL_KV_TOKENS
from tests.plugin_site import plugin_entry_points
from tests.real_engine import CACHE_FOLDER, Generated, RealEngine, real_engine
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


class Following:
    """What the engine's events tell of its GPU and its tier."""

    def __init__(self, engine: VllmEngine, hints: PluginHints, mirror: Mirror) -> None:
        self.engine, self.hints, self.mirror = engine, hints, mirror
        self.tier = ExclusiveOffload(mirror)
        self._lengths = count(13)
        """An answer's is part of its request's name."""

    async def ask(self, name: str, ids: list[int]) -> tuple[Generated, int]:
        """Asks, where exactly what was predicted has to be found. The answer, and the tokens of it that came from the tier."""
        hashes = chain(ids)
        on_gpu = self.mirror.predict(hashes, len(ids))
        in_tier = self.tier.predict(hashes, len(ids), on_gpu).num_tokens
        before = (await state_of(self.hints)).num_loaded_blocks
        answer = await ask(self.engine, name, ids, next(self._lengths), dict(self.hints.xargs(TurnHints(branch_id=""))))
        await self.caught_up([*ids, *answer.ids[:-1]])
        assert (await state_of(self.hints)).num_loaded_blocks - before == in_tier // BLOCK
        assert answer.num_cached_tokens == on_gpu + in_tier
        return answer, in_tier

    async def caught_up(self, computed: list[int]) -> None:
        """The events of the end of the request that computed this are here, and with them those of the tier."""
        hashes = chain(computed)
        is_there = False
        async with asyncio.timeout(60):
            while not is_there:
                await asyncio.sleep(0.05)
                kept = (await state_of(self.hints)).num_kept_blocks * BLOCK
                is_there = self.mirror.num_announced(hashes, len(hashes)) == len(hashes) and self.tier.num_resident_tokens == kept
        assert self.tier.num_blocks_unknown == 0


def chain(ids: list[int]) -> Sequence[bytes]:
    hashed = HashChain(BLOCK)
    hashed.extend(array("I", ids))
    return hashed.hashes


@asynccontextmanager
async def following(running: RealEngine, engine: VllmEngine, hints: PluginHints) -> AsyncIterator[Following]:
    mirror = Mirror(BLOCK)
    made = Following(engine, hints, mirror)
    subscriber = KvEventSubscriber(running.events_endpoint, running.replay_endpoint, "kv-events", mirror)
    await subscriber.start()
    try:
        await subscriber.caught_up()
        yield made
    finally:
        await subscriber.close()


@pytest.mark.anyio
async def test_what_the_gpu_lost_comes_back_and_what_is_dead_does_not(small_engine: RealEngine, tier_engine: RealEngine) -> None:
    engine, hints, plain = VllmEngine(tier_engine.url), PluginHints(tier_engine.url), VllmEngine(small_engine.url)
    try:
        for one in (engine, hints, plain):
            await one.start()
        async with following(tier_engine, engine, hints) as followed:
            await back_and_dead(engine, hints, plain, followed)
    finally:
        for one in (engine, hints, plain):
            await one.close()


async def back_and_dead(engine: VllmEngine, hints: PluginHints, plain: VllmEngine, followed: Following) -> None:
    carried = dict(hints.xargs(TurnHints(branch_id="")))
    prompts = {name: [(at * step) % 900 for at in range(26 * BLOCK + 5)] for name, step in (("x", 3), ("y", 7), ("z", 11), ("w", 17))}
    expected = {name: (await ask(plain, f"tier-{name}", ids, 12, {})).ids for name, ids in prompts.items()}

    cold = {name: await ask(engine, name, ids, 12, carried) for name, ids in prompts.items()}
    assert {name: answer.ids for name, answer in cold.items()} == expected
    full = await state_of(hints)
    assert full.num_kept_blocks > 40
    await followed.caught_up([*prompts["w"], *cold["w"].ids[:-1]])
    before = sums(await engine.metrics())["vllm:external_prefix_cache_hits_total"]
    again, from_tier = await followed.ask("x", prompts["x"])
    assert (again.ids[:12], again.num_cached_tokens) == (expected["x"], 26 * BLOCK)
    loaded = (await state_of(hints)).num_loaded_blocks
    assert loaded > 20
    assert from_tier == loaded * BLOCK
    assert sums(await engine.metrics())["vllm:external_prefix_cache_hits_total"] - before == loaded * BLOCK

    assert (await followed.ask("y", prompts["y"]))[1] > 0
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
    await followed.ask("v", [(at * 19) % 900 for at in range(2 * BLOCK)])  # with its steps the tier's loss is announced
    assert (await followed.ask("x", prompts["x"]))[1] == 0


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
