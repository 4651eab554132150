"""Simulated points as terminal tables: one of hits and speed, and the anatomy of the pool where it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from replays.simulator.anatomy import AGES_SECONDS, KINDS
from replays.simulator.grid import PointReport, PolicySpec
from replays.simulator.report import SimulationReport

_NONE = "–"


def percent(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{100 * value:.{digits}f}"


def number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.2f} M"


def name_of(point: PointReport) -> str:
    """The policy with what sets it apart."""
    parts = [str(PolicySpec(point.policy, point.parameters))]
    if point.admission != "fcfs":
        parts.append(str(PolicySpec(point.admission, point.admission_parameters)))
    if point.tier_tokens:
        parts.append(f"tier {millions(point.tier_tokens)}")
    if point.ends != "unknown":
        parts.append(f"ends {point.ends}")
    return ", ".join(parts)


def load_of(point: PointReport) -> str:
    """What the pool has to bear."""
    if point.arrivals is None:
        return f"{point.streams}"
    return f"{point.arrivals:g}/s" if point.arrivals else "recorded"


def _plain(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def point_table(points: Sequence[PointReport]) -> Table:
    """A line a point."""
    names = ("hit %", "±", "ceiling %", "gap", "closed %", "TTFT p50 s", "p95 s", "TPOT ms", "req/s", "out tok/s", "preempted")
    table = _plain("policy", "capacity", "streams", *names)
    for point in points:
        table.add_row(
            name_of(point),
            millions(point.capacity_tokens),
            load_of(point),
            percent(point.hit_rate),
            percent(point.hit_spread),
            percent(point.ceiling),
            number(point.gap_points),
            percent(point.gap_closed_share, 0),
            number(point.ttft_p50_seconds),
            number(point.ttft_p95_seconds),
            number(None if point.tpot_p50_seconds is None else 1000 * point.tpot_p50_seconds, 1),
            number(point.requests_per_second, 3),
            number(point.output_tokens_per_second, 0),
            number(point.preemptions, 0),
        )
    return table


def anatomy_tables(reports: Sequence[SimulationReport], unlimited: Sequence[SimulationReport]) -> Group:
    """What the pool held and lost in the first run of each setting, and the capacity that an LRU would need."""
    held = _plain("pool holds, %", *KINDS)
    lost = _plain("evicted", "M tokens", "live %", "live age p50 s", "asked for again %", "after p50 s", "within 300 s %")
    for report in reports:
        name = f"{PolicySpec(report.policy, report.parameters)}, {millions(report.capacity_tokens)}, {report.concurrency}"
        held.add_row(name, *(percent(report.composition[kind], 1) for kind in KINDS))
        anatomy = report.anatomy
        evicted = sum(anatomy.evicted_tokens.values())
        lost.add_row(
            name,
            number(evicted / 1e6),
            percent(anatomy.evicted_tokens.get("live_idle", 0) / evicted if evicted else None, 0),
            number(anatomy.evicted_age_seconds.get("live_idle", {}).get("p50"), 0),
            percent(anatomy.regretted_share, 0),
            number(anatomy.regret_seconds.get("p50"), 0),
            percent(anatomy.regretted_within.get("300"), 0),
        )
    parts: list[Table | Text | str] = [held, "", lost]
    if unlimited:
        parts += [
            "",
            Text("capacity that an LRU needs to keep what was idle for T (mean / p95 over time)", style="bold"),
            _needs(unlimited),
        ]
    return Group(*parts)


def _needs(unlimited: Sequence[SimulationReport]) -> Table:
    table = _plain("streams, seed", *(f"T = {age} s" for age in AGES_SECONDS))
    for report in unlimited:
        within = report.anatomy.used_within_tokens
        cells = [f"{within[str(age)]['mean'] / 1e6:.2f} / {within[str(age)]['p95'] / 1e6:.2f} M" for age in AGES_SECONDS if within]
        table.add_row(f"{report.concurrency}, {report.seed}", *cells)
    return table
