"""The blocks of requests, as vLLM's KV cache manager gives them out: hits and new ones, a hash for each that is full."""

from __future__ import annotations

from dataclasses import dataclass

from replays.simulator.options import EngineOptions
from replays.simulator.pool import BlockPool
from replays.simulator.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class KVCacheManager:
    """Between an engine and its pool. A request's `num_blocks` and `num_hashed` change here only. `now` in seconds."""

    options: EngineOptions
    pool: BlockPool

    def num_missing(self, request: EngineRequest, num_tokens: int) -> int:
        """Blocks that `request` lacks for so many tokens."""
        return max(0, -(-num_tokens // self.options.block_size) - request.num_blocks)

    def take(self, request: EngineRequest, hit: int, num_tokens: int, now: float) -> None:
        """Its first blocks, for `num_tokens`: `hit` of them from the pool, the others new."""
        num_blocks = -(-num_tokens // self.options.block_size)
        self.pool.hold(request.id, request.path, hit, now)
        self.pool.allocate(num_blocks - hit, now)
        request.num_blocks, request.num_hashed = num_blocks, hit

    def grow(self, request: EngineRequest, num_new: int, now: float) -> bool:
        """Blocks for `num_new` more tokens and for drafts behind them; False, and nothing changes, where the pool has too few."""
        options = self.options
        end, size = request.num_computed_tokens + num_new, options.block_size
        if end + options.num_speculative_tokens <= request.num_blocks * size and end < (request.num_hashed + 1) * size:
            return True  # inside its last block, as nearly always
        more = self.num_missing(request, end + options.num_speculative_tokens)
        if more > self.pool.num_free:
            return False
        if more:
            self.pool.allocate(more, now)
            request.num_blocks += more
        self.commit(request, end, now)
        return True

    def commit(self, request: EngineRequest, end: int, now: float) -> None:
        """What lies before token `end` is computed, or about to be: whole blocks of it that have no hash get theirs."""
        depth = min(end, request.num_tokens) // self.options.block_size
        if depth > request.num_hashed:
            self.pool.commit(request.id, request.path, request.num_hashed, depth, now)
            request.num_hashed = depth

    def free(self, request: EngineRequest, now: float) -> None:
        """It lets go of all of its blocks."""
        num_plain = request.num_blocks - request.num_hashed
        self.pool.free(request.id, request.path, request.num_hashed, num_plain, request.use, now)
        request.num_blocks = request.num_hashed = 0
