"""What can be checked of M3 without an engine: shapes and capacity as published, shortcuts beside plain forms, planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.m3.config import MINIMAX_M3, M3Config
from model.m3.dtypes import Dtype
from model.m3.index_reuse import fixed_plan, measured_plan
from model.m3.kv import CacheGeometry
from model.m3.memory import GIB, WeightFormat, plan_memory
from model.m3.shapes import local_shapes
from model.m3.sharding import Shard
from model.reference.experts import ExpertRule, ExpertWeights, experts, experts_shared_fused
from model.reference.gate import compare
from model.reference.pages import as_pages, gather, page_table
from model.reference.sparse_attention import SparseRule, attend, sparse_attention, verify_drafts
from model.reference.stack import random_stack, run_stack
from model.reference.transfer import empty_rank, layer_view, transfer

SMALL = M3Config(
    hidden_size=64,
    num_hidden_layers=6,
    num_dense_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rotary_dim=8,
    num_index_heads=4,
    index_dim=16,
    block_size=16,
    topk_blocks=4,
    num_local_experts=8,
    num_experts_per_tok=2,
    expert_intermediate_size=32,
    dense_intermediate_size=64,
    vocab_size=256,
)
RULE = SparseRule(block_size=16, topk_blocks=4)
EXPERT_RULE = ExpertRule(top_k=2)

PUBLISHED_QKV_N = {1: 9856, 2: 4992, 4: 2560, 8: 1536}
"""Columns of a sparse layer's fused projection by TP, as vLLM builds it; 1,536 at TP8 is in the published report."""
PUBLISHED_BYTES = {("bf16", "bf16"): 45_312, ("fp8", "fp8"): 22_656}
"""Bytes that a token leaves on a rank at TP4, by formats of K and V and of index keys, as vLLM's own KV specifications give them."""
PUBLISHED_CAPACITY_TOKENS = 6_264_960
MI355X_BYTES = 288 * GIB
OTHER_BYTES = 14 * GIB
"""Taken for activations, graphs, buffers and the EAGLE3 draft of a rank: not published, so the capacity stands and falls with it."""


def shape_checks() -> dict[str, dict[str, Any]]:
    """Each: what is expected, what the geometry gives, and whether they are equal."""
    found: dict[str, dict[str, Any]] = {}

    def check(name: str, expected: float, actual: float) -> None:
        found[name] = {"expected": expected, "actual": actual, "passed": expected == actual}

    for tp, expected in PUBLISHED_QKV_N.items():
        sizes = {shape.name: shape.n for shape in local_shapes(Shard(MINIMAX_M3, tp))}
        check(f"TP{tp}: columns of the fused projection", expected, sizes["sparse attention qkv + index"])
    for (kv, index), size in PUBLISHED_BYTES.items():
        geometry = CacheGeometry(Shard(MINIMAX_M3, 4), Dtype(kv), Dtype(index))
        check(f"TP4: bytes a token and rank, {kv} with {index} index keys", size, geometry.bytes_per_token)
    apart, together = (sum(s.flops(4096) for s in local_shapes(Shard(MINIMAX_M3, 4), fuse_shared_expert=fuse)) for fuse in (False, True))
    check("TP4: work with the shared expert fused", apart, together)
    return found


def capacity_tokens() -> int:
    """Of the published set-up: TP4, fp8 K and V, bf16 index keys, MXFP4 experts, 0.85 of the device."""
    geometry = CacheGeometry(Shard(MINIMAX_M3, 4), Dtype.FP8, Dtype.BF16)
    plan = plan_memory(geometry, WeightFormat(), device_bytes=MI355X_BYTES, utilization=0.85, other_bytes=OTHER_BYTES)
    return plan.capacity_tokens


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(seed: int, num_keys: int, num_queries: int) -> tuple[Tensor, ...]:
    """query, key, value, index query, index key, positions of the last `num_queries` tokens."""
    return (
        draw(seed, num_queries, 8, 16),
        draw(seed + 1, num_keys, 4, 16),
        draw(seed + 2, num_keys, 4, 16),
        draw(seed + 3, num_queries, 4, 16),
        draw(seed + 4, num_keys, 16),
        torch.arange(num_keys - num_queries, num_keys),
    )


def some_experts(seed: int) -> ExpertWeights:
    return random_stack(SMALL, 1, seed)[0].experts


def _sparse_is_dense() -> float:
    query, key, value, index_query, index_key, positions = case(1, 61, 61)
    sparse = sparse_attention(query, key, value, index_query, index_key, positions, RULE)
    return _difference(sparse, attend(query, key, value, positions, None, RULE.block_size))


def _page_view() -> float:
    cache, table = draw(13, 12, 128, 2, 8), torch.tensor([7, 2, 11, 0])
    assert as_pages(cache).data_ptr() == cache.data_ptr()
    by_page = gather(as_pages(cache), page_table(table[None], 8)[0], 507)
    return _difference(by_page, gather(cache, table, 507))


