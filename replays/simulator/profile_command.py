"""`agentserve profiles`: engines that can be simulated, what their constants come from, and how far off they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich.console import Console
from rich.table import Table

from replays.simulator.cost import Profile
from replays.simulator.geometry import GeometryCost
from replays.simulator.profiles import PROFILES
from replays.simulator.published import FIGURES, RECORD, RUNS, Compared, compare, differing, read_record

_PIPE_WIDTH = 180
_OUTPUT = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_WIDTH)
_ERRORS = Console(stderr=True, highlight=False)


def profiles(*, points: bool = False, check: bool = False, write: bool = False, json: bool = False) -> int:
    """List the engines that can be simulated; or the published points that their constants come from, fitted and held back.

    Parameters
    ----------
    points
        Show the published points beside what the simulator makes of them, as last recorded.
    check
        Simulate them again (about two minutes); exit code 1 where they differ from the record.
    write
        Record what --check found.
    json
        Print JSON.
    """
    if not (points or check or write):
        if json:
            _print_json({name: describe(profile) for name, profile in PROFILES.items()})
        else:
            _OUTPUT.print(profiles_table())
        return 0
    rows: list[Compared] = []
    if check or write:
        for run in RUNS:
            _ERRORS.print(f"simulating {run}", style="dim")
            rows += compare(run)
    else:
        rows = read_record()
    if write:
        RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    if json:
        _print_json(rows)
    else:
        _OUTPUT.print(points_table(rows))
        _OUTPUT.print(summary(rows))
    differ = [] if write else differing(rows, read_record())
    for name in differ:
        _ERRORS.print(f"no longer as recorded: {name}", style="red")
    return 1 if differ else 0


def _print_json(data: object) -> None:
    sys.stdout.write(msgspec.json.encode(data).decode() + "\n")


def describe(profile: Profile) -> dict[str, object]:
    """A profile as JSON, the shares of its limits as fractions; `fitted` is null where the cost is not made of M3's shapes."""
    cost = profile.cost
    return {
        "about": profile.about,
        "capacity_tokens": profile.capacity_tokens,
        "block_size": profile.engine.block_size,
        "num_gpus": profile.num_gpus,
        "fitted": asdict(cost.efficiency) if isinstance(cost, GeometryCost) else None,
    }


def profiles_table() -> Table:
    table = Table("profile", "about", "KV capacity", "GPUs", "step, ms", "memory", "compute", "attention", "prefill attention")
    for name, profile in PROFILES.items():
        cost = profile.cost
        shares = ["", "", "", "", ""]
        if isinstance(cost, GeometryCost):
            fitted = cost.efficiency
            parts = (fitted.memory_share, fitted.compute_share, fitted.attention_share, fitted.prefill_attention_share)
            shares = [f"{1000 * fitted.step_seconds:.2f}", *(f"{share:.0%}" for share in parts)]
        table.add_row(name, profile.about, f"{profile.capacity_tokens:,}", str(profile.num_gpus), *shares)
    return table


def points_table(rows: Sequence[Compared]) -> Table:
    table = Table("point", "published", "simulated", "error", "", "source")
    sources = {figure.name: figure.source for figure in FIGURES}
    for row in rows:
        table.add_row(row.name, *cells(row), sources[row.name])
    return table


def cells(row: Compared) -> tuple[str, str, str, str]:
    """Theirs, ours, the error, and whether it was held back."""
    if row.is_rate:
        return f"{row.theirs:.1%}", f"{row.ours:.1%}", f"{100 * row.error:+.1f} points", _kind(row)
    return f"{row.theirs:,.4g}", f"{row.ours:,.4g}", f"{row.error:+.1%}", _kind(row)


def _kind(row: Compared) -> str:
    return ("held back" if row.held_back else "fitted") + ("" if row.is_met else ", missed")


def summary(rows: Sequence[Compared]) -> str:
    """One line: how many are met."""
    held = [row for row in rows if row.held_back]
    fitted = [row for row in rows if not row.held_back]
    return (
        f"within 10 % (rates: 1 point): {sum(row.is_met for row in fitted)} of {len(fitted)} fitted points, "
        f"{sum(row.is_met for row in held)} of {len(held)} held back"
    )
