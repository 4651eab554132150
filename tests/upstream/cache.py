"""The upstream's KV model: a block pool with prefix caching by vLLM's rules, and its events.

Kept rules: hits are whole blocks from the start; the last prompt token never hits; the last generated token's KV is never computed;
a block is announced when it is scheduled; a free block keeps its content until it is taken, oldest first, blocks without content
before all, a request's tail before its head. A request starts when its whole prompt and output fit; it is preempted only where a script
says so.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class KvModel:
    """Size and speed of the modelled engine. `num_blocks` are usable blocks (the pool that vLLM reports has one null block more)."""

    block_size: int = 16
    num_blocks: int = 640
    prefill_tokens_per_second: float = float("inf")
    decode_tokens_per_second: float = float("inf")
    max_num_batched_tokens: int = 2048
    """Prompt tokens of one step; requests take turns in steps of this size."""
    hash_algorithm: str = "sha256"
    """As /metrics tells it."""
    hash_seed: str | None = None
    """Changes the name of every block, as PYTHONHASHSEED does; told nowhere."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Field names and order are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class NoRoom(ValueError):
    """The request needs more blocks than the pool has at all."""


@dataclass(slots=True)
class Block:
    number: int
    num_users: int = 0
    hash: int | None = None


@dataclass(slots=True)
class Allocation:
    """The blocks of one running request. `ids` are its prompt and what was generated so far."""

    ids: list[int]
    blocks: list[Block]
    hashes: list[int]
    num_cached_tokens: int
    salt: str | None
    session_id: str | None
    num_stored_blocks: int = 0


def block_hash(parent: int | None, ids: Sequence[int], salt: str | None, seed: str | None = None) -> int:
    """64 bits over the block and all before it. Which hash is the engine's own affair: consumers take it as it comes."""
    key = repr((parent, tuple(ids), salt, *([] if seed is None else [seed]))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


@dataclass(slots=True)
class BlockCache:
    """The block pool. Changes are announced through `take_events`."""

    model: KvModel
    _free: OrderedDict[int, Block] = field(init=False)
    _by_hash: dict[int, dict[int, Block]] = field(default_factory=dict, init=False)
    _events: list[KvEvent] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._free = OrderedDict((number, Block(number)) for number in range(1, self.model.num_blocks + 1))

    @property
    def usage(self) -> float:
        """Share of blocks that running requests hold; cached free blocks count as free, as in vLLM."""
        return 1 - len(self._free) / self.model.num_blocks

    @property
    def num_resident_blocks(self) -> int:
        """Blocks with content, running or free."""
        return sum(len(copies) for copies in self._by_hash.values())

    def num_cached_tokens(self, ids: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of the prompt would hit now. Changes nothing."""
        return len(self._hits(self._hashes(ids, salt, None, len(ids) - 1))) * self.model.block_size

    def allocate(self, ids: Sequence[int], num_output_tokens: int, salt: str | None, session_id: str | None) -> Allocation | None:
        """Take the blocks for prompt and output; None while running requests hold too many.

        Raises:
            NoRoom: the request is larger than the pool.
        """
        num_needed = -(-(len(ids) + num_output_tokens) // self.model.block_size)
        if num_needed > self.model.num_blocks:
            raise NoRoom(f"{len(ids)} + {num_output_tokens} tokens need {num_needed} blocks of {self.model.num_blocks}")
        hashes = self._hashes(ids, salt, None, len(ids))
        hits = self._hits(hashes[: (len(ids) - 1) // self.model.block_size])
        num_free_hits = sum(block.num_users == 0 for block in hits)
        if num_needed - len(hits) > len(self._free) - num_free_hits:
            return None
        for block in hits:
            self._free.pop(block.number, None)
            block.num_users += 1
        blocks = hits + [self._take() for _ in range(num_needed - len(hits))]
        num_cached = len(hits) * self.model.block_size
        return Allocation(list(ids), blocks, hashes, num_cached, salt, session_id, num_stored_blocks=len(hits))

    def store(self, allocation: Allocation, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` of the request are scheduled: its full blocks among them become hits for others."""
        size, start, end = self.model.block_size, allocation.num_stored_blocks, num_computed_tokens // self.model.block_size
        if end <= start:
            return
        parent = allocation.hashes[start - 1] if start else None
        for block, key in zip(allocation.blocks[start:end], allocation.hashes[start:end], strict=True):
            block.hash = key
            self._by_hash.setdefault(key, {})[block.number] = block
        extra: list[tuple[str, ...] | None] | None = None
        if allocation.salt and start == 0:
            extra = [(allocation.salt,), *[None] * (end - 1)]
        stored = allocation.hashes[start:end]
        tokens = allocation.ids[start * size : end * size]
        self._events.append(BlockStored(stored, parent, tokens, size, None, "GPU", None, extra, 0, allocation.session_id))
        allocation.num_stored_blocks = end

    def append(self, allocation: Allocation, ids: Sequence[int]) -> None:
        """`ids` were generated; all but the last of the request have KV now."""
        allocation.ids.extend(ids)
        full = len(allocation.ids) // self.model.block_size
        if full > len(allocation.hashes):
            parent = allocation.hashes[-1] if allocation.hashes else None
            start = len(allocation.hashes) * self.model.block_size
            allocation.hashes += self._hashes(allocation.ids[start:], None if parent else allocation.salt, parent, len(allocation.ids))
        self.store(allocation, len(allocation.ids) - 1)

    def free(self, allocation: Allocation) -> None:
        """The request ended: its blocks may be taken, the tail first."""
        for block in reversed(allocation.blocks):
            block.num_users -= 1
            if block.num_users == 0:
                self._free[block.number] = block
                if block.hash is None:
                    self._free.move_to_end(block.number, last=False)
        allocation.blocks = []

    def drop(self, allocation: Allocation) -> None:
        """Free the request's blocks and lose what they hold, as when others need them at once."""
        blocks = list(allocation.blocks)
        self.free(allocation)
        for block in blocks:
            if block.num_users == 0 and block.hash is not None:
                self._lose(block)
                self._free.move_to_end(block.number, last=False)

    def clear(self) -> None:
        """Forget all content, as `reset_prefix_cache` does."""
        for copies in self._by_hash.values():
            for block in copies.values():
                block.hash = None
        self._by_hash.clear()
        self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KvEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _hashes(self, ids: Sequence[int], salt: str | None, parent: int | None, limit: int) -> list[int]:
        size, hashes = self.model.block_size, []
        for start in range(0, min(len(ids), limit) // size * size, size):
            parent = block_hash(parent, ids[start : start + size], salt if start == 0 else None, self.model.hash_seed)
            hashes.append(parent)
        return hashes

    def _hits(self, hashes: Sequence[int]) -> list[Block]:
        hits = []
        for key in hashes:
            copies = self._by_hash.get(key)
            if not copies:
                break
            hits.append(next(iter(copies.values())))
        return hits

    def _take(self) -> Block:
        _, block = self._free.popitem(last=False)
        if block.hash is not None:
            self._lose(block)
        block.num_users = 1
        return block

    def _lose(self, block: Block) -> None:
        assert block.hash is not None
        copies = self._by_hash[block.hash]
        del copies[block.number]
        if not copies:
            del self._by_hash[block.hash]
        self._events.append(BlockRemoved([block.hash], "GPU", 0))
        block.hash = None
