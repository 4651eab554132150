"""The simulator itself: is it right, how fast is it, and what does its tuner win on sessions that were held back.

`rung_errors` counts requests that differ from a pool that goes block by block, and from vLLM's own scheduler and block pool; the latter
needs vLLM. Speed is CPU time on one core. With `--traces` the sessions are those, else generated ones.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.contenders import ContenderFailed
from benchmarks.live_rung import LiveRung, live_rung
from benchmarks.public_simulator import PUBLIC, SideBySide, side_by_side
from benchmarks.report import Options, Result, Row
from benchmarks.rungs import extents_against_blocks, extents_against_vllm
from benchmarks.tuned_arms import TunedArm, figures_of, said_of, tuned_arms
from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.grid import ENDS
from replays.simulator.loop import LoopOptions
from replays.simulator.published import RUNS, compare, read_record
from replays.simulator.run import SimulationOptions, simulate
from replays.simulator.scripts import Script
from replays.simulator.workload import Reading, read_workload
from replays.traces import Session, TraceSet

POLICIES = ("lru", "dead_first", "class_hazard")
CAPACITY_TOKENS = 6_264_960
STREAMS = 42
"""Where LRU loses about what the published run loses, on sessions like these."""
_STATUS = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one policy: every session once. CPU seconds; `peak_bytes` of its process."""

    policy: str
    seconds: float
    num_turns: int
    peak_bytes: int


def measure(options: Options) -> Result:
    """Rungs, speed, the public simulator, and the tuner's gain (not in a quick run)."""
    with tempfile.TemporaryDirectory(prefix="agentserve-simulator-") as folder:
        return _measure(options, Path(folder))


def _measure(options: Options, folder: Path) -> Result:
    traces = options.traces or _generated(folder, 60 if options.quick else 500)
    with _STATUS.status("reading traces"):
        workload = read_workload([traces], Reading(), jobs=2)
    scripts = list(workload.scripts[:120] if options.quick else workload.scripts)
    with _STATUS.status("rungs"):
        errors = extents_against_blocks(2 if options.quick else 6) | ({} if options.quick else extents_against_vllm(folder))
    with _STATUS.status("speed"):
        speeds = [_apart(scripts, policy) for policy in POLICIES]
        growth = _growth(scripts)
    with _STATUS.status("public simulator"):
        public = _beside(traces, options, folder)
    with _STATUS.status("tuning"):
        arms = () if options.quick else tuple(tuned_arms(scripts, CAPACITY_TOKENS, STREAMS))
    with _STATUS.status("published points"):
        points = published_points(simulate_again=not options.quick)
    with _STATUS.status("a real engine"):
        live = _live(folder, options)
    figures: dict[str, object] = {
        "rung_errors": dict(errors),
        "live_hit_error_points": None if live is None else live.hit_error_points,
        "live_ttft_error_share": None if live is None else live.ttft_error_share,
        "published_points": points,
        "seconds_per_policy_point": max(speed.seconds for speed in speeds),
        "turns": speeds[0].num_turns,
        "peak_bytes": max(speed.peak_bytes for speed in speeds),
        "turn_seconds_growth": growth,
        "speedup_over_public": None if public is None else public.speedup,
        "speedup_over_public_python": None if public is None else public.speedup_over_python,
        "public_hit_difference_points": None if public is None else 100 * (public.our_hit_rate - public.theirs.hit_rate),
    } | figures_of(arms)
    return _result(errors, speeds, public, arms, figures)


def _generated(folder: Path, num_sessions: int) -> Path:
    path = folder / "generated.jsonl"
    with path.open("wb") as file:
        file.writelines(msgspec.json.encode(session) + b"\n" for session in generate_sessions(GeneratorSettings(num_sessions, 7)))
    return path


