"""Ties an engine's KV cache to the store: scheduler sides decide, worker sides move bytes.

The core (`scheduler`, `worker`) knows no engine; `adapters/` translates one engine each;
the names below are for people who write their own engine or connector (docs/connector.md).
Importing this package imports none of them, and never torch: each is imported when it
is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector.build import EngineShape
    from connector.layout.geometry import KVGeometry
    from connector.layout.identity import forward_digest
    from connector.layout.prompt_keys import PromptKeys
    from connector.layout.topology import TpKVTopology
    from connector.messages import BlockPins, EngineRequest
    from connector.stats import CountStats
    from connector.transfer.aggregate import KVOutputAggregator, WorkerEvents, worker_output
    from connector.transfer.base import (
        KVConnectorBase,
        KVConnectorBaseType,
        KVConnectorOutput,
        KVConnectorRole,
    )
    from connector.transfer.base_v1 import KVConnectorBase_V1
    from connector.transfer.config import KVTransferConfig
    from connector.transfer.copy import copy_kv_blocks
    from connector.transfer.engine import (
        EngineBlocks,
        EngineInfo,
        SchedulerSteps,
        V1EngineInfo,
        forward_context,
        request_finished,
    )
    from connector.transfer.factory import KVConnectorFactory
    from connector.transfer.kvstore_connector import KVStoreConnector
    from connector.transfer.lookup_buffer import KVEntry, LookupBuffer
    from connector.transfer.multi import MultiConnector
    from connector.transfer.pipe import Pipe, PipeClosedError
    from connector.transfer.state import (
        ensure_kv_transfer_initialized,
        ensure_kv_transfer_shutdown,
        get_kv_connector_cache_layout,
        get_kv_transfer_group,
        has_kv_transfer_group,
        is_v1_kv_transfer_group,
    )

_EXPORTS = {
    "transfer.aggregate": ("KVOutputAggregator", "WorkerEvents", "worker_output"),
    "build": ("EngineShape",),
    "messages": ("BlockPins", "EngineRequest"),
    "transfer.config": ("KVTransferConfig",),
    "transfer.copy": ("copy_kv_blocks",),
    "transfer.factory": ("KVConnectorFactory",),
    "layout.geometry": ("KVGeometry",),
    "layout.topology": ("TpKVTopology",),
    "layout.identity": ("forward_digest",),
    "transfer.engine": (
        "EngineBlocks",
        "EngineInfo",
        "SchedulerSteps",
        "V1EngineInfo",
        "forward_context",
        "request_finished",
    ),
    "transfer.kvstore_connector": ("KVStoreConnector",),
    "transfer.lookup_buffer": ("KVEntry", "LookupBuffer"),
    "transfer.multi": ("MultiConnector",),
    "transfer.pipe": ("Pipe", "PipeClosedError"),
    "layout.prompt_keys": ("PromptKeys",),
    "transfer.base": (
        "KVConnectorBase",
        "KVConnectorBaseType",
        "KVConnectorOutput",
        "KVConnectorRole",
    ),
    "transfer.state": (
        "ensure_kv_transfer_initialized",
        "ensure_kv_transfer_shutdown",
        "get_kv_connector_cache_layout",
        "get_kv_transfer_group",
        "has_kv_transfer_group",
        "is_v1_kv_transfer_group",
    ),
    "transfer.base_v1": ("KVConnectorBase_V1",),
    "stats": ("CountStats",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])


__all__ = [
    "KVTransferConfig",
    "KVConnectorFactory",
    "KVConnectorBase",
    "KVConnectorBaseType",
    "KVConnectorBase_V1",
    "V1EngineInfo",
    "KVConnectorRole",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "worker_output",
    "SchedulerSteps",
    "EngineBlocks",
    "forward_context",
    "request_finished",
    "CountStats",
    "WorkerEvents",
    "KVStoreConnector",
    "forward_digest",
    "MultiConnector",
    "EngineInfo",
    "EngineShape",
    "EngineRequest",
    "BlockPins",
    "KVGeometry",
    "TpKVTopology",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
    "get_kv_connector_cache_layout",
    "get_kv_transfer_group",
    "has_kv_transfer_group",
    "is_v1_kv_transfer_group",
    "copy_kv_blocks",
    "LookupBuffer",
    "KVEntry",
    "Pipe",
    "PipeClosedError",
    "PromptKeys",
]
