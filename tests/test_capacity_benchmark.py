"""Parts of the capacity benchmark: what the lanes play, what the ceiling counts, and how figures follow from samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from admission.lifecycle import Lifecycle
from admission.requests import AdmissionRequest
from admission.returns import ReturnModel
from benchmarks.capacity.arms import ARMS
from benchmarks.capacity.door import Door
from benchmarks.capacity.drive import Measured, Sample
from benchmarks.capacity.figures import faults, figures, jain
from benchmarks.capacity.kept import ArmRun, Kept, Outputs, Setting
from benchmarks.capacity.measure import Plan, table_of
from benchmarks.capacity.script import GAP_CAP_SECONDS, TIME_SCALE, Ceiling, lanes, prompt_ids, turns_of
from benchmarks.report import Options
from replays.generator import GeneratorSettings, generate_sessions
from replays.traces import Request, Session, Stream, session_from_weka

SAMPLE = Sample(0, 1000, 960, 900, 10, 0.0, 0.1, 0.5)


def request(start: float, hash_ids: list[int], tokens: int = 640) -> Request:
    return Request(0, start, 2.0, tokens, 640, np.array(hash_ids, np.int64), "tool_use")


def test_a_session_is_played_without_what_does_not_fit_and_with_capped_gaps() -> None:
    requests = (request(0, [1]), request(5, [1, 2], 300_000), request(32, [1, 2, 3]), request(5000, [1, 2, 3, 4]))
    turns = turns_of(Session("s", 64, Stream("", requests)))
    assert [len(turn.hash_ids) for turn in turns] == [1, 3, 4]
    assert [turn.gap_seconds for turn in turns] == [0, 30 / TIME_SCALE, GAP_CAP_SECONDS / TIME_SCALE]
    assert {turn.num_output_tokens for turn in turns} == {10}
    assert turns_of(Session("s", 64, Stream("", ()))) == ()


def test_lanes_are_the_same_for_a_seed_and_share_no_session() -> None:
    sessions = [session_from_weka(weka, None) for weka in generate_sessions(GeneratorSettings(20, seed=1, max_turns=8))]  # type: ignore[arg-type]  # the path only names a fault's place
    made = [turns_of(session) for session in sessions]
    own = lanes(made, 4, 7)
    assert [[play.first for play in plays] for plays in own] == [[play.first for play in plays] for plays in lanes(made, 4, 7)]
    assert sum(len(plays) for plays in own) == 20
    assert all(play.first == 0 for plays in own for play in plays[1:])


def test_prompts_are_equal_where_the_trace_is_and_differ_between_plays() -> None:
    ids = np.arange(200, dtype=np.int64)
    first, longer, other = prompt_ids(ids[:100], 1), prompt_ids(ids, 1), prompt_ids(ids, 2)
    assert (first == longer[:100]).all()
    assert (longer == other).mean() < 0.05
    assert longer.min() >= 100
    assert longer.max() < 8000


def test_the_ceiling_is_the_longest_prefix_in_whole_blocks_and_leaves_a_token() -> None:
    ceiling, ids = Ceiling(32), prompt_ids(np.arange(200, dtype=np.int64), 1)
    assert ceiling.of(ids[:100]) == 0
    assert ceiling.of(ids[:100]) == 96
    assert ceiling.of(ids[:96]) == 64
    assert ceiling.of(ids) == 96
    changed = ids.copy()
    changed[40] += 1
    assert ceiling.of(changed) == 32
    assert ceiling.of(changed) == 192


def test_figures_pool_sums_over_sums_and_compare_gaps() -> None:
    plain = Measured(10.0, [SAMPLE, replace(SAMPLE, num_prompt_tokens=3000, ceiling_tokens=2880, num_cached_tokens=2700)])
    ours = Measured(10.0, [replace(one, num_cached_tokens=one.ceiling_tokens - 12) for one in plain.samples], num_preemptions=1)
    got = figures([ours], [plain])
    assert got.ceiling == pytest.approx(96.0)
    assert got.gap_points == pytest.approx(100 * 24 / 4000)
    assert got.gap_closed_share == pytest.approx(0.9)
    assert got.preemptions_per_1000 == 500
    assert figures([plain], None).gap_closed_share is None
    assert faults(figures([plain], None)) == []
    assert len(faults(replace(figures([plain], None), gap_points=2.0, mean_waiting=1.0, preemptions_per_1000=1.0))) == 3


def test_jain_is_one_for_equals_and_small_for_a_monopoly() -> None:
    assert jain([0.3, 0.3, 0.3]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_a_plan_always_has_plain_vllm_and_no_unknown_arm() -> None:
    assert Plan.of(Options(contenders=("plugin_said",))).arms == ("plain", "plugin_said")
    assert Plan.of(Options()).arms == tuple(ARMS)
    with pytest.raises(ValueError, match="no arm 'tier'"):
        Plan.of(Options(contenders=("tier",)))


def test_a_run_that_was_cut_off_keeps_its_arms_and_goes_on(tmp_path: Path) -> None:
    setting, first, second = Setting("generated", 2350, 180.0), tmp_path / "a.json.runs", tmp_path / "b.json.runs"
    kept = Kept.begin(setting, first, None)
    kept.add(ArmRun("plain", 0, Measured(10.0, [SAMPLE], num_preemptions=1.0)))
    kept.add(ArmRun("plugin_said", 0, Measured(10.0, [replace(SAMPLE, num_cached_tokens=960)])))
    kept.add(Outputs(engine="plain", outputs=[(1, 2)]))
    with first.open("ab") as file:
        file.write(b'{"type": "ArmRun", "arm": "pl')  # the process ended here
    again = Kept.begin(setting, second, first)
    assert again.runs == kept.runs
    assert again.outputs == {"plain": [(1, 2)]}
    assert again.has("plugin_said", 0)
    assert not again.has("plain", 1)
    assert Kept.begin(setting, second, second).runs == kept.runs
    for other, there in ((Setting("generated", 2100, 180.0), first), (setting, tmp_path / "nothing")):
        with pytest.raises(ValueError, match="--resume"):
            Kept.begin(other, None, there)


def test_a_table_of_some_arms_compares_the_seeds_that_both_have() -> None:
    plan = Plan(("plain", "plugin_said", "plugin_inferred"), (0, 1), 2350, 180.0)
    kept = Kept(Setting("generated", 2350, 180.0))
    for seed, num_cached in ((0, 900), (1, 0)):
        kept.add(ArmRun("plain", seed, Measured(10.0, [replace(SAMPLE, num_cached_tokens=num_cached)])))
    kept.add(ArmRun("plugin_said", 0, Measured(10.0, [replace(SAMPLE, num_cached_tokens=945)])))
    result = table_of(plan, kept)
    assert result.columns == ("plain", "plugin_said")
    assert result.figures["plugin_said_gap_closed_share"] == pytest.approx(0.75)
    assert result.figures["is_valid"] == 0
    assert any("plugin_inferred seed 1" in note for note in result.notes)


async def _through_the_door() -> tuple[int, list[float]]:
    door = Door({"alpha": 1.0}, 1000, Lifecycle(ReturnModel()), monotonic)
    waited: list[float] = []

    async def turn(number: int) -> None:
        async with door.ticket(AdmissionRequest(str(number), f"s{number}", 600)) as seconds:
            waited.append(seconds)
            await asyncio.sleep(0.02)
        door.session_ended(f"s{number}")

    tasks = [asyncio.create_task(turn(number)) for number in range(6)]
    await asyncio.sleep(0.01)
    tasks[5].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return door.num_tickets, waited


def test_turns_wait_at_the_door_and_no_ticket_is_left_behind() -> None:
    num_tickets, waited = asyncio.run(_through_the_door())
    assert num_tickets == 0
    assert len(waited) == 5
    assert waited[0] == pytest.approx(0.0, abs=0.01)
    assert max(waited) > 0.015
