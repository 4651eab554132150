"""The latest removals of blocks that an engine announced: what left, when, and whether it has come back. Bounded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from prefix_cache.blocks import BlockHash

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MIN_REMEMBERED = 4096


class Removals:
    """Times are counts of departures, which only rise. `max_blocks`: of the cache that they leave."""

    __slots__ = ("_limit", "_marks")

    def __init__(self, max_blocks: int) -> None:
        self._limit = min(max_blocks, max(_MIN_REMEMBERED, max_blocks // 4))
        self._marks: dict[BlockHash, int] = {}
        """The newest last: twice the time, and 1 more for a block that has come back."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether it ever left, as far back as this goes."""
        return block_hash in self._marks

    def note(self, gone: Sequence[BlockHash], at: int) -> None:
        """These leave now. Needs a `trim` when all have left."""
        marks = self._marks
        if not marks.keys().isdisjoint(gone):
            for block_hash in gone:
                marks.pop(block_hash, None)  # the newest stand last
        marks.update(dict.fromkeys(gone, 2 * at))

    def note_all(self, gone: Iterable[BlockHash], at: int) -> None:
        """All that there is leaves now."""
        self._marks.update(dict.fromkeys(gone, 2 * at))

    def note_back(self, hashes: Sequence[BlockHash]) -> None:
        """These are back, if they ever left."""
        if not self._marks.keys().isdisjoint(hashes):
            for block_hash in hashes:
                if block_hash in self._marks:
                    self._marks[block_hash] |= 1

    def clear(self) -> None:
        self._marks.clear()

    def trim(self) -> None:
        """Forget the oldest beyond the bound."""
        trim(self._marks, self._limit)

    def is_away(self, block_hash: BlockHash) -> bool:
        """Whether it left and is not back."""
        mark = self._marks.get(block_hash)
        return mark is not None and not mark & 1

    def since(self, block_hash: BlockHash, at: int) -> bool:
        """Whether it left after `at`, also if it is back."""
        return self._marks.get(block_hash, -1) >> 1 > at


def trim(known: dict[_Key, _Value], limit: int) -> None:
    """Drop the oldest entries beyond `limit`; of long tables many at once, as the way to the oldest leads over those dropped before."""
    if len(known) > limit + limit // 8:
        for key in list(itertools.islice(known, len(known) - limit)):
            del known[key]
