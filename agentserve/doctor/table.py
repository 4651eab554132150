"""The checks by name, in the order in which they are shown."""

from __future__ import annotations

from agentserve.doctor import hashing, model, offload, plugin, reporting, sizing
from agentserve.doctor.facts import Facts
from agentserve.doctor.verdict import Check, State, Verdict

DOCTOR_CHECKS: dict[str, Check] = {
    check.name: check for part in (reporting, sizing, hashing, offload, plugin, model) for check in part.CHECKS
}


def examine(facts: Facts) -> dict[str, Verdict]:
    """Each check's verdict, by name."""
    return {name: check.look(facts) for name, check in DOCTOR_CHECKS.items()}


def is_healthy(verdicts: dict[str, Verdict]) -> bool:
    """Whether nothing was found."""
    return all(verdict.state is not State.FOUND for verdict in verdicts.values())
