"""How long a step takes: T = a0 + a1·n_decode + a2·ΣL_decode + a3·n_prefill + a4·Σ n_prefill·L_before."""

from __future__ import annotations

from dataclasses import dataclass

from replays.simulator.options import EngineOptions


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step: sequences that decode and the sum of their contexts (tokens), prefill tokens and the sum of each times its context."""

    num_decode: int
    decode_context: int
    num_prefill: int
    prefill_context: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds, per step, sequence, context token, prefill token and product of tokens."""

    step: float
    per_sequence: float
    per_context_token: float
    per_prefill_token: float
    per_prefill_product: float = 0.0

    def step_seconds(self, work: StepWork) -> float:
        return (
            self.step
            + self.per_sequence * work.num_decode
            + self.per_context_token * work.decode_context
            + self.per_prefill_token * work.num_prefill
            + self.per_prefill_product * work.prefill_context
        )

    def growth_seconds(self, num_decode: int) -> float:
        """By how much a step gets longer when each of its sequences is one token longer."""
        return self.per_context_token * num_decode


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine on one machine."""

    name: str
    capacity_tokens: int
    engine: EngineOptions
    cost: CostModel
    request_seconds: float = 0.0
    token_seconds: float = 0.0


PROFILES: dict[str, Profile] = {
    "light": Profile("light", 4_812_800, EngineOptions(num_blocks=0), CostModel(0.002, 0.0, 0.0, 1 / 70_000)),
    "nominal": Profile("nominal", 6_264_960, EngineOptions(num_blocks=0), CostModel(0.02, 0.0, 0.0, 1 / 25_000)),
}
"""By name. `nominal` is no machine: 25,000 prefill tokens and 50 steps a second, fitted to nothing. It compares policies, not speeds.
`light` is the embedded CPU engine in a replay of a 64th of the tokens at 15 times the speed, in the trace's own seconds and tokens: so fast
that next to nothing is pinned, and what sessions leave idle decides."""
