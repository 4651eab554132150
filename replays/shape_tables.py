"""Shapes and repeated work as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from replays.shapes import PERCENTILES, Distribution, Work


def shape_tables(num_calls: int, spread: Sequence[Distribution], work: Sequence[Work]) -> list[Table]:
    """What `agentserve shapes` prints."""
    sizes = _table(f"{num_calls:,} calls", ("mean", *(f"p{percent}" for percent in PERCENTILES), "largest"))
    for each in spread:
        sizes.add_row(each.name, *(f"{value:,.0f}" for value in (each.mean, *each.percentiles, each.largest)))
    whole = sum(each.flops_per_request for each in work)
    parts = _table("Work of one rank: per token and layer, and per mean request", ("layers", "MFLOP/token", "GFLOP", "share", "runs"))
    for part in work:
        parts.add_row(
            part.part,
            f"{part.num_layers}",
            f"{part.flops_per_token_and_layer / 1e6:,.2f}",
            f"{part.flops_per_request / 1e9:,.1f}",
            f"{100 * part.flops_per_request / whole:.1f} %",
            f"{part.runs_per_request:,.0f}",
        )
    return [sizes, parts]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
