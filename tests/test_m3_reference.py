"""MiniMax-M3's layers in PyTorch: each shortcut equals its plain form, and the gate catches what has gone wrong before."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch  # decides whether this file runs

from benchmarks.m3_checks import PLANTED, RULE, SMALL, case, draw, some_experts
from model.m3.dtypes import Dtype
from model.m3.index_reuse import fixed_plan, measured_plan
from model.m3.kv import CacheGeometry
from model.m3.sharding import Shard
from model.reference.experts import ExpertRule, experts, experts_shared_fused
from model.reference.gate import Thresholds, compare
from model.reference.norms import gemma_norm, rotate
from model.reference.pages import as_pages, gather, page_table
from model.reference.sparse_attention import (
    SparseRule,
    attend,
    block_scores,
    choose_blocks,
    sparse_attention,
    verify_drafts,
)
from model.reference.stack import overlap, random_stack, run_stack
from model.reference.transfer import empty_rank, layer_view, transfer


@pytest.mark.parametrize(("num_keys", "num_queries"), [(16, 16), (64, 1), (61, 61), (50, 7), (1, 1)])
def test_sparse_equals_dense_while_every_block_is_chosen(num_keys: int, num_queries: int) -> None:
    query, key, value, index_query, index_key, positions = case(num_keys, num_keys, num_queries)
    sparse = sparse_attention(query, key, value, index_query, index_key, positions, RULE)
    dense = attend(query, key, value, positions, None, RULE.block_size)
    assert torch.allclose(sparse, dense, atol=1e-5)


def test_sparse_differs_from_dense_when_blocks_are_left_out() -> None:
    query, key, value, index_query, index_key, positions = case(5, 200, 8)
    sparse = sparse_attention(query, key, value, index_query, index_key, positions, RULE)
    assert not torch.allclose(sparse, attend(query, key, value, positions, None, RULE.block_size), atol=1e-2)


@pytest.mark.parametrize("rule", [RULE, SparseRule(16, 4, num_init_blocks=1, num_local_blocks=2), SparseRule(16, 1), SparseRule(16, 6)])
@pytest.mark.parametrize("num_keys", [16, 33, 150, 257])
def test_choices_are_causal_bounded_local_and_the_best(rule: SparseRule, num_keys: int) -> None:
    *_, index_query, index_key, positions = case(7, num_keys, num_keys)
    scores = block_scores(index_query, index_key, positions, rule)
    chosen = choose_blocks(scores, positions, rule)
    for query in range(num_keys):
        own = query // rule.block_size
        visible = own + 1
        picked = chosen[:, query]
        assert not picked[:, visible:].any()
        assert (picked.sum(-1) == min(rule.topk_blocks, visible)).all()
        assert picked[:, own].all()
        for head in range(4):
            free = [b for b in range(visible) if b >= rule.num_init_blocks and b <= own - rule.num_local_blocks]
            taken = sum(bool(picked[head, b]) for b in free)
            best = [block for _, block in sorted((-float(scores[head, query, block]), block) for block in free)][:taken]
            assert {b for b in free if picked[head, b]} == set(best)


def test_scores_are_the_largest_product_of_a_block() -> None:
    *_, index_query, index_key, positions = case(9, 40, 40)
    scores = block_scores(index_query, index_key, positions, RULE)
    for head, query, block in ((0, 39, 0), (3, 20, 1), (2, 16, 1)):
        seen = range(block * 16, min(block * 16 + 16, query + 1))
        expected = max(float(index_query[query, head] @ index_key[key]) for key in seen)
        assert float(scores[head, query, block]) == pytest.approx(expected, rel=1e-5)
    assert scores[0, 15, 1] == float("-inf")


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7])
def test_drafts_verified_together_equal_drafts_verified_one_by_one(num_drafts: int) -> None:
    num_keys = 150
    query, key, value, index_query, index_key, _ = case(11, num_keys, num_drafts)
    first = num_keys - num_drafts
    together = verify_drafts(query, key, value, index_query, index_key, RULE, first)
    for draft in range(num_drafts):
        end = first + draft + 1
        alone = sparse_attention(
            query[draft : draft + 1], key[:end], value[:end], index_query[draft : draft + 1], index_key[:end], torch.tensor([end - 1]), RULE
        )
        assert torch.allclose(together[draft], alone[0], atol=1e-5)


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_pages_are_the_blocks_own_memory_and_read_the_same(block_tokens: int) -> None:
    cache = draw(13, 12, block_tokens, 2, 8)
    pages = as_pages(cache)
    assert pages.data_ptr() == cache.data_ptr()
    table = torch.tensor([7, 2, 11, 0])
    num_tokens = 4 * block_tokens - 5
    by_page = gather(pages, page_table(table[None], block_tokens // 16)[0], num_tokens)
    assert torch.equal(by_page, gather(cache, table, num_tokens))
    pages[0, 0] = 9.0
    assert (cache[0, 0] == 9.0).all()


def test_a_page_view_that_would_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="not made of pages"):
        as_pages(torch.zeros(2, 24, 4))
    with pytest.raises(ValueError, match="copy"):
        as_pages(torch.zeros(4, 2, 16).transpose(0, 1).transpose(1, 2))


def test_the_shared_expert_fused_equals_the_separate_one() -> None:
    hidden = draw(17, 50, 64)
    weights, rule = some_experts(3), ExpertRule(top_k=2)
    assert torch.allclose(experts_shared_fused(hidden, weights, rule), experts(hidden, weights, rule), atol=1e-5)


def test_experts_equal_a_loop_over_tokens() -> None:
    hidden = 3 * draw(19, 9, 64)
    weights, rule = some_experts(4), ExpertRule(top_k=2)
    for token, got in zip(hidden, experts(hidden, weights, rule), strict=True):
        scores = 1 / (1 + torch.exp(-(weights.router @ token)))
        best = [e for _, e in sorted((-float(scores[e] + weights.bias[e]), e) for e in range(8))][:2]
        shares = [2 * float(scores[e]) / sum(float(scores[x]) for x in best) for e in best]
        parts = [(weights.gate_up[e], weights.down[e], share) for e, share in zip(best, shares, strict=True)]
        parts.append((weights.shared_gate_up, weights.shared_down, 1.0))
        expected = torch.zeros(64)
        for gate_up, down, share in parts:
            gate, up = (gate_up @ token).split(32)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            expected += share * (down @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)))
        assert torch.allclose(got, expected, atol=1e-4)


def test_norm_and_rotation_follow_their_definitions() -> None:
    x, weight = draw(21, 5, 3, 16), draw(22, 16)
    assert torch.allclose(gemma_norm(x, weight), x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight), atol=1e-5)
    turned = rotate(x, torch.arange(5), 8)
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    shifted = rotate(x, torch.arange(5) + 40, 8)
    assert torch.allclose((turned[1, 0] * turned[3, 0]).sum(), (shifted[1, 0] * shifted[3, 0]).sum(), atol=1e-4)


# Index reuse over a stack.


def test_frequency_one_is_no_reuse_bit_for_bit() -> None:
    layers, hidden = random_stack(SMALL, 5, 1), draw(23, 120, 64)
    plain = run_stack(SMALL, layers, hidden, fixed_plan(5))
    again = run_stack(SMALL, layers, hidden, measured_plan([[1.0] * (i + 1) for i in range(5)], least_overlap=1.0, longest=0))
    assert torch.equal(plain.hidden, again.hidden)
    assert plain.num_choices == again.num_choices == 5


def test_reuse_that_leaves_every_block_chosen_changes_nothing() -> None:
    layers, hidden = random_stack(SMALL, 5, 2), draw(25, 64, 64)  # four blocks, four are chosen
    assert torch.equal(run_stack(SMALL, layers, hidden, fixed_plan(5)).hidden, run_stack(SMALL, layers, hidden, fixed_plan(5, 4)).hidden)


def test_followers_read_their_leaders_choice_and_the_difference_is_measured() -> None:
    layers, hidden = random_stack(SMALL, 5, 3), draw(27, 200, 64)
    plain, reused = run_stack(SMALL, layers, hidden, fixed_plan(5)), run_stack(SMALL, layers, hidden, fixed_plan(5, 4))
    assert reused.num_choices == 2
    assert all(torch.equal(reused.chosen[0], reused.chosen[ordinal]) for ordinal in range(4))
    assert not torch.equal(plain.hidden, reused.hidden)
    shares = overlap(plain.chosen, first_query=100)
    assert [row[i] for i, row in enumerate(shares)] == [1.0] * 5
    assert all(0 < row[0] < 1 for row in shares[1:])
    assert overlap(reused.chosen, first_query=100)[3][0] == 1.0
    assert measured_plan(shares, least_overlap=0.99, longest=4).is_off  # random layers do not agree, and the plan sees it


# KV transfer by geometry.


def _filled(geometry: CacheGeometry, num_blocks: int) -> list[torch.Tensor]:
    """Ranks whose bytes say whose they are: the same head has the same bytes wherever it lies."""
    ranks = [empty_rank(geometry, num_blocks) for _ in range(geometry.shard.tp)]
    for rank, memory in enumerate(ranks):
        for cache in geometry.layers():
            view = layer_view(memory, geometry, num_blocks, cache)
            for slot in range(cache.num_heads):
                shard = geometry.shard
                head = 0 if cache.role == "index" else rank // shard.kv_replication * shard.num_kv_heads + slot
                seed = (cache.layer * 2 + (cache.role == "index")) * 64 + head
                draw = torch.Generator().manual_seed(seed)
                view[:, :, slot] = torch.randint(1, 256, view[:, :, slot].shape, generator=draw, dtype=torch.uint8)
    return ranks


@pytest.mark.parametrize("index_dtype", [Dtype.BF16, Dtype.FP8])
@pytest.mark.parametrize(("tp_from", "tp_to"), [(4, 4), (8, 4), (4, 8), (2, 4), (4, 1), (1, 8)])
def test_a_transfer_there_and_back_is_the_identity(tp_from: int, tp_to: int, index_dtype: Dtype) -> None:
    there, here = (CacheGeometry(Shard(SMALL, tp), Dtype.FP8, index_dtype) for tp in (tp_from, tp_to))
    source = _filled(there, num_blocks=5)
    target = [empty_rank(here, 7) for _ in range(tp_to)]
    assert transfer(source, there, target, here, {1: 6, 4: 0}) == tp_to * 2 * here.bytes_per_block
    back = [empty_rank(there, 5) for _ in range(tp_from)]
    transfer(target, here, back, there, {6: 1, 0: 4})
    for rank in range(tp_from):
        for cache in there.layers():
            moved, original = (layer_view(memory[rank], there, 5, cache) for memory in (back, source))
            assert torch.equal(moved[[1, 4]], original[[1, 4]])
            assert not moved[[0, 2, 3]].any()


def test_a_transfer_between_formats_is_refused() -> None:
    there, here = CacheGeometry(Shard(SMALL, 1), Dtype.FP8), CacheGeometry(Shard(SMALL, 1), Dtype.BF16)
    with pytest.raises(ValueError, match="does not convert"):
        transfer([empty_rank(there, 1)], there, [empty_rank(here, 1)], here, {0: 0})


# The gate, and planted faults.


@pytest.mark.parametrize("fault", PLANTED)
def test_the_gate_catches_each_planted_fault(fault: str) -> None:
    actual, expected = PLANTED[fault]()
    assert compare(expected, expected).passed
    assert not compare(actual, expected).passed


def test_one_broken_row_among_a_thousand_fails() -> None:
    logits = draw(41, 1000, 50)
    broken = logits.clone()
    broken[500] = -broken[500]
    assert not compare(broken, logits).passed


def test_rounding_passes_and_not_a_number_does_not() -> None:
    logits = draw(43, 200, 50)
    assert compare(logits.bfloat16(), logits).passed
    torn = logits.clone()
    torn[3, 4] = float("nan")
    assert not compare(torn, logits).passed
    assert "FAILED" in str(compare(torn, logits))


def test_a_wrong_scale_fails_although_every_direction_and_every_first_place_is_right() -> None:
    logits = draw(45, 20, 50)
    verdict = compare(logits / 2, logits)
    assert (round(verdict.least_cosine, 6), verdict.top1_share) == (1.0, 1.0)
    assert not verdict.passed
    assert compare(logits / 2, logits, Thresholds(largest_relative_error=0.6)).passed
