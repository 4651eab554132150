"""The exclusive tier under vLLM's own scheduler and block pool: whatever is evicted, loaded or lost, each block has what it should have."""

from __future__ import annotations

import importlib
import importlib.util
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from admission.eviction.policy import Fate
from agentserve.engines.plugin import control
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.engines.plugin.wire import SessionHint
from tests.test_plugin_vllm import BLOCK_SIZE, EVICTING, PLAIN, _some_hint, _some_turn, ordering, replayed, transfer, workload

if TYPE_CHECKING:
    from benchmarks.vllm_scheduler import VllmReplay

pytestmark = pytest.mark.engine

PAGE_BYTES = 2 * BLOCK_SIZE * 64 * 4
"""Of a block of the scheduler's one layer."""
PREEMPTING: dict[str, Any] = {"num_sessions": 9, "seed": 4, "output_factor": 60, "mean_gap_steps": 20.0}


class Workers:
    """The worker's copies, for a model whose KV of a block is a number made of the block's hash: what a step attends to is checked."""

    def __init__(self, replay: VllmReplay, num_slots: int) -> None:
        torch = importlib.import_module("torch")
        side = importlib.import_module("agentserve.engines.plugin.tier_worker")
        num_blocks = replay.options.num_blocks + 1
        self.cache = torch.zeros((2, 2 * num_blocks, 3), dtype=torch.int64)  # two of the kernel's blocks in one of vLLM's
        self.tiers = side.TierWorker({"layer": self.cache, "same": self.cache}, num_blocks, num_slots)
        self.num_checked = 0
        self._scheduler = replay.scheduler
        self._output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
        replay.work = self.step

    def step(self, output: Any) -> Any:
        jobs = output.kv_connector_metadata.jobs
        self.tiers.store(jobs)
        self.tiers.load(jobs)
        lost = self.tiers.lost_blocks()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            blocks = self._scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            after = request.num_computed_tokens  # the scheduler counts what it has scheduled
            before = (after - num_tokens) // BLOCK_SIZE
            if not lost & set(blocks[:before]):
                for block, key in zip(blocks[:before], request.block_hashes, strict=False):
                    assert self.cache[1, 2 * block + 1, 2] == _kv(key), "KV of something else"
                    self.num_checked += 1
            for at in range(before, after // BLOCK_SIZE):
                self.cache[:, 2 * blocks[at] : 2 * blocks[at] + 2] = _kv(request.block_hashes[at])
        report = self.tiers.report()
        report.load_seconds = 0.0  # else this model, which computes nothing, would be quicker
        return self._output(invalid_block_ids=lost, kv_connector_worker_meta=report)


def _kv(key: bytes) -> int:
    return int.from_bytes(key[:7], "big")


def make(
    vllm_side: ModuleType, folder: Path, num_slots: int, num_blocks: int = PLAIN.num_blocks, **extra: Any
) -> tuple[VllmReplay, Workers]:
    options = replace(PLAIN, num_blocks=num_blocks)
    config = transfer(tier_bytes=num_slots * PAGE_BYTES, **extra) | {"kv_load_failure_policy": "recompute"}
    replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, folder, config))
    return replay, Workers(replay, num_slots)


@pytest.mark.parametrize(("settings", "policy"), [(EVICTING, "lru"), (PREEMPTING, "class_hazard")], ids=["evicting", "preempting"])
def test_every_block_that_is_attended_to_has_its_own_kv(
    settings: dict[str, Any], policy: str, vllm_side: ModuleType, tmp_path: Path
) -> None:
    rng = random.Random(policy)
    is_preempting = settings is PREEMPTING
    replay, workers = make(vllm_side, tmp_path, 60, policy=policy)

    def hint_and_check(now: int) -> None:
        if now % 100 == 0:
            batch = {"hints": [_some_hint(rng)], "policy": rng.choice((None, None, "lru", policy))}
            assert control.handle(msgspec.json.encode(batch).decode())["status"] == 200
        if now % 23 == 0:
            ordering().check_integrity()

    def carried(request: Any) -> dict[str, Any] | None:
        return _some_turn(rng, request) if is_preempting and request.number % 3 == 0 else None

    replayed(replay, workload(**settings), each_step=hint_and_check, xargs_of=carried)
    state = ordering().state()
    assert state.is_ordering, state.off_because
    assert state.tier_off_because == ""
    assert min(state.num_stored_blocks, state.num_loaded_blocks) > 50
    assert (state.num_dropped_blocks if is_preempting else state.num_displaced_blocks) > 20
    assert state.num_kept_blocks <= 60
    assert workers.num_checked > 1000
    assert not is_preempting or sum(replay.preemptions.values()) > 0


