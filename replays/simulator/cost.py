"""How long a step takes: what a step's work is, and the linear model T = a0 + a1·n_decode + a2·ΣL_decode + a3·n_prefill + a4·Σ n_prefill·L.

The linear model is what `replays calibrate` fits to an engine that it can measure. `replays.simulator.geometry` predicts MiniMax-M3 from
its shapes and a device's limits. Both answer the same two questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from replays.simulator.options import EngineOptions

if TYPE_CHECKING:
    from replays.simulator.handover import Read


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step, in sequences and tokens."""

    num_decode: int
    """Sequences that decode."""
    decode_context: int
    """Sum of their contexts."""
    num_prefill: int
    """Prefill tokens."""
    prefill_context: int
    """Sum over prefill tokens of what each looks at: all before its chunk, and half of the chunk."""
    num_drafts: int = 0
    """Draft tokens that are verified, of all sequences."""
    num_prefills: int = 1
    """Sequences that prefill; their number weighs little."""


class StepCost(Protocol):
    """Seconds of a step."""

    def step_seconds(self, work: StepWork) -> float: ...

    def growth_seconds(self, num_decode: int) -> float:
        """By how much a step gets longer when each of its sequences is one token longer."""
        ...


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
        return self.per_context_token * num_decode


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine on one machine. Where its figures come from is in `replays.simulator.profiles`."""

    name: str
    capacity_tokens: int
    engine: EngineOptions
    cost: StepCost
    request_seconds: float = 0.0
    """Of a request outside the engine's steps, before it is queued."""
    token_seconds: float = 0.0
    """The same, for each prompt token."""
    busy_seconds: float = 0.0
    """The same, for each request that the engine has already: its HTTP server puts their tokens out meanwhile."""
    wake_seconds: float = 0.0
    """The same, where the engine has none: its processes sleep."""
    num_gpus: int = 1
    """Of one replica: all of its prefill and decode engines."""
    prefill: Profile | None = None
    """Prefill and decode apart: this is what decodes, once, and `num_prefill` of the other prefill for it."""
    num_prefill: int = 0
    reads: tuple[Read, ...] = ()
    kv_bytes_per_token: int = 0
    """On one rank; 0 where it is not known."""
    about: str = ""

    def front_seconds(self, num_prompt_tokens: int, num_requests: int) -> float:
        """Of a request outside the engine's steps, while the engine has `num_requests` others."""
        others = self.busy_seconds * num_requests if num_requests else self.wake_seconds
        return self.request_seconds + self.token_seconds * num_prompt_tokens + others
