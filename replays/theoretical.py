"""AgentX's "theoretical prefix cache hit": what an unlimited cache could give, judged from the trace file alone.

Per session, all calls of all streams in the order of their recorded start share one set of block ids seen so far. A call's hit is the
leading run of its ids that were seen before it. Rates are sums over sums of the calls that succeeded (agentx-harness 1.0.12,
`dataset/loader/weka_metric_prepass.py` and `metrics/theoretical_prefix_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replays.traces import HashIds, Session


@dataclass(frozen=True, slots=True)
class TheoreticalHit:
    """Blocks of one prompt: those in the leading run already seen, and all that the trace names."""

    num_hit_blocks: int
    num_blocks: int


def _leading_run(ids: HashIds, seen: set[int], previous: HashIds) -> tuple[int, int]:
    """(length of the leading run of `ids` in `seen`, where comparing with `previous` stopped)."""
    shared = min(len(ids), len(previous))
    differs = ids[:shared] != previous[:shared]
    same = int(differs.argmax()) if differs.any() else shared
    run = same
    for block in ids[same:].tolist():
        if block not in seen:
            break
        run += 1
    return run, same


def theoretical_hits(session: Session) -> list[list[TheoreticalHit]]:
    """One hit per call, as `[stream][call]` in the order of `session.streams`.

    Cost is linear in the ids that differ from the stream's previous prompt, not in prompt length.
    """
    calls = [
        (request.start_seconds, request.order, stream_index, index)
        for stream_index, stream in enumerate(session.streams)
        for index, request in enumerate(stream.requests)
    ]
    hits = [[TheoreticalHit(0, 0)] * len(stream.requests) for stream in session.streams]
    seen: set[int] = set()
    for _, _, stream_index, index in sorted(calls):
        requests = session.streams[stream_index].requests
        ids = requests[index].hash_ids
        # Everything in the stream's previous prompt has been seen already, whatever came between.
        run, same = _leading_run(ids, seen, requests[index - 1].hash_ids if index else ids[:0])
        seen.update(ids[same:].tolist())
        hits[stream_index][index] = TheoreticalHit(run, len(ids))
    return hits


def hit_rate(hits: Iterable[TheoreticalHit]) -> float | None:
    """Sum of hit blocks over sum of blocks; None when there are no blocks."""
    num_hit = num_all = 0
    for hit in hits:
        num_hit += hit.num_hit_blocks
        num_all += hit.num_blocks
    return num_hit / num_all if num_all else None
