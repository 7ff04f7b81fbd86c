"""Translates block events of the scheduler side to vLLM's KV cache events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    resolve_dcp_kv_block_size,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from connector.adapters.vllm.shape import vllm_hash_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from connector.messages import BlockEvent

PLACE = {"medium": MEDIUM_CPU, "locality": "LOCAL"}
"""Where the blocks are: saves go to a memory node of the engine's own host. No `ownership`:
Dynamo's routers pass over every event that has one (docs/dynamo.md)."""


class VllmEvents:
    """Tells one event per store block, in blocks and hashes of vLLM's own, so that routers know the
    block again from the events of vLLM's own cache."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, numbers: Sequence[int]
    ) -> None:
        """`numbers` are vLLM's of the groups that are stored, in the layout's order."""
        self._numbers = tuple(numbers)
        self._groups = kv_cache_config.kv_cache_groups
        self._hash_tokens = vllm_hash_tokens(vllm_config, kv_cache_config)
        self._dcp_size = int(vllm_config.parallel_config.decode_context_parallel_size)

    def of(self, events: Iterable[BlockEvent]) -> Iterator[BlockStored | BlockRemoved]:
        for event in events:
            made = self._one(event)
            if made is not None:
                yield made

    def _one(self, event: BlockEvent) -> BlockStored | BlockRemoved | None:
        """Return vLLM's event; None when the request has other tokens at that block by now."""
        hashed: Any = event.request
        if tuple(hashed.block_hashes[event.block : event.block + 1]) != (event.block_hash,):
            return None
        request = hashed.vllm_request
        number = self._numbers[event.group]
        spec = self._groups[number].kv_cache_spec
        size = resolve_dcp_kv_block_size(spec, self._dcp_size)
        hashes = resolve_block_hashes(request.block_hashes, self._hash_tokens, size)
        first_token, end_token = hashed.tokens_of(event.block)
        first, end = first_token // size, end_token // size
        if len(hashes) < end:
            return None
        names = [maybe_convert_block_hash(h) for h in hashes[first:end]]
        if not event.stored:
            return BlockRemoved(block_hashes=names, group_idx=number, **PLACE)
        lora = request.lora_request
        extra_keys = [
            generate_block_hash_extra_keys(request, at, at + size, 0)[0]
            for at in range(first_token, end_token, size)
        ]
        return BlockStored(
            block_hashes=names,
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first_token:end_token]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra_keys),
            group_idx=number,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            **PLACE,
        )
