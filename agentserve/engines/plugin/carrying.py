"""What every carrier of the plugin does: check vLLM before anything is touched, and put the order into its block pool."""

from __future__ import annotations

from time import monotonic
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from agentserve.engines.plugin import control
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.ordering import Ordering
from agentserve.engines.plugin.supported import PluginUnsupported, check_pool, check_queue, check_version, installed_version

_log = init_logger("vllm.agentserve")  # vLLM shows its own loggers only


def check_engine(options: PluginOptions) -> None:
    """Raises PluginUnsupported. Opens the engine's side of the control routes. Changes state."""
    if not options.any_version:
        check_version(installed_version())
    check_queue(FreeKVCacheBlockQueue)
    control.install()


def order_pool(pool: Any, options: PluginOptions, num_groups: int, num_slots: int = 0) -> Ordering:
    """From now on `options.policy` orders vLLM's BlockPool, with a tier of `num_slots` blocks. Raises PluginUnsupported. Changes state."""
    if not type(pool.free_block_queue).__module__.startswith("vllm."):
        raise PluginUnsupported("the block pool is ordered already: name the plugin's connector or its scheduler, not both")
    check_pool(pool, num_groups)
    ordering = Ordering(pool, options, monotonic, _warn, num_slots)
    control.current = ordering
    _log.info("agentserve orders %d blocks by %s, with %d behind them", pool.num_gpu_blocks - 1, options.policy, num_slots)
    return ordering


def _warn(message: str, error: Exception) -> None:
    _log.error(message, exc_info=error)