def test_a_tier_adds_its_size_to_the_cache(vllm_side: ModuleType, tmp_path: Path) -> None:
    requests = workload(**EVICTING)

    def hits(num_blocks: int, num_slots: int) -> int:
        if num_slots:
            replay, _ = make(vllm_side, tmp_path, num_slots, num_blocks, policy="lru")
        else:
            options = replace(PLAIN, num_blocks=num_blocks)
            replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, transfer(policy="lru")))
        return sum(replayed(replay, requests).num_hit_tokens.values())

    small, tiered, large = hits(260, 0), hits(260, 100), hits(360, 0)
    assert large - small > 20 * BLOCK_SIZE
    assert tiered - small > 0.9 * (large - small)


@pytest.mark.parametrize("copy", ["store", "load"])
def test_a_copy_that_fails_costs_misses_and_the_tier(
    copy: str, vllm_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = workload(**EVICTING)
    replay, workers = make(vllm_side, tmp_path, 100, policy="lru")

    def broken(*numbers: Any) -> None:
        raise RuntimeError("no more memory")

    def break_it(now: int) -> None:
        if ordering().state().num_loaded_blocks > 20:
            monkeypatch.setattr(workers.tiers.memory, copy, broken)

    replayed(replay, requests, each_step=break_it)
    state = ordering().state()
    assert state.is_ordering, state.off_because
    assert "no more memory" in state.tier_off_because
    assert state.num_kept_blocks == 0
    assert len(replay.finished_at) == len(requests)


def test_a_fault_of_the_order_takes_the_tier_along(vllm_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = workload(**EVICTING)
    replay, _ = make(vllm_side, tmp_path, 60, policy="lru")
    forest = ordering()._retention.forest

    def broken(blocks: Any) -> Any:
        raise ZeroDivisionError("a fault of the plugin")

    replayed(replay, requests, each_step=lambda now: monkeypatch.setattr(forest, "release", broken) if now == 150 else None)
    state = ordering().state()
    assert not state.is_ordering
    assert "a fault of the plugin" in state.tier_off_because


def test_a_tier_that_cannot_be_is_refused_at_start(vllm_side: ModuleType, tmp_path: Path) -> None:
    for config in (transfer(tier_bytes=100 * PAGE_BYTES), transfer(tier_bytes=1) | {"kv_load_failure_policy": "recompute"}):
        with pytest.raises(PluginUnsupported, match=r"recompute|holds no block"):
            vllm_side.make_scheduler(PLAIN, tmp_path, config)


def test_a_load_that_fails_is_computed_again_only_where_vllm_can(vllm_side: ModuleType, tmp_path: Path) -> None:
    config = transfer(tier_bytes=100 * PAGE_BYTES)
    for policy in ("recompute", "fail"):
        is_right = policy == "fail"
        for schedules_ahead in (False, True):
            with nullcontext() if is_right == schedules_ahead else pytest.raises(PluginUnsupported, match="kv_load_failure_policy"):
                made = config | {"kv_load_failure_policy": policy}
                vllm_side.make_scheduler(PLAIN, tmp_path, made, schedules_ahead=schedules_ahead)


def test_an_ended_session_leaves_the_tier_and_an_emptied_cache_empties_it(vllm_side: ModuleType, tmp_path: Path) -> None:
    replay, _ = make(vllm_side, tmp_path, 100, 64, policy="class_hazard")

    def ask(number: int, name: str) -> int:
        tokens = [1000 * (1 + "abcd".index(name)) + at for at in range(30 * BLOCK_SIZE + 5)]
        replay.add(number, tokens, 4, 7, name, {"agentserve": '{"branch_id": ""}'})
        for now in range(1000):
            replay.step(now)
            if number in replay.finished_at:
                return replay.num_hit_tokens[number]
        raise AssertionError("the request never ends")

    for number, name in enumerate("abcd"):
        ask(number, name)
    kept = ordering().state().num_kept_blocks
    assert kept > 50
    ordering()._retention.tell(SessionHint(session_id="b", fate=Fate.ENDED))
    assert ordering().state().num_kept_blocks <= kept - 27
    assert ask(4, "b") < 5 * BLOCK_SIZE
    assert ask(5, "a") == 30 * BLOCK_SIZE
    assert replay.scheduler.reset_prefix_cache()
    assert ask(6, "c") == 0
    ordering().check_integrity()
