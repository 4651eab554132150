"""The simulator beside a real vLLM on the CPU: calibrated on it, then both play the same sessions concurrently.

`python -m benchmarks.live_rung`. Hits hold on any machine; times only where nothing else runs, because a calibration and a replay some
minutes apart must meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.vllm_command import EmbeddedOptions
from replays.calibrate.fit import fit, hold_back
from replays.calibrate.measure import Plan, measure
from replays.generator import GeneratorSettings, generate_sessions
from replays.plan import PlannedCall, plan_session
from replays.play import TreePlay
from replays.simulator.loop import LoopOptions
from replays.simulator.profile_file import ProfileFile
from replays.simulator.run import Simulation, SimulationOptions
from replays.simulator.scripts import script_of
from replays.traces import Session, session_from_weka

BLOCK_SIZE = 128
_SETTINGS = GeneratorSettings(
    24, 5, block_size=BLOCK_SIZE, token_scale=0.03, max_turns=12, subagent_share=0.3, output_scale=3.0, gap_scale=0.1
)
_PLAN = Plan(
    prefills=(128, 512, 1024, 2048, 4096, 8192),
    cached=((2048, 128), (4096, 256), (8192, 128), (8192, 1024)),
    sequences=(1, 2, 4, 8),
    contexts=(256, 2048),
    joined=((1, 128), (2, 128), (3, 512), (4, 128), (5, 128), (5, 512), (5, 1024)),
    repeats=5,
)
_MAX_TOKENS = 9000
_IDLE_CAP_SECONDS = 3.0
_MAX_BATCHED_TOKENS, _MAX_SEQS = 2048, 64
_FIRST_ID, _LAST_ID = 300, 2000
_TAIL = 1 << 20
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Played:
    """One request that ended. Seconds are as the client saw them."""

    num_prompt_tokens: int
    num_hit_tokens: int
    ttft_seconds: float
    tpot_seconds: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """All requests of one side."""

    played: Sequence[Played]
    preemptions: int

    @property
    def hit_rate(self) -> float:
        return sum(each.num_hit_tokens for each in self.played) / sum(each.num_prompt_tokens for each in self.played)

    @property
    def ttft_seconds(self) -> float:
        return fmean(each.ttft_seconds for each in self.played)

    @property
    def tpot_seconds(self) -> float:
        return fmean(each.tpot_seconds for each in self.played if each.tpot_seconds is not None)


@dataclass(frozen=True, slots=True)
class LiveRung:
    """Both sides, and what an unlimited cache would have hit."""

    real: Side
    simulated: Side
    unlimited_hit_rate: float
    calibration_errors: tuple[float, ...]
    """Of the points held back, relative."""

    @property
    def hit_error_points(self) -> float:
        return 100 * (self.simulated.hit_rate - self.real.hit_rate)

    @property
    def ttft_error_share(self) -> float:
        return self.simulated.ttft_seconds / self.real.ttft_seconds - 1

    @property
    def tpot_error_share(self) -> float:
        return self.simulated.tpot_seconds / self.real.tpot_seconds - 1


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def sessions() -> list[Session]:
    """The generated sessions that fit the small engine."""
    made = [session_from_weka(weka, Path(weka.id)) for weka in generate_sessions(_SETTINGS)]
    return [session for session in made if _longest(session) < _MAX_TOKENS]


def _longest(session: Session) -> int:
    return max(request.num_prompt_tokens + request.num_output_tokens for stream in session.streams for request in stream.requests)


class Player:
    """Plays sessions on a real engine as the simulator's closed loop does, with token ids that are equal where the blocks are."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self.played: list[Played] = []
        self._http = http
        self._url = url
        self._model = model
        self._bodies: dict[tuple[int, int], bytes] = {}

    async def play(self, made: Sequence[Session], concurrency: int) -> None:
        """So many sessions at a time, each from its start. What is sent is made before: it would take the engine's own cores meanwhile."""
        for number, session in enumerate(made):
            for call in plan_session(session, 1.0).calls:
                self._bodies[number, call.number] = self._body(number, call)
        waiting = iter(enumerate(made))
        async with asyncio.TaskGroup() as lanes:
            for _ in range(concurrency):
                lanes.create_task(self._lane(waiting))

    async def _lane(self, waiting: Iterator[tuple[int, Session]]) -> None:
        for number, session in waiting:
            await self._session(number, session)

    async def _session(self, number: int, session: Session) -> None:
        loop = asyncio.get_running_loop()
        tree = TreePlay(plan_session(session, 1.0), number, now=loop.time(), time_scale=1.0, idle_cap_seconds=_IDLE_CAP_SECONDS)
        ended = asyncio.Event()

        async def one(call: PlannedCall) -> None:
            await self._send(number, call)
            tree.finish(call, loop.time())
            ended.set()

        async with asyncio.TaskGroup() as calls:
            while not tree.drained:
                for call in tree.due(loop.time()):
                    tree.start(call)
                    calls.create_task(one(call))
                due = tree.next_due()
                ended.clear()
                try:
                    await asyncio.wait_for(ended.wait(), None if due is None else max(0.0, due - loop.time()))
                except TimeoutError:
                    continue

    async def _send(self, session: int, call: PlannedCall) -> None:
        num_output = max(1, call.max_tokens)
        loop = asyncio.get_running_loop()
        sent, first, last, cached = loop.time(), 0.0, 0.0, 0
        headers = {"Content-Type": "application/json"}
        async with self._http.post(f"{self._url}/v1/completions", data=self._bodies[session, call.number], headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line[6:], type=_Event)
                if any(choice.token_ids for choice in event.choices):
                    last = loop.time()
                    first = first or last
                if event.usage is not None and event.usage.prompt_tokens_details is not None:
                    cached = event.usage.prompt_tokens_details.cached_tokens
        tpot = (last - first) / (num_output - 1) if num_output > 1 else None
        self.played.append(Played(call.request.num_prompt_tokens, cached, first - sent, tpot))

    def _body(self, session: int, call: PlannedCall) -> bytes:
        return msgspec.json.encode({
            "model": self._model, "prompt": _ids(session, call), "max_tokens": max(1, call.max_tokens), "ignore_eos": True, "stream": True,
            "temperature": 0, "return_token_ids": True, "stream_options": {"include_usage": True},
        })  # fmt: skip


