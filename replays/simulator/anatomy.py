"""What the pool is made of over time, how old the blocks are that leave it, and how much room the live sessions would need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from admission.eviction.policy import Fate
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock, Rank
from replays.simulator.pieces import PooledExtent

if TYPE_CHECKING:
    from replays.simulator.closed_loop import ClosedLoop
    from replays.simulator.server import Server

KINDS = ("pinned", "live_idle", "cut", "generated", "ended", "spare_copies", "unused")
_KIND_OF = {
    Fate.LIVE: "live_idle",
    Fate.CUT: "cut",
    Fate.SUPERSEDED: "cut",
    Fate.ONE_SHOT: "cut",
    Fate.GENERATED: "generated",
    Fate.ENDED: "ended",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The pools of all replicas at one moment, in blocks by kind."""

    seconds: float
    blocks: dict[str, int]


@dataclass(eq=False)
class Anatomy:
    """Looks at the pools every `sample_seconds` of profiling, and at every block that is evicted."""

    sample_seconds: float
    samples: list[Sample] = field(default_factory=list)
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    """By what they were: kind at the time of eviction."""
    evicted_age_seconds: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the last release, blocks) of live blocks that were evicted."""
    _counting: bool = False

    def watch(self, clock: Clock, server: Server, loop: ClosedLoop) -> None:
        """Plan the looks."""

        def look() -> None:
            if loop.profiling:
                self._counting = True
                self.samples.append(Sample(clock.now, _composition(server, loop)))
            if server.num_in_flight or loop.plays:
                clock.at(clock.now + self.sample_seconds, look, Rank.TICK)

        clock.at(0.0, look, Rank.TICK)

    def evicted(self, branch: Branch, start: int, end: int, extent: PooledExtent, now: float) -> None:
        """Blocks `start` to `end` of `branch` have left the pool."""
        if not self._counting:
            return
        kind = _KIND_OF[extent.truth]
        self.evicted_blocks[kind] += end - start
        if kind == "live_idle":
            self.evicted_age_seconds.append((now - extent.freed_seconds, end - start))

    def mean_shares(self) -> dict[str, float]:
        """Share of the pool by kind, mean over the samples."""
        totals: Counter[str] = Counter()
        for sample in self.samples:
            totals.update(sample.blocks)
        blocks = sum(totals.values())
        return {kind: totals[kind] / blocks if blocks else 0.0 for kind in KINDS}


def _composition(server: Server, loop: ClosedLoop) -> dict[str, int]:
    counts = dict.fromkeys(KINDS, 0)
    for engine in server.engines:
        counts["unused"] += engine.pool.num_plain
        counts["pinned"] += engine.pool.num_blocks - engine.pool.num_free
        for extent, spare in engine.pool.idle_extents():
            counts["spare_copies" if spare else _KIND_OF[extent.truth]] += extent.num_blocks
    return counts
