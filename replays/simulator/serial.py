"""One request at a time through the block pool, without an engine: what a policy alone hits, comparable with other cache simulators.

Every prompt is looked up, its missing whole blocks are computed, and it lets go of all of them before the next comes. Answers add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replays.simulator.chains import BranchSet, Path
from replays.simulator.pool import BlockPool, Use
from replays.simulator.scripts import Script


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt: `script` of the workload, `call` of it, at trace seconds."""

    seconds: float
    script: int
    call: int


def in_order(scripts: Sequence[Script], stagger_seconds: float = 1.0) -> list[Ask]:
    """All calls by recorded start, each session begun so long after the one before it."""
    asks = [
        Ask(call.request.start_seconds + number * stagger_seconds, number, call.number)
        for number, script in enumerate(scripts)
        for call in script.plan.calls
    ]
    return sorted(asks, key=lambda ask: (ask.seconds, ask.script, ask.call))


@dataclass(frozen=True, slots=True)
class SerialHits:
    """Blocks of all prompts, and how many of them were hits; the same of the last half of the prompts."""

    num_hit_blocks: int
    num_blocks: int
    late_hit_blocks: int
    late_blocks: int


def serial_hits(scripts: Sequence[Script], asks: Sequence[Ask], pool: BlockPool) -> SerialHits:
    """Plays `asks` through a fresh pool. A prompt that is longer than the pool is passed over."""
    branches = [BranchSet(script.forest, number) for number, script in enumerate(scripts)]
    use = Use("")
    hits, blocks = [0, 0], [0, 0]
    half = len(asks) // 2
    for holder, ask in enumerate(asks):
        place = scripts[ask.script].places[ask.call]
        path: Path = branches[ask.script].branch(place.branch).path() if place.branch >= 0 else ()
        depth, now = place.depth, ask.seconds
        if depth > pool.num_blocks:
            continue
        hit = pool.hit_depth(path, depth)
        pool.hold(holder, path, hit, now)
        pool.allocate(depth - hit, now)
        pool.commit(holder, path, hit, depth, now)
        pool.free(holder, path, depth, 0, use, now)
        late = holder >= half
        hits[late] += hit
        blocks[late] += depth
    return SerialHits(sum(hits), sum(blocks), hits[1], blocks[1])
