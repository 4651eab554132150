"""Traces with bad rows: a lenient reading leaves them out, counts them and says where and why; a strict one stops at the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replays.cli import app
from replays.formats import Sessions, open_traces
from replays.report import read_report
from replays.row_faults import MAX_NAMED, RowFaults, RowsReport, say_rows
from replays.traces import TraceError
from tests.chat_upstream import ChatUpstream, serving
from tests.replaying import call, replay, session
from tests.test_trace_formats import HEADER, dynamo, mooncake, turn

Row = Callable[[int], dict[str, Any]]


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


def named(rows: RowsReport) -> dict[int | None, str]:
    return {fault.line: fault.reason for fault in rows.skipped}


def read(path: Path, name: str = "auto") -> tuple[Sessions, int, RowsReport]:
    faults = RowFaults(strict=False)
    sessions = open_traces(path, name, faults)
    num = sum(found.num_requests for found in sessions.checked())
    return sessions, num, faults.report()


def of_mooncake(number: int) -> dict[str, Any]:
    return mooncake(session_id=f"s{number}", timestamp=1000 * number)


def of_dynamo(number: int) -> dict[str, Any]:
    return dynamo(request__request_id=f"r{number}")


def of_capture(number: int) -> dict[str, Any]:
    return HEADER if number == 0 else turn(session=f"s{number}", t=100.0 + number)


def of_weka(number: int) -> dict[str, Any]:
    return session(f"s{number}", call(0, 128), call(5, 192))


@pytest.mark.case("TRC-01")
def test_every_bad_row_of_a_file_is_named_with_its_line_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first = mooncake(session_id="a")
    shrunk = mooncake(session_id="a", timestamp=50, input_length=600, hash_ids=[1, 2])
    negative = mooncake(session_id="a", timestamp=-5, input_length=1200, output_length=0)
    other = mooncake(session_id="b", timestamp=10)
    lines = [
        *(b"\xef\xbb\xbf" + encoded(first) + b"\r", b"", encoded(shrunk), encoded(negative)),
        encoded(other).replace(b'"timestamp":10', b'"timestamp":1e999'),
        *(encoded(other), encoded(other), encoded(other | {"input_length": "10"}), encoded(other)[:-30]),
    ]
    path.write_bytes(b"\n".join(lines))
    _, num, rows = read(path)
    assert num == 3
    assert sorted(named(rows), key=str) == [4, 5, 7, 8, 9]
    for line, word in ((4, "nothing is generated"), (5, "out of range"), (7, "again"), (8, "Expected `int"), (9, "truncated")):
        assert word in named(rows)[line]
    assert [(fault.line, "shrinks" in fault.reason) for fault in rows.flagged] == [(3, True)]
    with pytest.raises(TraceError, match="line 4"):
        open_traces(path)


BAD: list[tuple[str, Row, Any, str]] = [
    ("mooncake", of_mooncake, {"timestamp": -1}, "is negative"),
    ("mooncake", of_mooncake, {"output_length": 0}, "nothing is generated"),
    ("mooncake", of_mooncake, {"hash_ids": [1]}, "fit no block size"),
    ("mooncake", of_mooncake, {"timestamp": "1"}, "Expected `float"),
    ("dynamo", of_dynamo, {"event_type": "surprise"}, "no event of"),
    ("dynamo", of_dynamo, {"request": None}, "without replay hashes"),
    ("dynamo", of_dynamo, {"event_time_unix_ms": -1}, "Expected `int` >= 0"),
    ("capture", of_capture, {"t": -1.0}, "before the epoch"),
    ("capture", of_capture, {"kept": 9}, "keeps 9 blocks"),
    ("capture", of_capture, {"num_prompt_tokens": "9"}, "Expected `int`"),
    ("weka", of_weka, {"requests": [call(-1.0, 128)]}, "Expected `float` >= 0"),
    ("weka", of_weka, {"surprise": 1}, "unknown field"),
    ("weka", of_weka, {"id": "s1"}, "already used by"),
]


@pytest.mark.case("TRC-01")
@pytest.mark.parametrize(("name", "row", "change", "reason"), BAD)
def test_a_bad_row_of_any_form_costs_itself_alone(tmp_path: Path, name: str, row: Row, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "t.jsonl"
    good = [encoded(row(number)) for number in range(6)]
    path.write_bytes(b"\n".join(good) + b"\n")
    _, whole, _ = read(path, name)
    bad = [*good[:3], encoded(row(3) | change), b"not JSON", *good[4:], b""]
    path.write_bytes(b"\n".join(bad))
    _, num, rows = read(path, name)
    of_one = whole // len([line for line in good if line != encoded(HEADER)])
    assert num == whole - of_one
    assert list(named(rows)) == [4, 5]
    assert reason in named(rows)[4]
    assert "JSON" in named(rows)[5]
    with pytest.raises(TraceError, match=r"line [45]"):  # what one row alone cannot show is found after what each does
        list(open_traces(path, name).checked())


@pytest.mark.case("TRC-01")
def test_a_capture_that_was_cut_off_is_read_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "capture-1.jsonl"
    path.write_bytes(b"\n".join(encoded(of_capture(number)) for number in range(3))[:-20])
    for strict in (False, True):
        faults = RowFaults(strict=strict)
        assert len(open_traces(path, faults=faults)) == 1
        assert "cut off" in named(faults.report())[3]


@pytest.mark.case("TRC-01")
def test_a_file_whose_first_line_is_bad_is_still_told_from_other_forms(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"{cut\n" + encoded(of_mooncake(1)) + b"\n")
    _, num, rows = read(path)
    assert (num, list(named(rows))) == (1, [1])


@pytest.mark.case("TRC-01")
def test_a_report_names_some_and_counts_all() -> None:
    faults = RowFaults(strict=False)
    for line in range(1, 2 * MAX_NAMED):
        for _ in range(2):  # a row that is read twice is one row
            faults.skip(TraceError("is bad", path=Path("t.jsonl"), row=line))
    rows = faults.report()
    assert (rows.num_skipped, len(rows.skipped), rows.num_flagged) == (2 * MAX_NAMED - 1, MAX_NAMED, 0)
    assert say_rows(rows)[1] == "  t.jsonl, line 1: is bad"
    assert say_rows(RowsReport()) == []


@pytest.mark.case("TRC-01")
@pytest.mark.parametrize("num_good", [3, 40], ids=["here", "in other processes"])
def test_a_simulation_says_what_it_left_out_and_a_strict_one_does_not_begin(
    tmp_path: Path, num_good: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    good = [encoded(of_weka(number)) for number in range(num_good)]
    path.write_bytes(b"\n".join([*good[:2], b'{"id"', *good[2:], good[0]]))
    last = num_good + 2
    command = ["simulate", str(path), "--policy", "lru", "--streams", "2", "--duration", "0", "--block-size", "64", "--jobs", "2"]
    assert app([*command, "--json", str(out)], result_action="return_value") == 0
    told = capsys.readouterr().err
    assert "2 rows of the trace left out" in told
    found = msgspec.json.decode(out.read_bytes())
    assert [(fault["line"], "twice" in fault["reason"]) for fault in found["rows"]["skipped"]] == [(3, False), (last, True)]
    assert found["runs"][0]["num_requests"] == 2 * num_good
    assert app([*command, "--strict"], result_action="return_value") == 2
    assert "line 3" in capsys.readouterr().err


@pytest.mark.case("TRC-01")
@pytest.mark.parametrize("command", ["simulate", "tune"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x8f\xff\x00\x01" * 99, "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"id": "x", "requ', "not valid JSON"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b'{"a": 1}', "unknown field `a`"),
    ],
    ids=["binary", "empty", "cut", "a list", "another object"],
)
def test_a_lone_bad_trace_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes, said: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert app([command, str(path), "--jobs", "1"], result_action="return_value") == 2
    told = capsys.readouterr().err
    assert said in told
    assert str(path) in told
    assert "no session has a call to play" in told


@pytest.mark.case("TRC-01", "TRC-03")
def test_a_replay_reports_bad_rows_and_says_when_its_rate_is_an_upper_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sessions with a head in common and, without a marker, no more; idle times of an hour are dropped."""
    path, out = tmp_path / "t.jsonl", tmp_path / "report.json"
    sessions = [session(name, call(0, 640), call(3600, 1280)) for name in ("one", "two")]
    path.write_bytes(b"\n".join([encoded(sessions[0]), b"{", encoded(sessions[1]), encoded(sessions[0])]))
    arguments = ("--once", "--concurrency", 1, "--duration", 60, "--delays", "zero", "--marker", "off", "--assistant", "live")
    with serving(ChatUpstream()) as upstream:
        assert replay(path, "--url", upstream.url, "--strict", *arguments) == 2
        assert not upstream.received
        assert replay(path, "--url", upstream.url, *arguments, "--json", out) == 0
        assert len(upstream.received) == 4
        assert not any("[rid:" in (message.content or "") for received in upstream.received for message in received.body.messages)
    report = read_report(out)
    assert report.rows is not None
    assert list(named(report.rows)) == [2, 4]
    assert (report.delays, report.marker, report.is_upper_bound) == ("zero", "off", True)
    assert report.shared_head_share is not None
    assert report.own_history_share == pytest.approx(1 - report.shared_head_share)
    assert "UPPER BOUND" in capsys.readouterr().out
