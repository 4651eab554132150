"""What the tuner may choose: policies and their parameters, read off the same tables that the server and the simulator build from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from admission.choice import Choice
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from replays.simulator.grid import BASELINE, GridError, PolicySpec
from replays.simulator.run import SimulationOptions

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

ORACLE = "farthest_next_use"
"""The bound: what a policy that knows the future would do."""
PLAIN_ADMISSION = "fcfs"
_ADMISSION = "admission"


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice. Parameters that are not named have their defaults."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    admission: str = PLAIN_ADMISSION
    admission_parameters: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        eviction = str(PolicySpec(self.policy, _short(self.parameters)))
        if self.admission == PLAIN_ADMISSION:
            return eviction
        return f"{eviction}, {PolicySpec(self.admission, _short(self.admission_parameters))}"

    def on(self, base: SimulationOptions) -> SimulationOptions:
        """`base` with this choice."""
        return replace(
            base,
            policy=self.policy,
            parameters=dict(self.parameters),
            admission=self.admission,
            admission_parameters=dict(self.admission_parameters),
        )


def _short(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Space:
    """Policies that may be chosen, by name."""

    policies: Sequence[str]
    admissions: Sequence[str] = (PLAIN_ADMISSION,)

    def suggest(self, trial: Trial) -> Setting:
        """A choice for a trial. A parameter belongs to its policy: those of others are not asked for."""
        policy = trial.suggest_categorical("policy", list(self.policies))
        admission = trial.suggest_categorical(_ADMISSION, list(self.admissions)) if len(self.admissions) > 1 else self.admissions[0]
        return Setting(
            policy,
            _suggested(trial, policy, EVICTION_POLICIES[policy]),
            admission,
            _admission_values(trial, admission),
        )

    def first(self) -> list[dict[str, object]]:
        """The choices to begin with: every policy as it is by default, so that each has its place in the report."""
        pairs = [(policy, self.admissions[0]) for policy in self.policies]
        pairs += [(policy, admission) for policy in self.policies[-1:] for admission in self.admissions[1:]]
        return [self._defaults(policy, admission) for policy, admission in pairs]

    def _defaults(self, policy: str, admission: str) -> dict[str, object]:
        values: dict[str, object] = {"policy": policy}
        if len(self.admissions) > 1:
            values[_ADMISSION] = admission
        values |= _default_values(policy, EVICTION_POLICIES[policy])
        if admission != PLAIN_ADMISSION:
            values |= _default_values(f"{_ADMISSION}.{admission}", ADMISSION_POLICIES[admission])
        return values


def _suggested(trial: Trial, prefix: str, choice: Choice) -> dict[str, float]:
    rows = choice.knobs().items()
    return {name: trial.suggest_float(f"{prefix}.{name}", row.low, row.high, log=row.log and row.low > 0) for name, row in rows}


def _admission_values(trial: Trial, name: str) -> dict[str, float]:
    """First come, first served is what a plain engine does: it stays as it is."""
    return {} if name == PLAIN_ADMISSION else _suggested(trial, f"{_ADMISSION}.{name}", ADMISSION_POLICIES[name])


def _default_values(prefix: str, choice: Choice) -> dict[str, object]:
    defaults: Any = choice.parameters()
    return {f"{prefix}.{name}": float(getattr(defaults, name)) for name in choice.knobs()}


def setting_of(trial: FrozenTrial, admissions: Sequence[str] = (PLAIN_ADMISSION,)) -> Setting:
    """What a trial chose."""
    policy, admission = trial.params["policy"], trial.params.get(_ADMISSION, admissions[0])
    return Setting(policy, _named(trial, policy), admission, _named(trial, f"{_ADMISSION}.{admission}"))


def _named(trial: FrozenTrial, prefix: str) -> dict[str, float]:
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in trial.params.items() if key.startswith(start)}


def space_of(policies: Sequence[str], admissions: Sequence[str] = ()) -> Space:
    """The space over these; no eviction policies: all that can run on an engine. Raises GridError for a name that is not in a table."""
    for name in policies:
        if name not in EVICTION_POLICIES:
            raise GridError(f"no eviction policy {name!r}; there are: {', '.join(EVICTION_POLICIES)}")
        if EVICTION_POLICIES[name].needs_future:
            raise GridError(f"{name} needs the future; it is in the report as the bound, and cannot be tuned")
    for name in admissions:
        if name not in ADMISSION_POLICIES:
            raise GridError(f"no admission policy {name!r}; there are: {', '.join(ADMISSION_POLICIES)}")
    chosen = policies or [name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future]
    others = [name for name in admissions if name != PLAIN_ADMISSION]
    return Space([BASELINE, *(name for name in chosen if name != BASELINE)], (PLAIN_ADMISSION, *others))
