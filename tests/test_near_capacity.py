"""`python -m replays.near_capacity`: its arms can be built, its table has a row for each, and wrong use is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from replays.generator import GeneratorSettings, generate_sessions
from replays.near_capacity import ARMS, main, options_of, scripts_of
from replays.simulator.run import Simulation
from replays.simulator.server import Call
from replays.traces import TraceSet


def test_every_arm_names_policies_and_parameters_that_there_are() -> None:
    for arm in ARMS.values():
        EVICTION_POLICIES[arm.policy].chosen(arm.parameters)
        ADMISSION_POLICIES[arm.admission].chosen(arm.admission_parameters)


def test_the_table_has_a_row_for_the_baseline_and_each_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = generate_sessions(GeneratorSettings(16, seed=3, max_turns=12, subagent_share=0.0))
    traces = tmp_path / "traces.jsonl"
    traces.write_bytes(b"\n".join(msgspec.json.encode(session) for session in made))
    assert main(traces, seeds=1, blocks=90, streams=4, seconds=300.0, arms=("class_hazard, ends said",)) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [cells[0] for cells in rows] == ["| arm", "| lru", "| class_hazard, ends said"]
    assert rows[1][2] == "0.0%"
    assert float(rows[2][1]) <= float(rows[1][1]), "ends that are said do not widen the gap"


def test_lanes_are_dealt_to_clients_and_sessions_to_tenants(tmp_path: Path) -> None:
    made = generate_sessions(GeneratorSettings(12, seed=3, max_turns=6, subagent_share=0.0))
    traces = tmp_path / "traces.jsonl"
    traces.write_bytes(b"\n".join(msgspec.json.encode(session) for session in made))
    scripts = scripts_of(TraceSet(traces).checked())

    def tenants(name: str) -> set[str | None]:
        simulation = Simulation(scripts, options_of(ARMS[name], 0, blocks=200, streams=4, seconds=60.0))
        seen: set[str | None] = set()
        submit = simulation.server.submit

        def noted(call: Call, place: int) -> None:
            seen.add(call.tenant)
            submit(call, place)

        simulation.server.submit = noted  # type: ignore[method-assign]  # to look at what the server is told
        simulation.run()
        return seen

    assert tenants("class_hazard, ends inferred") == {None}
    assert tenants("class_hazard, ends inferred, one client") == {"client-0"}
    assert tenants("class_hazard, ends inferred, a client a lane") == {f"client-{lane}" for lane in range(4)}
    assert len(tenants("class_hazard, ends inferred, sessions dealt to 10 clients")) >= 4


def test_unknown_arms_and_traces_are_refused(tmp_path: Path) -> None:
    assert main(tmp_path, arms=("none",)) == 2
    assert main(tmp_path / "absent") == 2
