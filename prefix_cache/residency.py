"""The blocks of one KV group that are resident in one tier, under two names: the engine's hash and our own `BlockHash`.

Ours is computed from the event's parent and token ids, so a prompt's blocks can be looked up without knowing how the engine hashes.
Everything is flat dicts and sets, moved in batches: most store events are all new blocks, most removals are of known ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import xxhash

from prefix_cache.blocks import TOKEN_BYTES, BlockHash, chain_hashes, root_hash
from prefix_cache.events import BlockStored, EngineHash

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_UNRESOLVED = b""
"""Stands for our hash where the chain up to the root is not known (yet)."""
_MAX_ORPHANS = 1024
_MAX_SIBLINGS = 16
_MAX_ANCHORS = 64


class Residency:
    """A state machine without a clock; every structure is bounded. `max_blocks` bounds what the engine announces, for when it errs."""

    __slots__ = (
        "_anchors",
        "_copies",
        "_learned",
        "_limit",
        "_orphans",
        "_removed",
        "_resident",
        "_resolved",
        "num_departures",
        "num_dropped_blocks",
    )

    def __init__(self, max_blocks: int) -> None:
        self._limit = max_blocks
        self._resident: dict[EngineHash, BlockHash] = {}
        self._resolved: set[BlockHash] = set()
        self._copies: dict[EngineHash, int] = {}
        """Copies beyond the first."""
        self._learned: dict[BlockHash, None] = {}
        """Known from usage, not from events: we cannot tell when these leave."""
        self._anchors: dict[BlockHash, None] = {}
        """Ends of hits that usage confirmed: where an unknown parent may belong."""
        self._orphans: dict[EngineHash, list[BlockStored]] = {}
        """Stored blocks by the parent that is missing."""
        self._removed: dict[BlockHash, int] = {}
        """Latest removals, the newest last, by `num_departures` then; a block stays in when it is stored again."""
        self.num_dropped_blocks = 0
        self.num_departures = 0
        """Times that blocks may have left; as long as it stands still, what matched once still does."""

    @property
    def num_blocks(self) -> int:
        """Different resident blocks that the engine announced, with those that cannot be matched."""
        return len(self._resident)

    @property
    def num_unresolved_blocks(self) -> int:
        """Resident blocks whose prefix is not known; they never match."""
        return len(self._resident) - len(self._resolved)

    def store(self, event: BlockStored) -> None:
        """Take in the blocks of one event."""
        hashes = event.block_hashes
        parent = self._parent_hash(event)
        if parent is None:
            self._enter(hashes, [_UNRESOLVED] * len(hashes))
            self._adopt_later(event)
            return
        ours = _block_hashes(event, parent)
        if len(ours) != len(hashes):
            ours = [_UNRESOLVED] * len(hashes)
        self._enter(hashes, ours)
        if self._orphans and ours[:1] != [_UNRESOLVED]:
            self._resolve_children(list(zip(hashes, ours, strict=True)))

    def remove(self, hashes: Sequence[EngineHash]) -> None:
        """One copy of each leaves; blocks that were never announced are ignored."""
        self.num_departures += 1
        for name in hashes:
            if name in self._copies:
                self._copies[name] -= 1
                if not self._copies[name]:
                    del self._copies[name]
                continue
            block_hash = self._resident.pop(name, _UNRESOLVED)
            if block_hash:
                self._resolved.discard(block_hash)
                self._learned.pop(block_hash, None)
                self._removed.pop(block_hash, None)
                self._removed[block_hash] = self.num_departures
        _trim(self._removed, self._limit)

    def clear(self, *, announced: bool) -> None:
        """Forget all blocks. `announced`: the engine said that they are gone, so they count as removed; else nothing is known of them."""
        self.num_departures += 1
        if announced:
            self._removed.update(dict.fromkeys(self._resolved, self.num_departures))
            self._removed.update(dict.fromkeys(self._learned, self.num_departures))
            _trim(self._removed, self._limit)
        else:
            self._removed.clear()
        for known in (self._resident, self._resolved, self._copies, self._learned, self._anchors, self._orphans):
            known.clear()

    def match(self, hashes: Sequence[BlockHash], start: int = 0) -> int:
        """How many of `hashes` are resident from the first on, in blocks; those before `start` are taken as resident."""
        resolved, learned = self._resolved, self._learned
        for index in range(start, len(hashes)):
            if hashes[index] not in resolved and hashes[index] not in learned:
                return index
        return max(start, len(hashes))

    def was_removed(self, block_hash: BlockHash) -> bool:
        """Whether it was resident, is not now, and the engine announced that."""
        return block_hash in self._removed and block_hash not in self._resolved

    def removed_since(self, block_hash: BlockHash, num_departures: int) -> bool:
        """Whether its removal was announced after there had been `num_departures`, also if it has been stored again."""
        return self._removed.get(block_hash, -1) > num_departures

    def num_returned_since(self, hashes: Sequence[BlockHash], num_departures: int) -> int:
        """How many of `hashes` left after there had been `num_departures`, and are back."""
        removed, resolved = self._removed, self._resolved
        return sum(removed.get(block_hash, -1) > num_departures and block_hash in resolved for block_hash in hashes)

    def contradicts(self, block_hash: BlockHash) -> bool:
        """Whether a miss of this block proves us wrong: announced as resident, and never as removed."""
        return block_hash in self._resolved and block_hash not in self._removed

    def learn(self, hashes: Sequence[BlockHash], last_hit: BlockHash | None) -> None:
        """A finished request computed or reused `hashes`; `last_hit` was the last block that it reused."""
        for block_hash in hashes:
            if block_hash not in self._resolved and block_hash not in self._removed:
                self._learned[block_hash] = None
        _trim(self._learned, self._limit)
        if last_hit is not None:
            self._anchors[last_hit] = None
            _trim(self._anchors, _MAX_ANCHORS)
        for parent in list(self._orphans):
            event = self._orphans[parent][0]
            anchor = self._find_anchor(event)
            if anchor is not None:
                self._enter_parent(parent, anchor)

    def _parent_hash(self, event: BlockStored) -> BlockHash | None:
        if event.parent_block_hash is None:
            return root_hash(_salt(event), (event.lora_name or "").encode())
        known = self._resident.get(event.parent_block_hash)
        if known:
            return known
        anchor = self._find_anchor(event)
        if anchor is not None:
            self._enter_parent(event.parent_block_hash, anchor)
        return anchor

    def _find_anchor(self, event: BlockStored) -> BlockHash | None:
        """The learned block that `event` continues: the one under which its first block becomes a learned block as well."""
        for anchor in self._anchors:
            first = _block_hashes(event, anchor)[:1]
            if first and first[0] in self._learned:
                return anchor
        return None

    def _enter_parent(self, name: EngineHash, block_hash: BlockHash) -> None:
        self._resident.pop(name, None)
        self._enter([name], [block_hash])
        self._resolve_children([(name, block_hash)])

    def _enter(self, names: Sequence[EngineHash], ours: Sequence[BlockHash]) -> None:
        resident = self._resident
        if resident.keys().isdisjoint(names) and len(set(names)) == len(names):
            resident.update(zip(names, ours, strict=True))
        else:
            for name, block_hash in zip(names, ours, strict=True):
                if name in resident:
                    self._copies[name] = self._copies.get(name, 0) + 1
                if block_hash or name not in resident:
                    resident[name] = block_hash
        self._resolved.update(ours)
        self._resolved.discard(_UNRESOLVED)
        if not self._learned.keys().isdisjoint(ours):
            for block_hash in ours:
                self._learned.pop(block_hash, None)
        while len(resident) > self._limit:
            oldest = next(iter(resident))
            self._resolved.discard(resident.pop(oldest))
            self._copies.pop(oldest, None)
            self.num_dropped_blocks += 1
            self.num_departures += 1

    def _adopt_later(self, event: BlockStored) -> None:
        assert event.parent_block_hash is not None
        siblings = self._orphans.setdefault(event.parent_block_hash, [])
        siblings.append(event)
        del siblings[:-_MAX_SIBLINGS]
        _trim(self._orphans, _MAX_ORPHANS)

    def _resolve_children(self, parents: list[tuple[EngineHash, BlockHash]]) -> None:
        """Resolve the orphans below `parents`, and theirs."""
        while parents:
            parent_name, parent = parents.pop()
            for event in self._orphans.pop(parent_name, ()):
                children = list(zip(event.block_hashes, _block_hashes(event, parent), strict=False))
                for name, block_hash in children:
                    if self._resident.get(name) == _UNRESOLVED:
                        self._resident[name] = block_hash
                        self._resolved.add(block_hash)
                        self._learned.pop(block_hash, None)
                parents += children


def _block_hashes(event: BlockStored, parent: BlockHash) -> list[BlockHash]:
    """Our hashes of the event's blocks below `parent`. What else the engine hashed (images, embeddings) is mixed in and so isolates."""
    token_bytes = array("I", event.token_ids).tobytes()
    keys = [_other_keys(event, index) for index in range(len(event.extra_keys or ()))]
    if not any(keys):
        return chain_hashes(parent, token_bytes, event.block_size)
    step = event.block_size * TOKEN_BYTES
    hashes: list[BlockHash] = []
    for index, others in enumerate(keys[: len(token_bytes) // step]):
        if others:
            parent = xxhash.xxh3_128_digest(parent + msgspec.msgpack.encode(others))
        (parent,) = chain_hashes(parent, token_bytes[index * step : (index + 1) * step], event.block_size)
        hashes.append(parent)
    return hashes


def _salt(event: BlockStored) -> bytes:
    """The cache salt: the only text, besides the adapter's name, among the keys of a prompt's first block."""
    texts = [key for key in _without_adapter(event, 0) if isinstance(key, str)]
    return texts[0].encode() if texts else b""


def _other_keys(event: BlockStored, index: int) -> list[object]:
    """Extra keys of one block that the chain's root does not carry already."""
    keys = _without_adapter(event, index)
    return [key for key in keys if not isinstance(key, str)] if index == 0 and event.parent_block_hash is None else keys


def _without_adapter(event: BlockStored, index: int) -> list[object]:
    keys: list[object] = list((event.extra_keys[index] if event.extra_keys else None) or ())
    return keys[1:] if event.lora_name and keys[:1] == [event.lora_name] else keys


def _trim(known: dict[_Key, _Value], limit: int) -> None:
    """Drop the oldest entries beyond `limit`."""
    while len(known) > limit:
        del known[next(iter(known))]
