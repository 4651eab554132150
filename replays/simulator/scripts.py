"""Sessions ready to be simulated: what each call waits for (as in a live replay), and where its prompt lies in the session's forest.

Block ids are dropped once the forest is built, so that a corpus of 60 million ids fits in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replays.plan import PlannedCall, TreePlan, plan_session
from replays.simulator.chains import Forest, Place, whole_blocks
from replays.traces import HashIds, Session

_NO_IDS: HashIds = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Script:
    """One session. `places[number]` is where the prompt of call `number` lies; `uses[branch]` who asks for a branch, and how deep."""

    plan: TreePlan
    forest: Forest
    places: tuple[Place, ...]
    uses: tuple[tuple[tuple[int, int], ...], ...]
    """By branch: (call number, depth in the branch), in recorded order."""


def script_of(session: Session, block_size: int) -> Script:
    """The script of `session` for an engine with this block size. Raises ValueError when it has no calls or the sizes do not divide."""
    if max(block_size, session.block_size) % min(block_size, session.block_size):
        raise ValueError(f"blocks of {session.block_size} tokens (session {session.id!r}) do not divide into blocks of {block_size}")
    plan = plan_session(session, 1.0)
    forest = Forest()
    places = tuple(forest.add(whole_blocks(call.request, session.block_size, block_size)) for call in plan.calls)
    forest.seal()
    bare = replace(plan, session=_bare(session), calls=tuple(_bare_call(call) for call in plan.calls))
    return Script(bare, forest, places, _uses(forest, places))


def _bare(session: Session) -> Session:
    return replace(session, root=replace(session.root, requests=()), subagents=tuple(replace(s, requests=()) for s in session.subagents))


def _bare_call(call: PlannedCall) -> PlannedCall:
    return replace(call, parts=(), request=replace(call.request, hash_ids=_NO_IDS, output_types=()))


def _uses(forest: Forest, places: Sequence[Place]) -> tuple[tuple[tuple[int, int], ...], ...]:
    uses: list[list[tuple[int, int]]] = [[] for _ in range(len(forest))]
    for number, place in enumerate(places):
        branch: int | None = place.branch if place.branch >= 0 else None
        depth = place.depth
        while branch is not None:
            uses[branch].append((number, depth))
            depth = forest.starts[branch]
            branch = forest.parents[branch]
    return tuple(tuple(entries) for entries in uses)
