"""`agentserve calibrate`: an engine's profile for the simulator, measured."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import msgspec
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.table import Table

from replays.calibrate.fit import fit, hold_back
from replays.calibrate.measure import CalibrationError, Plan, measure
from replays.simulator.profile_file import Measured, ProfileFile

_ERRORS = Console(stderr=True, highlight=False)
_OUTPUT = Console(highlight=False)


def calibrate(
    *,
    out: Path,
    engine_url: str = "http://127.0.0.1:8100",
    max_num_batched_tokens: PositiveInt = 8192,
    max_num_seqs: PositiveInt = 256,
    longest: PositiveInt = 32_768,
    most_sequences: PositiveInt = 16,
    decode_tokens: PositiveInt = 64,
    repeats: PositiveInt = 3,
) -> int:
    """Measure a running, idle vLLM and write its profile for `simulate` and `sim-engine`: prefills and decode steps.

    Parameters
    ----------
    out
        Where the profile goes (.json).
    engine_url
        vLLM's own address.
    max_num_batched_tokens
        As the engine was started.
    max_num_seqs
        As the engine was started.
    longest
        Longest prompt to try, tokens.
    most_sequences
        Most sequences to decode at once.
    decode_tokens
        Tokens that each of them generates.
    repeats
        Measurements of each point, one more not counted.
    """
    plan = Plan()
    plan = Plan(
        tuple(n for n in plan.prefills if n <= longest),
        tuple((context, new) for context, new in plan.cached if context + new <= longest),
        tuple(n for n in plan.sequences if n <= most_sequences),
        tuple(context for context in plan.contexts if context <= longest),
        tuple((others, new) for others, new in plan.joined if others <= most_sequences and new <= longest),
        decode_tokens,
        repeats,
    )
    url = engine_url.rstrip("/")
    try:
        with _ERRORS.status("measuring") as status:
            facts, points = asyncio.run(measure(url, plan, status.update))
        constants, points = fit(hold_back(points), max_num_batched_tokens)
        file = ProfileFile(
            name=out.stem,
            engine=f"{facts.name}, {facts.model}, {url}",
            measured=datetime.now(UTC).date().isoformat(),
            capacity_tokens=facts.capacity_tokens,
            block_size=facts.block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            constants=constants,
            points=points,
        )
        out.write_bytes(msgspec.json.format(msgspec.json.encode(file)))
    except (CalibrationError, ValueError, OSError) as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    _OUTPUT.print(points_table(points))
    for name, share in (("fitted", False), ("held back", True)):
        errors = [abs(point.error) for point in points if point.held_back is share]
        if errors:
            _OUTPUT.print(f"{name}: {len(errors)} points, mean error {fmean(errors):.1%}, worst {max(errors):.1%}")
    return 0


def points_table(points: list[Measured]) -> Table:
    """What was measured beside what the fitted constants say."""
    table = Table("point", "measured, ms", "model, ms", "error", "held back")
    names = {
        "prefill": "{0.num_new:,} behind {0.context:,}",
        "joined": "{0.num_new:,} beside {0.num_sequences} × {0.context:,}",
        "decode": "{0.num_sequences} × {0.context:,} decode",
    }
    for point in points:
        name = names[point.kind].format(point)
        cells = (f"{1000 * point.seconds:.2f}", f"{1000 * point.predicted_seconds:.2f}", f"{point.error:+.1%}")
        table.add_row(name, *cells, "yes" if point.held_back else "")
    return table
