"""The exclusive tier under vLLM's own scheduler and block pool: whatever is evicted, loaded or lost, each block has what it should have."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Iterator
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
from prefix_cache.event_names import block_name
from prefix_cache.events import AllBlocksCleared, decode_batch
from prefix_cache.hits import Cause, TurnHits
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.exclusive import ExclusiveOffload
from tests.test_causes import Books
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
        self.load_seconds = 0.0
        """Of a load; else this model, which computes nothing, would be quicker."""
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
        report.load_seconds = self.load_seconds if report.num_loaded_blocks else 0.0
        return self._output(invalid_block_ids=lost, kv_connector_worker_meta=report)


class Heard:
    """Stands where the engine's publisher stands: each batch goes to the mirror at once, over the wire's form."""

    def __init__(self, replay: VllmReplay, mirror: Mirror) -> None:
        self.mirror = mirror
        self.num_resets = 0
        replay.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        replay.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        decoded = decode_batch(msgspec.msgpack.encode(batch))
        self.num_resets += sum(isinstance(event, AllBlocksCleared) for event in decoded.events)
        self.mirror.apply(self.mirror.num_applied_batches, decoded)

    def shutdown(self) -> None:
        pass


def names_kept() -> set[int]:
    """What the tier itself says that it holds."""
    tier = ordering().tier._tier
    return set() if tier is None else {block_name(key) for key in tier._kept}


def names_untold() -> set[int]:
    """What has come or gone since vLLM asked for events last."""
    tier = ordering().tier._tier
    return set() if tier is None else {block_name(key) for key in tier._changed}


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
    mirror = Heard(replay, Mirror(BLOCK_SIZE)).mirror
    followed, most = ExclusiveOffload(mirror), 0

    def hint_and_check(now: int) -> None:
        nonlocal most
        most = max(most, len(followed._kept))
        # What a hint has just dropped is told with the next step that has an output; so is what a step without one has moved.
        assert followed._hashes.keys() ^ names_kept() <= names_untold()
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
    assert followed.num_blocks_unknown == 0
    assert most >= 30


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


class Asking:
    """One turn after the other, each predicted before it and booked behind it."""

    def __init__(self, replay: VllmReplay) -> None:
        self.replay, self.books = replay, Books(follows_tier=True, block_size=BLOCK_SIZE)
        self.heard = Heard(replay, self.books.mirror)
        self._number = 0

    @property
    def followed(self) -> ExclusiveOffload:
        assert isinstance(self.books.books.offload, ExclusiveOffload)
        return self.books.books.offload

    def ask(self, ids: list[int], name: str, xargs: dict[str, Any] | None = None) -> TurnHits:
        number, self._number = self._number, self._number + 1
        begun = self.books.begin(ids)
        self.replay.add(number, ids, 4, 7, name, xargs)
        for now in range(1000):
            self.replay.step(now)
            if number in self.replay.finished_at:
                return self.books.end(ids, begun, self.replay.num_hit_tokens[number])
        raise AssertionError("the request never ends")


def sessions(rng: random.Random, num_turns: int) -> Iterator[tuple[str, list[int]]]:
    """Turns of 12 sessions with one head, whose contexts are together larger than the cache."""
    contexts = {str(number): [*range(3 * BLOCK_SIZE)] for number in range(12)}
    for _ in range(num_turns):
        name = rng.choice(list(contexts))
        if len(contexts[name]) > 30 * BLOCK_SIZE:
            del contexts[name][3 * BLOCK_SIZE :]
        num_new = rng.randrange(10, 90) if len(contexts[name]) > 3 * BLOCK_SIZE else 280  # enough for a step that measures computing
        contexts[name] += [rng.randrange(1000) for _ in range(num_new)]
        yield name, list(contexts[name])


def test_each_turn_finds_what_was_predicted_of_the_gpu_and_of_the_tier(vllm_side: ModuleType, tmp_path: Path) -> None:
    replay, _ = make(vllm_side, tmp_path, 40, 60, policy="class_hazard")
    asking = Asking(replay)
    loaded, has_stored = 0, False
    causes: set[Cause] = set()
    for name, ids in sessions(random.Random(7), 150):
        hits = asking.ask(ids, name, {"agentserve": '{"branch_id": ""}'})
        after = ordering().state().num_loaded_blocks
        assert hits.predicted is not None
        assert hits.predicted + (hits.external_predicted or 0) == hits.actual
        assert hits.external_predicted == hits.external == (after - loaded) * BLOCK_SIZE or not has_stored
        assert (hits.external_predicted is None) != has_stored
        has_stored = ordering().state().num_stored_blocks > 0
        assert hits.missed is not None
        causes |= hits.missed.keys()
        loaded = after
    assert loaded > 150
    assert causes == {Cause.NEW, Cause.TAIL, Cause.EVICTED, Cause.OFFLOAD_MISSING}
    assert names_kept() == asking.followed._hashes.keys()


def test_a_tier_that_is_slower_than_computing_is_not_expected_to_load(vllm_side: ModuleType, tmp_path: Path) -> None:
    replay, workers = make(vllm_side, tmp_path, 900, 60, policy="class_hazard")
    asking = Asking(replay)
    workers.load_seconds = 10.0
    wrong = num_declined = 0
    for name, ids in sessions(random.Random(7), 150):
        hits = asking.ask(ids, name)
        assert hits.predicted is not None
        assert hits.missed is not None
        wrong += hits.predicted + (hits.external_predicted or 0) != hits.actual
        num_declined += Cause.OFFLOAD_DECLINED in hits.missed
        assert not hits.missed.keys() & {Cause.UNKNOWN, Cause.EVICTED, Cause.OFFLOAD_MISSING}
    state = ordering().state()
    assert num_declined == state.num_declined_loads - state.num_declined_loads // 16
    assert num_declined > 60
    assert wrong <= 2 + state.num_declined_loads // 16


@pytest.mark.parametrize("copy", ["store", "load"])
def test_a_copy_that_fails_costs_misses_and_the_tier(
    copy: str, vllm_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = workload(**EVICTING)
    replay, workers = make(vllm_side, tmp_path, 100, policy="lru")
    followed = ExclusiveOffload(Heard(replay, Mirror(BLOCK_SIZE)).mirror)

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
    assert followed.num_resident_tokens == 0


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
    asking = Asking(replay)
    followed = asking.followed

    def ask(name: str) -> int:
        tokens = [1000 * (1 + "abcd".index(name)) + at for at in range(30 * BLOCK_SIZE + 5)]
        return asking.ask(tokens, name, {"agentserve": '{"branch_id": ""}'}).actual or 0

    for name in "abcd":
        ask(name)
    kept = ordering().state().num_kept_blocks
    assert kept > 50
    assert followed.num_resident_tokens == kept * BLOCK_SIZE
    ordering()._retention.tell(SessionHint(session_id="b", fate=Fate.PRESUMED))
    assert ordering().state().num_kept_blocks == kept, "what is over only because it is silent may have room to spare"
    ordering()._retention.tell(SessionHint(session_id="b", fate=Fate.ENDED))
    assert ordering().state().num_kept_blocks <= kept - 27
    assert ask("b") < 5 * BLOCK_SIZE
    assert ask("a") == 30 * BLOCK_SIZE
    assert followed.num_resident_tokens == ordering().state().num_kept_blocks * BLOCK_SIZE
    assert replay.scheduler.reset_prefix_cache()
    assert ask("c") == 0
    assert asking.heard.num_resets == 1
    assert followed.num_resident_tokens == ordering().state().num_kept_blocks * BLOCK_SIZE == 0
    ordering().check_integrity()


def test_a_request_that_waited_through_a_reset_gets_nothing_from_before_it(vllm_side: ModuleType, tmp_path: Path) -> None:
    replay, _ = make(vllm_side, tmp_path, 100, 64, policy="class_hazard")
    asking = Asking(replay)
    prompts = {name: [1000 * number + at for at in range(30 * BLOCK_SIZE + 5)] for number, name in enumerate("abcd")}
    for name, ids in prompts.items():
        asking.ask(ids, name)
    assert ordering().state().num_kept_blocks > 50
    replay.add(4, prompts["a"], 4, 7, "a")
    assert replay.scheduler.reset_prefix_cache()
    for now in range(100):
        replay.step(now)
    assert replay.num_hit_tokens[4] == 0
    assert (ordering().state().num_kept_blocks, ordering().state().tier_off_because) == (0, "")
