"""The simulator beside what it must agree with, request by request: a pool that goes block by block, and vLLM's own scheduler.

A step takes one second everywhere, so that times are step numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from admission.returns import ReturnModel
from benchmarks.block_by_block import BlockByBlock
from benchmarks.timed_requests import TimedRequest, timed_requests
from replays.simulator.cost import CostModel
from replays.simulator.engine import Engine
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool, Use
from replays.simulator.requests import EngineRequest

if TYPE_CHECKING:
    from benchmarks.vllm_scheduler import VllmReplay

BLOCK_SIZE = 16
PLAIN = EngineOptions(num_blocks=0, block_size=BLOCK_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
EAGLE = replace(PLAIN, num_speculative_tokens=3, acceptance_length=2.78, drops_last_block=True)
SECOND = CostModel(1.0, 0.0, 0.0, 0.0)

VLLM_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "roomy": (2_000, {"num_sessions": 30, "seed": 1}),
    "evicting": (420, {"num_sessions": 30, "seed": 2}),
    "thrashing": (260, {"num_sessions": 30, "seed": 3}),
    "preempting": (260, {"num_sessions": 12, "seed": 4, "output_factor": 120, "mean_gap_steps": 50.0}),
}
"""Usable blocks of the pool, and how sessions come (`timed_requests`)."""
VLLM_OPTIONS = {
    "plain": PLAIN,
    "eagle": EAGLE,
    "chunk": replace(PLAIN, full_prompt_must_fit=False),
    "watermark": replace(EAGLE, watermark=0.05),
}


def extents(num_blocks: int, policy: str = "lru") -> BlockPool:
    """The simulator's pool."""
    return BlockPool(num_blocks, EVICTION_POLICIES[policy].build(Pool(num_blocks, ReturnModel())))


def workload(num_blocks: int, **load: Any) -> list[TimedRequest]:
    """Requests that fit in a pool of so many blocks. Fresh ones at each call: branches belong to one pool."""
    made = timed_requests(block_size=BLOCK_SIZE, **load)
    return [request for request in made if len(request.token_ids) + request.num_output_tokens < num_blocks * BLOCK_SIZE - 200]


def play(engine: Engine, requests: Sequence[TimedRequest]) -> dict[int, EngineRequest]:
    """Every request at its step."""
    made = {request.number: _made(request) for request in requests}
    waiting = sorted(requests, key=lambda request: (request.step, request.number), reverse=True)
    now = 0
    while waiting or engine.running or engine.waiting:
        while waiting and waiting[-1].step <= now:
            engine.add(made[waiting.pop().number], now)
        _step(engine, now)
        now += 1
        if isinstance(engine.pool, BlockPool) and now % 50 == 0:
            engine.pool.check_integrity()
    return made


def play_beside_vllm(
    engine: Engine, requests: Sequence[TimedRequest], vllm_side: ModuleType, folder: Path
) -> tuple[dict[int, EngineRequest], VllmReplay]:
    """Every request at its step, here and in vLLM's scheduler with the same options."""
    made = {request.number: _made(request) for request in requests}
    theirs: VllmReplay = vllm_side.VllmReplay(engine.options, vllm_side.make_scheduler(engine.options, folder))
    waiting = list(reversed(requests))
    now = 0
    while waiting or len(theirs.finished_at) < len(requests):
        while waiting and waiting[-1].step <= now:
            request = waiting.pop()
            engine.add(made[request.number], now)
            theirs.add(request.number, request.token_ids, request.num_output_tokens, request.output_token)
        _step(engine, now)
        theirs.step(now)
        now += 1
        assert now < 100_000, "a request never ends"
    _step(engine, now)
    return made, theirs


def _made(request: TimedRequest) -> EngineRequest:
    return EngineRequest(request.number, request.path, len(request.token_ids), request.num_output_tokens, Use(f"s{request.number % 7}"))


def _step(engine: Engine, now: int) -> None:
    """End the step that is over at `now` and start the next."""
    if engine.step is not None and engine.step.ends <= now:
        engine.finish(now)
    if engine.step is None:
        engine.start(now)


def outcomes(made: dict[int, EngineRequest]) -> dict[int, tuple[int, float | None, int]]:
    """Of each request: tokens hit, when it ended, how often it was preempted."""
    return {n: (request.num_hit_blocks * BLOCK_SIZE, request.finished, request.num_preemptions) for n, request in made.items()}


def vllm_outcomes(replayed: VllmReplay) -> dict[int, tuple[int, float | None, int]]:
    """The same of vLLM's."""
    return {n: (hit, replayed.finished_at[n], replayed.preemptions[n]) for n, hit in replayed.num_hit_tokens.items()}


def extents_against_blocks(num_seeds: int) -> dict[str, int]:
    """Requests that hit, end or are preempted otherwise than in a pool that goes block by block."""
    wrong = total = 0
    for base in (PLAIN, EAGLE):
        for num_blocks in (1_000, 320, 200):
            for seed in range(num_seeds):
                options, load = replace(base, num_blocks=num_blocks), {"num_sessions": 12, "seed": seed}
                ours = outcomes(play(Engine(options, extents(num_blocks), SECOND), workload(num_blocks, **load)))
                blocks = cast(BlockPool, BlockByBlock(num_blocks))
                theirs = outcomes(play(Engine(options, blocks, SECOND), workload(num_blocks, **load)))
                wrong += sum(ours[number] != theirs[number] for number in theirs)
                total += len(theirs)
    return {"extents_against_blocks": wrong, "extents_against_blocks_requests": total}


def extents_against_vllm(folder: Path) -> dict[str, int]:
    """Requests that hit, end or are preempted otherwise than in vLLM's own scheduler; nothing where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    wrong = total = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = importlib.import_module("benchmarks.vllm_scheduler")
        for base in VLLM_OPTIONS.values():
            for num_blocks, load in VLLM_CASES.values():
                engine = Engine(replace(base, num_blocks=num_blocks), extents(num_blocks), SECOND)
                made, replayed = play_beside_vllm(engine, workload(num_blocks, **load), side, folder)
                ours, theirs = outcomes(made), vllm_outcomes(replayed)
                wrong += sum(ours[number] != theirs[number] for number in ours)
                total += len(ours)
    return {"extents_against_vllm": wrong, "extents_against_vllm_requests": total}
