"""The chunks that one tier holds, by the hash of their last block, on every rank.

Equal key, equal tokens from the start of the prompt: a block hash is chained, so a chunk's last block names all that is before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefix_cache.blocks import BlockHash


def chunk_keys(hashes: Sequence[BlockHash], blocks_per_chunk: int, num_blocks: int | None = None) -> Sequence[BlockHash]:
    """The keys of the whole chunks in the first `num_blocks` (None: all) of a prompt's block `hashes`."""
    return hashes[blocks_per_chunk - 1 : num_blocks : blocks_per_chunk]


@dataclass(frozen=True, slots=True)
class Watermark:
    """When a full tier evicts by itself, as LMCache's memory does: at `trigger` of its capacity the `ratio` least recently used go."""

    capacity_chunks: int
    trigger: float = 0.8
    ratio: float = 0.2


class ChunkSet:
    """Which rank holds which chunk, least recently used first. Bounded by `max_chunks`.

    With a `watermark` it also forgets as the tier itself would: for tiers that do not announce what they evict.
    """

    __slots__ = ("_all_ranks", "_held", "_max_chunks", "_num_complete", "_watermark")

    def __init__(self, *, num_ranks: int = 1, max_chunks: int = 1_000_000, watermark: Watermark | None = None) -> None:
        assert num_ranks > 0
        self._all_ranks = (1 << num_ranks) - 1
        self._max_chunks = max_chunks
        self._watermark = watermark
        self._held: dict[BlockHash, int] = {}
        """Ranks as bits."""
        self._num_complete = 0

    @property
    def num_chunks(self) -> int:
        """Chunks that every rank holds."""
        return self._num_complete

    def __contains__(self, key: BlockHash) -> bool:
        return self._held.get(key) == self._all_ranks

    def store(self, keys: Sequence[BlockHash], rank: int | None = None) -> None:
        """`rank` (None: every rank) holds these now, in the order of the prompt: last stored, last to go; of one prompt the tail first."""
        ranks = self._all_ranks if rank is None else 1 << rank
        for key in reversed(keys):
            self._put(key, self._held.pop(key, 0), ranks)
        self._evict()

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """These were used."""
        for key in reversed(keys):
            if key in self._held:
                self._held[key] = self._held.pop(key)

    def remove(self, keys: Iterable[BlockHash], rank: int | None = None) -> None:
        """`rank` does not hold these any more. None: some rank does not, which is as good as all."""
        ranks = self._all_ranks if rank is None else 1 << rank
        for key in keys:
            held = self._held.pop(key, 0)
            self._num_complete -= held == self._all_ranks
            if held & ~ranks:
                self._held[key] = held & ~ranks

    def clear(self) -> None:
        """Nothing is held."""
        self._held.clear()
        self._num_complete = 0

    def match(self, keys: Sequence[BlockHash], start: int = 0) -> int:
        """How many of `keys` every rank holds, from the first on; those before `start` are taken as held."""
        for index in range(start, len(keys)):
            if keys[index] not in self:
                return index
        return max(start, len(keys))

    def _put(self, key: BlockHash, before: int, ranks: int) -> None:
        self._held[key] = before | ranks
        self._num_complete += (before | ranks == self._all_ranks) - (before == self._all_ranks)

    def _evict(self) -> None:
        mark = self._watermark
        if mark is not None and len(self._held) >= mark.trigger * mark.capacity_chunks:
            self._drop(max(1, int(len(self._held) * mark.ratio)))
        self._drop(len(self._held) - self._max_chunks)

    def _drop(self, num_chunks: int) -> None:
        for _ in range(num_chunks):
            key = next(iter(self._held))
            self._num_complete -= self._held.pop(key) == self._all_ranks
