"""The search over policies: what is tried, the front and the winner, held-back sessions, resuming, and what is written."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from optuna.trial import TrialState

from agentserve.policies import Chosen, chosen
from agentserve.settings import load
from replays.cli import app
from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.grid import ENDS, GridError, PointReport
from replays.simulator.loop import LoopOptions
from replays.simulator.run import SimulationOptions
from replays.simulator.workload import Reading, Workload, read_workload
from replays.tuner.apply import ApplyError, switch, write_settings
from replays.tuner.front import baseline, front, gap_left, ranked, whole, winner
from replays.tuner.load import streams_that_lose
from replays.tuner.search import Tried, open_study, processes, run_points, search, tried
from replays.tuner.space import LONGEST_HOLD_SECONDS, Setting, Space, setting_of, space_of
from replays.tuner.split import split
from tests.serving import serving
from tests.upstream import Upstream

BASE = SimulationOptions(
    capacity_tokens=90_000, block_size=64, knowledge=ENDS["said"], loop=LoopOptions(concurrency=5, duration=400.0, warmup=2)
)

CROWDED = replace(BASE, capacity_tokens=40_000, loop=replace(BASE.loop, duration=200.0))
"""Where lru loses something."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = generate_sessions(GeneratorSettings(30, 8, token_scale=1 / 16, max_turns=20))
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(session) + b"\n" for session in made))
    return path


@pytest.fixture(scope="module")
def work(traces: Path) -> Workload:
    return read_workload([traces], Reading(block_size=64))


def point(**figures: Any) -> PointReport:
    nothing: dict[str, Any] = dict.fromkeys(PointReport.__struct_fields__)
    known = {"hit_rate": 0.9, "ttft_p95_seconds": 1.0, "requests_per_second": 1.0, "preemptions": 0.0}
    return PointReport(**{**nothing, **known, **figures})


def test_the_front_holds_what_nothing_beats() -> None:
    found = [
        Tried(0, Setting("lru"), point()),
        Tried(1, Setting("fifo"), point(hit_rate=0.8, ttft_p95_seconds=2.0)),
        Tried(2, Setting("slru"), point(hit_rate=0.95, requests_per_second=0.9)),
        Tried(3, Setting("dead_first"), point(hit_rate=0.93)),
        Tried(4, Setting("lfu"), point(hit_rate=0.93)),
        Tried(5, Setting("ttl"), point(hit_rate=0.5, ttft_p95_seconds=None, preemptions=3.0)),
    ]
    assert [one.number for one in front(found)] == [2, 3], "of equals the first"
    assert winner(found).number == 3, "slru costs a tenth of the throughput"


def seeds(*figures: tuple[float, float]) -> list[PointReport]:
    """(gap, requests a second) seed by seed."""
    return [point(gap_points=gap, requests_per_second=rate) for gap, rate in figures]


def test_the_winner_is_sure_of_its_gain_on_every_seed_and_keeps_the_throughput_of_all() -> None:
    plain = Tried(0, Setting("lru"), point(), seeds((4.0, 1.0), (8.0, 1.0)))
    even = Tried(1, Setting("ttl"), point(), seeds((1.0, 1.0), (2.0, 1.0)))
    lucky = Tried(2, Setting("slru"), point(), seeds((0.0, 1.0), (2.8, 1.0)))
    slow = Tried(3, Setting("lfu"), point(), seeds((0.0, 1.0), (0.0, 0.9)))
    assert gap_left(even, plain) == pytest.approx(0.25), "a seed that is harder for all is no doubt"
    assert sum(one.gap_points or 0.0 for one in lucky.by_seed) < sum(one.gap_points or 0.0 for one in even.by_seed)
    assert [one.number for one in ranked([plain, even, lucky, slow])] == [1, 2, 0]


