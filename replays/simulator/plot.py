"""The anatomy of a pool as one picture: what it held over time, what it lost and missed, and the room that an LRU would need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replays.simulator.anatomy import KINDS, AnatomyReport
from replays.simulator.report import SimulationReport

INK = "#22303c"
_COLOURS = {
    "pinned": "#d1495b",
    "live_idle": "#3a7ca5",
    "cut": "#edae49",
    "generated": "#b8a1d9",
    "ended": "#9aa5b1",
    "spare_copies": "#66a182",
    "unused": "#eef1f4",
}
_LABELS = {kind: kind.replace("_", " ") for kind in KINDS}


def titled(axes: Axes, title: str) -> None:
    """The look that all pictures share."""
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)


def _over_time(axes: Axes, anatomy: AnatomyReport) -> None:
    titled(axes, "The pool over time, M tokens")
    if len(anatomy.seconds) < 2:
        axes.text(0.5, 0.5, "too short to sample", ha="center", va="center", transform=axes.transAxes)
        return
    series = [np.array(anatomy.kinds[kind]) / 1e6 for kind in KINDS]
    axes.stackplot(anatomy.seconds, series, labels=[_LABELS[kind] for kind in KINDS], colors=[_COLOURS[kind] for kind in KINDS])
    axes.set_xlabel("simulated seconds", fontsize=8)
    axes.legend(fontsize=7, loc="lower left", ncols=2)


def _by_class(axes: Axes, anatomy: AnatomyReport) -> None:
    titled(axes, "Live idle tokens by why the session is idle, mean, M tokens")
    means = sorted((float(np.mean(series)) / 1e6, name) for name, series in anatomy.live_idle_by_class.items() if series)
    axes.barh([name for _, name in means], [value for value, _ in means], color=_COLOURS["live_idle"], height=0.6)
    axes.grid(axis="y", visible=False)


def _lost(axes: Axes, anatomy: AnatomyReport) -> None:
    evicted = sum(anatomy.evicted_tokens.values())
    share = 100 * (anatomy.regretted_share or 0.0)
    titled(axes, f"Evicted {evicted / 1e6:.1f} M tokens; {share:.0f} % of them were asked for again")
    kinds = [kind for kind in KINDS if anatomy.evicted_tokens.get(kind)]
    bars = axes.barh(kinds, [anatomy.evicted_tokens[kind] / 1e6 for kind in kinds], color=[_COLOURS[kind] for kind in kinds], height=0.6)
    ages = [anatomy.evicted_age_seconds.get(kind, {}).get("p50", 0.0) for kind in kinds]
    axes.bar_label(bars, [f" idle {age:.0f} s (median)" for age in ages], fontsize=8, color=INK)
    axes.margins(x=0.3)
    axes.set_xlabel("M tokens", fontsize=8)
    axes.grid(axis="y", visible=False)


def _needed(axes: Axes, report: SimulationReport, unlimited: SimulationReport | None) -> None:
    titled(axes, "Capacity that an LRU needs to keep what was idle for T, M tokens")
    if unlimited is None:
        axes.text(0.5, 0.5, "only with an unlimited run (--anatomy)", ha="center", va="center", transform=axes.transAxes)
        return
    within = unlimited.anatomy.used_within_tokens
    ages = [float(age) for age in within]
    for name, style in (("mean", "-"), ("p95", "--")):
        axes.plot(ages, [row[name] / 1e6 for row in within.values()], style, color=_COLOURS["live_idle"], label=f"needed, {name}")
    axes.axhline(report.capacity_tokens / 1e6, color=_COLOURS["pinned"], linewidth=1.2, label="capacity")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T, seconds", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def plot_anatomy(path: Path, report: SimulationReport, unlimited: SimulationReport | None = None) -> None:
    """Write the picture of one run to `path`; `unlimited` is the same load in a pool where nothing is evicted."""
    figure = Figure(figsize=(12, 8), layout="constrained", dpi=130)
    axes = figure.subplots(2, 2)
    hit = f"{100 * report.actual_hit_rate:.2f} %" if report.actual_hit_rate is not None else "no"
    ceiling = f"{100 * report.ceiling_hit_rate:.2f} %" if report.ceiling_hit_rate is not None else "none"
    title = f"{report.policy}, {report.capacity_tokens:,} tokens, {report.concurrency} streams: {hit} hits, ceiling {ceiling}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, fontweight="bold")
    _over_time(axes[0, 0], report.anatomy)
    _by_class(axes[0, 1], report.anatomy)
    _lost(axes[1, 0], report.anatomy)
    _needed(axes[1, 1], report, unlimited)
    figure.savefig(path)
