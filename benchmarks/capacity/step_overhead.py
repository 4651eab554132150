"""What the plugin adds to a step of vLLM's scheduler: its own Scheduler, KV cache manager and block pool on the CPU, without a model.

One scheduler with the plugin, one with its connector switched off and one without either run the same turns in alternating rounds. Other
work on the machine makes some rounds dearer and none cheaper, so the CPU time of each one's cheapest quarter is compared.
"""

from __future__ import annotations

import gc
import importlib
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from time import thread_time
from typing import Any

import msgspec

from agentserve.engines.plugin.options import PluginOptions, transfer_config
from agentserve.engines.plugin.wire import TurnHints, xargs
from replays.simulator.options import EngineOptions

NUM_BLOCKS, NUM_SESSIONS, NUM_RUNNING = 50_000, 500, 32
BLOCK_SIZE = 128
NUM_OUTPUT_TOKENS = 218
"""The median of recorded agent turns."""
_CONTEXT_BLOCKS = (100, 130)
_ROUNDS, _QUICK_ROUNDS = 40, 16


class _Arm:
    """One scheduler and its sessions, each of which waits, takes a turn that is two blocks longer, and starts anew at the most."""

    def __init__(self, vllm_side: Any, folder: Path, options: PluginOptions | None) -> None:
        engine = EngineOptions(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=8192, max_num_seqs=NUM_RUNNING)
        transfer = None if options is None else msgspec.json.decode(transfer_config(options))
        self._replay = vllm_side.VllmReplay(engine, vllm_side.make_scheduler(engine, folder, transfer))
        self._xargs = None if options is None else xargs(TurnHints(branch_id="", return_class="root/tool:steady"))
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


def step_overhead(*, quick: bool, progress: Callable[[str], None]) -> tuple[float, float]:
    """The share by which a step's CPU time rises with the plugin, and with its carrier alone (vLLM's own work for any connector)."""
    progress("scheduler steps with and without the plugin")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="agentserve-capacity-") as name:
        warnings.simplefilter("ignore")
        vllm_side = importlib.import_module("tests.vllm_scheduler")
        arms = [_Arm(vllm_side, Path(name), options) for options in (None, PluginOptions(), PluginOptions("off"))]
        for arm in arms:  # until the pool is full
            for _ in range(NUM_OUTPUT_TOKENS * (NUM_SESSIONS // NUM_RUNNING + 8)):
                arm.step()
        gc.collect()
        gc.freeze()
        rounds: list[list[float]] = [[] for _ in arms]
        for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
            for which in range(len(arms)) if number % 2 else reversed(range(len(arms))):
                rounds[which].append(sum(arms[which].step() for _ in range(NUM_OUTPUT_TOKENS)))
        gc.unfreeze()
    plain, ordered, carried = (mean(sorted(own)[: len(own) // 4]) for own in rounds)
    return ordered / plain - 1, carried / plain - 1
