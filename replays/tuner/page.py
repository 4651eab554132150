"""The report of a search as one HTML page that needs nothing else: tables, pictures and definitions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from replays.simulator.tables import number, percent
from replays.tuner.report import FRONT_COLUMNS, JUDGED_COLUMNS, Trial, TuneReport, judged_rows, rows_of, verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #e4e8ec; }
th:first-child, td:first-child { text-align: left; }
tr.winner td { background: #fdf0f1; font-weight: 600; }
img { max-width: 100%; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
.verdict { padding: .8rem 1rem; background: #eef4f8; border-left: 4px solid #3a7ca5; }
"""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(_row(row) for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    kind = " class=winner" if "winner" in cells[0] else ""
    return f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _trial_row(trial: Trial) -> list[str]:
    point = trial.point
    marks = [word for word, applies in (("front", trial.on_front), ("finalist", trial.is_finalist)) if applies]
    return [trial.name, str(len(point.seeds)), percent(point.hit_rate), number(point.requests_per_second, 3), ", ".join(marks)]


def _image(png: bytes, about: str) -> str:
    return f'<img alt="{escape(about)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def page(report: TuneReport, trials: bytes, judged: bytes) -> str:
    """The page, with the two pictures in it."""
    about = (
        f"{report.looked} ({report.search_cpu_seconds:.0f} CPU s), on {report.num_tuned_sessions} sessions of {report.traces}; "
        f"{report.streams} streams, {report.capacity_tokens:,} tokens, profile {report.profile}, ends {report.ends}."
    )
    ranked = sorted(report.trials, key=lambda trial: -(trial.point.hit_rate or 0.0))
    every = [_trial_row(trial) for trial in ranked]
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.definitions.items())
    parts = [
        f"<h1>Tuning of {escape(report.traces)}</h1><p>{escape(about)}</p><p class=verdict>{escape(verdict(report))}</p>",
        f"<h2>The front</h2>{_table(FRONT_COLUMNS, rows_of(report))}",
        _image(trials, "every trial by hit rate, TTFT p95 and throughput"),
        f"<h2>On {report.num_held_back_sessions} sessions that the search has not seen</h2>{_table(JUDGED_COLUMNS, judged_rows(report))}",
        _image(judged, "lru and winner on held-back sessions by load"),
        f"<h2>Every setting</h2>{_table(('setting', 'seeds', 'hit %', 'req/s', ''), every)}",
        f"<h2>Definitions</h2><dl>{words}</dl>",
    ]
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>Tuning</title><style>{_STYLE}</style>{''.join(parts)}</html>\n"
