"""prefix_first: as kv_budget, but of those that wait the longest resident prefix first, where waiting counts as prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from admission.choice import Knob
from admission.policies.rule import BudgetParameters, BudgetRule, Conditions, Rule, by_prefix


@dataclass(frozen=True, slots=True)
class PrefixFirstParameters(BudgetParameters):
    ageing_tokens_per_second: Annotated[float, Knob(1, 1_000_000, "of resident prefix that a second of waiting counts as", log=True)] = (
        3000.0
    )


def prefix_first(parameters: PrefixFirstParameters, conditions: Conditions) -> Rule:
    return BudgetRule(parameters, conditions, partial(by_prefix, tokens_per_second=parameters.ageing_tokens_per_second))
