"""vLLM V1's scheduler in discrete steps: token budget, chunked prefill, running before waiting, preemption by recompute.

The order inside a step is vLLM 0.32's (`v1/core/sched/scheduler.py`, synchronous): running requests first; a failed allocation preempts the
last running one, and in such a step nobody is admitted; then the waiting queue in order, each looked up at the attempt, until one does not
fit. A block can be hit from when it is allocated for computing, not only when its step has ended: vLLM hashes it then.

A request whose blocks come from elsewhere (a tier, a prefill engine) holds room for them while they are on their way, runs in no step, and
others pass it; then it waits in front of all others. What such requests still need for their prompts is kept free for them.

Steps that only decode are fused: nothing can change until a request ends or another arrives, so they cost one look.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from replays.simulator.cost import StepCost
from replays.simulator.kv_manager import KVCacheManager
from replays.simulator.loads import Loader
from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool
from replays.simulator.requests import MILLI, EngineRequest
from replays.simulator.steps import EngineCounters, Step, work_of


@dataclass(eq=False)
class Engine:
    """One engine. `add` at any time; `start` when idle or after `finish`; `finish` when the step's time is over."""

    options: EngineOptions
    pool: BlockPool
    cost: StepCost
    on_first_token: Callable[[EngineRequest, float], None] = lambda request, now: None
    on_finished: Callable[[EngineRequest, float], None] = lambda request, now: None
    loader: Loader | None = None
    on_load: Callable[[EngineRequest, float], None] = lambda request, seconds: None
    """A load has begun: `loaded` is to be called so many seconds from now."""
    waiting: deque[EngineRequest] = field(default_factory=deque)
    running: list[EngineRequest] = field(default_factory=list)
    loading: list[EngineRequest] = field(default_factory=list)
    step: Step | None = None
    counters: EngineCounters = field(default_factory=EngineCounters)

    def __post_init__(self) -> None:
        options = self.options
        self._milli_length = round(options.acceptance_length * MILLI)
        assert MILLI <= self._milli_length <= (options.num_speculative_tokens + 1) * MILLI
        self._blocks = KVCacheManager(options, self.pool)
        self._watermark_blocks = int(options.watermark * options.num_blocks)
        self._now = 0.0

    @property
    def num_requests(self) -> int:
        """Running, loading and waiting."""
        return len(self.running) + len(self.loading) + len(self.waiting)

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request. A fused run of decode steps is cut at the end of the step that is under way."""
        request.arrived = now
        self.waiting.append(request)
        self.interrupt(now)

    def loaded(self, request: EngineRequest, now: float) -> None:
        """What `request` waited for has come. Changes state."""
        self.loading.remove(request)
        request.is_loaded = True
        self._blocks.commit(request, request.num_computed_tokens, now)
        self.waiting.appendleft(request)
        self.interrupt(now)

    def release(self, request: EngineRequest, now: float) -> None:
        """Every reader of a request that `keeps_blocks` has what it wanted."""
        assert request.keeps_blocks
        assert request.finished is not None
        self._blocks.free(request, now)

    def abort(self, request: EngineRequest, now: float) -> None:
        """Its client is gone. A running request ends with the step that is under way, a loading one when its blocks have come."""
        if request.finished is not None:
            return
        request.aborted = True
        if request in self.waiting:
            self._now = now
            self.waiting.remove(request)
            self._end(request)
        else:
            self.interrupt(now)

    def interrupt(self, now: float) -> None:
        """Something has changed: no further fused step starts after `now`."""
        step = self.step
        if step is not None:
            step.cut(now)

    def start(self, now: float) -> Step | None:
        """Schedule and start a step; None when there is nothing that can run."""
        assert self.step is None
        self._now = now
        scheduled, preempted = self._schedule_running()
        num_decoding = len(scheduled)
        if not preempted:
            self._schedule_waiting(scheduled)
        if not scheduled:
            return None
        step = self.step = Step(now, scheduled, self.cost.step_seconds(work_of(scheduled)))
        if num_decoding == len(scheduled) == len(self.running) and not preempted:
            self._fuse(step)
        return step

    def finish(self, now: float) -> None:
        """The step is over: tokens come out, requests end, blocks are let go."""
        step = self.step
        assert step is not None
        self.step = None
        self._now = now
        counters = self.counters
        counters.num_steps += step.num_steps
        counters.busy_seconds += now - step.started
        usage = self.pool.usage
        counters.usage_seconds += usage * (now - step.started)
        counters.peak_usage = max(counters.peak_usage, usage)
        if step.num_steps > 1:
            for request, _ in step.scheduled:
                self._advance(request, step.num_steps - 1)
        stopped = False
        for request, num_new in step.scheduled:
            request.num_computed_tokens += num_new
            counters.num_computed_tokens += num_new
            if request.aborted:
                self._end(request)
                stopped = True
            elif request.num_computed_tokens >= request.num_tokens:
                stopped |= self._sample(request)
        if stopped:
            self.running = [request for request in self.running if request.finished is None]

    def _schedule_running(self) -> tuple[list[tuple[EngineRequest, int]], bool]:
        scheduled: list[tuple[EngineRequest, int]] = []
        budget = self.options.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = min(request.num_tokens + request.num_drafts - request.num_computed_tokens, budget)
            while not (fits := self._blocks.grow(request, num_new, self._now)):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if not fits:
                break
            scheduled.append((request, num_new))
            budget -= num_new
            index += 1
        self._budget = budget
        return scheduled, preempted

    def _schedule_waiting(self, scheduled: list[tuple[EngineRequest, int]]) -> None:
        while self.waiting and self._budget > 0 and len(self.running) < self.options.max_num_seqs:
            request = self.waiting[0]
            if request.aborted:
                self.waiting.popleft()
                self._end(request)
                continue
            num_new = self._admit_loaded(request) if request.is_loaded else self._admit(request)
            if num_new is None:
                return
            self.waiting.popleft()
            if not num_new:
                self.loading.append(request)
                continue
            self.running.append(request)
            scheduled.append((request, num_new))
            self._budget -= num_new

    def _admit(self, request: EngineRequest) -> int | None:
        """Give a waiting request its hits and the blocks of its first chunk; the chunk's tokens, none if blocks of it are being loaded
        first, or None where it does not fit."""
        options, pool = self.options, self.pool
        size = options.block_size
        limit = (request.num_tokens - 1) // size
        resident = pool.hit_depth(request.path, limit)
        hit = resident - 1 if options.drops_last_block and resident else resident
        num_new = min(request.num_tokens - hit * size, self._budget)
        spare = pool.num_free - pool.num_idle_in(request.path, hit) - (self._watermark_blocks if self.running else 0) - self._num_reserved()
        whole = -(-request.num_tokens // size) - hit
        if options.full_prompt_must_fit and whole > spare:
            return None
        if self.loader is not None and whole <= spare and (num_loaded := self.loader.offer(request, resident, limit, self._now)):
            # The last-block rule is for the end of what is found, wherever it is: here the pool's own last block is in its middle.
            self._note_hits(request, resident, resident, limit)
            return self._load(request, resident, num_loaded)
        end = hit * size + num_new
        if -(-(end + options.num_speculative_tokens) // size) - hit > spare:
            return None
        self._note_hits(request, hit, resident, limit)
        self._blocks.take(request, hit, end + options.num_speculative_tokens, self._now)
        request.num_computed_tokens = hit * size
        self._blocks.commit(request, end, self._now)
        return num_new

    def _note_hits(self, request: EngineRequest, hit: int, resident: int, limit: int) -> None:
        if request.scheduled is None:
            request.scheduled = self._now
            request.num_hit_blocks, request.num_resident_blocks = hit, resident
            request.num_computed_before = self.pool.computed_depth(request.path, limit)

    def _load(self, request: EngineRequest, hit: int, num_tokens: int) -> int:
        """Hold room for the first `num_tokens` of a request, of which those after its hits are on their way."""
        assert self.loader is not None
        self._blocks.take(request, hit, num_tokens, self._now)
        request.num_computed_tokens = num_tokens
        if not request.num_preemptions:
            request.num_external_tokens = num_tokens - hit * self.options.block_size
        self.on_load(request, self.loader.load(request, hit, num_tokens, self._now))
        return 0

    def _admit_loaded(self, request: EngineRequest) -> int | None:
        num_new = min(request.num_tokens - request.num_computed_tokens, self._budget)
        if not self._blocks.grow(request, num_new, self._now):
            return None
        request.is_loaded = False
        return num_new

    def _num_reserved(self) -> int:
        """Blocks that loading and loaded requests still need for their prompts."""
        if self.loader is None:
            return 0
        held = itertools.chain(self.loading, itertools.takewhile(lambda request: request.is_loaded, self.waiting))
        return sum(self._blocks.num_missing(request, request.num_tokens) for request in held)

    def _preempt(self, request: EngineRequest) -> None:
        self._blocks.free(request, self._now)
        request.num_computed_tokens = request.num_drafts = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.appendleft(request)

    def _sample(self, request: EngineRequest) -> bool:
        """The step's tokens of a request whose prompt is computed; whether it has ended."""
        num_out = 1
        if request.num_drafts:
            num_out = request.accept(1, self._milli_length)
            request.num_computed_tokens -= request.num_drafts - (num_out - 1)
        if request.first_token is None:
            request.first_token = self._now
            self.on_first_token(request, self._now)
        most = request.num_prompt_tokens + request.num_output_tokens
        request.num_tokens = min(request.num_tokens + num_out, most)
        request.num_drafts = self.options.num_speculative_tokens
        if request.num_tokens < most:
            return False
        self._end(request)
        return True

    def _end(self, request: EngineRequest) -> None:
        request.finished = self._now
        if not request.keeps_blocks or request.aborted:
            self._blocks.free(request, self._now)
        self.on_finished(request, self._now)

    def _fuse(self, step: Step) -> None:
        """Let the step stand for as many as end nobody before the last of them, if their blocks are there."""
        num_drafts = self.options.num_speculative_tokens
        num_steps = self.options.max_fused_steps
        for request, num_new in step.scheduled:
            if num_new != 1 + num_drafts or request.num_drafts != num_drafts:
                return
            num_steps = min(num_steps, request.num_steps_left(self._milli_length))
            if num_steps < 2:
                return
        most = (num_steps * self._milli_length) // MILLI + 2 + 2 * num_drafts
        if sum(self._blocks.num_missing(request, request.num_tokens + most) for request, _ in step.scheduled) > self.pool.num_free:
            return
        step.num_steps = num_steps
        step.growth_seconds = self.cost.growth_seconds(len(step.scheduled)) * self._milli_length / MILLI

    def _advance(self, request: EngineRequest, num_steps: int) -> None:
        """`num_steps` decode steps at once, none of them its last; its blocks are there."""
        num_out = request.accept(num_steps, self._milli_length)
        request.num_tokens += num_out
        request.num_computed_tokens += num_out
        fits = self._blocks.grow(request, 1 + request.num_drafts, self._now)
        assert fits
        self.counters.num_computed_tokens += num_steps * (1 + request.num_drafts)
