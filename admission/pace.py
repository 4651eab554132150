"""How soon a session is likely to be back, as a level within its return class: how long it took before, and how full its context is.

Sessions differ more than their turns do: one whose person reads everything is slow after each turn, one that runs unattended is brisk. A
logistic score of a few facts is cut into three levels. A context near the model's limit is told apart, because what follows there is a
compaction or the end, and neither needs the old tokens. Weights and cuts come with the prior (`admission.return_prior`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from admission.return_prior import PACE_CUTS, PACE_WEIGHTS

LEVELS = ("brisk", "steady", "slow")
FULL_SHARE = 0.85
"""Of the model's context; beyond it a session is `full`."""

_REMEMBERED_GAPS = 32
_LONG_GAP_SECONDS = 300.0
_LEAST_GAPS = 3


class Pace:
    """What is remembered of one session: its latest idle times and how many turns it took since a person spoke. Times are in seconds as
    recorded; where a replay runs faster, they are scaled by the caller."""

    __slots__ = ("_gaps", "_turns_since_user")

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_GAPS)
        self._turns_since_user = 0

    def came_back(self, idle_seconds: float) -> None:
        """After a turn the session was idle for so long. Changes state."""
        self._gaps.append(min(idle_seconds, _LONG_GAP_SECONDS))

    def turn_ended(self, *, from_user: bool) -> None:
        """`from_user`: the turn answered a person, not only tools. Changes state."""
        self._turns_since_user = 0 if from_user else self._turns_since_user + 1

    def facts(self, num_output_tokens: int) -> tuple[float, ...]:
        """What the score weighs, the constant first: log output, log turns since the person, log mean gap, log long gap, whether known."""
        known = len(self._gaps) >= _LEAST_GAPS
        gaps = sorted(self._gaps) if known else [0.0]
        mean, long = sum(gaps) / len(gaps), gaps[int(0.9 * len(gaps))]
        return (1.0, math.log1p(num_output_tokens), math.log1p(self._turns_since_user), math.log1p(mean), math.log1p(long), float(known))

    def refine(self, return_class: str, num_output_tokens: int, context_share: float | None = None) -> str:
        """The class with its level, and with `full` when the context is. `context_share`: prompt and output of the model's limit."""
        full = ":full" if context_share is not None and context_share > FULL_SHARE else ""
        cuts = PACE_CUTS.get(return_class)
        if cuts is None:
            return return_class + full
        return f"{return_class}:{LEVELS[level(score(self.facts(num_output_tokens), PACE_WEIGHTS[return_class]), cuts)]}{full}"


def score(facts: Sequence[float], weights: Sequence[float]) -> float:
    """Log odds that it takes longer than a minute, or never comes."""
    return sum(fact * weight for fact, weight in zip(facts, weights, strict=True))


def level(value: float, cuts: Sequence[float]) -> int:
    """How many of the two cuts the score has passed."""
    return sum(value > cut for cut in cuts)
