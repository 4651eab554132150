"""The engine's eviction plugin: whether those beside it see what it does."""

from __future__ import annotations

from typing import Any

from agentserve.doctor.facts import Facts
from agentserve.doctor.launch import find
from agentserve.doctor.verdict import WHERE_TO_ASK, Check, Verdict, apart, fine, found, unknown
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.plugin.supported import PluginUnsupported

_LAZY = ("lazy_offload", "lmcache.mp.lazy_offload", "lmcache.lazy_offload")


def eviction_plugin(facts: Facts) -> Verdict:
    """A connector that offloads what is about to be evicted reads vLLM's own list, in which the plugin must then show its next victims."""
    connectors = facts.engine.connectors
    if connectors is None:
        return unknown("vLLM does not say over HTTP whether it has a KV connector", WHERE_TO_ASK)
    ours = facts.engine.eviction_plugin
    if ours is None:
        return apart("the engine evicts in plain LRU order, without the plugin")
    try:
        options = PluginOptions.read(ours, "the plugin")
    except PluginUnsupported as error:
        return found(f"the plugin refuses its options: {error}", "correct them where vLLM was given them")
    if options.policy == "off":
        return apart("the plugin is there, and off")
    if any(_is_lazy(one) for one in connectors) and not options.lookahead_blocks:
        return found(
            "a connector offloads what vLLM's list shows to be evicted next, and the plugin shows nothing there",
            '"lookahead_blocks": 512 among the plugin\'s options',
        )
    return fine(f"the plugin orders by {options.policy}")


def _is_lazy(connector: dict[str, Any]) -> bool:
    extra = connector.get("kv_connector_extra_config") or {}
    return any(str(find(extra, name)).lower() == "true" for name in _LAZY)


CHECKS = (Check("eviction_plugin", "KV connectors, the plugin's options", eviction_plugin),)
