"""AgentX's theoretical hit rate: an unlimited cache per session, judged from block ids in recorded order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replays.theoretical import TheoreticalHit, hit_rate, theoretical_hits
from replays.traces import Request, Session, Stream, TraceSet


def request(start: float, ids: list[int], order: int = 0) -> Request:
    return Request(order, start, 0.0, 64 * len(ids), 1, np.array(ids, dtype=np.int64), "")


def tree(root: list[Request], *subagents: list[Request]) -> Session:
    return Session("s", 64, Stream("", tuple(root)), tuple(Stream(f"a{i}", tuple(one)) for i, one in enumerate(subagents)))


def pairs(session: Session) -> list[list[tuple[int, int]]]:
    return [[(hit.num_hit_blocks, hit.num_blocks) for hit in stream] for stream in theoretical_hits(session)]


def by_definition(session: Session) -> list[list[tuple[int, int]]]:
    """The figure as it is defined, one block after the other."""
    order = sorted(
        (one.start_seconds, one.order, stream, index)
        for stream, line in enumerate(session.streams)
        for index, one in enumerate(line.requests)
    )
    found: dict[tuple[int, int], tuple[int, int]] = {}
    seen: set[int] = set()
    for _, _, stream, index in order:
        ids = session.streams[stream].requests[index].hash_ids.tolist()
        run = next((place for place, block in enumerate(ids) if block not in seen), len(ids))
        found[stream, index] = (run, len(ids))
        seen.update(ids)
    return [[found[stream, index] for index in range(len(line.requests))] for stream, line in enumerate(session.streams)]


def test_the_first_prompt_hits_nothing_and_the_next_its_prefix() -> None:
    assert pairs(tree([request(0, [1, 2]), request(1, [1, 2, 3])])) == [[(0, 2), (2, 3)]]


def test_a_seen_block_after_an_unseen_one_does_not_count() -> None:
    assert pairs(tree([request(0, [1, 2, 3]), request(1, [1, 9, 3])])) == [[(0, 3), (1, 3)]]


def test_streams_share_what_was_recorded_before_them() -> None:
    session = tree([request(0, [1, 2]), request(10, [1, 2, 7])], [request(5, [1, 2, 7])])
    assert pairs(session) == [[(0, 2), (3, 3)], [(2, 3)]]


def test_equal_times_are_settled_by_the_order_in_the_file() -> None:
    session = tree([request(0, [1], order=0), request(5, [1, 2], order=2)], [request(5, [1, 2], order=1)])
    assert pairs(session) == [[(0, 1), (2, 2)], [(1, 2)]]


def test_rates_are_sums_over_sums_and_nothing_gives_none() -> None:
    assert hit_rate([TheoreticalHit(1, 2), TheoreticalHit(0, 6)]) == 1 / 8
    assert hit_rate([TheoreticalHit(0, 0)]) is None


def test_calls_without_ids_count_for_nothing() -> None:
    assert pairs(tree([request(0, []), request(1, [1])])) == [[(0, 0), (0, 1)]]


ids_lists = st.lists(st.integers(0, 6), max_size=6, unique=True)
streams = st.lists(st.tuples(st.integers(0, 9), ids_lists), min_size=1, max_size=6)


@given(st.lists(streams, min_size=1, max_size=3))
def test_it_equals_its_definition(lines: list[list[tuple[int, list[int]]]]) -> None:
    made = [[request(float(start), ids, order) for start, ids in sorted(line)] for order, line in enumerate(lines)]
    session = tree(made[0], *made[1:])
    assert pairs(session) == by_definition(session)


def test_the_shipped_sample_has_the_rate_that_agentx_finds() -> None:
    # What agentx-harness 1.0.12 counted for this file.
    sample = TraceSet(Path(__file__).parent.parent / "replays" / "data" / "sample.jsonl")
    total = [hit for session in sample for stream in theoretical_hits(session) for hit in stream]
    assert (sum(hit.num_hit_blocks for hit in total), sum(hit.num_blocks for hit in total)) == (18942, 20411)
