"""The account of a turn as every dialect's usage shows it under `agentserve`. What is unknown is absent, not zero."""

from __future__ import annotations

from typing import Any

from agentserve.turns import Outcome, Plan


def account(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Session, kind of turn and hit figures, in tokens."""
    hits = outcome.hits
    figures = {
        "session_id": plan.session_id,
        "turn": plan.kind,
        "encoded_tokens": plan.num_encoded_tokens,
        "ceiling_tokens": hits.ceiling,
        "ceiling_block_tokens": hits.ceiling_blocks,
        "predicted_tokens": hits.predicted,
        "external_predicted_tokens": hits.external_predicted,
        "external_tokens": hits.external,
        "missed_tokens": hits.missed,
        "canonicalised": {rule: effect.count for rule, effect in plan.canonicalised.items()} or None,
    }
    return {name: value for name, value in figures.items() if value is not None}
