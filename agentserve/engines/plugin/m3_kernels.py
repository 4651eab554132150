"""What vLLM's M3 asks of CUDA and Triton, in PyTorch for the CPU: projection epilogue with cache writes, block choice, sparse attention.

Each function has the name, arguments and effect of the kernel that it stands for (vLLM's `_custom_ops` and
`models/minimax_m3/common/ops`), so that vLLM's own layers, caches and metadata run unchanged. Written for small sizes: simple, not fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK_TOKENS = 128
QUERY_TILE = 512
"""Prefill queries whose mask exists at a time."""


def fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    index_q_norm_weight: Tensor | None = None,
    index_k_norm_weight: Tensor | None = None,
    num_index_heads: int = 0,
    slot_mapping: Tensor | None = None,
    index_slot_mapping: Tensor | None = None,
    kv_cache: Tensor | None = None,
    index_cache: Tensor | None = None,
    block_size: int = 0,
    q_out: Tensor | None = None,
    index_q_out: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    skip_index_branch: bool = False,
    **_: Any,
) -> None:
    """Norm and rotate the heads of [q | k | v | index q | index k], and write keys and values into their caches.

    qkv: [tokens, heads · dim], changed in place where no `*_out` is given; kv_cache: [blocks, KV heads, block tokens, 2 · dim];
    index_cache: [blocks, block tokens, dim]; slots below 0 are padding.
    """
    dim = q_norm_weight.shape[0]
    cos_sin = cos_sin_cache[positions].float()
    sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
    if num_index_heads:
        sizes += [num_index_heads * dim, dim]
    query, key, value, *index = qkv.split(sizes, -1)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        return _rotate(_norm(part.unflatten(-1, (-1, dim)), weight, eps), cos_sin, rotary_dim).flatten(-2)

    (query if q_out is None else q_out).copy_(turned(query, q_norm_weight))
    key.copy_(turned(key, k_norm_weight))
    if kv_cache is not None and slot_mapping is not None:
        heads = torch.cat([key.unflatten(-1, (-1, dim)), value.unflatten(-1, (-1, dim))], -1)
        _write(kv_cache.transpose(1, 2), slot_mapping, heads)
    if skip_index_branch or not index:
        return
    assert index_q_norm_weight is not None
    assert index_k_norm_weight is not None
    (index[0] if index_q_out is None else index_q_out).copy_(turned(index[0], index_q_norm_weight))
    if index_cache is not None and index_slot_mapping is not None:
        _write(index_cache, index_slot_mapping, turned(index[1], index_k_norm_weight))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def _rotate(x: Tensor, cos_sin: Tensor, rotary_dim: int) -> Tensor:
    """The first `rotary_dim` of each head, NeoX halves. x: [tokens, heads, dim]; cos_sin: [tokens, rotary_dim], cosines first."""
    half = rotary_dim // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high = x[..., :half], x[..., half:rotary_dim]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., rotary_dim:]], -1)


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """cache: [blocks, block tokens, ...]; slots: [tokens], block · tokens + place; rows: [tokens or more, ...]."""
    real = slots >= 0
    slots = slots[real]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[: len(real)][real].to(cache.dtype)


def minimax_m3_index_decode(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Chosen blocks of each decode query: [index heads, queries, topk], −1 where there are fewer. idx_q: [queries, index heads, dim]."""
    chosen = _buffer(idx_q, topk, out)
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(request * decode_query_len, (request + 1) * decode_query_len)
        positions = torch.arange(length - decode_query_len, length)
        _choose(idx_q[rows], index_kv_cache, block_table[request], positions, (topk, init_blocks, local_blocks), chosen[:, rows])
    return chosen


