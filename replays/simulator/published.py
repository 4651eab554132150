"""Published and measured figures that the profiles are fitted to or compared with, each with its source and whether it was held back.

A point that was fitted had a part in choosing a constant; a point held back had none. All figures come from running the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, nan
from pathlib import Path
from statistics import median

import msgspec

from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.cost import StepWork
from replays.simulator.fixed_shape import FixedShape, run_fixed_shape
from replays.simulator.loop import LoopOptions
from replays.simulator.profiles import find_profile
from replays.simulator.run import SimulationOptions, simulate
from replays.simulator.scripts import Script, script_of
from replays.traces import session_from_weka

_INFERENCEX = "InferenceX, 8K in / 1K out"
_AGENTX = "InferenceX, AgentX at 28 sessions"
_OWN = "vLLM 0.26 on an H200, docs/benchmarks.md"
_SEEDS = (1, 2, 3, 4, 5)
_MAX_PROMPT_TOKENS = 990_016
"""AgentX's corpora leave out longer ones."""

AGENTX_LIKE = GeneratorSettings(150, 1, token_scale=1.85, output_scale=1.108, gap_scale=0.2, min_turns=20)
"""AgentX's corpus cannot be had here. Answers are scaled to the mean that its figures imply (875 tokens), prompts to its hit rate (its mean
is about 150,000 tokens, this one's 164,000), idle times to its request rate; sessions of fewer than 20 turns are left out as there."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number. `run` names what has to be simulated for it, `what` the figure of that run."""

    run: str
    what: str
    theirs: float
    source: str
    held_back: bool
    is_rate: bool = False
    """A hit rate, compared in points."""

    @property
    def name(self) -> str:
        return f"{self.run}: {self.what}"


class Compared(msgspec.Struct, frozen=True):
    """A figure and what the simulator makes of it."""

    name: str
    ours: float
    theirs: float
    held_back: bool
    is_rate: bool

    @property
    def error(self) -> float:
        """Relative; of rates the difference."""
        return self.ours - self.theirs if self.is_rate else self.ours / self.theirs - 1

    @property
    def is_met(self) -> bool:
        """Within 10 %, rates within a point."""
        return abs(self.error) <= (0.01 if self.is_rate else 0.1)


def _shape(profile: str, concurrency: int) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        figures = run_fixed_shape(find_profile(profile), FixedShape(concurrency, shortest=1.0))
        return {
            "output tokens/s/GPU": figures.output_tokens_per_second_gpu,
            "total tokens/s/GPU": figures.total_tokens_per_second_gpu,
            "median TTFT, s": figures.ttft_seconds,
            "mean TPOT, s": figures.tpot_seconds,
        }

    return run


def agentx_scripts() -> list[Script]:
    """The sessions of `AGENTX_LIKE`, for M3's blocks."""
    scripts = []
    for weka in generate_sessions(AGENTX_LIKE):
        session = session_from_weka(weka, Path(weka.id))
        if max(request.num_prompt_tokens for stream in session.streams for request in stream.requests) <= _MAX_PROMPT_TOKENS:
            scripts.append(script_of(session, 128))
    return scripts


def _agentx() -> Mapping[str, float]:
    """Medians over seeds: near the knee a seed, which is a set of 28 sessions, may lie beyond it."""
    scripts = agentx_scripts()
    reports = [simulate(scripts, SimulationOptions(profile="m3-mi355x-agentx", loop=LoopOptions(seed=seed))) for seed in _SEEDS]
    return {
        "requests/s": median(report.requests_per_second for report in reports),
        "output tokens/s": median(report.output_tokens_per_second for report in reports),
        "TTFT p50, s": median(report.ttft_seconds["p50"] for report in reports),
        "TPOT p50, s": median(report.tpot_seconds["p50"] for report in reports),
        "theoretical hit rate": median(report.theoretical_hit_rate or 0.0 for report in reports),
        "actual hit rate": median(report.actual_hit_rate or 0.0 for report in reports),
        "KV usage, peak": median(report.kv_usage_peak for report in reports),
    }


