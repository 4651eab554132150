"""A stack of sparse layers with random weights, run with or without cross-layer index reuse; and how much neighbours agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.m3.config import M3Config
from model.m3.index_reuse import ReusePlan
from model.reference.experts import ExpertRule, ExpertWeights, experts
from model.reference.norms import gemma_norm, rotate
from model.reference.sparse_attention import SparseRule, attend, block_scores, choose_blocks


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """Weights of one layer. qkv: [query + key + value + index query + index key, hidden]; output: [hidden, query]; norms: [dim]."""

    qkv: Tensor
    output: Tensor
    query_norm: Tensor
    key_norm: Tensor
    index_query_norm: Tensor
    index_key_norm: Tensor
    input_norm: Tensor
    expert_norm: Tensor
    experts: ExpertWeights


@dataclass(frozen=True, slots=True)
class StackRun:
    """What a run gives. `hidden`: [tokens, hidden]; `chosen`: of each sparse layer, [KV heads, tokens, blocks]."""

    hidden: Tensor
    chosen: tuple[Tensor, ...]
    num_choices: int
    """Layers that ran their indexer."""


def random_stack(config: M3Config, num_layers: int, seed: int, dtype: torch.dtype = torch.float32) -> list[SparseLayer]:
    """Layers whose weights are drawn once from `seed`, scaled so that activations keep their size."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw) * shape[-1] ** -0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (0.1 * torch.randn(size, generator=draw)).to(dtype)

    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    index = config.num_index_heads * config.index_dim
    hidden, width, count = config.hidden_size, config.expert_intermediate_size, config.num_local_experts
    return [
        SparseLayer(
            qkv=matrix(query + 2 * key + index + config.index_dim, hidden),
            output=matrix(hidden, query),
            query_norm=norm(config.head_dim),
            key_norm=norm(config.head_dim),
            index_query_norm=norm(config.index_dim),
            index_key_norm=norm(config.index_dim),
            input_norm=norm(hidden),
            expert_norm=norm(hidden),
            experts=ExpertWeights(
                router=matrix(count, hidden),
                bias=0.01 * torch.randn(count, generator=draw),
                gate_up=matrix(count, 2 * width, hidden),
                down=matrix(count, hidden, width),
                shared_gate_up=matrix(2 * width, hidden),
                shared_down=matrix(hidden, width),
            ),
        )
        for _ in range(num_layers)
    ]


def run_stack(config: M3Config, layers: list[SparseLayer], hidden: Tensor, plan: ReusePlan, positions: Tensor | None = None) -> StackRun:
    """One forward pass over a whole sequence. hidden: [tokens, hidden]; `plan` has one leader for each layer."""
    assert len(plan.leaders) == len(layers)
    rule = SparseRule(config.block_size, config.topk_blocks, config.num_init_blocks, config.num_local_blocks)
    expert_rule = ExpertRule(top_k=config.num_experts_per_tok)
    positions = torch.arange(hidden.shape[0]) if positions is None else positions
    choices: list[Tensor] = []
    for ordinal, layer in enumerate(layers):
        query, key, value, index_query, index_key = _project(config, layer, gemma_norm(hidden, layer.input_norm), positions)
        leader = plan.leaders[ordinal]
        if leader == ordinal:
            choices.append(choose_blocks(block_scores(index_query, index_key, positions, rule), positions, rule))
        else:
            choices.append(choices[leader])
        attended = attend(query, key, value, positions, choices[ordinal], rule.block_size)
        hidden = hidden + (attended.flatten(1).float() @ layer.output.float().T).to(hidden.dtype)
        hidden = hidden + experts(gemma_norm(hidden, layer.expert_norm), layer.experts, expert_rule)
    return StackRun(hidden, tuple(choices), plan.num_leaders)


def _project(config: M3Config, layer: SparseLayer, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query_size = config.num_attention_heads * config.head_dim
    key_size = config.num_key_value_heads * config.head_dim
    index_size = config.num_index_heads * config.index_dim
    parts = (
        (hidden.float() @ layer.qkv.float().T).to(hidden.dtype).split([query_size, key_size, key_size, index_size, config.index_dim], -1)
    )
    query, key, value, index_query, index_key = parts

    def heads(x: Tensor, count: int, norm: Tensor) -> Tensor:
        return rotate(gemma_norm(x.unflatten(-1, (count, -1)), norm), positions, config.rotary_dim)

    return (
        heads(query, config.num_attention_heads, layer.query_norm),
        heads(key, config.num_key_value_heads, layer.key_norm),
        value.unflatten(-1, (config.num_key_value_heads, -1)),
        heads(index_query, config.num_index_heads, layer.index_query_norm),
        heads(index_key, 1, layer.index_key_norm)[:, 0],
    )


def overlap(chosen: tuple[Tensor, ...], first_query: int = 0) -> list[list[float]]:
    """Lower triangle: share of layer i's chosen blocks that layer j <= i chose too, over queries from `first_query` on, 0 to 1.

    Early queries see few blocks and choose all of them: leave them out by `first_query`.
    """
    table: list[list[float]] = []
    for later in chosen:
        picked = later[:, first_query:]
        total = picked.sum().item()
        table.append([(picked & earlier[:, first_query:]).sum().item() / total if total else 1.0 for earlier in chosen[: len(table) + 1]])
    return table
