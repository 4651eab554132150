"""Blocks that come from elsewhere: the CPU tier, and prefill apart from decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Extent, Fate, Pool
from admission.lifecycle import Lifecycle
from admission.policies import ADMISSION_POLICIES
from admission.requests import Limits
from admission.returns import ReturnModel
from admission.tickets import TicketBook
from benchmarks.timed_requests import TimedRequest, timed_requests
from model.m3.config import MINIMAX_M3
from model.m3.dtypes import Dtype
from model.m3.kv import CacheGeometry
from model.m3.sharding import Shard
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock
from replays.simulator.cost import CostModel
from replays.simulator.engine import Engine
from replays.simulator.handover import Handover, plan_reads
from replays.simulator.lives import Lives
from replays.simulator.options import EngineOptions
from replays.simulator.outcomes import Outcome
from replays.simulator.placement import PLACEMENTS, Placement, in_turn
from replays.simulator.pool import BlockPool
from replays.simulator.requests import EngineRequest
from replays.simulator.run import SimulationOptions, limits_of
from replays.simulator.server import Call, Server
from replays.simulator.tier_part import TierPart
from replays.simulator.tiers import CpuTier, TierOptions

SIZE = 16
COST = CostModel(0.2, 0.0, 0.0, 0.01)
"""Slow enough that a load is worth waiting for."""
OPTIONS = EngineOptions(num_blocks=260, block_size=SIZE, max_num_batched_tokens=256, max_num_seqs=16)
TIER = TierOptions(capacity_tokens=400 * SIZE, bytes_per_token=1, bytes_per_second=100_000.0)


def engine(options: EngineOptions = OPTIONS, tier: TierOptions | None = None) -> Engine:
    policy = EVICTION_POLICIES["lru"].build(Pool(options.num_blocks))
    if tier is None:
        return Engine(options, BlockPool(options.num_blocks, policy), COST)
    cpu = CpuTier(tier, options.block_size, COST, options.drops_last_block)
    pool = BlockPool(
        options.num_blocks,
        policy,
        on_evict=lambda branch, low, high, extent, now: cpu.evicted(branch, low, high, extent, now),
        on_store=lambda branch, low, high, now: cpu.stored(branch, low, high, now),
    )
    return Engine(options, pool, COST, loader=cpu)


def run(
    engines: list[Engine], requests: list[TimedRequest], handover: Handover | None = None, placement: Placement = in_turn
) -> dict[str, Outcome]:
    """Every request at its step, a step being a second; all of them end, and nothing is held then."""
    clock = Clock()
    outcomes: dict[str, Outcome] = {}
    admission = ADMISSION_POLICIES["fcfs"](TicketBook(), Limits(capacity_tokens=1 << 40))
    lives = Lives(Lifecycle(ReturnModel()), says_ends=False)
    server = Server(
        clock,
        engines,
        admission,
        lives,
        on_outcome=lambda outcome: outcomes.__setitem__(outcome.stream, outcome),
        handover=handover,
        placement=placement,
    )
    for request in requests:
        call = Call(
            request.number, str(request.number), request.path, len(request.token_ids), request.num_output_tokens, "",
            warmup=False, on_done=lambda outcome: None,
        )  # fmt: skip
        clock.at(float(request.step), lambda call=call: server.submit(call, call.path[0].owner))  # type: ignore[misc]  # bound early
    clock.run()
    assert len(outcomes) == len(requests)
    for each in engines:
        each.pool.check_integrity()
        assert each.pool.usage == 0
    return outcomes


def workload(**more: Any) -> list[TimedRequest]:
    """Fresh at each call: branches belong to one pool. They overrun a pool of 260 blocks."""
    made = timed_requests(**{"num_sessions": 30, "seed": 2, "block_size": SIZE, "mean_gap_steps": 90.0, **more})
    return [request for request in made if len(request.token_ids) + request.num_output_tokens < 200 * SIZE]


def found(outcomes: dict[str, Outcome]) -> tuple[int, int]:
    """Tokens hit in the pool, and loaded."""
    return sum(o.num_hit_tokens for o in outcomes.values()), sum(o.num_external_tokens for o in outcomes.values())


def tier_of(made: Engine) -> CpuTier:
    assert isinstance(made.loader, CpuTier)
    return made.loader


def test_admission_counts_an_exclusive_tier_as_room_and_an_inclusive_one_not() -> None:
    options = SimulationOptions(num_replicas=2, tier=TierOptions(1_000))
    assert limits_of(options, 5_000).tier_tokens == 2_000
    assert limits_of(replace(options, tier=TierOptions(1_000, exclusive=False)), 5_000).tier_tokens is None
    assert limits_of(replace(options, tier=None), 5_000).tier_tokens is None


def test_an_exclusive_tier_gives_back_what_the_pool_let_go_and_an_inclusive_one_of_that_size_hardly_anything() -> None:
    gpu, _ = found(run([engine()], workload()))
    roomy, _ = found(run([engine(replace(OPTIONS, num_blocks=5_000))], workload()))
    assert gpu < 0.9 * roomy, "the pool was large enough"
    exclusive = sum(found(run([engine(tier=TIER)], workload())))
    small = replace(TIER, capacity_tokens=200 * SIZE, exclusive=False)
    inclusive = sum(found(run([engine(tier=small)], workload())))
    assert exclusive > gpu + 0.6 * (roomy - gpu)
    assert inclusive < gpu + 0.2 * (roomy - gpu)


def test_the_last_block_rule_of_speculation_costs_a_block_and_not_what_lies_behind_it_in_the_tier() -> None:
    eagle = replace(OPTIONS, num_speculative_tokens=3, acceptance_length=2.5, drops_last_block=True)
    plain, spared = (run([engine(options, TIER)], workload()) for options in (OPTIONS, eagle))
    assert sum(found(spared)) > sum(found(plain)) - 1.5 * SIZE * len(plain)
    assert found(spared)[1] > 0.8 * found(plain)[1]


def test_an_exclusive_tier_and_its_pool_never_hold_the_same_block() -> None:
    made = engine(tier=TIER)
    tier = tier_of(made)
    taken = made.pool.allocate

    def checked(num_blocks: int, now: float) -> None:
        taken(num_blocks, now)
        for rank in tier._ranks:
            rank.check_integrity()
            assert rank.used == sum(held.high - held.low for held in rank.held.values()) <= rank.num_blocks
            assert all(held.low >= branch.resident for branch, held in rank.held.items())

    made.pool.allocate = checked  # type: ignore[method-assign]  # looks in at every allocation
    run([made], workload())
    assert tier.num_loaded_tokens > 0


def facts(now: float, fate: Fate = Fate.LIVE) -> Extent:
    return Extent(0, "s", 0, now, now, fate=fate)


class Told:
    """What a test says of branches: up to which depth each is alive."""

    def __init__(self) -> None:
        self.alive_to: dict[Branch, int] = {}

    def outlook(self, branch: Branch, now: float) -> Sequence[tuple[int, Fate, Fate, float | None]]:
        depth = self.alive_to.get(branch, 1 << 30)
        return [(depth, Fate.LIVE, Fate.LIVE, None), (1 << 60, Fate.CUT, Fate.CUT, None)]


def test_what_is_dead_does_not_go_into_an_exclusive_tier_and_leaves_it_at_once() -> None:
    told = Told()
    tier = CpuTier(TIER, SIZE, COST, prospects=told)
    left, other = Branch(None, 0, 1), Branch(None, 0, 2)
    tier.evicted(left, 10, 40, facts(1.0), 1.0)
    tier.evicted(other, 0, 20, facts(2.0, Fate.ENDED), 2.0)
    assert tier.num_held_blocks == 30
    told.alive_to[left] = 25
    tier.tell(left, 3.0)
    assert tier.num_held_blocks == 15, "its tail is cut"
    told.alive_to[left] = 0
    tier.tell(left, 4.0)
    assert tier.num_held_blocks == 0
    tier.evicted(left, 0, 5, facts(5.0), 5.0)
    assert tier.num_held_blocks == 5, "a guess was wrong: it is back"
    tier.evicted(other, 0, 20, facts(6.0, Fate.PRESUMED), 6.0)
    assert tier.num_held_blocks == 25, "what is over only because it is silent may have room to spare"


def test_an_inclusive_tier_keeps_what_was_computed_whatever_becomes_of_it() -> None:
    told = Told()
    tier = CpuTier(replace(TIER, exclusive=False), SIZE, COST, prospects=told)
    branch = Branch(None, 0, 1)
    tier.stored(branch, 0, 40, 1.0)
    told.alive_to[branch] = 0
    tier.tell(branch, 2.0)
    tier.evicted(branch, 20, 40, facts(3.0, Fate.ENDED), 3.0)
    assert tier.num_held_blocks == 40


def test_a_full_part_of_a_tier_gives_up_tails_and_a_head_after_what_hangs_on_it() -> None:
    part = TierPart(60, EVICTION_POLICIES["lru"].build(Pool(60)))
    head = Branch(None, 0, 1)
    tail = Branch(head, 20, 1)
    part.add(tail, 20, 40, facts(2.0), 2.0)
    part.add(head, 0, 30, facts(1.0), 2.0)
    part.add(Branch(None, 0, 2), 0, 15, facts(3.0), 3.0)
    assert part.end(head, 0) == 25, "the oldest, and what hangs on it begins at 20"
    part.add(Branch(None, 0, 3), 0, 25, facts(4.0), 4.0)
    assert part.end(head, 0) == 20
    assert part.end(tail, 20) == 20, "then the tail goes, all of it"
    part.check_integrity()
    assert part.used == 60


@pytest.mark.parametrize("name", ["lru", "dead_first", "class_hazard", "s3fifo"])
def test_a_part_of_a_tier_is_sound_under_every_kind_of_policy(name: str) -> None:
    part, random = TierPart(100, EVICTION_POLICIES[name].build(Pool(100, ReturnModel()))), Random(name)
    heads = [Branch(None, 0, number) for number in range(8)]
    branches = [*heads, *(Branch(head, 10, head.owner) for head in heads)]
    for step in range(400):
        now, branch = float(step), random.choice(branches)
        low = branch.start + random.randrange(20)
        match random.randrange(5):
            case 0:
                part.take(branch, low, now)
            case 1:
                part.cut(branch, low, now)
            case 2:
                part.touch(branch, now)
            case _:
                part.add(branch, low, low + random.randrange(1, 30), facts(now), now)
        part.check_integrity()
    assert part.used > 50


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    made = engine(tier=replace(TIER, bytes_per_second=10.0))
    _, loaded = found(run([made], workload()))
    assert loaded == 0
    assert tier_of(made).num_stored_tokens > 0


def test_a_hit_needs_every_rank_and_asking_only_one_makes_loads_fail() -> None:
    _, whole = found(run([engine(tier=TIER)], workload()))
    uneven = replace(TIER, num_ranks=2, rank_capacity=(1.0, 0.4))
    made = engine(tier=uneven)
    _, least = found(run([made], workload()))
    assert 0 < least < whole
    assert tier_of(made).num_failed_loads == 0
    made = engine(tier=replace(uneven, asks_all_ranks=False))
    _, blind = found(run([made], workload()))
    assert tier_of(made).num_failed_loads > 0
    assert blind <= least


def test_a_load_ends_at_whole_chunks() -> None:
    outcomes = run([engine(tier=replace(TIER, chunk_blocks=4))], workload())
    loaded = [o for o in outcomes.values() if o.num_external_tokens]
    assert loaded
    assert all((o.num_hit_tokens + o.num_external_tokens) % (4 * SIZE) == 0 for o in loaded)


def test_others_pass_a_request_that_waits_for_its_blocks() -> None:
    requests = workload()
    slow = replace(TIER, setup_seconds=0.5)
    finished = {name: o.finished for name, o in run([engine(tier=slow)], requests).items()}
    order = sorted(finished, key=lambda name: finished[name])
    assert order != sorted(order, key=int)
    assert all(o.num_preemptions == 0 for o in run([engine(tier=slow)], workload()).values())


@pytest.mark.parametrize(("prefill", "decode"), [(4, 4), (8, 8), (4, 8), (8, 4), (2, 4), (1, 8), (8, 1)])
def test_every_decode_rank_reads_its_heads_and_its_index_keys_once(prefill: int, decode: int) -> None:
    source, target = (CacheGeometry(Shard(MINIMAX_M3, tp)) for tp in (prefill, decode))
    reads = plan_reads(source, target)
    for rank in range(decode):
        assert sum(read.num_bytes for read in reads if read.decode_rank == rank) == target.bytes_per_token
    # A copy of a head is not read from one rank alone while another has it too.
    if decode >= prefill:
        sent = [sum(read.num_bytes for read in reads if read.prefill_rank == rank) for rank in range(prefill)]
        assert len(set(sent)) == 1


def test_unlike_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="different formats"):
        plan_reads(CacheGeometry(Shard(MINIMAX_M3, 4)), CacheGeometry(Shard(MINIMAX_M3, 4), Dtype.BF16))


def watched(source: Engine, held: list[tuple[int, float]]) -> Callable[[EngineRequest, float], None]:
    """`source.release`, which notes first how many blocks were held, and how long after the end."""
    release = source.release

    def noting(request: EngineRequest, now: float) -> None:
        assert request.finished is not None
        held.append((request.num_blocks, now - request.finished))
        release(request, now)

    return noting


def test_a_prefill_engine_keeps_blocks_until_the_last_reader_has_them() -> None:
    geometry = CacheGeometry(Shard(MINIMAX_M3, 4))
    handover = Handover(plan_reads(geometry, geometry), 2, setup_seconds=3.0)
    engines = [engine(), engine(), engine()]
    engines[2].loader = handover
    held: list[tuple[int, float]] = []
    for source in engines[:2]:
        source.release = watched(source, held)  # type: ignore[method-assign, assignment]  # looks in at every release
    requests = workload()
    outcomes = run(engines, requests, handover)
    assert len(held) == len(requests)
    assert all(blocks > 0 and seconds >= 3.0 for blocks, seconds in held)
    assert not handover.sources
    assert sum(o.num_hit_tokens for o in outcomes.values()) > 0
    assert all(o.first_token > o.scheduled + 3.0 for o in outcomes.values())
    assert {o.replica for o in outcomes.values()} == {0, 1}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_session_stays_with_the_replica_that_it_was_given(name: str) -> None:
    requests = workload()
    engines = [engine(), engine(), engine()]
    outcomes = run(engines, requests, placement=PLACEMENTS[name])
    replicas: dict[int, set[int]] = {}
    for request in requests:
        replicas.setdefault(request.path[0].owner, set()).add(outcomes[str(request.number)].replica)
    assert all(len(places) == 1 for places in replicas.values())
    assert {place for places in replicas.values() for place in places} == {0, 1, 2}
    alone, _ = found(run([engine()], workload()))
    assert found(outcomes)[0] > alone, "three pools hold more than one"
