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
        return _ill(facts, None) or unknown("vLLM does not say over HTTP whether it has a KV connector", WHERE_TO_ASK)
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
    return _ill(facts, options) or fine(_well(facts, options))


def _ill(facts: Facts, options: PluginOptions | None) -> Verdict | None:
    """What the plugin says is wrong with it."""
    state = facts.engine.plugin
    if state is None:
        return None
    if not state.is_ordering:
        return found(f"the plugin fell back to plain LRU: {state.off_because}", "start vLLM again, and report what it says")
    if state.tier_off_because and options is not None and options.tier_bytes:
        return found(f"the exclusive tier is off: {state.tier_off_because}", "mend that, then start vLLM again")
    if facts.engine.tier_tokens and facts.server is not None and facts.server.tier == "none":
        return found(
            "the server does not know of the exclusive tier: what it brings is not predicted, and counts against the mirror",
            "--offload-tier exclusive for agentserve",
        )
    return None


def _well(facts: Facts, options: PluginOptions) -> str:
    state = facts.engine.plugin
    text = f"the plugin orders by {options.policy if state is None else state.policy}"
    if state is None or not state.num_tier_blocks:
        return text
    text = f"{text}, and its exclusive tier keeps {state.num_kept_blocks:,} of {state.num_tier_blocks:,} blocks"
    followed = facts.server.tier_tokens if facts.server is not None else None
    return text if followed is None else f"{text}, {followed:,} tokens by its events"


def _is_lazy(connector: dict[str, Any]) -> bool:
    extra = connector.get("kv_connector_extra_config") or {}
    return any(str(find(extra, name)).lower() == "true" for name in _LAZY)


CHECKS = (Check("eviction_plugin", "KV connectors, the plugin's options and state", eviction_plugin),)
