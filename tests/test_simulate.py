"""What is simulated: workloads, loops, the anatomy of the pool, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replays.cli import app
from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.command import progress_lines
from replays.simulator.grid import Grid, GridError, parse_policy, parse_tokens, points_of, run_all, unlimited
from replays.simulator.loop import PLAYS_EACH, LoopOptions
from replays.simulator.outcomes import Outcome
from replays.simulator.run import Simulation, SimulationOptions, simulate
from replays.simulator.workload import Reading, Workload, read_workload
from replays.traces import TraceError

BLOCK = 64
ONCE = LoopOptions(concurrency=1, duration=None, shuffle=False)


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def workload(path: Path, **reading: Any) -> Workload:
    return read_workload([path], Reading(block_size=BLOCK, **reading))


def call(t: float, blocks: list[int], *, out: int = 1, api_time: float = 1.0, more: int = 5) -> dict[str, Any]:
    tokens = len(blocks) * BLOCK + more
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": blocks, "stop": "tool_use", "api_time": api_time}


def session(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local", "requests": list(requests)}


def subagent(name: str, t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {
        "t": t,
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "x",
        "status": "completed",
        "models": ["m"],
        "requests": list(requests),
    }


def play(work: Workload, **options: Any) -> tuple[list[Outcome], Simulation]:
    simulation = Simulation(
        work.scripts, SimulationOptions(**{"block_size": BLOCK, "capacity_tokens": 100 * BLOCK, "loop": ONCE, **options})
    )
    simulation.run()
    return sorted(simulation.outcomes, key=lambda outcome: outcome.asked), simulation


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = GeneratorSettings(24, 5, token_scale=1 / 16, max_turns=40)
    return write(tmp_path_factory.mktemp("traces") / "g.jsonl", *generate_sessions(settings))


def test_a_parent_goes_on_when_its_subagents_have_ended(tmp_path: Path) -> None:
    children = [subagent(f"a{n}", 2.0, call(2.0 + n / 4, [10 + n], api_time=5.0, out=200)) for n in range(2)]
    path = write(tmp_path / "t.jsonl", session("s", call(0, [1]), *children, call(9.0, [1, 2])))
    outcomes, _ = play(workload(path))
    first, one, two, last = outcomes
    assert {one.stream, two.stream} == {"0/a0", "0/a1"}
    assert one.finished - one.asked > 3, "200 tokens at 50 steps a second"
    assert one.asked == pytest.approx(first.finished + 1.0)
    assert last.asked == pytest.approx(max(one.finished, two.finished) + 9.0 - 7.25)
    assert last.num_hit_tokens == BLOCK


def test_answers_that_come_back_are_hits_only_when_clients_send_them_back(tmp_path: Path) -> None:
    answer = 3 * BLOCK
    path = write(tmp_path / "t.jsonl", session("s", call(0, [1, 2], out=answer, more=0), call(9, [1, 2, 3, 4, 5, 6])))
    canned, _ = play(workload(path))
    live, simulation = play(workload(path, echoes=True))
    assert canned[1].num_hit_tokens == canned[1].num_ceiling_tokens == 2 * BLOCK
    assert live[1].num_hit_tokens == live[1].num_ceiling_tokens == (2 + 3 - 1) * BLOCK, "the last sampled token has no KV"
    simulation.server.engines[0].pool.check_integrity()


def test_ids_of_global_scope_are_shared_between_sessions(tmp_path: Path) -> None:
    rows = [{"timestamp": 5000 * n, "input_length": 3 * BLOCK + 1, "output_length": 1, "hash_ids": [1, 2, 3 + n, 9 + n]} for n in range(3)]
    work = workload(write(tmp_path / "t.jsonl", *rows), trace_format="mooncake")
    outcomes, simulation = play(work, loop=replace(ONCE, arrivals=0.0))
    assert [outcome.asked for outcome in outcomes] == [0.0, 5.0, 10.0]
    assert [outcome.num_hit_tokens for outcome in outcomes] == [0, 2 * BLOCK, 2 * BLOCK]
    assert [outcome.num_theoretical_blocks for outcome in outcomes] == [0, 2, 2]
    assert simulation.loop.is_over


def test_an_open_loop_does_not_wait_for_the_server_and_speeds_up(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "input_length": 40_000, "output_length": 200, "hash_ids": []} for n in range(20)]
    work = workload(write(tmp_path / "t.jsonl", *rows))
    outcomes, _ = play(work, loop=replace(ONCE, arrivals=0.0, speed=2.0), capacity_tokens=10**6)
    assert [outcome.asked for outcome in outcomes] == [n / 2 for n in range(20)]
    assert outcomes[-1].first_token - outcomes[-1].asked > 5


def test_random_arrivals_come_at_their_rate_and_again_with_the_same_seed(generated: Path) -> None:
    work = workload(generated)
    options = SimulationOptions(block_size=BLOCK, loop=LoopOptions(duration=600.0, arrivals=0.1, unmeasured=60.0))
    first, second = simulate(work.scripts, options), simulate(work.scripts, options)
    assert first == second
    begun = {outcome.stream.partition("/")[0] for outcome in play(work, loop=options.loop, capacity_tokens=10**7)[0]}
    assert 40 <= len(begun) <= 95
    assert first.arrivals == 0.1
    assert first.concurrency == 0


def test_a_simulation_ends_with_its_last_request(generated: Path) -> None:
    """What a server might still forget hours later keeps nothing going."""
    outcomes, simulation = play(workload(generated), capacity_tokens=10**7, loop=replace(ONCE, concurrency=6))
    assert len(outcomes) > 100
    assert simulation.clock.now - max(outcome.finished for outcome in outcomes) <= 20.0


def test_recorded_arrivals_need_a_clock(generated: Path) -> None:
    with pytest.raises(ValueError, match="give a rate"):
        simulate(workload(generated).scripts, SimulationOptions(block_size=BLOCK, loop=LoopOptions(arrivals=0.0)))


def test_what_is_evicted_and_asked_for_again_is_regretted_to_the_token(generated: Path) -> None:
    work = workload(generated)
    loop = LoopOptions(concurrency=6, seed=3, duration=1200.0)
    report = simulate(work.scripts, SimulationOptions(block_size=BLOCK, capacity_tokens=50_000, loop=loop))
    anatomy = report.anatomy
    assert report.missed_tokens["evicted"] > 0
    assert anatomy.regretted_tokens == pytest.approx(report.missed_tokens["evicted"], rel=0.02), "those evicted before profiling apart"
    assert 0 < anatomy.regretted_within["60"] <= anatomy.regretted_within["300"] <= (anatomy.regretted_share or 0)
    for place in range(len(anatomy.seconds)):
        held = sum(series[place] for series in anatomy.kinds.values())
        assert held == report.capacity_tokens
        assert sum(series[place] for series in anatomy.live_idle_by_class.values()) == anatomy.kinds["live_idle"][place]


def test_an_lru_of_the_capacity_that_is_needed_loses_next_to_nothing(generated: Path) -> None:
    work = workload(generated)
    base = SimulationOptions(block_size=BLOCK, loop=LoopOptions(concurrency=6, seed=3, duration=1200.0))
    grid = Grid([parse_policy("lru")], streams=[6], seeds=[3], base=base)
    (roomy,) = run_all(work.scripts, list(unlimited(grid).options()), 1)
    assert roomy.gap_points == 0
    within = roomy.anatomy.used_within_tokens
    assert [row["mean"] for row in within.values()] == sorted(row["mean"] for row in within.values())
    assert all(row["mean"] <= row["p95"] for row in within.values())
    gaps = {}
    for age in ("60", "300", "600"):
        capacity = round(within[age]["p95"])
        gaps[age] = simulate(work.scripts, replace(base, capacity_tokens=capacity)).gap_points or 0.0
    assert gaps["60"] > gaps["300"] >= gaps["600"]
    assert gaps["600"] < 0.3, "no session is idle for more than 300 s, but those whose calls take time"


def test_points_pool_their_seeds_and_compare_with_lru(generated: Path) -> None:
    work = workload(generated)
    base = SimulationOptions(block_size=BLOCK, loop=LoopOptions(duration=600.0))
    grid = Grid([parse_policy("class_hazard:horizon_seconds=60")], [40_000], [6], [1, 2], ends=["unknown", "said"], base=base)
    reports = run_all(work.scripts, list(grid.options()), 2)
    assert [(r.policy, r.ends, r.seed) for r in reports] == [
        *(("lru", "unknown", seed) for seed in (1, 2)),
        *(("class_hazard", "unknown", seed) for seed in (1, 2)),
        *(("class_hazard", "said", seed) for seed in (1, 2)),
    ]
    lru, _, said = points_of(reports)
    assert lru.hit_rate == pytest.approx(
        sum((r.actual_hit_rate or 0) * r.prompt_tokens for r in reports[:2]) / sum(r.prompt_tokens for r in reports[:2])
    )
    assert (lru.gap_closed_share, lru.seeds) == (0.0, [1, 2])
    assert said.parameters == {"horizon_seconds": 60.0}
    assert said.gap_points is not None
    assert lru.gap_points is not None
    assert said.gap_closed_share == pytest.approx(1 - said.gap_points / lru.gap_points)
    assert reports == run_all(work.scripts, list(grid.options()), 1)


@pytest.mark.parametrize("text", ["", "x", "-3", "0", "6.26T", "nan", "inf"])
def test_what_is_no_capacity_is_refused(text: str) -> None:
    with pytest.raises(GridError):
        parse_tokens(text)


def test_capacities_may_be_short() -> None:
    assert [parse_tokens(text) for text in ("6264960", "6.26M", "500k", "1_000", "2g")] == [6264960, 6260000, 500000, 1000, 2 * 10**9]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("best", "there are: lru"),
        ("class_hazard:x=1", "there are: horizon_seconds"),
        ("class_hazard:horizon_seconds=0", "outside"),
        ("class_hazard:horizon_seconds", "not parameter=number"),
        ("class_hazard:horizon_seconds=soon", "not parameter=number"),
    ],
)
def test_bad_policies_are_named(text: str, problem: str) -> None:
    with pytest.raises(GridError, match=problem):
        parse_policy(text)


def run(*arguments: str) -> int:
    code = app(list(arguments), exit_on_error=False, result_action="return_value")
    assert isinstance(code, int)
    return code


def test_the_command_prints_a_table_and_writes_json_with_definitions(
    generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--json", str(tmp_path / "out" / "r.json"), "--png", str(tmp_path / "a.png")]
    what = ["--policy", "lru", "dead_first", "--capacity", "40k", "--streams", "6", "--duration", "300", "--block-size", "64"]
    assert run("simulate", str(generated), *what, "--anatomy", "--jobs", "1", *where) == 0
    printed = capsys.readouterr().out
    assert "dead_first" in printed
    assert "T = 300 s" in printed
    data = msgspec.json.decode((tmp_path / "out" / "r.json").read_bytes())
    assert [point["policy"] for point in data["points"]] == ["lru", "dead_first"]
    point = set(data["points"][0])
    explained = set(data["definitions"])
    assert {"hit_rate", "ceiling", "gap_points", "gap_closed_share", "preemptions"} <= explained & point
    assert data["unlimited"][0]["capacity_tokens"] > 10**11
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "best"], "no eviction policy 'best'"),
        (["--profile", "moon"], "is no profile 'moon'"),
        (["--admission", "none"], "no admission policy 'none'"),
        (["--capacity", "10"], "less than a block"),
        (["--arrivals", "0"], "give a rate"),
        (["--block-size", "100"], "do not divide"),
    ],
)
def test_wrong_use_is_told_and_nothing_is_simulated(
    generated: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("simulate", str(generated), "--jobs", "1", *arguments) == 2
    assert problem in capsys.readouterr().err


def test_bad_sessions_are_found_in_other_processes_too(tmp_path: Path) -> None:
    good = [session(f"s{n}", call(0, [1])) for n in range(40)]
    path = write(tmp_path / "t.jsonl", *good, session("s7", call(0, [1])))
    with pytest.raises(TraceError, match="'s7' is used twice"):
        read_workload([path], Reading(block_size=BLOCK), jobs=2)
    write(path, *good, {"id": "x"})
    with pytest.raises(TraceError, match="line 41"):
        read_workload([path], Reading(block_size=BLOCK), jobs=2)


def test_a_trace_of_short_sessions_is_not_repeated_for_an_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sessions of one call would else be played 38 times a simulated second."""
    trace, out = write(tmp_path / "t.jsonl", session("one", call(0, [1])), session("two", call(0, [2]))), tmp_path / "out.json"
    command = ["simulate", str(trace), "--policy", "lru", "--streams", "1", "--block-size", str(BLOCK), "--jobs", "1", "--json", str(out)]
    assert app(command, result_action="return_value") == 0
    assert f"each session had been played {PLAYS_EACH} times" in capsys.readouterr().err
    run = msgspec.json.decode(out.read_bytes())["runs"][0]
    assert run["is_cut"]
    assert run["duration_seconds"] < 3600
    assert 2 * PLAYS_EACH - 2 <= run["num_requests"] <= 2 * PLAYS_EACH + 2


def test_what_takes_long_says_so_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    with progress_lines("simulating", 0.001) as heard:
        while "nothing is done yet" not in told:
            told += capsys.readouterr().err
        heard(1, 3)
        while "simulating: 1 of 3" not in told:
            told += capsys.readouterr().err
