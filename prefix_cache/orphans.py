"""Stored blocks whose parent no event has told of, and the ends of hits below which they may belong. Bounded."""

from __future__ import annotations

from collections.abc import Container, Sequence

from prefix_cache.blocks import BlockHash
from prefix_cache.event_names import block_hashes, block_name
from prefix_cache.events import BlockStored
from prefix_cache.removals import trim

_MAX_PARENTS = 1024
_MAX_SIBLINGS = 16
_MAX_ANCHORS = 64


class Orphans:
    """Events by the name of the parent that is missing."""

    __slots__ = ("_anchors", "_events")

    def __init__(self) -> None:
        self._events: dict[int, list[BlockStored]] = {}
        self._anchors: dict[BlockHash, None] = {}
        """Ends of hits that usage confirmed."""

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def parents(self) -> list[int]:
        return list(self._events)

    def clear(self) -> None:
        self._events.clear()
        self._anchors.clear()

    def add(self, event: BlockStored) -> None:
        """It has a parent, which is not known."""
        assert event.parent_block_hash is not None
        siblings = self._events.setdefault(block_name(event.parent_block_hash), [])
        siblings.append(event)
        del siblings[:-_MAX_SIBLINGS]
        trim(self._events, _MAX_PARENTS)

    def first_of(self, parent: int) -> BlockStored | None:
        """The oldest that waits below `parent`."""
        events = self._events.get(parent)
        return events[0] if events else None

    def take(self, parent: int) -> Sequence[BlockStored]:
        """All that wait below `parent`, no more."""
        return self._events.pop(parent, ())

    def confirm(self, last_hit: BlockHash) -> None:
        """Usage says that a hit ended here: an unknown parent may be this block."""
        self._anchors[last_hit] = None
        trim(self._anchors, _MAX_ANCHORS)

    def anchor_of(self, event: BlockStored, learned: Container[BlockHash]) -> BlockHash | None:
        """The confirmed end that `event` continues: the one under which its first block becomes a block that is `learned` too."""
        for anchor in self._anchors:
            first = block_hashes(event, anchor)[:1]
            if first and first[0] in learned:
                return anchor
        return None
