"""Reports as terminal tables, side by side, with ratios to the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Group
from rich.table import Table
from rich.text import Text

from replays.report import Report

Number: TypeAlias = "float | int | None"


def _percent(value: Number) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _count(value: Number) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _decimal(value: Number) -> str:
    return "–" if value is None else f"{value:,.2f}"


def _seconds(value: Number) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: how to read the figure, show it and compare it (None: rates differ in points, counts not at all)."""

    name: str
    read: Callable[[Report], Number]
    show: Callable[[Number], str]
    compare: str = ""


SECTIONS: dict[str, tuple[Line, ...]] = {
    "prefix hits": (
        Line("theoretical (trace, 64-token blocks)", lambda r: r.theoretical_hit_rate, _percent, "points"),
        Line("ceiling (tokens computed before)", lambda r: r.ceiling_hit_rate, _percent, "points"),
        Line("ceiling in whole blocks", lambda r: r.ceiling_block_hit_rate, _percent, "points"),
        Line("actual", lambda r: r.actual_hit_rate, _percent, "points"),
        Line("  on the GPU", lambda r: r.gpu_hit_rate, _percent, "points"),
        Line("  from outside", lambda r: r.external_hit_rate, _percent, "points"),
        Line("of the hits: of a head that others share", lambda r: r.shared_head_share, _percent, "points"),
        Line("of the hits: of the session's own history", lambda r: r.own_history_share, _percent, "points"),
        Line("exact turns", lambda r: r.exact_turns, _count),
        Line("unedited turns", lambda r: r.unedited_turns, _count),
    ),
    "KV cache": (
        Line("capacity, tokens", lambda r: r.kv_capacity_tokens, _count),
        Line("in use by running requests, peak", lambda r: r.kv_usage_peak, _percent, "points"),
        Line("in use by running requests, mean", lambda r: r.kv_usage_mean, _percent, "points"),
        Line("resident, peak", lambda r: r.kv_resident_peak, _percent, "points"),
        Line("resident, mean", lambda r: r.kv_resident_mean, _percent, "points"),
        Line("preemptions", lambda r: r.preemptions, _count),
    ),
    "speed": (
        Line("requests", lambda r: r.requests, _count),
        Line("failed requests", lambda r: r.failed_requests, _count),
        Line("tool calls", lambda r: r.tool_calls, _count),
        Line("prompt tokens planned", lambda r: r.planned_prompt_tokens, _count, "ratio"),
        Line("prompt tokens", lambda r: r.prompt_tokens, _count, "ratio"),
        Line("  of which computed", lambda r: r.computed_tokens, _count, "ratio"),
        Line("output tokens/s", lambda r: r.output_tokens_per_second, _decimal, "ratio"),
        Line("requests/s", lambda r: r.requests_per_second, _decimal, "ratio"),
        Line("TTFT p50", lambda r: r.ttft_seconds.p50, _seconds, "ratio"),
        Line("TTFT p95", lambda r: r.ttft_seconds.p95, _seconds, "ratio"),
        Line("TPOT p50", lambda r: r.tpot_seconds.p50, _seconds, "ratio"),
        Line("TPOT p95", lambda r: r.tpot_seconds.p95, _seconds, "ratio"),
        Line("duration", lambda r: r.duration_seconds, _seconds),
        Line("coverage", lambda r: r.coverage, _percent),
    ),
    "warm-up, kept apart": (
        Line("requests", lambda r: r.warmup.requests, _count),
        Line("failed requests", lambda r: r.warmup.failed_requests, _count),
        Line("actual hits", lambda r: r.warmup.actual_hit_rate, _percent, "points"),
        Line("duration", lambda r: r.warmup.duration_seconds, _seconds),
    ),
}


def _compared(line: Line, value: Number, base: Number) -> str:
    if value is None or base is None or not line.compare:
        return ""
    if line.compare == "points":
        return f"{100 * (value - base):+.2f}"
    return f"×{value / base:.3f}" if base else ""


def _row(table: Table, line: Line, reports: Sequence[Report]) -> None:
    values = [line.read(report) for report in reports]
    if all(value is None for value in values):
        return
    cells = [line.show(values[0])]
    for value in values[1:]:
        cells += [line.show(value), _compared(line, value, values[0])]
    table.add_row(line.name, *cells)


def _table(names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for index, name in enumerate(names):
        table.add_column(name, justify="right")
        if index:
            table.add_column("vs " + names[0], justify="right")
    return table


def _share_line(read: Callable[[Report], Mapping[str, int] | None], cause: str) -> Line:
    """Share of all prompt tokens missed for `cause`: in points it explains the difference between two actual rates."""

    def share(report: Report) -> Number:
        tokens = read(report)
        return tokens.get(cause, 0) / report.prompt_tokens if tokens is not None and report.prompt_tokens else None

    return Line(cause, share, _percent, "points")


SHARES: dict[str, Callable[[Report], Mapping[str, int] | None]] = {
    "missed, share of prompt tokens": lambda r: r.missed_tokens,
    "computed again of the turn before, share of prompt tokens": lambda r: r.recomputed_tokens,
}


def report_tables(named: Sequence[tuple[str, Report]]) -> Group:
    """The tables of one or more reports; the first is what the others are compared with."""
    names = [name for name, _ in named]
    reports = [report for _, report in named]
    about = _table(names)
    about_values: dict[str, Callable[[Report], str]] = {
        "engine": lambda r: r.engine,
        "trace, seed": lambda r: f"{r.trace}, {r.seed}",
        "sessions × scale, time scale": lambda r: f"{r.concurrency} × {r.scale:.4g}, {r.time_scale:g}",
        "assistant turns": lambda r: r.assistant,
        "idle times": lambda r: "dropped: hit rates are an UPPER BOUND" if r.is_upper_bound else r.delays,
        "marker of each play": lambda r: r.marker,
        "bad rows left out of the trace": lambda r: "–" if r.rows is None else f"{r.rows.num_skipped:,}",
    }
    for label, read in about_values.items():
        cells = [read(reports[0])]
        for report in reports[1:]:
            cells += [read(report), ""]
        about.add_row(label, *cells)
    tables = {"run": about}
    for title, lines in SECTIONS.items():
        table = tables[title] = _table(names)
        for line in lines:
            _row(table, line, reports)
    for title, tokens in SHARES.items():
        causes = list(dict.fromkeys(cause for report in reports for cause in tokens(report) or {}))
        if not causes:
            continue
        table = tables[title] = _table(names)
        for cause in causes:
            _row(table, _share_line(tokens, cause), reports)
    # The title apart: as the table's own it would be broken at the table's width.
    return Group(*(item for title, table in tables.items() for item in (Text(title, style="bold"), table, "")))
