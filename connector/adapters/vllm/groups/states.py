"""Reads the shape of vLLM's state-space groups (Mamba and its kin), finds the states to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from connector.adapters.vllm.groups.runs import state_runs
from connector.layout.geometry import Field, KVGeometry
from connector.layout.topology import TpKVTopology
from connector.messages import StateBlock
from kvstore import UsageError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

    from connector.adapters.vllm.request import HashedRequest

CACHE_MODE = "align"
"""vLLM's only mode in which states are kept for the prefix cache."""


def state_spec(number: int, spec: KVCacheSpec) -> MambaSpec | None:
    """Return the spec of the first layer of group `number`, None when they are not state-space
    layers.

    Raises `UsageError` for states that cannot be stored.
    """
    specs = [spec]
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = list(spec.kv_cache_specs.values())
    first = specs[0]
    if not isinstance(first, MambaSpec):
        return None
    if first.mamba_cache_mode != CACHE_MODE:
        raise UsageError(
            "mamba_cache_mode",
            first.mamba_cache_mode,
            f"must be {CACHE_MODE!r} for group {number}: states of a prefix are kept in no other "
            f"mode. Start vLLM with --enable-prefix-caching --mamba-cache-mode {CACHE_MODE}",
        )
    return first


def state_geometry(spec: MambaSpec, group: KVCacheGroupSpec, pp_size: int) -> KVGeometry:
    return KVGeometry(
        layers=len(group.layer_names),
        heads=1,
        channel_bytes=spec.state_content_size_bytes,
        engine_block_tokens=spec.block_size,
        recurrent=True,
        runs=state_runs(group, pp_size),
    )


def state_topology(spec: MambaSpec, parallel: ParallelConfig) -> TpKVTopology:
    """Return the topology of states: every worker has a part of its own, unless all hold the
    same. Raises `UsageError` where workers compute a prompt's tokens apart."""
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise UsageError(
                name,
                size,
                "must be 1 with state-space layers: it has not been seen which worker has which "
                "state",
            )
    tp_size = parallel.tensor_parallel_size
    heads = 1 if spec.tp_replicated else tp_size
    return TpKVTopology.of(tp_size, parallel.pipeline_parallel_size, heads)


def state_fields(spec: MambaSpec) -> dict[str, Field]:
    """Return what else must match for a state's bytes to mean the same."""
    return {
        "kv_spec": f"{type(spec).__name__}/{spec.mamba_type.name}",
        "state_shapes": str([list(shape) for shape in spec.shapes]),
        "state_dtypes": str([str(dtype) for dtype in spec.dtypes]),
        "conv_layout": "dim first" if is_conv_state_dim_first() else "tokens first",
        # Kernels of other platforms may order a state otherwise.
        "platform": str(current_platform.device_type),
    }


def completed_states(
    block_state: KVConnectorBlockState | None,
    request: HashedRequest,
    numbers: Sequence[int],
    *,
    speculative: bool,
) -> Sequence[StateBlock]:
    """Return the blocks in which this step's forward leaves a state of `request` for good.

    `numbers` are vLLM's of the groups that are stored, in the layout's order.

    Only vLLM knows them: its table of such a group holds one running state,
    null blocks before it and scratch blocks for drafts behind it, and the
    running state's block stays as it is only when a step ends on its boundary.
    What it caches for others it also hands over, in the step that computes it.

    With drafts a state after the prompt is final only when tokens were sampled,
    after the connector's turn: those are left out.
    """
    if block_state is None:
        return ()
    return [
        StateBlock(numbers.index(group), block_id, num_tokens)
        for group, block_id, num_tokens in block_state.boundary_state_offloads.get(
            request.request_id, ()
        )
        if group in numbers and (num_tokens <= request.num_prompt_tokens or not speculative)
    ]
