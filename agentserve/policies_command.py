"""`agentserve policies`: the admission and eviction policies, and their parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from rich.table import Table

from admission.choice import Choice
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from agentserve.policies import describe_choices, parameters_of
from agentserve.terminal import wide_console


def policies(*, json: bool = False) -> None:
    """List the admission and eviction policies with what they do and their parameters.

    Parameters
    ----------
    json
        Print JSON.
    """
    tables: dict[str, Mapping[str, Choice]] = {"admission": ADMISSION_POLICIES, "eviction": EVICTION_POLICIES}
    if json:
        sys.stdout.write(msgspec.json.encode({kind: describe_choices(table) for kind, table in tables.items()}).decode() + "\n")
        return
    console = wide_console()
    for kind, table in tables.items():
        shown = Table("policy", "what it does", "parameter", "default", "range", "meaning", title=f"{kind} policies", title_justify="left")
        for name, choice in table.items():
            rows = [(knob, f"{row.low:g} to {row.high:g}", row.about) for knob, row in choice.knobs().items()] or [("", "", "")]
            defaults = parameters_of(choice, {})
            for position, (knob, bounds, about) in enumerate(rows):
                first = (name, choice.about) if position == 0 else ("", "")
                shown.add_row(*first, knob, f"{defaults[knob]:g}" if knob else "", bounds, about, end_section=position == len(rows) - 1)
        console.print(shown)
