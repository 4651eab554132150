"""What an eviction policy is told and what it answers. One object ranks extents in the simulator, on the engine and in the tuner.

An extent is a run of blocks of one chain that are used and freed together: the part of a session that no other branch shares, or a shared
head. The pool owns blocks, pins and the tree of extents; the policy only ranks. `now` is any clock that only rises, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from admission.choice import Knob as Knob


class Fate(StrEnum):
    """What is known of an extent's future. Everything but `LIVE` is believed dead: nobody is expected to ask for it again."""

    LIVE = "live"
    ENDED = "ended"
    """Its session is over: that was said, or it is a sub-agent that has been joined."""
    PRESUMED = "presumed"
    """Its session is believed over from its silence. One in some comes back all the same: what has room to spare may keep it."""
    SUPERSEDED = "superseded"
    """On a branch that its session has left."""
    CUT = "cut"
    """A tail that the session's newest prompt no longer has."""
    GENERATED = "generated"
    """Generated tokens that this client never sends back."""
    ONE_SHOT = "one_shot"
    """A side request that no other builds on."""


MAY_RETURN = (Fate.LIVE, Fate.PRESUMED)
"""What a tier keeps. Inside it a presumed end needs no mark: its idle time says that it goes first."""

for _fate in Fate:
    type.__setattr__(Fate, _fate.name, _fate)  # as from Python 3.12 on: before, each `Fate.LIVE` calls a function of `enum`


@dataclass(slots=True, eq=False)
class Extent:
    """Facts of an extent, kept by the pool. A policy reads them and never writes. Times are on the clock of `now`, in seconds."""

    id: int
    session_id: str
    num_blocks: int
    """Resident blocks; falls as its deep end is evicted."""
    inserted_seconds: float
    freed_seconds: float
    """When the last request that used it let go."""
    end_block: int = 0
    """Position of its deep end in the chain, in blocks: of two that were freed together the deeper goes first."""
    num_hits: int = 0
    """Requests that found it resident."""
    fate: Fate = Fate.LIVE
    return_class: str = "unknown"
    """Why its session is idle: the class of `admission.returns`."""
    next_use_seconds: float | None = None
    """When it will be asked for, where that is known (a clairvoyant replay); infinity: never. None: not known."""
    priority: int = 35
    """0 to 100, the operator's or the client's; 35 is TensorRT-LLM's default."""
    retention_seconds: float | None = None
    """How long after `freed_seconds` the priority holds. None: always."""
    protected: bool = False
    """On the path of a waiting request: goes only when nothing else is left."""


class ReturnHazard(Protocol):
    """What a policy asks of the return-time model (`admission.returns`)."""

    def hazard(self, return_class: str, idle_seconds: float) -> float:
        """Returns per second of a session idle for so long, counting those of its class that never come back."""
        ...

    def time_to_return(self, return_class: str, idle_seconds: float, horizon_seconds: float) -> float:
        """Mean seconds until it is back, counted as at most `horizon_seconds`."""
        ...

    def returned_share(self, return_class: str, idle_seconds: float) -> float:
        """Share of the class that is back within so long."""
        ...


@dataclass(frozen=True, slots=True)
class Pool:
    """What a policy may know of the pool that it ranks for."""

    capacity_blocks: int
    returns: ReturnHazard | None = None
    """Needed by those policies that predict."""


class EvictionPolicy(Protocol):
    """Ranks the extents that may lose blocks. The pool calls, in this order for each extent:

    `insert` once, when it is free for the first time; `hold` when a request uses it; `release` when the last of them lets go;
    `forget` when its last block has left or it joined another extent. Only a leaf may lose blocks: the pool `hold`s an extent for as
    long as a deeper one hangs on it, so that whatever is not held is a leaf.
    """

    def insert(self, extent: Extent, now: float) -> None:
        """Ranks a new extent. Changes state."""
        ...

    def hold(self, extent: Extent, now: float) -> None:
        """It may not be a victim until `release`. Changes state; what is held already asserts."""
        ...

    def release(self, extent: Extent, now: float) -> None:
        """It may be a victim again; its facts may have changed. Changes state."""
        ...

    def reconsider(self, extent: Extent, now: float) -> None:
        """The facts of an extent that is not held have changed (its fate, a hint). Changes state."""
        ...

    def forget(self, extent: Extent, now: float) -> None:
        """It is no longer resident. Changes state."""
        ...

    def to_evict(self, now: float) -> Extent | None:
        """Whose deepest blocks go next; None when everything is held. Does not change which extents there are."""
        ...

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        ...
