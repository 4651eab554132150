"""The simulator's extents against a pool that goes block by block, and what must hold for any policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from admission.returns import ReturnModel
from replays.simulator.cost import CostModel
from replays.simulator.engine import Engine, EngineRequest
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool, Use
from tests.block_reference import BlockByBlock
from tests.simulated_requests import TimedRequest, timed_requests

BLOCK_SIZE = 16
PLAIN = EngineOptions(num_blocks=0, block_size=BLOCK_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
EAGLE = replace(PLAIN, num_speculative_tokens=3, acceptance_length=2.78, drops_last_block=True)


def play(engine: Engine, requests: list[TimedRequest]) -> dict[int, EngineRequest]:
    """Every request at its step; a step takes one second."""
    made = {r.number: EngineRequest(r.number, r.path, len(r.token_ids), r.num_output_tokens, Use(f"s{r.number % 7}")) for r in requests}
    waiting = sorted(requests, key=lambda request: (request.step, request.number), reverse=True)
    now = 0
    while waiting or engine.running or engine.waiting:
        while waiting and waiting[-1].step <= now:
            engine.add(made[waiting.pop().number], now)
        if engine.step is not None and engine.step.ends <= now:
            engine.finish(now)
        if engine.step is None:
            engine.start(now)
        now += 1
        if isinstance(engine.pool, BlockPool) and now % 50 == 0:
            engine.pool.check_integrity()
    return made


def outcome(requests: dict[int, EngineRequest]) -> dict[int, tuple[int, float | None, int]]:
    return {number: (request.num_hit_blocks, request.finished, request.num_preemptions) for number, request in requests.items()}


def extents(num_blocks: int, policy: str = "lru") -> BlockPool:
    return BlockPool(num_blocks, EVICTION_POLICIES[policy].build(Pool(num_blocks, ReturnModel())))


def workload(seed: int, num_blocks: int, **more: Any) -> list[TimedRequest]:
    """Fresh ones at each call: branches belong to one pool."""
    made = timed_requests(**{"num_sessions": 12, "seed": seed, "block_size": BLOCK_SIZE, **more})
    return [request for request in made if len(request.token_ids) + request.num_output_tokens < num_blocks * BLOCK_SIZE - 200]


@pytest.mark.parametrize("options", [PLAIN, EAGLE], ids=["plain", "eagle"])
@pytest.mark.parametrize("num_blocks", [1_000, 320, 200])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1, 80])
def test_extents_do_what_single_blocks_do(options: EngineOptions, num_blocks: int, seed: int, factor: int) -> None:
    options = replace(options, num_blocks=num_blocks)
    cost = CostModel(1.0, 0.0, 0.0, 0.0)
    more = {"output_factor": factor, "mean_gap_steps": 20.0 * factor**0.5}
    pool = extents(num_blocks)
    ours = play(Engine(options, pool, cost), workload(seed, num_blocks, **more))
    theirs = play(Engine(options, cast(BlockPool, BlockByBlock(num_blocks)), cost), workload(seed, num_blocks, **more))
    assert len(ours) > 50
    assert outcome(ours) == outcome(theirs)
    assert pool.num_free == num_blocks


@pytest.mark.parametrize("policy", [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future])
def test_any_policy_keeps_chains_whole_and_uses_the_whole_pool(policy: str) -> None:
    num_blocks = 260
    options = replace(EAGLE, num_blocks=num_blocks)
    pool = extents(num_blocks, policy)
    made = play(Engine(options, pool, CostModel(1.0, 0.0, 0.0, 0.0)), workload(5, num_blocks))
    pool.check_integrity()
    assert pool.num_free == num_blocks
    assert all(request.finished is not None for request in made.values())
    assert any(request.num_hit_blocks for request in made.values())


@pytest.mark.parametrize("policy", [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future])
def test_with_room_for_all_every_policy_hits_the_same(policy: str) -> None:
    options = replace(PLAIN, num_blocks=20_000)
    cost = CostModel(1.0, 0.0, 0.0, 0.0)
    ours = play(Engine(options, extents(20_000, policy), cost), workload(6, 20_000))
    lru = play(Engine(options, extents(20_000), cost), workload(6, 20_000))
    assert outcome(ours) == outcome(lru)


def test_lru_hits_no_less_with_more_room() -> None:
    hits = []
    for num_blocks in (250, 400, 700, 1_500):
        options = replace(PLAIN, num_blocks=num_blocks, max_num_seqs=1)  # one at a time: the order does not depend on hits
        requests = workload(7, 250, num_sessions=40, mean_gap_steps=400.0)
        made = play(Engine(options, extents(num_blocks), CostModel(1.0, 0.0, 0.0, 0.0)), requests)
        hits.append(sum(request.num_hit_blocks for request in made.values()))
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]
