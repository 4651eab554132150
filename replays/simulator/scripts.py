"""Sessions ready to be simulated: what each call waits for (as in a live replay), and where its prompt lies in the session's forest.

Block ids are dropped once the forest is built, so that a corpus of 60 million ids fits in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replays.plan import PlannedCall, TreePlan, num_shared, plan_session
from replays.simulator.chains import Forest, Place, whole_blocks
from replays.traces import HashIds, Session

_NO_IDS: HashIds = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Script:
    """One session. `places[number]` is where the prompt of call `number` lies, with its answer where a later prompt holds that."""

    plan: TreePlan
    forest: Forest
    places: tuple[Place, ...]
    uses: Mapping[int, Sequence[tuple[int, int]]]
    """By branch: who asks for it, as (call number, depth in the branch), in recorded order."""

    @property
    def is_shared(self) -> bool:
        """Its forest is that of the whole trace."""
        return self.plan.session.scope == "global"


def script_of(session: Session, block_size: int, *, forest: Forest | None = None, echoes: bool = False) -> Script:
    """The script of `session` for an engine with this block size. Raises ValueError when it has no calls or the sizes do not divide.

    With `forest`, that of the whole trace, which the caller seals. `echoes`: clients send all answers back as they were generated.
    """
    if max(block_size, session.block_size) % min(block_size, session.block_size):
        raise ValueError(f"blocks of {session.block_size} tokens (session {session.id!r}) do not divide into blocks of {block_size}")
    plan = plan_session(session, 1.0)
    own = forest is None
    forest = Forest() if forest is None else forest
    prompts = [whole_blocks(call.request, session.block_size, block_size) for call in plan.calls]
    asked = [forest.add(ids) for ids in prompts]
    places = tuple(
        forest.add(_with_answer(plan, call, prompts, block_size)) if echoes or call.request.echoed else place
        for call, place in zip(plan.calls, asked, strict=True)
    )
    if own:
        forest.seal()
    bare = replace(plan, session=_bare(session), calls=tuple(_bare_call(call) for call in plan.calls))
    return Script(bare, forest, places, _uses(forest, asked))


def _with_answer(plan: TreePlan, call: PlannedCall, prompts: Sequence[HashIds], block_size: int) -> HashIds:
    """The blocks of a call's prompt and answer, as far as the next prompt of its stream names them."""
    mine = prompts[call.number]
    after = plan.streams[call.stream][call.index + 1 : call.index + 2]
    if not after or num_shared(prompts[after[0]], mine) < len(mine):
        return mine
    answered = (call.request.num_prompt_tokens + call.request.num_output_tokens - 1) // block_size
    return prompts[after[0]][: max(len(mine), answered)]


def _bare(session: Session) -> Session:
    return replace(session, root=replace(session.root, requests=()), subagents=tuple(replace(s, requests=()) for s in session.subagents))


def _bare_call(call: PlannedCall) -> PlannedCall:
    return replace(call, parts=(), request=replace(call.request, hash_ids=_NO_IDS, output_types=()))


def _uses(forest: Forest, places: Sequence[Place]) -> dict[int, list[tuple[int, int]]]:
    uses: dict[int, list[tuple[int, int]]] = {}
    for number, place in enumerate(places):
        branch: int | None = place.branch if place.branch >= 0 else None
        depth = place.depth
        while branch is not None:
            uses.setdefault(branch, []).append((number, depth))
            depth = forest.starts[branch]
            branch = forest.parents[branch]
    return uses
