"""Which policies are in force, and their change while turns run and wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from admission.choice import Choice, PolicyParameterError
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from admission.policies.choice import AdmissionChoice
from admission.requests import Limits, Outlook
from agentserve.engines.hints import EngineHints
from agentserve.errors import EngineUnavailable, InvalidRequest, SetupError
from agentserve.waiting import WaitingRoom


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

    def __init__(self, room: WaitingRoom, limits: Limits, outlook: Outlook, hints: EngineHints, admission: Chosen) -> None:
        self._room = room
        self._limits = limits
        self._outlook = outlook
        self._hints = hints
        self.admission = admission

    def change_admission(self, picked: Chosen) -> None:
        """Go on by another admission policy: no ticket is lost, and who waits goes on waiting. Raises InvalidRequest."""
        try:
            rule = admission_choice(picked).rule(self._limits, picked.parameters, self._outlook)
        except PolicyParameterError as error:
            raise InvalidRequest(f"admission policy {picked.policy!r}: {error}", param="admission") from error
        self._room.change_rule(rule)
        self.admission = picked

    async def change_eviction(self, picked: Chosen) -> None:
        """Let the engine's plugin go on by another eviction policy. Raises InvalidRequest, or EngineUnavailable without a plugin."""
        self.check_eviction(picked)
        if await self._hints.switch(picked.policy, picked.parameters) is None:
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
        """As JSON; what is not known is null."""
        state = self._room.state()
        return {
            "policy": self.admission.policy,
            "parameters": parameters_of(ADMISSION_POLICIES[self.admission.policy], self.admission.parameters),
            "budget_tokens": None if state.budget_tokens is None else int(state.budget_tokens),
            "in_use_tokens": state.in_use_tokens,
            "running_tokens": state.running_tokens,
            "target_share": state.target_share,
            "members": state.num_members,
            "cold_prefills": state.num_cold,
            "waiting_turns": self._room.num_waiting,
        }

    async def describe_eviction(self) -> dict[str, Any] | None:
        """What the engine's plugin says; None without one."""
        state = await self._hints.state()
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
