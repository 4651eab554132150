"""The report of a search: what was tried, the front, the winner on held-back sessions, and where it does not help."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.console import Group
from rich.table import Table
from rich.text import Text

from replays.simulator.grid import DEFINITIONS, PointReport
from replays.simulator.tables import millions, number, percent
from replays.tuner.front import LEAST_THROUGHPUT, Tried, baseline, front, whole, winner
from replays.tuner.judge import Judged
from replays.tuner.space import Setting

TUNE_DEFINITIONS = DEFINITIONS | {
    "front": "trials that none beats in one of hit_rate, ttft_p95_seconds, requests_per_second, preemptions without losing in another",
    "winner": "the trial with the smallest gap, as a share of lru's on the same seeds and with the standard error of that share, of those "
    f"that keep {100 * LEAST_THROUGHPUT:g} % of lru's requests a second: among finalists, over the seeds of the search and fresh ones",
    "finalist": "the best of the search; with lru they were simulated once more, with fresh seeds (a point's figures are of the search)",
    "num_whole": "trials that were simulated with every seed; the others fell behind on the first, or cost throughput there",
    "judged": "the winner and lru on sessions that the search has not seen, with other seeds; the load of the search first",
    "closed_share": "1 − gap of the winner over gap of lru, on held-back sessions",
}


class Trial(Struct, kw_only=True):
    """One tried setting."""

    number: int
    policy: str
    parameters: dict[str, float]
    admission: str
    admission_parameters: dict[str, float]
    on_front: bool
    is_finalist: bool
    point: PointReport

    @property
    def name(self) -> str:
        return str(self.setting)

    @property
    def setting(self) -> Setting:
        return Setting(self.policy, self.parameters, self.admission, self.admission_parameters)


class TuneReport(Struct, kw_only=True):
    """All of a search. `winner` and `baseline` are numbers of trials."""

    traces: str
    num_tuned_sessions: int
    num_held_back_sessions: int
    profile: str
    streams: int
    capacity_tokens: int
    ends: str
    tier_tokens: int
    seeds: list[int]
    seconds: float
    """Wall time of this run of the search, the judgement included."""
    search_cpu_seconds: float
    """Of this run's simulations, the judgement left out."""
    num_whole: int
    trials: list[Trial]
    winner: int
    baseline: int
    judged: list[Judged]
    definitions: dict[str, str]

    @property
    def looked(self) -> str:
        """How much was simulated, in words."""
        return f"{len(self.trials)} settings, {self.num_whole} of them with all {len(self.seeds)} seeds"

    def trial(self, number: int) -> Trial:
        return next(trial for trial in self.trials if trial.number == number)


def trials_of(found: Sequence[Tried]) -> tuple[list[Trial], int, int]:
    """(trials, the winner's number, the baseline's)."""
    best = {one.number for one in front(found)}
    most = max(len(one.by_seed) for one in found)
    finalists = {one.number for one in found if len(one.by_seed) == most} if any(len(one.by_seed) < most for one in whole(found)) else set()
    trials = [
        Trial(
            number=one.number,
            policy=one.setting.policy,
            parameters=dict(one.setting.parameters),
            admission=one.setting.admission,
            admission_parameters=dict(one.setting.admission_parameters),
            on_front=one.number in best,
            is_finalist=one.number in finalists,
            point=one.point,
        )
        for one in found
    ]
    return trials, winner(found).number, baseline(found).number


def _plain(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def rows_of(report: TuneReport) -> list[list[str]]:
    """The front and the baseline as cells: setting, hit, gap, closed, TTFT p95, requests a second, preemptions."""
    base = report.trial(report.baseline).point
    shown = sorted(
        (trial for trial in report.trials if trial.on_front or trial.number in (report.baseline, report.winner)),
        key=lambda trial: -(trial.point.hit_rate or 0.0),
    )
    rows = []
    for trial in shown:
        point = trial.point
        mark = " ← winner" if trial.number == report.winner else ""
        closed = None if point.gap_points is None or not base.gap_points else 1 - point.gap_points / base.gap_points
        rows.append(
            [
                trial.name + mark,
                percent(point.hit_rate),
                number(point.gap_points),
                percent(closed, 0),
                number(point.ttft_p95_seconds),
                number(point.requests_per_second, 3),
                number(point.preemptions, 0),
            ]
        )
    return rows


FRONT_COLUMNS = ("setting", "hit %", "gap", "closed %", "TTFT p95 s", "req/s", "preempted")
JUDGED_COLUMNS = (
    "streams",
    "lru hit %",
    "winner hit %",
    "ceiling %",
    "lru gap",
    "closed %",
    "oracle closed %",
    "req/s ×",
    "TTFT p95 ×",
)


def judged_rows(report: TuneReport) -> list[list[str]]:
    """The judgement as cells, a row a load."""
    return [
        [
            str(row.streams),
            percent(row.baseline.hit_rate),
            percent(row.winner.hit_rate),
            percent(row.winner.ceiling),
            number(row.baseline.gap_points),
            percent(row.closed_share, 0),
            percent(row.oracle_closed_share, 0),
            number(row.throughput_ratio, 3),
            number(row.ttft_p95_ratio, 3),
        ]
        for row in report.judged
    ]


def verdict(report: TuneReport) -> str:
    """What the operator should know, in a sentence or two."""
    first, best = report.judged[0], report.trial(report.winner)
    if report.winner == report.baseline:
        return "Nothing that was tried beats lru at this load."
    if first.closed_share is None:
        return f"{best.name} is best, but on held-back sessions lru leaves no gap at {first.streams} streams: there is nothing to gain."
    loss = [row.streams for row in report.judged if row.throughput_ratio is not None and row.throughput_ratio < LEAST_THROUGHPUT]
    worse = [row.streams for row in report.judged if row.closed_share is not None and row.closed_share < 0]
    parts = [f"{best.name} closes {100 * first.closed_share:.0f} % of the gap that lru leaves on sessions that the search has not seen."]
    if worse:
        parts.append(f"It hits less than lru at {', '.join(map(str, worse))} streams.")
    if loss:
        parts.append(f"It costs throughput at {', '.join(map(str, loss))} streams.")
    return " ".join(parts)


def tune_tables(report: TuneReport) -> Group:
    """The report for a terminal."""
    chosen = _plain(*FRONT_COLUMNS)
    for row in rows_of(report):
        chosen.add_row(*row)
    judged = _plain(*JUDGED_COLUMNS)
    for row in judged_rows(report):
        judged.add_row(*row)
    title = (
        f"{report.looked}, on {report.num_tuned_sessions} sessions, "
        f"{report.streams} streams, {millions(report.capacity_tokens)} tokens, ends {report.ends}, {report.seconds:.0f} s"
    )
    held_back = Text(f"on {report.num_held_back_sessions} held-back sessions", style="bold")
    return Group(Text(title, style="bold"), chosen, "", held_back, judged, "", verdict(report))