def _speed(scripts: Sequence[Script], policy: str) -> Speed:
    loop = LoopOptions(concurrency=STREAMS, duration=None, seed=1)
    options = SimulationOptions(policy=policy, capacity_tokens=CAPACITY_TOKENS, knowledge=ENDS["said"], loop=loop)
    started = time.process_time()
    report = simulate(scripts, options)
    seconds = time.process_time() - started
    return Speed(policy, seconds, report.num_requests, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _apart(scripts: Sequence[Script], policy: str) -> Speed:
    """In a process of its own, so that its memory is its own."""
    with _alone(scripts) as pool:
        found: Speed = pool.apply(_shared_speed, (policy,))
        return found


_shared: Sequence[Script] = ()


def _share(scripts: Sequence[Script]) -> None:
    global _shared
    _shared = scripts


def _shared_speed(policy: str) -> Speed:
    return _speed(_shared, policy)


@contextmanager
def _alone(scripts: Sequence[Script]) -> Iterator[Any]:
    with multiprocessing.get_context("fork").Pool(1, _share, (scripts,)) as pool:
        yield pool


def _growth(scripts: Sequence[Script]) -> float | None:
    """CPU time a turn of all sessions over that of a hundredth of them (at least five), at the same load."""
    few = scripts[:: max(1, min(100, len(scripts) // 5))]
    if len(few) == len(scripts):
        return None
    small, large = _speed(few, "lru"), _speed(scripts, "lru")
    return (large.seconds / large.num_turns) / (small.seconds / small.num_turns)


def _beside(traces: Path, options: Options, folder: Path) -> SideBySide | None:
    sessions = _sample(traces, 20 if options.quick else 120)
    try:
        return side_by_side(
            sessions, CAPACITY_TOKENS // (4 if options.quick else 1), options.cache_folder, folder, with_python=not options.quick
        )
    except ContenderFailed as error:
        _STATUS.print(f"no public simulator: {error}", style="yellow", markup=False)
        return None


def _sample(traces: Path, most: int) -> list[Session]:
    found = TraceSet(traces)
    step = max(1, len(found) // most)
    return [session for session in (found[index] for index in range(0, len(found), step)) if session.root.requests][:most]


def published_points(*, simulate_again: bool) -> list[dict[str, object]]:
    """Published figures and what the simulator makes of them: now, or as recorded (a test repeats the record)."""
    found = [point for run in RUNS for point in compare(run)] if simulate_again else read_record()
    return [{"name": point.name, "ours": point.ours, "theirs": point.theirs, "held_back": point.held_back} for point in found]


def _live(folder: Path, options: Options) -> LiveRung | None:
    """Beside a real vLLM on the CPU, where it is installed; not in a quick run."""
    if options.quick or importlib.util.find_spec("vllm") is None:
        return None
    (folder / "live").mkdir()
    return live_rung(folder / "live")


def _public_rows(public: SideBySide) -> list[Row]:
    late, turns, theirs = "hit % of the last half", public.num_requests, public.theirs
    return [
        Row("LRU alone, ours", {"turns": turns, "CPU s": public.our_seconds, late: 100 * public.our_hit_rate}),
        Row("the same, C++", {"turns": turns, "CPU s": theirs.seconds, late: 100 * theirs.hit_rate}),
        Row("the same, Python", {"turns": turns, "CPU s": theirs.python_seconds}),
    ]


def _result(
    errors: Mapping[str, int],
    speeds: Sequence[Speed],
    public: SideBySide | None,
    arms: Sequence[TunedArm],
    figures: Mapping[str, object],
) -> Result:
    rows = [Row(speed.policy, {"turns": speed.num_turns, "CPU s": speed.seconds, "peak MB": speed.peak_bytes / 1e6}) for speed in speeds]
    if public is not None:
        rows += _public_rows(public)
    return Result(
        title="Simulator: every session once on one core, and LRU alone beside a public simulator",
        columns=("turns", "CPU s", "peak MB", "hit % of the last half"),
        rows=tuple(rows),
        notes=(
            f"C++ and Python: {PUBLIC.requirement}, its two cores, one LRU point on the same prompts without reading them",
            *(f"{name}: {value}" for name, value in errors.items()),
            *(said_of(arm) for arm in arms),
        ),
        figures=figures,
    )
