"""vLLM's functions that plan groups and memory of a KV cache, wherever this release has them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOME = "vllm.v1.core.kv_cache_planning"  # since 0.33
_planning = import_module(_HOME if find_spec(_HOME) else "vllm.v1.core.kv_cache_utils")

get_kv_cache_config_from_groups = _planning.get_kv_cache_config_from_groups


def get_kv_cache_configs(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    """Plan for workers with layers of these `specs` and as much `memory` (bytes)."""
    grouped = getattr(_planning, "get_global_kv_cache_groups", None)
    groups = [grouped(config, specs)] if grouped is not None else []
    planned: list[Any] = _planning.get_kv_cache_configs(config, specs, memory, *groups)
    return planned
