"""MiniMax Sparse Attention: an indexer scores blocks of 128 keys, each query attends to the best of them and to its own.

Follows vLLM's Triton kernels (models/minimax_m3/common/ops): scores are the largest product in a block, forced blocks (the first and the
local ones) take places among the top k, and each KV head has its own index head, hence its own choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SparseRule:
    """How blocks are chosen. `topk_blocks` counts the forced ones."""

    block_size: int = 128
    topk_blocks: int = 16
    num_init_blocks: int = 0
    num_local_blocks: int = 1


def block_scores(index_query: Tensor, index_key: Tensor, positions: Tensor, rule: SparseRule) -> Tensor:
    """Score of every block for every query: [index heads, queries, blocks], −inf where a query sees nothing of a block.

    index_query: [queries, index heads, dim]; index_key: [keys, dim], one head; positions: [queries], each query's place among the keys.
    Any positive scale leaves the choice as it is, so there is none.
    """
    num_keys = index_key.shape[0]
    num_blocks = -(-num_keys // rule.block_size)
    scores = torch.einsum("qhd,kd->hqk", index_query.float(), index_key.float())
    unseen = torch.arange(num_keys, device=index_key.device)[None, :] > positions[:, None]
    scores = scores.masked_fill(unseen[None], float("-inf"))
    padding = num_blocks * rule.block_size - num_keys
    scores = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    return scores.unflatten(-1, (num_blocks, rule.block_size)).amax(-1)


def choose_blocks(scores: Tensor, positions: Tensor, rule: SparseRule) -> Tensor:
    """Which blocks each query attends to: bool [index heads, queries, blocks]; at most `topk_blocks`, never one it cannot see."""
    num_blocks = scores.shape[-1]
    blocks = torch.arange(num_blocks, device=scores.device)[None, :]
    own = positions[:, None] // rule.block_size
    forced = ((blocks < rule.num_init_blocks) | (blocks > own - rule.num_local_blocks)) & (blocks <= own)
    ranked = scores.masked_fill(forced[None], float("inf"))
    best = ranked.topk(min(rule.topk_blocks, num_blocks), dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, best.values > float("-inf"))
    return chosen & (blocks <= own)[None]


def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, chosen: Tensor | None, block_size: int) -> Tensor:
    """Grouped-query attention over the chosen blocks, causal: [queries, heads, dim]. `chosen` None: over everything (dense).

    query: [queries, heads, dim]; key, value: [keys, KV heads, dim]; chosen: [KV heads, queries, blocks].
    """
    num_keys, num_kv_heads, dim = key.shape
    group = query.shape[1] // num_kv_heads
    seen = torch.arange(num_keys, device=key.device)[None, :] <= positions[:, None]
    mask = seen[None].expand(num_kv_heads, -1, -1)
    if chosen is not None:
        mask = mask & chosen.repeat_interleave(block_size, -1)[..., :num_keys]
    grouped = query.float().unflatten(1, (num_kv_heads, group))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key.float()) * dim**-0.5
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, value.float()).flatten(1, 2).to(query.dtype)


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, index_query: Tensor, index_key: Tensor, positions: Tensor, rule: SparseRule
) -> Tensor:
    """Choose, then attend. Shapes as in `block_scores` and `attend`."""
    chosen = choose_blocks(block_scores(index_query, index_key, positions, rule), positions, rule)
    return attend(query, key, value, positions, chosen, rule.block_size)


def verify_drafts(
    query: Tensor, key: Tensor, value: Tensor, index_query: Tensor, index_key: Tensor, rule: SparseRule, first_position: int
) -> Tensor:
    """All draft positions of one request in one pass over its keys: the keys are read once, not once a draft token.

    query: [drafts, heads, dim], the request's newest tokens, the first at `first_position`; keys up to the last draft.
    """
    positions = first_position + torch.arange(query.shape[0], device=query.device)
    return sparse_attention(query, key, value, index_query, index_key, positions, rule)
