"""Generated sessions against the published statistics of recorded ones. Tolerances stand beside the figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from replays.generator import GeneratorSettings, generate_sessions
from replays.plan import num_shared
from replays.theoretical import hit_rate, theoretical_hits
from replays.traces import Request, Session, session_from_weka

NUM_SESSIONS = 400


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    return [session_from_weka(made, Path("generated")) for made in generate_sessions(GeneratorSettings(NUM_SESSIONS, seed=3))]


@pytest.fixture(scope="module")
def turns(sessions: list[Session]) -> list[Request]:
    return [request for session in sessions for request in session.root.requests]


@pytest.fixture(scope="module")
def steps(sessions: list[Session]) -> list[tuple[Request, Request]]:
    """Each root turn with the one after it."""
    roots = [session.root.requests for session in sessions]
    return [step for root in roots for step in pairwise(root)]


def assert_quantiles(values: list[float], expected: dict[float, tuple[float, float]]) -> None:
    """`expected` holds {quantile: (published value, relative tolerance)}."""
    for quantile, (value, tolerance) in expected.items():
        assert float(np.quantile(values, quantile)) == pytest.approx(value, rel=tolerance), f"quantile {quantile}"


def test_turns_per_session(sessions: list[Session]) -> None:
    assert_quantiles([len(session.root.requests) for session in sessions], {0.5: (45, 0.2), 0.9: (155, 0.2)})


def test_prompt_lengths(turns: list[Request]) -> None:
    assert_quantiles([turn.num_prompt_tokens for turn in turns], {0.5: (104e3, 0.15), 0.9: (234e3, 0.2), 0.99: (499e3, 0.2)})


def test_output_lengths(turns: list[Request]) -> None:
    outputs = [float(turn.num_output_tokens) for turn in turns]
    assert_quantiles(outputs, {0.1: (105, 0.05), 0.5: (216, 0.05), 0.9: (898, 0.07), 0.99: (3686, 0.15)})
    assert np.mean(outputs) == pytest.approx(440, rel=0.1)


def test_new_tokens_per_turn(steps: list[tuple[Request, Request]]) -> None:
    grown = [float(after.num_prompt_tokens - before.num_prompt_tokens) for before, after in steps]
    assert_quantiles(grown, {0.5: (646, 0.07), 0.9: (3511, 0.1)})


def test_gaps_by_stop_reason(sessions: list[Session]) -> None:
    gaps: dict[str, list[float]] = {}
    for session in sessions:
        # A turn that fans out waits for its sub-agents first; idle time begins when the last of them has ended.
        ends = [agent.requests[-1].end_seconds for agent in session.subagents]
        for before, after in pairwise(session.root.requests):
            joined = [end for end in ends if before.end_seconds < end <= after.start_seconds]
            gaps.setdefault(before.stop, []).append(after.start_seconds - max(joined, default=before.end_seconds))
    assert_quantiles(gaps["tool_use"], {0.5: (9, 0.05), 0.9: (71, 0.1), 0.99: (612, 0.15)})
    assert_quantiles(gaps["end_turn"], {0.5: (210, 0.2)})
    assert np.mean(np.array(gaps["tool_use"]) <= 300) == pytest.approx(0.97, abs=0.015)
    assert np.mean(np.array(gaps["end_turn"]) <= 300) == pytest.approx(0.57, abs=0.05)


def test_history_is_cut_as_often_as_recorded(steps: list[tuple[Request, Request]]) -> None:
    lost = np.array([1 - num_shared(before.hash_ids, after.hash_ids) / len(before.hash_ids) for before, after in steps])
    assert np.mean(lost > 0) == pytest.approx(0.028, abs=0.004)
    assert 0.004 < np.mean(lost > 0.3) < 0.012


def test_the_ceiling_of_an_unlimited_cache(sessions: list[Session]) -> None:
    rate = hit_rate(hit for session in sessions for stream in theoretical_hits(session) for hit in stream)
    assert rate == pytest.approx(0.963, abs=0.01)


def test_sessions_fan_out_as_often_as_agentx(sessions: list[Session]) -> None:
    share = np.mean([bool(session.subagents) for session in sessions])
    assert share == pytest.approx(0.44, abs=0.05)


def test_the_parent_goes_on_after_its_subagents(sessions: list[Session]) -> None:
    for session in sessions:
        starts = np.array([request.start_seconds for request in session.root.requests])
        ends = np.array([request.end_seconds for request in session.root.requests])
        for agent in session.subagents:
            parent = int(np.searchsorted(starts, agent.requests[0].start_seconds)) - 1
            assert ends[parent] <= agent.requests[0].start_seconds
            assert parent + 1 == len(starts) or starts[parent + 1] >= agent.requests[-1].end_seconds - 0.01


def test_the_same_seed_gives_the_same_bytes_and_more_sessions_only_add() -> None:
    few = [msgspec.json.encode(session) for session in generate_sessions(GeneratorSettings(3, seed=5))]
    more = [msgspec.json.encode(session) for session in generate_sessions(GeneratorSettings(5, seed=5))]
    assert few == more[:3]
    assert few != [msgspec.json.encode(session) for session in generate_sessions(GeneratorSettings(3, seed=6))]


def test_token_scale_shrinks_every_count() -> None:
    for whole, small in zip(
        generate_sessions(GeneratorSettings(4, seed=5)), generate_sessions(GeneratorSettings(4, seed=5, token_scale=0.125)), strict=True
    ):
        big, little = session_from_weka(whole, Path("w")), session_from_weka(small, Path("s"))
        assert big.num_requests == little.num_requests
        first = big.root.requests[0].num_prompt_tokens
        assert little.root.requests[0].num_prompt_tokens == pytest.approx(first / 8, abs=2)


def test_turn_limits_hold() -> None:
    for session in generate_sessions(GeneratorSettings(20, seed=5, token_scale=0.05, min_turns=15, max_turns=20)):
        read = session_from_weka(session, Path("s"))
        assert 15 <= len(read.root.requests) <= 20
        assert all(len(agent.requests) <= 20 for agent in read.subagents)
