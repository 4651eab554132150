"""`python -m replays.session_ends TRACES`: how well "will not return" is inferred, on the sessions that no fit has seen.

Each idle time of a held-back session is one case: declared dead when its chance of a return falls below a threshold, wrongly if the session
comes back after that. Printed for plain return classes, for those refined by pace and fullness, and for these at the level of their last
turn, with the calibration of the first two and of the levels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from admission.returns import ReturnModel
from replays.return_prior import CONTEXT_TOKENS, LONG_SECONDS, Idle, distinct, held_back, idle_times, within
from replays.traces import Session, TraceSet

CHANCES = (0.7, 0.5, 0.3, 0.2, 0.1)
SHARES = (0.1, 0.5, 0.9, 0.97, 0.99)
SOON_SECONDS = (300.0, 1800.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Score:
    """Of one threshold. Shares are None where there is nothing to divide by."""

    num_idle: int
    num_never: int
    num_declared: int
    num_right: int
    num_found_within: tuple[int, ...]
    """Of the sessions that never return, those declared dead within each of `SOON_SECONDS`."""

    @property
    def precision(self) -> float | None:
        return self.num_right / self.num_declared if self.num_declared else None

    def recall(self, position: int) -> float | None:
        return self.num_found_within[position] / self.num_never if self.num_never else None


def score(cases: Iterable[tuple[str, float | None]], model: ReturnModel, chance: float) -> Score:
    """`cases`: (return class, seconds until the return or None)."""
    num_idle = num_never = num_declared = num_right = 0
    found = [0] * len(SOON_SECONDS)
    for name, gap in cases:
        declared_at = model.idle_until_hopeless(name, chance)
        num_idle += 1
        num_never += gap is None
        if gap is None or gap > declared_at:
            num_declared += declared_at < float("inf")
            num_right += gap is None and declared_at < float("inf")
        if gap is None:
            found = [count + (declared_at <= soon) for count, soon in zip(found, SOON_SECONDS, strict=True)]
    return Score(num_idle, num_never, num_declared, num_right, tuple(found))


def held_back_idles(sessions: Iterable[Session]) -> Iterator[Idle]:
    for session in distinct(sessions):
        if held_back(session):
            for stream in session.streams:
                yield from idle_times(within(stream, CONTEXT_TOKENS))


def calibration(cases: Iterable[tuple[str, float | None]], model: ReturnModel) -> str:
    """By class: share of the returns that came within each predicted quantile, and the share that never came, predicted and actual."""
    by_class: dict[str, list[float | None]] = {}
    for name, gap in cases:
        by_class.setdefault(name, []).append(gap)
    lines = [f"{'class':26} {'returns':>8} " + " ".join(f"{100 * share:5.0f} %" for share in SHARES) + "  never: predicted, actual"]
    for name, gaps in sorted(by_class.items()):
        returns = [gap for gap in gaps if gap is not None]
        within_share = [sum(gap <= model.quantile(name, share) for gap in returns) / max(len(returns), 1) for share in SHARES]
        never = f"{_percent(1 - model.alive(name, 0.0)):>10} {_percent(1 - len(returns) / len(gaps)):>10}"
        lines.append(f"{name:26} {len(returns):8} " + " ".join(f"{_percent(share):>7}" for share in within_share) + f" {never}")
    return "\n".join(lines)


def levels(idles: Iterable[Idle], model: ReturnModel) -> str:
    """By level: idle times that were longer than a minute, and the share of them that never ended, predicted and actual."""
    by_level: dict[int, list[Idle]] = {}
    for idle in idles:
        if idle.level is not None and (idle.gap_seconds is None or idle.gap_seconds > LONG_SECONDS):
            by_level.setdefault(idle.level, []).append(idle)
    lines = [f"{'level':5} {'idle for a minute':>17}  never: predicted, actual"]
    for level, found in sorted(by_level.items()):
        predicted = 1 - sum(model.alive(idle.level_class, LONG_SECONDS) for idle in found) / len(found)
        actual = sum(idle.gap_seconds is None for idle in found) / len(found)
        lines.append(f"{level:5} {len(found):17} {_percent(predicted):>17} {_percent(actual):>7}")
    return "\n".join(lines)


def report(idles: list[Idle]) -> str:
    model = ReturnModel()
    soon = " ".join(f"recall {seconds / 60:4.0f} min" for seconds in SOON_SECONDS)
    lines = [f"{'classes':10} {'chance':>6} {'declared':>9} {'precision':>9} {soon}"]
    kinds = {
        "plain": [(idle.return_class, idle.gap_seconds) for idle in idles],
        "refined": [(idle.pace_class, idle.gap_seconds) for idle in idles],
        "levels": [(idle.level_class, idle.gap_seconds) for idle in idles],
    }
    for kind, cases in kinds.items():
        for chance in CHANCES:
            result = score(cases, model, chance)
            recalls = " ".join(f"{_percent(result.recall(position)):>15}" for position in range(len(SOON_SECONDS)))
            lines.append(f"{kind:10} {chance:6.1f} {result.num_declared:9} {_percent(result.precision):>9} {recalls}")
    tables = [*(calibration(kinds[kind], model) for kind in ("plain", "refined")), levels(idles, model)]
    return "\n".join(
        [*lines, "", *tables, "", f"{len(idles)} idle times, {sum(idle.gap_seconds is None for idle in idles)} never ended", ""]
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.stdout.write(report(list(held_back_idles(TraceSet(Path(sys.argv[1])).checked()))))
