"""The exclusive tier's memory in each of vLLM's workers, and the copies between it and the KV cache.

Copies are made in the order of the steps, before anything of their step is computed: what a block is given next cannot reach it earlier.
A copy that fails is reported; nothing here raises once the engine runs. What copies take is asked for when the step is on its way, so that
waiting for them costs the device nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from agentserve.engines.plugin.offloading import TierJobs
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.engines.plugin.tier_copies import HostMemory, Seconds


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not always there to be type-checked
    """From the scheduler to each worker, with each step."""

    jobs: TierJobs


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """From a worker back to the scheduler."""

    step: int = 0
    num_loaded_blocks: int = 0
    load_seconds: float = 0.0
    num_stored_blocks: int = 0
    store_seconds: float = 0.0
    fault: str = ""

    def aggregate(self, other: Any) -> StepReport:
        """Of two ranks, which copy the same blocks: what both have, and the slower one."""
        return StepReport(
            self.step,
            min(self.num_loaded_blocks, other.num_loaded_blocks),
            max(self.load_seconds, other.load_seconds),
            min(self.num_stored_blocks, other.num_stored_blocks),
            max(self.store_seconds, other.store_seconds),
            self.fault or other.fault,
        )


class TierWorker:
    """One rank's part. `kv_caches`: vLLM's tensors by layer, of `num_blocks` blocks each. Raises PluginUnsupported."""

    def __init__(self, kv_caches: Mapping[str, Any], num_blocks: int, num_slots: int) -> None:
        tensors = {}
        for name, tensor in kv_caches.items():
            if not isinstance(tensor, torch.Tensor):
                raise PluginUnsupported(f"the offload tier does not know how layer {name!r} keeps its KV")
            tensors[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor
        self.memory = HostMemory(list(tensors.values()), num_blocks, num_slots)
        self._broken: set[int] = set()
        """Slots whose last store failed."""
        self._lost: set[int] = set()
        self._report = StepReport()
        self._store_seconds: list[Seconds] = []
        self._load_seconds: list[Seconds] = []

    def store(self, jobs: TierJobs) -> None:
        """Changes slots."""
        if not jobs.stores:
            return
        blocks, slots = zip(*jobs.stores, strict=True)
        try:
            self._store_seconds.append(self.memory.store(blocks, slots))
        except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
            self._broken.update(slots)
            self._report.fault = f"a store failed: {error!r}"
            return
        self._broken.difference_update(slots)
        self._report.num_stored_blocks += len(blocks)

    def load(self, jobs: TierJobs) -> None:
        """Changes blocks of the KV cache."""
        self._report.step = jobs.step
        whole = [(slot, block) for slot, block in jobs.loads if slot >= 0 and slot not in self._broken]
        if len(whole) < len(jobs.loads):
            self._lost |= {block for _, block in jobs.loads} - {block for _, block in whole}
        if not whole:
            return
        slots, blocks = zip(*whole, strict=True)
        try:
            self._load_seconds.append(self.memory.load(slots, blocks))
        except Exception as error:  # noqa: BLE001 # as above
            self._lost.update(blocks)
            self._report.fault = f"a load failed: {error!r}"
            return
        self._report.num_loaded_blocks += len(whole)

    def lost_blocks(self) -> set[int]:
        """Blocks that a load should have filled and did not, since the last call. Changes state."""
        lost, self._lost = self._lost, set()
        return lost

    def report(self) -> StepReport:
        """Of the copies since the last call, for which it waits. Changes state."""
        report, self._report = self._report, StepReport()
        try:
            report.store_seconds = sum(seconds() for seconds in self._store_seconds)
            report.load_seconds = sum(seconds() for seconds in self._load_seconds)
        except Exception as error:  # noqa: BLE001 # as above
            report.fault = f"a copy failed: {error!r}"
        self._store_seconds.clear()
        self._load_seconds.clear()
        return report
