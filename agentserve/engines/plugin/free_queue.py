"""vLLM's queue of free blocks, ordered by a policy: cached blocks go by the forest, all others as they always went.

The linked list of the stock queue holds what no session can hit (its order is kept: unhashed first) and, with `lookahead_blocks`, the
next victims, for connectors that read the list to see what is about to leave (LMCache's lazy offload, vLLM's own).
Whatever fails here, the engine goes on with the stock queue in plain LRU order: see `fall_back`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from agentserve.engines.plugin.forest import Forest, PluginFault

_MOST_AHEAD: Final = 32
_POOL_PER_AHEAD: Final = 256
"""Victims are chosen a few ahead, as a decoding request asks for one block at a time: at most so many, and one in so many of the pool.
They can still be hit while they wait in the list."""


_POPLEFT_N: Final = FreeKVCacheBlockQueue.popleft_n
_PREPEND_N: Final = FreeKVCacheBlockQueue.prepend_n
"""What each step or request calls, without the detour of `super()`."""


class OrderedFreeQueue(FreeKVCacheBlockQueue):  # type: ignore[misc] # vLLM is not always there to be type-checked
    """Takes the place of `pool.free_block_queue` and of what it holds."""

    def __init__(
        self, pool: Any, forest: Forest, on_fault: Callable[[Exception], None], lookahead_blocks: int = 0, *, chooses_ahead: bool = True
    ) -> None:
        # The list is taken over as it is, so its own __init__, which would build a new one, is not called.
        for name, value in vars(pool.free_block_queue).items():
            setattr(self, name, value)
        self.num_listed = self.num_free_blocks
        """Blocks in the linked list."""
        self._pool = pool
        self._forest = forest
        self._node_of = forest.node_of
        self._on_fault = on_fault
        self._lookahead_blocks = lookahead_blocks
        self._batch_blocks = min(_MOST_AHEAD, pool.num_gpu_blocks // _POOL_PER_AHEAD) if chooses_ahead else 0
        self._fault: Exception | None = None
        pool.free_block_queue = self

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """`n` blocks: first those without a hash, then victims."""
        if n == 0:
            return []
        if n <= self.num_listed - self._lookahead_blocks and self._fault is None:
            self.num_listed -= n
            listed: list[Any] = _POPLEFT_N(self, n)
            return listed
        assert self.num_free_blocks >= n
        taken: list[Any] = []
        try:
            if self._fault is not None:
                raise self._fault
            self._choose(n, taken)
        except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
            self.fall_back(error, taken)
            taken += self._pool.free_block_queue.popleft_n(n - len(taken))
        return taken

    def remove(self, block: Any) -> None:
        """A hit takes it out."""
        if block.prev_free_block is None:  # not in the list: the forest's
            self.num_free_blocks -= 1
        else:
            super().remove(block)
            self.num_listed -= 1

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Blocks of one request, deepest first."""
        if not blocks:
            return
        strangers = blocks
        if self._fault is None:
            try:
                strangers = self._forest.release(blocks)
            except Exception as error:  # noqa: BLE001 # the engine is in the middle of freeing: the next allocation falls back
                self._fault = error
                strangers = [block for block in blocks if self._node_of[block.block_id] is None]
        self.num_free_blocks += len(blocks) - len(strangers)
        if strangers:
            self.num_listed += len(strangers)
            super().append_n(strangers)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without a hash."""
        self.num_listed += len(blocks)
        _PREPEND_N(self, blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Every free block, in plain LRU order behind the listed ones."""
        return [*super().get_all_free_blocks(), *self._idle()]

    def flush(self) -> None:
        """vLLM has emptied its prefix cache: no block is worth more than another."""
        blocks = self._forest.clear()
        self.num_free_blocks -= len(blocks)
        self.num_listed += len(blocks)
        super().append_n(blocks)

    def fall_back(self, error: Exception, taken: list[Any]) -> None:
        """The stock queue in its place, with all free blocks but those just `taken`, in the order that it would have had."""
        self._on_fault(error)
        gone = {block.block_id for block in taken}
        listed = [block for block in super().get_all_free_blocks() if block.block_id not in gone]
        known = {block.block_id for block in listed} | gone
        free = listed + [block for block in self._idle() if block.block_id not in known]
        for block in free:
            block.prev_free_block = block.next_free_block = None
        self._pool.free_block_queue = FreeKVCacheBlockQueue(free)
        for block in free:
            self._node_of[block.block_id] = None

    def _choose(self, n: int, taken: list[Any]) -> None:
        listed = min(n, self.num_listed)
        self.num_listed -= listed
        taken += super().popleft_n(listed)
        wanted = n - listed + max(self._lookahead_blocks - self.num_listed, 0) + self._batch_blocks
        victims = self._forest.take(min(wanted, self.num_free_blocks - self.num_listed))
        if len(victims) < n - listed:
            raise PluginFault(f"{self.num_free_blocks} blocks are free, and the policy offers {len(victims)} of {n - listed}")
        self.num_free_blocks -= len(victims)
        taken += victims[: n - listed]
        ahead = victims[n - listed :]
        self.num_listed += len(ahead)
        super().append_n(ahead)

    def _idle(self) -> list[Any]:
        """Free blocks outside the list, as LRU orders them. O(blocks): for faults and tests."""
        places = {
            block.block_id: (node.extent.freed_seconds, -node.start - position)
            for node in self._forest.nodes.values()
            for position, block in enumerate(node.blocks)
        }
        idle = [block for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null and block.prev_free_block is None]
        return sorted(idle, key=lambda block: places.get(block.block_id, (-math.inf, 0)))
