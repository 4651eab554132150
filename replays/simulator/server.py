"""What stands between the clients and the engines: admission, placement, prefill and decode apart, and the claims that streams have on
blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from admission.requests import AdmissionPolicy, AdmissionRequest, Grant
from admission.reserve import OutputReserve
from admission.tickets import Ticket
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock, Rank
from replays.simulator.engine import Engine, EngineRequest
from replays.simulator.handover import Handover
from replays.simulator.lives import Lives
from replays.simulator.outcomes import Outcome
from replays.simulator.placement import Placement, in_turn
from replays.simulator.pool import Path, covered


@dataclass(slots=True, eq=False)
class Call:
    """One call of a client. `tail` is the branch that it alone adds; `path` leads to it."""

    stream: int
    name: str
    path: Path
    num_prompt_tokens: int
    num_output_tokens: int
    stop: str
    """What the model stopped for, as the trace says it."""
    warmup: bool
    on_done: Callable[[Outcome | None], None]
    """None: its prompt is longer than the pool."""
    num_theoretical_blocks: int = 0
    num_trace_blocks: int = 0
    is_last: bool = False
    """No call of its stream follows."""
    from_user: bool = False
    """It answers a person, not only tools."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer calls, where the trace knows them."""
    tenant: str | None = None
    asked: float = 0.0
    granted: float = 0.0
    started: float = 0.0
    num_ceiling_blocks: int = 0
    replica: int = 0
    ticket: Ticket | None = None
    prefilled: EngineRequest | None = None


