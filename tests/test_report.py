"""The report's figures from hand-made records, its JSON, its tables and its picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from replays.cli import app
from replays.metrics import parse_metrics
from replays.options import ReplayOptions
from replays.plot import plot_run
from replays.records import End, Header, Phase, Record, RecordsError, Run, Sample, read_run, write_entries
from replays.report import Report, make_report, percentiles, read_report, write_report
from replays.tables import SECTIONS, report_tables

HEADER = Header(engine="vllm 0, m", trace="t", seed=1, concurrency=2, scale=0.5, time_scale=1.0, assistant="canned", url="http://x")

KEYS = {
    *("theoretical_hit_rate", "ceiling_hit_rate", "ceiling_block_hit_rate", "actual_hit_rate", "gpu_hit_rate", "external_hit_rate"),
    *("kv_usage_peak", "kv_usage_mean", "kv_capacity_tokens", "kv_resident_peak", "kv_resident_mean", "requests", "failed_requests"),
    *("exact_turns", "unedited_turns", "output_tokens_per_second", "requests_per_second", "ttft_seconds", "tpot_seconds"),
    *("missed_tokens", "prompt_tokens", "engine", "trace", "seed", "duration_seconds", "preemptions", "coverage", "warmup"),
}


def record(
    *,
    phase: Phase = "profiling",
    started: float = 0.0,
    ended: float = 2.0,
    num_prompt_tokens: int | None = 100,
    num_cached_tokens: int | None = 90,
    error: str | None = None,
    overflow: bool = False,
    turn: str | None = "exact",
    missed_tokens: dict[str, int] | None = None,
) -> Record:
    return Record(
        phase=phase,
        session="s",
        play=0,
        stream="",
        index=0,
        started=started,
        ended=ended,
        first_content=started + 0.5,
        last_content=ended,
        error=error,
        overflow=overflow,
        num_theoretical_blocks=3,
        num_blocks=4,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=4,
        num_cached_tokens=num_cached_tokens,
        turn=turn,
        num_tool_calls=1,
        ceiling_tokens=None if turn is None else 96,
        ceiling_block_tokens=None if turn is None else 92,
        missed_tokens=missed_tokens,
    )


def run(*records: Record, samples: tuple[Sample, ...] = (), end: End | None = None) -> Run:
    return Run(HEADER, records, samples, end)


def sample(time: float, gpu: float, external: float, computed: float, phase: Phase = "profiling") -> Sample:
    return Sample(
        time=time,
        phase=phase,
        kv_usage=time / 10,
        kv_resident_tokens=500.0,
        kv_capacity_tokens=1000,
        num_gpu_hit_tokens=gpu,
        num_external_hit_tokens=external,
        num_computed_tokens=computed,
        num_preemptions=time,
    )


def test_rates_are_sums_over_sums() -> None:
    report = make_report(run(record(num_prompt_tokens=100, num_cached_tokens=0), record(num_prompt_tokens=900, num_cached_tokens=900)))
    assert report.actual_hit_rate == 0.9
    assert report.theoretical_hit_rate == 0.75
    assert report.ceiling_hit_rate == pytest.approx(2 * 96 / 1000)


@pytest.mark.case("TRC-04")
def test_what_plain_vllm_does_not_say_is_null_and_not_zero() -> None:
    report = make_report(run(record(turn=None, num_cached_tokens=None)))
    unknown = ("ceiling_hit_rate", "ceiling_block_hit_rate", "actual_hit_rate", "gpu_hit_rate", "kv_usage_peak", "kv_capacity_tokens")
    assert all(getattr(report, name) is None for name in (*unknown, "exact_turns", "unedited_turns", "missed_tokens", "preemptions"))


@pytest.mark.case("TRC-04")
def test_a_request_without_cached_tokens_is_left_out_of_the_rate_altogether() -> None:
    report = make_report(run(record(num_cached_tokens=None), record(num_prompt_tokens=100, num_cached_tokens=50)))
    assert report.actual_hit_rate == 0.5
    assert report.prompt_tokens == 200


def test_failed_requests_count_but_their_tokens_do_not() -> None:
    report = make_report(run(record(), record(error="HTTP 500", num_cached_tokens=0)))
    assert (report.requests, report.failed_requests, report.actual_hit_rate) == (2, 1, 0.9)


def test_an_overflow_is_not_a_failure_of_the_server() -> None:
    report = make_report(run(record(), record(error="HTTP 400", overflow=True)))
    assert (report.requests, report.failed_requests, report.overflowed_requests) == (2, 0, 1)


def test_the_warmup_is_apart() -> None:
    report = make_report(run(record(phase="warmup", num_cached_tokens=0, started=-9.0, ended=-4.0), record()))
    assert (report.requests, report.actual_hit_rate, report.duration_seconds) == (1, 0.9, 2.0)
    assert (report.warmup.requests, report.warmup.actual_hit_rate, report.warmup.duration_seconds) == (1, 0.0, 5.0)


def test_unedited_turns_are_those_that_should_be_exact() -> None:
    turns = ["first", "exact", "exact", "inexact", "edited"]
    report = make_report(run(*(record(turn=turn) for turn in turns)))
    assert (report.exact_turns, report.unedited_turns) == (2, 3)


def test_speeds_and_latencies() -> None:
    report = make_report(run(record(started=0.0, ended=2.0), record(started=2.0, ended=8.0)))
    assert (report.output_tokens_per_second, report.requests_per_second) == (1.0, 0.25)
    assert report.ttft_seconds.p50 == 0.5
    assert report.tpot_seconds.p50 == pytest.approx((1.5 / 3 + 5.5 / 3) / 2)
    assert (percentiles([]).p50, percentiles([3.0]).p95) == (None, 3.0)


def test_coverage_counts_overlaps_once() -> None:
    report = make_report(run(record(started=0, ended=4), record(started=2, ended=5), record(started=8, ended=10)))
    assert report.coverage == pytest.approx(0.7)


def test_causes_are_summed_largest_first() -> None:
    report = make_report(run(record(missed_tokens={"tail": 1, "new": 5}), record(missed_tokens={"evicted": 3})))
    assert list((report.missed_tokens or {}).items()) == [("new", 5), ("evicted", 3), ("tail", 1)]


@pytest.mark.case("TRC-03")
def test_hits_are_split_by_the_growth_of_the_engines_counters() -> None:
    samples = (sample(0.0, 0, 0, 1000, phase="warmup"), sample(1.0, 10, 0, 1010), sample(2.0, 60, 30, 1020))
    report = make_report(run(record(), samples=samples))
    assert report.gpu_hit_rate == pytest.approx(0.9 * 2 / 3)
    assert report.external_hit_rate == pytest.approx(0.9 / 3)
    assert report.preemptions == 2


@pytest.mark.case("TRC-03")
def test_hits_of_a_shared_head_are_told_from_those_of_the_sessions_own_history() -> None:
    def of(play: int, started: float, cached: int | None, **fields: Any) -> Record:
        return msgspec.structs.replace(record(started=started, num_cached_tokens=cached), play=play, **fields)

    cold = [of(0, 0, 0), of(0, 1, 60)]  # the first of all: nobody else had computed its head
    warm = [of(1, 2, 40), of(1, 3, 90), of(1, 4, 30)]  # 40 of others, then all of these again with 50 of its own, then only a part
    unknown = [of(2, 5, None), of(2, 6, 80), of(3, 7, 50, error="HTTP 500"), of(3, 8, 70)]
    report = make_report(run(*cold, *warm, *unknown))
    shared, own = 40 + 40 + 30, 60 + 50
    assert (report.shared_head_share, report.own_history_share) == (shared / (shared + own), own / (shared + own))
    primed = [of(4, 0, 40, phase="warmup"), of(4, 1, 90)]
    report = make_report(run(*primed))
    assert report.shared_head_share == pytest.approx(40 / 90)
    assert make_report(run(of(0, 0, 0))).shared_head_share is None


@pytest.mark.case("TRC-03")
def test_runs_without_idle_times_are_marked_in_every_result(tmp_path: Path) -> None:
    def shown(report: Report) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(report_tables([("a", report)]))
        return str(console.file.getvalue())  # type: ignore[attr-defined]  # a StringIO

    for delays, is_bound in (("zero", True), ("kept", False)):
        header = msgspec.structs.replace(HEADER, delays=delays, marker="off")
        report = make_report(Run(header, (record(),), (), None))
        assert (report.is_upper_bound, report.delays, report.marker) == (is_bound, delays, "off")
        assert ("UPPER BOUND" in shown(report)) == is_bound
    for options, drops in (({}, False), ({"delays": "zero"}, True), ({"time_scale": 1e6}, True), ({"time_scale": 300.0}, False)):
        assert ReplayOptions(**options).drops_idle_times == drops


def test_kv_figures_are_of_the_profiling_phase() -> None:
    report = make_report(run(record(), samples=(sample(9.0, 0, 0, 0, phase="warmup"), sample(10.0, 1, 0, 1), sample(12.0, 2, 0, 2))))
    assert (report.kv_usage_peak, report.kv_usage_mean) == (1.2, 1.1)
    assert (report.kv_resident_peak, report.kv_resident_mean, report.kv_capacity_tokens) == (0.5, 0.5, 1000)


def test_a_run_without_requests_has_a_report() -> None:
    report = make_report(run())
    assert (report.requests, report.duration_seconds, report.actual_hit_rate) == (0, None, None)


def test_metrics_are_read_as_vllm_names_them() -> None:
    text = (
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 5.0\n'
        'vllm:prompt_tokens_by_source_total{engine="1",source="local_cache_hit"} 6.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="65",note="a \\"b\\", c"} 1.0\n'
        "python_gc_objects_collected_total 3.0\nvllm:num_preemptions_total 2.0\n"
    )
    found = parse_metrics(text, time=1.0, phase="warmup")
    assert (found.kv_usage, found.num_gpu_hit_tokens, found.kv_capacity_tokens, found.num_preemptions) == (0.6, 11.0, 1024, 2.0)
    assert (found.num_external_hit_tokens, found.kv_resident_tokens) == (None, None)


def test_capacity_is_the_engines_own_figure_where_it_says_one() -> None:
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="65",kv_cache_size_tokens="999"} 1.0\n'
    assert parse_metrics(text, time=0.0, phase="warmup").kv_capacity_tokens == 999


def test_records_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    made = run(record(), record(error="x"), samples=(sample(1.0, 1, 2, 3),), end=End(started=0.0, ended=2.0, num_cancelled=1))
    assert made.end is not None
    write_entries(path, [made.header, *made.records, *made.samples, made.end])
    assert read_run(path) == made


def test_faults_in_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "end", "started": 1, "ended": 2}\n')
    with pytest.raises(RecordsError, match="no header"):
        read_run(path)
    path.write_text('{"kind": "end", "started": 1, "ended": 2}\n{"kind": "sample"}\n')
    with pytest.raises(RecordsError, match="line 2"):
        read_run(path)


def test_the_json_has_the_agreed_keys_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = make_report(run(record(missed_tokens={"new": 10})))
    report.direct = make_report(run(record(turn=None)))
    write_report(path, report)
    written = msgspec.json.decode(path.read_bytes())
    assert set(written) >= KEYS
    assert set(written["direct"]) == set(written)
    assert set(written["ttft_seconds"]) == set(written["tpot_seconds"]) == {"p50", "p95"}
    assert read_report(path) == report


def shown(*named: tuple[str, Report]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(report_tables(named))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_two_runs_stand_side_by_side_with_ratios_and_points() -> None:
    slow = make_report(run(record(missed_tokens={"new": 10}), record(started=2.0, ended=8.0)))
    fast = make_report(run(record(num_cached_tokens=80, missed_tokens={"new": 10, "evicted": 10}), record(started=2.0, ended=5.0)))
    text = shown(("one", slow), ("two", fast))
    assert "-5.00" in next(line for line in text.splitlines() if line.startswith("actual"))
    assert "×1.600" in next(line for line in text.splitlines() if line.startswith("output tokens/s"))
    assert "+5.00" in next(line for line in text.splitlines() if line.startswith("evicted"))


def test_every_line_of_the_tables_can_be_shown() -> None:
    full = make_report(run(record(), record(phase="warmup"), samples=(sample(0.5, 1, 1, 1), sample(1.5, 2, 2, 2))))
    text = shown(("one", full))
    for lines in SECTIONS.values():
        for line in lines:
            assert line.name in text


def test_the_picture_is_drawn_with_and_without_data(tmp_path: Path) -> None:
    full = run(*(record(started=float(i), ended=i + 2.0, missed_tokens={"new": 4}) for i in range(9)), samples=(sample(1.0, 1, 0, 1),))
    for name, made in (("full", full), ("empty", run()), ("plain", run(record(turn=None, num_cached_tokens=None)))):
        path = tmp_path / f"{name}.png"
        plot_run(path, made, make_report(made), direct=full)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000


def test_the_report_command_exits_with_two_for_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    assert app(["report", str(path)], result_action="return_value") == 2
    write_report(path, make_report(run(record())))
    assert app(["report", str(path), str(path)], result_action="return_value") == 0
    assert "vs report" in capsys.readouterr().out


def test_token_sums_are_of_the_successful_requests() -> None:
    good = [record(num_prompt_tokens=100), record(num_prompt_tokens=900)]
    for each in good:
        each.planned_prompt_tokens = 480.4
    report = make_report(run(*good, record(error="HTTP 500")))
    assert (report.prompt_tokens, report.output_tokens, report.planned_prompt_tokens) == (1000, 8, 961)
    assert report.computed_tokens == 10 + 810
    assert report.ceiling_block_hit_rate == pytest.approx(2 * 92 / 1000)


def test_requests_cut_off_at_the_end_are_counted_apart() -> None:
    report = make_report(run(record(), end=End(started=0.0, ended=2.0, num_cancelled=3)))
    assert (report.requests, report.failed_requests, report.cancelled_requests) == (1, 0, 3)


def test_what_was_computed_again_lies_in_the_answer_or_before_it() -> None:
    first = record(num_prompt_tokens=100, num_cached_tokens=0)
    again = msgspec.structs.replace(first, number=1, follows=0, num_prompt_tokens=200)
    samples = (msgspec.structs.replace(sample(0.5, 1, 1, 1), block_size=16),)
    cases = {112: (0, 0), 96: (0, 0), 80: (0, 16), 0: (0, 96)}
    for cached, (answer, history) in cases.items():
        report = make_report(run(first, msgspec.structs.replace(again, num_cached_tokens=cached), samples=samples))
        assert report.recomputed_tokens == {"answer": answer, "history": history}, cached
    long = msgspec.structs.replace(first, num_output_tokens=61)
    report = make_report(run(long, msgspec.structs.replace(again, num_cached_tokens=96), samples=samples))
    assert report.recomputed_tokens == {"answer": 64, "history": 0}
    assert report.block_size == 16
    assert make_report(run(first, msgspec.structs.replace(again, follows=None), samples=samples)).recomputed_tokens is None
