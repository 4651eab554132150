"""The simulator's extents against a pool that goes block by block, and what must hold for any policy."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from admission.eviction import EVICTION_POLICIES
from benchmarks.block_by_block import BlockByBlock
from benchmarks.rungs import EAGLE, PLAIN, SECOND, extents, outcomes, play, workload
from replays.simulator.engine import Engine
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool


@pytest.mark.parametrize("options", [PLAIN, EAGLE], ids=["plain", "eagle"])
@pytest.mark.parametrize("num_blocks", [1_000, 320, 200])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1, 80])
def test_extents_do_what_single_blocks_do(options: EngineOptions, num_blocks: int, seed: int, factor: int) -> None:
    options = replace(options, num_blocks=num_blocks)
    load = {"num_sessions": 12, "seed": seed, "output_factor": factor, "mean_gap_steps": 20.0 * factor**0.5}
    pool = extents(num_blocks)
    ours = play(Engine(options, pool, SECOND), workload(num_blocks, **load))
    theirs = play(Engine(options, cast(BlockPool, BlockByBlock(num_blocks)), SECOND), workload(num_blocks, **load))
    assert len(ours) > 50
    assert outcomes(ours) == outcomes(theirs)
    assert pool.num_free == num_blocks


@pytest.mark.parametrize("policy", [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future])
def test_any_policy_keeps_chains_whole_and_uses_the_whole_pool(policy: str) -> None:
    num_blocks = 260
    options = replace(EAGLE, num_blocks=num_blocks)
    pool = extents(num_blocks, policy)
    made = play(Engine(options, pool, SECOND), workload(num_blocks, num_sessions=12, seed=5))
    pool.check_integrity()
    assert pool.num_free == num_blocks
    assert all(request.finished is not None for request in made.values())
    assert any(request.num_hit_blocks for request in made.values())


@pytest.mark.parametrize("policy", [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future])
def test_with_room_for_all_every_policy_hits_the_same(policy: str) -> None:
    options = replace(PLAIN, num_blocks=20_000)
    ours = play(Engine(options, extents(20_000, policy), SECOND), workload(20_000, num_sessions=12, seed=6))
    lru = play(Engine(options, extents(20_000), SECOND), workload(20_000, num_sessions=12, seed=6))
    assert outcomes(ours) == outcomes(lru)


def test_lru_hits_no_less_with_more_room() -> None:
    hits = []
    for num_blocks in (250, 400, 700, 1_500):
        options = replace(PLAIN, num_blocks=num_blocks, max_num_seqs=1)  # one at a time: the order does not depend on hits
        requests = workload(250, seed=7, num_sessions=40, mean_gap_steps=400.0)
        made = play(Engine(options, extents(num_blocks), SECOND), requests)
        hits.append(sum(request.num_hit_blocks for request in made.values()))
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]
