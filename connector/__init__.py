"""Connectors: the producer and consumer sides that tie an engine's KV cache to the store.

The core (`scheduler`, `worker`) knows no engine; `adapters/` translates one engine each;
the names below are for people who write their own engine or connector (docs/connector.md).
Importing this package imports none of them, and never torch: each is imported when it
is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.aggregate import KVOutputAggregator, WorkerEvents, worker_output
    from connector.assembly import EngineShape
    from connector.base import BlockPins, EngineRequest
    from connector.config import KVTransferConfig
    from connector.copy import copy_kv_blocks
    from connector.factory import KVConnectorFactory
    from connector.geometry import KVGeometry, ShardTopology
    from connector.identity import forward_digest
    from connector.kvstore_connector import EngineInfo, KVStoreConnector
    from connector.lookup_buffer import KVEntry, LookupBuffer
    from connector.multi import MultiConnector
    from connector.pipe import Pipe, PipeClosedError
    from connector.prompt_keys import PromptKeys
    from connector.protocol import (
        KVConnectorBase,
        KVConnectorOutput,
        KVConnectorRole,
        KVConnectorScheduler,
        KVConnectorWorker,
        SchedulerStep,
        TransferResults,
    )
    from connector.state import (
        ensure_kv_transfer_initialized,
        ensure_kv_transfer_shutdown,
        get_kv_transfer_group,
        has_kv_transfer_group,
        is_v1_kv_transfer_group,
    )
    from connector.stats import CountStats

_EXPORTS = {
    "aggregate": ("KVOutputAggregator", "WorkerEvents", "worker_output"),
    "assembly": ("EngineShape",),
    "base": ("BlockPins", "EngineRequest"),
    "config": ("KVTransferConfig",),
    "copy": ("copy_kv_blocks",),
    "factory": ("KVConnectorFactory",),
    "geometry": ("KVGeometry", "ShardTopology"),
    "identity": ("forward_digest",),
    "kvstore_connector": ("EngineInfo", "KVStoreConnector"),
    "lookup_buffer": ("KVEntry", "LookupBuffer"),
    "multi": ("MultiConnector",),
    "pipe": ("Pipe", "PipeClosedError"),
    "prompt_keys": ("PromptKeys",),
    "protocol": (
        "KVConnectorBase",
        "KVConnectorOutput",
        "KVConnectorRole",
        "KVConnectorScheduler",
        "KVConnectorWorker",
        "SchedulerStep",
        "TransferResults",
    ),
    "state": (
        "ensure_kv_transfer_initialized",
        "ensure_kv_transfer_shutdown",
        "get_kv_transfer_group",
        "has_kv_transfer_group",
        "is_v1_kv_transfer_group",
    ),
    "stats": ("CountStats",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
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
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVConnectorRole",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "worker_output",
    "SchedulerStep",
    "TransferResults",
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
    "ShardTopology",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
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
