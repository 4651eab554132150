"""The carrier that costs least: vLLM's own scheduler, which tells the order what it does, without a KV connector.

    --scheduler-cls agentserve.engines.plugin.scheduler.AgentserveScheduler --additional-config '{"agentserve": {"policy": "class_hazard"}}'

A KV connector beside it is configured as without the plugin. vLLM's work for any connector, which it does for each request in each step,
is not done here: requests are looked at when they come, when they get their first blocks, and when they are over.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from agentserve.engines.plugin.carrying import check_engine, order_pool
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.ordering import Ordering
from agentserve.engines.plugin.supported import PluginUnsupported, check_output, check_scheduler

_SCHEDULE: Final = Scheduler.schedule
"""Called in each step, so without the detour of `super()`; the scheduler that runs ahead has the same."""


class AgentserveScheduler(Scheduler):  # type: ignore[misc] # vLLM is not always there to be type-checked
    """Schedules as vLLM does. Named for either way of scheduling: where vLLM schedules ahead of the outputs, it becomes the class below."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> AgentserveScheduler:
        ahead = cls is AgentserveScheduler and vllm_config.scheduler_config.async_scheduling
        made: AgentserveScheduler = super().__new__(AgentserveAsyncScheduler if ahead else cls)
        return made

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._agentserve: Ordering | None = None
        options = PluginOptions.of_scheduler(vllm_config.additional_config)
        if options.tier_bytes:
            raise PluginUnsupported("a tier moves KV, which a connector does: let the plugin's connector carry it, or leave tier_bytes out")
        if options.policy != "off":
            check_engine(options)
            check_scheduler(Scheduler, vllm_config)
            check_output(SchedulerOutput, NewRequestData, CachedRequestData)
        super().__init__(vllm_config, *args, **kwargs)
        if options.policy != "off":
            self._agentserve = order_pool(self.kv_cache_manager.block_pool, options, len(self.kv_cache_config.kv_cache_groups))

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests  # else the next piece of an input that streams
        super().add_request(request)
        if is_new and self._agentserve is not None:
            self._agentserve.arrived(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = _SCHEDULE(self, throttle_prefills)
        ordering = self._agentserve
        if ordering is None:
            return output
        # In most steps nothing of this has happened, and asking is all that the plugin costs then.
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
            for request_id in (*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids):
                ordering.placed(self.requests[request_id], self.kv_cache_manager.get_blocks(request_id).blocks[0])
        if output.preempted_req_ids or ordering.unprotected or ordering.awaited:
            ordering.step(output.preempted_req_ids)
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._agentserve is not None:
            self._agentserve.finished(request, self.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        return super()._free_request(request, *args, **kwargs)


class AgentserveAsyncScheduler(AgentserveScheduler, AsyncScheduler):  # type: ignore[misc] # as above
    """The same over the scheduler that runs ahead."""
