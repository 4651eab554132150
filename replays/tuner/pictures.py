"""The pictures of a search: every trial by hits against latency and throughput, and the winner on held-back sessions."""

from __future__ import annotations

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replays.simulator.plot import INK, titled
from replays.tuner.report import Trial, TuneReport

_OTHERS, _FRONT, _WINNER, _BASELINE = "#c3cbd3", "#3a7ca5", "#d1495b", "#edae49"


def _png(figure: Figure) -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _colour(report: TuneReport, trial: Trial) -> str:
    if trial.number == report.winner:
        return _WINNER
    if trial.number == report.baseline:
        return _BASELINE
    return _FRONT if trial.on_front else _OTHERS


def _scatter(axes: Axes, report: TuneReport, title: str, figures: list[tuple[Trial, float, float]], label: str) -> None:
    titled(axes, title)
    for trial, hit, value in figures:
        big = trial.number in (report.winner, report.baseline)
        axes.scatter(100 * hit, value, color=_colour(report, trial), s=70 if big else 26, zorder=3 if big else 2)
        if big:
            name = "winner" if trial.number == report.winner else "lru"
            axes.annotate(name, (100 * hit, value), textcoords="offset points", xytext=(6, 5), fontsize=8, color=INK)
    axes.set_xlabel("hit rate, %", fontsize=8)
    axes.set_ylabel(label, fontsize=8)


def trials_picture(report: TuneReport) -> bytes:
    """PNG: each trial's hit rate against its TTFT p95, and against its throughput; the front in blue."""
    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=130)
    left, right = figure.subplots(1, 2)
    points = [(trial, trial.point) for trial in report.trials if trial.point.hit_rate is not None]
    latency = [(trial, point.hit_rate or 0.0, point.ttft_p95_seconds) for trial, point in points if point.ttft_p95_seconds]
    _scatter(left, report, "Hits and TTFT p95", [(trial, hit, ttft) for trial, hit, ttft in latency if ttft], "seconds")
    left.set_yscale("log")
    _scatter(right, report, "Hits and throughput", [(t, p.hit_rate or 0.0, p.requests_per_second) for t, p in points], "requests/s")
    return _png(figure)


def judged_picture(report: TuneReport) -> bytes:
    """PNG: lru, winner and ceiling on held-back sessions by load."""
    figure = Figure(figsize=(11, 3.8), layout="constrained", dpi=130)
    left, right = figure.subplots(1, 2)
    rows = sorted(report.judged, key=lambda row: row.streams)
    streams = [row.streams for row in rows]
    titled(left, "Hits on held-back sessions, %")
    left.plot(streams, [100 * (row.winner.ceiling or 0.0) for row in rows], ":", color=_OTHERS, label="ceiling")
    left.plot(streams, [100 * (row.winner.hit_rate or 0.0) for row in rows], "o-", color=_WINNER, label="winner")
    left.plot(streams, [100 * (row.baseline.hit_rate or 0.0) for row in rows], "o-", color=_BASELINE, label="lru")
    left.set_xlabel("streams", fontsize=8)
    left.legend(fontsize=8, frameon=False)
    titled(right, "Throughput on held-back sessions, requests/s")
    right.plot(streams, [row.winner.requests_per_second for row in rows], "o-", color=_WINNER, label="winner")
    right.plot(streams, [row.baseline.requests_per_second for row in rows], "o-", color=_BASELINE, label="lru")
    right.set_ylim(bottom=0)
    right.set_xlabel("streams", fontsize=8)
    right.legend(fontsize=8, frameon=False)
    return _png(figure)
