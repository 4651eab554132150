"""Generated sessions on the whole server: every prompt goes on from what was said before, whatever clients do; and the proof that
the measure notices where it does not."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.boot import load_model_files
from agentserve.canonical.canonicaliser import Canonicaliser
from agentserve.canonical.table import CANONICAL_RULES
from agentserve.settings import CanonicaliseSettings, EngineSettings, SessionSettings, Settings
from benchmarks.cases import CasesResult
from benchmarks.ledger import speech
from benchmarks.ledger.disconnects import Disconnects, disconnect
from benchmarks.ledger.disturbances import DISTURBANCES, disturb
from benchmarks.ledger.frozen_redis import Frozen, freeze
from benchmarks.ledger.left import Left
from benchmarks.ledger.long_history import Costs, measure_clients
from benchmarks.ledger.measure import Measured, figures
from benchmarks.ledger.replays import EVERY_RULE, Replayed, replay
from benchmarks.ledger.respelled import respelled
from benchmarks.ledger.script import Script, Step, StepKind, generate
from model.conversation import Json, canonical_json

FIGURES = {
    "cases_total", "cases_passed", "turns", "exact_share", "reserialised_exact_share", "disturbed_hit_gap_points", "disconnects",
    "leaked_tickets", "leaked_tasks", "parse_2000_messages_ms", "encoded_tokens_per_turn",
}  # fmt: skip

steps = st.builds(
    Step,
    kind=st.sampled_from(StepKind),
    dialect=st.integers(0, 2),
    seconds=st.sampled_from([0.0, 30.0, 90.0]),
    streams=st.booleans(),
    reserialises=st.booleans(),
    pads_text=st.booleans(),
    by_id=st.booleans(),
)
scripts = st.builds(
    Script,
    seed=st.integers(0, 2**32),
    steps=st.lists(steps, min_size=2, max_size=10).map(tuple),
    is_named=st.booleans(),
    product=st.integers(0, 1),
    disturbances=st.lists(st.sampled_from(list(CANONICAL_RULES)), unique=True).map(tuple),
    drops_reasoning=st.booleans(),
    head_bytes=st.just(600),
    turn_bytes=st.just(200),
)


Play = Callable[..., Replayed]


@pytest.fixture(scope="module")
def play(model_folder: Path) -> Play:
    """Plays scripts on a server of their own."""
    tokenizer, chat = load_model_files(EngineSettings(), model_folder)

    def played(sessions: list[Script], *, settings: Settings = EVERY_RULE, disturbed: bool = True) -> Replayed:
        return asyncio.run(replay(sessions, tokenizer, chat, disturbed=disturbed, rhythm_seconds=45.0, settings=settings))

    return played


def small(seed: int, num_steps: int = 14) -> Script:
    return replace(generate(seed, num_steps), head_bytes=600, turn_bytes=200)


@given(st.lists(scripts, min_size=1, max_size=3, unique_by=lambda script: script.seed))
@settings(max_examples=40, deadline=None)
def test_every_turn_goes_on_from_the_ids_that_were_said_before(play: Play, sessions: list[Script]) -> None:
    found = play(sessions)
    tally = found.tally
    assert tally.failures == []
    assert (tally.exact, tally.reserialised_exact, tally.edited_kept) == (tally.unedited, tally.reserialised, tally.edited)
    assert found.respelled_share == 1.0
    assert found.left is not None
    assert (found.left.tickets, found.left.turns, found.left.holds) == (0, 0, 0)


def test_generated_sessions_do_everything_that_a_client_does(play: Play) -> None:
    made = [generate(seed, 50) for seed in range(40)]
    everything = [step for script in made for step in script.steps]
    assert {step.kind for step in everything} == set(StepKind)
    assert {step.dialect for step in everything} == {0, 1, 2}
    assert {name for script in made for name in script.disturbances} == set(CANONICAL_RULES)
    assert {script.is_named for script in made} == {script.drops_reasoning for script in made} == {True, False}
    tally = play([small(seed) for seed in range(8)]).tally
    assert min(tally.unedited, tally.reserialised, tally.edited) > 0
    assert tally.encoded_tokens <= tally.new_tokens


@pytest.mark.parametrize(
    "weakened",
    [Settings(canonicalise=CanonicaliseSettings(mode="off")), EVERY_RULE.model_copy(update={"sessions": SessionSettings(ledger_tokens=1)})],
    ids=["heads are passed as they are", "histories are forgotten and encoded again"],
)
def test_a_server_that_does_not_keep_its_ids_is_noticed(play: Play, weakened: Settings) -> None:
    sessions = [replace(small(seed), disturbances=tuple(CANONICAL_RULES)) for seed in range(3)]
    tally = play(sessions, settings=weakened).tally
    assert tally.exact < 0.5 * tally.unedited
    assert tally.failures


def test_a_disturbed_session_hits_about_as_much_as_a_clean_one(play: Play) -> None:
    sessions = [replace(generate(seed, 30), turn_bytes=900) for seed in range(6)]
    clean, disturbed = (play(sessions, disturbed=disturbed).hit_rate for disturbed in (False, True))
    off = play(sessions, settings=Settings(canonicalise=CanonicaliseSettings(mode="off")))
    assert clean > 0.9
    assert clean - disturbed < 0.003
    assert clean - off.hit_rate > 0.1


@pytest.mark.parametrize("name", CANONICAL_RULES)
def test_every_rule_has_a_disturbance_that_it_undoes(name: str) -> None:
    head, rule = speech.head(0, 400), Canonicaliser([CANONICAL_RULES[name]])
    sent = [disturb(head, (name,), n, n) for n in range(1, 6)]
    assert len({msgspec.json.encode(one) for one in sent}) > 1
    forms = [rule.apply(one)[1] for one in sent]
    assert len({form.key for form in forms}) == 1
    assert set(DISTURBANCES) == set(CANONICAL_RULES)


json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(json_values, st.randoms(use_true_random=False))
def test_respelled_json_means_the_same(value: Json, rng: random.Random) -> None:
    again = msgspec.json.decode(respelled(value, rng))
    assert canonical_json(again) == canonical_json(value)


def test_clients_that_leave_in_every_phase_leave_nothing_behind(model_folder: Path) -> None:
    found = asyncio.run(disconnect(model_folder, 270, seed=5))
    assert (found.total, found.missed) == (270, 0)
    assert set(found.by_phase.values()) == {30}
    assert found.left == Left()
    assert sorted(found.stop_seconds)[int(0.95 * len(found.stop_seconds))] < 1.0  # a busy machine may stall one


def test_a_long_history_is_neither_encoded_again_nor_lost(model_folder: Path) -> None:
    for costs in measure_clients(model_folder, 3).values():
        assert (costs.too_many, costs.inexact) == (0, 0)
        assert costs.num_messages > 2_000
        assert max(costs.encoded_tokens) < 500 < costs.prompt_tokens


def test_turns_go_on_while_redis_stands_still(model_folder: Path) -> None:
    found = asyncio.run(freeze(model_folder, before_seconds=2.5, frozen_seconds=3.0))
    assert min(len(found.before_seconds), len(found.frozen_seconds)) > 20
    assert (found.failed, found.inexact) == (0, 0)


def test_the_figures_have_the_names_of_the_bars_and_are_what_was_counted() -> None:
    clean, disturbed, every = Replayed(hit_rate=0.95), Replayed(hit_rate=0.94), Replayed(hit_rate=0.9)
    for replayed in (clean, disturbed, every):
        replayed.tally.turns, replayed.tally.unedited, replayed.tally.exact = 10, 8, 6
        replayed.tally.encoded_tokens = 80
    left = Disconnects(stop_seconds=[0.1], left=Left(tickets=1, tasks=2, descriptors=3))
    long = {name: Costs(decode_seconds=[0.001], whole_seconds=[0.003]) for name in ("known bytes", "moving head", "rewritten")}
    cases = CasesResult(("A",), ("B",), (), (), num_tests=2, failures=("t",))
    found = figures(Measured(long, (clean, disturbed, every), left, Frozen([0.01], [0.03], failed=1), cases))
    assert set(found) >= FIGURES
    assert (found["turns"], found["exact_share"], found["encoded_tokens_per_turn"]) == (30, 0.75, 10)
    assert math.isnan(found["reserialised_exact_share"] or 0)
    assert found["disturbed_hit_gap_points"] == pytest.approx(1)
    assert (found["leaked_tickets"], found["leaked_tasks"], found["leaked_descriptors"]) == (1, 2, 3)
    assert (found["cases_total"], found["cases_passed"]) == (2, 1)
    assert found["parse_2000_messages_ms"] == pytest.approx(2)
    assert found["redis_frozen_failed"] == 1
    assert found["redis_frozen_added_p99_ms"] == pytest.approx(20)
