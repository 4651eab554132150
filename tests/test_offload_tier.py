"""The exclusive tier without an engine: what it keeps, in which order it gives up, and what loading and computing take."""

from __future__ import annotations

import itertools
import random

import pytest

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Extent, Fate, Pool
from admission.returns import ReturnModel
from agentserve.engines.plugin.nodes import Block, Branch, Node, Session
from agentserve.engines.plugin.offloading import NO_SLOT, OffloadTier
from agentserve.engines.plugin.options import POLICY_NAMES, PluginOptions, transfer_config
from agentserve.engines.plugin.speeds import Speeds
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.engines.plugin.tier import ExclusiveTier


class Kept:
    """A tier, and sessions whose blocks leave the GPU deepest first. A chain's name and positions make its keys."""

    def __init__(self, num_slots: int, policy: str = "lru") -> None:
        self._ticks = itertools.count(1)
        self.returns = ReturnModel()
        self.tier = ExclusiveTier(num_slots, EVICTION_POLICIES[policy].build(Pool(num_slots, self.returns)), self.clock)
        self.branches: dict[str, Branch] = {}

    def clock(self) -> float:
        return float(next(self._ticks))

    def branch(self, name: str) -> Branch:
        return self.branches.setdefault(name, Branch(Session(name), ""))

    def evict(self, name: str, chain: list[bytes], first: int, end: int, *, shared_by: tuple[str, ...] = ()) -> list[int | None]:
        facts = Extent(1, name, 0, 0.0, self.clock())
        owners = [self.branch(one) for one in (name, *shared_by)]
        slots = []
        for at in reversed(range(first, end)):
            slots.append(self.tier.store(chain[at], chain[at - 1] if at else None, at, facts, owners))
            self.tier.check_integrity()
        return slots

    def tell(self, told: set[bytes]) -> None:
        """Somebody who was told of every change until now knows what is here."""
        came, gone = self.tier.take_changes()
        assert told.isdisjoint(came)
        assert told.issuperset(gone)
        told -= set(gone)
        told |= set(came)
        assert len(told) == len(self.tier)
        assert all(key in self.tier for key in told)

    def held(self, chain: list[bytes]) -> list[int]:
        return [at for at, key in enumerate(chain) if key in self.tier]


def chain(name: str, length: int, head: int = 0) -> list[bytes]:
    """Keys; the first `head` are those of every other chain."""
    return [f"{'head' if at < head else name} {at}".encode() for at in range(length)]


def test_a_full_tier_gives_up_the_oldest_session_tail_first() -> None:
    kept, old, new = Kept(6), chain("old", 5), chain("new", 4)
    assert None not in kept.evict("old", old, 1, 5)
    assert None not in kept.evict("new", new, 0, 4)
    assert kept.held(old) == [1, 2]
    assert kept.held(new) == [0, 1, 2, 3]


def test_what_is_loaded_leaves_and_its_slots_are_safe_until_the_step_is_over() -> None:
    kept, one, two = Kept(4), chain("one", 4), chain("two", 2)
    slots = kept.evict("one", one, 0, 4)
    assert kept.tier.match(one, 0, 3) == 3
    kept.tier.promise(one[:3])
    assert kept.tier.load(one, 0, 3) == slots[::-1][:3]
    kept.tier.promise(())
    assert kept.held(one) == [3]
    assert kept.evict("two", two, 0, 2) == [slots[0], slots[0]]  # its head in the place of its tail
    assert (kept.held(one), kept.held(two)) == ([], [0])
    kept.tier.settle()
    assert set(kept.evict("one", one, 1, 4)) == set(slots[1:])


def test_what_was_promised_stays_until_it_is_loaded() -> None:
    kept, old, new = Kept(3), chain("old", 3), chain("new", 2)
    kept.evict("old", old, 0, 3)
    kept.tier.promise(old[:2])
    assert kept.evict("new", new, 0, 2) == [None, None]
    assert kept.held(old) == [0, 1, 2]
    kept.tier.promise(())
    assert None not in kept.evict("new", new, 0, 2)


