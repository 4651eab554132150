"""The CPU tier under the pool: what it holds of each branch on each rank, and how long it takes to bring it back.

*Exclusive*, as the plugin's own tier is: a block goes into the tier when it leaves the pool, unless it is believed dead, and out of it when
it is brought back or believed dead; inside, the engine's eviction policy chooses by a second object of its own. *Inclusive*: a block is
stored when it is computed, as LMCache does unless told otherwise, and stays; inside, the branch that was used longest ago goes. Either way
it loses its tail first. A block is there when every rank has it. Storing takes no time here: it is off the path of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import MAY_RETURN, EvictionPolicy, Extent
from admission.eviction.policy import Pool as PolicyPool
from replays.simulator.chains import Branch, Path, covered
from replays.simulator.cost import StepCost, StepWork
from replays.simulator.pool import Prospects
from replays.simulator.requests import EngineRequest
from replays.simulator.tier_part import TierPart


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Of one engine's tier."""

    capacity_tokens: int
    exclusive: bool = True
    num_ranks: int = 1
    rank_capacity: tuple[float, ...] = ()
    """Share of the capacity that each rank really has; empty: all of it. Ranks that store alike need no simulation of their own."""
    asks_all_ranks: bool = True
    """False: only rank 0 is asked, and where another rank lacks a block the load fails and its tokens are computed after all."""
    chunk_blocks: int = 1
    """Blocks of a chunk; what is brought back ends at whole chunks."""
    bytes_per_token: int = 29_952
    """On one rank."""
    bytes_per_second: float = 40e9
    """From host to device, each rank; the default is 0.6 of PCIe 5.0 x16, what LMCache logs."""
    setup_seconds: float = 0.002
    stores_generated: bool = True
    """What one request alone generated goes into the tier too."""


def lru(num_blocks: int) -> EvictionPolicy:
    """What LMCache ranks by."""
    return EVICTION_POLICIES["lru"].build(PolicyPool(num_blocks))


@dataclass(eq=False)
class CpuTier:
    """A tier under one engine's pool; its `Loader`. The pool reports to `evicted` and `stored`."""

    options: TierOptions
    block_size: int
    cost: StepCost
    drops_last_block: bool = False
    """The engine computes the last block of what is found again."""
    policy: Callable[[int], EvictionPolicy] = lru
    """Makes one that ranks what is in so many blocks."""
    prospects: Prospects | None = None
    """What becomes of a branch; None: nobody knows."""
    num_loaded_tokens: int = 0
    num_stored_tokens: int = 0
    num_failed_loads: int = 0
    _busy_until: float = 0.0
    _ranks: list[TierPart] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        shares: Sequence[float] = options.rank_capacity or (1.0,)
        sizes = [int(options.capacity_tokens * share) // self.block_size for share in shares]
        self._ranks = [TierPart(size, self.policy(size)) for size in sizes]

    @property
    def num_held_blocks(self) -> int:
        """Of the rank that holds most."""
        return max(rank.used for rank in self._ranks)

    def evicted(self, branch: Branch, start: int, end: int, facts: Extent, now: float) -> None:
        """Blocks have left the pool, of which `facts` says what is known. Changes state."""
        if self.options.exclusive and facts.fate in MAY_RETURN:
            self._store(branch, start, end, facts, now)

    def stored(self, branch: Branch, start: int, end: int, now: float) -> None:
        """Blocks were computed into the pool. Changes state."""
        if self.options.exclusive:
            for rank in self._ranks:
                rank.take(branch, end, now)
        else:
            self._store(branch, start, end, Extent(0, "", 0, now, now), now)

    def tell(self, branch: Branch, now: float) -> None:
        """What becomes of `branch` has changed. Changes state."""
        if self.prospects is None or not self.options.exclusive:
            return
        parts = [rank for rank in self._ranks if branch in rank.held]
        outlook = self.prospects.outlook(branch, now) if parts else ()
        alive_to = 0
        for depth, _, fate, _ in outlook:
            if fate not in MAY_RETURN:
                break
            alive_to = depth
        for rank in parts:
            low = rank.held[branch].low
            rank.cut(branch, alive_to, now)
            rank.foresee(branch, next(use for depth, _, _, use in outlook if low < depth), now)

    def _store(self, branch: Branch, start: int, end: int, facts: Extent, now: float) -> None:
        if branch.generated and not self.options.stores_generated:
            return
        self.num_stored_tokens += (end - start) * self.block_size
        for rank in self._ranks:
            rank.add(branch, start, end, facts, now)

    def offer(self, request: EngineRequest, hit: int, limit: int, now: float) -> int:
        """A tier that is slower than computing offers nothing."""
        path = request.path
        for rank in self._ranks:
            for branch in path:
                rank.touch(branch, now)
        asked = self._ranks if self.options.asks_all_ranks else self._ranks[:1]
        chunk = self.options.chunk_blocks
        depth = min(_depth(rank, path, hit, limit) for rank in asked) // chunk * chunk - self.drops_last_block
        if depth <= hit or self._seconds(depth - hit, now) >= self._compute_seconds(hit, depth):
            return 0
        if depth > min(_depth(rank, path, hit, limit) for rank in self._ranks) // chunk * chunk - self.drops_last_block:
            self.num_failed_loads += 1
            return 0
        return depth * self.block_size

    def load(self, request: EngineRequest, hit: int, num_tokens: int, now: float) -> float:
        depth = num_tokens // self.block_size
        seconds = self._seconds(depth - hit, now)
        self._busy_until = now + seconds
        self.num_loaded_tokens += num_tokens - hit * self.block_size
        if self.options.exclusive:
            for branch, _, end in covered(request.path, hit, depth):
                for rank in self._ranks:
                    rank.take(branch, end, now)
        return seconds

    def _seconds(self, num_blocks: int, now: float) -> float:
        """Until blocks asked for now have come; loads go one after the other."""
        options = self.options
        transfer = num_blocks * self.block_size * options.bytes_per_token / options.bytes_per_second
        return max(0.0, self._busy_until - now) + options.setup_seconds + transfer

    def _compute_seconds(self, hit: int, depth: int) -> float:
        num_tokens = (depth - hit) * self.block_size
        context = num_tokens * (hit + depth) * self.block_size // 2
        return self.cost.step_seconds(StepWork(0, 0, num_tokens, context)) - self.cost.step_seconds(StepWork(0, 0, 0, 0))


def _depth(rank: TierPart, path: Path, hit: int, limit: int) -> int:
    """Blocks of the path's front, at most `limit`, that this rank holds behind the `hit` ones that the pool has."""
    depth = hit
    for branch, start, end in covered(path, hit, limit):
        depth = min(end, rank.end(branch, start))
        if depth < end:
            break
    return depth
