"""Blocks that running requests are about to compute: what a twin, sent meanwhile, computes once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefix_cache.blocks import BlockHash


@dataclass(slots=True)
class Computing:
    """The blocks that one request computes, until its prefill is done."""

    hashes: list[BlockHash] = field(default_factory=list)


class InFlight:
    """Counts for each block the requests that compute it now. Salted hashes differ, so nothing crosses a salt."""

    def __init__(self) -> None:
        self._num_requests: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._num_requests)

    def begin(self, hashes: Sequence[BlockHash], start: int, stop: int) -> Computing:
        """A request that computes blocks `start` up to `stop` of `hashes` goes to the engine. Needs its `end`, whatever becomes of it."""
        computing = Computing(list(hashes[start:stop]))
        for block_hash in computing.hashes:
            self._num_requests[block_hash] = self._num_requests.get(block_hash, 0) + 1
        return computing

    def match(self, hashes: Sequence[BlockHash], start: int, stop: int) -> int:
        """How many blocks of `hashes`, from the first on, are there (the first `start` are) or are being computed."""
        for index in range(start, stop):
            if hashes[index] not in self._num_requests:
                return index
        return max(start, stop)

    def end(self, computing: Computing) -> None:
        """The request has computed its blocks, or never will. Safe to call twice."""
        for block_hash in computing.hashes:
            left = self._num_requests[block_hash] - 1
            if left:
                self._num_requests[block_hash] = left
            else:
                del self._num_requests[block_hash]
        computing.hashes = []
