"""Finds TensorRT-LLM's base classes, which have moved between its releases."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Newest first."""


def _interface() -> Any:
    for place in PLACES[:-1]:
        try:
            return import_module(place)
        except ModuleNotFoundError:
            continue
    return import_module(PLACES[-1])


_found = _interface()
SchedulerBase: Any = _found.KvCacheConnectorScheduler
WorkerBase: Any = _found.KvCacheConnectorWorker


def rank() -> int:
    """Return this process's rank among the engine's."""
    number: int = import_module("tensorrt_llm._utils").mpi_rank()
    return number


def release() -> str:
    return str(getattr(import_module("tensorrt_llm"), "__version__", "unknown"))
