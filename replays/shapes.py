"""Which shapes a workload brings to MiniMax-M3's kernels, and how much work repeats per layer, token and request.

Calls come from a trace, whose hits are then those of an unlimited cache, or from the records of a replay, with the engine's own hits and
times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.m3.index_reuse import ReusePlan
from model.m3.shapes import MatrixShape, local_shapes
from model.m3.sharding import Shard
from replays.records import Run, read_run
from replays.theoretical import theoretical_hits
from replays.traces import Session, TraceSet

PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. Tokens; `decoding`: from its first to its last token, seconds, None where it was not recorded."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    decoding: tuple[float, float] | None = None

    @property
    def num_new_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


def calls_of_sessions(sessions: Iterable[Session], block_size: int) -> Iterator[Call]:
    """As an unlimited cache in blocks of `block_size` would serve them, each session for itself; the last token is always computed."""
    for session in sessions:
        for stream, hits in zip(session.streams, theoretical_hits(session), strict=True):
            for request, hit in zip(stream.requests, hits, strict=True):
                seen = min(hit.num_hit_blocks * session.block_size, request.num_prompt_tokens - 1)
                yield Call(request.num_prompt_tokens, max(0, seen) // block_size * block_size, request.num_output_tokens)


def calls_of_run(run: Run) -> Iterator[Call]:
    """What a replay saw: requests that succeeded and whose tokens the server counted."""
    for record in run.records:
        if record.error is None and record.num_prompt_tokens is not None and record.num_output_tokens is not None:
            times = (record.first_content, record.last_content)
            decoding = None if times[0] is None or times[1] is None else (times[0], times[1])
            yield Call(record.num_prompt_tokens, record.num_cached_tokens or 0, record.num_output_tokens, decoding)


def read_calls(source: Path, block_size: int) -> Iterator[Call]:
    """From a trace or from a replay's records, told apart by their first line. Raises TraceError, RecordsError."""
    if source.is_file():
        with source.open("rb") as file:
            is_run = file.read(len(_HEADER)) == _HEADER
        if is_run:
            return calls_of_run(read_run(source))
    return calls_of_sessions(TraceSet(source).checked(), block_size)


_HEADER = b'{"kind":"header"'


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one size over all calls (or, for decode rows, over the time in which anything decodes)."""

    name: str
    mean: float
    percentiles: tuple[float, ...]
    """At PERCENTILES."""
    largest: float


def distributions(calls: Sequence[Call], batched_tokens: int, tokens_per_sequence: int) -> list[Distribution]:
    """`batched_tokens`: of a prefill step at most; `tokens_per_sequence`: rows of a sequence in a decode step, drafts included.

    Decode rows are there only where times were recorded. Raises ValueError without calls.
    """
    if not calls:
        raise ValueError("there are no calls to look at")
    steps = [rows for call in calls for rows in prefill_steps(call, batched_tokens)]
    found = [
        _distribution("prompt tokens", [call.num_prompt_tokens for call in calls]),
        _distribution("new tokens", [call.num_new_tokens for call in calls]),
        _distribution("output tokens", [call.num_output_tokens for call in calls]),
        _distribution("rows of a prefill step (M)", steps),
    ]
    active = _decoding_at_a_time([call.decoding for call in calls if call.decoding is not None])
    if active:
        counts, seconds = zip(*active, strict=True)
        found.append(_distribution("rows of a decode step (M)", [count * tokens_per_sequence for count in counts], seconds))
    return found


def prefill_steps(call: Call, batched_tokens: int) -> list[int]:
    """Rows of each step that prefills `call` alone."""
    whole, rest = divmod(call.num_new_tokens, batched_tokens)
    return [batched_tokens] * whole + [rest] * (rest > 0)


def _distribution(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> Distribution:
    sizes = np.asarray(values, dtype=float)
    order = np.argsort(sizes)
    held = np.ones(len(sizes)) if weights is None else np.asarray(weights, dtype=float)
    reached = np.cumsum(held[order])
    places = np.searchsorted(reached, reached[-1] * np.array(PERCENTILES) / 100)
    chosen = sizes[order][np.minimum(places, len(sizes) - 1)]
    return Distribution(name, float((sizes * held).sum() / held.sum()), tuple(map(float, chosen)), float(sizes.max()))


def _decoding_at_a_time(spans: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    """How many calls decode, and for how many seconds it is that many; times in which none does are left out."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    found, active, before = [], 0, 0.0
    for moment, change in edges:
        if active and moment > before:
            found.append((active, moment - before))
        active, before = active + change, moment
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """What one part of the model does for a mean request on one rank. `runs`: layers times steps, each a launch or more."""

    part: str
    num_layers: int
    flops_per_token_and_layer: float
    flops_per_request: float
    runs_per_request: float


def repeated_work(calls: Sequence[Call], shard: Shard, plan: ReusePlan, batched_tokens: int) -> list[Work]:
    """Matrices, attention and indexer; a decode step counts once for each output token, prefill once for each of its steps.

    Attention of a sparse layer reads its chosen blocks, or less where there is less. Only leaders of `plan` score.
    """
    tokens = _mean([call.num_new_tokens + max(0, call.num_output_tokens - 1) for call in calls])
    sampled = _mean([call.num_output_tokens for call in calls])
    steps = _mean([len(prefill_steps(call, batched_tokens)) + max(0, call.num_output_tokens - 1) for call in calls])
    found = [_matrix(shape, sampled if shape.sampled_only else tokens, steps) for shape in local_shapes(shard)]
    config = shard.config
    everything = _mean([_pairs(call) for call in calls])
    chosen = _mean([_pairs(call, most=config.topk_blocks * config.block_size) for call in calls])
    heads = 4.0 * shard.num_query_heads * config.head_dim
    scores = 2.0 * shard.num_index_heads * config.index_dim
    for part, layers, pairs, each in (
        ("dense attention", config.num_dense_layers, everything, heads),
        ("sparse attention", config.num_sparse_layers, chosen, heads),
        ("indexer scores", plan.num_leaders, everything, scores),
    ):
        flops = each * pairs
        found.append(Work(part, layers, flops / tokens, flops * layers, layers * steps))
    return found


def _matrix(shape: MatrixShape, tokens: float, steps: float) -> Work:
    each = shape.flops(1) / shape.num_layers
    return Work(shape.name, shape.num_layers, each, each * tokens * shape.num_layers, steps * shape.num_layers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pairs(call: Call, most: int | None = None) -> float:
    """Sum over the call's computed tokens of the keys that each looks at, at most `most`."""
    first = call.num_cached_tokens + 1
    last = call.num_prompt_tokens + max(0, call.num_output_tokens - 1)
    if most is None or last <= most:
        return _sum_to(last) - _sum_to(first - 1)
    below = max(0.0, _sum_to(most) - _sum_to(first - 1)) if first <= most else 0.0
    return below + most * (last - max(first - 1, most))


def _sum_to(count: int) -> float:
    return count * (count + 1) / 2
