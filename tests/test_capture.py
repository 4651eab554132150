"""The capture of a server's turns: text-free, bounded, survives a full disk, and a replay of it is captured as the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp
import msgspec
import pytest

from agentserve.capture import Capture, CaptureOptions, TurnFacts
from agentserve.errors import SetupError
from model.conversation import ToolCall
from prefix_cache.captured import CapturedTurn, CaptureHeader, IdDeltas, IdSums
from replays.formats import open_traces
from replays.generator import GeneratorSettings, generate_sessions
from replays.plan import plan_session
from replays.simulator.loop import LoopOptions
from replays.simulator.requests import EngineRequest
from replays.simulator.run import Simulation, SimulationOptions
from replays.simulator.server import Call
from replays.simulator.workload import Reading, Workload, read_workload
from replays.traces import Request, Session
from tests.processes import wait_until
from tests.scripted import asked
from tests.serving import Served, chat, serving
from tests.upstream import Script, Upstream

SECRET = "the word that is never kept"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def capturing(upstream: Upstream, model_folder: Path, tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path / "captured"
    with serving(upstream.url, model_folder, capture=folder) as served:
        yield served, folder


def captured(served: Served, folder: Path, num_lines: int) -> list[Session]:
    """The sessions of the capture when so many lines have been written."""
    capture = served.server.turns.commits.capture
    assert capture is not None
    assert wait_until(lambda: capture.counts.written >= num_lines, seconds=5)
    return list(open_traces(folder).checked())


async def delete(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.delete(url) as response:
        assert response.status == 200


async def play(served: Served, upstream: Upstream) -> None:
    """A session of three turns with a tool call and an edit, and a sub-agent."""
    messages = [user(f"{SECRET} " * 40)]
    upstream.script(Script(calls=(ToolCall("1", "Bash", {"command": SECRET}),)), Script(say="sub"), Script(say="b"), Script(say="c"))
    names = {"x-session-id": "root-name"}
    reply = await chat(served.url, messages, stream=True, headers=names, max_tokens=64)
    await chat(served.url, [user("look " * 90)], stream=False, headers={"x-session-id": "child-name", "x-parent-session-id": "root-name"})
    call_id = reply.message["tool_calls"][0]["id"]
    messages += [reply.message, {"role": "tool", "tool_call_id": call_id, "content": "found " * 60}]
    reply = await chat(served.url, messages, stream=False, headers=names)
    messages[0] = user(f"{SECRET} " * 20 + "changed " * 60)
    await chat(served.url, [*messages, reply.message, user("more")], stream=False, headers=names)
    await delete(f"{served.url}/v1/sessions/child-name")


@pytest.mark.anyio
async def test_every_turn_is_captured_as_it_was_sent_and_nothing_of_its_text(capturing: tuple[Served, Path], upstream: Upstream) -> None:
    served, folder = capturing
    await play(served, upstream)
    (session,) = await asyncio.to_thread(captured, served, folder, 5)
    sent = [request for request in asked(upstream)]
    root, child = session.root.requests, session.subagents[0].requests
    assert [request.num_prompt_tokens for request in (root[0], child[0], *root[1:])] == [len(request.prompt_ids) for request in sent]
    assert [request.num_output_tokens for request in (root[0], child[0], *root[1:])] == [len(request.generated_ids) for request in sent]
    assert [len(request.hash_ids) for request in root] == [request.num_prompt_tokens // 32 for request in root]
    assert [(request.stop, request.tools, request.echoed) for request in root] == [
        ("tool_use", ("Bash",), True),
        ("end_turn", (), False),
        ("end_turn", (), False),
    ]
    answered = (len(sent[0].prompt_ids) + len(sent[0].generated_ids)) // 32
    assert root[1].hash_ids[: len(root[0].hash_ids)].tolist() == root[0].hash_ids.tolist()
    assert len(root[1].hash_ids) > answered
    assert 0 < sum(root[1].hash_ids[: len(root[2].hash_ids)] == root[2].hash_ids[: len(root[1].hash_ids)]) < len(root[1].hash_ids)
    text = b"".join(file.read_bytes() for file in folder.iterdir())
    for word in (SECRET, "root-name", "child-name", "changed", "command"):
        assert word.encode() not in text


@pytest.mark.anyio
async def test_two_servers_name_the_same_blocks_differently(upstream: Upstream, model_folder: Path, tmp_path: Path) -> None:
    ids: list[list[int]] = []
    for name in ("one", "two"):
        with serving(upstream.url, model_folder, capture=tmp_path / name) as served:
            await chat(served.url, [user("look " * 90)], stream=False)
            (session,) = await asyncio.to_thread(captured, served, tmp_path / name, 1)
            ids.append(session.root.requests[0].hash_ids.tolist())
    assert len(ids[0]) == len(ids[1]) > 1
    assert not set(ids[0]) & set(ids[1])


@pytest.mark.anyio
async def test_what_was_written_and_what_was_not_is_counted(capturing: tuple[Served, Path], upstream: Upstream) -> None:
    served, folder = capturing
    await play(served, upstream)
    await asyncio.to_thread(captured, served, folder, 5)
    text = served.server.metrics.text().decode()
    assert "agentserve_captured_lines_total 5.0" in text
    assert "agentserve_capture_dropped_lines_total 0.0" in text
    assert "agentserve_capture_writing 1.0" in text


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def facts(number: int, session: str = "s", blocks: int = 50) -> TurnFacts:
    turn = CapturedTurn(session=session, t=float(number), seconds=1.0, num_prompt_tokens=16 * blocks, num_output_tokens=3)
    return TurnFacts(turn, [bytes([place]) * 16 for place in range(blocks)])


def make(folder: Path, clock: Clock, **more: Any) -> Capture:
    options = CaptureOptions(folder, more.pop("file_bytes", 1 << 20), more.pop("total_bytes", 1 << 22))
    return Capture(options, 16, "m", clock, clock, **more)


def test_files_follow_one_another_stay_within_bounds_and_are_read_alone(tmp_path: Path) -> None:
    capture = make(tmp_path, Clock(), file_bytes=4096, total_bytes=20_000)
    capture.start()
    for number in range(400):
        capture.turn(facts(number, session=f"s{number % 3}", blocks=50 + number % 20))
    capture.close()
    files = sorted(tmp_path.iterdir())
    assert capture.counts.written == 400
    assert len(files) > 2
    assert sum(file.stat().st_size for file in files) <= 20_000 + 4096
    for file in files:
        for session in open_traces(file).checked():
            assert all(len(request.hash_ids) == request.num_prompt_tokens // 16 for request in session.root.requests)
    last = max(request.start_seconds for session in open_traces(tmp_path).checked() for request in session.root.requests)
    assert last == 399.0


def test_a_full_disk_costs_turns_of_the_capture_and_nothing_else(tmp_path: Path) -> None:
    """/dev/full refuses as a full disk does."""
    clock = Clock()
    broken = [False]

    def opener(path: Path) -> IO[bytes]:
        return open("/dev/full" if broken[0] else path, "wb", buffering=0)  # the capture closes it

    capture = make(tmp_path, clock, file_bytes=4096, open_file=opener)
    capture.start()
    capture.turn(facts(0))
    assert wait_until(lambda: capture.counts.written == 1, seconds=5)
    broken[0] = True
    for number in range(1, 40):
        capture.turn(facts(number, session=f"s{number}"))
    assert wait_until(lambda: capture.counts.written + capture.counts.dropped == 40, seconds=5)
    assert not capture.is_writing
    assert capture.counts.dropped > 5
    broken[0] = False
    clock.now = 31.0
    written = capture.counts.written
    capture.turn(facts(100, session="later"))
    assert wait_until(lambda: capture.counts.written == written + 1, seconds=5)
    assert wait_until(lambda: capture.is_writing, seconds=1)
    capture.close()
    starts = [request.start_seconds for session in open_traces(tmp_path).checked() for request in session.root.requests]
    assert len(starts) == written + 1
    assert max(starts) == 100.0


def test_a_line_that_a_full_disk_took_in_part_is_cut_off_again(tmp_path: Path) -> None:
    class Short:
        """Takes a part of the third line, as write(2) does before ENOSPC."""

        def __init__(self, path: Path) -> None:
            self._file = path.open("wb", buffering=0)
            self._num_lines = 0

        def write(self, data: bytes) -> int:
            self._num_lines += 1
            return int(self._file.write(data[:20] if self._num_lines == 3 else data) or 0)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    opener: Callable[[Path], Any] = Short
    capture = make(tmp_path, Clock(), open_file=opener)
    capture.start()
    capture.turn(facts(0))
    capture.turn(facts(1))
    capture.close()
    (file,) = tmp_path.iterdir()
    assert capture.counts.dropped == 1
    assert file.read_bytes().endswith(b"\n")
    assert len(file.read_bytes().splitlines()) == 2


def test_a_folder_that_cannot_be_written_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="--capture"):
        make(tmp_path / "file", Clock()).start()


class Recorder:
    """Captures what a simulation sends, as the server would."""

    def __init__(self, work: Workload, block_size: int) -> None:
        self._work = work
        self._block_size = block_size
        self._deltas: IdDeltas[tuple[int, int]] = IdDeltas(self._name)
        self._names: dict[tuple[int, int], int] = {}
        self._num_calls: dict[int, int] = {}
        self._alive: list[object] = []
        self.lines: list[CaptureHeader | CapturedTurn] = [CaptureHeader(version=1, run="0", block_size=block_size, model="m", started=0.0)]

    def _name(self, key: tuple[int, int]) -> int:
        return self._names.setdefault(key, len(self._names))

    def __call__(self, call: Call, request: EngineRequest) -> None:
        play, stream = divmod(call.stream, 1 << 12)
        index = self._num_calls[call.stream] = self._num_calls.get(call.stream, -1) + 1
        plan = self._work.scripts[play].plan
        numbers = plan.streams[stream]
        recorded = plan.calls[numbers[index]].request
        before = plan.calls[numbers[index - 1]].request if index else None
        self._alive.append(call.path)  # so that no two branches have one id
        depth = call.num_prompt_tokens // self._block_size
        blocks = [(id(branch), place) for branch, start, end in _covered(call, depth) for place in range(start, end)]
        session = f"{play:04d}/{stream}"
        kept, ids = self._deltas.add(session, blocks)
        assert request.finished is not None
        turn = CapturedTurn(
            session=session,
            parent=f"{play:04d}/0" if stream else None,
            t=call.asked,
            seconds=request.finished - call.asked,
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=request.num_generated,
            kept=kept,
            ids=ids,
            stop=recorded.stop,
            tools=list(recorded.tools),
            relation="exact" if before is not None and before.echoed else "",
        )
        self.lines.append(turn)


def _covered(call: Call, depth: int) -> Iterator[tuple[object, int, int]]:
    last = len(call.path) - 1
    for place, branch in enumerate(call.path):
        end = min(depth, call.path[place + 1].start) if place < last else depth
        if branch.start < end:
            yield branch, branch.start, end


def simulated(path: Path, out: Path) -> Path:
    """The capture of one simulated replay of the sessions in `path`."""
    work = read_workload([path], Reading(block_size=64))
    loop = LoopOptions(concurrency=5, duration=None, shuffle=False, idle_cap=1e9, system_idle_cap=1e9)
    simulation = Simulation(work.scripts, SimulationOptions(block_size=64, capacity_tokens=200_000, loop=loop))
    recorder = Recorder(work, 64)
    simulation.server.on_ended = recorder
    simulation.run()
    out.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in recorder.lines))
    return out


def same(requests: Sequence[Request]) -> list[object]:
    """A stream without its times, its blocks numbered in the order in which they come."""
    names: dict[int, int] = {}
    found: list[object] = []
    for r in requests:
        blocks = [names.setdefault(block, len(names)) for block in r.hash_ids.tolist()]
        found.append((r.num_prompt_tokens, r.num_output_tokens, r.stop, r.tools, r.echoed, blocks))
    return found


def test_a_capture_of_a_replayed_capture_is_the_capture(tmp_path: Path) -> None:
    traces = tmp_path / "t.jsonl"
    made = generate_sessions(GeneratorSettings(12, 9, token_scale=1 / 32, max_turns=15, cut_share=0.1))
    traces.write_bytes(b"".join(msgspec.json.encode(session) + b"\n" for session in made))
    first = simulated(traces, tmp_path / "one.jsonl")
    second = simulated(first, tmp_path / "two.jsonl")
    one = list(open_traces(first).checked())
    two = sorted(open_traces(second).checked(), key=lambda session: session.id)  # named by the plays, which are in the order of the first
    assert len(one) == len(two) == 12
    assert sum(len(session.subagents) for session in one) > 5
    for left, right in zip(one, two, strict=True):
        assert [same(stream.requests) for stream in left.streams] == [same(stream.requests) for stream in right.streams]
        for ours, theirs in zip(plan_session(left, 1.0).calls, plan_session(right, 1.0).calls, strict=True):
            assert (ours.stream, ours.index, ours.anchor) == (theirs.stream, theirs.index, theirs.anchor)
            assert ours.delay_seconds == pytest.approx(theirs.delay_seconds, abs=1e-6)


def test_ids_survive_being_written_as_differences() -> None:
    prompts = [("a", [1, 2, 3]), ("b", [1, 9]), ("a", [1, 2, 3, 4]), ("a", [1, 5]), ("b", []), ("b", [7]), ("a", [1, 5])]
    deltas: IdDeltas[int] = IdDeltas(lambda block: block)
    sums = IdSums()
    for session, ids in prompts:
        kept, new = deltas.add(session, ids)
        turn = CapturedTurn(session=session, t=0.0, seconds=0.0, num_prompt_tokens=0, num_output_tokens=0, kept=kept, ids=new)
        assert sums.add(turn) == ids
    assert (kept, new) == (2, [])


def test_sessions_beyond_the_bound_write_all_of_their_ids_again() -> None:
    deltas: IdDeltas[int] = IdDeltas(lambda block: block, max_sessions=2)
    for session in ("a", "b", "c"):
        assert deltas.add(session, [1, 2]) == (0, [1, 2])
    assert deltas.add("c", [1, 2]) == (2, [])
    assert deltas.add("a", [1, 2]) == (0, [1, 2])
