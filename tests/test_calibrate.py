"""Calibration finds the constants of an engine whose constants are known, and says how far off it is where it did not look."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from replays.calibrate.fit import fit, hold_back
from replays.calibrate.measure import CalibrationError, Plan, measure
from replays.sim_engine.app import ServeOptions, simulated_server
from replays.simulator.cost import StepWork
from replays.simulator.profile_file import Constants, Measured, ProfileFile, ProfileFileError
from replays.simulator.profiles import find_profile

PLANTED = Constants(
    step=0.012,
    per_sequence=0.0015,
    per_context_token=4e-7,
    per_prefill_token=2e-5,
    per_prefill_product=2e-9,
    request=0.02,
    token=2e-6,
    busy=0.001,
    wake=0.004,
)
BUDGET = 4096


def file_with(constants: Constants, points: list[Measured]) -> ProfileFile:
    return ProfileFile(
        name="planted",
        engine="none",
        measured="2026-01-01",
        capacity_tokens=128 * 2048,
        block_size=128,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        constants=constants,
        points=points,
    )


def seconds(kind: str, num_new: int, context: int, num_sequences: int) -> float:
    """What the planted constants make of a point, step by step as the simulator does."""
    c = PLANTED
    if kind == "decode":
        return c.step + c.per_sequence * num_sequences + c.per_context_token * num_sequences * context
    others, before = (num_sequences, 0) if kind == "joined" else (0, context)
    shared = c.step + others * (c.per_sequence + c.per_context_token * context)
    total = c.request + c.token * (num_new + before) + (c.busy * others + shared / 2 if others else c.wake)
    while num_new:
        n = min(BUDGET - others, num_new)
        total += shared + c.per_prefill_token * n + c.per_prefill_product * (n * (2 * before + n) // 2)
        before, num_new = before + n, num_new - n
    return total


def grid() -> list[Measured]:
    plan = Plan()
    prefills = [("prefill", n, 0, 1) for n in plan.prefills] + [("prefill", n, context, 1) for context, n in plan.cached]
    joined = [("joined", new, 384, others) for others, new in plan.joined]
    decodes = [("decode", 0, context, n) for context in plan.contexts for n in plan.sequences]
    return [Measured(*point, seconds(*point)) for point in prefills + joined + decodes]


def test_the_fit_finds_every_constant_from_exact_points_and_holds_back_a_third() -> None:
    points = hold_back(grid())
    assert len(points) / 4 < sum(point.held_back for point in points) < len(points) / 2
    constants, predicted = fit(points, BUDGET)
    for name in constants.__struct_fields__:
        assert getattr(constants, name) == pytest.approx(getattr(PLANTED, name), rel=0.02), name
    assert max(abs(point.error) for point in predicted) < 0.001


def test_noise_shows_as_an_error_of_the_points_held_back_and_no_constant_is_negative() -> None:
    noisy = [msgspec.structs.replace(point, seconds=point.seconds * (1.1 if number % 2 else 0.9)) for number, point in enumerate(grid())]
    constants, predicted = fit(hold_back(noisy), BUDGET)
    assert all(value >= 0 for value in msgspec.structs.astuple(constants))
    errors = [abs(point.error) for point in predicted if point.held_back]
    assert 0.1 < max(errors) < 0.5


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit(grid()[:6], BUDGET)


def test_a_profile_file_is_a_profile_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(file_with(PLANTED, grid())))
    profile = find_profile(str(path))
    assert profile.cost.step_seconds(StepWork(4, 4000, 0, 0)) == pytest.approx(seconds("decode", 0, 1000, 4))
    assert profile.engine.max_num_batched_tokens == BUDGET
    path.write_bytes(b"{}")
    with pytest.raises(ProfileFileError, match="cannot be read as a profile"):
        find_profile(str(path))
    with pytest.raises(ValueError, match="there is no profile 'mine'"):
        find_profile("mine")


@pytest.mark.anyio
async def test_measuring_an_engine_over_http_finds_what_was_planted(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "planted.json"
    path.write_bytes(msgspec.json.encode(file_with(PLANTED, [])))
    plan = Plan(
        prefills=(128, 1024, 4096, 8192),
        cached=((4096, 256), (8192, 512)),
        sequences=(1, 4, 8),
        contexts=(256, 2048),
        joined=((6, 1024),),
        num_decode_tokens=16,
        pause_seconds=0.0,
        repeats=3,  # other processes only ever make it slower
    )
    async with simulated_server(ServeOptions(str(path), model_folder)) as server:
        facts, points = await measure(server.url, plan, lambda text: None)
    assert (facts.block_size, facts.capacity_tokens) == (128, 128 * 2048)
    constants, predicted = fit(hold_back(points), BUDGET)
    # This machine's own time is in every measurement: the client, the server and the simulator share it.
    for point in predicted:
        kind = (point.kind, point.num_new, point.context, point.num_sequences)
        assert point.predicted_seconds == pytest.approx(seconds(*kind), rel=0.35, abs=0.01), kind
    assert constants.per_prefill_token == pytest.approx(PLANTED.per_prefill_token, rel=0.35)
    held = [abs(point.error) for point in predicted if point.held_back]
    assert held
    assert max(held) < 0.3


@pytest.mark.anyio
async def test_what_is_no_vllm_is_not_measured() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CalibrationError, match="does not answer as vLLM does"):
            await measure(f"http://127.0.0.1:{port}", Plan(), lambda text: None)
