"""The arms: what stands between the same sessions and the same engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.capacity.script import GAP_CAP_SECONDS, TIME_SCALE, TOKEN_SCALE


@dataclass(frozen=True, slots=True)
class Arm:
    """`plugin`: the engine orders by what it is told. `says_ends`: the client says when a session is over."""

    plugin: bool = False
    says_ends: bool = False
    policy: str = "class_hazard"
    """The plugin's."""
    tier_share: float = 0.0
    """Size of an exclusive tier behind the pool, as a share of the pool."""
    admission: Mapping[str, float] | None = field(default=None)
    """Parameters of working_set, whose gate is in front; None: every turn starts at once."""

    @property
    def engine(self) -> EngineKind:
        """The engine that it runs against."""
        return EngineKind(self.policy if self.plugin else None, self.tier_share)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Arms of one kind share an engine."""

    policy: str | None
    """Of the plugin; None: plain vLLM."""
    tier_share: float

    def __str__(self) -> str:
        return f"{self.policy or 'plain'}, tier {self.tier_share:g}"


def _working_set(alpha: float) -> dict[str, float]:
    """The defaults at this benchmark's scale of time and tokens."""
    return {
        "alpha": alpha,
        "tau_seconds": 1.1 * GAP_CAP_SECONDS / TIME_SCALE,
        "hold_seconds": 120.0 / TIME_SCALE,
        "ageing_tokens_per_second": 3000.0 * TIME_SCALE / TOKEN_SCALE,
        "horizon_seconds": 600.0 / TIME_SCALE,
        "quantum_tokens": 0.0,
    }


ARMS: dict[str, Arm] = {
    "plain": Arm(),
    "admission": Arm(says_ends=True, admission=_working_set(0.9)),
    "plugin_said": Arm(plugin=True, says_ends=True),
    "plugin_inferred": Arm(plugin=True),
    "plugin_inferred_admission": Arm(plugin=True, admission=_working_set(0.9)),
    "plugin_said_admission": Arm(plugin=True, says_ends=True, admission=_working_set(1.0)),
    "lru_tier": Arm(plugin=True, policy="lru", tier_share=0.25),
    "plugin_said_tier": Arm(plugin=True, says_ends=True, tier_share=0.25),
}
QUICK_ARMS = ("plain", "plugin_said", "plugin_inferred")

HAZARD_PARAMETERS = {"horizon_seconds": 150.0 / TIME_SCALE}
"""Of class_hazard, in the engine's time."""
