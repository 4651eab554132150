"""The books of the cache: what could be a hit, what the mirror says will be one, and what was one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.prompt import FlatPrompt
from agentserve.sessions import Relation, Session
from prefix_cache.blocks import BlockHash
from prefix_cache.hits import HitTotals, TurnHits, account
from prefix_cache.mirror import Mirror
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


class CacheBooks:
    """Estimates before, books after. `block_size` None: the engine does not say; then there are no block figures."""

    def __init__(self, *, block_size: int | None, ceiling_tokens: int, mirror: Mirror | None) -> None:
        self.block_size = block_size
        self.mirror = mirror
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
        return Estimate(num_tokens, ceiling, None if self.mirror.is_suspect else predicted, hashes, resident, removed, volatile, departures)

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
        self, session: Session, relation: Relation, estimate: Estimate, num_cached_tokens: int | None, computed: FlatPrompt
    ) -> TurnHits:
        """Account for a request that the engine has answered; `computed` holds its prompt and what was generated."""
        hits = self._account(estimate, relation, num_cached_tokens)
        if self.mirror is not None and num_cached_tokens is not None:
            size = self.mirror.block_size
            num_blocks = max(0, len(computed.ids) - 1) // size
            # Also while suspect: a run of right guesses is what ends the suspicion.
            self.mirror.learn(computed.chain.hashes, num_cached_tokens, estimate.num_resident_blocks * size, num_blocks=num_blocks)
        session.totals.add(hits)
        self.totals.add(hits)
        return hits

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
        )

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
