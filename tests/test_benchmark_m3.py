"""The m3 benchmark's own parts: what it checks is checked, and what it cannot measure is said to be missing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch  # decides whether this file runs

from benchmarks import m3
from benchmarks.m3_checks import PUBLISHED_CAPACITY_TOKENS, capacity_tokens, planted_faults, reference_checks, shape_checks
from benchmarks.m3_growth import error_growth, random_weights, share_that_differs
from benchmarks.report import Options
from model.m3.index_reuse import fixed_plan
from model.nano_m3 import SHAPE
from model.reference.causal import Forced, run_backbone
from tests.real_engine import CACHE_FOLDER

KEYS = {
    *("shape_checks", "capacity_error_share", "reference_checks", "planted_faults_caught"),
    *("reuse_turn_speedup", "reuse_decode_speedup", "gate", "overlap_by_layer"),
}


def test_every_shape_and_shortcut_holds_and_every_planted_fault_is_caught() -> None:
    assert [name for name, check in shape_checks().items() if not check["passed"]] == []
    assert [name for name, check in reference_checks().items() if not check["passed"]] == []
    assert [name for name, fault in planted_faults().items() if not fault["caught"]] == []
    assert capacity_tokens() == pytest.approx(PUBLISHED_CAPACITY_TOKENS, rel=0.03)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_quick_run_without_a_gpu_has_every_figure_and_says_why_speedups_are_missing() -> None:
    figures = m3.measure(Options(quick=True, gpu=True, cache_folder=CACHE_FOLDER)).figures
    assert set(figures) >= KEYS
    assert figures["gate"]["passed"]
    assert figures["reuse_turn_speedup"] is figures["reuse_decode_speedup"] is None
    assert "no CUDA device" in figures["reuse_speedup_missing_because"]
    assert [len(row) for row in figures["overlap_by_layer"]] == [1, 2, 3, 4, 5]


def test_rows_drift_apart_by_their_choices_and_stay_together_along_the_same_ones() -> None:
    tokens = torch.randint(10, 8_000, (700,), generator=torch.Generator().manual_seed(0))
    rows = error_growth(SHAPE, random_weights(SHAPE, "cpu"), tokens, fixed_plan(5))
    assert len(rows) == SHAPE.num_hidden_layers
    last = rows[-1]
    assert last["same experts and blocks: least cosine"] > 0.999 > last["free: least cosine"]
    assert last["free: median"] > 0.999


def test_a_choice_that_is_no_near_tie_is_seen_as_regret() -> None:
    weights, tokens, plan = random_weights(SHAPE, "cpu"), torch.arange(300, 1_000), fixed_plan(5)
    free = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32)
    same = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32, forced=free.choices)
    assert torch.equal(same.hidden, free.hidden)
    assert float(same.expert_regret.max()) == float(same.block_regret.max()) == 0.0
    wrong = [*free.experts[:2], (free.experts[2] + 1) % SHAPE.num_local_experts, *free.experts[3:]]
    other = [free.blocks[0].roll(1, -1), *free.blocks[1:]]  # each block for its neighbour
    mistaken = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32, forced=Forced(wrong, free.blocks))
    assert float(mistaken.expert_regret.median()) > 0.05
    assert share_that_differs(free.experts, wrong) > 0.9
    moved = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32, forced=Forced(free.experts, other))
    assert float(moved.block_regret[600:].median()) > 0.5
