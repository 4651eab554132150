"""A request at the simulated engine, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from replays.simulator.chains import Path
from replays.simulator.pool import Use

MILLI = 1000


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request and where it stands. Times are simulated seconds; token counts as in vLLM."""

    id: int
    path: Path
    num_prompt_tokens: int
    num_output_tokens: int
    use: Use
    arrived: float = 0.0
    num_tokens: int = 0
    """Prompt and what was generated so far."""
    num_computed_tokens: int = 0
    num_blocks: int = 0
    """Physical blocks that it uses."""
    num_hashed: int = 0
    """Of these, how many have a hash."""
    num_drafts: int = 0
    milli_credit: int = 0
    """Accepted tokens owed, in thousandths, so that any acceptance length is met exactly in the mean."""
    num_preemptions: int = 0
    num_hit_blocks: int = 0
    """Of the first scheduling; what a preempted request finds again is not counted."""
    num_resident_blocks: int = 0
    num_computed_before: int = 0
    """Blocks of its prompt that some request had computed when it was scheduled first."""
    num_external_tokens: int = 0
    is_loaded: bool = False
    """Its blocks came from elsewhere and wait for it, `num_computed_tokens` of them."""
    keeps_blocks: bool = False
    """Others read its blocks after it has ended: they are held until `Engine.release`."""
    aborted: bool = False
    """Its client is gone: it ends with the step that is under way."""
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def accept(self, num_steps: int, milli_length: int) -> int:
        """The tokens that so many decode steps yield, each `milli_length` thousandths on average. Changes state."""
        self.milli_credit += num_steps * milli_length
        num_out, self.milli_credit = divmod(self.milli_credit, MILLI)
        return num_out

    def num_steps_left(self, milli_length: int) -> int:
        """Decode steps until it ends."""
        owed = (self.num_output_tokens + self.num_prompt_tokens - self.num_tokens) * MILLI - self.milli_credit
        return -(-owed // milli_length)
