"""What an exclusive tier holds, by the events of the engine's plugin: blocks that have left the GPU, one by one, each by its name alone.

A name is known from the GPU: it comes to the tier in the batch in which it leaves there. A block that leaves the tier in the batch in which
it comes back to the GPU was loaded; one that leaves it later was computed there once more, and passed over here; any other was lost.

The tier loads what comes right behind the GPU's blocks, unless it has lately measured that computing is quicker, which it does not
announce: two requests in a row that get nothing of what is there say so, and two that get something say that it loads again. Near the end
of either one prediction or two are wrong, and so is the load that it makes now and then to measure. Of a block about which no event has
come when the answer is there, what is believed then decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefix_cache.blocks import BlockHash
from prefix_cache.event_names import block_names
from prefix_cache.events import BlockRemoved, BlockStored, EngineHash, EventBatch
from prefix_cache.mirror import Mirror
from prefix_cache.removals import trim
from prefix_cache.tiers import Tier
from prefix_cache.tiers.external import Ends, ExternalHit

_NUM_TO_TURN = 2
"""So many in a row, and the tier is believed to load, or not to."""
_MAX_REMEMBERED = 65_536


class ExclusiveOffload:
    """The tier behind the engine that `mirror` follows, which tells it of batches from now on."""

    def __init__(self, mirror: Mirror, *, medium: str = "CPU", max_blocks: int = 1_000_000) -> None:
        self.num_blocks_unknown = 0
        """Blocks that are there under names that the mirror did not know; they never match."""
        self.is_declining = False
        """Whether it is believed to leave what it has, as computing is quicker."""
        self.has_spoken = False
        """Whether it has announced anything: an engine whose tier announces nothing looks like one whose tier is empty."""
        self._mirror = mirror
        self._medium = medium
        self._max_blocks = max_blocks
        self._hashes: dict[int, BlockHash | None] = {}
        """What is there, by name."""
        self._kept: set[BlockHash] = set()
        self._passed: dict[BlockHash, tuple[int, ...]] = {}
        """What the GPU computed once more while it was there, with the mirror's departures of then."""
        self._lost: dict[BlockHash, tuple[int, ...]] = {}
        """What left and was not back, likewise. Of a block that has left the GPU since neither says anything any more."""
        self._num_against = 0
        """Requests in a row that speak against `is_declining`."""
        mirror.behind = self

    @property
    def block_size(self) -> int:
        return self._mirror.block_size

    @property
    def num_resident_tokens(self) -> int:
        """By its events."""
        return len(self._hashes) * self.block_size

    def apply(self, batch: EventBatch, departed: Mapping[int, BlockHash]) -> None:
        """Take one batch of the engine's KV events after the mirror has. Changes state."""
        back: set[int] = set()
        for event in batch.events:
            if isinstance(event, BlockStored):
                if event.medium == self._medium:
                    self.has_spoken = True
                    self._enter(event.block_hashes, departed)
                elif self._hashes:
                    back |= self._hashes.keys() & set(block_names(event.block_hashes))
            elif isinstance(event, BlockRemoved) and event.medium == self._medium:
                self._leave(block_names(event.block_hashes), back)
        for name in back:
            known = self._hashes.get(name)
            if known is not None:
                self._passed[known] = self._mirror.departures
        trim(self._passed, _MAX_REMEMBERED)

    def forget(self) -> None:
        """Nothing is known to be there. Changes state."""
        self._hashes.clear()
        self._kept.clear()
        self._passed.clear()
        self._lost.clear()
        self.num_blocks_unknown = 0

    def predict(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_gpu_tokens: int) -> ExternalHit:
        """The blocks right behind the first `num_gpu_tokens`, never the prompt's last token."""
        first = num_gpu_tokens // self.block_size
        limit = min(len(hashes), max(0, num_prompt_tokens - 1) // self.block_size)
        end = first
        while end < limit and hashes[end] in self._kept:
            end += 1
        given = end
        while given < limit and (hashes[given] in self._kept or self._is_in(self._lost, hashes[given])):
            given += 1
        here, given_tokens = (end - first) * self.block_size, (given - first) * self.block_size
        if self.is_declining:
            return ExternalHit(0, given_tokens, None, num_gpu_tokens, num_gpu_tokens, here)
        tier = Tier.DRAM if here else None
        return ExternalHit(here, given_tokens, tier, num_gpu_tokens + here, num_gpu_tokens, is_known=self.has_spoken)

    def ends(self, hashes: Sequence[BlockHash], num_cached_tokens: int, expected: ExternalHit) -> Ends:
        """What was on the GPU when it was sent and was missed is not the tier's to account for: it left the GPU, and not to the tier."""
        if num_cached_tokens < expected.num_gpu_tokens:
            return Ends()
        here = expected.num_gpu_tokens + expected.num_tokens + expected.num_declined_tokens
        is_declined = num_cached_tokens < here and self._was_declined(hashes[num_cached_tokens // self.block_size])
        return Ends(expected.num_gpu_tokens + expected.num_given_tokens, here if is_declined else 0)

    def learn(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_cached_tokens: int, expected: ExternalHit) -> None:
        """Whether it loads what it has."""
        declined = self.ends(hashes, num_cached_tokens, expected).declined
        is_loaded = num_cached_tokens > expected.num_gpu_tokens and expected.num_tokens + expected.num_declined_tokens > 0
        if not is_loaded and not declined:
            return  # it had nothing, or has lost it meanwhile
        self._num_against = self._num_against + 1 if is_loaded is self.is_declining else 0
        if self._num_against >= _NUM_TO_TURN:
            self.is_declining = not self.is_declining
            self._num_against = 0

    def computed(self, hashes: Sequence[BlockHash], num_tokens: int, *, salted: bool) -> None:
        """Nothing is given to it by that."""

    def _enter(self, names: Sequence[EngineHash], departed: Mapping[int, BlockHash]) -> None:
        for name in block_names(names):
            known = departed.get(name) or self._mirror.hash_of(name)  # another copy of it may be on the GPU still
            if name in self._hashes:
                continue
            self._hashes[name] = known
            if known is None:
                self.num_blocks_unknown += 1
            else:
                self._kept.add(known)
        while len(self._hashes) > self._max_blocks:
            self._drop(next(iter(self._hashes)))

    def _leave(self, names: Sequence[int], back: set[int]) -> None:
        """`back`: what the GPU has again since this batch."""
        at = self._mirror.departures
        for name in names:
            if name not in self._hashes:
                continue
            known = self._drop(name)
            if known is not None and name not in back and not self._is_in(self._passed, known):
                self._lost[known] = at
        trim(self._lost, _MAX_REMEMBERED)

    def _drop(self, name: int) -> BlockHash | None:
        known = self._hashes.pop(name)
        if known is None:
            self.num_blocks_unknown -= 1
        else:
            self._kept.discard(known)
        return known

    def _was_declined(self, block_hash: BlockHash) -> bool:
        """Of a block that was there and was not loaded: whether that was the tier's choice."""
        return self._is_in(self._passed, block_hash) or (block_hash in self._kept and self.is_declining)

    def _is_in(self, log: Mapping[BlockHash, tuple[int, ...]], block_hash: BlockHash) -> bool:
        at = log.get(block_hash)
        return at is not None and not self._mirror.removed_since(block_hash, at)
