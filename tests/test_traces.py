"""The weka reader: what it takes, what it refuses, and where it says the fault is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from replays.theoretical import hit_rate, theoretical_hits
from replays.traces import TraceError, TraceSet


def call(**fields: object) -> dict[str, object]:
    return {"type": "s", "t": 0.0, "model": "m", "in": 130, "out": 5, "hash_ids": [1, 2]} | fields


def session(*requests: dict[str, object], **fields: object) -> dict[str, object]:
    return {"id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | fields


def subagent(*requests: dict[str, object], **fields: object) -> dict[str, object]:
    marker: dict[str, object] = {"type": "subagent", "t": 10.0, "agent_id": "a", "subagent_type": "Explore", "status": "completed"}
    return marker | {"models": [], "requests": list(requests)} | fields


def written(folder: Path, *sessions: dict[str, object], name: str = "trace.json") -> TraceSet:
    path = folder / name
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in sessions))
    return TraceSet(path)


@pytest.fixture
def real_traces() -> TraceSet:
    folder = os.environ.get("AGENTSERVE_TRACES")
    if not folder:
        pytest.skip("AGENTSERVE_TRACES does not name a folder of recorded traces")
    return TraceSet(Path(folder))


def test_a_call_keeps_its_counts_times_and_ids(tmp_path: Path) -> None:
    read = written(tmp_path, session(call(t=3, api_time=1.5, stop="tool_use"), tool_tokens=10, system_tokens=4))[0]
    request = read.root.requests[0]
    assert (request.start_seconds, request.end_seconds) == (3.0, 4.5)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.stop) == (130, 5, "tool_use")
    assert request.hash_ids.tolist() == [1, 2]
    assert read.root.head_tokens == 14


def test_length_aliases_mean_the_same(tmp_path: Path) -> None:
    plain = call()
    del plain["in"], plain["out"]
    read = written(tmp_path, session(plain | {"input_length": 200, "output_length": 7}))[0]
    assert (read.root.requests[0].num_prompt_tokens, read.root.requests[0].num_output_tokens) == (200, 7)


@pytest.mark.parametrize("num_ids", [0, 1, 2, 3], ids=["none", "shorter", "floor", "ceil"])
def test_id_lists_may_be_short_whole_or_partial(tmp_path: Path, num_ids: int) -> None:
    read = written(tmp_path, session(call(hash_ids=list(range(num_ids)))))[0]
    assert len(read.root.requests[0].hash_ids) == num_ids


@pytest.mark.case("TRC-01")
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (session(call(surprise=1)), "requests[0]"),
        (session(call(), surprise=1), None),
        (session(call(), subagent(call(t=11), surprise=1)), "requests[1]"),
        (session(call(), subagent(call(t=11, surprise=1))), "requests[1].requests[0]"),
        (session(call(type="n", ttft=0.5)), "requests[0]"),
        (session(call(**{"in": -1})), "requests[0].in"),
        (session(call(**{"in": 5.0})), "requests[0].in"),
        (session(call(out=-1)), "requests[0].out"),
        (session(call(hash_ids=[1, -2])), "requests[0].hash_ids[1]"),
        (session(call(hash_ids=[1, 2, 3, 4])), "requests[0].hash_ids"),
        (session(call(hash_ids=[2**63])), "requests[0].hash_ids"),
        (session(call(input_length=130)), "requests[0].in"),
        (session({"type": "s", "t": 0, "model": "m", "out": 1}), "requests[0].in"),
        (session(call(), subagent(subagent())), "requests[1].requests[0].type"),
        (session(call(), subagent(call(t=11)), subagent(call(t=11))), "requests[2].agent_id"),
        (session(call(), block_size=0), "block_size"),
        (session(call(), hash_id_scope="global"), "hash_id_scope"),
    ],
)
def test_a_fault_is_named_by_its_field(tmp_path: Path, bad: dict[str, object], field: str | None) -> None:
    with pytest.raises(TraceError, match=r"trace\.json") as caught:
        written(tmp_path, bad)[0]
    assert caught.value.field == field


@pytest.mark.case("TRC-01")
def test_a_fault_in_a_line_file_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"\n" + msgspec.json.encode(session(call())) + b"\n\n" + msgspec.json.encode(session(call(out="x"), id="two")))
    traces = TraceSet(path)
    assert traces[0].id == "one"
    with pytest.raises(TraceError, match="line 4, requests") as caught:
        traces[1]
    assert (caught.value.row, caught.value.field) == (4, "requests[0].out")


@pytest.mark.case("TRC-01")
def test_malformed_json_and_bad_utf8_are_trace_errors(tmp_path: Path) -> None:
    for content in (b'{"id": "x"', b"\xff\xfe", b'{"id": "\xff"}'):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"bad\.json"):
            TraceSet(path)[0]


@pytest.mark.case("TRC-01")
def test_byte_order_mark_crlf_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    lines = [msgspec.json.encode(session(call(), id=name)) for name in ("one", "two")]
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n   \r\n" + lines[1] + b"\r\n")
    assert [read.id for read in TraceSet(path).checked()] == ["one", "two"]


def test_a_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(session(call(), id=name)))
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [read.id for read in TraceSet(tmp_path)] == ["a", "b"]


def test_missing_and_empty_places_are_trace_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(TraceError, match=path.name):
            TraceSet(path)


def test_a_session_id_may_be_used_once(tmp_path: Path) -> None:
    traces = written(tmp_path, session(call()), session(call()), name="traces.jsonl")
    with pytest.raises(TraceError, match=r"'one' is already used by .*line 1") as caught:
        list(traces.checked())
    assert (caught.value.row, caught.value.field) == (2, "id")


def test_inner_times_before_the_marker_count_from_it(tmp_path: Path) -> None:
    read = written(tmp_path, session(call(), subagent(call(t=0.5), call(t=2.0)), subagent(call(t=10.25), agent_id="b")))[0]
    assert [request.start_seconds for request in read.subagents[0].requests] == [10.5, 12.0]
    assert [request.start_seconds for request in read.subagents[1].requests] == [10.25]


def test_a_subagent_before_the_first_call_is_left_out(tmp_path: Path) -> None:
    read = written(tmp_path, session(subagent(call(t=11)), call(t=20)))[0]
    assert read.subagents == ()
    assert read.num_requests == 1


@pytest.mark.case("TRC-01")
def test_a_shrinking_prompt_is_flagged(tmp_path: Path) -> None:
    read = written(tmp_path, session(call(), call(t=5, **{"in": 64, "hash_ids": [1]}), call(t=9, **{"in": 70, "hash_ids": [1]})))[0]
    assert [request.shrinks for request in read.root.requests] == [False, True, False]


def test_recorded_traces_all_parse_in_seconds(real_traces: TraceSet) -> None:
    started = time.monotonic()
    hits = [hit for session in real_traces.checked() for stream in theoretical_hits(session) for hit in stream]
    assert time.monotonic() - started < 120
    assert len(hits) > len(real_traces)
    rate = hit_rate(hits)
    assert rate is not None
    assert 0.95 < rate < 0.98