def _shared_expert() -> float:
    hidden, weights = draw(17, 50, 64), some_experts(3)
    return _difference(experts_shared_fused(hidden, weights, EXPERT_RULE), experts(hidden, weights, EXPERT_RULE))


def _verification() -> float:
    query, key, value, index_query, index_key, _ = case(11, 150, 4)
    together = verify_drafts(query, key, value, index_query, index_key, RULE, 146)
    alone = [
        sparse_attention(query[d : d + 1], key[:end], value[:end], index_query[d : d + 1], index_key[:end], torch.tensor([end - 1]), RULE)
        for d, end in enumerate(range(147, 151))
    ]
    return _difference(together, torch.cat(alone))


def _frequency_one() -> float:
    layers, hidden = random_stack(SMALL, 5, 1), draw(23, 120, 64)
    never = measured_plan([[1.0] * (i + 1) for i in range(5)], least_overlap=1.0, longest=0)
    return _difference(run_stack(SMALL, layers, hidden, fixed_plan(5)).hidden, run_stack(SMALL, layers, hidden, never).hidden)


def _transfer_round_trip() -> float:
    """Bytes that differ after blocks went from TP8 to TP4 and back, layer by layer."""
    there, here = (CacheGeometry(Shard(SMALL, tp), Dtype.FP8, Dtype.BF16) for tp in (8, 4))
    source = [empty_rank(there, 3) for _ in range(8)]
    for rank, memory in enumerate(source):
        for cache in there.layers():
            for slot in range(cache.num_heads):
                head = 0 if cache.role == "index" else rank // there.shard.kv_replication * there.shard.num_kv_heads + slot
                view = layer_view(memory, there, 3, cache)[:, :, slot]
                random = torch.Generator().manual_seed(1000 * cache.layer + 10 * head + (cache.role == "index"))
                view.copy_(torch.randint(1, 256, view.shape, generator=random, dtype=torch.uint8))
    middle, back = [empty_rank(here, 3) for _ in range(4)], [empty_rank(there, 3) for _ in range(8)]
    transfer(source, there, middle, here, {0: 2, 1: 0, 2: 1})
    transfer(middle, here, back, there, {2: 0, 0: 1, 1: 2})
    return float(sum((a != b).sum().item() for a, b in zip(source, back, strict=True)))


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


REFERENCE_CHECKS: dict[str, tuple[Callable[[], float], float]] = {
    "sparse attention is dense while every block is chosen": (_sparse_is_dense, 1e-5),
    "eight pages read as their block": (_page_view, 0.0),
    "the shared expert fused is the separate one": (_shared_expert, 1e-5),
    "drafts verified together are those one by one": (_verification, 1e-5),
    "reuse period 1 is no reuse": (_frequency_one, 0.0),
    "KV moved from TP8 to TP4 and back": (_transfer_round_trip, 0.0),
}
"""Largest difference between a shortcut and its plain form, and what it may be."""


def reference_checks() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (measure, bound) in REFERENCE_CHECKS.items():
        difference = measure()
        found[name] = {"difference": difference, "bound": bound, "passed": difference <= bound}
    return found


def _planted_expert_mask() -> tuple[Tensor, Tensor]:
    hidden, weights = draw(31, 60, 64), some_experts(5)
    down = weights.down.clone()
    down[3] = 0  # an expert that the mask hides
    return experts(hidden, replace(weights, down=down), EXPERT_RULE), experts(hidden, weights, EXPERT_RULE)


def _attended(key: Tensor, value: Tensor) -> Tensor:
    query, _, _, index_query, index_key, positions = case(33, 120, 30)
    return sparse_attention(query, key, value, index_query, index_key, positions, RULE).flatten(1)


def _planted_swapped_offsets() -> tuple[Tensor, Tensor]:
    _, key, value, *_ = case(33, 120, 30)
    return _attended(value, key), _attended(key, value)


def _planted_missing_page() -> tuple[Tensor, Tensor]:
    _, key, value, *_ = case(33, 120, 30)
    torn = value.clone()
    torn[112:] = 0  # the newest page never arrived
    return _attended(key, torn), _attended(key, value)


def _planted_dtype_view() -> tuple[Tensor, Tensor]:
    _, key, value, *_ = case(33, 120, 30)
    wrong = value.to(torch.float8_e4m3fn).view(torch.float8_e4m3fnuz).float()  # other bias: half the value
    return _attended(key, wrong), _attended(key, value.to(torch.float8_e4m3fn).float())


PLANTED: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "wrong expert mask": _planted_expert_mask,
    "swapped K and V offsets": _planted_swapped_offsets,
    "missing page": _planted_missing_page,
    "wrong dtype view": _planted_dtype_view,
}
"""Faults from the field, each as what comes out with it and without."""


def planted_faults() -> dict[str, dict[str, Any]]:
    """Whether the gate lets the sound form pass and stops the other."""
    found = {}
    for name, plant in PLANTED.items():
        actual, expected = plant()
        sound, broken = compare(expected, expected), compare(actual, expected)
        found[name] = {"caught": sound.passed and not broken.passed, "verdict": str(broken)}
    return found
