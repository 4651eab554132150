"""fcfs: first come, first served, as vLLM does; charges are booked but decide nothing, the engine queues and preempts by itself."""

from __future__ import annotations

from dataclasses import dataclass

from admission.policies.rule import ColdParameters, Conditions, OpenRule, Rule


@dataclass(frozen=True, slots=True)
class FcfsParameters(ColdParameters):
    pass


def fcfs(parameters: FcfsParameters, conditions: Conditions) -> Rule:
    rule = OpenRule()
    rule.cold_tokens = parameters.cold_tokens
    return rule
