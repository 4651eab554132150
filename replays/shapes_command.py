"""`agentserve shapes`: what a workload brings to MiniMax-M3's kernels."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cyclopts.types import NonNegativeInt, PositiveInt
from rich.console import Console

from model.m3.config import MINIMAX_M3
from model.m3.index_reuse import fixed_plan
from model.m3.sharding import Shard
from replays.records import RecordsError
from replays.shape_tables import shape_tables
from replays.shapes import distributions, read_calls, repeated_work
from replays.traces import TraceError

_ERRORS = Console(stderr=True, highlight=False)
_OUTPUT = Console(highlight=False)


def shapes(
    source: Path,
    *,
    tp: PositiveInt = 4,
    index_topk_freq: PositiveInt = 1,
    batched_tokens: PositiveInt = 32_768,
    draft_tokens: NonNegativeInt = 3,
    json: Path | None = None,
) -> int:
    """Shapes that a workload brings to MiniMax-M3's kernels, and the work that repeats per layer, token and request.

    Parameters
    ----------
    source
        A trace (hits are then those of an unlimited cache), or what `replay --records` wrote (the engine's own hits, and decode batches).
    tp
        Tensor-parallel size.
    index_topk_freq
        One of so many sparse layers chooses blocks.
    batched_tokens
        Tokens of a prefill step at most.
    draft_tokens
        Draft tokens verified for each sequence in a decode step.
    json
        Write the figures here.
    """
    try:
        shard = Shard(MINIMAX_M3, tp)
        calls = list(read_calls(source, MINIMAX_M3.block_size))
        spread = distributions(calls, batched_tokens, 1 + draft_tokens)
        work = repeated_work(calls, shard, fixed_plan(MINIMAX_M3.num_sparse_layers, index_topk_freq), batched_tokens)
        if json is not None:
            json.write_bytes(msgspec.json.encode({"calls": len(calls), "distributions": spread, "work": work}))
    except (TraceError, RecordsError, ValueError, OSError) as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    for table in shape_tables(len(calls), spread, work):
        _OUTPUT.print(table)
    return 0
