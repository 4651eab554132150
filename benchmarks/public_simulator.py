"""A public cache simulator beside ours on the same prompts: KVCache.AI's `kvcache-simulator`, installed from PyPI for the benchmark only.

It replays block by block, its core in C++ (compiled on first use) or in Python; ours replays runs of blocks. Both count the same: leading
resident blocks of each prompt, over the last half of the prompts.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from benchmarks.contenders import Contender, ContenderFailed, install
from replays.simulator.chains import whole_blocks
from replays.simulator.pool import BlockPool
from replays.simulator.scripts import Script, script_of
from replays.simulator.serial import Ask, SerialHits, in_order, serial_hits
from replays.traces import Session

PUBLIC = Contender("kvcache-simulator", None, "kvcache-simulator==0.1.3")
_LIMIT_SECONDS = 1200.0
_ROUNDS = 3
"""Of each side, of which the median counts: a point takes us a few hundredths of a second, which one interruption doubles."""
_SCRIPT = """
import json, resource, statistics, sys
from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file
path, capacity, with_python, rounds = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "python", int(sys.argv[4])
def used():
    rows = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(row.ru_utime + row.ru_stime for row in rows)
ensure_cpp_simulator(None)
start = used()
trace = parse_trace_file(path)
read = used()
seconds = []
for _ in range(rounds):
    before = used()
    swept = run_cpp_sweep(trace, capacities=[capacity], policies=["lru"], warmup_requests=trace.request_count // 2)
    seconds.append(used() - before)
median, hit_rate = statistics.median(seconds), swept.results["lru", capacity].hitRate
answer = {"read_seconds": read - start, "seconds": median, "hit_rate": hit_rate, "python_seconds": None}
if with_python:
    plan = build_execution_plan(trace)
    start = used()
    simulate_policy(plan, "lru", capacity)
    answer["python_seconds"] = used() - start
print(json.dumps(answer))
"""


class PublicFigures(msgspec.Struct):
    """CPU seconds of the public simulator for one LRU point without reading: of its C++ core, a median, and of its Python one."""

    read_seconds: float
    seconds: float
    hit_rate: float
    python_seconds: float | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One LRU point on the same prompts. Seconds are CPU seconds, reading left out on both sides."""

    num_requests: int
    num_blocks: int
    our_seconds: float
    our_hit_rate: float
    theirs: PublicFigures

    @property
    def speedup(self) -> float:
        """Over its C++ core, which is its default."""
        return self.theirs.seconds / self.our_seconds

    @property
    def speedup_over_python(self) -> float | None:
        return None if self.theirs.python_seconds is None else self.theirs.python_seconds / self.our_seconds


def side_by_side(sessions: Sequence[Session], capacity_tokens: int, cache_folder: Path, folder: Path, *, with_python: bool) -> SideBySide:
    """Both on the recorded blocks of `sessions`, in one order. Raises ContenderFailed when it cannot be installed or does not run."""
    size = sessions[0].block_size
    capacity = capacity_tokens // size
    scripts = [script_of(session, size) for session in sessions]
    asks = in_order(scripts)
    path = folder / "flat.jsonl"
    num_blocks = _write_flat(path, sessions, asks)
    rounds = [_our_round(scripts, asks, capacity) for _ in range(_ROUNDS)]
    ours = rounds[0][1]
    theirs = _public(path, capacity, cache_folder, with_python=with_python)
    return SideBySide(len(asks), num_blocks, median(seconds for seconds, _ in rounds), ours.late_hit_blocks / ours.late_blocks, theirs)


def _our_round(scripts: Sequence[Script], asks: Sequence[Ask], capacity: int) -> tuple[float, SerialHits]:
    """CPU seconds and hits of one LRU point in a fresh pool."""
    pool = BlockPool(capacity, EVICTION_POLICIES["lru"].build(Pool(capacity)))
    started = time.process_time()
    hits = serial_hits(scripts, asks, pool)
    return time.process_time() - started, hits


def _write_flat(path: Path, sessions: Sequence[Session], asks: Sequence[Ask]) -> int:
    """The prompts as the public simulator reads them; how many blocks they name. Its millions of ids are gone when this returns: the
    collector would walk over them in the midst of our own run."""
    size = sessions[0].block_size
    ids = [_named(number, session) for number, session in enumerate(sessions)]
    num_blocks = 0
    with path.open("wb") as file:
        for ask in asks:
            blocks = ids[ask.script][ask.call]
            num_blocks += len(blocks)
            file.write(msgspec.json.encode({"block_size": size, "input_length": len(blocks) * size, "hash_ids": blocks}) + b"\n")
    return num_blocks


def _named(number: int, session: Session) -> list[list[str]]:
    """Ids of each call's whole blocks in planned order; sessions share none."""
    calls = sorted(
        (request.start_seconds, request.order, stream, index)
        for stream, line in enumerate(session.streams)
        for index, request in enumerate(line.requests)
    )
    return [
        [
            f"{number}:{block}"
            for block in whole_blocks(session.streams[stream].requests[index], session.block_size, session.block_size).tolist()
        ]
        for _, _, stream, index in calls
    ]


def _public(path: Path, capacity: int, cache_folder: Path, *, with_python: bool) -> PublicFigures:
    python = install(PUBLIC, cache_folder)
    command = [str(python), "-c", _SCRIPT, str(path), str(capacity), "python" if with_python else "cpp", str(_ROUNDS)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ContenderFailed(f"{PUBLIC.requirement} did not end within {_LIMIT_SECONDS:.0f} s") from None
    if done.returncode:
        raise ContenderFailed(f"{PUBLIC.requirement} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=PublicFigures)