def test_fresh_seeds_choose_among_finalists_and_the_baseline_stands_where_none_holds() -> None:
    plain = Tried(0, Setting("lru"), point(), seeds((4.0, 1.0), (4.0, 1.0)))
    first = Tried(1, Setting("ttl"), point(), seeds((1.0, 1.0), (3.0, 1.0)))
    second = Tried(2, Setting("slru"), point(), seeds((1.5, 1.0), (1.5, 1.0)))
    never = Tried(3, Setting("lfu"), point(), seeds((0.5, 1.0)))
    assert winner([plain, first, second, never]).number == 2, "who was not played once more is no finalist"
    assert winner([plain, Tried(1, Setting("ttl"), point(), seeds((1.0, 1.0), (1.0, 0.8)))]).number == 0


def test_a_search_begins_with_what_is_recommended_and_leaves_alone_what_changes_nothing() -> None:
    space = space_of(["dead_first", "class_hazard"], ["working_set"])
    known = space.known_good("class_hazard")
    assert known
    assert all(values["policy"] == "class_hazard" and values["admission"] == "working_set" for values in known)
    assert {"admission.working_set.alpha", "admission.working_set.hold_seconds"} <= set(known[0])
    assert "admission.working_set.tier_share" not in known[0]
    assert len({str(sorted(values.items())) for values in known}) == len(known)
    assert space_of(["class_hazard"]).known_good("class_hazard") == []


def test_the_best_of_a_search_are_played_once_more_with_fresh_seeds(work: Workload, tmp_path: Path) -> None:
    journal, space = tmp_path / "j.log", space_of(["dead_first", "class_hazard"])

    def run() -> list[Tried]:
        study = open_study(journal, "here", space, seed=1)
        with processes(work.scripts, 1) as executor:
            search(study, space, CROWDED, [1, 2], 4, executor, 1, lambda done, total: None)
        return tried(study)

    found = run()
    finalists = [one for one in found if [each.seeds for each in one.by_seed] == [[1], [2], [501], [502]]]
    assert baseline(found) in finalists
    assert winner(found) in finalists
    assert 2 <= len(finalists) <= 5
    assert all([each.seeds for each in one.by_seed] == [[1], [2]] for one in whole(found) if one not in finalists)
    assert run() == found, "what is known is not simulated again"


def test_a_search_tries_every_policy_as_it_is_first_and_goes_on_where_it_was_broken_off(work: Workload, tmp_path: Path) -> None:
    space = space_of(["dead_first", "class_hazard"])
    assert list(space.policies) == ["lru", "dead_first", "class_hazard"]
    journal = tmp_path / "j.log"
    reached: list[int] = []

    def run(trials: int, context: str = "here") -> list[Tried]:
        study = open_study(journal, context, space, seed=1)
        with processes(work.scripts, 2) as executor:
            search(study, space, BASE, [1, 2], trials, executor, 2, lambda done, total: reached.append(done))
        return tried(study)

    first = run(4)
    assert [one.setting.policy for one in first[:3]] == ["lru", "dead_first", "class_hazard"]
    assert first[2].setting.parameters == {"horizon_seconds": 150.0}
    assert all(one.point.seeds == [1, 2] for one in first)
    broken_off = open_study(journal, "here", space, seed=1)
    broken_off.ask()
    reached.clear()
    again = run(6)
    assert reached[0] == 4
    assert [one.point for one in again[:4]] == [one.point for one in first]
    assert len(again) == 6
    states = [trial.state for trial in open_study(journal, "here", space, seed=1).trials]
    assert states.count(TrialState.FAIL) == 1
    with pytest.raises(GridError, match="over something else"):
        run(6, context="elsewhere")


def test_a_setting_that_falls_behind_on_its_first_seed_is_not_simulated_with_the_others(work: Workload) -> None:
    space = space_of(["fifo", "dead_first"], ["working_set"])
    study = open_study(None, "x", space, seed=1)
    with processes(work.scripts, 2) as executor:
        search(study, space, CROWDED, [1, 2], 16, executor, 2, lambda done, total: None)
    found = tried(study)
    assert len(found) == len({str(one.setting) for one in found}) == 16, "nothing is tried twice"
    assert all(one.point.seeds == [1, 2] for one in found[: len(space.first())])
    behind = [one for one in found if one.point.seeds == [1]]
    assert behind, "of settings near the best and of Optuna's, some are worse than lru"
    assert winner(found) not in behind
    assert not {one.number for one in front(found)} & {one.number for one in behind}


