"""The simulator's engine in real or accelerated time: requests come in as token ids, tokens come out when the simulated steps end.

Simulated seconds run `speed` times as fast as the wall clock. When this process cannot keep up, simulated time waits for it: a step begins
when the one before it ends, however late that is by the wall clock, so hits and latencies in simulated seconds stay those of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from admission.returns import ReturnModel, ReturnParameters
from prefix_cache.events import Event
from replays.sim_engine.answers import Said
from replays.sim_engine.chains import TokenChains
from replays.simulator.cost import Profile
from replays.simulator.engine import Engine, EngineRequest
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool, Use
from replays.simulator.steps import Step

OnEvents: TypeAlias = Callable[[list[Event]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way. Seconds are simulated."""

    request: EngineRequest
    said: Said
    num_sent: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Totals:
    """Counters of /metrics. Tokens, and sums of simulated seconds."""

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_external_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0
    num_with_tpot: int = 0
    lag_seconds: float = 0.0
    """How far simulated time has fallen behind in all; wall seconds."""


class SimulatedEngine:
    """One engine of `profile`. `run` is its main task; `generate` may be called at any time. `on_events` gets each step's KV events."""

    def __init__(
        self,
        profile: Profile,
        *,
        speed: float = 1.0,
        policy: str = "lru",
        capacity_tokens: int | None = None,
        steps_at_once: int = 1,
        on_events: OnEvents | None = None,
    ) -> None:
        size = profile.engine.block_size
        num_blocks = (capacity_tokens or profile.capacity_tokens) // size
        self.options: EngineOptions = replace(profile.engine, num_blocks=num_blocks, max_fused_steps=steps_at_once)
        self.profile = profile
        self.totals = Totals()
        self.chains = TokenChains(size)
        self._speed = speed
        self._on_events = on_events
        ranking = EVICTION_POLICIES[policy].build(Pool(num_blocks, ReturnModel(ReturnParameters())), {})
        pool = BlockPool(num_blocks, ranking, on_evict=self.chains.evicted, on_store=self.chains.stored)
        self.engine = Engine(self.options, pool, profile.cost, on_finished=self._finished)
        self._live: dict[int, Live] = {}
        self._next_id = 0
        self._first_queued = math.inf
        self._wake = asyncio.Event()
        self._zero = asyncio.get_running_loop().time()

    @property
    def max_model_len(self) -> int:
        """Prompt and answer of one request, tokens; what the pool holds, less what speculation looks ahead."""
        return self.options.num_blocks * self.options.block_size - 2 * self.options.num_speculative_tokens

    @property
    def _now(self) -> float:
        """Simulated seconds by the wall clock."""
        return (asyncio.get_running_loop().time() - self._zero) * self._speed

    async def generate(self, prompt: array[int], said: Said, *, salt: str = "", session_id: str = "") -> AsyncGenerator[tuple[Live, range]]:
        """Yields the request and the places in its answer that have just been generated. Closing the generator aborts it."""
        arrived = self._now
        front = self.profile.front_seconds(len(prompt), self.engine.num_requests)
        if front:
            await asyncio.sleep(front / self._speed)
        live = self._submit(prompt, said, Use(session_id or "unnamed"), salt, arrived, front)
        request = live.request
        try:
            while request.finished is None or live.num_sent < request.num_generated:
                await live.more.wait()
                live.more.clear()
                if request.num_generated > live.num_sent:
                    new = range(live.num_sent, request.num_generated)
                    live.num_sent = request.num_generated
                    yield live, new
        finally:
            if request.finished is None:
                self.totals.num_aborted += 1
                self.engine.abort(request, self._now)
                self._wake.set()

    def _submit(self, prompt: array[int], said: Said, use: Use, salt: str, arrived: float, front_seconds: float) -> Live:
        self._next_id += 1
        path = self.chains.add(prompt + array("I", said.ids), salt)
        request = EngineRequest(self._next_id, path, len(prompt), len(said.ids), use)
        live = self._live[request.id] = Live(request, said)
        # The time that this process needed since then is not the simulated engine's.
        queued = arrived + front_seconds
        self.engine.add(request, queued)
        request.arrived = arrived
        self._first_queued = min(self._first_queued, queued)
        self._wake.set()
        return live

    async def run(self) -> None:
        """Step for ever."""
        began = 0.0
        while True:
            self._first_queued = math.inf
            step = self.engine.start(began)
            await self._publish()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                began = max(began, min(self._now, self._first_queued))
                continue
            await self._sleep_until_end(step)
            began = step.ends
            self.totals.lag_seconds = max(self.totals.lag_seconds, (self._now - began) / self._speed)
            self.engine.finish(began)
            self._tell(step)

    async def _sleep_until_end(self, step: Step) -> None:
        """Until the step is over; a fused run of steps may be cut short meanwhile."""
        while (left := step.ends - self._now) > 0:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left / self._speed)
        # A late step must not starve those who want to send or receive.
        await asyncio.sleep(0)

    def _tell(self, step: Step) -> None:
        """Wake those whose requests had a part in the step."""
        for request, _ in step.scheduled:
            live = self._live.get(request.id)
            if live is None:
                continue
            live.more.set()
            if request.finished is not None:
                del self._live[request.id]

    def _finished(self, request: EngineRequest, now: float) -> None:
        self.chains.done(request.path)
        if request.aborted:
            self._live.pop(request.id, None)
            return
        totals = self.totals
        totals.num_finished += 1
        totals.num_prompt_tokens += request.num_prompt_tokens
        totals.num_hit_tokens += request.num_hit_blocks * self.options.block_size
        totals.num_external_tokens += request.num_external_tokens
        totals.num_generated_tokens += request.num_generated
        assert request.first_token is not None
        totals.ttft_seconds += request.first_token - request.arrived
        if request.num_generated > 1:
            totals.tpot_seconds += (now - request.first_token) / (request.num_generated - 1)
            totals.num_with_tpot += 1

    async def _publish(self) -> None:
        events = self.chains.take_events()
        if events and self._on_events is not None:
            await self._on_events(events)
