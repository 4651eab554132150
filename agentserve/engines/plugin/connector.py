"""The carrier under vLLM's own scheduler: a KV connector. vLLM hands it the block pool and tells it of each request.

    --kv-transfer-config '{"kv_connector": "AgentserveConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "agentserve.engines.plugin.connector"}'

or as the first child of a MultiConnector. As a producer it does not make vLLM hold freed blocks back, as a consumer of KV would. It moves
KV only where it has a tier of its own: a block that leaves the GPU is copied to the tier by the step that takes the block, before that
step computes anything, and one that a request gets back is copied back likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA

from agentserve.engines.plugin.announcing import check_events, tier_events
from agentserve.engines.plugin.carrying import check_engine, order_pool
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.ordering import Ordering
from agentserve.engines.plugin.supported import PluginUnsupported, block_bytes, check_tier
from agentserve.engines.plugin.tier_worker import StepJobs, StepReport, TierWorker


class _Nothing(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not always there to be type-checked
    """What the workers are told."""


_NOTHING = _Nothing()


class AgentserveConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """One in the scheduler's process, which orders, and one in each worker, which copies for the tier if there is one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = PluginOptions.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._num_groups = len(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 1
        self._ordering: Ordering | None = None
        self._worker: TierWorker | None = None
        self._num_slots = 0
        if self._options.tier_bytes:
            check_tier(KVConnectorBase_V1, vllm_config)
            check_events()
            self._num_slots = self._options.tier_bytes // (vllm_config.parallel_config.world_size * block_bytes(kv_cache_config))
            if not self._num_slots:
                raise PluginUnsupported(f"tier_bytes holds no block of {block_bytes(kv_cache_config):,} bytes on each rank")
        if role == KVConnectorRole.SCHEDULER and self._options.policy != "off":
            check_engine(self._options)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is delivered, so a preempted request need not be computed anew for it."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._options.policy != "off":
            self._pool, self._blocks = gpu_block_pool, gpu_block_pool.blocks
            self._ordering = order_pool(gpu_block_pool, self._options, self._num_groups, self._num_slots)

    def on_new_request(self, request: Any) -> None:
        if self._ordering is not None:
            self._ordering.arrived(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._ordering is not None:
            self._ordering.placed(request, blocks.blocks[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._ordering is not None:
            self._ordering.step(scheduler_output.preempted_req_ids)
            if self._num_slots:
                return StepJobs(self._ordering.tier.jobs(scheduler_output.total_num_scheduled_tokens))
        return _NOTHING

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._ordering is not None and isinstance(report, StepReport):
            loaded, stored = (report.num_loaded_blocks, report.load_seconds), (report.num_stored_blocks, report.store_seconds)
            self._ordering.tier.done(report.step, loaded, stored, report.fault)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._ordering is not None:
            self._ordering.finished(request, [self._blocks[block_id] for block_id in block_ids])
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._ordering is None or not self._num_slots:
            return 0, False
        return self._ordering.promise(request, num_computed_tokens), False

    def take_events(self) -> Sequence[Any]:
        if self._ordering is None or not self._num_slots or not self._pool.enable_kv_cache_events:
            return ()
        return tier_events(*self._ordering.take_changes())

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._num_slots:
            self._worker = TierWorker(kv_caches, self._kv_cache_config.num_blocks, self._num_slots)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepJobs):
            self._worker.store(kv_connector_metadata.jobs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepJobs):
            self._worker.load(metadata.jobs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.lost_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        return None if self._worker is None else self._worker.report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """There is nothing to save."""

    def wait_for_save(self) -> None:
        """There is nothing to wait for."""
