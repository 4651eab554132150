"""Who waits for admission, and how evenly: by the size of sessions, and over all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from replays.simulator.outcomes import Outcome

LEAST_SECONDS = 600.0


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index, (Σx)² ÷ (n·Σx²): 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def fairness(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Waits in front of the engine, seconds: `p50`, `p95`, `p99`, `longest`; `p99_smallest_tenth` and `p99_largest_tenth` of sessions by
    their longest prompt; and `jain` over sessions of the attained share of progress: of the time from a session's first turn to its last,
    that in which admission did not hold it back. Sessions that were there for less than `LEAST_SECONDS` are not in the index: it would say
    where the run cut them."""
    by_session: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_session[outcome.stream].append(outcome)
    if not by_session:
        return {}
    sessions = sorted(by_session.values(), key=lambda turns: max(turn.num_prompt_tokens for turn in turns))
    tenth = max(1, len(sessions) // 10)
    waits = [_wait(turn) for turns in sessions for turn in turns]
    attained = [share for turns in sessions if (share := _attained(turns)) is not None] or [1.0]
    p50, p95, p99 = np.percentile(waits, (50, 95, 99))
    index = jain(attained)
    assert index is not None
    return {
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "longest": max(waits),
        "p99_smallest_tenth": _p99(sessions[:tenth]),
        "p99_largest_tenth": _p99(sessions[-tenth:]),
        "jain": index,
    }


def _wait(turn: Outcome) -> float:
    return turn.granted - turn.asked


def _attained(turns: Sequence[Outcome]) -> float | None:
    seconds = max(turn.finished for turn in turns) - min(turn.asked for turn in turns)
    return 1 - sum(map(_wait, turns)) / seconds if seconds >= LEAST_SECONDS else None


def _p99(sessions: Iterable[Sequence[Outcome]]) -> float:
    return float(np.percentile([_wait(turn) for turns in sessions for turn in turns], 99))
