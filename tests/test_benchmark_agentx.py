"""What the agentx benchmark makes of the harness's export."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.agentx import Books, Exported, Summary, compare
from benchmarks.contenders import ContenderFailed
from replays.theoretical import TheoreticalHit

HITS = {("s", 0): TheoreticalHit(0, 10), ("s", 1): TheoreticalHit(10, 12), ("s::sa:a", 0): TheoreticalHit(4, 8)}
SUMMARY = msgspec.json.decode(b'{"theoretical_prefix_cache_hit":{"avg":70.0},"request_count":{"avg":2}}', type=Summary)


def exported(stream: str, turn: int, *, phase: str = "profiling", prompt: int = 100, cached: int = 80, error: object = None) -> Exported:
    value = {
        "metadata": {"conversation_id": stream, "turn_index": turn, "benchmark_phase": phase, "worker_id": "w"},
        "metrics": {"usage_prompt_tokens": {"value": prompt, "unit": "tokens"}, "usage_prompt_cache_read_tokens": {"value": cached}},
        "error": error,
    }
    return msgspec.json.decode(msgspec.json.encode(value), type=Exported)


def test_ours_is_taken_over_the_requests_that_the_harness_profiled() -> None:
    records = [
        exported("s", 0, phase="warmup", cached=0),
        exported("s", 1),
        exported("s::sa:a", 0, cached=40),
        exported("s", 0, error={"code": 500}, prompt=0, cached=0),
    ]
    rows = {row.name: row.figures for row in compare(SUMMARY, records, HITS, Books(prompt=300, cached=120, ceiling_block=150))}
    assert rows["profiled requests"] == {"AgentX": 2}
    assert rows["failed requests"] == {"AgentX": 1}
    assert rows["theoretical prefix hit, %"] == {"AgentX": 70.0, "agentserve": 70.0, "difference": 0.0}
    assert rows["prompt tokens, with warm-up"] == {"AgentX": 300, "agentserve": 300, "difference": 0}
    assert rows["actual prefix hit, %, with warm-up"] == {"AgentX": 40.0, "agentserve": 40.0, "difference": 0.0}
    assert rows["ceiling in whole blocks, %, with warm-up"] == {"AgentX": None, "agentserve": 50.0, "difference": None}


@pytest.mark.parametrize("records", [[], [exported("other", 0)], [exported("s", 0, phase="warmup")]])
def test_an_export_that_does_not_fit_the_trace_is_refused(records: list[Exported]) -> None:
    with pytest.raises(ContenderFailed):
        compare(SUMMARY, records, HITS, Books(0, 0, 0))


def test_the_books_are_read_by_name_and_grow() -> None:
    after = Books(prompt=5, cached=4, ceiling_block=3)
    assert after.since(Books(prompt=1, cached=1, ceiling_block=1)) == Books(prompt=4, cached=3, ceiling_block=2)
