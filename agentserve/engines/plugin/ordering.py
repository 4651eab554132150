"""The plugin in an engine's process: retention and the ordered queue together, and plain LRU from the first fault on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from admission.eviction.choice import PolicyParameterError
from admission.eviction.policy import Fate
from admission.returns import ReturnModel, ReturnParameters
from agentserve.engines.plugin.free_queue import OrderedFreeQueue
from agentserve.engines.plugin.nodes import Key
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.retention import Retention
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.engines.plugin.wire import HintBatch, PluginState


class Ordering:
    """Orders `pool`'s free blocks from now on. Its calls never raise: a fault is told to `warn` once, and vLLM's own queue is back."""

    def __init__(
        self, pool: Any, options: PluginOptions, clock: Callable[[], float], warn: Callable[[str, Exception], None], num_slots: int = 0
    ) -> None:
        self._pool = pool
        self._warn = warn
        self._cache = pool.cached_block_hash_to_block
        self._num_errors = 0
        self._off_because = ""
        returns = ReturnModel(_return_parameters(options))
        try:
            self._retention = Retention(pool, options, returns, clock, num_slots, warn)
        except PolicyParameterError as error:
            raise PluginUnsupported(f"the plugin's parameters: {error}") from error
        self.tier = self._retention.tier
        self.unprotected, self.awaited = self._retention.unprotected, self._retention.awaited
        """While both are empty, `step` has only to do with who was preempted."""
        self._queue = OrderedFreeQueue(
            pool, self._retention.forest, self._turn_off, options.lookahead_blocks, chooses_ahead=not self.tier.is_on
        )

    @property
    def is_on(self) -> bool:
        return self._pool.free_block_queue is self._queue

    def arrived(self, request: Any) -> None:
        self._notice_reset()
        self._safely(self._retention.arrived, request)

    def placed(self, request: Any, blocks: Any, num_external_tokens: int = 0) -> None:
        self._notice_reset()
        if num_external_tokens:
            self.tier.placed(request, blocks, num_external_tokens)
        self._safely(self._retention.placed, request, blocks)

    def promise(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that a request will get from the tier. It may have waited since before a reset."""
        self._notice_reset()
        return self.tier.promise(request, num_computed_tokens)

    def take_changes(self) -> tuple[list[Key], list[Key]]:
        """Of the tier, for the batch in which vLLM also announces a reset."""
        self._notice_reset()
        return self.tier.take_changes()

    def finished(self, request: Any, blocks: list[Any]) -> None:
        self._safely(self._retention.finished, request, blocks)

    def step(self, preempted_ids: Collection[str] | None) -> None:
        if preempted_ids or self.unprotected or self.awaited:
            self._safely(self._retention.step, preempted_ids or ())

    def take_batch(self, batch: HintBatch) -> None:
        """Raises PolicyParameterError or KeyError where the policy that it asks for cannot be had."""
        if self.is_on:
            try:
                self._retention.take_batch(batch)
            except (PolicyParameterError, KeyError):
                raise
            except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
                self._queue.fall_back(error, [])

    def state(self) -> PluginState:
        retention, forest = self._retention, self._retention.forest
        nodes = forest.nodes.values() if self.is_on else ()
        free = [node for node in nodes if node.blocks[-1].ref_cnt == 0]
        resident: dict[str, int] = {}
        for node in free:
            resident[node.extent.session_id] = resident.get(node.extent.session_id, 0) + len(node.blocks)
        return PluginState(
            policy=retention.policy if self.is_on else "lru",
            parameters=retention.parameters,
            is_ordering=self.is_on,
            off_because=self._off_because,
            num_blocks=self._pool.num_gpu_blocks - 1,
            num_free_blocks=self._pool.free_block_queue.num_free_blocks,
            num_dead_blocks=sum(len(node.blocks) for node in free if node.extent.fate is not Fate.LIVE),
            num_sessions=len(retention.sessions),
            num_extents=len(forest.nodes),
            num_evicted_dead_blocks=forest.num_evicted[True],
            num_evicted_live_blocks=forest.num_evicted[False],
            num_hints=retention.counts.num_hints,
            num_bad_hints=retention.counts.num_bad_hints,
            num_errors=self._num_errors,
            tier_off_because=self.tier.off_because,
            num_tier_blocks=self.tier.num_slots,
            num_kept_blocks=self.tier.num_kept,
            num_stored_blocks=self.tier.counts.num_stored,
            num_loaded_blocks=self.tier.counts.num_loaded,
            num_dropped_blocks=self.tier.num_dropped,
            num_displaced_blocks=self.tier.num_displaced,
            num_declined_loads=self.tier.speeds.num_declined,
            stored_token_seconds=self.tier.speeds.seconds_per_stored_token,
            loaded_token_seconds=self.tier.speeds.seconds_per_loaded_token,
            computed_token_seconds=self.tier.speeds.seconds_per_computed_token,
            resident_blocks=resident,
        )

    def check_integrity(self) -> None:
        """Assert what must hold between steps. O(blocks)."""
        forest = self._retention.forest
        forest.check_integrity()
        self.tier.check_integrity()
        queue = self._pool.free_block_queue
        assert queue.num_free_blocks == len(queue.get_all_free_blocks())
        assert queue.num_free_blocks == sum(block.ref_cnt == 0 and not block.is_null for block in self._pool.blocks)

    def _notice_reset(self) -> None:
        """vLLM takes a new map of hashes when it empties its prefix cache, which it does only while no block is in use."""
        if self._pool.cached_block_hash_to_block is not self._cache:
            self._cache = self._pool.cached_block_hash_to_block
            self._safely(self._queue.flush)
            self.tier.clear()

    def _safely(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._pool.free_block_queue is self._queue:
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
                self._queue.fall_back(error, [])

    def _turn_off(self, error: Exception) -> None:
        self._num_errors += 1
        self._off_because = f"{type(error).__name__}: {error}"
        self._warn("agentserve's eviction order is off, vLLM evicts in LRU order", error)
        self.tier.turn_off(error)  # it hears of victims by the order


def _return_parameters(options: PluginOptions) -> ReturnParameters:
    if options.longest_gap_seconds is None:
        return ReturnParameters(time_scale=options.time_scale)
    return ReturnParameters(time_scale=options.time_scale, longest_gap_seconds=options.longest_gap_seconds)
