"""The gate of an engine that runs M3's layers.

Two sound implementations drift apart, because near ties among experts and blocks fall either way (see `benchmarks.m3_growth`). So the gate
asks two questions: along the engine's own choices, is the arithmetic the reference's for every row; and was each choice right, up to a
near tie. Choices that cannot be an engine's are reported as such, and nothing is computed along them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.m3_choices import ChoicesBroken
from benchmarks.m3_engine import Arm, Engine
from benchmarks.m3_growth import share_that_differs
from model.reference.causal import Forced, Trace, run_backbone
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
    try:
        seen = engine.seen(ids)
    except ChoicesBroken as error:
        return {"passed": False, "choices_broken": str(error), "buffer": engine.buffer_facts()}
    weights, plan = engine.weights(), engine.plan(arm)
    tokens = torch.tensor(ids, device=seen.hidden.device)[: len(seen.hidden)]
    blocks = [mask[..., : -(-len(tokens) // engine.config.block_size)] for mask in seen.choices.blocks]
    choices = Forced(seen.choices.experts, blocks)
    along = run_backbone(engine.config, weights, tokens, plan, dtype=torch.float32, forced=choices)
    free = run_backbone(engine.config, weights, tokens, plan, dtype=torch.float32)
    head = weights["lm_head.weight"].float()
    verdict = compare(seen.hidden.float() @ head.T, along.hidden @ head.T, ARITHMETIC)
    ties = {"largest_expert_regret": along.expert_regret.max().item(), "largest_block_regret": along.block_regret.max().item()}
    are_ties = ties["largest_expert_regret"] <= NEAR_TIE_EXPERTS and ties["largest_block_regret"] <= NEAR_TIE_BLOCKS
    forced = cosine_similarity(seen.hidden.float(), along.hidden, dim=-1)
    passed = verdict.passed and are_ties
    return {
        "passed": passed,
        **({} if passed else {"where": _where(forced, along, choices, engine), "buffer": engine.buffer_facts()}),
        "rows": len(tokens),
        "along_the_engines_choices": asdict(verdict),
        **ties,
        "rows_that_took_another_expert": share_that_differs(choices.experts, free.experts),
        "free": _spread(cosine_similarity(seen.hidden.float(), free.hidden, dim=-1)),
        "forced": _spread(forced),
    }


def _where(forced: Tensor, along: Trace, choices: Forced, engine: Engine) -> dict[str, Any]:
    """What tells a fault of blocks from one of experts or of arithmetic, and where it begins."""
    all_chosen = engine.config.topk_blocks * engine.config.block_size
    bad = (forced < ARITHMETIC.least_cosine).nonzero()[:, 0].tolist()
    last = choices.blocks[0][:, -1].nonzero()
    return {
        "bad_rows": len(bad),
        "first_bad_rows": bad[:4],
        "least_while_all_blocks_are_chosen": forced[:all_chosen].min().item(),
        "rows_with_expert_regret": int((along.expert_regret > NEAR_TIE_EXPERTS).sum()),
        "rows_with_block_regret": int((along.block_regret > NEAR_TIE_BLOCKS).sum()),
        "first_rows_with_block_regret": (along.block_regret > NEAR_TIE_BLOCKS).nonzero()[:4, 0].tolist(),
        "last_row_chose_in_layer_0": [last[last[:, 0] == head, 1].tolist() for head in range(2)],
        "last_row_experts_in_layer_0": choices.experts[0][-1].tolist(),
    }


def _spread(values: Tensor) -> dict[str, float]:
    return {"least": values.min().item(), "p01": values.quantile(0.01).item(), "median": values.median().item()}