@dataclass(eq=False)
class Server:
    """Owns the engines' step events. Each stream stays with its play's replica, as prefix affinity would have it."""

    clock: Clock
    engines: Sequence[Engine]
    admission: AdmissionPolicy
    lives: Lives
    front_seconds: Callable[[int, int], float] = lambda num_prompt_tokens, num_requests: 0.0
    """Of a request outside the engine's steps: HTTP, rendering, tokens (`Profile.front_seconds`)."""
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    handover: Handover | None = None
    """Prefill and decode apart: the first engines prefill, the others decode."""
    on_ended: Callable[[Call, EngineRequest], None] = lambda call, request: None
    placement: Placement = in_turn
    num_in_flight: int = 0
    _next_id: int = 0
    _calls: dict[int, Call] = field(default_factory=dict)
    _held: dict[str, Call] = field(default_factory=dict)
    _claimed: dict[int, tuple[Path, int]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _due_planned: float | None = None
    _reserve: OutputReserve = field(default_factory=OutputReserve)
    _paths: dict[str, Path] = field(default_factory=dict)
    """The newest prompt of each session that the lifecycle knows."""

    def __post_init__(self) -> None:
        self._versions = [0] * len(self.engines)
        for index, engine in enumerate(self.engines):
            engine.on_finished = lambda request, now, index=index: self._finished(index, request)  # type: ignore[misc]  # bound early
            engine.on_load = lambda request, seconds, index=index: self._plan_loaded(index, request, seconds)  # type: ignore[misc]
            engine.on_first_token = lambda request, now, index=index: self._prefilled(index, request)  # type: ignore[misc]  # bound early

    def submit(self, call: Call, place: int) -> None:
        """A client asks. `place` is the number of the play: all its calls go to one replica."""
        now = self.clock.now
        call.asked = now
        call.replica = self._replica(place)
        engine = self.engines[call.replica]
        size = engine.options.block_size
        most = engine.options.num_blocks * size - 2 * engine.options.num_speculative_tokens
        if call.num_prompt_tokens + call.num_output_tokens > most:
            self.end_stream(call.stream)
            self.clock.at(now, lambda: call.on_done(None))
            return
        self.num_in_flight += 1
        limit = (call.num_prompt_tokens - 1) // size
        self._changed(self.lives.started(call, now))
        self._paths[call.name] = call.path
        self._claim(call)
        call.num_ceiling_blocks = _sent_before(call.path, limit, call.num_prompt_tokens // size)
        resident = engine.pool.hit_depth(call.path, limit) * size
        self._next_id += 1
        reserve = self._reserve.tokens()
        charge = call.num_prompt_tokens - resident + reserve
        request = AdmissionRequest(str(self._next_id), call.name, charge, resident, reserve_tokens=reserve, tenant=call.tenant)
        self._held[request.id] = call
        answer = self.admission.offer(request, now)
        if isinstance(answer, Grant):
            self._granted([answer])
        self._plan_due()

    def _replica(self, play: int) -> int:
        """A play's replica is chosen at its first call."""
        if play not in self._places:
            takers = self.engines if self.handover is None else self.engines[: self.handover.num_prefill]
            self._places[play] = self.placement(play, takers)
        return self._places[play]

    def end_stream(self, stream: int) -> None:
        """The stream is over: nothing of its newest prompt will be asked for by it."""
        path, _ = self._claimed.pop(stream, ((), 0))
        self._drop_claims(stream, path, ended=True)

    def _granted(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            call = self._held.pop(grant.request_id)
            call.ticket = grant.ticket
            call.granted = self.clock.now
            delay = self.front_seconds(call.num_prompt_tokens, self.engines[call.replica].num_requests)
            if delay:
                self.clock.at(self.clock.now + delay, lambda call=call: self._start(call))  # type: ignore[misc]  # bound early
            else:
                self._start(call)

    def _start(self, call: Call) -> None:
        now = self.clock.now
        call.started = now
        request = self._request(call, call.path, 1 if self.handover else max(1, call.num_output_tokens))
        request.keeps_blocks = self.handover is not None
        self._queue(call.replica, request)

    def _request(self, call: Call, path: Path, num_output_tokens: int) -> EngineRequest:
        self._next_id += 1
        use = self.lives.use(call, self.clock.now)
        request = EngineRequest(self._next_id, path, call.num_prompt_tokens, num_output_tokens, use)
        self._calls[request.id] = call
        return request

    def _queue(self, index: int, request: EngineRequest) -> None:
        self.engines[index].add(request, self.clock.now)
        self._look_again(index)

    def _look_again(self, index: int) -> None:
        """Something has changed for this engine."""
        if self.engines[index].step is None:
            # After everything else of this moment, so that requests that come together are scheduled together.
            self.clock.at(self.clock.now, lambda: self._kick(index), Rank.TICK)
        else:
            self._plan_step_end(index)

    def _plan_loaded(self, index: int, request: EngineRequest, seconds: float) -> None:
        self.clock.at(self.clock.now + seconds, lambda: self._loaded(index, request), Rank.TRANSFER)

    def _loaded(self, index: int, request: EngineRequest) -> None:
        now = self.clock.now
        self.engines[index].loaded(request, now)
        self._look_again(index)
        if self.handover is not None:
            source, prefilled = self.handover.sources.pop(request.id)
            self.engines[source].release(prefilled, now)
            self._look_again(source)

    def _hand_over(self, handover: Handover, call: Call, prefilled: EngineRequest) -> None:
        """The prompt is computed: the decode engine with the fewest requests reads it. What it reads is no prefix for others there."""
        engines = self.engines
        index = min(range(handover.num_prefill, len(engines)), key=lambda number: engines[number].num_requests)
        request = self._request(call, (Branch(None, 0, call.stream, generated=True),), max(1, call.num_output_tokens))
        handover.sources[request.id] = call.replica, prefilled
        self._queue(index, request)

    def _kick(self, index: int) -> None:
        engine = self.engines[index]
        if engine.step is None and engine.start(self.clock.now) is not None:
            self._plan_step_end(index)

    def _plan_step_end(self, index: int) -> None:
        step = self.engines[index].step
        assert step is not None
        self._versions[index] += 1
        version = self._versions[index]
        self.clock.at(step.ends, lambda: self._step_end(index, version), Rank.STEP_END)

    def _step_end(self, index: int, version: int) -> None:
        if version == self._versions[index]:
            self.engines[index].finish(self.clock.now)
            self.clock.at(self.clock.now, lambda: self._kick(index), Rank.TICK)

    def _prefilled(self, index: int, request: EngineRequest) -> None:
        if self.handover is not None and index >= self.handover.num_prefill:
            return
        ticket = self._calls[request.id].ticket
        assert ticket is not None
        self._granted(self.admission.prefilled(ticket, self.clock.now))

    def _changed(self, session_ids: Sequence[str]) -> None:
        """What is believed of these sessions has changed: the pools and the admission policy hear of it."""
        for session_id in session_ids:
            for branch in self._paths.get(session_id, ()):
                self._tell(branch, self.engines)
            if self.lives.is_over(session_id):
                self._paths.pop(session_id, None)
                self._granted(self.admission.session_ended(session_id, self.clock.now))

    def _finished(self, index: int, request: EngineRequest) -> None:
        call = self._calls.pop(request.id)
        if self.handover is not None and index < self.handover.num_prefill:
            call.prefilled = request
            self._hand_over(self.handover, call, request)
            return
        self.num_in_flight -= 1
        outcome = self._outcome(index, call, request)
        if self.handover is None:
            # Where a later prompt holds the answer, its blocks can be hit from now on.
            answered = min(call.path[-1].start, (request.num_tokens - 1) // self.engines[index].options.block_size)
            _sent_before(call.path, 0, answered)
        self.on_ended(call, call.prefilled or request)
        self._reserve.seen(request.num_generated)
        changed = self.lives.ended(call, self.clock.now)
        if call.is_last:
            self.end_stream(call.stream)
        self._changed(changed)
        self.on_outcome(outcome)
        assert call.ticket is not None
        missed = max(0, outcome.num_ceiling_tokens - outcome.num_hit_tokens - outcome.num_external_tokens)
        self._granted(self.admission.answered(call.ticket, call.num_prompt_tokens, missed, self.clock.now))
        self._granted(self.admission.returned(call.ticket, self.clock.now))
        self._plan_due()
        call.on_done(outcome)

    def _outcome(self, index: int, call: Call, request: EngineRequest) -> Outcome:
        """Of a request that has ended. With prefill and decode apart, hits are of the prefill, and the first token is the decoder's."""
        size = self.engines[index].options.block_size
        first = call.prefilled or request
        assert first.scheduled is not None
        assert request.first_token is not None
        return Outcome(
            stream=call.name,
            warmup=call.warmup,
            asked=call.asked,
            granted=call.granted,
            started=call.started,
            scheduled=first.scheduled,
            first_token=request.first_token,
            finished=self.clock.now,
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=request.num_generated,
            num_hit_tokens=first.num_hit_blocks * size,
            num_external_tokens=first.num_external_tokens,
            num_resident_tokens=first.num_resident_blocks * size,
            num_computed_before_tokens=first.num_computed_before * size,
            num_ceiling_tokens=call.num_ceiling_blocks * size,
            num_theoretical_blocks=call.num_theoretical_blocks,
            num_trace_blocks=call.num_trace_blocks,
            num_preemptions=request.num_preemptions,
            replica=call.replica,
        )

    def _plan_due(self) -> None:
        due = min((due for due in (self.admission.due_seconds, self.lives.due_seconds) if due is not None), default=None)
        if due is not None and due != self._due_planned:
            self._due_planned = due
            # That a session may be forgotten keeps no simulation going.
            awaited = self.admission.due_seconds is not None
            self.clock.at(due, lambda: self._due(due), Rank.TICK, awaited=awaited)

    def _due(self, planned: float) -> None:
        if planned != self._due_planned:  # another time took its place
            return
        self._due_planned = None
        self._changed(self.lives.due(self.clock.now))
        self._granted(self.admission.due(self.clock.now))
        self._plan_due()

    def _claim(self, call: Call) -> None:
        """The stream's newest prompt is this one: what it no longer has is cut."""
        depth = call.path[-1].start
        old, _ = self._claimed.get(call.stream, ((), 0))
        self._claimed[call.stream] = (call.path, depth)
        mine = {branch: end for branch, _, end in covered(call.path, 0, depth)}
        engine = self.engines[call.replica]
        for branch in old:
            if branch not in mine and branch.claims.pop(call.stream, None) is not None:
                branch.ended = False
                self._tell(branch, [engine])
        for branch, end in mine.items():
            before = branch.live_to
            branch.claims[call.stream] = end
            branch.last_claim = call.stream
            if branch.live_to != before:
                self._tell(branch, [engine])

    def _drop_claims(self, stream: int, path: Path, *, ended: bool) -> None:
        for branch in path:
            if branch.claims.pop(stream, None) is not None:
                branch.ended = ended
                self._tell(branch, self.engines)

    def _tell(self, branch: Branch, engines: Sequence[Engine]) -> None:
        """What becomes of it has changed."""
        for engine in engines:
            engine.pool.tell(branch, self.clock.now)
            if engine.loader is not None:
                engine.loader.tell(branch, self.clock.now)


def _sent_before(path: Path, limit: int, num_blocks: int) -> int:
    """Blocks in the front, at most `limit`, that stood in an earlier prompt; all `num_blocks` have, from now on."""
    depth = limit
    for branch, _, end in covered(path, 0, limit):
        if branch.sent < end:
            depth = branch.sent
            break
    for branch, _, end in covered(path, 0, num_blocks):
        branch.sent = max(branch.sent, end)
    return depth


def path_of(tail: Branch) -> Path:
    """The path that ends in `tail`."""
    return tail.path()
