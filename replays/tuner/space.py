"""What the tuner may choose: policies and their parameters, read off the same tables that the server and the simulator build from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from admission.choice import Choice, Knob
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from replays.simulator.grid import BASELINE, GridError, PolicySpec
from replays.simulator.run import SimulationOptions

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

Value = TypeVar("Value")

ORACLE = "farthest_next_use"
"""The bound: what a policy that knows the future would do."""
PLAIN_ADMISSION = "fcfs"
_ADMISSION = "admission"
KEPT = frozenset({"cold_tokens", "quantum_tokens", "trim_step", "ageing_tokens_per_second", "tau_seconds", "tier_share"})
"""Parameters of admission that keep their defaults: promises to tenants, a controller of their own, what was measured to change nothing,
and the tier's share, as alpha scales its product."""
LONGEST_HOLD_SECONDS = 300.0
"""That a search may let a turn wait: the longer it may, the less is missed, and clients take a long wait for a hang."""
KNOWN_GOOD: Sequence[Mapping[str, float]] = (
    {"alpha": 1.0},
    {"hold_seconds": LONGEST_HOLD_SECONDS},
    {"alpha": 1.0, "hold_seconds": LONGEST_HOLD_SECONDS},
    {"alpha": 0.75, "hold_seconds": LONGEST_HOLD_SECONDS},
    {"alpha": 1.25, "hold_seconds": LONGEST_HOLD_SECONDS},
)
"""Parameters of admission that the documentation speaks for, and what lies around them; those that a policy lacks are left out."""
_SWITCH = 0.15
"""How often a step goes to other policies."""
_STEP = 0.15
"""Mean size of a step from a setting, as a share of a parameter's range."""


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
            _suggested(trial, policy, EVICTION_POLICIES[policy].knobs()),
            admission,
            _suggested(trial, f"{_ADMISSION}.{admission}", admission_knobs(admission)),
        )

    def first(self) -> list[dict[str, object]]:
        """The choices to begin with: every policy as it is by default, so that each has its place in the report."""
        pairs = [(policy, self.admissions[0]) for policy in self.policies]
        pairs += [(policy, admission) for policy in self._strongest() for admission in self.admissions[1:]]
        return [self._defaults(policy, admission) for policy, admission in pairs]

    def known_good(self, policy: str) -> list[dict[str, object]]:
        """The choices to go on with: admission as it is recommended, over this eviction policy."""
        tried: list[dict[str, object]] = []
        for admission in self.admissions[1:]:
            knobs = admission_knobs(admission)
            for values in KNOWN_GOOD:
                named = {f"{_ADMISSION}.{admission}.{name}": value for name, value in values.items() if name in knobs}
                choice = self._defaults(policy, admission) | named
                if named and choice not in tried:
                    tried.append(choice)
        return tried

    def _strongest(self) -> list[str]:
        """Those that admission is tried with at once: who knows the dead, or else the last."""
        return [policy for policy in self.policies if EVICTION_POLICIES[policy].reads_fates] or list(self.policies[-1:])

    def near(self, setting: Setting, random: Random) -> dict[str, object]:
        """A step from `setting`: some of its parameters moved; where it has none, and one time in four, beside other policies."""
        pair = setting.policy, setting.admission
        if random.random() < _SWITCH or not knobs_of(*pair):
            others = [(policy, admission) for policy in self.policies for admission in self.admissions if knobs_of(policy, admission)]
            pair = random.choice(others or [pair])
        knobs = knobs_of(*pair)
        known = _prefixed(setting.policy, setting.parameters) | _prefixed(f"{_ADMISSION}.{setting.admission}", setting.admission_parameters)
        values = self._defaults(*pair) | {name: known[name] for name in knobs if name in known}
        moved = [name for name in knobs if random.random() < 0.5] or list(knobs)[:1]
        return values | {name: _moved(knobs[name], values[name], random) for name in moved}

    def _defaults(self, policy: str, admission: str) -> dict[str, object]:
        values: dict[str, object] = {"policy": policy}
        if len(self.admissions) > 1:
            values[_ADMISSION] = admission
        values |= _default_values(policy, EVICTION_POLICIES[policy], EVICTION_POLICIES[policy].knobs())
        if admission != PLAIN_ADMISSION:
            values |= _default_values(f"{_ADMISSION}.{admission}", ADMISSION_POLICIES[admission], admission_knobs(admission))
        return values


def admission_knobs(name: str) -> dict[str, Knob]:
    """What may be chosen of an admission policy. First come, first served is what a plain engine does: it stays as it is."""
    if name == PLAIN_ADMISSION:
        return {}
    knobs = {key: knob for key, knob in ADMISSION_POLICIES[name].knobs().items() if key not in KEPT}
    if "hold_seconds" in knobs:
        knobs["hold_seconds"] = replace(knobs["hold_seconds"], high=LONGEST_HOLD_SECONDS)
    return knobs


def knobs_of(policy: str, admission: str) -> dict[str, Knob]:
    """What may be chosen of both, by the names that a trial has for it."""
    return _prefixed(policy, EVICTION_POLICIES[policy].knobs()) | _prefixed(f"{_ADMISSION}.{admission}", admission_knobs(admission))


def _prefixed(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _moved(knob: Knob, value: object, random: Random) -> float:
    """`value` some steps away, inside its range."""
    assert isinstance(value, float)
    is_log = knob.log and knob.low > 0
    low, high, here = (log(knob.low), log(knob.high), log(value)) if is_log else (knob.low, knob.high, value)
    there = here + random.gauss(0, _STEP) * (high - low)
    return min(max(exp(there) if is_log else there, knob.low), knob.high)


def _suggested(trial: Trial, prefix: str, knobs: Mapping[str, Knob]) -> dict[str, float]:
    rows = knobs.items()
    return {name: trial.suggest_float(f"{prefix}.{name}", row.low, row.high, log=row.log and row.low > 0) for name, row in rows}


def _default_values(prefix: str, choice: Choice, knobs: Mapping[str, Knob]) -> dict[str, object]:
    defaults: Any = choice.parameters()
    return {f"{prefix}.{name}": float(getattr(defaults, name)) for name in knobs}


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
