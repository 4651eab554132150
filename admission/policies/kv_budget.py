"""kv_budget: in order of arrival while the contexts of running turns fit in the cache, so that the engine need not preempt."""

from __future__ import annotations

from dataclasses import dataclass

from admission.policies.rule import BudgetParameters, BudgetRule, Conditions, Rule


@dataclass(frozen=True, slots=True)
class KvBudgetParameters(BudgetParameters):
    pass


def kv_budget(parameters: KvBudgetParameters, conditions: Conditions) -> Rule:
    return BudgetRule(parameters, conditions)
