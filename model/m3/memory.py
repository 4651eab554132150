"""How a rank's memory is shared out: weights, KV cache, and the rest; and so how many tokens the KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from model.m3.dtypes import Dtype
from model.m3.kv import CacheGeometry
from model.m3.shapes import local_shapes
from model.m3.sharding import Shard

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Formats of the weights: experts are quantised, the rest may be. The router stays fp32, embedding and output head bf16."""

    experts: Dtype = Dtype.MXFP4
    linear: Dtype = Dtype.BF16


def weight_bytes(shard: Shard, weights: WeightFormat) -> int:
    """Of one rank, without norms (under 1 MB) and drafts."""
    total = Dtype.BF16.bytes_of(shard.vocab_size * shard.config.hidden_size)  # embedding
    for shape in local_shapes(shard):
        total += _format(shape.name, weights).bytes_of(shape.num_parameters)
    return total


def _format(name: str, weights: WeightFormat) -> Dtype:
    if name.startswith(("expert", "shared expert")):
        return weights.experts
    return {"router": Dtype.FP32, "output head": Dtype.BF16}.get(name, weights.linear)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's budget in bytes. `other_bytes`: activations, graphs, communication buffers, drafts; measured by the engine at start."""

    budget_bytes: int
    weight_bytes: int
    other_bytes: int
    geometry: CacheGeometry

    @property
    def kv_bytes(self) -> int:
        return self.budget_bytes - self.weight_bytes - self.other_bytes

    @property
    def capacity_tokens(self) -> int:
        return self.geometry.capacity_tokens(self.kv_bytes)


def plan_memory(
    geometry: CacheGeometry, weights: WeightFormat, *, device_bytes: int, utilization: float, other_bytes: int = 0
) -> MemoryPlan:
    """Share out `utilization` (0 to 1) of a device. Raises ValueError where the weights alone do not fit."""
    if not 0 < utilization <= 1:
        raise ValueError(f"memory utilization {utilization}: more than 0 and at most 1 is needed")
    plan = MemoryPlan(int(device_bytes * utilization), weight_bytes(geometry.shard, weights), other_bytes, geometry)
    if plan.kv_bytes < geometry.bytes_per_block:
        needed = (plan.weight_bytes + other_bytes) / GIB
        raise ValueError(f"weights and the rest need {needed:.1f} GiB of {plan.budget_bytes / GIB:.1f} GiB: no room for a KV cache")
    return plan


def implied_other_bytes(geometry: CacheGeometry, weights: WeightFormat, *, device_bytes: int, utilization: float, tokens: int) -> int:
    """What a known capacity of `tokens` leaves for everything but weights and KV; negative: these formats cannot hold that many."""
    kv_bytes = -(-tokens // geometry.shard.config.block_size) * geometry.bytes_per_block
    return int(device_bytes * utilization) - weight_bytes(geometry.shard, weights) - kv_bytes
