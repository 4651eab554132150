"""The gate of an engine that runs M3's layers.

Two sound implementations drift apart, because near ties among experts and blocks fall either way (see `benchmarks.m3_growth`). So the gate
asks two questions: along the engine's own choices, is the arithmetic the reference's for every row; and was each choice right, up to a
near tie.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.m3_engine import Arm, Engine
from benchmarks.m3_growth import share_that_differs
from model.reference.causal import Forced, run_backbone
from model.reference.gate import Thresholds, compare

ARITHMETIC = Thresholds(least_cosine=0.999, largest_relative_error=0.05, least_top1=0.99, tie=0.1)
"""Of every row, along the engine's choices, against the reference in fp32. Logits that are each off
by that error change places within 0.1 deviations."""
NEAR_TIE_EXPERTS = 0.05
"""Router scores (0 to 1, and a bias) that lie closer may change places."""
NEAR_TIE_BLOCKS = 1.0
"""Block scores, in deviations of the row's."""


def gate(engine: Engine, arm: Arm, ids: list[int]) -> dict[str, Any]:
    """One prompt's hidden states and logits under `arm` against the reference with the same plan."""
    engine.choose(arm)
    engine.reset()
    seen = engine.seen(ids)
    weights, plan = engine.weights(), engine.plan(arm)
    tokens = torch.tensor(ids, device=seen.hidden.device)[: len(seen.hidden)]
    choices = seen.choices
    blocks = [mask[..., : -(-len(tokens) // engine.config.block_size)] for mask in choices.blocks]
    along = run_backbone(engine.config, weights, tokens, plan, dtype=torch.float32, forced=Forced(choices.experts, blocks))
    free = run_backbone(engine.config, weights, tokens, plan, dtype=torch.float32)
    head = weights["lm_head.weight"].float()
    verdict = compare(seen.hidden.float() @ head.T, along.hidden @ head.T, ARITHMETIC)
    ties = {"largest_expert_regret": along.expert_regret.max().item(), "largest_block_regret": along.block_regret.max().item()}
    are_ties = ties["largest_expert_regret"] <= NEAR_TIE_EXPERTS and ties["largest_block_regret"] <= NEAR_TIE_BLOCKS
    return {
        "passed": verdict.passed and are_ties,
        "rows": len(tokens),
        "along_the_engines_choices": asdict(verdict),
        **ties,
        "rows_that_took_another_expert": share_that_differs(choices.experts, free.experts),
        "free": _spread(cosine_similarity(seen.hidden.float(), free.hidden, dim=-1)),
        "forced": _spread(cosine_similarity(seen.hidden.float(), along.hidden, dim=-1)),
    }


def _spread(values: Tensor) -> dict[str, float]:
    return {"least": values.min().item(), "p01": values.quantile(0.01).item(), "median": values.median().item()}
