"""What the tuner may choose: policies and their parameters, read off the same tables that the server and the simulator build from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from admission.eviction import EVICTION_POLICIES
from replays.simulator.grid import BASELINE, GridError, PolicySpec
from replays.simulator.run import SimulationOptions

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

ORACLE = "farthest_next_use"
"""The bound: what a policy that knows the future would do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice. Parameters that are not named have their defaults."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(PolicySpec(self.policy, {name: float(f"{value:.4g}") for name, value in self.parameters.items()}))

    def on(self, base: SimulationOptions) -> SimulationOptions:
        """`base` with this choice."""
        return replace(base, policy=self.policy, parameters=dict(self.parameters))


@dataclass(frozen=True, slots=True)
class Space:
    """Eviction policies that may be chosen, by name."""

    policies: Sequence[str]

    def suggest(self, trial: Trial) -> Setting:
        """A choice for a trial. A parameter belongs to its policy: those of others are not asked for."""
        name = trial.suggest_categorical("policy", list(self.policies))
        values = {}
        for knob, row in EVICTION_POLICIES[name].knobs().items():
            values[knob] = trial.suggest_float(f"{name}.{knob}", row.low, row.high, log=row.log)
        return Setting(name, values)

    def first(self) -> list[dict[str, object]]:
        """The choices to begin with: every policy as it is by default, so that each has its place in the report."""
        found: list[dict[str, object]] = []
        for name in self.policies:
            choice = EVICTION_POLICIES[name]
            defaults = choice.parameters()
            found.append({"policy": name} | {f"{name}.{knob}": float(getattr(defaults, knob)) for knob in choice.knobs()})
        return found


def setting_of(trial: FrozenTrial) -> Setting:
    """What a trial chose."""
    name = trial.params["policy"]
    prefix = f"{name}."
    values = {key.removeprefix(prefix): value for key, value in trial.params.items() if key.startswith(prefix)}
    return Setting(name, values)


def space_of(policies: Sequence[str]) -> Space:
    """The space over `policies`; none: all that can run on an engine. Raises GridError for a name that is not in the table."""
    for name in policies:
        if name not in EVICTION_POLICIES:
            raise GridError(f"no eviction policy {name!r}; there are: {', '.join(EVICTION_POLICIES)}")
        if EVICTION_POLICIES[name].needs_future:
            raise GridError(f"{name} needs the future; it is in the report as the bound, and cannot be tuned")
    chosen = policies or [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future]
    return Space([BASELINE, *(name for name in chosen if name != BASELINE)])