def minimax_m3_index_score(
    idx_q: Tensor,
    index_kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> Tensor:
    """Score of every block for every prefill query: [index heads, queries, blocks], −inf where a query sees nothing of it."""
    num_blocks = -(-max_seq_len // BLOCK_TOKENS)
    scores = torch.full((idx_q.shape[1], idx_q.shape[0], num_blocks), float("-inf"))
    bounds = cu_seqlens_q.tolist()
    for request, first in enumerate(prefix_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        for start in range(begin, end, QUERY_TILE):
            stop = min(start + QUERY_TILE, end)
            positions = torch.arange(first + start - begin, first + stop - begin)
            part = _scores(idx_q[start:stop], index_kv_cache, block_table[request], positions)
            scores[:, start:stop, : part.shape[-1]] = part
    return scores


def minimax_m3_index_topk(
    score: Tensor,
    cu_seqlens_q: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor | None = None,
) -> Tensor:
    """Chosen blocks of each prefill query, as `minimax_m3_index_decode`. score: as `minimax_m3_index_score` gives it."""
    num_heads, num_queries, _ = score.shape
    chosen = torch.empty(num_heads, num_queries, topk, dtype=torch.int32) if out is None else out[:, :num_queries]
    bounds = cu_seqlens_q.tolist()
    for request, first in enumerate(prefix_lens.tolist()):
        rows = slice(bounds[request], bounds[request + 1])
        positions = first + torch.arange(rows.stop - rows.start)
        chosen[:, rows] = _best(score[:, rows], positions, topk, init_blocks, local_blocks)
    return chosen


def _buffer(idx_q: Tensor, topk: int, out: Tensor | None) -> Tensor:
    if out is not None:
        return out[:, : idx_q.shape[0]]
    return torch.empty(idx_q.shape[1], idx_q.shape[0], topk, dtype=torch.int32)


def _choose(idx_q: Tensor, cache: Tensor, table: Tensor, positions: Tensor, rule: tuple[int, int, int], out: Tensor) -> None:
    topk, init_blocks, local_blocks = rule
    num_blocks = int(positions[-1]) // BLOCK_TOKENS + 1
    if num_blocks <= topk and len(positions) == 1:  # all of them: nothing to compare
        out.fill_(-1)
        out[..., :num_blocks] = torch.arange(num_blocks, dtype=out.dtype)
        return
    out.copy_(_best(_scores(idx_q, cache, table, positions), positions, topk, init_blocks, local_blocks))


def _scores(idx_q: Tensor, cache: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """[index heads, queries, blocks] for the queries of one request at `positions`."""
    length = int(positions[-1]) + 1
    num_blocks = -(-length // BLOCK_TOKENS)
    keys = cache[table[:num_blocks].long()].flatten(0, 1)[:length].float()
    products = torch.einsum("qhd,kd->hqk", idx_q.float(), keys)
    products.masked_fill_(torch.arange(length) > positions[:, None], float("-inf"))
    products = pad(products, (0, num_blocks * BLOCK_TOKENS - length), value=float("-inf"))
    return products.unflatten(-1, (num_blocks, BLOCK_TOKENS)).amax(-1)


def _best(scores: Tensor, positions: Tensor, topk: int, init_blocks: int, local_blocks: int) -> Tensor:
    """Block ids by score, the forced ones first, −1 behind the last that a query sees: [index heads, queries, topk]."""
    blocks = torch.arange(scores.shape[-1])
    own = positions[:, None] // BLOCK_TOKENS
    forced = (blocks <= own) & ((blocks < init_blocks) | (blocks > own - local_blocks))
    ranked = scores.masked_fill(forced, float("inf"))
    best = ranked.topk(min(topk, scores.shape[-1]), -1)
    ids = best.indices.masked_fill(best.values == float("-inf"), -1).to(torch.int32)
    return pad(ids, (0, topk - ids.shape[-1]), value=-1)


def minimax_m3_sparse_attn_decode(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    decode_query_len: int,
    **_: Any,
) -> None:
    """Attention of decode queries over their chosen blocks. q, output: [queries, heads, dim]; topk_idx: [KV heads, queries, topk]."""
    dim = q.shape[-1]
    chosen = topk_idx.clamp(min=0).long()
    tables = block_table.repeat_interleave(decode_query_len, 0)
    physical = tables.gather(1, chosen.transpose(0, 1).flatten(1)).unflatten(1, (num_kv_heads, -1)).long()
    heads = torch.arange(num_kv_heads)[None, :, None]
    lines = kv_cache[physical, heads].flatten(2, 3)  # [queries, KV heads, topk · block tokens, 2 · dim]
    positions = (seq_lens[:, None] - decode_query_len + torch.arange(decode_query_len)).flatten()
    places = chosen[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
    seen = ((topk_idx[..., None] >= 0) & (places <= positions[:, None, None])).flatten(2).transpose(0, 1)
    query = q.unflatten(1, (num_kv_heads, -1)).float()
    attended = scaled_dot_product_attention(
        query, lines[..., :dim].float(), lines[..., dim:].float(), attn_mask=seen[:, :, None], scale=sm_scale
    )
    output.copy_(attended.flatten(1, 2))


def minimax_m3_sparse_attn(
    q: Tensor,
    kv_cache: Tensor,
    topk_idx: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: Tensor,
    **_: Any,
) -> None:
    """Attention of prefill queries over their chosen blocks; shapes as in `minimax_m3_sparse_attn_decode`.

    Queries of a tile share the keys before them; a mask leaves out what each has not chosen.
    """
    bounds = cu_seqlens_q.tolist()
    for request, first in enumerate(prefix_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        for start in range(begin, end, QUERY_TILE):
            rows = slice(start, min(start + QUERY_TILE, end))
            positions = torch.arange(first + rows.start - begin, first + rows.stop - begin)
            output[rows] = _attend_tile(q[rows], kv_cache, topk_idx[:, rows], block_table[request], positions, sm_scale)


def _attend_tile(q: Tensor, kv_cache: Tensor, topk_idx: Tensor, table: Tensor, positions: Tensor, scale: float) -> Tensor:
    dim, length = q.shape[-1], int(positions[-1]) + 1
    num_blocks = -(-length // BLOCK_TOKENS)
    lines = kv_cache[table[:num_blocks].long()].transpose(0, 1).flatten(1, 2)[:, :length].float()
    left_out = torch.full((*topk_idx.shape[:2], num_blocks + 1), float("-inf"))
    left_out.scatter_(-1, topk_idx.long().masked_fill(topk_idx < 0, num_blocks), 0.0)
    unseen = torch.arange(length) > positions[:, None]
    heads = q.float().unflatten(1, (len(lines), -1)).permute(1, 2, 0, 3)
    attended = torch.empty_like(heads)
    for head, (query, own) in enumerate(zip(heads, lines, strict=True)):
        # One product for all query heads of a KV head: twice as fast as PyTorch's attention with a mask.
        scores = (query.flatten(0, 1) @ own[:, :dim].T).unflatten(0, query.shape[:2]) * scale
        scores += left_out[head, :, :num_blocks].repeat_interleave(BLOCK_TOKENS, -1)[:, :length].masked_fill_(unseen, float("-inf"))
        attended[head] = (scores.softmax(-1).flatten(0, 1) @ own[:, dim:]).unflatten(0, query.shape[:2])
    return attended.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