def test_the_dead_leave_at_once_and_a_shared_head_with_its_last_owner() -> None:
    kept, one, two = Kept(20), chain("one", 6, head=3), chain("two", 6, head=3)
    kept.evict("one", one, 3, 6)
    kept.evict("two", two, 3, 6)
    kept.evict("one", one, 0, 3, shared_by=("two",))
    for name, left in (("one", [0, 1, 2]), ("two", [])):
        kept.tier.cut(kept.branch(name), 0)
        kept.tier.check_integrity()
        assert kept.held(one) == left
    assert len(kept.tier) == 0
    assert kept.tier.num_dropped_blocks == 9
    assert not kept.branch("two").kept


def test_a_cut_tail_leaves_and_its_head_stays() -> None:
    kept, one = Kept(20), chain("one", 6)
    kept.evict("one", one, 0, 6)
    kept.tier.cut(kept.branch("one"), 4)
    kept.tier.check_integrity()
    assert kept.held(one) == [0, 1, 2, 3]


def test_what_the_gpu_has_computed_again_is_not_kept_twice() -> None:
    kept, one = Kept(20), chain("one", 6)
    kept.evict("one", one, 2, 6)
    kept.tier.computed(one[:4])
    kept.tier.check_integrity()
    assert kept.held(one) == [4, 5]
    kept.evict("one", one, 0, 4)
    assert kept.tier.match(one, 0, 6) == 6


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_whatever_happens_slots_are_given_once_and_heads_outlive_tails(policy: str) -> None:
    rng = random.Random(policy)
    kept = Kept(30, policy)
    chains = {str(number): chain(str(number), 12, head=number % 3 * 2) for number in range(6)}
    told: set[bytes] = set()
    for number in range(300):
        if number % 5 == 0:
            kept.tell(told)
        name = rng.choice(list(chains))
        keys = chains[name]
        held = kept.held(keys)
        action = rng.randrange(5)
        if action == 0:
            kept.tier.cut(kept.branch(name), rng.randrange(12))
        elif action == 1 and held:
            count = kept.tier.match(keys, held[0], 12)
            kept.tier.promise(keys[held[0] : held[0] + count])
            assert len(kept.tier.load(keys, held[0], count)) == count
            kept.tier.promise(())
        elif action == 2:
            kept.tier.computed(keys[: rng.randrange(12)])
        elif not held:
            kept.evict(name, keys, rng.randrange(11), 12)
        elif held[0] > 0:
            kept.evict(name, keys, rng.randrange(held[0]), held[0])
        kept.tier.settle()
        kept.tier.check_integrity()
    kept.tier.switch(EVICTION_POLICIES["lru"].build(Pool(30)))
    kept.tier.check_integrity()
    kept.tier.clear()
    kept.tier.check_integrity()
    assert len(kept.tier) == 0
    kept.tell(told)


def test_what_comes_and_goes_between_two_looks_is_told_of_in_neither_and_what_is_abandoned_in_full() -> None:
    kept, one, two = Kept(20), chain("one", 6), chain("two", 3)
    kept.evict("one", one, 2, 6)
    assert kept.tier.take_changes() == (one[:1:-1], [])
    assert kept.tier.take_changes() == ([], [])
    kept.tier.load(one, 2, 1)
    kept.evict("one", one, 2, 3)
    kept.evict("two", two, 0, 3)
    kept.tier.cut(kept.branch("two"), 0)
    assert kept.tier.take_changes() == ([], [])
    kept.evict("two", two, 0, 3)
    kept.tier.load(one, 2, 1)
    assert sorted(kept.tier.abandon()) == one[2:]


