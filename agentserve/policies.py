"""Which policies are in force, and their change while turns run and wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from admission.choice import Choice, PolicyParameterError
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from admission.policies.choice import AdmissionChoice
from admission.requests import Outlook
from agentserve.errors import EngineUnavailable, InvalidRequest, SetupError
from agentserve.replicas import Replicas


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy by name, and those of its parameters that are not the default."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)


def chosen(policy: str, parameters: Iterable[str]) -> Chosen:
    """What the settings name; `parameters` as NAME=VALUE. Raises SetupError."""
    values = {}
    for text in parameters:
        name, is_set, value = text.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            is_set = ""
        if not is_set:
            raise SetupError(f"a policy's parameter is NAME=VALUE with a number for VALUE, not {text!r}")
    picked = Chosen(policy, values)
    try:
        admission_choice(picked)
    except (InvalidRequest, PolicyParameterError) as error:
        raise SetupError(f"--admission-policy, --admission-parameters: {error}") from error
    return picked


def admission_choice(picked: Chosen) -> AdmissionChoice:
    """The row of the table, its parameters checked. Raises InvalidRequest, PolicyParameterError."""
    choice = ADMISSION_POLICIES.get(picked.policy)
    if choice is None:
        raise InvalidRequest(f"no admission policy {picked.policy!r}; there are: {', '.join(ADMISSION_POLICIES)}", param="admission")
    choice.chosen(picked.parameters)
    return choice


class Policies:
    """One per server."""

    def __init__(self, replicas: Replicas, outlook: Outlook, admission: Chosen) -> None:
        self._replicas = replicas
        self._outlook = outlook
        self.admission = admission

    def check_admission(self, picked: Chosen) -> AdmissionChoice:
        """Raises InvalidRequest where there is no such policy, or it has no such parameters."""
        try:
            return admission_choice(picked)
        except PolicyParameterError as error:
            raise InvalidRequest(f"admission policy {picked.policy!r}: {error}", param="admission") from error

    def change_admission(self, picked: Chosen) -> None:
        """Go on by another admission policy: no ticket is lost, and who waits goes on waiting. Raises InvalidRequest."""
        choice = self.check_admission(picked)
        for replica in self._replicas:
            replica.room.change_rule(choice.rule(replica.room.limits, picked.parameters, self._outlook))
        self.admission = picked

    async def change_eviction(self, picked: Chosen) -> None:
        """Let the engines' plugins go on by another eviction policy. Raises InvalidRequest, or EngineUnavailable without a plugin."""
        self.check_eviction(picked)
        if None in [await replica.hints.switch(picked.policy, picked.parameters) for replica in self._replicas]:
            raise EngineUnavailable("the engine has no plugin that takes an eviction policy, or it did not take this one")

    @staticmethod
    def check_eviction(picked: Chosen) -> None:
        """Raises InvalidRequest where an engine cannot have it."""
        choice = EVICTION_POLICIES.get(picked.policy)
        usable = [name for name, row in EVICTION_POLICIES.items() if not row.needs_future]
        if choice is None or choice.needs_future:
            raise InvalidRequest(f"no eviction policy {picked.policy!r} for an engine; there are: {', '.join(usable)}", param="eviction")
        try:
            choice.chosen(picked.parameters)
        except PolicyParameterError as error:
            raise InvalidRequest(f"eviction policy {picked.policy!r}: {error}", param="eviction") from error

    def describe_admission(self) -> dict[str, Any]:
        """As JSON, sums over the engines; what is not known is null."""
        states = [replica.room.state() for replica in self._replicas]
        budgets = [state.budget_tokens for state in states if state.budget_tokens is not None]
        return {
            "policy": self.admission.policy,
            "parameters": parameters_of(ADMISSION_POLICIES[self.admission.policy], self.admission.parameters),
            "budget_tokens": int(sum(budgets)) if len(budgets) == len(states) else None,
            "in_use_tokens": sum(state.in_use_tokens for state in states),
            "running_tokens": sum(state.running_tokens for state in states),
            "target_share": states[0].target_share,
            "members": sum(state.num_members for state in states),
            "cold_prefills": sum(state.num_cold for state in states),
            "waiting_turns": self._replicas.num_waiting,
        }

    async def describe_eviction(self) -> dict[str, Any] | None:
        """What the plugin of the first engine says; None without one."""
        state = await self._replicas.first.hints.state()
        if state is None:
            return None
        shown = {"policy": state.policy, "parameters": dict(state.parameters)}
        return {**shown, "is_ordering": state.is_ordering, "off_because": state.off_because}


def parameters_of(choice: Choice, values: Mapping[str, float]) -> dict[str, float]:
    """All parameters of a policy: the defaults, and `values`."""
    defaults = choice.parameters()
    return {name: values.get(name, getattr(defaults, name)) for name in choice.knobs()}


def describe_choices(table: Mapping[str, Choice]) -> dict[str, Any]:
    """A table of policies as JSON: what each does, and its parameters."""
    shown = {}
    for name, choice in table.items():
        defaults, knobs = parameters_of(choice, {}), choice.knobs()
        rows = {knob: {"default": defaults[knob], "low": row.low, "high": row.high, "about": row.about} for knob, row in knobs.items()}
        shown[name] = {"about": choice.about, "parameters": rows}
    return shown
