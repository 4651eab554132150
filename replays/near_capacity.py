"""`python -m replays.near_capacity TRACES`: what eviction and admission policies win back near capacity, on sessions that no fit has seen.

Simulated: AgentX's closed loop over the held-back half of the recorded sessions, each once, without sub-agents and without requests above
`CONTEXT_TOKENS`, against the engine of profile `light`. All arms see the same sessions at the same seeds; the share of lru's gap to the
ceiling that an arm closes is pooled over the seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from replays.return_prior import CONTEXT_TOKENS, distinct, held_back, within
from replays.simulator.fates import Knowledge
from replays.simulator.loop import LoopOptions
from replays.simulator.report import SimulationReport
from replays.simulator.run import SimulationOptions, simulate
from replays.simulator.scripts import Script, script_of
from replays.traces import Session, TraceSet

BLOCK_TOKENS = 2048

_STREAMS = 42

_INFERRED = Knowledge(inferred=True)
_SAID = Knowledge(ends=True)


@dataclass(frozen=True, slots=True)
class Arm:
    """Policies, and what the eviction policy is told of ends."""

    policy: str = "lru"
    knowledge: Knowledge = _INFERRED
    admission: str = "fcfs"
    admission_parameters: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, float] = field(default_factory=dict)
    num_clients: int = 0
    """`LoopOptions.num_clients`."""
    num_tenants: int = 1
    """`LoopOptions.num_tenants`."""


def _working_set(policy: str, knowledge: Knowledge, **values: float) -> Arm:
    return Arm(policy, knowledge, "working_set", values)


ARMS: dict[str, Arm] = {
    "lru": Arm(knowledge=Knowledge(cuts=False, generated=False)),
    "fifo": Arm("fifo", Knowledge()),
    "slru": Arm("slru", Knowledge()),
    "s3fifo": Arm("s3fifo", Knowledge()),
    "gdsf": Arm("gdsf", Knowledge()),
    "ttl": Arm("ttl", Knowledge()),
    "dead_first, ends not known": Arm("dead_first", Knowledge()),
    "dead_first, ends inferred": Arm("dead_first"),
    "class_hazard, ends not known": Arm("class_hazard", Knowledge()),
    "class_hazard, ends inferred": Arm("class_hazard"),
    "class_hazard, ends inferred, a client a lane": Arm("class_hazard", num_clients=_STREAMS),
    "class_hazard, ends inferred, a client for 4 lanes": Arm("class_hazard", num_clients=_STREAMS // 4),
    "class_hazard, ends inferred, one client": Arm("class_hazard", num_clients=1),
    "class_hazard, ends inferred, sessions dealt to 10 clients": Arm("class_hazard", num_tenants=10),
    "class_hazard, horizon 30 s": Arm("class_hazard", parameters={"horizon_seconds": 30}),
    "class_hazard, horizon 600 s": Arm("class_hazard", parameters={"horizon_seconds": 600}),
    "dead_first, ends said": Arm("dead_first", _SAID),
    "class_hazard, ends said": Arm("class_hazard", _SAID),
    "farthest_next_use": Arm("farthest_next_use", _SAID),
    "kv_budget, lru": Arm(knowledge=Knowledge(cuts=False, generated=False), admission="kv_budget"),
    "prefix_first, lru": Arm(knowledge=Knowledge(cuts=False, generated=False), admission="prefix_first"),
    "working_set, lru": _working_set("lru", Knowledge(cuts=False, generated=False)),
    "working_set, ends inferred": _working_set("class_hazard", _INFERRED),
    "working_set, ends inferred, a client a lane": replace(_working_set("class_hazard", _INFERRED), num_clients=_STREAMS),
    "working_set, ends inferred, one client": replace(_working_set("class_hazard", _INFERRED), num_clients=1),
    "the same, held 10 s": _working_set("class_hazard", _INFERRED, hold_seconds=10),
    "the same, held 60 s": _working_set("class_hazard", _INFERRED, hold_seconds=60),
    "the same, held 300 s": _working_set("class_hazard", _INFERRED, hold_seconds=300),
    "the same, alpha 1.0": _working_set("class_hazard", _INFERRED, alpha=1.0),
    "the same, alpha 1.1": _working_set("class_hazard", _INFERRED, alpha=1.1),
    "the same, trimmed": _working_set("class_hazard", _INFERRED, trim_step=0.01),
    "the same, cold prefills apart": _working_set("class_hazard", _INFERRED, cold_tokens=32_768),
    "working_set, ends said": _working_set("class_hazard", _SAID),
    "working_set, ends said, alpha 1.0": _working_set("class_hazard", _SAID, alpha=1.0),
}
"""By name. The first is the baseline."""

_HEAD = (
    "| arm | gap, points | closed | by seed | requests/s | uncached tokens | TTFT p95 | wait p99 (longest) | "
    "p99 wait of the largest tenth ÷ smallest | Jain |\n|---|---|---|---|---|---|---|---|---|---|"
)

app = App(name="near_capacity", help=__doc__.partition("\n")[0] if __doc__ else "")


def scripts_of(sessions: Iterable[Session]) -> list[Script]:
    """The held-back sessions' roots, each recording once."""
    scripts = []
    for session in distinct(sessions):
        root = within(session.root, CONTEXT_TOKENS)
        if held_back(session) and root.requests:
            scripts.append(script_of(replace(session, root=root, subagents=()), BLOCK_TOKENS))
    return scripts


