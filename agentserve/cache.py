"""The books of the cache: what could be a hit, what the mirror says will be one, and what was one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentserve.prompt import FlatPrompt
from agentserve.sessions import Relation, Session
from prefix_cache.blocks import BlockHash, root_hash
from prefix_cache.demand import Demand, Taker
from prefix_cache.hits import NOWHERE, Elsewhere, HitTotals, TurnHits, account
from prefix_cache.in_flight import Computing, InFlight
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.external import ExternalHit, ExternalTiers
from prefix_cache.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a prompt before it runs, in tokens. `predicted` None: no mirror, or it is not in step."""

    num_prompt_tokens: int
    ceiling: int
    predicted: int | None
    hashes: Sequence[BlockHash]
    """Of the prompt's whole blocks; may grow behind those."""
    num_resident_blocks: int = 0
    """Leading blocks that the mirror holds, in step or not."""
    removed: Sequence[bool] = ()
    """Of the blocks behind those, up to the ceiling: whether the mirror saw them leave."""
    volatile_tokens: int = 0
    """Behind the ceiling: would have been known but for a difference that the canonicaliser was told to pass."""
    departures: tuple[int, ...] = ()
    """The mirror's count of blocks that left, when this was estimated."""
    elsewhere: Elsewhere = NOWHERE
    """`in_flight` is known only when the request is sent, see `CacheBooks.send`."""

    external: ExternalHit | None = None
    """What offload tiers will add to the leading blocks that the mirror holds. None: no tier is followed."""
    block_size: int = 1
    """Of `hashes`, tokens."""

    @property
    def num_uncached_tokens(self) -> int:
        """What the engine has to compute, as predicted."""
        return self.num_prompt_tokens - (self.predicted or 0)

    @property
    def num_whole_blocks(self) -> int:
        """Blocks of the prompt that can be hits."""
        return min(len(self.hashes), max(0, self.num_prompt_tokens - 1) // self.block_size)


@dataclass(slots=True)
class Sent:
    """A request that is at the engine: what it shares with running ones, and whether its blocks stay where they are."""

    in_flight_start: int = 0
    in_flight: int = 0
    """From the one to the other, in tokens of the prompt, running requests were computing it when it was sent."""
    computing: Computing = field(default_factory=Computing)
    settled: tuple[int, ...] | None = None
    """The mirror's departures when it had seen all blocks of the prompt stored; None before."""
    num_looks: int = 0
    taker: Taker | None = None
    """What it takes from a pool whose blocks leave by last use."""


@dataclass(frozen=True, slots=True)
class _Overtaken:
    """What an answer teaches that came before the events which explain it."""

    hashes: Sequence[BlockHash]
    num_cached_tokens: int
    guess: int
    missed: BlockHash
    departures: tuple[int, ...]
    num_batches: int
    """The mirror's, when the answer came."""


_MAX_OVERTAKEN = 64
_NUM_LATE_BATCHES = 16
"""After so many more, a miss that none of them explains counts against the mirror. On a busy host answers are up to a second ahead."""
_MAX_LATE_ANSWERS = 8
"""So many answers that no event has explained yet are no coincidence: the engine's cache is not what its events said."""
_FULL_SHARE = 0.9
"""Of the engine's capacity: below it nothing is evicted."""
_MAX_LOOKS = 16
"""Steps of a generation in which the mirror is asked whether it has seen the prompt's blocks; its events come as fast as the steps."""


class CacheBooks:
    """Estimates before, books after. `block_size` None: the engine does not say; then there are no block figures.

    `offload` needs a mirror: what a tier adds is counted beyond what the GPU holds. `has_exclusive_tier`: whether it is the one of the
    engine's plugin, followed or not. `beside`: the books of another engine of this server.
    `lru_blocks`: usable blocks of an engine that evicts by last use alone; None where it may not, or does not say how many there are.
    """

    def __init__(
        self,
        *,
        block_size: int | None,
        ceiling_tokens: int,
        mirror: Mirror | None,
        offload: ExternalTiers | None = None,
        has_exclusive_tier: bool = False,
        beside: CacheBooks | None = None,
        lru_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.mirror = mirror
        self.offload = offload if mirror is not None else None
        self.has_exclusive_tier = has_exclusive_tier
        # An unlimited cache is one, over however many engines; so are the sums.
        self.tree: PrefixTree = PrefixTree(ceiling_tokens) if beside is None else beside.tree
        self.totals: HitTotals = HitTotals() if beside is None else beside.totals
        self.in_flight = InFlight()
        self.demand = Demand(mirror, lru_blocks) if mirror is not None and lru_blocks is not None else None
        self._overtaken: deque[_Overtaken] = deque(maxlen=_MAX_OVERTAKEN)
        self._unannounced: deque[tuple[BlockHash, int]] = deque(maxlen=_MAX_OVERTAKEN)
        """Last blocks of answers whose events are on their way, with the mirror's number of batches when the answer came."""

    def estimate(self, prompt: FlatPrompt, twin_end: int = 0, offload: int = 0, other_replica: int = 0) -> Estimate:
        """Ceiling and prediction of the prompt as it stands. Costs what is new since the prompt was last looked at.

        `twin_end`: how far its history was known under a head that differs only in volatile content; `offload`: leading tokens that an
        offload tier is expected to bring; `other_replica`: leading tokens that are resident at another engine. All in tokens.
        """
        prompt.position = self.tree.match(prompt.ids, prompt.position or self.tree.root(prompt.salt))
        num_tokens = len(prompt.ids)
        ceiling = min(prompt.position.num_tokens, num_tokens)
        isolated = self.tree.elsewhere(prompt.ids, prompt.salt, beyond=ceiling)
        estimate = Estimate(
            num_tokens,
            ceiling,
            None,
            prompt.chain.hashes,
            volatile_tokens=max(0, twin_end - ceiling),
            elsewhere=Elsewhere(isolation=isolated, offload=offload, other_replica=other_replica),
            block_size=prompt.chain.block_size,
        )
        return estimate if self.mirror is None else self._predicted(self.mirror, estimate, prompt)

    def _predicted(self, mirror: Mirror, estimate: Estimate, prompt: FlatPrompt) -> Estimate:
        """`estimate` with what the mirror says."""
        self._learn_overtaken(mirror)
        hashes, departures = estimate.hashes, mirror.departures
        is_same = prompt.resident_in is mirror and prompt.resident_as_of == departures
        start = prompt.num_resident_blocks if is_same else 0
        predicted = mirror.predict(hashes, estimate.num_prompt_tokens, min(start, len(hashes)))
        resident = predicted // mirror.block_size
        prompt.resident_in, prompt.resident_as_of, prompt.num_resident_blocks = mirror, departures, resident
        if self.demand is not None:
            predicted = self.demand.num_left(hashes, resident) * mirror.block_size
        external = self.offload.predict(hashes, estimate.num_prompt_tokens, predicted) if self.offload is not None else None
        return replace(
            estimate,
            external=external,
            predicted=None if mirror.is_suspect else predicted,
            num_resident_blocks=resident,
            removed=tuple(map(mirror.was_removed, hashes[resident : estimate.ceiling // mirror.block_size])),
            departures=departures,
        )

    def send(self, estimate: Estimate, session: Session | None = None) -> Sent:
        """The request goes to the engine now. Needs its `ended`, whatever becomes of it."""
        size, stop = estimate.block_size, estimate.num_whole_blocks
        known = estimate.num_resident_blocks if self.mirror is not None else estimate.ceiling // size
        start = min(known, stop)
        end = self.in_flight.match(estimate.hashes, start, stop)
        computing = self.in_flight.begin(estimate.hashes, start, stop)
        num_whole = min(len(estimate.hashes), estimate.num_prompt_tokens // size)
        if self.mirror is not None and session is not None:
            first = start if estimate.predicted is None else min(start, estimate.predicted // size)
            self.mirror.sent.add(
                session.id, session.prompt.ids, session.prompt.chain.hashes, first, num_whole, root_hash(session.prompt.salt)
            )
        taker = self.demand.begin(estimate.hashes, num_whole) if self.demand is not None else None
        return Sent(start * size, end * size, computing, taker=taker) if end > start else Sent(computing=computing, taker=taker)

    def prefilled(self, sent: Sent) -> None:
        """The engine has computed the prompt. Safe to call twice."""
        self.in_flight.end(sent.computing)

    def ended(self, sent: Sent) -> None:
        """The request is over, booked or not. Safe to call twice."""
        self.prefilled(sent)
        if self.demand is not None and sent.taker is not None:
            self.demand.end(sent.taker)

    def look(self, sent: Sent, estimate: Estimate) -> None:
        """A step of the generation has come: note when the mirror has seen all of the prompt's blocks stored.

        Events are in order, and the blocks of a running request stay. So a block that leaves after that moment left by a preemption.
        """
        if self.mirror is None or sent.settled is not None or sent.num_looks >= _MAX_LOOKS:
            return
        sent.num_looks += 1
        stop, departures = estimate.num_whole_blocks, self.mirror.departures
        start = min(estimate.num_resident_blocks, stop) if departures == estimate.departures else 0
        if self.mirror.match(estimate.hashes[:stop], start) == stop:
            sent.settled = departures

    def num_resident_tokens(self, prompt: FlatPrompt) -> int | None:
        """Leading tokens of the prompt that the engine holds, as the mirror says; None without one."""
        if self.mirror is None:
            return None
        is_same = prompt.resident_in is self.mirror and prompt.resident_as_of == self.mirror.departures
        return self.mirror.predict(prompt.chain.hashes, len(prompt.ids), prompt.num_resident_blocks if is_same else 0)

    def num_known_blocks(self, estimate: Estimate) -> int:
        """Leading blocks that need not be computed as far as anybody knows: resident, or without a mirror computed before.

        All of the prompt's blocks where the engine does not say how large they are.
        """
        if self.mirror is not None:
            return estimate.num_resident_blocks
        return estimate.ceiling // self.block_size if self.block_size is not None else len(estimate.hashes)

    def computed(self, prompt: FlatPrompt, num_tokens: int) -> None:
        """The engine has computed the first `num_tokens` of the prompt; no more than the last token may be beyond them."""
        ids = prompt.ids
        assert len(ids) - num_tokens in (0, 1)
        last = ids.pop() if num_tokens < len(ids) else None  # a copy of a long prompt would cost more than the whole insert
        try:
            prompt.position = self.tree.insert(ids, prompt.cut_position(num_tokens) or self.tree.root(prompt.salt))
        finally:
            if last is not None:
                ids.append(last)

    def book(
        self, session: Session, relation: Relation, estimate: Estimate, sent: Sent, num_cached_tokens: int | None, computed: FlatPrompt
    ) -> TurnHits:
        """Account for a request that the engine has answered; `computed` holds its prompt and what was generated."""
        if self.demand is not None and sent.taker is not None:
            self.demand.end(sent.taker, computed.chain.hashes, max(0, len(computed.ids) - 1) // self.demand.block_size)
        hits = self._account(estimate, relation, sent, num_cached_tokens)
        if self.mirror is not None and num_cached_tokens is not None:
            self._learn(self.mirror, estimate, num_cached_tokens, computed)
        session.totals.add(hits)
        self.totals.add(hits)
        return hits

    def _learn(self, mirror: Mirror, estimate: Estimate, num_cached_tokens: int, computed: FlatPrompt) -> None:
        hashes, num_computed = computed.chain.hashes, max(0, len(computed.ids) - 1)
        guess = estimate.num_resident_blocks * mirror.block_size
        beyond = max(0, num_cached_tokens - guess) if estimate.external is not None else 0
        if estimate.external is not None and estimate.predicted is None:
            beyond = min(beyond, estimate.external.num_tokens)  # a suspect mirror may also know too little of the GPU
        num_hit_tokens, num_blocks = num_cached_tokens - beyond, num_computed // mirror.block_size
        if estimate.predicted is not None and num_hit_tokens < guess and not self._is_explained(mirror, estimate, num_hit_tokens):
            missed = estimate.hashes[num_hit_tokens // mirror.block_size]
            late = _Overtaken(hashes[:num_blocks], num_hit_tokens, guess, missed, estimate.departures, mirror.num_applied_batches)
            self._overtaken.append(late)
        else:  # also while suspect: a run of right guesses is what ends the suspicion
            mirror.learn(hashes, num_hit_tokens, guess, num_blocks=num_blocks)
        if num_blocks and mirror.is_only_learned(hashes[num_blocks - 1]):
            self._unannounced.append((hashes[num_blocks - 1], mirror.num_applied_batches))
        if self.offload is not None and estimate.external is not None:
            self.offload.learn(estimate.hashes, estimate.num_prompt_tokens, num_cached_tokens, estimate.external)
            self.offload.computed(hashes, num_computed, salted=bool(computed.salt))

    @staticmethod
    def _is_explained(mirror: Mirror, estimate: Estimate, num_hit_tokens: int) -> bool:
        """Whether the first block that was missed is known to have left since it was promised."""
        return mirror.removed_since(estimate.hashes[num_hit_tokens // mirror.block_size], estimate.departures)

    def is_behind(self, capacity_tokens: int) -> bool:
        """Whether events are missing of answers that are complete, while the engine is so full that they may tell of evictions."""
        mirror = self.mirror
        if mirror is None or mirror.num_resident_tokens < _FULL_SHARE * capacity_tokens:
            return False
        self._learn_overtaken(mirror)
        while self._unannounced:
            block_hash, num_batches = self._unannounced[0]
            if mirror.is_only_learned(block_hash) and mirror.num_applied_batches - num_batches < _NUM_LATE_BATCHES:
                return True
            self._unannounced.popleft()
        return bool(self._overtaken)

    def _learn_overtaken(self, mirror: Mirror) -> None:
        """From answers that were ahead of the events, once those are there or must have been."""
        while self._overtaken:
            late = self._overtaken[0]
            is_due = mirror.num_applied_batches - late.num_batches >= _NUM_LATE_BATCHES or len(self._overtaken) > _MAX_LATE_ANSWERS
            if not is_due and not mirror.removed_since(late.missed, late.departures):
                return
            self._overtaken.popleft()
            mirror.learn(late.hashes, late.num_cached_tokens, late.guess)

    def _external_predicted(self, estimate: Estimate) -> int | None:
        if estimate.external is None or not estimate.external.is_known or estimate.predicted is None:
            return None
        return estimate.external.num_tokens

    def _external(self, estimate: Estimate, num_cached_tokens: int | None) -> int | None:
        """Of the hit, what the GPU did not hold: the engine reports the sum only. None where that cannot be told."""
        if estimate.external is None or estimate.predicted is None or num_cached_tokens is None:
            return None
        return max(0, num_cached_tokens - estimate.predicted)

    def preview(self, estimate: Estimate, relation: Relation) -> TurnHits:
        """The account before the engine has answered: `actual` and `missed` unknown."""
        return self._account(estimate, relation, Sent(), None)

    def _account(self, estimate: Estimate, relation: Relation, sent: Sent, num_cached_tokens: int | None) -> TurnHits:
        shared = relation.shared_tokens
        if estimate.volatile_tokens:  # what is lost to these is not lost to an edit
            shared = max(shared, estimate.ceiling + estimate.volatile_tokens)
        recomputed = self._recomputed(estimate, sent, 0, estimate.num_whole_blocks)
        actual = num_cached_tokens or 0
        first = max(0, actual) // estimate.block_size
        return account(
            num_prompt_tokens=estimate.num_prompt_tokens,
            ceiling=estimate.ceiling,
            block_size=self.block_size,
            actual=num_cached_tokens,
            predicted=estimate.predicted,
            history_tokens=relation.history_tokens,
            shared_tokens=shared,
            volatile_tokens=estimate.volatile_tokens,
            confirmed_evicted=self._evicted(estimate, num_cached_tokens),
            in_flight=sent.in_flight - max(actual, sent.in_flight_start),
            elsewhere=self._elsewhere(estimate, sent, num_cached_tokens),
            recomputed_tokens=recomputed,
            external_predicted=self._external_predicted(estimate),
            external=self._external(estimate, num_cached_tokens),
            # What was resident when it was sent, left while it ran and is missing in its count: the count is of the run after that.
            recomputed_in_gap=first < estimate.num_resident_blocks and self._recomputed(estimate, sent, first, first + 1) > 0,
        )

    def _elsewhere(self, estimate: Estimate, sent: Sent, num_cached_tokens: int | None) -> Elsewhere:
        known = replace(estimate.elsewhere, in_flight=sent.in_flight)
        if self.offload is None or estimate.external is None or num_cached_tokens is None:
            return known
        ends = self.offload.ends(estimate.hashes, num_cached_tokens, estimate.external)
        return replace(known, offload=max(known.offload, ends.given), declined=ends.declined)

    def _recomputed(self, estimate: Estimate, sent: Sent, start: int, stop: int) -> int:
        """Tokens of the prompt's blocks `start` up to `stop` that this request computed a second time."""
        if self.mirror is None or sent.settled is None or sent.settled == self.mirror.departures:
            return 0
        return self.mirror.num_returned_since(estimate.hashes[start:stop], sent.settled) * self.mirror.block_size

    def _evicted(self, estimate: Estimate, num_cached_tokens: int | None) -> int | None:
        """Tokens between hit and ceiling that are gone because the first missing block was seen to leave.

        What lies behind that block may still be resident, but without it cannot be reached. A block that a mirror in step still holds has
        left all the same: the announcement is behind the answer.
        """
        if self.mirror is None or num_cached_tokens is None:
            return None
        first = num_cached_tokens // self.mirror.block_size
        behind = first - estimate.num_resident_blocks
        if behind < 0:
            gone = estimate.predicted is not None or self.mirror.removed_since(estimate.hashes[first], estimate.departures)
        else:
            gone = behind < len(estimate.removed) and estimate.removed[behind]
        return estimate.ceiling if gone else 0
