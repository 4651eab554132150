"""Ranks that hold different prefixes: the hit is the least, nothing breaks, and how often it happens is counted over all lives."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from agentserve.engines.lmcache_counts import RankCounts
from agentserve.engines.lmcache_ranks import CountingPolicy, build_server_modules
from prefix_cache.tiers.ranks import RankLookups

CHUNK = 256
needs_lmcache = pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed: make offload")


@pytest.mark.case("KVM-10")
@pytest.mark.parametrize(
    ("found", "hit", "differs", "given_up"),
    [
        ([8704, 8448, 8704, 0], 0, True, 8704),
        ([8704, 8704, 8704, 8704], 8704, False, 0),
        ([512, 256], 256, True, 256),
        ([0, 0], 0, False, 0),
        ([4096], 4096, False, 0),
        ([], 0, False, 0),
    ],
)
def test_the_hit_of_a_lookup_is_the_least_of_its_ranks(found: list[int], hit: int, differs: bool, given_up: int) -> None:
    lookups = RankLookups()
    assert lookups.settle(found) == hit
    assert (lookups.num_lookups, lookups.num_differing, lookups.num_given_up_tokens) == (1, differs, given_up)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), max_size=20))
def test_counts_add_up_over_lookups(all_found: list[list[int]]) -> None:
    lookups = RankLookups()
    hits = [lookups.settle(found) for found in all_found]
    assert hits == [min(found) for found in all_found]
    assert lookups.num_lookups == len(all_found)
    assert lookups.num_differing == sum(len(set(found)) > 1 for found in all_found)
    assert lookups.num_given_up_tokens == sum(map(max, all_found)) - sum(hits)


@pytest.fixture(scope="module")
def lmcache() -> Iterator[SimpleNamespace]:
    """What LMCache's lookup is made of, with warnings of its own that are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controllers = "lmcache.v1.distributed.storage_controllers"
        utils, policy = importlib.import_module(f"{controllers}.utils"), importlib.import_module(f"{controllers}.prefetch_policy")
        native = importlib.import_module("lmcache.lmcache_native")
        yield SimpleNamespace(
            Bitmap=native.Bitmap, Bitmap2D=utils.Bitmap2D, MapState=utils.MapState, DefaultPrefetchPolicy=policy.DefaultPrefetchPolicy
        )


def state(lmcache: SimpleNamespace, rows: Sequence[str]) -> Any:
    """What one store holds: a row for each key group, an x for each chunk that is there."""
    bitmaps = []
    for row in rows:
        bitmap = lmcache.Bitmap(len(row))
        for chunk, mark in enumerate(row):
            if mark == "x":
                bitmap.set(chunk)
        bitmaps.append(bitmap)
    found = lmcache.MapState()
    if rows:
        found[0] = lmcache.Bitmap2D(bitmaps)
    return found


def groups(num_chunks: int, windows: Sequence[int], num_ranks: int) -> list[Any]:
    """The key groups of a lookup: each object group, with its window, on each rank."""
    return [
        SimpleNamespace(
            keys=[SimpleNamespace(kv_rank=rank)] * num_chunks, object_group_id=number, layout_desc=None, sliding_window_size=window
        )
        for number, window in enumerate(windows)
        for rank in range(num_ranks)
    ]


@needs_lmcache
@pytest.mark.case("KVM-10")
@pytest.mark.parametrize(
    ("memory", "second", "windows", "hit", "counted"),
    [
        (["xxxx", "xxxx"], [], [-1], 4, (1, 0, 0)),
        (["xxxx", "xx.x"], [], [-1], 2, (1, 1, 2 * CHUNK)),
        (["xxxx", ".xxx"], [], [-1], 0, (1, 1, 4 * CHUNK)),
        (["xx..", "xx.."], ["..xx", "..xx"], [-1], 4, (1, 0, 0)),
        (["xx..", "xx.."], ["..xx", "...."], [-1], 2, (1, 1, 2 * CHUNK)),
        (["xx..", "xxx.", "x...", "xxxx"], [], [-1], 1, (1, 1, 3 * CHUNK)),
        ([], [], [-1], 0, (1, 0, 0)),
        (["xxxx", "xxxx", "..xx", "...x"], [], [-1, 1], 4, (1, 0, 0)),
    ],
)
def test_lmcaches_policy_decides_as_before_and_what_ranks_differ_in_is_counted(
    lmcache: SimpleNamespace, memory: list[str], second: list[str], windows: list[int], hit: int, counted: tuple[int, int, int]
) -> None:
    registry, inner = CollectorRegistry(), lmcache.DefaultPrefetchPolicy()
    policy = CountingPolicy(inner, CHUNK, registry)
    num_ranks = max(2, len(memory) // len(windows))
    asked = {
        "key_groups": groups(4, windows, num_ranks),
        "l1_locked_keys": state(lmcache, memory),
        "l2_locked_keys": state(lmcache, second),
        "l1_manager_descs": {0: None},
        "l2_adapter_descs": {0: None},
        "fetching_policy": "prefix",
    }
    plans = [each.plan_load(**asked) for each in (inner, policy, policy)]  # the last: planned again, the same lookup
    assert len({repr(cells(plan)) for plan in plans}) == 1
    assert 1 + max((chunk for row in cells(plans[0])[: num_ranks * windows.count(-1)] for chunk in row), default=-1) == hit
    found = policy.lookups
    assert (found.num_lookups, found.num_differing, found.num_given_up_tokens) == counted
    counts = RankCounts("http://nobody")
    counts.take(generate_latest(registry))
    assert counts.lookups == found


def cells(plan: Any) -> list[list[int]]:
    """Chunks that are used, for each key group, from wherever."""
    grids = [grid.to_list() for grid in (plan.l1_planned_keys.merge(), plan.l2_planned_keys.merge()) if len(grid)]
    return [sorted(set().union(*(row.get_indices_set() for row in rows))) for rows in zip(*grids, strict=True)]


def test_a_lookup_goes_on_where_it_cannot_be_counted() -> None:
    policy = CountingPolicy(SimpleNamespace(plan_load=lambda **asked: "plan", name="default"), CHUNK, CollectorRegistry())
    for _ in range(2):
        assert policy.plan_load(key_groups=[object()], l1_locked_keys=None, l2_locked_keys=None) == "plan"
    assert policy.lookups.num_lookups == 0
    assert policy.name == "default"
    assert build_server_modules(SimpleNamespace(server_context=SimpleNamespace(storage_manager=object()))) is None


def test_counts_of_a_server_that_begins_anew_are_added() -> None:
    counts = RankCounts("http://nobody")
    shown = (
        "agentserve_lmcache_lookups_total {}\nagentserve_lmcache_differing_lookups_total {}\nagentserve_lmcache_given_up_tokens_total {}\n"
    )
    for lives in ((5, 1, 256), (9, 2, 512)):
        counts.take(shown.format(*lives).encode())
    counts.restarted()
    counts.take(shown.format(9, 3, 1024).encode())
    counts.take(b"")  # without the module
    assert counts.lookups == RankLookups(18, 5, 1536)
