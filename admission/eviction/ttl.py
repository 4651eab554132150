"""ttl: an idle session is kept for as long as that is expected to pay, then lru (Continuum, arXiv 2511.02230).

After a turn of class f with c tokens of context, keeping it for t seconds pays P_f(back within t) · B − t, with B what a miss costs:
the queue that a returning turn would stand in and the prefill of c. Of the times on a grid the best is taken. Unlike Continuum's pin
this is a rank: when all sessions are within their time, the one let go longest ago leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Fate, Knob, Pool, ReturnHazard
from admission.eviction.ranking import Rank, RankedPolicy

_GRID_SECONDS = tuple(0.25 * 2 ** (step / 2) for step in range(28))
_ASKED_BEFORE_REFRESH = 256


@dataclass(frozen=True, slots=True)
class TtlParameters:
    queue_seconds: Annotated[float, Knob(0, 300, "wait of a turn whose session was evicted, beyond its prefill")] = 5.0
    seconds_per_block: Annotated[float, Knob(1e-5, 1, "prefill of one block, or its reload from a tier", log=True)] = 0.01


def ttl(parameters: TtlParameters, pool: Pool) -> EvictionPolicy:
    assert pool.returns is not None
    times = _KeepingTimes(parameters, pool.returns)

    def expiry(extent: Extent) -> float:
        return extent.freed_seconds + times.of(extent)

    def rank(extent: Extent, now: float) -> Rank:
        return (extent.fate is Fate.LIVE, now < expiry(extent), extent.freed_seconds)

    return RankedPolicy(rank, expiry)


class _KeepingTimes:
    """Keeping times by class and size (in powers of two), computed anew now and then because the model learns."""

    __slots__ = ("_known", "_num_asked", "_parameters", "_returns")

    def __init__(self, parameters: TtlParameters, returns: ReturnHazard) -> None:
        self._parameters = parameters
        self._returns = returns
        self._known: dict[tuple[str, int], float] = {}
        self._num_asked = 0

    def of(self, extent: Extent) -> float:
        self._num_asked += 1
        if self._num_asked % _ASKED_BEFORE_REFRESH == 0:
            self._known.clear()
        key = (extent.return_class, extent.end_block.bit_length())
        if key not in self._known:
            miss_seconds = self._parameters.queue_seconds + (1 << key[1]) * self._parameters.seconds_per_block
            self._known[key] = self._best(extent.return_class, miss_seconds)
        return self._known[key]

    def _best(self, return_class: str, miss_seconds: float) -> float:
        gains = [(self._returns.returned_share(return_class, keep) * miss_seconds - keep, keep) for keep in _GRID_SECONDS]
        return max(max(gains), (0.0, 0.0))[1]
