"""What the pool is made of over time, what leaves it and is missed, and how much room an LRU would need."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from msgspec import Struct

from admission.eviction.policy import Fate
from replays.simulator.chains import Branch, covered
from replays.simulator.clock import Clock, Rank
from replays.simulator.pieces import PooledExtent
from replays.simulator.requests import EngineRequest

if TYPE_CHECKING:
    from replays.simulator.loop import Loop
    from replays.simulator.server import Call, Server

KINDS = ("pinned", "live_idle", "cut", "generated", "ended", "spare_copies", "unused")
_KIND_OF = {
    Fate.LIVE: "live_idle",
    Fate.CUT: "cut",
    Fate.SUPERSEDED: "cut",
    Fate.ONE_SHOT: "cut",
    Fate.GENERATED: "generated",
    Fate.ENDED: "ended",
    Fate.PRESUMED: "ended",
}
AGES_SECONDS = (10, 30, 60, 120, 300, 600, 1800)
"""Idle ages T for which the room is counted that it takes to survive them."""
REGRET_SECONDS = (60, 300, 1800)
_MAX_POINTS = 200
"""Samples that a report keeps of a series."""

Weighted: TypeAlias = "list[tuple[float, int]]"
"""(seconds, blocks)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The pools of all replicas at one moment, in blocks: by kind, live idle ones by return class, and used within each age."""

    seconds: float
    blocks: dict[str, int]
    classes: Counter[str]
    used_within: tuple[int, ...]


class AnatomyReport(Struct, kw_only=True):
    """Of the profiling phase. Tokens; series have one entry for each of `seconds` (simulated, since profiling began)."""

    seconds: list[float]
    kinds: dict[str, list[int]]
    live_idle_by_class: dict[str, list[int]]
    evicted_tokens: dict[str, int]
    """By what it was."""
    evicted_age_seconds: dict[str, dict[str, float]]
    """By what it was: how long ago the last request had let go of it, percentiles by tokens."""
    regretted_tokens: int
    """Evicted, and asked for again."""
    regretted_share: float | None
    """Of what was evicted."""
    regret_seconds: dict[str, float]
    """From the eviction to the request, percentiles by tokens."""
    regretted_within: dict[str, float]
    """Share of what was evicted that was asked for within so many seconds."""
    used_within_tokens: dict[str, dict[str, float]]
    """In use, or used within so many seconds: `mean` and `p95` over the samples. In a pool where nothing is evicted this is the capacity
    that an LRU needs so that a session survives that idle time."""


@dataclass(eq=False)
class Anatomy:
    """Looks at the pools every `sample_seconds` of profiling, at every block that is evicted, and at every request that has ended."""

    sample_seconds: float
    samples: list[Sample] = field(default_factory=list)
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    """By what they were: kind at the time of eviction."""
    evicted_ages: dict[str, Weighted] = field(default_factory=dict)
    regrets: Weighted = field(default_factory=list)
    _counting: bool = False

    @property
    def evicted_age_seconds(self) -> Weighted:
        """(seconds since the last release, blocks) of live blocks that were evicted."""
        return self.evicted_ages.get("live_idle", [])

    def watch(self, clock: Clock, server: Server, loop: Loop) -> None:
        """Plan the looks."""

        def look() -> None:
            if loop.profiling:
                self._counting = True
                self.samples.append(_sample(server, clock.now))
            if not loop.is_over:
                clock.at(clock.now + self.sample_seconds, look, Rank.TICK)

        clock.at(0.0, look, Rank.TICK)

    def evicted(self, branch: Branch, start: int, end: int, extent: PooledExtent, now: float) -> None:
        """Blocks `start` to `end` of `branch` have left the pool."""
        if not branch.generated:
            branch.evictions.append((start, end, now))
        if not self._counting:
            return
        kind = _KIND_OF[extent.truth]
        self.evicted_blocks[kind] += end - start
        self.evicted_ages.setdefault(kind, []).append((now - extent.freed_seconds, end - start))

    def ended(self, call: Call, request: EngineRequest) -> None:
        """A request has ended: what of its prompt had been evicted when it was scheduled is regretted."""
        now = request.scheduled
        assert now is not None
        for branch, _, end in covered(call.path, request.num_resident_blocks, request.num_computed_before):
            for seconds, blocks in _take(branch, end, now):
                if self._counting:
                    self.regrets.append((seconds, blocks))

    def mean_shares(self) -> dict[str, float]:
        """Share of the pool by kind, mean over the samples."""
        totals: Counter[str] = Counter()
        for sample in self.samples:
            totals.update(sample.blocks)
        blocks = sum(totals.values())
        return {kind: totals[kind] / blocks if blocks else 0.0 for kind in KINDS}

    def report(self, block_size: int, started: float) -> AnatomyReport:
        """All of it, in tokens."""
        kept = self.samples[:: -(-len(self.samples) // _MAX_POINTS) or 1]
        classes = sorted({name for sample in kept for name in sample.classes})
        evicted = sum(self.evicted_blocks.values())
        regretted = sum(blocks for _, blocks in self.regrets)
        return AnatomyReport(
            seconds=[round(sample.seconds - started, 1) for sample in kept],
            kinds={kind: [sample.blocks[kind] * block_size for sample in kept] for kind in KINDS},
            live_idle_by_class={name: [sample.classes[name] * block_size for sample in kept] for name in classes},
            evicted_tokens={kind: blocks * block_size for kind, blocks in self.evicted_blocks.items()},
            evicted_age_seconds={kind: weighted_percentiles(ages) for kind, ages in self.evicted_ages.items()},
            regretted_tokens=regretted * block_size,
            regretted_share=regretted / evicted if evicted else None,
            regret_seconds=weighted_percentiles(self.regrets),
            regretted_within={str(age): _within(self.regrets, age) / evicted if evicted else 0.0 for age in REGRET_SECONDS},
            used_within_tokens=self._used_within(block_size),
        )

    def _used_within(self, block_size: int) -> dict[str, dict[str, float]]:
        if not self.samples:
            return {}
        columns = np.array([sample.used_within for sample in self.samples]) * block_size
        return {
            str(age): {"mean": float(columns[:, place].mean()), "p95": float(np.percentile(columns[:, place], 95))}
            for place, age in enumerate(AGES_SECONDS)
        }


def weighted_percentiles(values: Sequence[tuple[float, int]]) -> dict[str, float]:
    """p10, p50 and p90 of (value, weight)."""
    if not values:
        return {}
    ordered = np.array(sorted(values))
    shares = np.cumsum(ordered[:, 1]) / ordered[:, 1].sum()
    return {name: float(ordered[np.searchsorted(shares, share), 0]) for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))}


def _within(values: Weighted, seconds: float) -> int:
    return sum(blocks for age, blocks in values if age <= seconds)


def _take(branch: Branch, end: int, now: float) -> Weighted:
    """Takes the evictions of blocks before `end` that lie before `now`: (seconds ago, blocks). Changes state."""
    taken: Weighted = []
    left: list[tuple[int, int, float]] = []
    for start, stop, time in branch.evictions:
        if start >= end or time > now:
            left.append((start, stop, time))
            continue
        taken.append((now - time, min(stop, end) - start))
        if stop > end:
            left.append((end, stop, time))
    branch.evictions = left
    return taken


def _sample(server: Server, now: float) -> Sample:
    counts = dict.fromkeys(KINDS, 0)
    classes: Counter[str] = Counter()
    young = [0] * (len(AGES_SECONDS) + 1)
    for engine in server.engines:
        pool = engine.pool
        counts["unused"] += pool.num_plain
        counts["pinned"] += pool.num_blocks - pool.num_free
        for extent, spare in pool.idle_extents():
            kind = "spare_copies" if spare else _KIND_OF[extent.truth]
            counts[kind] += extent.num_blocks
            if kind == "live_idle":
                classes[extent.return_class] += extent.num_blocks
            young[bisect_left(AGES_SECONDS, now - extent.freed_seconds)] += extent.num_blocks
    used = np.cumsum(young[:-1]) + counts["pinned"]
    return Sample(now, counts, classes, tuple(int(blocks) for blocks in used))
