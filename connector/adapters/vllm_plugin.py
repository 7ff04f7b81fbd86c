"""vLLM's plug-in entry point. Importing it imports no engine."""

from __future__ import annotations

VLLM_CONNECTOR = "KVStoreConnector"
"""Also the class name: vLLM looks statistics up by it."""


def register_vllm() -> None:
    """Make `"kv_connector": "KVStoreConnector"` known to vLLM, in whichever process runs this.

    vLLM runs its plug-ins in every process, some more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(
            VLLM_CONNECTOR, "connector.adapters.vllm", VLLM_CONNECTOR
        )
    except ValueError:
        return  # registered already
