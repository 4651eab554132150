"""The connector by its bare name, so that --kv-transfer-config needs no module path where vLLM loads its general plugins."""

from __future__ import annotations

from agentserve.engines.plugin.options import CONNECTOR, MODULE


def register_connector() -> None:
    """Tell vLLM's registry; nothing is imported or changed before a configuration names the connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # vLLM is there when it calls its plugins

    if CONNECTOR not in KVConnectorFactory._registry:  # it has no question for this, and refuses a second registration
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
