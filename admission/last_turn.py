"""Whether a turn was its session's last: a score of a dozen facts, in levels that multiply the odds that nobody comes back.

Silence is the one strong sign of an end. What is known when the turn ends says how strong: after long answers, with a large context or one
that grows, after a person's turn, a pause is an end more often than its class says; in a session that has just begun, or has just paused,
less often. The factors of the levels are the odds of an end among sessions that were idle for a minute, over what their classes expect.
Weights, cuts and factors come with the prior (`admission.return_prior`). A level is no class: its idle times are those of its class, and
only the share that never ends differs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from admission.return_prior import LAST_TURN_CUTS, LAST_TURN_WEIGHTS

NUM_LEVELS = 8

_FULL_SHARE = 0.85
_LATEST_OUTPUTS = 8
_LONG_GAP_SECONDS = 300.0
_USUAL_TOKENS = 100_000
_YOUNG_TURNS = 2


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended."""

    ends_turn: bool
    """The model stopped by itself and called no tool."""
    tools: tuple[str, ...] = ()
    """Names of the tools that it called."""
    from_user: bool = False
    """It answered a person, not only tools."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Course:
    """What is remembered of one session's turns. Times are in seconds as recorded; where a replay runs faster, the caller scales them."""

    __slots__ = ("_end", "_gap", "_growth", "_num_asked", "_num_stops", "_num_turns", "_outputs", "_prompt_tokens")

    def __init__(self) -> None:
        self._end = TurnEnd(ends_turn=False)
        self._gap: float | None = None
        self._growth = self._prompt_tokens = 0
        self._num_turns = self._num_stops = self._num_asked = 0
        self._outputs: tuple[int, ...] = ()

    def came_back(self, idle_seconds: float) -> None:
        """After a turn the session was idle for so long. Changes state."""
        self._gap = min(idle_seconds, _LONG_GAP_SECONDS)

    def turn_ended(self, end: TurnEnd) -> None:
        """Changes state; of a turn without a known prompt, one that failed, only that it was the last."""
        self._end = end
        if not end.num_prompt_tokens:
            return
        self._growth = end.num_prompt_tokens - self._prompt_tokens if self._num_turns else 0
        self._prompt_tokens = end.num_prompt_tokens
        self._num_turns += 1
        self._num_stops += end.ends_turn
        self._num_asked += end.from_user
        self._outputs = (*self._outputs[1 - _LATEST_OUTPUTS :], end.num_output_tokens)

    def facts(self, context_share: float | None) -> tuple[float, ...]:
        """What the score weighs, the constant first. `context_share`: prompt and output of the model's limit, where that is known."""
        end = self._end
        return (
            1.0,
            end.ends_turn,
            not end.tools and not end.ends_turn,
            math.log1p(sum(self._outputs) / max(len(self._outputs), 1)),
            context_share is not None and context_share > _FULL_SHARE,
            self._num_turns <= _YOUNG_TURNS,
            -1.0 if self._gap is None else math.log1p(self._gap),
            math.log1p(max(self._growth, 0) / 1000),
            math.log1p(end.num_output_tokens),
            self._num_stops / max(self._num_turns, 1),
            math.log(max(end.num_prompt_tokens + end.num_output_tokens, 100) / _USUAL_TOKENS),
            math.log1p(self._num_turns),
            math.log1p(self._num_asked),
        )

    def level(self, context_share: float | None) -> int | None:
        """0: likely to be back, to `NUM_LEVELS` − 1; None where the length of the prompt is not known."""
        if not self._end.num_prompt_tokens:
            return None
        return level(self.facts(context_share))


def level(facts: tuple[float, ...]) -> int:
    """How many of the cuts the facts' score has passed."""
    return bisect_left(LAST_TURN_CUTS, sum(fact * weight for fact, weight in zip(facts, LAST_TURN_WEIGHTS, strict=True)))
