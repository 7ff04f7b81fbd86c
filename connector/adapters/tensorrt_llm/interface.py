"""Finds TensorRT-LLM's base classes, which have moved between its releases."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Modules in which the interface may be, newest first."""


def _interface() -> ModuleType:
    for place in PLACES[:-1]:
        try:
            return import_module(place)
        except ModuleNotFoundError:
            continue
    return import_module(PLACES[-1])


_found = _interface()
SchedulerBase: Any = _found.KvCacheConnectorScheduler
WorkerBase: Any = _found.KvCacheConnectorWorker


class LayerGroup(Protocol):
    """The part of a layer group of a KV cache that is used."""

    window_size: int | None
    regions: Sequence[object]
    replicated_regions: Sequence[object]


class KvCacheLayout(Protocol):
    """The part of a KV cache's description that is used."""

    groups: Sequence[LayerGroup]


class LlmRequest(Protocol):
    """The part of a request of the executor that is used."""

    request_id: int

    def get_tokens(self, beam: int) -> Sequence[int]: ...


class RequestData(Protocol):
    """The part of a step's data about a request that is used."""

    request_id: int
    new_tokens: Sequence[int]
    new_block_ids: Sequence[int]
    computed_position: int
    num_scheduled_tokens: int


class SchedulerOutput(Protocol):
    """The part of a step's plan that is used."""

    new_requests: Sequence[RequestData]
    cached_requests: Sequence[RequestData]


def rank() -> int:
    """Return this process's rank among the engine's."""
    number: int = import_module("tensorrt_llm._utils").mpi_rank()
    return number


def release() -> str:
    return str(getattr(import_module("tensorrt_llm"), "__version__", "unknown"))
