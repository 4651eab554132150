"""The exclusive tier's memory in each of vLLM's workers, and the copies between it and the KV cache.

Copies are made in the order of the steps, before anything of their step is computed: what a block is given next cannot reach it earlier.
A copy that fails is reported, and its block computed again; nothing here raises once the engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from agentserve.engines.plugin.offloading import TierJobs
from agentserve.engines.plugin.supported import PluginUnsupported


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not always there to be type-checked
    """From the scheduler to each worker, with each step."""

    jobs: TierJobs


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """From a worker back to the scheduler."""

    num_loaded_blocks: int = 0
    load_seconds: float = 0.0
    fault: str = ""

    def aggregate(self, other: Any) -> StepReport:
        """Of two ranks, which copy the same blocks: the slower one."""
        return StepReport(self.num_loaded_blocks, max(self.load_seconds, other.load_seconds), self.fault or other.fault)


class TierWorker:
    """One rank's part. `kv_caches`: vLLM's tensors by layer, of `num_blocks` blocks each. Raises PluginUnsupported."""

    def __init__(self, kv_caches: Mapping[str, Any], num_blocks: int, num_slots: int) -> None:
        tensors = {}
        for name, tensor in kv_caches.items():
            if not isinstance(tensor, torch.Tensor):
                raise PluginUnsupported(f"the offload tier does not know how layer {name!r} keeps its KV")
            tensors[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor
        self._parts = [_Part(tensor, num_blocks, num_slots) for tensor in tensors.values()]
        self._broken: set[int] = set()
        """Slots whose last store failed."""
        self._lost: set[int] = set()
        self._report = StepReport()

    def store(self, jobs: TierJobs) -> None:
        """Changes slots."""
        if not jobs.stores:
            return
        blocks, slots = zip(*jobs.stores, strict=True)
        try:
            for part in self._parts:
                part.store(blocks, slots)
            self._broken.difference_update(slots)
        except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
            self._broken.update(slots)
            self._report.fault = f"a store failed: {error!r}"

    def load(self, jobs: TierJobs) -> None:
        """Changes blocks of the KV cache."""
        whole = [(slot, block) for slot, block in jobs.loads if slot >= 0 and slot not in self._broken]
        if len(whole) < len(jobs.loads):
            self._lost |= {block for _, block in jobs.loads} - {block for _, block in whole}
        if not whole:
            return
        begun = monotonic()
        slots, blocks = zip(*whole, strict=True)
        try:
            for part in self._parts:
                part.load(slots, blocks)
        except Exception as error:  # noqa: BLE001 # as above
            self._lost.update(blocks)
            self._report.fault = f"a load failed: {error!r}"
        self._report.num_loaded_blocks += len(whole)
        self._report.load_seconds += monotonic() - begun

    def lost_blocks(self) -> set[int]:
        """Blocks that a load should have filled and did not, since the last call. Changes state."""
        lost, self._lost = self._lost, set()
        return lost

    def report(self) -> StepReport:
        """Of the copies since the last call. Changes state."""
        report, self._report = self._report, StepReport()
        return report


class _Part:
    """The blocks of one tensor, and the memory behind them."""

    def __init__(self, tensor: torch.Tensor, num_blocks: int, num_slots: int) -> None:
        # A block of vLLM's may be several of its kernel's.
        self._dimension = next((at for at in (0, 1) if at < tensor.dim() and tensor.shape[at] and tensor.shape[at] % num_blocks == 0), -1)
        if self._dimension < 0:
            raise PluginUnsupported(f"the offload tier finds no {num_blocks} blocks in a KV cache of shape {tuple(tensor.shape)}")
        self._factor = tensor.shape[self._dimension] // num_blocks
        self._tensor = tensor
        shape = list(tensor.shape)
        shape[self._dimension] = num_slots * self._factor
        self._memory = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def store(self, blocks: tuple[int, ...], slots: tuple[int, ...]) -> None:
        found = self._tensor.index_select(self._dimension, self._places(blocks).to(self._tensor.device))
        self._memory.index_copy_(self._dimension, self._places(slots), found.to(self._memory.device))

    def load(self, slots: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        found = self._memory.index_select(self._dimension, self._places(slots))
        self._tensor.index_copy_(self._dimension, self._places(blocks).to(self._tensor.device), found.to(self._tensor.device))

    def _places(self, numbers: tuple[int, ...]) -> torch.Tensor:
        if self._factor == 1:
            return torch.tensor(numbers)
        return (torch.tensor(numbers)[:, None] * self._factor + torch.arange(self._factor)).flatten()
