"""Reads vLLM's configuration: geometry, topology, and the fields of the namespace."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from vllm import envs
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from connector.adapters.vllm.groups.context import token_parts, topology_of
from connector.adapters.vllm.groups.heads import one_size, tp_shards
from connector.adapters.vllm.groups.kinds import check_model, check_outputs, sorted_groups
from connector.adapters.vllm.groups.runs import layer_runs
from connector.adapters.vllm.groups.states import (
    state_fields,
    state_geometry,
    state_spec,
    state_topology,
)
from connector.adapters.vllm.identity import model_fields
from connector.adapters.vllm.launcher import in_lock_step, workers_of
from connector.build import EngineShape, GroupShape
from connector.layout.geometry import KVGeometry
from connector.layout.identity import digest_of
from kvstore import UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    from connector.settings import ConnectorSettings

VLLM_NULL_BLOCK_ID = 0
"""vLLM's block pool keeps block 0 for "no block here"."""


def engine_shape(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorSettings
) -> EngineShape:
    """Return what this engine caches. Raises `UsageError` for what cannot be stored: it is better
    not to start than to guess."""
    parallel = vllm_config.parallel_config
    if in_lock_step(vllm_config) and parallel.pipeline_parallel_size > 1:
        raise UsageError(
            "distributed_executor_backend",
            "external_launcher",
            f"cannot be used with pipeline_parallel_size {parallel.pipeline_parallel_size}: it has "
            "not been seen working with a store. Use mp or ray, or tensor parallelism alone",
        )
    if config.layerwise:
        _check_layerwise(vllm_config)
    check_model(vllm_config.model_config)
    check_outputs(vllm_config)
    found = sorted_groups(kv_cache_config)
    groups = tuple(
        _group(number, group, vllm_config, kv_cache_config) for number, group in found.stored
    )
    transfer, events = vllm_config.kv_transfer_config, vllm_config.kv_events_config
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and speculative.use_eagle()
    return EngineShape(
        groups=groups,
        workers=workers_of(parallel),
        model=model_fields(vllm_config, config),
        null_block_id=VLLM_NULL_BLOCK_ID,
        # A draft model's layers see tokens behind their own: these are final a step late.
        volatile_tokens=(max(1, int(vllm_config.num_prefill_lookahead_tokens)) if drafts else 0),
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        events=events is not None and events.enable_kv_cache_events,
        # vLLM goes on counting the blocks of a load that failed as promised, to the same request
        # too, and may never admit another one.
        loads_again=config.layerwise,
        engine_groups=len(kv_cache_config.kv_cache_groups),
        boundary_tokens=_boundary_tokens(vllm_config, kv_cache_config) if found.left_out else 1,
        left_out=found.left_out,
        # Of states vLLM shows only those that it keeps.
        window_interval_tokens=vllm_config.cache_config.prefix_cache_retention_interval,
        prompts_only=any(
            isinstance(spec, RSWASpec)
            for _, group in found.stored
            for spec in iter_layer_specs(group.kv_cache_spec)
        ),
    )


def _boundary_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return where hits of vLLM's own cache end, for the sake of groups that are left out."""
    dcp_size = vllm_config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    return math.lcm(*(resolve_dcp_kv_block_size(one.kv_cache_spec, dcp_size) for one in groups))


