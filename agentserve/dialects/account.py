"""The account of a turn as every dialect's usage shows it under `agentserve`. What is unknown is absent, not zero."""

from __future__ import annotations

from typing import Any

from agentserve.divergence import Divergence
from agentserve.heads import HeadBreak
from agentserve.plans import Outcome, Plan
from agentserve.sessions import TurnKind


def describe_divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    """Where a prompt left its history, as JSON."""
    if divergence is None:
        return None
    return {
        "difference": divergence.difference,
        "item": divergence.item,
        "item_kind": divergence.item_kind,
        "token": divergence.token,
        "lost_tokens": divergence.lost_tokens,
        "tools": divergence.tools,
    }


def describe_head_break(broken: HeadBreak | None) -> dict[str, Any] | None:
    """Where a new head left a known one, as JSON."""
    if broken is None:
        return None
    return {
        "line": broken.line,
        "tools": broken.tools,
        "shared_tokens": broken.shared_tokens,
        "broken_tokens": broken.broken_tokens,
        "rule": broken.rule,
    }


def account(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Session, kind of turn and hit figures, in tokens."""
    hits = outcome.hits
    if plan.kind is TurnKind.PASSED:
        return {"session_id": plan.session_id, "turn": plan.kind}
    figures = {
        "session_id": plan.session_id,
        "turn": plan.kind,
        "edited_message": plan.edited_message,
        "encoded_tokens": plan.num_encoded_tokens,
        "ceiling_tokens": hits.ceiling,
        "ceiling_block_tokens": hits.ceiling_blocks,
        "predicted_tokens": hits.predicted,
        "external_predicted_tokens": hits.external_predicted,
        "external_tokens": hits.external,
        "missed_tokens": hits.missed,
        "recomputed_tokens": hits.num_recomputed_tokens or None,
        "divergence": describe_divergence(plan.divergence),
        "head_break": describe_head_break(plan.head_break),
        "canonicalised": {rule: effect.count for rule, effect in plan.canonicalised.items()} or None,
    }
    return {name: value for name, value in figures.items() if value is not None}
