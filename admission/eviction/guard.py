"""Around every policy: the contract's order of calls is asserted, and what lies on the path of a waiting request goes last."""

from __future__ import annotations

from admission.eviction.policy import EvictionPolicy, Extent
from admission.eviction.ranking import Ranking, by_depth


class Guard:
    """Policies behind it see neither a wrong order of calls nor a protected extent: such a one is held for them until it is no longer."""

    __slots__ = ("_free", "_held", "_policy", "_shielded")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._free: set[int] = set()
        self._held: set[int] = set()
        self._shielded = Ranking()

    def insert(self, extent: Extent, now: float) -> None:
        known = extent.id in self._free or extent.id in self._held
        assert not known, f"extent {extent.id!r} was inserted before"
        self._free.add(extent.id)
        self._policy.insert(extent, now)
        if extent.protected:
            self._shield(extent, now)

    def hold(self, extent: Extent, now: float) -> None:
        self._free.remove(extent.id)
        self._held.add(extent.id)
        if extent in self._shielded:
            self._shielded.discard(extent)
        else:
            self._policy.hold(extent, now)

    def release(self, extent: Extent, now: float) -> None:
        self._held.remove(extent.id)
        self._free.add(extent.id)
        self._policy.release(extent, now)
        if extent.protected:
            self._shield(extent, now)

    def reconsider(self, extent: Extent, now: float) -> None:
        assert extent.id in self._free, f"extent {extent.id!r} is not free"
        if extent in self._shielded:
            self._shielded.discard(extent)
            self._policy.release(extent, now)
        else:
            self._policy.reconsider(extent, now)
        if extent.protected:
            self._shield(extent, now)

    def forget(self, extent: Extent, now: float) -> None:
        known = extent.id in self._free or extent.id in self._held
        assert known, f"extent {extent.id!r} is not known"
        self._free.discard(extent.id)
        self._held.discard(extent.id)
        self._shielded.discard(extent)
        self._policy.forget(extent, now)

    def to_evict(self, now: float) -> Extent | None:
        return self._policy.to_evict(now) or self._shielded.first()

    def check_integrity(self) -> None:
        assert not self._free & self._held
        assert len(self._shielded) <= len(self._free)
        self._shielded.check_integrity()
        self._policy.check_integrity()

    def _shield(self, extent: Extent, now: float) -> None:
        self._policy.hold(extent, now)
        self._shielded.put(extent, by_depth(extent, extent.freed_seconds))