def test_a_step_from_a_setting_moves_what_it_has_and_stays_in_range() -> None:
    space = space_of(["class_hazard"], ["working_set"])
    start = Setting("class_hazard", {"horizon_seconds": 90.0}, "working_set", {"alpha": 0.9, "hold_seconds": 120.0})
    study = open_study(None, "x", space, seed=3)
    steps = []
    num_first = len(space.first())
    for number in range(num_first + 40):
        if number >= num_first:
            study.enqueue_trial(space.near(start, Random(number)))
        trial = study.ask()
        steps.append(space.suggest(trial))
        study.tell(trial, 0.5)
    steps = steps[num_first:]
    both = [one for one in steps if one.policy == "class_hazard" and one.admission == "working_set"]
    assert len(both) > 20
    assert len({one.admission_parameters["alpha"] for one in both}) > 5
    assert all(one.admission_parameters["hold_seconds"] <= LONGEST_HOLD_SECONDS for one in both)
    assert not any("quantum_tokens" in one.admission_parameters for one in both), "a promise to tenants"
    assert {one.policy for one in steps} == {"lru", "class_hazard"}


def test_the_load_is_looked_for_at_which_lru_loses_so_much(work: Workload) -> None:
    with processes(work.scripts, 2) as executor:

        def gap(streams: int) -> float:
            at = replace(CROWDED, loop=replace(CROWDED.loop, concurrency=streams))
            return run_points(executor, [Setting("lru").on(at)], [1])[0].gap_points or 0.0

        wanted = gap(6)
        assert wanted > gap(3) + 1
        for start in (4, 8):
            base = replace(CROWDED, loop=replace(CROWDED.loop, concurrency=start))
            found = streams_that_lose(executor, base, wanted, [1])
            assert abs(gap(found) - wanted) <= abs(gap(3) - wanted)
        with pytest.raises(GridError, match="nothing to tune for"):
            streams_that_lose(executor, replace(BASE, capacity_tokens=10**9, loop=LoopOptions(1, duration=20.0, warmup=1)), 50.0, [1])


def test_parameters_stay_in_their_ranges_and_with_their_policy() -> None:
    space = Space(["lru", "s3fifo", "class_hazard"])
    study = open_study(None, "x", space, seed=3)
    seen = set()
    for _ in range(30):
        trial = study.ask()
        setting = space.suggest(trial)
        study.tell(trial, 0.5)
        seen.add(setting.policy)
        assert all(key.startswith(f"{setting.policy}.") for key in trial.params if key != "policy")
        setting.on(BASE)
    assert seen == {"lru", "s3fifo", "class_hazard"}


def test_admission_policies_are_searched_where_they_are_asked_for() -> None:
    space = space_of(["class_hazard"], ["working_set"])
    study = open_study(None, "x", space, seed=3)
    seen = []
    for _ in range(8):
        trial = study.ask()
        seen.append(space.suggest(trial))
        study.tell(trial, 0.5)
        assert setting_of(study.trials[trial.number]) == seen[-1]
    assert [(one.policy, one.admission) for one in seen[:3]] == [
        ("lru", "fcfs"),
        ("class_hazard", "fcfs"),
        ("class_hazard", "working_set"),
    ]
    assert seen[2].admission_parameters
    assert seen[2].on(BASE).admission == "working_set"


@pytest.mark.parametrize(("policies", "problem"), [(["best"], "there are: lru"), (["farthest_next_use"], "needs the future")])
def test_what_cannot_be_tuned_is_said(policies: list[str], problem: str) -> None:
    with pytest.raises(GridError, match=problem):
        space_of(policies)


