"""Reads vLLM's configuration: geometry, topology, and the fields of the namespace."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from connector.assembly import EngineShape
from connector.geometry import Field, KVGeometry, ShardTopology
from kvstore import UsageError

if TYPE_CHECKING:
    from connector.settings import ConnectorSettings

VLLM_NULL_BLOCK_ID = 0
"""vLLM's block pool keeps block 0 for "no block here"."""


def engine_shape(vllm_config: Any, kv_cache_config: Any, config: ConnectorSettings) -> EngineShape:
    """Raises `UsageError` for what cannot be stored: it is better not to start than to guess."""
    group, spec, layers = _group(kv_cache_config)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UsageError(
                name,
                getattr(parallel, name),
                "must be 1: sequence shards of a block are not stored",
            )
    _, hash_block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if hash_block_tokens != spec.block_size or spec.tokens_per_state != 1:
        raise UsageError(
            "block_size",
            (hash_block_tokens, spec.block_size, spec.tokens_per_state),
            "hash block and KV cache block must be the same, with one state a token",
        )
    model = vllm_config.model_config
    heads = spec.max_tp_shards or model.get_total_num_kv_heads()
    transfer = vllm_config.kv_transfer_config
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and speculative.use_eagle()
    return EngineShape(
        geometry=KVGeometry(
            layers=layers,
            heads=spec.num_heads,
            channel_bytes=spec.state_content_size_bytes,
            engine_block_tokens=hash_block_tokens,
        ),
        topology=ShardTopology.of(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, heads
        ),
        model=_model_fields(vllm_config, spec, config),
        group=group,
        null_block_id=VLLM_NULL_BLOCK_ID,
        # A draft model's layers see the next token: the last block is final one step late.
        volatile_tokens=hash_block_tokens if drafts else 0,
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
    )


def _group(kv_cache_config: Any) -> tuple[int, Any, int]:
    """(id, spec, number of layers) of the one group that is stored."""
    ids = kv_cache_config.prefix_cacheable_group_ids
    if len(ids) != 1 or len(kv_cache_config.kv_cache_groups) != 1:
        raise UsageError(
            "kv_cache_groups",
            [type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups],
            "exactly one KV cache group of attention layers can be stored; for models that mix "
            "window and full attention start vLLM with --disable-hybrid-kv-cache-manager",
        )
    group = kv_cache_config.kv_cache_groups[ids[0]]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = list(spec.kv_cache_specs.values())
        spec = specs[0]
        shapes = {(s.num_heads, s.state_content_size_bytes, s.block_size) for s in specs}
        if len(shapes) != 1:
            raise UsageError("kv_cache_spec", sorted(shapes), "all layers must have one shape")
    if not isinstance(spec, AttentionSpec):
        raise UsageError("kv_cache_spec", type(spec).__name__, "must be an attention layer's")
    return ids[0], spec, len(group.layer_names)


def _model_fields(vllm_config: Any, spec: Any, config: ConnectorSettings) -> dict[str, Field]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "model": config.model_id or str(model.model),
        "revision": config.model_revision or model.revision or "",
        "dtype": str(model.dtype),
        "quantisation": str(model.quantization or ""),
        "kv_cache_dtype": f"{cache.cache_dtype}/{spec.dtype}",
        "kv_spec": type(spec).__name__,
        "layers": int(model.get_total_num_hidden_layers()),
        "kv_heads": int(model.get_total_num_kv_heads()),
        "head_size": int(spec.head_size),
        "rope": _rope_digest(model),
        "draft": str(speculative.model) if speculative is not None else "",
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "unset"),
    }


def _rope_digest(model: Any) -> str:
    """Position encoding changes K and may be overridden at start without a new model name."""
    text = model.hf_text_config
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    values = {name: getattr(text, name, None) for name in names}
    raw = json.dumps(values, sort_keys=True, default=str).encode()
    return blake2b(raw, digest_size=8).hexdigest()
