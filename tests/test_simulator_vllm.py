"""The simulator's engine against vLLM's own scheduler, KV cache manager and block pool, step by step and request by request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.rungs import SECOND, VLLM_CASES, VLLM_OPTIONS, extents, outcomes, play_beside_vllm, vllm_outcomes, workload
from replays.simulator.engine import Engine
from replays.simulator.options import EngineOptions

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("case", VLLM_CASES)
@pytest.mark.parametrize("options", VLLM_OPTIONS.values(), ids=VLLM_OPTIONS)
def test_every_request_hits_ends_and_is_preempted_as_in_vllm(
    options: EngineOptions, case: str, vllm_side: ModuleType, tmp_path: Path
) -> None:
    num_blocks, load = VLLM_CASES[case]
    requests = workload(num_blocks, **load)
    assert len(requests) > 100
    engine = Engine(replace(options, num_blocks=num_blocks), extents(num_blocks), SECOND)
    ours, theirs = play_beside_vllm(engine, requests, vllm_side, tmp_path)

    assert outcomes(ours) == vllm_outcomes(theirs)
    assert engine.pool.num_free == theirs.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks
    assert (sum(theirs.preemptions.values()) > 20) == (case == "preempting")
    engine.pool.check_integrity()
