"""A step of the simulated engine, what work is in it, and what is counted over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replays.simulator.cost import StepWork
from replays.simulator.requests import EngineRequest


@dataclass(slots=True)
class Step:
    """What is on the device: first step's tokens, and how many pure decode steps follow it (`num_steps` in all)."""

    started: float
    scheduled: list[tuple[EngineRequest, int]]
    first_seconds: float
    growth_seconds: float = 0.0
    """By how much each further step is longer than the one before it."""
    num_steps: int = 1

    def seconds(self, num_steps: int) -> float:
        return num_steps * self.first_seconds + num_steps * (num_steps - 1) / 2 * self.growth_seconds

    @property
    def ends(self) -> float:
        return self.started + self.seconds(self.num_steps)

    def cut(self, now: float) -> None:
        """No further fused step starts after `now`."""
        elapsed = now - self.started
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= elapsed:
                high = middle
            else:
                low = middle + 1
        self.num_steps = low


@dataclass(slots=True)
class EngineCounters:
    num_steps: int = 0
    num_preemptions: int = 0
    busy_seconds: float = 0.0
    num_computed_tokens: int = 0
    peak_usage: float = 0.0
    usage_seconds: float = 0.0


def work_of(scheduled: Sequence[tuple[EngineRequest, int]]) -> StepWork:
    """The work of a step that computes so many tokens of each request."""
    num_decode = decode_context = num_drafts = num_prefills = num_prefill = prefill_context = 0
    for request, num_new in scheduled:
        if request.num_computed_tokens >= request.num_prompt_tokens and request.num_generated:
            num_decode += 1
            num_drafts += num_new - 1
            decode_context += request.num_computed_tokens
        else:
            num_prefills += 1
            num_prefill += num_new
            prefill_context += num_new * (2 * request.num_computed_tokens + num_new) // 2
    return StepWork(num_decode, decode_context, num_prefill, prefill_context, num_drafts, num_prefills)
