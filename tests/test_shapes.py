"""Shapes and repeated work of a workload: counted by hand, from traces and from records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentserve.cli import build_cli
from model.m3.config import MINIMAX_M3
from model.m3.index_reuse import fixed_plan, index_work
from model.m3.shapes import local_shapes
from model.m3.sharding import Shard
from replays.records import Header, Record, write_entries
from replays.shapes import Call, distributions, prefill_steps, read_calls, repeated_work

SAMPLE = Path(__file__).parents[1] / "replays" / "data" / "sample.jsonl"


def record(number: int, **fields: object) -> Record:
    base = {"phase": "profiling", "session": "s", "play": 0, "stream": "", "index": number, "started": 0.0, "ended": 9.0}
    return msgspec.convert(base | fields, Record)


def test_calls_of_a_trace_hit_what_an_unlimited_cache_would_hold() -> None:
    calls = list(read_calls(SAMPLE, 128))
    assert len(calls) > 20
    assert all(call.num_cached_tokens % 128 == 0 and 0 <= call.num_cached_tokens < call.num_prompt_tokens for call in calls)
    assert calls[0].num_cached_tokens == 0
    assert sum(call.num_cached_tokens for call in calls) > 0.5 * sum(call.num_prompt_tokens for call in calls)


def test_calls_of_a_replay_have_the_engines_hits_and_the_batches_that_decoded(tmp_path: Path) -> None:
    header = Header(engine="e", trace="t", seed=1, concurrency=2, scale=1, time_scale=1, assistant="live", url="u")
    entries = [
        record(0, first_content=0.0, last_content=4.0, num_prompt_tokens=300, num_output_tokens=10, num_cached_tokens=128),
        record(1, first_content=3.0, last_content=9.0, num_prompt_tokens=500, num_output_tokens=20),
        record(2, error="x", num_prompt_tokens=500, num_output_tokens=20),
        record(3),
    ]
    write_entries(tmp_path / "run.jsonl", [header, *entries])
    calls = list(read_calls(tmp_path / "run.jsonl", 128))
    assert calls == [Call(300, 128, 10, (0.0, 4.0)), Call(500, 0, 20, (3.0, 9.0))]
    by_name = {each.name: each for each in distributions(calls, 256, 4)}
    assert by_name["rows of a decode step (M)"].mean == pytest.approx((3 * 4 + 1 * 8 + 5 * 4) / 9)  # weighted by time
    assert by_name["rows of a decode step (M)"].largest == 8
    assert by_name["rows of a prefill step (M)"].mean == pytest.approx((172 + 256 + 244) / 3)
    assert by_name["new tokens"].percentiles[-1] == 500


def test_work_equals_a_count_token_by_token() -> None:
    calls = [Call(5_000, 4_864, 30), Call(1_900, 0, 400), Call(700, 640, 1)]
    shard, plan = Shard(MINIMAX_M3, 4), fixed_plan(57, 4)
    work = {each.part: each for each in repeated_work(calls, shard, plan, batched_tokens=512)}
    pairs = chosen = tokens = steps = 0
    for call in calls:
        last = call.num_prompt_tokens + call.num_output_tokens - 1  # the last token that is sampled is not computed
        for position in range(call.num_cached_tokens + 1, last + 1):
            pairs += position
            chosen += min(position, 16 * 128)
            tokens += 1
        steps += -(-call.num_new_tokens // 512) + call.num_output_tokens - 1
    assert work["sparse attention"].flops_per_request == pytest.approx(4 * 16 * 128 * chosen / 3 * 57)
    assert work["dense attention"].flops_per_request == pytest.approx(4 * 16 * 128 * pairs / 3 * 3)
    assert work["indexer scores"].flops_per_request == pytest.approx(2 * 128 * pairs / 3 * 15)
    assert work["indexer scores"].runs_per_request == pytest.approx(15 * steps / 3)
    qkv = next(shape for shape in local_shapes(shard) if shape.name.startswith("sparse"))
    assert work[qkv.name].flops_per_request == pytest.approx(2 * qkv.n * qkv.k * tokens / 3 * 57)
    whole = index_work(MINIMAX_M3, plan, num_index_heads=1, query_tokens=[1_900], context_tokens=[1_900])
    alone = {each.part: each for each in repeated_work([Call(1_900, 0, 1)], shard, plan, 4_096)}
    assert alone["indexer scores"].flops_per_request == pytest.approx(whole.flops)


def test_steps_are_full_but_for_the_last() -> None:
    assert prefill_steps(Call(1_000, 0, 1), 400) == [400, 400, 200]
    assert prefill_steps(Call(800, 0, 1), 400) == [400, 400]
    assert prefill_steps(Call(800, 799, 1), 400) == [1]


def test_the_command_prints_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, code in ((SAMPLE, 0), (tmp_path / "none.jsonl", 2)):
        with pytest.raises(SystemExit) as ended:
            build_cli()(["shapes", str(source), "--json", str(tmp_path / "shapes.json")])
        assert ended.value.code == code
    printed = capsys.readouterr()
    assert "rows of a prefill step (M)" in printed.out
    assert "no such file" in printed.err
    written = msgspec.json.decode((tmp_path / "shapes.json").read_bytes())
    assert {"calls", "distributions", "work"} == set(written)