class FakeBlock:
    def __init__(self, block_id: int, key: bytes) -> None:
        self.block_id, self.block_hash, self.ref_cnt = block_id, key + bytes(4), 0


class FakeRequest:
    request_id, num_tokens = "r", 100

    def __init__(self, keys: list[bytes]) -> None:
        self.block_hashes = keys


def test_a_fault_between_promise_and_load_says_so_and_leaves_nothing_behind() -> None:
    kept, keys, told = Kept(20), chain("one", 5), []
    offload = OffloadTier(kept.tier, 16, kept.clock, lambda message, error: told.append(message))
    blocks: list[Block] = [FakeBlock(at, key) for at, key in enumerate(keys)]
    node = Node(Extent(1, "one", 0, 0.0, 1.0), [], 0, None, owners={kept.branch("one"): Fate.LIVE})
    offload.evicted(node, blocks[::-1])
    request = FakeRequest(keys)
    assert offload.promise(request, 16) == 0
    first = offload.jobs(10)
    assert sorted(block for block, _ in first.stores) == [0, 1, 2, 3, 4]
    assert offload.promise(request, 16) == 0, "a store that no worker has spoken of may yet fail"
    offload.done(first.step - 1, (0, 0.0), (0, 0.0), "")
    assert offload.promise(request, 16) == 0
    offload.done(first.step, (0, 0.0), (5, 0.1), "")
    assert offload.promise(request, 16) == 4 * 16
    offload.turn_off(ZeroDivisionError("a fault"))
    offload.placed(request, blocks, 4 * 16)
    assert offload.jobs(10).loads == tuple((NO_SLOT, block) for block in (1, 2, 3, 4))
    assert (offload.promise(request, 0), offload.num_slots, len(told)) == (0, 0, 1)
    assert "a fault" in offload.off_because


def test_the_dead_are_not_stored() -> None:
    kept = Kept(20)
    offload = OffloadTier(kept.tier, 16, kept.clock, lambda message, error: None)
    node = Node(Extent(1, "one", 0, 0.0, 1.0, fate=Fate.ENDED), [], 0, None, owners={kept.branch("one"): Fate.ENDED})
    offload.evicted(node, [FakeBlock(1, b"key")])
    assert (offload.num_kept, offload.jobs(1).stores) == (0, ())


def test_loads_are_made_while_they_are_quicker_and_now_and_then_to_see() -> None:
    now, numbers = [0.0], itertools.count(2, 2)
    speeds = Speeds(lambda: now[0])

    def step(num_tokens: int, seconds: float, num_loaded_tokens: int = 0, load_seconds: float = 0.0) -> None:
        number = next(numbers)
        speeds.step_sent(number - 1, 10**6)  # of this one nobody says that it is over
        speeds.step_sent(number, num_tokens)
        now[0] += seconds
        speeds.step_done(number, num_loaded_tokens, load_seconds)

    assert speeds.is_worth_loading()
    step(1000, 1.0)
    step(10, 1.0, 100, 0.01)
    assert speeds.seconds_per_computed_token == pytest.approx(1e-3)
    assert speeds.seconds_per_loaded_token == pytest.approx(1e-4)
    assert speeds.is_worth_loading()
    for _ in range(20):
        step(1, 1.0, 10, 1.0)
    worth = [speeds.is_worth_loading() for _ in range(32)]
    assert worth.count(True) == 2
    assert speeds.num_declined == 32


def test_a_tier_is_an_option_that_not_everything_goes_with() -> None:
    assert '"kv_load_failure_policy":"recompute"' in transfer_config(PluginOptions.read({"tier_bytes": 1 << 20}))
    assert "recompute" not in transfer_config(PluginOptions())
    for extra in ({"tier_bytes": -1}, {"tier_bytes": 1, "policy": "off"}, {"tier_bytes": 1, "lookahead_blocks": 9}):
        with pytest.raises(PluginUnsupported, match="tier_bytes"):
            PluginOptions.read(extra)
