"""One arm: all lanes against one engine, by token ids, with the project's own lifecycle, gate and hints in the same process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import monotonic, process_time

from admission.eviction.policy import Fate
from admission.lifecycle import Lifecycle
from admission.requests import AdmissionRequest
from admission.returns import ReturnModel, ReturnParameters
from agentserve.engines import GenerateRequest
from agentserve.engines.hints import EngineHints, SessionHint, TurnHints
from agentserve.engines.prometheus import sums
from agentserve.engines.vllm import VllmEngine
from benchmarks.capacity.arms import Arm
from benchmarks.capacity.door import Door
from benchmarks.capacity.script import GAP_CAP_SECONDS, STAGGER_SECONDS, TIME_SCALE, Ceiling, Play, Turn, prompt_ids
from replays.return_prior import CONTEXT_TOKENS

GROWTH_TOKENS = 12
"""Set aside for a turn's growth, beside its output."""
TICK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that began in the measured time. Tokens, seconds."""

    lane: int
    num_prompt_tokens: int
    ceiling_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    wait_seconds: float
    """At the gate."""
    ttft_seconds: float
    """From the gate on."""
    total_seconds: float
    """With the wait."""


@dataclass(slots=True)
class Measured:
    """An arm's run."""

    seconds: float
    samples: list[Sample] = field(default_factory=list)
    num_errors: int = 0
    num_preemptions: float = 0.0
    mean_waiting: float = 0.0
    """Requests in the engine's queue, mean of the samples of its gauge."""
    client_cpu: float = 0.0
    """Cores that this process used."""
    leaked_tickets: int = 0
    lag_seconds: float = 0.0
    """By how much a tick of this process came late at the worst."""


class Run:
    """Lanes of one arm. `hints` tell an engine that has the plugin; without it they are NoHints."""

    def __init__(self, arm: Arm, engine: VllmEngine, hints: EngineHints, name: str, block_size: int, capacity_tokens: int) -> None:
        self._arm = arm
        self._engine = engine
        self._hints = hints
        self._name = name
        self._block_size = block_size
        returns = ReturnModel(ReturnParameters(time_scale=TIME_SCALE, longest_gap_seconds=GAP_CAP_SECONDS))
        self._lifecycle = Lifecycle(returns, context_tokens=CONTEXT_TOKENS, time_scale=TIME_SCALE)
        self._door = Door(arm.admission, capacity_tokens, self._lifecycle, monotonic)
        self._measured = Measured(0.0)
        self._from = float("inf")
        self._number = 0

    async def play(self, lanes: Sequence[Sequence[Play]], warm_seconds: float, seconds: float, seed: int) -> Measured:
        """Everything that began within `seconds` after `warm_seconds`."""
        rng = random.Random(seed)
        begun = monotonic()
        self._from = begun + warm_seconds
        tasks = [asyncio.create_task(self._lane(lane, plays, rng.uniform(0, STAGGER_SECONDS))) for lane, plays in enumerate(lanes)]
        ticker = asyncio.create_task(self._tick())
        await asyncio.sleep(warm_seconds)
        before, cpu = sums(await self._engine.metrics()), process_time()
        gauge = asyncio.create_task(self._watch())
        await asyncio.sleep(seconds)
        measured = self._measured
        measured.seconds = monotonic() - self._from
        measured.client_cpu = (process_time() - cpu) / measured.seconds
        name = "vllm:num_preemptions_total"
        measured.num_preemptions = sums(await self._engine.metrics()).get(name, 0.0) - before.get(name, 0.0)
        for task in (*tasks, ticker, gauge):
            task.cancel()
        ended = await asyncio.gather(*tasks, ticker, gauge, return_exceptions=True)
        measured.num_errors = sum(isinstance(one, Exception) for one in ended)
        measured.leaked_tickets = self._door.num_tickets
        return measured

    async def _tick(self) -> None:
        while True:
            asked = monotonic()
            await asyncio.sleep(TICK_SECONDS)
            now = monotonic()
            if now > self._from:
                self._measured.lag_seconds = max(self._measured.lag_seconds, now - asked - TICK_SECONDS)
            self._door.tick()
            for session_id in self._lifecycle.due(now):
                self._hints.tell(SessionHint(session_id=session_id, fate=self._lifecycle.fate(session_id)))
                self._door.session_ended(session_id)

    async def _watch(self) -> None:
        waiting: list[float] = []
        while True:
            waiting.append(sums(await self._engine.metrics()).get("vllm:num_requests_waiting", 0.0))
            self._measured.mean_waiting = sum(waiting) / len(waiting)
            await asyncio.sleep(1.0)

    async def _lane(self, lane: int, plays: Sequence[Play], delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        number = 0
        while True:
            play = plays[number % len(plays)]
            session_id = f"{self._name}/{lane}/{number}"
            ceiling = Ceiling(self._block_size)
            for position in range(play.first if number == 0 else 0, len(play.turns)):
                turn = play.turns[position]
                if position != play.first or number:
                    await asyncio.sleep(turn.gap_seconds)
                is_last = position + 1 == len(play.turns)
                await self._turn(lane, session_id, hash((lane, number)) & 0xFFFFFFFF, turn, ceiling, is_last=is_last)
            number += 1

    async def _turn(self, lane: int, session_id: str, salt: int, turn: Turn, ceiling: Ceiling, *, is_last: bool) -> None:
        ids = prompt_ids(turn.hash_ids, salt)
        known = ceiling.of(ids)
        says_end = is_last and self._arm.says_ends
        asked = monotonic()
        self._lifecycle.turn_started(session_id, asked, branch_id="")
        self._number += 1
        reserve = turn.num_output_tokens + GROWTH_TOKENS
        admission = AdmissionRequest(f"{self._number}", session_id, len(ids) - known + reserve, known, reserve_tokens=reserve)
        async with self._door.ticket(admission) as waited:
            hints = TurnHints(branch_id="", echoes=False, fate=Fate.ENDED if says_end else Fate.LIVE)
            request = GenerateRequest(
                request_id=f"{self._name}-{self._number}",
                prompt_json=(",".join(map(str, ids.tolist())).encode(),),
                num_prompt_tokens=len(ids),
                max_tokens=turn.num_output_tokens,
                sampling={"temperature": 0.0, "ignore_eos": True},
                session_id=session_id,
                xargs=dict(self._hints.xargs(hints)),
            )
            sent = monotonic()
            first, num_cached, num_output = await self._generate(request)
        ended = monotonic()
        self._over(session_id, turn, ended, says_end=says_end)
        if asked >= self._from:
            sample = Sample(lane, len(ids), known, num_cached, num_output, waited, first - sent, ended - asked)
            self._measured.samples.append(sample)

    async def _generate(self, request: GenerateRequest) -> tuple[float, int, int]:
        first, num_cached, num_output = 0.0, 0, 0
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.ids and not first:
                    first = monotonic()
                num_output += len(chunk.ids)
                if chunk.usage is not None:
                    num_cached = chunk.usage.num_cached_tokens or 0
        return first, num_cached, num_output

    def _over(self, session_id: str, turn: Turn, now: float, *, says_end: bool) -> None:
        self._lifecycle.turn_ended(session_id, now, turn.end)
        if says_end:
            self._lifecycle.end_said(session_id, now)
            self._door.session_ended(session_id)
        else:
            self._hints.tell(SessionHint(session_id=session_id, return_class=self._lifecycle.return_class(session_id)))
