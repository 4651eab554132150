"""The whole replay as its users start it: locust in a child process against a chat server that remembers what it was sent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from replays.records import read_run
from replays.report import Report, make_report, read_report
from replays.traces import TraceSet
from tests.chat_upstream import CAPACITY_TOKENS, ChatUpstream, Received, serving
from tests.replaying import call, replay, session, subagent, written

SAMPLE = Path(__file__).parent.parent / "replays" / "data" / "sample.jsonl"
LOCUSTFILE = Path(__file__).parent.parent / "replays" / "locustfile.py"


def text(received: Received) -> str:
    return "\n".join(message.content or "" for message in received.body.messages)


def marks(upstream: ChatUpstream) -> set[str]:
    return {mark for received in upstream.received for mark in re.findall(r"\[rid:\w+\]", text(received))}


def by_stream(upstream: ChatUpstream) -> dict[str, list[Received]]:
    streams: dict[str, list[Received]] = defaultdict(list)
    for received in upstream.received:
        streams[received.headers["x-correlation-id"]].append(received)
    return streams


def test_every_session_is_played_once_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    with serving(ChatUpstream()) as upstream:
        status = replay(SAMPLE, "--url", upstream.url, "--once", "--concurrency", 3, "--time-scale", 1e6, "--duration", 120, "--json", out)
    report = read_report(out)
    num_calls = sum(one.num_requests for one in TraceSet(SAMPLE))
    assert (status, report.requests, report.failed_requests, report.warmup.requests) == (0, num_calls, 0, 0)
    assert len(upstream.received) == num_calls
    assert report.theoretical_hit_rate == pytest.approx(18942 / 20411)
    assert report.exact_turns == report.unedited_turns
    assert (report.kv_capacity_tokens, report.kv_usage_peak, report.engine) == (CAPACITY_TOKENS, 0.25, "vllm 0.0.1, nano")
    assert report.prompt_tokens == pytest.approx(report.planned_prompt_tokens, rel=0.03)
    assert report.actual_hit_rate == pytest.approx(18942 / 20411, abs=0.03)


def test_gaps_and_joins_are_kept_in_time(tmp_path: Path) -> None:
    traces = written(
        tmp_path,
        session("one", call(0, 640), subagent("a", call(6, 320, 500), call(9, 384, 500)), call(20, 1280)),
    )
    with serving(ChatUpstream(seconds=0.3)) as upstream:
        assert replay(traces, "--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 10) == 0
    assert len(by_stream(upstream)) == 2
    parent, agent = (by_stream(upstream)[name] for name in sorted(by_stream(upstream)))
    # Recorded idle times of 5, 2 and 10 s, each counted from the completion of what ended last, ten times as fast.
    assert agent[0].started - parent[0].ended == pytest.approx(0.5, abs=0.15)
    assert agent[1].started - agent[0].ended == pytest.approx(0.2, abs=0.15)
    assert parent[1].started - agent[1].ended == pytest.approx(1.0, abs=0.15)


@pytest.mark.slow
@pytest.mark.case("TRC-03")
def test_the_warmup_primes_asks_for_one_token_and_is_apart(tmp_path: Path) -> None:
    sessions = [session(name, *(call(10.0 * turn, 640 + 128 * turn) for turn in range(20))) for name in ("one", "two")]
    kept = tmp_path / "records.jsonl"
    with serving(ChatUpstream()) as upstream:
        status = replay(
            written(tmp_path, *sessions),
            *("--url", upstream.url, "--concurrency", 2, "--time-scale", 100, "--duration", 2, "--warmup", 3, "--records", kept),
        )
    run = read_run(kept)
    warmup = [record for record in run.records if record.phase == "warmup"]
    profiling = [record for record in run.records if record.phase == "profiling"]
    assert status == 0
    assert len(warmup) == 2 * (1 + 3)
    assert {record.num_output_tokens for record in warmup} == {1}
    assert {record.num_output_tokens for record in profiling} == {4}
    assert max(record.ended for record in warmup) <= min(record.started for record in profiling)
    first = {record.session: record.index for record in sorted(warmup, key=lambda record: -record.started)}
    assert all(5 <= index <= 15 for index in first.values())


@pytest.mark.slow
@pytest.mark.case("TRC-03")
def test_a_drained_lane_takes_the_next_session_with_a_new_marker(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(2, 704)), session("two", call(0, 640)))
    kept = tmp_path / "records.jsonl"
    with serving(ChatUpstream()) as upstream:
        replay(traces, "--url", upstream.url, "--concurrency", 1, "--time-scale", 100, "--duration", 2, "--warmup", 0, "--records", kept)
    plays: dict[int, set[str]] = defaultdict(set)
    for received in upstream.received:
        plays[int(received.headers["x-correlation-id"].split("-")[1])].add(text(received).split()[0])
    assert len(plays) > 3
    assert all(len(marks) == 1 for marks in plays.values())
    assert len(set.union(*plays.values())) == len(plays)
    names = {record.play: record.session for record in read_run(kept).records}
    assert [names[play] for play in sorted(names)][:4] == ["one", "two", "one", "two"]


@pytest.mark.slow
@pytest.mark.case("TRC-02")
def test_live_answers_are_sent_back_with_reasoning_calls_and_results(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(5, 1280)))
    with serving(ChatUpstream(tool_calls=True)) as upstream:
        assert replay(traces, "--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 100, "--assistant", "live") == 0
    _, answer, result = upstream.received[1].body.messages
    assert (answer.role, answer.content, answer.reasoning) == ("assistant", "word0 word1 word2 word3 ", "well ")
    assert answer.tool_calls == [{"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}]
    assert (result.role, result.tool_call_id) == ("tool", "call-1")
    assert len((result.content or "").split()) > 500


@pytest.mark.case("TRC-02")
def test_canned_answers_stand_whatever_the_server_says(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(5, 1280)))
    with serving(ChatUpstream(tool_calls=True)) as upstream:
        assert replay(traces, "--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 100) == 0
    assert [message.role for message in upstream.received[1].body.messages] == ["user", "assistant", "user"]
    assert "word0" not in text(upstream.received[1])


@pytest.mark.parametrize(("threshold", "status"), [(0.1, 1), (0.5, 0)])
def test_failures_are_counted_the_session_goes_on_and_the_exit_code_tells(tmp_path: Path, threshold: float, status: int) -> None:
    traces = written(tmp_path, session("one", *(call(turn, 640 + 64 * turn) for turn in range(6))))
    out = tmp_path / "report.json"
    upstream = ChatUpstream(fail=frozenset({1}), break_off=frozenset({3}))
    with serving(upstream):
        arguments = ("--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 1e4)
        assert replay(traces, *arguments, "--failed-threshold", threshold, "--json", out) == status
    report = read_report(out)
    assert (report.requests, report.failed_requests) == (6, 2)


def test_a_full_context_ends_the_session_without_failing_the_run(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", *(call(turn, 640 + 64 * turn) for turn in range(6))))
    out = tmp_path / "report.json"
    with serving(ChatUpstream(overflow=frozenset({2}))) as upstream:
        assert replay(traces, "--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 1e4, "--json", out) == 0
    report = read_report(out)
    assert (report.requests, report.failed_requests, report.overflowed_requests) == (3, 0, 1)


@pytest.mark.slow
@pytest.mark.case("TRC-02")
def test_the_same_trace_goes_cold_to_the_engine_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "report.json", tmp_path / "report.png"
    with serving(ChatUpstream(sessions=False)) as engine, serving(ChatUpstream(engine_url=engine.url)) as server:
        arguments = ("--url", server.url, "--direct", "--once", "--concurrency", 2, "--scale", "1/4", "--time-scale", 1e6)
        assert replay(SAMPLE, *arguments, "--json", out, "--png", picture) == 0
    report = read_report(out)
    assert report.direct is not None
    assert report.direct.planned_prompt_tokens == report.planned_prompt_tokens
    assert report.direct.requests == report.requests
    assert report.direct.ceiling_hit_rate is None
    assert report.direct.actual_hit_rate == pytest.approx(report.actual_hit_rate, abs=0.005)
    ours, theirs = (marks(upstream) for upstream in (server, engine))
    assert len(ours) == len(theirs) == len(TraceSet(SAMPLE))
    assert ours.isdisjoint(theirs)
    assert "direct" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_duration_ends_the_run_and_what_is_in_flight_gets_the_grace(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(2, 1280)))
    kept = tmp_path / "records.jsonl"
    with serving(ChatUpstream(seconds=20)) as upstream:
        started = time.monotonic()
        arguments = ("--url", upstream.url, "--once", "--concurrency", 1, "--duration", 1, "--grace", 0.5, "--failed-threshold", 1)
        assert replay(traces, *arguments, "--records", kept) == 0
        assert time.monotonic() - started < 15
    run = read_run(kept)
    assert run.end is not None
    assert (run.end.num_cancelled, make_report(run).cancelled_requests) == (1, 1)


@pytest.mark.parametrize("arguments", [("--scale", "2"), ("--scale", "x"), ("--time-scale", "0"), ("--concurrency", "0"), ("--nonsense",)])
def test_wrong_use_exits_with_two(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from replays.cli import app; app()", "replay", str(SAMPLE), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=LOCUSTFILE.parent.parent)
    assert ended.returncode == 2, ended.stderr
    assert arguments[0] in ended.stdout + ended.stderr


def test_missing_traces_and_servers_exit_with_two(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path / "none", "--url", "http://127.0.0.1:9") == 2
    assert "no such file or folder" in capfd.readouterr().err
    assert replay(SAMPLE, "--url", "http://127.0.0.1:9") == 2
    assert "does not answer" in capfd.readouterr().err


def test_a_direct_run_needs_the_engines_address(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(ChatUpstream()) as server:
        assert replay(SAMPLE, "--url", server.url, "--direct") == 2
    assert "--direct-url" in capfd.readouterr().err
    assert not server.received


def test_the_servers_template_is_taken_off_the_first_message(tmp_path: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(5, 1280)))
    sent = []
    for template_tokens in (0, 200):
        with serving(ChatUpstream(template_tokens=template_tokens)) as upstream:
            replay(traces, "--url", upstream.url, "--once", "--concurrency", 1, "--time-scale", 100)
        assert len(upstream.probes) == 1
        sent.append([len(text(received).split()) for received in upstream.received])
    assert [without - with_template for without, with_template in zip(*sent, strict=True)] == [200, 200]


def locust(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--skip-log-setup", *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_locusts_own_command_line_takes_the_options_from_the_environment(tmp_path: Path) -> None:
    kept = tmp_path / "records.jsonl"
    environment = {
        **os.environ,
        "AGENTSERVE_REPLAY_TRACES": str(SAMPLE),
        "AGENTSERVE_REPLAY_RECORDS": str(kept),
        "AGENTSERVE_REPLAY_TIME_SCALE": "1000000",
        "AGENTSERVE_REPLAY_ONCE": "true",
        "AGENTSERVE_REPLAY_SCALE": "1/4",
    }
    with serving(ChatUpstream()) as upstream:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "2", "-r", "2", "-H", upstream.url]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    report: Report = make_report(read_run(kept))
    assert (report.scale, report.requests) == (0.25, sum(one.num_requests for one in TraceSet(SAMPLE)))


def test_distributed_workers_share_the_sessions_and_the_master_has_all_records(tmp_path: Path) -> None:
    kept = tmp_path / "records.jsonl"
    shared = ("--replay-traces", SAMPLE, "--replay-once", "--replay-time-scale", 1e6)
    with serving(ChatUpstream()) as upstream:
        port = 15557 + os.getpid() % 1000
        master = locust(
            *("--master", "--headless", "--expect-workers", 2, "--master-bind-port", port, "-u", 4, "-r", 4, "-H", upstream.url),
            *(*shared, "--replay-records", kept),
        )
        workers = [locust("--worker", "--master-port", port, "--expect-workers", 2, *shared) for _ in range(2)]
        processes = [master, *workers]
        try:
            errors = [process.communicate(timeout=120)[1] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
    assert master.returncode == 0, errors
    run = read_run(kept)
    traces = TraceSet(SAMPLE)
    assert len(run.records) == sum(one.num_requests for one in traces)
    assert {(record.session, record.play) for record in run.records} == {(one.id, place) for place, one in enumerate(traces)}
