"""Time that a server adds to the first text of a long session's turn, in front of an upstream that answers at once.

Each contender serves sessions of its own that grow as clients' do: the body of turn k+1 is that of turn k, the answer as it came, and
new user text. Contenders take turns in a rotating order within one run, so that they share the machine's good and bad moments.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.progress import Progress

from benchmarks.client import BadAnswer, Client
from benchmarks.contenders import CONTENDERS, Contender, ContenderFailed, Launch, free_port, install, running
from benchmarks.history import History
from benchmarks.report import Options, Result, Row, percentile
from benchmarks.served_model import prepare

NUM_MESSAGES = 306
NUM_BYTES = 420_000
NEW_USER_BYTES = 600
NUM_CLIENTS = 8
MODEL = "demo-model"
DEFAULT = ("direct", "agentserve", "agentserve-append", "sglang-router", "vllm-router")
PEER = "sglang-router"
READY_SECONDS = 60.0


@dataclass(slots=True)
class Measured:
    """Seconds to the first text, per request."""

    first: list[float] = field(default_factory=list)
    """The first request of a session, whose whole history is new to the server."""
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    together_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Agent:
    """One client with its session at one contender."""

    client: Client
    history: History
    session: str
    appends: bool

    async def turn(self, *, is_first: bool = False) -> float:
        """Send the history (or what is new of it), take the answer into it; seconds to the first text."""
        headers = {"X-Session-ID": self.session}
        if self.appends and not is_first:
            answer = await self.client.chat(self.history.newest(), {**headers, "X-Agentserve-Append": "true"})
        else:
            answer = await self.client.chat(self.history.body(), headers)
        self.history.grow(answer.text, NEW_USER_BYTES)
        return answer.first_text_seconds


def measure(options: Options) -> Result:
    """Install, start and measure the contenders."""
    contenders = [_known(name) for name in options.contenders or DEFAULT]
    pythons = {contender.name: install(contender, options.cache_folder) for contender in contenders}
    folder, token_ids = options.cache_folder / "nano", [1, 2]
    if any(contender.needs_model_folder for contender in contenders):
        token_ids = prepare(folder)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-")))
        ports = {"direct": free_port()}
        stack.enter_context(running(_upstream_command(ports["direct"], token_ids), ports["direct"], logs / "upstream.log"))
        for contender in contenders:
            if contender.command is not None:
                ports[contender.name] = port = free_port()
                launch = Launch(pythons[contender.name], port, f"http://127.0.0.1:{ports['direct']}", MODEL, folder)
                stack.enter_context(running(contender.command(launch), port, logs / f"{contender.name}.log"))
        chosen = {contender.name: ports[contender.name] for contender in contenders}
        measured = uvloop.run(_measure(chosen, num_turns=15 if options.quick else 60, num_rounds=2 if options.quick else 8))
    return _result(measured, {contender.name: contender.requirement or "" for contender in contenders})


def _known(name: str) -> Contender:
    if name not in CONTENDERS:
        raise ContenderFailed(f"no contender {name!r}; there are: {', '.join(CONTENDERS)}")
    return CONTENDERS[name]


def _upstream_command(port: int, token_ids: Sequence[int]) -> list[str]:
    ids = ",".join(map(str, token_ids))
    return [sys.executable, "-m", "benchmarks.instant_upstream", "--port", str(port), "--model", MODEL, "--token-ids", ids]


async def _measure(ports: Mapping[str, int], *, num_turns: int, num_rounds: int) -> dict[str, Measured]:
    """One client at a time for `num_turns`, then `num_rounds` bursts of all clients, the contenders in turn."""
    measured = {name: Measured() for name in ports}
    async with AsyncExitStack() as stack:
        agents: dict[str, list[Agent]] = {}
        for number, (name, port) in enumerate(ports.items()):
            await _until_it_routes(port)
            agents[name] = []
            for client in range(NUM_CLIENTS):
                connected = await stack.enter_async_context(Client(port))
                seed = 100 * number + client
                history = History(seed, model=MODEL, num_messages=NUM_MESSAGES, num_bytes=NUM_BYTES)
                agents[name].append(Agent(connected, history, f"overhead-{seed}", CONTENDERS[name].appends))
        with Progress(transient=True) as progress:
            bar = progress.add_task("measuring", total=NUM_CLIENTS + num_turns + num_rounds)
            for client in range(NUM_CLIENTS):
                for name in _rotated(list(ports), client):
                    measured[name].first.append(await agents[name][client].turn(is_first=True))
                progress.advance(bar)
            for turn in range(num_turns):
                for name in _rotated(list(ports), turn):
                    measured[name].alone.append(await agents[name][0].turn())
                progress.advance(bar)
            for burst in range(num_rounds):
                for name in _rotated(list(ports), burst):
                    await _burst(agents[name], measured[name])
                progress.advance(bar)
    return measured


async def _burst(agents: Sequence[Agent], measured: Measured, num_turns: int = 4) -> None:
    """All clients at once, each `num_turns` turns."""

    async def work(agent: Agent) -> list[float]:
        return [await agent.turn() for _ in range(num_turns)]

    started = time.perf_counter()
    for seconds in await asyncio.gather(*map(work, agents)):
        measured.together += seconds
    measured.together_seconds += time.perf_counter() - started


async def _until_it_routes(port: int) -> None:
    """Routers say they are healthy before they have taken up their workers."""
    body = History(0, model=MODEL, num_messages=6, num_bytes=600).body()
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            async with Client(port) as client:
                await client.chat(body, {})
                return
        except (BadAnswer, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


def _rotated(names: list[str], turn: int) -> list[str]:
    start = turn % len(names)
    return names[start:] + names[:start]


def _result(measured: Mapping[str, Measured], versions: Mapping[str, str]) -> Result:
    clients = f"{NUM_CLIENTS} clients"
    columns: tuple[str, ...] = ("first text p50 ms", "p95 ms", "added p50 ms", f"added / {PEER}'s", "new session p50 ms")
    columns += (f"{clients}: p50 ms", f"{clients}: p95 ms", f"{clients}: requests/s")
    base = percentile(measured["direct"].alone, 50) if "direct" in measured else None
    peer = percentile(measured[PEER].alone, 50) if PEER in measured else None
    rows = []
    for name, seen in measured.items():
        median = percentile(seen.alone, 50)
        added = None if base is None or name == "direct" else median - base
        ratio = None if added is None or peer is None or base is None else added / (peer - base)
        figures = [median, percentile(seen.alone, 95), added, None, percentile(seen.first, 50)]
        figures += [percentile(seen.together, 50), percentile(seen.together, 95)]
        row = {column: None if figure is None else 1000 * figure for column, figure in zip(columns, figures, strict=False)}
        row[columns[3]], row[columns[-1]] = ratio, len(seen.together) / seen.together_seconds
        rows.append(Row(name, row))
    notes = (
        f"Chat bodies of {NUM_MESSAGES} messages, {NUM_BYTES:,} bytes (about 105k tokens) at first; each turn adds its answer and "
        f"{NEW_USER_BYTES} bytes. Time is from the first byte sent to the first event with text.",
        "agentserve-append sends only the new message to a session that the server knows.",
        "The client acknowledges at once (TCP_QUICKACK): a server that leaves Nagle's algorithm on would wait 40 ms for it otherwise.",
    )
    return Result(f"Time to the first text of a {NUM_BYTES // 1000} kB turn, instant upstream", columns, tuple(rows), notes, versions)
