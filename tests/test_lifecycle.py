"""The life of sessions: what is inferred, what is said, and that nobody is kept for ever or lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from admission.eviction.policy import Fate
from admission.last_turn import TurnEnd
from admission.lifecycle import Lifecycle, LifecycleParameters, Phase
from admission.pace import Pace
from admission.returns import ReturnModel, ReturnParameters
from admission.side_request import is_side_request
from replays.session_ends import CHANCES, calibration, held_back_idles, report, score
from replays.traces import TraceSet

SAMPLE = Path(__file__).parents[1] / "replays" / "data" / "sample.jsonl"
TOOLS = TurnEnd(ends_turn=False, tools=("Bash",))
DONE = TurnEnd(ends_turn=True)


def _turn(life: Lifecycle, session_id: str, start: float, end: TurnEnd, **more: str) -> None:
    life.turn_started(session_id, start, **more)  # type: ignore[arg-type]  # the names are those of turn_started
    life.turn_ended(session_id, start + 1, end)


def test_phases_of_a_session() -> None:
    life = Lifecycle(ReturnModel())
    life.turn_started("a", 0.0)
    assert life.phase("a") is Phase.RUNNING
    life.turn_ended("a", 5.0, TOOLS)
    assert (life.phase("a"), life.return_class("a")) == (Phase.TOOL_PENDING, "root/tool:steady:shell")
    _turn(life, "a", 9.0, DONE)
    assert life.phase("a") is Phase.WAITING
    assert life.end_said("a", 20.0) == ["a"]
    assert (life.phase("a"), life.fate("a")) == (Phase.ENDED, Fate.ENDED)
    assert life.end_said("a", 21.0) == []


def test_a_finished_subagent_is_joined_when_its_parent_goes_on() -> None:
    life = Lifecycle(ReturnModel())
    _turn(life, "parent", 0.0, TurnEnd(ends_turn=False, tools=("Task",)))
    _turn(life, "done", 2.0, DONE, parent_id="parent")
    _turn(life, "background", 2.0, TOOLS, parent_id="parent")
    assert life.return_class("background").startswith("sub/tool")
    assert life.fate("done") is Fate.LIVE
    assert life.turn_started("parent", 10.0) == ["done"]
    assert (life.fate("done"), life.fate("background")) == (Fate.ENDED, Fate.LIVE)
    assert life.turn_started("done", 11.0) == ["done"], "called again, it lives again"
    assert life.fate("done") is Fate.LIVE


def test_an_end_that_is_said_ends_the_subagents_too() -> None:
    life = Lifecycle(ReturnModel())
    _turn(life, "parent", 0.0, TOOLS)
    _turn(life, "child", 2.0, TOOLS, parent_id="parent")
    assert life.end_said("parent", 5.0) == ["parent", "child"]
    assert len(life) == 0


def test_an_end_said_during_a_turn_holds_unless_another_turn_starts() -> None:
    life = Lifecycle(ReturnModel())
    life.turn_started("a", 0.0)
    assert life.end_said("a", 1.0) == ["a"]
    assert (life.fate("a"), life.phase("a")) == (Fate.ENDED, Phase.RUNNING)
    life.turn_ended("a", 2.0, TOOLS)
    assert len(life) == 0
    life.turn_started("b", 3.0)
    life.end_said("b", 4.0)
    assert life.turn_started("b", 5.0) == ["b"]
    life.turn_ended("b", 6.0, TOOLS)
    life.turn_ended("b", 7.0, TOOLS)
    assert (life.fate("b"), life.phase("b")) == (Fate.LIVE, Phase.TOOL_PENDING)


def test_idle_beyond_hope_counts_as_ended_until_it_is_back() -> None:
    returns = ReturnModel()
    life = Lifecycle(returns, LifecycleParameters(least_chance=0.5))
    _turn(life, "a", 0.0, DONE)
    hopeless = 1.0 + returns.idle_until_hopeless(life.return_class("a"), 0.5)
    assert life.due(hopeless - 1) == []
    assert life.due(hopeless) == ["a"]
    assert (life.fate("a"), life.phase("a")) == (Fate.PRESUMED, Phase.ENDED)
    assert life.turn_started("a", hopeless + 5) == ["a"]
    assert (life.fate("a"), life.phase("a")) == (Fate.LIVE, Phase.RUNNING)


def test_a_forgotten_session_teaches_that_its_class_may_never_return() -> None:
    returns = ReturnModel()
    life = Lifecycle(returns, LifecycleParameters(forget_seconds=5000.0))
    before = returns.alive("root/end_turn", 0.0)
    for number in range(200):
        _turn(life, f"s{number}", 0.0, DONE)
    life.due(6000.0)
    assert len(life) == 0
    assert returns.alive("root/end_turn", 0.0) < before / 2


def _in_turn(life: Lifecycle, client: str | None, number: int) -> float:
    """A client works on so many sessions, one after the other, a minute each. Returns the time."""
    for index in range(number):
        start = index * 60.0
        life.turn_started(f"{client}{index}", start, tenant=client)
        life.due(start)
        life.turn_ended(f"{client}{index}", start + 50, TOOLS)
    return number * 60.0


def _is_left(life: Lifecycle, client: str | None, now: float) -> bool:
    """Whether a session counts as ended at once when its client begins another."""
    life.turn_started("former", now, tenant=client)
    life.turn_ended("former", now + 50, TOOLS)
    changed = life.turn_started("next", now + 52, tenant=client)
    life.turn_ended("next", now + 53, TOOLS)
    return "former" in changed and life.fate("former") is Fate.PRESUMED


def test_that_a_new_session_ends_the_one_before_is_learnt_from_clients_that_work_so() -> None:
    def learned() -> tuple[Lifecycle, float]:
        life = Lifecycle(ReturnModel(ReturnParameters(longest_gap_seconds=300.0)))
        return life, _in_turn(life, "one", 200)

    assert not _is_left(Lifecycle(ReturnModel()), "one", 0.0), "nothing is taken for granted"
    life, now = learned()
    assert _is_left(life, "one", now)
    assert life.turn_started("former", now + 70, tenant="one") == ["former"], "a guess is taken back"
    assert life.fate("former") is Fate.LIVE
    life, now = learned()
    assert _is_left(life, "another", now), "what some clients do is expected of the others"
    life, now = learned()
    assert not _is_left(life, None, now), "of strangers nothing is concluded"


def test_sessions_of_other_clients_subagents_and_who_waits_for_one_are_not_followed() -> None:
    life = Lifecycle(ReturnModel(ReturnParameters(longest_gap_seconds=300.0)))
    now = _in_turn(life, "one", 200)
    _turn(life, "stranger", now, TOOLS, tenant="other")
    _turn(life, "parent", now, TurnEnd(ends_turn=False, tools=("Task",)), tenant="one")
    life.turn_started("child", now + 2, parent_id="stranger", tenant="other")
    life.turn_started("unannounced", now + 3, tenant="one")
    assert {life.fate(name) for name in ("stranger", "parent", "child", "unannounced")} == {Fate.LIVE}
    life.check_integrity()


def test_branches_are_superseded_cut_generated_or_asides() -> None:
    life = Lifecycle(ReturnModel())
    life.turn_started("a", 0.0, branch_id="old")
    life.turn_ended("a", 1.0, TOOLS)
    assert life.fate("a", "old") is Fate.LIVE
    for start in (2.0, 4.0):
        life.turn_started("a", start, branch_id="new", shared_tokens=900)
        life.turn_ended("a", start + 1, TOOLS)
    assert life.fate("a", "old") is Fate.SUPERSEDED
    assert life.fate("a", "new") is Fate.LIVE
    assert life.fate("a", "new", start_tokens=900) is Fate.CUT
    life.turn_started("a", 6.0, branch_id="old")
    assert life.fate("a", "old") is Fate.LIVE, "the client went back to it"
    assert life.output_seen_again("a", echoed=False) == []
    assert life.output_seen_again("a", echoed=False) == ["a"]
    assert life.fate("a", "old", is_generated=True) is Fate.GENERATED
    assert life.output_seen_again("a", echoed=True) == ["a"]
    assert life.fate("a", "old", is_generated=True) is Fate.LIVE
    assert life.side_request("a", "title") == ["a"]
    assert life.fate("a", "title") is Fate.ONE_SHOT


def test_side_requests_are_probes_and_asides_without_tools() -> None:
    assert is_side_request(num_messages=1, num_tools=0, max_output_tokens=1, session_has_tools=False)
    assert is_side_request(num_messages=1, num_tools=0, max_output_tokens=512, session_has_tools=True)
    assert not is_side_request(num_messages=1, num_tools=0, max_output_tokens=512, session_has_tools=False)
    assert not is_side_request(num_messages=1, num_tools=0, max_output_tokens=16, session_has_tools=False)
    assert is_side_request(num_messages=1, num_tools=0, max_output_tokens=16, session_has_tools=False, is_named=False)
    assert not is_side_request(num_messages=1, num_tools=0, max_output_tokens=None, session_has_tools=False, is_named=False)
    assert not is_side_request(num_messages=1, num_tools=3, max_output_tokens=16, session_has_tools=False, is_named=False)
    assert not is_side_request(num_messages=3, num_tools=0, max_output_tokens=16, session_has_tools=False, is_named=False)
    assert not is_side_request(num_messages=9, num_tools=20, max_output_tokens=None, session_has_tools=True)


def test_a_slow_session_and_a_full_context_are_classes_of_their_own() -> None:
    slow, brisk = Pace(), Pace()
    for _ in range(5):
        slow.came_back(250.0)
        brisk.came_back(3.0)
    assert slow.refine("root/tool", 200) == "root/tool:slow"
    assert brisk.refine("root/tool", 200, context_share=0.5) == "root/tool:brisk"
    assert brisk.refine("root/tool", 200, context_share=0.9) == "root/tool:brisk:full"
    assert brisk.refine("sub/tool", 200) == "sub/tool", "too few were recorded to tell their pace"
    returns = ReturnModel()
    assert returns.quantile("root/tool:slow", 0.9) > 2 * returns.quantile("root/tool:brisk", 0.9)
    assert returns.alive("root/tool:brisk:full", 60.0) < returns.alive("root/tool:brisk", 60.0)


def test_a_lower_threshold_declares_fewer_and_is_right_more_often() -> None:
    idles = list(held_back_idles(TraceSet(SAMPLE).checked()))
    cases: list[tuple[str, float | None]] = [("root/end_turn", gap) for gap in [100.0] * 9 + [20_000.0] + [None] * 10]
    scores = [score(cases, ReturnModel(), chance) for chance in CHANCES]
    assert all(earlier.num_declared >= later.num_declared for earlier, later in pairwise(scores))
    assert scores[0].num_never == 10
    assert scores[1].precision == pytest.approx(10 / 11)
    assert "never ended" in report(idles)


def test_calibration_is_the_share_of_returns_within_each_quantile() -> None:
    returns = ReturnModel()
    median = returns.quantile("root/tool", 0.5)
    (_, row) = calibration([("root/tool", median * stretch) for stretch in (0.9, 0.9, 0.9, 1.1)], returns).splitlines()
    assert row.split()[:2] == ["root/tool", "4"]
    assert row.split()[4:6] == ["75.0", "%"]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the books are right and in the end nobody is left."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle(ReturnModel(), context_tokens=1000)
        self.now = 0.0
        self.running: list[str] = []

    @rule(name=st.sampled_from("abcde"), parent=st.none() | st.sampled_from("abcde"), tenant=st.none() | st.sampled_from("xy"))
    def start(self, name: str, parent: str | None, tenant: str | None) -> None:
        self.life.turn_started(name, self.now, parent_id=parent, tenant=tenant)
        self.running.append(name)
        assert self.life.fate(name) is Fate.LIVE

    @rule(choice=st.integers(0, 20), end=st.sampled_from([TOOLS, DONE, TurnEnd(ends_turn=False)]))
    def end(self, choice: int, end: TurnEnd) -> None:
        if self.running:
            self.life.turn_ended(self.running.pop(choice % len(self.running)), self.now, end)

    @rule(name=st.sampled_from("abcde"))
    def say_end(self, name: str) -> None:
        ended = self.life.end_said(name, self.now)
        assert all(self.life.fate(session_id) is Fate.ENDED for session_id in ended)

    @rule(seconds=st.sampled_from([0.1, 10.0, 1000.0, 20_000.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        changed = self.life.due(self.now)
        assert not set(changed) & set(self.running), "who runs has not ended"
        assert self.life.due_seconds is None or self.life.due_seconds > self.now

    @invariant()
    def keeps_its_books(self) -> None:
        self.life.check_integrity()

    def teardown(self) -> None:
        for name in self.running:
            self.life.turn_ended(name, self.now, DONE)
        self.life.due(self.now + 1e6)
        assert len(self.life) == 0
        assert self.life.due_seconds is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
