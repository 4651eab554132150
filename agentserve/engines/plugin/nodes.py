"""Who uses which blocks: sessions, their branches, and the nodes of the prefix tree that they share.

A node is a run of cached blocks of one chain that requests use and free together; it carries the `Extent` that the policy ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from admission.eviction.policy import EvictionPolicy, Extent, Fate
from admission.return_class import UNKNOWN

Key: TypeAlias = bytes
"""vLLM's hash of a block, which covers all that comes before it."""


class Block(Protocol):
    """What is read of vLLM's KVCacheBlock."""

    block_id: int
    ref_cnt: int

    @property
    def block_hash(self) -> Any: ...


@dataclass(slots=True, eq=False)
class Session:
    """What has been said of a session, while it runs or has blocks here."""

    id: str
    branches: dict[str, Branch] = field(default_factory=dict)
    fate: Fate = Fate.LIVE
    return_class: str = UNKNOWN
    priority: int = 35
    retention_seconds: float | None = None
    num_running: int = 0
    idle_since: float | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """One line of a session's prompts, and the nodes that it uses."""

    session: Session
    id: str
    nodes: dict[Node, None] = field(default_factory=dict)
    """In the order of their first use."""
    num_prompt_blocks: int = 0
    """Whole blocks of its last prompt: what lies behind them was generated."""
    kept: dict[Run, None] = field(default_factory=dict)
    """What the offload tier keeps of it."""


@dataclass(slots=True, eq=False)
class Node:
    extent: Extent
    blocks: list[Any]
    """vLLM's blocks, from the root's side to the deep end. Never empty."""
    start: int
    """Position of the first in its chain, in blocks."""
    parent: Node | None
    children: dict[Node, None] = field(default_factory=dict)
    owners: dict[Branch, Fate] = field(default_factory=dict)
    """What it is to each branch that uses it; it is live while one of them is."""
    waiting: set[str] = field(default_factory=set)
    """Of whose paths it is part: requests and sessions that wait."""
    is_known: bool = False
    """Whether the policy was told of it."""
    is_ranked: bool = False
    """Whether the policy may choose it: a leaf that nobody uses."""

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    def fate(self) -> Fate:
        """Live while it is so to one owner, then presumed over while it is so to one; else what it became last."""
        fates = list(self.owners.values())
        if Fate.LIVE in fates or not fates:
            return Fate.LIVE
        return Fate.PRESUMED if Fate.PRESUMED in fates else fates[-1]


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one chain in the offload tier."""

    extent: Extent
    start: int
    """Position of the first in its chain, in blocks."""
    parent: Key | None
    """The block before the first."""
    owners: set[Branch]
    """To whom it is alive."""
    keys: deque[Key] = field(default_factory=deque)
    """From the root's side to the deep end. Never empty."""
    slots: deque[int] = field(default_factory=deque)
    """Where each of them lies."""
    is_promised: bool = False
    """A request is about to load of it."""
    is_known: bool = False
    """Whether the policy was told of it."""
    is_ranked: bool = False
    """Whether the policy may choose it."""

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


def like(facts: Extent, extent_id: int = 0) -> Extent:
    """A new extent with the same history."""
    return Extent(
        extent_id,
        facts.session_id,
        0,
        facts.inserted_seconds,
        facts.freed_seconds,
        0,
        facts.num_hits,
        facts.fate,
        facts.return_class,
        None,
        facts.priority,
        facts.retention_seconds,
        facts.protected,
    )


def rank(what: Node | Run, policy: EvictionPolicy, now: float, *, is_free: bool) -> None:
    """Tell the policy whether it may choose `what`, where that has changed. Changes the policy's state."""
    if is_free == what.is_ranked:
        return
    what.is_ranked = is_free
    if not is_free:
        policy.hold(what.extent, now)
    elif what.is_known:
        policy.release(what.extent, now)
    else:
        what.is_known = True
        policy.insert(what.extent, now)
