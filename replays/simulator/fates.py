"""What becomes of blocks: what the workload knows for sure, and what of it the policy is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from admission.eviction.policy import Fate
from replays.simulator.chains import Branch

_ALL = 1 << 60


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a policy is told. A server knows cut tails and generated tokens that never come back; ends where they are said, or inferred."""

    ends: bool = False
    inferred: bool = False
    """Who is believed to be over counts as ended."""
    cuts: bool = True
    generated: bool = True

    def told(self, fate: Fate, is_left: bool) -> Fate:
        if self.inferred and is_left and fate in (Fate.LIVE, Fate.ENDED):
            return Fate.PRESUMED
        known = {Fate.ENDED: self.ends, Fate.CUT: self.cuts, Fate.SUPERSEDED: self.cuts, Fate.GENERATED: self.generated}
        return fate if known.get(fate, True) else Fate.LIVE


class Fates:
    """The prospects of every branch, from the claims that live streams have on it; `uses` says when it is asked for, if that is wanted.

    `is_left`: whether all who claim it, or did so last, are believed to be over.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        uses: Callable[[Branch, float], Iterator[tuple[float, int]]] | None = None,
        is_left: Callable[[Branch], bool] = lambda branch: False,
    ) -> None:
        self._knowledge = knowledge
        self._is_left = is_left
        self._uses = uses

    def outlook(self, branch: Branch, now: float) -> Sequence[tuple[int, Fate, Fate, float | None]]:
        fates, is_left = self._fates(branch), self._is_left(branch)
        if self._uses is None:
            return [(depth, fate, self._knowledge.told(fate, is_left), None) for depth, fate in fates]
        outlook: list[tuple[int, Fate, Fate, float | None]] = []
        stairs = _stairs(self._uses(branch, now))
        depths = sorted({depth for depth, _ in fates} | {depth for depth, _ in stairs})
        for depth in depths:
            fate = next(fate for end, fate in fates if depth <= end)
            time = next(time for end, time in stairs if depth <= end)
            outlook.append((depth, fate, self._knowledge.told(fate, is_left), time))
        return outlook

    @staticmethod
    def _fates(branch: Branch) -> list[tuple[int, Fate]]:
        if branch.generated:
            return [(_ALL, Fate.GENERATED)]
        live_to = branch.live_to
        if live_to <= branch.start:
            return [(_ALL, Fate.ENDED if branch.ended else Fate.SUPERSEDED)]
        return [(live_to, Fate.LIVE), (_ALL, Fate.CUT)]


def _stairs(uses: Iterator[tuple[float, int]]) -> list[tuple[int, float]]:
    """(up to this depth, next use) with depths ascending, from uses (time, depth) by time."""
    stairs: list[tuple[int, float]] = []
    for time, depth in uses:
        if not stairs or depth > stairs[-1][0]:
            stairs.append((depth, time))
    stairs.append((_ALL, math.inf))
    return stairs
