"""Reads how vLLM's workers share the tokens of a block (context parallelism).

With decode context parallelism (DCP) one block of vLLM's scheduler stands for as many blocks of
memory as there are parts: each worker of those with the same heads has its part of the tokens under
the block's number, runs of `cp_kv_cache_interleave_size` tokens in turn. With prefill context
parallelism (PCP) workers share the computing alone: each keeps what all have computed. A group of
which vLLM says that it is not `dcp_sharded` has all tokens on every worker.
"""

from __future__ import annotations

import copy
import inspect
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from connector.adapters.vllm.hand_over import multi_connector
from connector.layout.geometry import Field
from connector.layout.topology import TpKVTopology, shards_of
from kvstore import UsageError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class TokenParts(NamedTuple):
    """Says how the workers of one KV cache group share its tokens."""

    size: int
    """How many parts there are; 1: every worker has all tokens."""
    interleave: int
    """Tokens of a run, the smallest piece that a worker has."""

    def tokens_per_slot(self, per_state: Fraction) -> Fraction:
        """Return tokens of the sequence for each entry of a worker's, `per_state` of its own."""
        return per_state * self.size


WHOLE = TokenParts(1, 1)


def token_parts(
    spec: KVCacheSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> TokenParts:
    """Return how the tokens of a group with this spec are shared.

    Raises `UsageError` where blocks of one worker do not hold whole runs, or runs no whole entries:
    vLLM itself has no place for such.
    """
    size = int(vllm_config.parallel_config.decode_context_parallel_size)
    if size == 1 or not spec.dcp_sharded:
        return WHOLE
    run = interleave(vllm_config, kv_cache_config)
    entry = max(1, int(spec.tokens_per_state))
    if spec.block_size % run or run % entry:
        raise UsageError(
            "cp_kv_cache_interleave_size",
            run,
            f"must divide the {spec.block_size} tokens of a block and be a multiple of the {entry} "
            f"of an entry, where decode_context_parallel_size is {size}",
        )
    return TokenParts(size, run)


def interleave(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the `cp_kv_cache_interleave_size` that this engine's workers use.

    vLLM 0.32 changes it in its workers, for NixlConnector and for the setting's older name, and
    leaves the scheduler's configuration as it was. 0.33 changes it before either is made.
    """
    parent = multi_connector()
    config = copy.copy(vllm_config if parent is None else parent._vllm_config)
    config.parallel_config = copy.copy(vllm_config.parallel_config)
    adjust = config.adjust_dcp_kv_cache_interleave_size
    if "kv_cache_config" in inspect.signature(adjust).parameters:
        adjust(kv_cache_config)
    return int(config.parallel_config.cp_kv_cache_interleave_size)


def topology_of(
    parallel: ParallelConfig, heads: int, parts: TokenParts
) -> tuple[TpKVTopology, dict[str, Field]]:
    """Return who has which of a group's `heads` and tokens, and what of it is in its namespaces.

    Where workers that share tokens are not known to have the same heads, each counts as having
    a part of its own, which engines with as many workers share.
    """
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    pcp_size = int(parallel.prefill_context_parallel_size)
    if parts.size == 1:
        return TpKVTopology.of(tp_size, pp_size, heads, pcp_size=pcp_size), {}
    fields: dict[str, Field] = {"cp_interleave": parts.interleave}
    same_heads = tp_size // shards_of(tp_size, heads) * pcp_size
    if same_heads % parts.size == 0:
        sizes = {"pcp_size": pcp_size, "dcp_size": parts.size}
        return TpKVTopology.of(tp_size, pp_size, heads, **sizes), fields
    if pcp_size > 1:
        raise UsageError(
            "decode_context_parallel_size",
            parts.size,
            f"must divide the {same_heads} workers that are known to hold the same heads, where "
            "prefill_context_parallel_size is more than 1",
        )
    fields["cp_workers"] = f"{parts.size} of {tp_size}"
    return TpKVTopology.of(tp_size, pp_size), fields
