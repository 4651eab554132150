"""Every policy of the table under one contract, and each against something that is known to be right."""

from __future__ import annotations

import random
from collections.abc import Callable

import libcachesim
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from admission.eviction import EVICTION_POLICIES
from admission.eviction.choice import PolicyParameterError
from admission.eviction.policy import Extent, Fate, Pool
from admission.returns import ReturnModel
from tests.eviction_pool import TreePool, UnitPool, build, replayed

KEYS = st.lists(st.integers(0, 12), max_size=120)
CLASSES = ("root/tool", "root/end_turn", "sub/tool", "root/unknown", "never/seen:before")
EXTENTS = st.builds(
    Extent,
    id=st.just(0),
    session_id=st.sampled_from("abcd"),
    num_blocks=st.integers(1, 9),
    inserted_seconds=st.just(0.0),
    freed_seconds=st.just(0.0),
    return_class=st.sampled_from(CLASSES),
    fate=st.sampled_from([Fate.LIVE, Fate.LIVE, *Fate]),
    next_use_seconds=st.none() | st.floats(0, 1e6),
    priority=st.integers(0, 100),
    retention_seconds=st.none() | st.floats(0, 100),
    protected=st.booleans(),
)


class Contract(RuleBasedStateMachine):
    """A tree of extents in use, let go, changed and evicted in any order."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.pool = TreePool([build(self.name, 40), build(self.name, 40)])
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.5, 30.0, 4000.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(extent=EXTENTS, choice=st.integers(0, 99), hangs=st.booleans(), ends=st.booleans())
    def add(self, extent: Extent, choice: int, hangs: bool, ends: bool) -> None:
        extent.inserted_seconds = extent.freed_seconds = self.now
        nodes = list(self.pool.nodes.values())
        node = self.pool.add(nodes[choice % len(nodes)] if nodes and hangs else None, extent, self.now)
        if ends:
            self.pool.finish(node, self.now)

    @precondition(lambda self: self.pool.nodes)
    @rule(choice=st.integers(0, 99))
    def use(self, choice: int) -> None:
        nodes = list(self.pool.nodes.values())
        self.pool.use(nodes[choice % len(nodes)], self.now)

    @precondition(lambda self: self.pool.in_use())
    @rule(choice=st.integers(0, 99))
    def finish(self, choice: int) -> None:
        nodes = self.pool.in_use()
        self.pool.finish(nodes[choice % len(nodes)], self.now)

    @precondition(lambda self: self.pool.free())
    @rule(choice=st.integers(0, 99), fate=st.sampled_from(Fate), protected=st.booleans(), priority=st.integers(0, 100))
    def reconsider(self, choice: int, fate: Fate, protected: bool, priority: int) -> None:
        nodes = self.pool.free()
        extent = nodes[choice % len(nodes)].extent
        extent.fate, extent.protected, extent.priority = fate, protected, priority
        self.pool.reconsider(nodes[choice % len(nodes)], self.now)

    @rule(num_blocks=st.integers(1, 12))
    def evict(self, num_blocks: int) -> None:
        unprotected = any(not node.extent.protected for node in self.pool.free())
        has_free = bool(self.pool.free())
        victim = self.pool.evict(num_blocks, self.now)
        assert (victim is not None) == has_free
        assert victim is None or not (victim.protected and unprotected)

    @precondition(lambda self: self.pool.free())
    @rule(choice=st.integers(0, 99))
    def forget(self, choice: int) -> None:
        nodes = self.pool.free()
        self.pool.forget(nodes[choice % len(nodes)], self.now)

    @invariant()
    def keeps_its_books(self) -> None:
        for policy in self.pool.policies:
            policy.check_integrity()

    def teardown(self) -> None:
        while in_use := self.pool.in_use():
            self.pool.finish(in_use[0], self.now)
        while self.pool.evict(3, self.now) is not None:
            pass
        assert not self.pool.nodes


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_contract_holds_in_any_order_of_calls(name: str) -> None:
    machine = type(f"Contract_{name}", (Contract,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_wrong_order_of_calls_is_asserted(name: str) -> None:
    policy = build(name, 10)
    extent = Extent(1, "a", 1, 0.0, 0.0)
    policy.insert(extent, 0.0)
    with pytest.raises(AssertionError):
        policy.insert(extent, 0.0)
    policy.hold(extent, 0.0)
    with pytest.raises(KeyError):
        policy.hold(extent, 0.0)
    with pytest.raises(AssertionError):
        policy.reconsider(extent, 0.0)


@settings(deadline=None)
@given(keys=KEYS, capacity=st.integers(1, 12))
def test_lru_keeps_what_a_smaller_lru_keeps(keys: list[int], capacity: int) -> None:
    small, large = replayed("lru", keys, capacity), replayed("lru", keys, capacity + 1)
    assert small.resident.keys() <= large.resident.keys()
    assert all(large_hit or not hit for hit, large_hit in zip(small.hits, large.hits, strict=True))


BRUTE_FORCE: dict[str, Callable[[Extent], tuple[float, ...]]] = {
    "lru": lambda extent: (extent.freed_seconds,),
    "fifo": lambda extent: (extent.inserted_seconds,),
    "lfu": lambda extent: (extent.num_hits, extent.freed_seconds),
    "farthest_next_use": lambda extent: (-(extent.next_use_seconds or 0.0), extent.id),
}


@pytest.mark.parametrize("name", BRUTE_FORCE)
@settings(deadline=None)
@given(keys=KEYS, capacity=st.integers(1, 8))
def test_victims_are_those_of_a_full_scan(name: str, keys: list[int], capacity: int) -> None:
    pool = replayed(name, keys, capacity)
    scanned = UnitPool(_Scan(BRUTE_FORCE[name]), capacity)
    following = _next_uses(keys)
    for key, next_use in zip(keys, following, strict=True):
        scanned.access(key, next_use)
    assert pool.victims == scanned.victims


def _next_uses(keys: list[int]) -> list[float]:
    return [next((later for later in range(now + 1, len(keys)) if keys[later] == key), float("inf")) for now, key in enumerate(keys)]


class _Scan:
    """The definition: look at everything."""

    def __init__(self, rank: Callable[[Extent], tuple[float, ...]]) -> None:
        self._rank = rank
        self._extents: list[Extent] = []

    def insert(self, extent: Extent, now: float) -> None:
        self._extents.append(extent)

    def hold(self, extent: Extent, now: float) -> None: ...

    def release(self, extent: Extent, now: float) -> None: ...

    def reconsider(self, extent: Extent, now: float) -> None: ...

    def forget(self, extent: Extent, now: float) -> None:
        self._extents.remove(extent)

    def to_evict(self, now: float) -> Extent | None:
        return min(self._extents, key=self._rank)

    def check_integrity(self) -> None: ...


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES.keys() - {"farthest_next_use"}))
@settings(deadline=None)
@given(keys=KEYS, capacity=st.integers(1, 8))
def test_nothing_beats_the_farthest_next_use_on_unit_extents(name: str, keys: list[int], capacity: int) -> None:
    assert sum(replayed(name, keys, capacity).hits) <= sum(replayed("farthest_next_use", keys, capacity).hits)


REFERENCES = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "sieve": libcachesim.Sieve,
    "s3fifo": libcachesim.S3FIFO,
}


@pytest.mark.parametrize("capacity", [20, 37, 100])  # below 20 its small queue of one takes nothing
@pytest.mark.parametrize("name", REFERENCES)
def test_hits_are_those_of_libcachesim(name: str, capacity: int) -> None:
    for seed in range(3):
        keys = _skewed_keys(seed)
        cache = REFERENCES[name](capacity)
        theirs = [cache.get(_request(key, position)) for position, key in enumerate(keys)]
        assert replayed(name, keys, capacity).hits == theirs


def _skewed_keys(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [1 + min(int(rng.paretovariate(0.6)), 399) if rng.random() < 0.7 else 1 + rng.randrange(400) for _ in range(4000)]


def _request(key: int, position: int) -> libcachesim.Request:
    request = libcachesim.Request()
    request.obj_id, request.obj_size, request.clock_time = key, 1, position
    return request


def _extents(**facts: list[object]) -> list[Extent]:
    """Free extents with one fact each, the longest idle first."""
    ((name, values),) = facts.items()
    extents = [Extent(position, f"s{position}", 4, 0.0, float(position)) for position in range(len(values))]
    for extent, value in zip(extents, values, strict=True):
        setattr(extent, name, value)
    return extents


def _order(policy_name: str, extents: list[Extent], now: float) -> list[int]:
    """In which they are evicted, as positions."""
    policy = build(policy_name, 100)
    for extent in extents:
        policy.insert(extent, extent.freed_seconds)
    order = []
    while (victim := policy.to_evict(now)) is not None:
        order.append(victim.id)
        policy.forget(victim, now)
    return order


@pytest.mark.parametrize("name", ["dead_first", "class_hazard", "ttl"])
def test_what_is_believed_dead_leaves_before_what_lives(name: str) -> None:
    fates: list[object] = [Fate.LIVE, Fate.ENDED, Fate.CUT, Fate.LIVE, Fate.SUPERSEDED, Fate.GENERATED, Fate.ONE_SHOT]
    order = _order(name, _extents(fate=fates), now=10.0)
    assert set(order[:5]) == {1, 2, 4, 5, 6}


def test_deeper_of_two_freed_together_leaves_first() -> None:
    for name in ("lru", "dead_first", "class_hazard", "priority"):
        extents = [Extent(1, "a", 4, 0.0, 5.0, end_block=4), Extent(2, "b", 4, 0.0, 5.0, end_block=9)]
        assert _order(name, extents, now=6.0) == [2, 1]


def test_lowest_priority_leaves_first_and_a_lapsed_one_before_all() -> None:
    extents = _extents(priority=[35, 80, 10, 100])
    extents[3].retention_seconds = 5.0
    assert _order("priority", extents, now=7.0) == [2, 0, 1, 3]
    assert _order("priority", extents, now=8.0) == [3, 2, 0, 1]


def test_class_hazard_keeps_a_running_tool_longer_than_a_finished_turn() -> None:
    order = _order("class_hazard", _extents(return_class=["root/tool", "root/tool", "root/end_turn", "sub/end_turn"]), now=10.0)
    assert order == [3, 2, 0, 1]


def test_ttl_keeps_what_waits_for_a_tool_until_its_time_is_over() -> None:
    extents = [Extent(1, "a", 4, 0.0, 0.0, end_block=2000, return_class="root/tool")]
    extents += [Extent(2, "b", 4, 0.0, 1.0, end_block=2000, return_class="root/end_turn")]
    assert _order("ttl", extents, now=2.0) == [2, 1], "a person takes longer than it pays to wait"
    assert _order("ttl", extents, now=200.0) == [1, 2]


def test_slru_protects_what_was_hit_again_up_to_its_share() -> None:
    pool = UnitPool(EVICTION_POLICIES["slru"].build(Pool(4), {"protected_share": 0.5}), 4)
    for key in (1, 2, 3, 1, 2, 3, 4, 5, 6):
        pool.access(key)
    assert pool.victims == [1, 4], "of three that were hit only two are protected"


def test_gdsf_prefers_the_small_and_ages() -> None:
    small, large = Extent(1, "a", 1, 0.0, 0.0), Extent(2, "b", 100, 0.0, 1.0)
    assert _order("gdsf", [small, large], now=2.0) == [2, 1]
    keys = [1, 1, 1, 1, *range(10, 40)]
    assert 1 not in replayed("gdsf", keys, 4).resident, "uses long past do not keep it forever"
    assert 1 in replayed("lfu", keys, 4).resident


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_parameters_are_checked_against_their_range(name: str) -> None:
    choice = EVICTION_POLICIES[name]
    pool = Pool(100, ReturnModel())
    with pytest.raises(PolicyParameterError, match="no parameter 'speed'"):
        choice.build(pool, {"speed": 1.0})
    for parameter, knob in choice.knobs().items():
        assert knob.low <= getattr(choice.parameters(), parameter) <= knob.high
        for value in (knob.low, knob.high):
            choice.build(pool, {parameter: value})
        with pytest.raises(PolicyParameterError, match=parameter):
            choice.build(pool, {parameter: knob.high * 2 + 1})