def _check_layerwise(vllm_config: VllmConfig) -> None:
    """Raise `UsageError` unless vLLM 0.32 works layer by layer here and recomputes rightly
    (docs/decisions/0013)."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config

    def need(right: bool, name: str, value: object, why: str) -> None:
        if not right:
            raise UsageError(name, value, f"{why}, or set layerwise to false")

    need(
        not parallel.use_ubatching,
        "enable_dbo, ubatch_size",
        (parallel.enable_dbo, parallel.ubatch_size),
        "must be off: each layer of a step is written twice",
    )
    drafts = vllm_config.speculative_config
    need(drafts is None, "speculative_config", drafts, "must be absent: drafts write layers again")
    need(
        not in_lock_step(vllm_config),
        "distributed_executor_backend",
        "external_launcher",
        "must be mp or ray with several workers: reports of all of them come a step late",
    )
    if not vllm_config.kv_transfer_config.is_kv_consumer:
        return
    need(
        not scheduler.async_scheduling,
        "async_scheduling",
        True,
        "must be off (--no-async-scheduling): a step that was planned already is not undone",
    )
    stages = parallel.pipeline_parallel_size
    need(stages == 1, "pipeline_parallel_size", stages, "must be 1: several steps run at a time")
    need(
        not vllm_config.use_v2_model_runner,
        "VLLM_USE_V2_MODEL_RUNNER",
        True,
        "must be 0: that runner computes from the wrong place when a load has failed",
    )
    chunk = scheduler.long_prefill_token_threshold
    need(
        chunk == 0,
        "long_prefill_token_threshold",
        chunk,
        "must be 0: another request could read blocks before they are computed again",
    )


def vllm_hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return tokens of one of vLLM's own block hashes."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def _group(
    number: int, group: KVCacheGroupSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> GroupShape:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    pp_size = parallel.pipeline_parallel_size
    layers = {"kv_layers": _layers_digest(number, group, vllm_config)}
    states = state_spec(number, group.kv_cache_spec)
    if states is not None:
        return GroupShape(
            geometry=state_geometry(states, group, pp_size),
            topology=state_topology(states, parallel),
            number=number,
            fields={**state_fields(states), **layers},
        )
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # The scheduler is given the first layer's: namespaces are made from that one.
        spec = spec.first_spec
    per_state = Fraction(spec.tokens_per_state)
    parts = token_parts(spec, vllm_config, kv_cache_config)
    # Where vLLM packs heads in another way, ranges of them mean nothing to another size.
    plain = spec.num_heads == spec.num_kv_heads
    tp_size = int(parallel.tensor_parallel_size)
    shards = tp_shards(spec, group.layer_names, vllm_config)
    heads = shards if shards < tp_size else tp_size * int(spec.num_heads)
    alone = one_size(spec, group.layer_names, vllm_config, heads)
    runs = layer_runs(
        group, vllm_config, lambda one: _within_block(vllm_config, one), one_size=alone
    )
    topology, context_fields = topology_of(parallel, heads, parts)
    within_block = _within_block(vllm_config, spec)
    return GroupShape(
        geometry=KVGeometry(
            layers=len(group.layer_names),
            heads=spec.num_heads,
            channel_bytes=spec.state_content_size_bytes,
            engine_block_tokens=spec.block_size * parts.size,
            runs=tuple(
                run._replace(tokens_per_slot=parts.tokens_per_slot(run.tokens_per_slot))
                for run in runs
            ),
            tokens_per_slot=parts.tokens_per_slot(per_state),
        ),
        topology=topology,
        # The scheduler knows the layers of one pipeline stage only; both sides must agree.
        layers_of_default=(
            None if pp_size == 1 else max(1, model.get_total_num_hidden_layers() // pp_size)
        ),
        number=number,
        window_tokens=(
            int(spec.sliding_window) + int(spec.extra_retained_tokens)
            if isinstance(spec, SlidingWindowSpec)
            else None
        ),
        chunk_tokens=(
            int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else None
        ),
        opaque=bool(within_block),
        one_size=alone,
        fields={
            "kv_cache_dtype": f"{vllm_config.cache_config.cache_dtype}/{spec.dtype}",
            "kv_spec": type(spec).__name__,
            "head_size": int(spec.head_size),
            "within_block": within_block,
            "packing": "" if plain else f"{spec.num_heads} slots, {topology.tp_shards} shards",
            **({} if per_state == 1 else {"tokens_per_state": str(per_state)}),
            **context_fields,
            **layers,
        },
    )


def _within_block(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """Return how bytes lie within one engine block and head: empty when token by token, K then V.

    Elsewhere only engines with the same order may share, and so the same block
    size. vLLM's CPU kernels put all K of a block before all V, in an order that
    depends on the instruction set; what quantised and packed formats do within
    a block is not promised anywhere.
    """
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # needs the CPU's kernels

        dtype = vllm_config.cache_config.cache_dtype
        try:
            isa = _get_attn_isa(
                vllm_config.model_config.dtype, spec.block_size, spec.head_size, dtype
            )
        except NotImplementedError as e:  # vLLM itself finds it out when it builds the layers
            raise UsageError("kv_cache_dtype, head_size", (dtype, spec.head_size), str(e)) from e
        return f"cpu {isa}, {spec.block_size} tokens"
    dense = spec.state_content_bytes is None and spec.kv_quant_mode == KVQuantMode.NONE
    # Beside a latent there may be layers of other formats, of which the scheduler knows nothing.
    shuffled = envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
    dense = dense and not isinstance(spec, MLAAttentionSpec) and not shuffled
    if dense:
        return ""
    known = [spec.kv_quant_mode.name, f"{spec.block_size} tokens", *["shuffled"] * shuffled]
    # A page of such a format is one piece, whatever heads and tokens its view shows: what comes
    # where in it follows from the order in memory, with one head there is but one.
    if spec.num_heads > 1:
        known.append(str(vllm_config.cache_config.kv_cache_layout).replace("L", ""))
    if spec.kv_quant_mode.name.startswith("NVFP4"):
        # Its scales are written by one kernel or another, as the device is.
        known.append(f"device {current_platform.get_device_capability()}")
    return ", ".join(known)


def _layers_digest(number: int, group: KVCacheGroupSpec, vllm_config: VllmConfig) -> str:
    """Return which layers a shard has.

    Each pipeline stage has others and the scheduler knows those of the first only; but it knows
    how they are parted, and what else vLLM groups them by. Raises `UsageError` for a stage that has
    none.
    """
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    if not group.layer_names:
        raise UsageError(
            "pipeline_parallel_size",
            pp_size,
            f"must be 1: one of its stages has no layer of KV cache group {number}, and others do",
        )
    if pp_size == 1:
        skipped = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None)
        return digest_of([group.layer_names, skipped])
    count = vllm_config.model_config.get_total_num_hidden_layers()
    parts = [get_pp_indices(count, stage, pp_size) for stage in range(pp_size)]
    return digest_of([parts, getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None)])
