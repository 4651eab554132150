"""What a simulation writes down of each request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Outcome:
    """One request that ended. Times are simulated seconds, counts tokens unless they say blocks."""

    stream: str
    warmup: bool
    asked: float
    """When the client sent it."""
    granted: float
    """When it was admitted."""
    started: float
    """When it reached the engine."""
    scheduled: float
    first_token: float
    finished: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    """In the GPU's cache."""
    num_external_tokens: int
    """Loaded from a tier."""
    num_resident_tokens: int
    """Resident when it was scheduled; the last-block rule of speculative decoding may leave the last block of it unused."""
    num_computed_before_tokens: int
    """Whole blocks that had been computed at some time."""
    num_ceiling_tokens: int
    """Whole blocks that stood in an earlier prompt, at most all but one token."""
    num_theoretical_blocks: int
    """AgentX's own figure, in blocks of the trace."""
    num_trace_blocks: int
    num_preemptions: int
    replica: int

    @property
    def missed(self) -> dict[str, int]:
        """Prompt tokens that were computed, by cause; adds up to all of them."""
        found = self.num_hit_tokens + self.num_external_tokens
        last_block = (
            max(0, min(self.num_resident_tokens, self.num_ceiling_tokens) - self.num_hit_tokens) if found < self.num_ceiling_tokens else 0
        )
        last_block = min(last_block, self.num_ceiling_tokens - found) if last_block else 0
        known = min(self.num_computed_before_tokens, self.num_ceiling_tokens)
        evicted = max(0, known - found - last_block)
        in_flight = max(0, self.num_ceiling_tokens - found - last_block - evicted)
        new = self.num_prompt_tokens - found - last_block - evicted - in_flight
        return {"new": new, "evicted": evicted, "in_flight": in_flight, "speculation": last_block}
