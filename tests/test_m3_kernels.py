"""The CPU stand-ins for M3's kernels, over paged caches, equal the reference over whole sequences."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch  # decides whether this file runs

from agentserve.engines.plugin import m3_kernels
from model.reference.norms import gemma_norm, rotate
from model.reference.sparse_attention import SparseRule, attend, block_scores, choose_blocks

HEADS, KV_HEADS, DIM, ROTARY = 4, 2, 16, 8
RULE = SparseRule(topk_blocks=3, num_local_blocks=1)
LENGTHS = (700, 130, 1)
BLOCKS_EACH = 6


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tables() -> torch.Tensor:
    """Block ids of each request, none of them in order."""
    shuffled = torch.randperm(len(LENGTHS) * BLOCKS_EACH, generator=torch.Generator().manual_seed(1))
    return shuffled.to(torch.int32).view(len(LENGTHS), BLOCKS_EACH)


def _paged(rows: list[torch.Tensor], heads_first: bool) -> torch.Tensor:
    """Each request's rows [tokens, ...] in its blocks: [blocks, tokens, dim], or [blocks, heads, tokens, dim]."""
    cache = torch.zeros(len(LENGTHS) * BLOCKS_EACH, 128, *rows[0].shape[1:])
    for table, own in zip(_tables(), rows, strict=True):
        for place, row in enumerate(own):
            cache[table[place // 128], place % 128] = row
    return cache.transpose(1, 2).contiguous() if heads_first else cache


def _case() -> tuple[list[torch.Tensor], ...]:
    """query, key, value, index query, index key of each request."""
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (DIM,))
    return tuple([_draw(10 * part + r, length, *shape) for r, length in enumerate(LENGTHS)] for part, shape in enumerate(shapes))


def _expected(new: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Choice and attention of the last `new[i]` tokens of request i."""
    chosen, attended = [], []
    for query, key, value, index_query, index_key, count in zip(*_case(), new, strict=True):
        positions = torch.arange(len(key) - count, len(key))
        picked = choose_blocks(block_scores(index_query[-count:], index_key, positions, RULE), positions, RULE)
        chosen.append(picked)
        attended.append(attend(query[-count:], key, value, positions, picked, 128))
    return chosen, attended


def _as_ids(chosen: torch.Tensor) -> list[list[set[int]]]:
    return [[set(torch.nonzero(query)[:, 0].tolist()) for query in head] for head in chosen]


def _ids(topk: torch.Tensor) -> list[list[set[int]]]:
    return [[set(query.tolist()) - {-1} for query in head] for head in topk]


def _run(new: list[int], decode: bool) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, index_query, index_key = _case()
    tables, lengths = _tables(), torch.tensor(LENGTHS)
    last = [part[-count:] for part, count in zip(index_query, new, strict=True)]
    keys = _paged(index_key, heads_first=False)
    cache = _paged([torch.cat([k, v], -1) for k, v in zip(key, value, strict=True)], heads_first=True)
    queries = torch.cat([part[-count:] for part, count in zip(query, new, strict=True)])
    buffer = torch.full((sum(new) + 5, KV_HEADS, RULE.topk_blocks), 99, dtype=torch.int32).transpose(0, 1)
    output = torch.empty_like(queries)
    if decode:
        arguments = (tables, lengths, max(LENGTHS), RULE.topk_blocks, 0, 1, KV_HEADS, new[0], new[0])
        topk = m3_kernels.minimax_m3_index_decode(torch.cat(last), keys, *arguments, out=buffer)
        m3_kernels.minimax_m3_sparse_attn_decode(queries, cache, topk, tables, lengths, KV_HEADS, DIM**-0.5, output, new[0])
    else:
        bounds = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        before = lengths - torch.tensor(new)
        sizes = (max(new), max(LENGTHS), KV_HEADS)
        score = m3_kernels.minimax_m3_index_score(torch.cat(last), keys, tables, bounds, lengths, before, *sizes)
        topk = m3_kernels.minimax_m3_index_topk(score, bounds, before, max(new), RULE.topk_blocks, 0, 1, out=buffer)
        m3_kernels.minimax_m3_sparse_attn(
            queries, cache, topk, tables, bounds, lengths, before, max(new), KV_HEADS, DIM**-0.5, output, k_scale=None
        )
    assert topk.data_ptr() == buffer.data_ptr()
    assert (buffer[:, sum(new) :] == 99).all(), "only the batch's own rows are written"
    return topk, output


@pytest.mark.parametrize(("new", "decode"), [([1, 1, 1], True), ([600, 130, 1], False), ([5, 64, 1], False)])
def test_choice_and_attention_over_pages_equal_the_reference(new: list[int], decode: bool) -> None:
    topk, output = _run(new, decode)
    chosen, attended = _expected(new)
    start = 0
    for count, picked, rows in zip(new, chosen, attended, strict=True):
        assert _ids(topk[:, start : start + count]) == _as_ids(picked)
        assert torch.allclose(output[start : start + count], rows, atol=1e-5)
        start += count


def test_several_draft_tokens_of_a_request_are_decoded_together() -> None:
    query, key, value, index_query, index_key = (part[:1] for part in _case())
    tables, length, drafts = _tables()[:1], torch.tensor([700]), 3
    cache = torch.zeros(len(LENGTHS) * BLOCKS_EACH, 128, KV_HEADS, 2 * DIM)
    keys = torch.zeros(len(LENGTHS) * BLOCKS_EACH, 128, DIM)
    for place in range(700):
        cache[tables[0, place // 128], place % 128] = torch.cat([key[0][place], value[0][place]], -1)
        keys[tables[0, place // 128], place % 128] = index_key[0][place]
    topk = m3_kernels.minimax_m3_index_decode(index_query[0][-drafts:], keys, tables, length, 700, 3, 0, 1, KV_HEADS, drafts, drafts)
    output = torch.empty(drafts, HEADS, DIM)
    heads_first = cache.transpose(1, 2).contiguous()
    m3_kernels.minimax_m3_sparse_attn_decode(query[0][-drafts:], heads_first, topk, tables, length, KV_HEADS, DIM**-0.5, output, drafts)
    positions = torch.arange(697, 700)
    picked = choose_blocks(block_scores(index_query[0][-drafts:], index_key[0], positions, RULE), positions, RULE)
    assert torch.allclose(output, attend(query[0][-drafts:], key[0], value[0], positions, picked, 128), atol=1e-5)


@pytest.mark.parametrize("skips", [False, True])
def test_the_epilogue_norms_rotates_and_writes_what_it_is_told(skips: bool) -> None:
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, DIM]
    qkv = _draw(3, 7, sum(sizes))
    norms = [_draw(20 + number, DIM) for number in range(4)]
    positions = torch.tensor([5, 900, 0, 1, 2, 3, 4])
    frequencies = 5e6 ** (-torch.arange(ROTARY // 2) / (ROTARY // 2))
    angles = torch.arange(1000)[:, None] * frequencies
    slots = torch.tensor([130, 3, -1, 0, 255, 128, 9])
    kv_cache, index_cache = torch.zeros(2, KV_HEADS, 128, 2 * DIM), torch.zeros(2, 128, DIM, dtype=torch.bfloat16)
    query, index_query = torch.zeros(7, sizes[0]), torch.zeros(7, sizes[3], dtype=torch.bfloat16)
    parts = [part.clone() for part in qkv.split(sizes, -1)]
    m3_kernels.fused_minimax_m3_qknorm_rope_kv_insert(
        *(qkv, norms[0], norms[1], torch.cat([angles.cos(), angles.sin()], -1), positions, HEADS, KV_HEADS, ROTARY, 1e-6),
        *(norms[2], norms[3], KV_HEADS, slots, slots, kv_cache, index_cache, 128, query, index_query),
        skip_index_branch=skips,
        q_fp8_out=None,
    )

    def turned(part: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return rotate(gemma_norm(part.unflatten(-1, (-1, DIM)), norm), positions, ROTARY)

    assert torch.allclose(query, turned(parts[0], norms[0]).flatten(1), atol=1e-5)
    key, value = turned(parts[1], norms[1]), parts[2].unflatten(-1, (-1, DIM))
    index_key = turned(parts[4], norms[3])[:, 0]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            line = kv_cache[slot // 128, :, slot % 128]
            assert torch.allclose(line, torch.cat([key[row], value[row]], -1), atol=1e-5)
            written = index_cache[slot // 128, slot % 128]
            assert torch.equal(written, torch.zeros(DIM, dtype=torch.bfloat16) if skips else index_key[row].bfloat16())
    assert int((kv_cache != 0).any(-1).any(1).sum()) == 6, "a slot below 0 is written nowhere"
    assert bool((index_query != 0).any()) is not skips
