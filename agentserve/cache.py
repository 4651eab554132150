"""The books of the cache: what could be a hit, what the mirror says will be one, and what was one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.prompt import FlatPrompt
from agentserve.sessions import Relation, Session
from prefix_cache.blocks import BlockHash
from prefix_cache.hits import HitTotals, TurnHits, account
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.offload import ExternalHit, Offload
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
    external: ExternalHit | None = None
    """What offload tiers will add to the leading blocks that the mirror holds. None: no tier is followed."""


class CacheBooks:
    """Estimates before, books after. `block_size` None: the engine does not say; then there are no block figures.

    `offload` needs a mirror: what a tier adds is counted beyond what the GPU holds.
    """

    def __init__(self, *, block_size: int | None, ceiling_tokens: int, mirror: Mirror | None, offload: Offload | None = None) -> None:
        self.block_size = block_size
        self.mirror = mirror
        self.offload = offload if mirror is not None else None
        self.tree = PrefixTree(ceiling_tokens)
        self.totals = HitTotals()

    def estimate(self, prompt: FlatPrompt, twin_end: int = 0) -> Estimate:
        """Ceiling and prediction of the prompt as it stands. Costs what is new since the prompt was last looked at.

        `twin_end`: how far its history was known under a head that differs only in volatile content, tokens.
        """
        prompt.position = self.tree.match(prompt.ids, prompt.position or self.tree.root(prompt.salt))
        num_tokens = len(prompt.ids)
        ceiling = min(prompt.position.num_tokens, num_tokens)
        hashes = prompt.chain.hashes
        volatile = max(0, twin_end - ceiling)
        if self.mirror is None:
            return Estimate(num_tokens, ceiling, None, hashes, volatile_tokens=volatile)
        departures = self.mirror.departures
        start = prompt.num_resident_blocks if prompt.resident_as_of == departures else 0
        predicted = self.mirror.predict(hashes, num_tokens, min(start, len(hashes)))
        prompt.resident_as_of, prompt.num_resident_blocks = departures, predicted // self.mirror.block_size
        resident = predicted // self.mirror.block_size
        removed = tuple(map(self.mirror.was_removed, hashes[resident : ceiling // self.mirror.block_size]))
        known = None if self.mirror.is_suspect else predicted
        external = self.offload.predict(hashes, num_tokens, predicted) if self.offload is not None else None
        return Estimate(num_tokens, ceiling, known, hashes, resident, removed, volatile, departures, external)

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
        self, session: Session, relation: Relation, estimate: Estimate, num_cached_tokens: int | None, computed: FlatPrompt
    ) -> TurnHits:
        """Account for a request that the engine has answered; `computed` holds its prompt and what was generated."""
        hits = self._account(estimate, relation, num_cached_tokens)
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
        # Also while suspect: a run of right guesses is what ends the suspicion.
        mirror.learn(hashes, num_cached_tokens - beyond, guess, num_blocks=num_computed // mirror.block_size)
        if self.offload is not None and estimate.external is not None:
            self.offload.learn(estimate.hashes, estimate.num_prompt_tokens, num_cached_tokens, estimate.external)
            self.offload.computed(hashes, num_computed, salted=bool(computed.salt))

    def _external(self, estimate: Estimate, num_cached_tokens: int | None) -> int | None:
        """Of the hit, what the GPU did not hold: the engine reports the sum only. None where that cannot be told."""
        if estimate.external is None or estimate.predicted is None or num_cached_tokens is None:
            return None
        return max(0, num_cached_tokens - estimate.predicted)

    def preview(self, estimate: Estimate, relation: Relation) -> TurnHits:
        """The account before the engine has answered: `actual` and `missed` unknown."""
        return self._account(estimate, relation, None)

    def _account(self, estimate: Estimate, relation: Relation, num_cached_tokens: int | None) -> TurnHits:
        shared = relation.shared_tokens
        if estimate.volatile_tokens:  # what is lost to these is not lost to an edit
            shared = max(shared, estimate.ceiling + estimate.volatile_tokens)
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
            external_predicted=None if estimate.external is None or estimate.predicted is None else estimate.external.num_tokens,
            external=self._external(estimate, num_cached_tokens),
            offload_missing=self._not_returned(estimate, num_cached_tokens),
        )

    def _not_returned(self, estimate: Estimate, num_cached_tokens: int | None) -> int | None:
        """Tokens behind the hit that the tiers had been given."""
        if self.mirror is None or estimate.external is None or num_cached_tokens is None:
            return None
        return estimate.num_resident_blocks * self.mirror.block_size + estimate.external.num_given_tokens - num_cached_tokens

    def _evicted(self, estimate: Estimate, num_cached_tokens: int | None) -> int | None:
        """Tokens between hit and ceiling that are gone because the first missing block was seen to leave.

        What lies behind that block may still be resident, but without it cannot be reached.
        """
        if self.mirror is None or num_cached_tokens is None:
            return None
        first = num_cached_tokens // self.mirror.block_size
        behind = first - estimate.num_resident_blocks
        if behind < 0:
            gone = self.mirror.removed_since(estimate.hashes[first], estimate.departures)
        else:
            gone = behind < len(estimate.removed) and estimate.removed[behind]
        return estimate.ceiling if gone else 0
