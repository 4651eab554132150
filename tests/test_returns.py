"""The return-time model: life tables, what it learns, and its calibration on sessions that its prior has not seen."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.life_table import NUM_BINS, LifeTable, bin_of, edge_seconds
from admission.return_class import TOOL_BUCKETS, parent_class, return_class, tool_bucket, with_tenant, with_tool
from admission.return_prior import RETURN_PRIOR
from admission.returns import ReturnModel, ReturnParameters
from replays.return_prior import LastTurn, count, distinct, held_back, idle_times, module_text
from replays.traces import TraceSet

SAMPLE = Path(__file__).parents[1] / "replays" / "data"
COUNTS = st.lists(st.integers(0, 50), min_size=NUM_BINS, max_size=NUM_BINS)


def _learned(gaps: list[float | None], parameters: ReturnParameters | None = None) -> ReturnModel:
    """A model without a prior that has seen the gaps; None never came back."""
    model = ReturnModel(parameters or ReturnParameters(), prior={})
    for gap in gaps:
        if gap is None:
            model.never_came_back("root/tool", 0.0)
        else:
            model.came_back("root/tool", gap, 0.0)
    return model


def test_every_age_lies_in_the_bin_that_starts_before_it() -> None:
    for index in range(NUM_BINS):
        assert bin_of(edge_seconds(index)) == index
        assert bin_of(math.nextafter(edge_seconds(index + 1), 0) * (1 - 1e-7)) == index
    assert bin_of(1e9) == NUM_BINS


def test_quantiles_and_survival_of_a_known_distribution() -> None:
    rng = random.Random(1)
    gaps = [rng.lognormvariate(2.5, 1.2) for _ in range(4000)]
    model = _learned([*gaps, *[None] * 1000])
    for share in (0.1, 0.5, 0.9, 0.97):
        below = sum(gap <= model.quantile("root/tool", share) for gap in gaps) / len(gaps)
        assert below == pytest.approx(share, abs=0.02)
    for idle in (0.0, 5.0, 40.0, 200.0):
        alive = sum(gap > idle for gap in gaps)
        assert model.alive("root/tool", idle) == pytest.approx(alive / (alive + 1000), abs=0.02)
        soon = sum(idle < gap <= idle * 1.05 + 0.1 for gap in gaps) / (idle * 0.05 + 0.1) / (alive + 1000)
        assert model.hazard("root/tool", idle) == pytest.approx(soon, abs=0.015)


@settings(deadline=None, max_examples=15)
@given(returned=COUNTS, left=COUNTS, never=st.integers(0, 50))
def test_curves_agree_with_each_other(returned: list[int], left: list[int], never: int) -> None:
    table = LifeTable(returned, never)
    table.left = [float(count) for count in left]
    table.fit()
    ages = [edge_seconds(index) * stretch for index in range(NUM_BINS) for stretch in (1.0, 1.1)]
    survivals = [table.survival(age) for age in ages]
    assert survivals[0] == 1
    assert all(0 <= later <= earlier + 1e-12 for earlier, later in pairwise(survivals))
    for age in ages:
        assert 0 <= table.alive(age) <= 1
        assert 0 <= table.mean_wait(age, 100.0) <= 100.0 + 1e-9
        if table.survival(age) > 1e-6:
            steps = [table.survival(age + (step + 0.5) * 0.1) for step in range(1000)]
            assert table.mean_wait(age, 100.0) == pytest.approx(sum(steps) * 0.1 / table.survival(age), rel=0.05, abs=0.1)


def test_a_session_out_of_sight_counts_only_while_it_was_seen() -> None:
    model = _learned([5.0] * 50)
    for _ in range(50):
        model.left("root/tool", 1.0, 0.0)
    assert model.returned_share("root/tool", 30.0) == pytest.approx(1.0, abs=0.01)
    assert _learned([5.0] * 50 + [None] * 50).returned_share("root/tool", 30.0) == pytest.approx(0.5, abs=0.01)


def test_what_was_seen_outweighs_the_prior_and_fades() -> None:
    model = ReturnModel(ReturnParameters(half_life_seconds=1000.0))
    before = model.quantile("root/tool", 0.5)
    for _ in range(2000):
        model.came_back("root/tool", 120.0, 0.0)
    assert before < 20 < 100 < model.quantile("root/tool", 0.5) < 150
    model.came_back("root/tool", 9.0, 20_000.0)
    assert model.quantile("root/tool", 0.5) < 20


def test_a_tenant_leans_on_all_and_departs_from_them() -> None:
    model = ReturnModel(ReturnParameters(max_tenants=2))
    slow = model.class_for("slow", "root/tool", 0.0)
    assert model.quantile(slow, 0.5) == pytest.approx(model.quantile("root/tool", 0.5))
    for _ in range(300):
        model.came_back(slow, 500.0, 0.0)
    other = model.class_for("other", "root/tool", 0.0)
    assert model.quantile(slow, 0.5) > 300
    assert model.quantile(other, 0.5) == pytest.approx(model.quantile("root/tool", 0.5))
    model.class_for("third", "root/tool", 0.0)
    assert model.quantile(slow, 0.5) == pytest.approx(model.quantile("root/tool", 0.5)), "the least recent of three tenants is forgotten"


def test_a_replay_runs_on_a_faster_clock_with_capped_gaps() -> None:
    plain = ReturnModel()
    fast = ReturnModel(ReturnParameters(time_scale=15.0, longest_gap_seconds=300.0))
    assert fast.quantile("root/tool", 0.5) == pytest.approx(plain.quantile("root/tool", 0.5) / 15, rel=0.02)
    assert fast.hazard("root/tool", 1.0) == pytest.approx(plain.hazard("root/tool", 15.0) * 15, rel=0.02)
    assert fast.alive("root/end_turn", 30.0) < 0.05 < plain.alive("root/end_turn", 450.0)


def test_past_the_cap_of_a_replay_nobody_is_expected() -> None:
    model = ReturnModel(ReturnParameters(time_scale=10.0, longest_gap_seconds=300.0))
    assert model.alive("root/tool", 30.0) > 0
    assert model.hazard("root/tool", 30.0) > 0
    assert model.time_to_return("root/tool", 30.0, 9.0) < 9
    assert (model.alive("root/tool", 31.0), model.hazard("root/tool", 31.0)) == (0, 0)
    assert model.time_to_return("root/tool", 31.0, 9.0) == 9
    assert model.idle_until_hopeless("root/tool", 0.01) == pytest.approx(30.9)


def test_classes_fall_back_on_what_they_refine() -> None:
    name: str | None = with_tenant("sub/tool:shell", "acme")
    line = []
    while name is not None:
        line.append(name)
        name = parent_class(name)
    assert line == ["sub/tool:shell@acme", "sub/tool:shell", "sub/tool", "sub/unknown", "root/unknown"]
    model = ReturnModel()
    assert model.quantile("root/tool:shell", 0.5) == pytest.approx(model.quantile("root/tool", 0.5))


def test_a_turn_waits_for_its_slowest_tool() -> None:
    assert tool_bucket([]) is None
    assert tool_bucket(["Read", "Bash"]) == "shell"
    assert tool_bucket(["mcp__github__search", "Read"]) == "mcp"
    assert tool_bucket(["Frobnicate"]) == "other"
    names = [name for names in TOOL_BUCKETS.values() for name in names]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert with_tool(return_class(is_subagent=True, calls_tools=True, ends_turn=False), ["Task"]) == "sub/tool:agent"
    assert with_tool("root/tool:slow", []) == "root/tool:slow"
    assert return_class(is_subagent=False, calls_tools=False, ends_turn=True) == "root/end_turn"
    assert return_class(is_subagent=False, calls_tools=False, ends_turn=False) == "root/unknown"


def test_prior_is_made_from_sessions_that_are_not_held_back() -> None:
    sessions = list(distinct(TraceSet(SAMPLE / "sample.jsonl")))
    assert {held_back(session) for session in sessions} == {True, False}
    idles = [idle for session in sessions for stream in session.streams for idle in idle_times(stream)]
    table = count((idle.return_class, idle.gap_seconds) for idle in idles)
    assert sum(sum(returned) + never for returned, never in table.values()) == len(idles)
    assert list(distinct([*sessions, *sessions])) == sessions
    namespace: dict[str, object] = {}
    last = LastTurn((0.5, -1.0), (0.25,), (0.5, 2.0))
    exec(module_text(table, {"root/tool": ([1.0, 2.0], [0.5, 0.7])}, last, len(sessions)), namespace)
    assert namespace["RETURN_PRIOR"] == {name: (tuple(returned), never) for name, (returned, never) in table.items()}
    assert namespace["PACE_WEIGHTS"] == {"root/tool": (1.0, 2.0)}
    assert namespace["PACE_CUTS"] == {"root/tool": (0.5, 0.7)}
    assert [namespace[f"LAST_TURN_{name}"] for name in ("WEIGHTS", "CUTS", "ODDS")] == [last.weights, last.cuts, last.odds]


def test_shipped_prior_has_a_row_for_each_recorded_class() -> None:
    assert {"root/tool", "root/end_turn", "root/unknown", "sub/tool", "sub/end_turn"} <= RETURN_PRIOR.keys()
    assert all(len(returned) == NUM_BINS and min(returned) >= 0 for returned, _ in RETURN_PRIOR.values())
