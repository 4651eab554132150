"""Verdicts as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from agentserve.doctor.table import DOCTOR_CHECKS
from agentserve.doctor.verdict import State, Verdict

_STYLES: Mapping[State, str] = {State.FINE: "green", State.FOUND: "bold red", State.UNKNOWN: "yellow", State.APART: "dim"}


def show(console: Console, verdicts: Mapping[str, Verdict], unread: Sequence[str]) -> None:
    """Print a line for each check, what was found first, and what could not be read."""
    order = [State.FOUND, State.UNKNOWN, State.FINE, State.APART]
    table = Table()
    for name in ("check", "", "finding", "what to do", "reads"):
        table.add_column(name)
    for name, verdict in sorted(verdicts.items(), key=lambda row: order.index(row[1].state)):
        reads = DOCTOR_CHECKS[name].reads
        table.add_row(name, verdict.state.value, verdict.finding, verdict.fix, reads, style=_STYLES[verdict.state])
    console.print(table, markup=False)
    for line in unread:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def as_json(verdicts: Mapping[str, Verdict], unread: Sequence[str]) -> bytes:
    """The same for programs."""
    checks = [
        {"check": name, "state": verdict.state, "finding": verdict.finding, "fix": verdict.fix, "reads": DOCTOR_CHECKS[name].reads}
        for name, verdict in verdicts.items()
    ]
    return msgspec.json.encode(
        {"found": sum(verdict.state is State.FOUND for verdict in verdicts.values()), "checks": checks, "unread": unread}
    )
