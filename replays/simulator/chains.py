"""Prompts as places in a forest of block chains, so that a prompt of a thousand blocks is two numbers: a branch and a depth.

A branch is a run of blocks that follow one another; it hangs on its parent between two of the parent's blocks. Depths count blocks from
the root of the chain, so a path is (branch, depth) and its ancestors are found by walking up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from replays.plan import num_shared
from replays.traces import HashIds, Request

if TYPE_CHECKING:
    from replays.simulator.pieces import Piece

_MIX = np.int64(0x9E3779B97F4A7C1 | 1)


@dataclass(slots=True, eq=False)
class Branch:
    """A branch in one pool. `start` is the depth of its first block; its blocks up to `resident` are in the pool."""

    parent: Branch | None
    start: int
    owner: int
    """The play that it belongs to."""
    generated: bool = False
    """What one request alone adds: its unaligned tail and its answer."""
    resident: int = 0
    pieces: list[Piece] = field(default_factory=list)
    attached: list[int] = field(default_factory=list)
    """Where branches with resident blocks hang on this one, ascending, once for each."""
    claims: dict[int, int] = field(default_factory=dict)
    """How deep the newest prompt of each live stream reaches."""
    ended: bool = False
    """The last claim went because its stream ended, not because it moved on."""
    last_claim: int | None = None
    """The stream that claimed it last, also after its end."""
    sent: int = 0
    """Blocks before this depth stood in some prompt."""
    computed: int = 0
    """Blocks before this depth were computed at some time."""
    evictions: list[tuple[int, int, float]] = field(default_factory=list)
    """(from, to, when) of blocks that left the pool and were not asked for since, the shallowest last."""
    _path: tuple[Branch, ...] | None = None

    def __post_init__(self) -> None:
        self.resident = self.sent = self.computed = self.start

    @property
    def live_to(self) -> int:
        """Blocks before this depth stand in a live stream's newest prompt."""
        return max(self.claims.values(), default=0)

    def path(self) -> tuple[Branch, ...]:
        """From the root to this branch."""
        if self._path is None:
            self._path = (self,) if self.parent is None else (*self.parent.path(), self)
        return self._path


Path: TypeAlias = Sequence[Branch]
"""From the root on."""


def covered(path: Path, low: int, high: int) -> Iterator[tuple[Branch, int, int]]:
    """(branch, from, to) of the blocks `low` to `high` of a path, root first."""
    last = len(path) - 1
    for index, branch in enumerate(path):
        end = path[index + 1].start if index < last else high
        if end >= high:
            end, last = high, index
        start = branch.start
        if start < low:
            start = low
        if start < end:
            yield branch, start, end
        if index == last:
            return


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt's whole blocks: those of branch `branch` (a number in its forest) before `depth`, and of its ancestors."""

    branch: int
    depth: int


class Forest:
    """The chains of all prompts that may share blocks: one session's, or a whole trace's where ids are of global scope."""

    def __init__(self) -> None:
        self.parents: list[int | None] = []
        self.starts: list[int] = []
        self._ids: list[HashIds] = []
        self._children: dict[tuple[int | None, int, int], int] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def length(self, branch: int) -> int:
        """Blocks of the branch that some prompt names."""
        return len(self._ids[branch])

    def add(self, ids: HashIds) -> Place:
        """The place of a prompt with these blocks, new branches made where it leaves the known ones. Linear in numpy, not in Python."""
        branch: int | None = None
        depth = 0
        while depth < len(ids):
            child = self._children.get((branch, depth, int(ids[depth])))
            if child is None:
                if branch is not None and self._can_grow(branch, depth):
                    self._ids[branch] = np.concatenate([self._ids[branch], ids[depth:]])
                else:
                    branch = self._new(branch, depth, ids[depth:])
                return Place(branch, len(ids))
            branch = child
            depth += num_shared(self._ids[child], ids[depth:])
        return Place(-1 if branch is None else branch, len(ids))

    def _can_grow(self, branch: int, depth: int) -> bool:
        return depth == self.starts[branch] + len(self._ids[branch])

    def _new(self, parent: int | None, depth: int, ids: HashIds) -> int:
        branch = len(self.parents)
        self.parents.append(parent)
        self.starts.append(depth)
        self._ids.append(ids.copy())
        self._children[parent, depth, int(ids[0])] = branch
        return branch

    def seal(self) -> None:
        """No more prompts: the ids themselves are not needed any longer."""
        self._ids.clear()
        self._children.clear()


def whole_blocks(request: Request, trace_block_size: int, block_size: int) -> HashIds:
    """One id for each whole engine block that the trace names, the same wherever the blocks are the same.

    `block_size` must be a multiple or a divisor of the trace's. What lies after the last whole block is shared with nothing.
    """
    ids = request.hash_ids[: request.num_prompt_tokens // trace_block_size]
    if block_size >= trace_block_size:
        group = block_size // trace_block_size
        grouped = ids[: len(ids) // group * group].reshape(-1, group)
        mixed = grouped[:, 0].copy()
        for column in range(1, group):
            mixed = mixed * _MIX + grouped[:, column]
        return mixed
    parts = trace_block_size // block_size
    return (ids[:, None] * parts + np.arange(parts)).reshape(-1)


class BranchSet:
    """One play's branches, made when they are first used. No two plays share any."""

    def __init__(self, forest: Forest, owner: int) -> None:
        self._forest = forest
        self._owner = owner
        self._branches: dict[int, Branch] = {}
        self._numbers: dict[Branch, int] = {}

    def branch(self, number: int) -> Branch:
        found = self._branches.get(number)
        if found is None:
            parent = self._forest.parents[number]
            found = Branch(None if parent is None else self.branch(parent), self._forest.starts[number], self._owner)
            self._branches[number] = found
            self._numbers[found] = number
        return found

    def number_of(self, branch: Branch) -> int | None:
        """Its number in the forest; None for a tail."""
        return self._numbers.get(branch)

    def tail(self, place: Place) -> Branch:
        """A new branch behind `place`, for what one request alone adds."""
        parent = None if place.branch < 0 else self.branch(place.branch)
        return Branch(parent, place.depth, self._owner, generated=True)