def test_one_recording_is_never_on_both_sides(work: Workload, tmp_path: Path, traces: Path) -> None:
    sessions = [msgspec.json.decode(line) for line in traces.read_bytes().splitlines()]
    twins = [session | {"id": f"twin-{number}"} for number, session in enumerate(sessions)]
    path = tmp_path / "twice.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(session) + b"\n" for session in [*sessions, *twins]))
    tuned, held_back = split(read_workload([path], Reading(block_size=64)).scripts, 0.3)
    assert len(tuned) + len(held_back) == 60
    assert 4 <= len(held_back) <= 32
    assert len(held_back) % 2 == 0
    names = {script.plan.session.id for script in held_back}
    assert all((f"twin-{number}" in names) == (session["id"] in names) for number, session in enumerate(sessions))


def run(*arguments: object) -> int:
    code = app(["tune", *map(str, arguments)], exit_on_error=False, result_action="return_value")
    assert isinstance(code, int)
    return code


def test_the_command_reports_in_every_form_and_writes_the_settings(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "out", tmp_path / "agentserve.toml"
    settings.write_text('port = 9000\n\n[admission]\npolicy = "kv_budget"\n\n[limits]\nrunning_turns = 7\n')
    load = ["--streams", 5, "--capacity", "90k", "--block-size", 64, "--duration", 120, "--warmup-requests", 2, "--jobs", 1]
    search_for = ["--policy", "dead_first", "--ends", "said", "--trials", 3, "--seeds", 1]
    assert run(traces, *load, *search_for, "--out", out, "--apply", settings) == 0
    printed = capsys.readouterr().out
    assert "← winner" in printed
    assert "held-back sessions" in printed
    report = msgspec.json.decode((out / "report.json").read_bytes())
    assert len(report["trials"]) == 3
    assert report["num_tuned_sessions"] + report["num_held_back_sessions"] == 30
    assert [row["streams"] for row in report["judged"]] == [5, 4, 6]
    assert report["judged"][0]["oracle"]["policy"] == "farthest_next_use"
    best = next(trial for trial in report["trials"] if trial["number"] == report["winner"])
    html = (out / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 2
    assert best["policy"] in html
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("trials.png", "held_back.png"))
    written = tomllib.loads(settings.read_text())
    assert written == {"port": 9000, "admission": {"policy": "fcfs", "parameters": []}, "limits": {"running_turns": 7}}


def test_a_settings_file_that_is_no_toml_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("port = \n")
    with pytest.raises(ApplyError, match="left as it is"):
        write_settings(path, Setting("lru"))
    assert path.read_text() == "port = \n"
    assert list(tmp_path.iterdir()) == [path]


WORKING_SET = Setting("lru", {}, "working_set", {"alpha": 0.875})


def test_the_server_reads_the_settings_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    write_settings(path, Setting("lru"))
    write_settings(path, WORKING_SET)
    settings = load({}, path)
    assert chosen(settings.admission.policy, settings.admission.parameters) == Chosen("working_set", {"alpha": 0.875})


def test_a_running_server_goes_on_by_what_was_chosen(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, admin_key="secret") as served:
        switch(served.url, "secret", WORKING_SET, with_eviction=False)
        assert served.server.policies.admission == Chosen("working_set", {"alpha": 0.875})
        with pytest.raises(ApplyError, match="did not take it"):
            switch(served.url, "wrong", WORKING_SET, with_eviction=False)
        with pytest.raises(ApplyError, match="plugin"):
            switch(served.url, "secret", Setting("class_hazard"), with_eviction=True)
    with pytest.raises(ApplyError, match="did not answer"):
        switch(served.url, "secret", WORKING_SET, with_eviction=False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "best"], "no eviction policy 'best'"),
        (["--profile", "moon"], "is no profile 'moon'"),
        (["--capacity", "much"], "no number of tokens"),
        (["--held-back", "0.0001"], "too few"),
    ],
)
def test_wrong_use_is_told(traces: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(traces, "--block-size", 64, *arguments) == 2
    assert problem in capsys.readouterr().err
