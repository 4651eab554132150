"""The connector by its bare name, so that --kv-transfer-config needs no module path where the general plugin is loaded."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from agentserve.engines.plugin.options import CONNECTOR, MODULE


def register_connector() -> None:
    if CONNECTOR not in KVConnectorFactory._registry:  # it has no question for this, and refuses a second registration
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
