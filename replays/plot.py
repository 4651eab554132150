"""One picture of one run: hits over time, missed tokens by cause, the KV cache, and the time to the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from replays.records import Record, Run
from replays.report import Report

_INK = "#22303c"
_COLOURS = {
    "theoretical": "#9aa5b1",
    "ceiling": "#3a7ca5",
    "actual": "#d1495b",
    "running": "#d1495b",
    "resident": "#3a7ca5",
    "ours": "#3a7ca5",
    "direct": "#edae49",
}
_NUM_BINS = 30


PartOfWhole: TypeAlias = "Callable[[Record], tuple[int | None, int | None]]"


def _binned(records: Sequence[Record], start: float, value: PartOfWhole) -> tuple[list[float], list[float]]:
    """(seconds, sum over sum) per bin of time, leaving out empty bins."""
    ends = np.array([record.ended - start for record in records])
    edges = np.linspace(0, max(ends.max(initial=0.0), 1e-9), _NUM_BINS + 1)
    places = np.clip(np.digitize(ends, edges) - 1, 0, _NUM_BINS - 1)
    sums = np.zeros((_NUM_BINS, 2))
    for place, record in zip(places, records, strict=True):
        part, whole = value(record)
        if part is not None and whole:
            sums[place] += (part, whole)
    filled = sums[:, 1] > 0
    return list(((edges[:-1] + edges[1:]) / 2)[filled]), list(sums[filled, 0] / sums[filled, 1])


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=_INK)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)


def _no_data(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#7b8794", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def _plot_hits(axes: Axes, records: Sequence[Record], start: float) -> None:
    _titled(axes, "Prefix hits over time")
    series: dict[str, PartOfWhole] = {
        "theoretical": lambda r: (r.num_theoretical_blocks, r.num_blocks),
        "ceiling": lambda r: (r.ceiling_tokens, r.num_prompt_tokens),
        "actual": lambda r: (r.num_cached_tokens, r.num_prompt_tokens),
    }
    lowest = None
    for name, value in series.items():
        seconds, rates = _binned(records, start, value)
        if rates:
            lowest = min(rates if lowest is None else [lowest, *rates])
            axes.plot(seconds, rates, label=name, color=_COLOURS[name], linewidth=1.6, linestyle=":" if name == "theoretical" else "-")
    if lowest is None:
        _no_data(axes, "no successful requests")
        return
    axes.set_ylim(max(0.0, lowest - 0.05), 1.005)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("seconds", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _plot_missed(axes: Axes, report: Report) -> None:
    _titled(axes, "Missed prompt tokens by cause")
    if not report.missed_tokens or not report.prompt_tokens:
        _no_data(axes, "the server names no causes")
        return
    causes = [(cause, count) for cause, count in report.missed_tokens.items() if count][::-1]
    bars = axes.barh([cause for cause, _ in causes], [count for _, count in causes], color=_COLOURS["actual"], height=0.6)
    axes.bar_label(bars, [f" {100 * count / report.prompt_tokens:.2f} %" for _, count in causes], fontsize=8, color=_INK)
    axes.set_xlim(0, max((count for _, count in causes), default=1) * 1.18)
    axes.set_ylim(-0.6, max(len(causes), 4) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("tokens (share of all prompt tokens)", fontsize=8)


def _plot_kv(axes: Axes, run: Run, report: Report, start: float) -> None:
    capacity = report.kv_capacity_tokens
    _titled(axes, "KV cache" + (f" of {capacity:,} tokens" if capacity else ""))
    samples = [sample for sample in run.samples if sample.time >= start]
    running = [(sample.time - start, sample.kv_usage) for sample in samples if sample.kv_usage is not None]
    resident = [(s.time - start, s.kv_resident_tokens / capacity) for s in samples if s.kv_resident_tokens is not None and capacity]
    if not running and not resident:
        _no_data(axes, "no engine metrics")
        return
    for name, points in (("resident", resident), ("running", running)):
        if points:
            seconds, shares = zip(*points, strict=True)
            axes.fill_between(seconds, shares, color=_COLOURS[name], alpha=0.18, linewidth=0)
            axes.plot(seconds, shares, label=name, color=_COLOURS[name], linewidth=1.4)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("seconds", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _first_tokens(records: Sequence[Record]) -> list[float]:
    return sorted(record.first_content - record.started for record in records if record.first_content is not None)


def _plot_ttft(axes: Axes, runs: Sequence[tuple[str, Sequence[Record]]]) -> None:
    _titled(axes, "Time to first token, share of requests within")
    shown = False
    for name, records in runs:
        seconds = _first_tokens(records)
        if seconds:
            axes.step(seconds, np.arange(1, len(seconds) + 1) / len(seconds), where="post", label=name, color=_COLOURS[name], linewidth=1.6)
            shown = True
    if not shown:
        _no_data(axes, "no first tokens seen")
        return
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    lowest, highest = axes.get_xlim()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1000 * seconds:g}"))
    # Within a decade or so the powers of ten alone would leave the axis without figures.
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda seconds, _: f"{1000 * seconds:g}") if highest < 15 * lowest else NullFormatter())
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _good(run: Run) -> list[Record]:
    return [record for record in run.records if record.phase == "profiling" and record.error is None]


def plot_run(path: Path, run: Run, report: Report, direct: Run | None = None) -> None:
    """Write the picture of `run` to `path`; `direct`, the same trace sent straight to the engine, joins the latency panel."""
    records = _good(run)
    start = min((record.started for record in records), default=0.0)
    figure = Figure(figsize=(11, 7), layout="constrained", dpi=130)
    axes = figure.subplots(2, 2)
    bound = ", idle times dropped (upper bound)" if report.is_upper_bound else ""
    title = f"{report.trace}: {report.concurrency} sessions on {report.engine}{bound}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK, fontweight="bold")
    _plot_hits(axes[0, 0], records, start)
    _plot_missed(axes[0, 1], report)
    _plot_kv(axes[1, 0], run, report, start)
    _plot_ttft(axes[1, 1], [("ours", records), *([("direct", _good(direct))] if direct else [])])
    figure.savefig(path)
