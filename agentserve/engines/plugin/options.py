"""What an operator can say to the plugin: `kv_connector_extra_config` of vLLM's --kv-transfer-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from admission.eviction import EVICTION_POLICIES
from agentserve.engines.plugin.supported import PluginUnsupported

CONNECTOR: Final = "AgentserveConnector"
MODULE: Final = "agentserve.engines.plugin.connector"
_COMMON: Final = ("kv_role", "kv_load_failure_policy", "engine_id")
"""What vLLM reads of the outer configuration, where several connectors stand in one."""
POLICY_NAMES: Final = tuple(name for name, choice in EVICTION_POLICIES.items() if not choice.needs_future)


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Unknown names are refused."""

    policy: str = "class_hazard"
    """Of `EVICTION_POLICIES`. `off`: nothing is touched, vLLM evicts as without the plugin."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Of that policy."""
    time_scale: float = 1.0
    """How much faster than life the sessions run, for replays."""
    longest_gap_seconds: float | None = None
    """Idle times are cut at this (before scaling), for replays."""
    lookahead_blocks: int = 0
    """Next victims kept in vLLM's own list, for connectors that read it to see what is about to be evicted."""
    tier_bytes: int = 0
    """Host memory over all ranks for an exclusive tier, which keeps what leaves the GPU alive; 0: no tier."""
    protected_requests: int = 64
    """The paths of so many waiting requests (and awaited sessions) go only when nothing else is left."""
    any_version: bool = False
    """Do not refuse a vLLM of an unknown version; what is touched is checked all the same."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> PluginOptions:
        """Raises PluginUnsupported."""
        known = cls.__dataclass_fields__
        if unknown := extra.keys() - known.keys():
            raise PluginUnsupported(f"kv_connector_extra_config: no option {sorted(unknown)[0]!r}; there are: {', '.join(known)}")
        try:
            options = msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            raise PluginUnsupported(f"kv_connector_extra_config: {error}") from error
        if options.policy not in ("off", *POLICY_NAMES):
            there = ", ".join(POLICY_NAMES)
            raise PluginUnsupported(f"kv_connector_extra_config: no policy {options.policy!r}; there are: off, {there}")
        if options.tier_bytes < 0 or (options.tier_bytes and (options.policy == "off" or options.lookahead_blocks)):
            raise PluginUnsupported("kv_connector_extra_config: tier_bytes needs a policy that is not off, and no lookahead_blocks")
        return options


def transfer_config(options: PluginOptions, beside: str | None = None) -> str:
    """The value of vLLM's --kv-transfer-config that carries the plugin: alone, or in front of the connector that `beside` configures."""
    extra = {name: value for name, value in asdict(options).items() if value != getattr(PluginOptions(), name)}
    config: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE, "kv_role": "kv_producer"}
    config["kv_connector_extra_config"] = extra
    if options.tier_bytes:
        config["kv_load_failure_policy"] = "recompute"
    if beside is not None:
        other = msgspec.json.decode(beside, type=dict[str, Any])
        common: dict[str, Any] = {name: one[name] for one in (config, other) for name in _COMMON if name in one}
        config = {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": {"connectors": [config, other]}}
    return msgspec.json.encode(config).decode()
