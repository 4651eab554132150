"""The offload tier's copies, without an engine: blocks of any layout go to host memory and come back, each to its own place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from agentserve.engines.plugin.offloading import TierJobs
from agentserve.engines.plugin.supported import PluginUnsupported

if TYPE_CHECKING:
    from agentserve.engines.plugin.tier_worker import TierWorker

torch = pytest.importorskip("torch")
copies = pytest.importorskip("agentserve.engines.plugin.tier_copies")
worker = pytest.importorskip("agentserve.engines.plugin.tier_worker")
pytestmark = pytest.mark.engine

NUM_BLOCKS, NUM_SLOTS = 7, 5


def numbered(*shape: int) -> Any:
    return torch.randperm(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


LAYOUTS: dict[str, Any] = {
    "blocks first": lambda: numbered(NUM_BLOCKS, 4, 3),
    "blocks first, heads and tokens turned": lambda: numbered(NUM_BLOCKS, 4, 3, 2).transpose(1, 2),
    "keys before values": lambda: numbered(2, NUM_BLOCKS, 4, 3),
    "two of the kernel's in one": lambda: numbered(2 * NUM_BLOCKS, 4, 3),
    "two of the kernel's in one, keys before values": lambda: numbered(2, 2 * NUM_BLOCKS, 3),
    "two layers in one tensor": lambda: numbered(NUM_BLOCKS, 2, 4, 3)[:, 1],
    "two of the kernel's in one, two layers in one tensor": lambda: numbered(2 * NUM_BLOCKS, 2, 4, 3)[:, 0],
}


def block(tensor: Any, number: int) -> Any:
    """A copy of what a block holds."""
    at = 0 if tensor.shape[0] % NUM_BLOCKS == 0 else 1
    factor = tensor.shape[at] // NUM_BLOCKS
    return tensor.narrow(at, number * factor, factor).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_any_layout_come_back_and_no_other_changes(layout: str) -> None:
    torch.manual_seed(0)
    caches = {"one": LAYOUTS[layout](), "other": numbered(NUM_BLOCKS, 6)}
    tier = worker.TierWorker(caches | {"the same": caches["one"]}, NUM_BLOCKS, NUM_SLOTS)
    assert tier.memory.block_bytes == 4 * sum(cache.numel() // NUM_BLOCKS for cache in caches.values())
    stored = {name: [block(cache, number) for number in (6, 0, 3)] for name, cache in caches.items()}
    tier.store(TierJobs(1, stores=((6, 4), (0, 0), (3, 2))))
    for cache in caches.values():
        cache.copy_(-cache)
    others = {name: {number: block(cache, number) for number in (0, 1, 2, 6)} for name, cache in caches.items()}
    tier.load(TierJobs(1, loads=((2, 5), (4, 3), (0, 4))))
    for name, cache in caches.items():
        assert [torch.equal(block(cache, to), kept) for to, kept in zip((3, 4, 5), stored[name], strict=True)] == [True] * 3
        assert all(torch.equal(block(cache, number), before) for number, before in others[name].items())
    report = tier.report()
    assert (report.step, report.num_stored_blocks, report.num_loaded_blocks, report.fault) == (1, 3, 3, "")
    assert min(report.store_seconds, report.load_seconds) > 0
    assert tier.report() == worker.StepReport()


def test_a_cache_without_whole_blocks_is_refused() -> None:
    with pytest.raises(PluginUnsupported, match="no whole blocks"):
        copies.pieces_of(numbered(NUM_BLOCKS, 4, 6)[:, :, ::2], NUM_BLOCKS)
    with pytest.raises(PluginUnsupported, match=f"no {NUM_BLOCKS} blocks"):
        copies.pieces_of(numbered(3, 4), NUM_BLOCKS)


def ranks(count: int) -> list[TierWorker]:
    return [worker.TierWorker({"layer": numbered(NUM_BLOCKS, 6)}, NUM_BLOCKS, NUM_SLOTS) for _ in range(count)]


def reported(tiers: list[TierWorker]) -> tuple[Any, set[int]]:
    """What vLLM makes of the ranks' reports of a step."""
    outputs = pytest.importorskip("vllm.v1.outputs")
    utils = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils")
    each = []
    for tier in tiers:
        told = outputs.KVConnectorOutput(invalid_block_ids=tier.lost_blocks(), kv_connector_worker_meta=tier.report())
        each.append(outputs.ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told))
    told = utils.KVOutputAggregator(len(tiers)).aggregate(each).kv_connector_output
    return told.kv_connector_worker_meta, told.invalid_block_ids


@pytest.mark.parametrize("failing", range(3))
def test_what_one_rank_has_not_no_rank_has(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = ranks(3)

    def broken(*numbers: Any) -> Any:
        raise RuntimeError("no more memory")

    for tier in tiers:
        tier.store(TierJobs(1, stores=((6, 4),)))
    report, lost = reported(tiers)
    assert (report.num_stored_blocks, lost) == (1, set())
    with monkeypatch.context() as patch:
        patch.setattr(tiers[failing].memory, "store", broken)
        for tier in tiers:
            tier.store(TierJobs(2, stores=((5, 3), (4, 4))))
            tier.load(TierJobs(2))
    report, lost = reported(tiers)
    assert (report.step, report.num_stored_blocks, lost) == (2, 0, set())
    assert "no more memory" in report.fault
    for tier in tiers:
        tier.store(TierJobs(3, stores=((1, 3),)))
        tier.load(TierJobs(3, loads=((3, 0), (4, 2))))
    report, lost = reported(tiers)
    assert (report.num_stored_blocks, report.num_loaded_blocks, lost) == (1, 1, {2})


def test_the_slowest_rank_is_what_a_copy_takes() -> None:
    rng = random.Random(0)
    times = [(rng.random(), rng.random()) for _ in range(4)]
    reports = [worker.StepReport(3, 5, load, 7, store) for load, store in times]
    total = reports[0]
    for report in reports[1:]:
        total = total.aggregate(report)
    assert total == worker.StepReport(3, 5, max(load for load, _ in times), 7, max(store for _, store in times))
