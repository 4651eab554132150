"""What is said of sessions, brought to the blocks that they use: requests and hints in, the facts of extents out.

It is told when a request comes, gets its blocks, and is over; it knows vLLM's requests and block pool by the few attributes that
`supported.py` checks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import MAY_RETURN, Extent, Fate, Pool
from admission.returns import ReturnModel
from agentserve.engines.plugin.forest import Forest
from agentserve.engines.plugin.nodes import Branch, Node, Session
from agentserve.engines.plugin.offloading import OffloadTier
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.tier import ExclusiveTier
from agentserve.engines.plugin.wire import XARG, BadHint, HintBatch, SessionHint, TurnHints, read_turn

_LEAST_SWEEP: Final = 1024
_OVER: Final = (Fate.ENDED, Fate.PRESUMED)
_NO_HINTS: Final = TurnHints()


@dataclass(slots=True)
class _Request:
    """A request of the engine between its arrival and its end."""

    request: Any
    branch: Branch
    hints: TurnHints


@dataclass(slots=True)
class Counts:
    """Since the engine started."""

    num_hints: int = 0
    num_bad_hints: int = 0


class Retention:
    """One engine's sessions. `pool`: vLLM's BlockPool; `clock`: seconds, only rising."""

    def __init__(
        self,
        pool: Any,
        options: PluginOptions,
        returns: ReturnModel,
        clock: Callable[[], float],
        num_slots: int = 0,
        warn: Callable[[str, Exception], None] = lambda message, error: None,
    ) -> None:
        """`num_slots`: of the offload tier, whose faults are told to `warn`; 0: there is none. Raises PolicyParameterError."""
        self.sessions: dict[str, Session] = {}
        self.counts = Counts()
        self.policy = options.policy
        self.parameters = dict(options.parameters)
        self._protected_requests = options.protected_requests
        self._pool = pool
        self._returns = returns
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self.queued: dict[str, Any] = {}
        """Requests that came and have no blocks yet."""
        self.unprotected: dict[str, Any] = {}
        """Those of them whose blocks are not protected."""
        self.awaited: list[tuple[float, str]] = []
        """Until when, and which sessions: a heap."""
        self._sweep_at = _LEAST_SWEEP
        self.forest = Forest(pool.num_gpu_blocks, self._build(options.policy, options.parameters, pool.num_gpu_blocks - 1), clock)
        kept = ExclusiveTier(num_slots, self._build(options.policy, options.parameters, num_slots), clock) if num_slots else None
        self.tier = OffloadTier(kept, pool.hash_block_size, clock, warn)
        if num_slots:
            self.forest.on_evict = self.tier.evicted

    def arrived(self, request: Any) -> None:
        """A request came into the engine's queue. Changes state."""
        hints = self._hints(request)
        session_id = getattr(request, "session_id", None) or hints.session_id or f"request {request.request_id}"
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = Session(session_id)
        self._came(session)
        # What one side request leaves behind must not pass for what the session's next turn will want.
        name = f"aside {request.request_id}" if hints.fate is Fate.ONE_SHOT else hints.branch_id or ""
        branch = session.branches.get(name)
        if branch is None:
            branch = session.branches[name] = Branch(session, name)
        self._requests[request.request_id] = _Request(request, branch, hints)
        if self.awaited:
            self.forest.unprotect(_awaited(session_id))
        self.queued[request.request_id] = self.unprotected[request.request_id] = request
        if len(self.queued) > 1:  # else it is the next to be placed
            self._protect_queued()
        for hint in hints.others:
            self.tell(hint)

    def placed(self, request: Any, blocks: list[Any]) -> None:
        """It got its first blocks, or got blocks again after a preemption. `blocks`: all that it has. Changes state."""
        known = self._requests[request.request_id]
        self._leave_queue(request.request_id)  # first: what is not protected costs the policy less
        self.forest.hold(self.forest.trace(blocks, known.branch, _num_cached(blocks)), known.branch)

    def finished(self, request: Any, blocks: list[Any]) -> None:
        """It is over, however it ended; its `blocks` are let go right after. Changes state."""
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return
        self._leave_queue(request.request_id)
        branch, session = known.branch, known.branch.session
        num_cached = _num_cached(blocks)
        if self.tier.is_on:
            self.tier.finished(request, branch, num_cached, concludes=known.hints.branch_id is not None)
        nodes = self.forest.trace(blocks, branch, num_cached)
        self.forest.hold(nodes, branch, hit=False)
        nodes = self.forest.join(nodes)
        branch.num_prompt_blocks = request.num_prompt_tokens // self._pool.hash_block_size
        self._take_facts(session, known.hints)
        for node in nodes:
            self._write_facts(node.extent, session)
        self._judge(nodes, known)
        session.num_running -= 1
        session.idle_since = self._clock()
        if session.num_running == 0 and session.fate is not Fate.LIVE:
            self._set_fate(session, SessionHint(session_id=session.id), session.fate)
        self._forget_if_empty(branch)
        if len(self.sessions) > self._sweep_at:
            self._sweep()

    def tell(self, hint: SessionHint) -> None:
        """Applied at once; of a session that has nothing here it says nothing. Changes state."""
        self.counts.num_hints += 1
        session = self.sessions.get(hint.session_id)
        if session is None:
            return
        if hint.return_class is not None:
            session.return_class = hint.return_class
        if hint.priority is not None:
            session.priority, session.retention_seconds = hint.priority, hint.retention_seconds
        if hint.return_class is not None or hint.priority is not None:
            for node in self._nodes(session, hint):
                if node.extent.session_id == session.id:
                    self._write_facts(node.extent, session)
                    self.forest.reconsider(node)
            kept = [run for branch in session.branches.values() for run in branch.kept if run.extent.session_id == session.id]
            for run in kept:
                self._write_facts(run.extent, session)
            self.tier.reconsider(kept)
        if hint.fate is not None:
            self._set_fate(session, hint, hint.fate)
        if hint.awaited_seconds is not None:
            self._await(session, hint.awaited_seconds)

    def take_batch(self, batch: HintBatch) -> None:
        """Raises PolicyParameterError, KeyError for a policy that is not in the table; then nothing has changed but the hints."""
        for hint in batch.hints:
            self.tell(hint)
        if batch.policy is not None:
            policy = self._build(batch.policy, batch.parameters, self._pool.num_gpu_blocks - 1)
            self.policy, self.parameters = batch.policy, dict(batch.parameters)
            self.forest.switch(policy)
            if self.tier.is_on:
                self.tier.switch(self._build(batch.policy, batch.parameters, self.tier.num_slots))

    def step(self, preempted_ids: Iterable[str] = ()) -> None:
        """A step of the engine was scheduled: who still waits is protected; what was awaited for long enough is not any more."""
        for request_id in preempted_ids:
            if request_id in self._requests:
                self.queued[request_id] = self.unprotected[request_id] = self._requests[request_id].request
        if self.unprotected:
            self._protect_queued()
        while self.awaited and self.awaited[0][0] <= self._clock():
            self.forest.unprotect(_awaited(heapq.heappop(self.awaited)[1]))

    def _protect_queued(self) -> None:
        """Most requests are placed in the step after they came and never need it; these wait, or others are before them."""
        while self.unprotected and len(self.forest.waiting) < self._protected_requests:
            request_id = next(iter(self.unprotected))
            self.forest.protect(request_id, self._resident(self.unprotected.pop(request_id)))

    def _leave_queue(self, request_id: str) -> None:
        if self.queued.pop(request_id, None) is not None and self.unprotected.pop(request_id, None) is None:
            self.forest.unprotect(request_id)

    def _build(self, policy: str, parameters: Mapping[str, float], num_blocks: int) -> Any:
        return EVICTION_POLICIES[policy].build(Pool(num_blocks, self._returns), parameters)

    def _hints(self, request: Any) -> TurnHints:
        value = _carried(request)
        if value is None:
            return _NO_HINTS
        self.counts.num_hints += 1
        try:
            return read_turn(value)
        except BadHint:
            self.counts.num_bad_hints += 1
            return _NO_HINTS

    def _came(self, session: Session) -> None:
        if session.num_running == 0 and session.idle_since is not None:
            now = self._clock()
            self._returns.came_back(session.return_class, now - session.idle_since, now)
        session.fate = Fate.LIVE
        session.num_running += 1

    def _resident(self, request: Any) -> list[Node]:
        """The nodes that the request would hit, by a look-up a node."""
        nodes: list[Node] = []
        hashes, position = request.block_hashes, 0
        while position < len(hashes):
            found = self._pool.get_cached_block(hashes[position], [0])
            if not found:
                break
            node = self.forest.node_of[found[0].block_id]
            if node is not None:
                nodes.append(node)
            position = max(position + 1, node.end if node is not None else 0)
        return nodes

    def _take_facts(self, session: Session, hints: TurnHints) -> None:
        if hints.return_class is not None:
            session.return_class = hints.return_class
        if hints.priority is not None:
            session.priority, session.retention_seconds = hints.priority, hints.retention_seconds
        if hints.fate in _OVER:
            session.fate = hints.fate

    @staticmethod
    def _write_facts(extent: Extent, session: Session) -> None:
        extent.session_id, extent.return_class = session.id, session.return_class
        extent.priority, extent.retention_seconds = session.priority, session.retention_seconds

    def _judge(self, nodes: list[Node], known: _Request) -> None:
        """What the request's end says of the branch's nodes: which are cut, which generated for nobody, which a side request's."""
        branch, hints = known.branch, known.hints
        if hints.branch_id is not None and 0 < len(nodes) < len(branch.nodes):
            on_path = set(nodes)
            for node in [node for node in branch.nodes if node not in on_path]:
                self.forest.set_fate(node, branch, Fate.CUT)
        if not hints.echoes and nodes and (generated := self.forest.cut(nodes[-1], branch.num_prompt_blocks)) is not None:
            self.forest.set_fate(generated, branch, Fate.GENERATED)
        if hints.fate is not Fate.LIVE and hints.fate not in _OVER:
            for node in list(branch.nodes):
                self.forest.set_fate(node, branch, hints.fate)
            self.tier.cut(branch, 0)

    def _nodes(self, session: Session, hint: SessionHint) -> list[Node]:
        """Those that the hint is about; cut where it says a depth."""
        nodes = []
        for branch, first in self._parts(session, hint):
            for node in list(branch.nodes):
                part = self.forest.cut(node, first)
                if part is not None:
                    nodes.append(part)
        return nodes

    def _parts(self, session: Session, hint: SessionHint) -> list[tuple[Branch, int]]:
        """The branches that the hint is about, and from which block on."""
        depth = -(-hint.start_tokens // self._pool.hash_block_size)
        branches = [branch for branch in session.branches.values() if hint.branch_id in (None, branch.id)]
        return [(branch, max(depth, branch.num_prompt_blocks) if hint.only_generated else depth) for branch in branches]

    def _set_fate(self, session: Session, hint: SessionHint, fate: Fate) -> None:
        if hint.branch_id is None and not hint.start_tokens and not hint.only_generated:
            if fate in _OVER and session.fate is Fate.LIVE and session.num_running == 0 and session.idle_since is not None:
                self._returns.left(session.return_class, self._clock() - session.idle_since, self._clock())
            session.fate = fate
        for node in self._nodes(session, hint):
            for branch in [branch for branch in node.owners if branch.session is session]:
                if hint.branch_id in (None, branch.id):
                    self.forest.set_fate(node, branch, fate)
        for branch, first in self._parts(session, hint) if fate not in MAY_RETURN else ():
            self.tier.cut(branch, first)
        for branch in list(session.branches.values()):
            self._forget_if_empty(branch)

    def _await(self, session: Session, seconds: float) -> None:
        self.forest.unprotect(_awaited(session.id))
        self.forest.protect(_awaited(session.id), dict.fromkeys(node for branch in session.branches.values() for node in branch.nodes))
        heapq.heappush(self.awaited, (self._clock() + seconds, session.id))

    def _forget_if_empty(self, branch: Branch) -> None:
        session = branch.session
        if not branch.nodes and not branch.kept and session.num_running == 0:
            session.branches.pop(branch.id, None)
            if not session.branches:
                self.sessions.pop(session.id, None)

    def _sweep(self) -> None:
        """Forget sessions whose last block has left; each time their number has doubled, so O(1) a request."""
        for session in list(self.sessions.values()):
            for branch in list(session.branches.values()):
                self._forget_if_empty(branch)
        self._sweep_at = max(2 * len(self.sessions), _LEAST_SWEEP)


def _awaited(session_id: str) -> str:
    return f"session {session_id}"


def _carried(request: Any) -> Any:
    """What the request carries for the plugin, under either name; None: nothing."""
    sampling = getattr(request, "sampling_params", None)
    extra = getattr(sampling, "extra_args", None)
    if extra and XARG in extra:
        return extra[XARG]
    transfer = getattr(request, "kv_transfer_params", None)
    return transfer.get(XARG) if isinstance(transfer, dict) else None


def _num_cached(blocks: Sequence[Any]) -> int:
    """How many at the front have a hash: what can be hit, and is ranked when it is free."""
    # A chain is hashed from the front; from the back there are at most a few blocks without a hash.
    end = len(blocks)
    while end and blocks[end - 1].block_hash is None:
        end -= 1
    return end
