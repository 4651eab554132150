"""One rank's part of a CPU tier: runs of branches' blocks, one a branch, ranked by an eviction policy's second object.

A run loses its tail first, and no block on which another run hangs: nothing can be hit across a hole.
"""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Extent
from replays.simulator.chains import Branch


@dataclass(slots=True, eq=False)
class Held:
    """Blocks `low` to `high` (depths) of a branch."""

    branch: Branch
    low: int
    high: int
    extent: Extent
    is_known: bool = False
    """The policy was told of it."""
    is_ranked: bool = False
    """The policy may choose it."""


class TierPart:
    """`num_blocks`, and what they hold."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.used = 0
        self.held: dict[Branch, Held] = {}
        self._policy = policy
        self._runs: dict[int, Held] = {}
        """By extent id."""
        self._behind: dict[Branch | None, dict[Branch, None]] = {}
        """Branches of which something is held, by their parents."""
        self._next_id = 0

    def end(self, branch: Branch, start: int) -> int:
        """Up to where blocks from `start` on are held; `start` where none are."""
        held = self.held.get(branch)
        return held.high if held is not None and held.low <= start < held.high else start

    def touch(self, branch: Branch, now: float) -> None:
        """It was asked for. Changes state."""
        held = self.held.get(branch)
        if held is not None:
            held.extent.freed_seconds = now
            self._facts_changed(held, now)

    def foresee(self, branch: Branch, next_use: float | None, now: float) -> None:
        """When it will be asked for, where that is known. Changes state."""
        held = self.held.get(branch)
        if held is not None and held.extent.next_use_seconds != next_use:
            held.extent.next_use_seconds = next_use
            self._facts_changed(held, now)

    def add(self, branch: Branch, low: int, high: int, facts: Extent, now: float) -> None:
        """Hold these too. Blocks of the branch that do not join them are let go: nothing can be hit across a hole. Changes state."""
        held = self.held.get(branch)
        if held is not None and (low > held.high or high < held.low):
            self.cut(branch, held.low, now)
            held = None
        if held is None:
            held = self._begin(branch, low, facts)
        before = held.high - held.low
        held.low, held.high = min(low, held.low), max(high, held.high)
        self.used += held.high - held.low - before
        extent = held.extent
        extent.freed_seconds = max(extent.freed_seconds, facts.freed_seconds)
        extent.session_id, extent.return_class, extent.next_use_seconds = facts.session_id, facts.return_class, facts.next_use_seconds
        self._resized(held, now)
        self._facts_changed(held, now)
        while self.used > self.num_blocks:
            self._displace(now)

    def take(self, branch: Branch, end: int, now: float) -> None:
        """Blocks before `end` go: they are in the pool again. Changes state."""
        held = self.held.get(branch)
        if held is not None and end > held.low:
            gone = min(end, held.high) - held.low
            held.low += gone
            self.used -= gone
            self._resized(held, now)

    def cut(self, branch: Branch, depth: int, now: float) -> None:
        """Blocks from `depth` on go: nobody is expected to ask for them. Changes state."""
        held = self.held.get(branch)
        if held is not None and depth < held.high:
            gone = held.high - max(depth, held.low)
            held.high -= gone
            self.used -= gone
            self._resized(held, now)

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        self._policy.check_integrity()
        assert self.used == sum(held.high - held.low for held in self.held.values()) <= self.num_blocks
        for held in self.held.values():
            assert held.is_ranked == (self._room(held) > 0)
            assert held.extent.num_blocks == held.high - held.low > 0
            assert held.branch in self._behind[held.branch.parent]

    def _begin(self, branch: Branch, low: int, facts: Extent) -> Held:
        self._next_id += 1
        extent = Extent(self._next_id, facts.session_id, 0, facts.inserted_seconds, facts.freed_seconds, num_hits=facts.num_hits)
        held = self.held[branch] = self._runs[extent.id] = Held(branch, low, low, extent)
        self._behind.setdefault(branch.parent, {})[branch] = None
        return held

    def _displace(self, now: float) -> None:
        extent = self._policy.to_evict(now)
        assert extent is not None, "a full tier, but nothing to give up"
        held = self._runs[extent.id]
        self.cut(held.branch, held.high - min(self.used - self.num_blocks, self._room(held)), now)

    def _room(self, held: Held) -> int:
        """Blocks at its end on which nothing that is held hangs."""
        hanging = (branch.start for branch in self._behind.get(held.branch, ()) if branch.start <= held.high)
        return held.high - max(held.low, max(hanging, default=0))

    def _resized(self, held: Held, now: float) -> None:
        held.extent.num_blocks, held.extent.end_block = held.high - held.low, held.high
        parent = held.branch.parent
        if held.low < held.high:
            self._rank(held, now)
        else:
            if held.is_known:
                self._policy.forget(held.extent, now)
            del self.held[held.branch], self._runs[held.extent.id]
            siblings = self._behind[parent]
            del siblings[held.branch]
            if not siblings:
                del self._behind[parent]
        above = None if parent is None else self.held.get(parent)
        if above is not None:
            self._rank(above, now)

    def _facts_changed(self, held: Held, now: float) -> None:
        if held.is_ranked:
            self._policy.reconsider(held.extent, now)

    def _rank(self, held: Held, now: float) -> None:
        """Tell the policy whether it may be chosen, where that has changed."""
        is_free = self._room(held) > 0
        if is_free == held.is_ranked:
            return
        held.is_ranked = is_free
        if not is_free:
            self._policy.hold(held.extent, now)
        elif held.is_known:
            self._policy.release(held.extent, now)
        else:
            held.is_known = True
            self._policy.insert(held.extent, now)
