"""Readers of row formats on inputs written by hand, sound and not."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replays.formats import detect, open_traces
from replays.traces import Session, TraceError


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def read(path: Path, name: str = "auto") -> list[Session]:
    return list(open_traces(path, name).checked())


def mooncake(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]} | changes


def dynamo(**changes: Any) -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": 130, "input_sequence_hashes": [2**64 - 1, 5, 6]}
    request = {"request_id": "a", "output_tokens": 7, "request_received_ms": 10_000, "total_time_ms": 1500.0, "replay": replay}
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 11_500, "request": request}
    for path, value in changes.items():
        part: Any = event
        *names, last = path.split("__")
        for name in names:
            part = part.setdefault(name, {})
        if value is None:
            part.pop(last, None)
        else:
            part[last] = value
    return event


HEADER = {"kind": "capture", "version": 1, "run": "00000000", "block_size": 16, "model": "m", "started": 100.0}


def turn(**changes: Any) -> dict[str, Any]:
    row = {"kind": "turn", "session": "s", "t": 100.0, "seconds": 2.0, "num_prompt_tokens": 40, "num_output_tokens": 10, "ids": [1, 2]}
    return row | changes


def test_mooncake_rows_without_sessions_are_sessions_of_one_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(timestamp=2500), mooncake(timestamp=1000, input_length=512, hash_ids=[1]))
    assert detect(path) == "mooncake"
    first, second = read(path)
    assert (first.block_size, first.scope, first.has_clock) == (512, "global", True)
    assert first.root.requests[0].start_seconds == 1.0
    assert second.root.requests[0].hash_ids.tolist() == [1, 2, 3]
    assert second.root.requests[0].num_prompt_tokens == 1100


def test_mooncake_rows_of_a_session_follow_one_another_and_their_delay_counts(tmp_path: Path) -> None:
    later = {"session_id": "x", "delay_ms": 3000, "input_tokens": 1600, "output_tokens": 1, "hash_ids": [1, 2, 3, 4]}
    (session,) = read(write(tmp_path / "t.jsonl", mooncake(session_id="x", created_time=1000, timestamp=None), later))
    one, two = session.root.requests
    assert (one.start_seconds, two.start_seconds) == (1.0, 4.0)
    assert two.hash_ids.tolist() == [1, 2, 3, 4]


def test_a_mooncake_row_that_only_adds_to_its_session_is_completed(tmp_path: Path) -> None:
    added = mooncake(session_id="x", delay=1000, input_length=600, hash_ids=[8, 9], timestamp=None)
    (session,) = read(write(tmp_path / "t.jsonl", mooncake(session_id="x"), added))
    _, two = session.root.requests
    assert two.num_prompt_tokens == 1100 + 5 + 600
    assert two.hash_ids.tolist()[:2] == [1, 2]
    assert len(two.hash_ids) == 1705 // 512
    assert not set(two.hash_ids.tolist()[2:]) & {1, 2, 3, 8, 9}


def test_the_block_size_of_mooncake_rows_follows_from_their_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(input_length=130, hash_ids=[1, 2, 3]), mooncake(input_length=64, hash_ids=[1]))
    assert read(path)[0].block_size == 64


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input_length": 5, "hash_ids": []}, "output_length: is missing"),
        (mooncake(hash_ids=list(range(99))), "fit no block size"),
        (mooncake(input_length=-1), "input_length"),
        (mooncake(hash_ids=["x"]), "hash_ids[0]: Expected `int`"),
        (mooncake(session_id="x", timestamp=None), "needs a timestamp or a delay"),
    ],
)
def test_bad_mooncake_rows_are_named_by_line_and_field(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(session_id="x"), row)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert f"{path}, line 2" in str(caught.value)
    assert problem in str(caught.value)


def test_dynamo_events_make_trees_of_sessions(tmp_path: Path) -> None:
    parent = dynamo(agent_context={"session_id": "root"}, request__finish_reason_metadata={"tool_calls": [{"name": "Bash"}]})
    child = dynamo(agent_context={"session_id": "sub", "parent_session_id": "root"}, request__request_id="b")
    grandchild = dynamo(agent_context={"session_id": "subsub", "parent_session_id": "sub"}, request__request_id="c")
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1}
    path = tmp_path / "trace.000001.jsonl.gz"
    rows = [{"event": parent}, tool, child, {"event": grandchild}]
    path.write_bytes(gzip.compress(b"\n".join(msgspec.json.encode(row) for row in rows)))
    assert detect(path) == "dynamo"
    (session,) = read(tmp_path)
    assert [stream.name for stream in session.streams] == ["", "sub", "subsub"]
    request = session.root.requests[0]
    assert (request.start_seconds, request.duration_seconds, request.num_prompt_tokens) == (10.0, 1.5, 130)
    assert (request.stop, request.tools, len(request.hash_ids)) == ("tool_use", ("Bash",), 3)


def test_dynamo_requests_without_a_session_stand_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", dynamo(), dynamo(request__request_id="b", request__total_time_ms=None))
    first, second = read(path)
    assert (first.id, second.id) == ("a", "b")
    assert second.root.requests[0].duration_seconds == 1.5


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (dynamo(request__request_id="b", request__replay=None), "without replay hashes"),
        (dynamo(request__request_id="b", request__output_tokens=None), "request.output_tokens: is missing"),
        (dynamo(request__request_id="b", request__request_received_ms=None), "request.request_received_ms: is missing"),
        (dynamo(request__request_id="b", request__replay__input_length=129 * 64), "129 are needed"),
        (dynamo(request__request_id="b", request__replay__trace_block_size=32), "blocks of 32 tokens after blocks of 64"),
        (dynamo(), "'a' is there twice"),
        (dynamo(event_type="surprise"), "no event of dynamo.request.trace.v1"),
    ],
)
def test_bad_dynamo_events_are_named_by_line(tmp_path: Path, event: dict[str, Any], problem: str) -> None:
    path = write(tmp_path / "t.jsonl", dynamo(), event)
    with pytest.raises(TraceError, match="line 2") as caught:
        read(path)
    assert problem in str(caught.value)


def test_captured_turns_name_only_the_blocks_that_changed(tmp_path: Path) -> None:
    later = turn(t=110.0, num_prompt_tokens=60, kept=1, ids=[7, 8], relation="exact", stop="end_turn")
    child = turn(session="c", parent="s", t=103.0, tools=["Read"], stop="tool_use", ttft=0.5, wait=0.25)
    path = write(tmp_path / "capture-1.jsonl", HEADER, turn(), child, {"kind": "end", "session": "c", "t": 109.0}, later)
    assert detect(path) == "capture"
    (session,) = read(tmp_path)
    one, two = session.root.requests
    assert [one.hash_ids.tolist(), two.hash_ids.tolist()] == [[1, 2], [1, 7, 8]]
    assert (one.echoed, two.echoed) == (True, False)
    assert (session.subagents[0].requests[0].tools, session.subagents[0].requests[0].stop) == (("Read",), "tool_use")
    assert two.start_seconds - one.end_seconds == 8.0


def test_ids_of_two_runs_are_never_the_same_blocks(tmp_path: Path) -> None:
    write(tmp_path / "capture-1.jsonl", HEADER, turn())
    write(tmp_path / "capture-2.jsonl", HEADER | {"run": "0000ffff"}, turn(session="other"))
    ids = [set(session.root.requests[0].hash_ids.tolist()) for session in read(tmp_path)]
    assert not ids[0] & ids[1]


def test_a_last_line_that_was_cut_off_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "capture-1.jsonl", HEADER, turn(), turn(t=120.0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(read(path)[0].root.requests) == 1
    path.write_bytes(whole[:-20] + b"\n")
    with pytest.raises(TraceError, match="line 3"):
        read(path)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([turn()], "no header"),
        ([HEADER], "no turn was captured"),
        ([HEADER, turn(kept=1)], "keeps 1 blocks of a turn that had 0"),
        ([HEADER | {"version": 2}, turn()], "version 2"),
        ([HEADER, turn(seconds=-1)], "seconds"),
        ([HEADER, turn(), HEADER | {"block_size": 32}, turn()], "keep one size in a folder"),
    ],
)
def test_bad_captures_say_what_is_wrong(tmp_path: Path, rows: list[dict[str, Any]], problem: str) -> None:
    path = write(tmp_path / "t.jsonl", *rows)
    with pytest.raises(TraceError) as caught:
        read(path, "capture")
    assert problem in str(caught.value)


def test_what_is_no_row_at_all_is_left_to_wekas_messages(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("not json\n")
    assert detect(path) == "weka"
    with pytest.raises(TraceError, match="not valid JSON"):
        read(path)
    with pytest.raises(TraceError, match="no such file"):
        open_traces(tmp_path / "nothing", "mooncake")


def test_errors_travel_between_processes() -> None:
    error = TraceError("is bad", path=Path("x"), row=3, field="f")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.path, again.row, again.field) == (Path("x"), 3, "f")
