"""Supports layers of several shapes in one of vLLM's KV cache groups.

vLLM puts layers that need the same slots into one group whatever their shape: a latent and its
indexer, layers with fewer heads. Its workers are told each layer's spec, its scheduler the first
one's. So namespaces come from the first, and workers alone know the rest, which follows from the
layers' names, the model's configuration and what the namespace has of the KV cache's.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

from connector.adapters.vllm.groups.heads import tp_shards
from connector.layout.geometry import LayerRun
from kvstore import UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


def state_runs(group: KVCacheGroupSpec, pp_size: int) -> tuple[LayerRun, ...]:
    """Return runs of a group of state-space layers whose states differ in size, else nothing."""
    runs = _by_shape(group)
    if len(runs) == 1:
        return ()
    _one_stage(pp_size)
    return runs


def layer_runs(
    group: KVCacheGroupSpec,
    vllm_config: VllmConfig,
    within_block: Callable[[KVCacheSpec], str],
    *,
    one_size: bool = False,
) -> tuple[LayerRun, ...]:
    """Return runs of a group whose layers differ, else nothing.

    Raises `UsageError` where what the first layer says of sharing is not true of another.
    """
    runs = _by_shape(group)
    if len(runs) == 1:
        return ()
    specs, names = group.kv_cache_spec.kv_cache_specs, list(group.layer_names)
    first = group.kv_cache_spec.first_spec
    _one_stage(vllm_config.parallel_config.pipeline_parallel_size)
    shards = tp_shards(first, names, vllm_config)
    for name in names:
        spec = specs[name]
        # Hidden states lie token by token, and each worker has all of them.
        everywhere = isinstance(spec, HiddenStateCacheSpec)
        fewer, more = sorted((spec.num_heads, first.num_heads))
        right = (
            (one_size or more % fewer == 0)
            and (spec.num_heads == spec.num_kv_heads or shards == 1)
            and (everywhere or tp_shards(spec, [name], vllm_config) <= shards)
            and (everywhere or within_block(first) != "" or within_block(spec) == "")
        )
        if not right:
            raise UsageError(
                "kv_cache_spec",
                f"{name}: {spec.num_heads} heads, {spec.state_content_size_bytes} bytes",
                f"cannot be shared beside {first.num_heads} heads of "
                f"{first.state_content_size_bytes} bytes in one KV cache group",
            )
    return runs


def _by_shape(group: KVCacheGroupSpec) -> tuple[LayerRun, ...]:
    """Return layers of one shape each, in the order of the first of them."""
    places: dict[tuple[int, int, Fraction], list[int]] = {}
    for place, name in enumerate(group.layer_names):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        per_state = Fraction(max(spec.tokens_per_state, 0) or 1)  # -1: one state for all
        shape = (spec.num_heads, spec.state_content_size_bytes, per_state)
        places.setdefault(shape, []).append(place)
    return tuple(LayerRun(tuple(some), *shape) for shape, some in places.items())


def _one_stage(pp_size: int) -> None:
    if pp_size != 1:
        raise UsageError(
            "pipeline_parallel_size",
            pp_size,
            "must be 1 where layers of one KV cache group differ in shape: each stage has others",
        )