def options_of(arm: Arm, seed: int, *, blocks: int, streams: int, seconds: float) -> SimulationOptions:
    """One run of an arm."""
    return SimulationOptions(
        policy=arm.policy,
        parameters=arm.parameters,
        admission=arm.admission,
        admission_parameters=arm.admission_parameters,
        profile="light",
        capacity_tokens=blocks * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=64,
        context_tokens=CONTEXT_TOKENS,
        knowledge=arm.knowledge,
        loop=LoopOptions(
            concurrency=streams,
            seed=seed,
            duration=seconds,
            window_in_turns=True,
            num_clients=arm.num_clients,
            num_tenants=arm.num_tenants,
        ),
        sample_seconds=60.0,
    )


def row(name: str, reports: Sequence[SimulationReport], base: Sequence[SimulationReport]) -> str:
    """An arm's line of the table: ratios to the baseline, which ran at the same seeds."""
    gaps, lost = [_gap(report) for report in reports], [_gap(report) for report in base]
    shares = [1 - gap / of for gap, of in zip(gaps, lost, strict=True) if of > 0] or [0.0]
    closed = 1 - sum(gaps) / sum(lost) if sum(lost) > 0 else 0.0
    small, large = (_mean(reports, f"p99_{size}_tenth") for size in ("smallest", "largest"))
    waits = f"{_mean(reports, 'p99'):.0f} s ({max(report.wait_seconds['longest'] for report in reports):.0f} s)"
    return (
        f"| {name} | {sum(gaps) / len(gaps):.2f} | {closed:.1%} | {min(shares):.0%} to {max(shares):.0%} | "
        f"{_ratio(reports, base, _rate)} | {_ratio(reports, base, _uncached)} | {_ratio(reports, base, _first_token)} | "
        f"{waits} | {f'{large / small:.2f}' if small else '-'} | {min(report.wait_seconds['jain'] for report in reports):.3f} |"
    )


def _gap(report: SimulationReport) -> float:
    assert report.gap_points is not None
    return report.gap_points


def _rate(report: SimulationReport) -> float:
    return report.requests_per_second


def _uncached(report: SimulationReport) -> float:
    assert report.actual_hit_rate is not None
    return report.prompt_tokens * (1 - report.actual_hit_rate) / report.duration_seconds


def _first_token(report: SimulationReport) -> float:
    return report.ttft_seconds["p95"]


def _mean(reports: Sequence[SimulationReport], name: str) -> float:
    return sum(report.wait_seconds[name] for report in reports) / len(reports)


def _ratio(reports: Sequence[SimulationReport], base: Sequence[SimulationReport], read: object) -> str:
    assert callable(read)
    return f"{sum(map(read, reports)) / sum(map(read, base)) - 1:+.1%}"


@app.default
def main(
    traces: Path,
    *,
    seeds: Annotated[int, Parameter(help="Runs of each arm.")] = 4,
    blocks: Annotated[int, Parameter(help="Of 2,048 tokens, in the KV cache.")] = 2100,
    streams: Annotated[int, Parameter(help="Sessions that live at all times.")] = _STREAMS,
    seconds: Annotated[float, Parameter(help="Of profiling, in the trace's time.")] = 2700.0,
    arms: Annotated[tuple[str, ...], Parameter(help="Only these, beside the baseline (repeat the flag).")] = (),
    processes: Annotated[int, Parameter(help="That simulate at the same time.")] = 1,
) -> int:
    """Print a Markdown table of the arms."""
    chosen = {name: arm for name, arm in ARMS.items() if not arms or name in (*arms, next(iter(ARMS)))}
    problem = f"no arms {sorted(set(arms) - set(ARMS))}; there are: {', '.join(ARMS)}" if set(arms) - set(ARMS) else ""
    if not traces.exists():
        problem = f"no traces at {str(traces)!r}"
    if problem:
        Console(stderr=True).print(problem, markup=False)
        return 2
    scripts = scripts_of(TraceSet(traces).checked())
    console = Console(width=400)
    console.print(f"{len(scripts)} sessions, {streams} streams, {blocks} blocks, {seeds} seeds of {seconds:g} s\n", highlight=False)
    console.print(_HEAD, markup=False, highlight=False)
    base: list[SimulationReport] = []
    with ProcessPoolExecutor(processes) as pool:
        for name, arm in chosen.items():
            wanted = [options_of(arm, seed, blocks=blocks, streams=streams, seconds=seconds) for seed in range(seeds)]
            reports = list(pool.map(simulate, repeat(scripts), wanted)) if processes > 1 else [simulate(scripts, each) for each in wanted]
            base = base or reports
            console.print(row(name, reports, base), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(app())
