"""Runs inside an LMCache server: counts the lookups in which the tensor-parallel ranks of an engine do not hold the same.

    lmcache server … --server-module '{"module_path": "agentserve.engines.lmcache_ranks"}'

LMCache takes the least over ranks and says nothing of what it gave up. It asks its prefetch policy once a lookup, with what each rank
holds in memory and in the second level (LMCache 0.5.6, v1/distributed/storage_controllers/prefetch_policy.py); the policy is wrapped here,
and decides as before. The counts stand on the server's own `/metrics`, which `agentserve` reads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from prefix_cache.tiers.ranks import RankLookups

MODULE: Final = __name__
PREFIX: Final = "agentserve_lmcache_"
COUNTERS: Final[Mapping[str, str]] = {
    "lookups": "Lookups of prompts",
    "differing_lookups": "Lookups in which ranks held different prefixes",
    "given_up_tokens": "Tokens that the best rank of a lookup held beyond the least",
}
"""On LMCache's /metrics, below `PREFIX` and with `_total` behind them."""


_log = structlog.get_logger(__name__)


class CountingPolicy:
    """LMCache's prefetch policy `inner`, with a count of what ranks hold before it plans. A fault of the count is logged once."""

    def __init__(self, inner: Any, chunk_tokens: int, registry: CollectorRegistry = REGISTRY) -> None:
        self.lookups = RankLookups()
        self._inner = inner
        self._chunk_tokens = chunk_tokens
        self._lock = threading.Lock()  # without a second level each worker of the server plans for itself
        self._counters = {name: Counter(PREFIX + name, about, registry=registry) for name, about in COUNTERS.items()}
        self._is_on = True
        self._planned: Sequence[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan_load(self, *, key_groups: Sequence[Any], l1_locked_keys: Any, l2_locked_keys: Any, **others: Any) -> Any:
        """As LMCache's PrefetchPolicy.plan_load."""
        if self._is_on and key_groups is not self._planned:  # it plans again where memory could not be had
            self._planned = key_groups
            try:
                self._count(held_by_rank(key_groups, l1_locked_keys, l2_locked_keys))
            except (AttributeError, IndexError, TypeError, ValueError) as error:  # another LMCache: a lookup matters more than its count
                self._is_on = False
                _log.error("lookups are not counted any more", reason=str(error))
        return self._inner.plan_load(key_groups=key_groups, l1_locked_keys=l1_locked_keys, l2_locked_keys=l2_locked_keys, **others)

    def _count(self, num_chunks: Sequence[int]) -> None:
        if not num_chunks:
            return
        with self._lock:
            before = (self.lookups.num_lookups, self.lookups.num_differing, self.lookups.num_given_up_tokens)
            self.lookups.settle([chunks * self._chunk_tokens for chunks in num_chunks])
            after = (self.lookups.num_lookups, self.lookups.num_differing, self.lookups.num_given_up_tokens)
        for counter, old, new in zip(self._counters.values(), before, after, strict=True):
            counter.inc(new - old)


def held_by_rank(key_groups: Sequence[Any], *tiers: Any) -> list[int]:
    """Leading chunks of the prompt that each rank holds in any of the tiers; empty where nothing was asked.

    A key group is one object group on one rank. Those with a sliding window hold a part of the prompt only, and say nothing here.
    """
    grids = [grid.to_list() for tier in tiers if len(grid := tier.merge()) > 0]
    ranks: dict[int, int] = {}
    for row, group in enumerate(key_groups):
        if not group.keys or group.sliding_window_size != -1:
            continue
        held: set[int] = set()
        for grid in grids:
            held |= grid[row].get_indices_set()
        leading = next((chunk for chunk in range(len(group.keys)) if chunk not in held), len(group.keys))
        rank = group.keys[0].kv_rank
        ranks[rank] = min(leading, ranks.get(rank, leading))
    return list(ranks.values())


class RankModule:
    """What LMCache asks of a server module (v1/multiprocess/engine_module.py). `context`: the server's own."""

    def __init__(self, context: Any, policy: CountingPolicy) -> None:
        self.context = context
        self._policy = policy

    def report_status(self) -> dict[str, Any]:
        """For the server's GET /status."""
        lookups = self._policy.lookups
        return {"agentserve_ranks": {"lookups": lookups.num_lookups, "differing_lookups": lookups.num_differing}}

    def close(self) -> None:
        """Nothing is held."""


def build_server_modules(build: Any) -> RankModule | None:
    """Called by LMCache at its start. None where its lookup is built otherwise than in the version above: nothing is counted then."""
    try:
        controller = build.server_context.storage_manager._prefetch_controller  # LMCache hands modules nothing nearer
        policy = CountingPolicy(controller._policy, build.server_context.chunk_size)
    except AttributeError as error:
        _log.error("lookups are not counted", reason=str(error))
        return None
    controller._policy = policy
    return RankModule(build.server_context, policy)