def _ids(session: int, call: PlannedCall) -> list[int]:
    request = call.request
    blocks = request.hash_ids[: request.num_prompt_tokens // BLOCK_SIZE]
    parts = [np.random.default_rng([session, int(block)]).integers(_FIRST_ID, _LAST_ID, BLOCK_SIZE) for block in blocks]
    rest = request.num_prompt_tokens - BLOCK_SIZE * len(parts)
    parts.append(np.random.default_rng([session, _TAIL + call.number]).integers(_FIRST_ID, _LAST_ID, rest))
    return [int(token) for part in parts for token in part]


async def _real(made: Sequence[Session], options: EmbeddedOptions, concurrency: int) -> tuple[Side, ProfileFile]:
    """Start the engine, calibrate on it, and play."""
    engine = EmbeddedEngine(options, progress=_progress)
    try:
        await engine.start()
        facts, points = await measure(engine.url, _PLAN, lambda text: None)
        constants, points = fit(hold_back(points), _MAX_BATCHED_TOKENS)
        file = ProfileFile(
            name="embedded", engine=facts.name, measured=datetime.now(UTC).date().isoformat(),
            capacity_tokens=facts.capacity_tokens, block_size=facts.block_size,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS, max_num_seqs=_MAX_SEQS, constants=constants, points=points,
        )  # fmt: skip
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            player = Player(http, engine.url, facts.model)
            await player.play(made, concurrency)
        preempted = _PREEMPTIONS.search((await engine.metrics()).decode())
        return Side(player.played, int(float(preempted[1])) if preempted else 0), file
    finally:
        await engine.close()


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _simulated(made: Sequence[Session], profile: Path, concurrency: int, capacity_tokens: int | None = None) -> Side:
    scripts = [script_of(session, BLOCK_SIZE) for session in made]
    loop = LoopOptions(concurrency=concurrency, duration=None, idle_cap=_IDLE_CAP_SECONDS, shuffle=False)
    options = SimulationOptions(profile=str(profile), capacity_tokens=capacity_tokens, max_num_seqs=_MAX_SEQS, loop=loop)
    simulation = Simulation(scripts, options)
    report = simulation.run()
    played = [
        Played(
            outcome.num_prompt_tokens,
            outcome.num_hit_tokens,
            outcome.first_token - outcome.asked,
            (outcome.finished - outcome.first_token) / (outcome.num_output_tokens - 1) if outcome.num_output_tokens > 1 else None,
        )
        for outcome in simulation.outcomes
    ]
    return Side(played, report.preemptions)


def live_rung(folder: Path, *, kv_tokens: int = 12_288, concurrency: int = 6) -> LiveRung:
    """Both sides on the same sessions; about six minutes. `folder` keeps the nano model."""
    made = sessions()
    options = EmbeddedOptions(folder, kv_tokens=kv_tokens)
    with TemporaryDirectory(prefix="live-rung-") as scratch:
        profile = Path(scratch) / "embedded.json"
        real, file = asyncio.run(_real(made, options, concurrency))
        profile.write_bytes(msgspec.json.encode(file))
        simulated = _simulated(made, profile, concurrency)
        unlimited = _simulated(made, profile, concurrency, 1 << 24)
    return LiveRung(real, simulated, unlimited.hit_rate, tuple(point.error for point in file.held_back))


def main() -> None:
    """Print both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".agentserve"), help="where the nano model is kept")
    parser.add_argument("--kv-tokens", type=int, default=12_288)
    parser.add_argument("--concurrency", type=int, default=6)
    arguments = parser.parse_args()
    rung = live_rung(arguments.folder, kv_tokens=arguments.kv_tokens, concurrency=arguments.concurrency)
    table = Table("", "real vLLM", "simulated", "error")
    real, simulated = rung.real, rung.simulated
    table.add_row("requests", str(len(real.played)), str(len(simulated.played)), "")
    table.add_row("hit rate", f"{real.hit_rate:.2%}", f"{simulated.hit_rate:.2%}", f"{rung.hit_error_points:+.2f} points")
    table.add_row("preemptions", str(real.preemptions), str(simulated.preemptions), "")
    table.add_row(
        "mean TTFT, ms", f"{1000 * real.ttft_seconds:.1f}", f"{1000 * simulated.ttft_seconds:.1f}", f"{rung.ttft_error_share:+.1%}"
    )
    table.add_row(
        "mean TPOT, ms", f"{1000 * real.tpot_seconds:.2f}", f"{1000 * simulated.tpot_seconds:.2f}", f"{rung.tpot_error_share:+.1%}"
    )
    Console().print(table)
    worst = max(map(abs, rung.calibration_errors), default=0.0)
    Console().print(f"unlimited cache: {rung.unlimited_hit_rate:.2%}; calibration, worst point held back: {worst:.0%}")


if __name__ == "__main__":
    main()