def _steps(reuse: int) -> Callable[[], Mapping[str, float]]:
    def run() -> Mapping[str, float]:
        profile = find_profile(f"m3-15-layers-h200{f'-reuse{reuse}' if reuse > 1 else ''}")
        cost, budget = profile.cost, profile.engine.max_num_batched_tokens

        def prefill(num_tokens: int, before: int) -> float:
            chunks = [(start, min(budget, num_tokens - start)) for start in range(0, num_tokens, budget)]
            return sum(cost.step_seconds(StepWork(0, 0, n, n * (before + start) + n * n // 2)) for start, n in chunks)

        def decode(sequences: int, context: int) -> float:
            return cost.step_seconds(StepWork(sequences, sequences * context, 0, 0))

        return {
            "prefill of 129,024 tokens, s": prefill(129_024, 0),
            "prefill of 1,024 behind 129,024 cached, s": prefill(1_024, 129_024),
            "decode step, 1 × 32k, s": decode(1, 32_768),
            "decode step, 28 × 32k, s": decode(28, 32_768),
            "decode step, 28 × 64k, s": decode(28, 65_536),
        }

    return run


RUNS: dict[str, tuple[str, Callable[[], Mapping[str, float]]]] = {
    "MXFP8 TP4, 32 at a time": ("m3-mi355x-mxfp8-tp4", _shape("m3-mi355x-mxfp8-tp4", 32)),
    "MXFP8 TP4, 128 at a time": ("m3-mi355x-mxfp8-tp4", _shape("m3-mi355x-mxfp8-tp4", 128)),
    "MXFP4 TP4, 128 at a time": ("m3-mi355x-mxfp4-tp4", _shape("m3-mi355x-mxfp4-tp4", 128)),
    "MXFP4 TP2, 128 at a time": ("m3-mi355x-mxfp4-tp2", _shape("m3-mi355x-mxfp4-tp2", 128)),
    "MXFP4 TP4 EAGLE3, 128 at a time": ("m3-mi355x-mxfp4-tp4-eagle3", _shape("m3-mi355x-mxfp4-tp4-eagle3", 128)),
    "P/D 2×TP4 + TP4, 512 at a time": ("m3-mi355x-mxfp4-pd-2tp4-tp4", _shape("m3-mi355x-mxfp4-pd-2tp4-tp4", 512)),
    "P/D TP8 + TP8, 1,024 at a time": ("m3-mi355x-mxfp4-pd-tp8-tp8-early", _shape("m3-mi355x-mxfp4-pd-tp8-tp8-early", 1024)),
    "AgentX, 28 sessions": ("m3-mi355x-agentx", _agentx),
    "15 layers on an H200": ("m3-15-layers-h200", _steps(1)),
    "15 layers on an H200, one indexer in four": ("m3-15-layers-h200-reuse4", _steps(4)),
}
"""By name: the profile, and what gives the figures."""


def _figures(run: str, source: str, rows: Sequence[tuple[str, float, bool]], rates: Sequence[str] = ()) -> list[Figure]:
    return [Figure(run, what, theirs, source, held_back, what in rates) for what, theirs, held_back in rows]


_FITTED, _HELD = False, True

FIGURES: tuple[Figure, ...] = (
    *_figures(
        "MXFP8 TP4, 32 at a time",
        _INFERENCEX,
        [("output tokens/s/GPU", 342.4, _HELD), ("median TTFT, s", 0.67, _HELD), ("mean TPOT, s", 0.0221, _FITTED)],
    ),
    *_figures(
        "MXFP8 TP4, 128 at a time",
        _INFERENCEX,
        [("output tokens/s/GPU", 623.7, _HELD), ("median TTFT, s", 1.54, _HELD), ("mean TPOT, s", 0.0488, _FITTED)],
    ),
    *_figures("MXFP4 TP4, 128 at a time", _INFERENCEX, [("output tokens/s/GPU", 716.8, _FITTED)]),
    *_figures("MXFP4 TP2, 128 at a time", _INFERENCEX, [("output tokens/s/GPU", 943.5, _FITTED)]),
    *_figures("MXFP4 TP4 EAGLE3, 128 at a time", _INFERENCEX, [("output tokens/s/GPU", 682.4, _HELD)]),
    *_figures(
        "P/D 2×TP4 + TP4, 512 at a time",
        _INFERENCEX,
        [("total tokens/s/GPU", 6370.5, _HELD), ("median TTFT, s", 1.32, _HELD), ("mean TPOT, s", 0.0546, _FITTED)],
    ),
    *_figures(
        "P/D TP8 + TP8, 1,024 at a time",
        _INFERENCEX,
        [("total tokens/s/GPU", 2084.6, _FITTED), ("median TTFT, s", 223.2, _HELD), ("mean TPOT, s", 0.03126, _FITTED)],
    ),
    *_figures(
        "AgentX, 28 sessions",
        _AGENTX,
        [
            ("requests/s", 0.582, _FITTED),
            ("output tokens/s", 509.5, _FITTED),
            ("TTFT p50, s", 0.645, _HELD),
            ("TPOT p50, s", 0.0413, _FITTED),
            ("theoretical hit rate", 0.967, _HELD),
            ("actual hit rate", 0.921, _FITTED),
            ("KV usage, peak", 0.885, _HELD),
        ],
        rates=("theoretical hit rate", "actual hit rate"),
    ),
    *_figures(
        "15 layers on an H200",
        _OWN,
        [
            ("prefill of 129,024 tokens, s", 5.548, _FITTED),
            ("prefill of 1,024 behind 129,024 cached, s", 0.086, _FITTED),
            ("decode step, 1 × 32k, s", 0.00482, _FITTED),
            ("decode step, 28 × 32k, s", 0.0109, _FITTED),
            ("decode step, 28 × 64k, s", 0.01315, _HELD),
        ],
    ),
    *_figures(
        "15 layers on an H200, one indexer in four",
        _OWN,
        [
            ("prefill of 129,024 tokens, s", 5.340, _HELD),
            ("prefill of 1,024 behind 129,024 cached, s", 0.078, _HELD),
            ("decode step, 1 × 32k, s", 0.00475, _HELD),
            ("decode step, 28 × 32k, s", 0.0107, _HELD),
            ("decode step, 28 × 64k, s", 0.01236, _HELD),
        ],
    ),
)


def compare(run: str) -> list[Compared]:
    """Simulate one run and put it beside what was published of it."""
    _, simulate_run = RUNS[run]
    ours = simulate_run()
    return [
        Compared(figure.name, ours[figure.what], figure.theirs, figure.held_back, figure.is_rate) for figure in FIGURES if figure.run == run
    ]


RECORD = Path(__file__).parent / "published.json"
"""What `agentserve profiles --write` last found: the documentation shows it, and a test repeats it."""


def differing(rows: Sequence[Compared], record: Sequence[Compared]) -> list[str]:
    """Names of figures that the simulator no longer gives as they were recorded."""
    recorded = {row.name: row.ours for row in record}
    return [row.name for row in rows if not isclose(row.ours, recorded.get(row.name, nan), rel_tol=1e-6)]


def read_record() -> list[Compared]:
    return msgspec.json.decode(RECORD.read_bytes(), type=list[Compared])
