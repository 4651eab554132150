"""The simulator's engine against vLLM's own scheduler, KV cache manager and block pool, step by step and request by request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from replays.simulator.cost import CostModel
from replays.simulator.engine import Engine, EngineRequest
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool, Use
from tests.simulated_requests import TimedRequest, timed_requests

if TYPE_CHECKING:
    from benchmarks.vllm_scheduler import VllmReplay

pytestmark = pytest.mark.engine

BLOCK_SIZE = 16
PLAIN = EngineOptions(num_blocks=0, block_size=BLOCK_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
EAGLE = replace(PLAIN, num_speculative_tokens=3, acceptance_length=2.78, drops_last_block=True)


class SimulatedReplay:
    """The simulator's engine, driven like vLLM: a step takes one second, so that times are step numbers."""

    def __init__(self, options: EngineOptions) -> None:
        policy = EVICTION_POLICIES["lru"].build(Pool(options.num_blocks))
        self.engine = Engine(options, BlockPool(options.num_blocks, policy), CostModel(1.0, 0.0, 0.0, 0.0))
        self.policy = policy
        self.requests: dict[int, EngineRequest] = {}

    def add(self, request: TimedRequest, now: int) -> None:
        made = EngineRequest(request.number, request.path, len(request.token_ids), request.num_output_tokens, Use("session"))
        self.requests[request.number] = made
        self.engine.add(made, now)

    def begin(self, now: int) -> None:
        """Ends the step that is over at `now` and starts the next."""
        engine = self.engine
        if engine.step is not None and engine.step.ends <= now:
            engine.finish(now)
        if engine.step is None:
            engine.start(now)


def replay_both(
    vllm_side: ModuleType, requests: list[TimedRequest], options: EngineOptions, folder: Path
) -> tuple[SimulatedReplay, VllmReplay]:
    """Both on the same requests, which arrive before the same steps."""
    ours, theirs = SimulatedReplay(options), vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, folder))
    waiting = list(reversed(requests))
    now = 0
    while waiting or len(theirs.finished_at) < len(requests):
        while waiting and waiting[-1].step <= now:
            request = waiting.pop()
            ours.add(request, now)
            theirs.add(request.number, request.token_ids, request.num_output_tokens, request.output_token)
        ours.begin(now)
        theirs.step(now)
        now += 1
        assert now < 100_000, "a request never ends"
    ours.begin(now)
    return ours, theirs


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "roomy": (2_000, 30, {"seed": 1}),
    "evicting": (420, 30, {"seed": 2}),
    "thrashing": (260, 30, {"seed": 3}),
    "preempting": (260, 12, {"seed": 4, "output_factor": 120, "mean_gap_steps": 50.0}),
}
"""Usable blocks of the pool, sessions, and how they come (`timed_requests`)."""

OPTIONS = {
    "plain": PLAIN,
    "eagle": EAGLE,
    "chunk": replace(PLAIN, full_prompt_must_fit=False),
    "watermark": replace(EAGLE, watermark=0.05),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_request_hits_ends_and_is_preempted_as_in_vllm(
    options: EngineOptions, case: str, vllm_side: ModuleType, tmp_path: Path
) -> None:
    num_blocks, num_sessions, workload = CASES[case]
    options = replace(options, num_blocks=num_blocks)
    most = num_blocks * BLOCK_SIZE - 200
    made = timed_requests(num_sessions=num_sessions, block_size=BLOCK_SIZE, **workload)
    requests = [request for request in made if len(request.token_ids) + request.num_output_tokens < most]
    assert len(requests) > 100
    ours, theirs = replay_both(vllm_side, requests, options, tmp_path)

    hits = {number: request.num_hit_blocks * BLOCK_SIZE for number, request in ours.requests.items()}
    assert hits == theirs.num_hit_tokens
    assert {number: request.finished for number, request in ours.requests.items()} == theirs.finished_at
    assert {number: request.num_preemptions for number, request in ours.requests.items()} == theirs.preemptions
    assert ours.engine.pool.num_free == theirs.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks
    assert (sum(theirs.preemptions.values()) > 20) == (case == "preempting")
    ours.engine.pool.check_integrity()
