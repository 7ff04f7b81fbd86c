"""Makes what an engine of one's own tells its connectors, with the names of vLLM's objects.

These stand-ins have what a connector reads of a step with one KV cache group; a connector that
reads more of vLLM's objects fails with an AttributeError that names it. The engine's requests go
through as they are: `prompt_token_ids`, `mm_features` and whatever else a connector reads of one
is the engine's to have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from connector.transfer.base_v1 import (
    ForwardContext,
    KVCacheConfig,
    KVConnectorBase_V1,
    SupportsHMA,
    VllmConfig,
)
from kvstore import UsageError

if TYPE_CHECKING:
    import torch

    from connector.build import EngineShape
    from connector.messages import BlockPins, EngineRequest
    from connector.transfer.config import KVTransferConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Holds what an engine says about itself when it makes a side of a connector.

    `KVStoreConnector` reads the first four fields, connectors of vLLM's kind the last two; a
    MultiConnector over both wants all of them.
    """

    shape: EngineShape | None = None
    """The same on every side and in every engine that is to share KV. Whether it
    loads and saves comes from the role in the config."""
    rank: int = 0
    """Worker side: this worker's number, pipeline-major."""
    pins: BlockPins | None = None
    """Scheduler side: how to keep blocks from being reused while a save reads them.
    Required unless the role is kv_consumer."""
    num_blocks: int = 0
    """Scheduler side: engine blocks there are; saves may pin a part of them."""
    vllm_config: VllmConfig = None
    """Any object that has what connectors read of vLLM's configuration; None: one that has
    `cache_config.block_size`, as the shape says it."""
    kv_cache_config: KVCacheConfig = None

    def config_with(self, transfer: KVTransferConfig) -> VllmConfig:
        """Return a copy of `vllm_config` for one connector: this in `engine_info`, and `transfer`
        in `kv_transfer_config`."""
        config = copy.copy(self.vllm_config)
        if config is None:
            config = SimpleNamespace()
            if self.shape is not None:
                block_size = self.shape.groups[0].geometry.engine_block_tokens
                config.cache_config = SimpleNamespace(block_size=block_size)
        config.engine_info = self
        config.kv_transfer_config = transfer
        return config


V1EngineInfo = EngineInfo
"""Its former name, for connectors of vLLM's kind."""


class EngineBlocks:
    """Stands for vLLM's `KVCacheBlocks`: the blocks of a request."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.blocks = ([SimpleNamespace(block_id=i, is_null=False) for i in block_ids],)

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        if allow_none and not self.blocks[0]:
            return None
        return ([block.block_id for block in self.blocks[0]],)


def forward_context(kv_caches: Mapping[str, torch.Tensor]) -> ForwardContext:
    """Return what stands for vLLM's `ForwardContext`: the KV tensors by layer."""
    layers = {name: SimpleNamespace(kv_cache=kv) for name, kv in kv_caches.items()}
    return SimpleNamespace(no_compile_layers=layers, attn_metadata=dict.fromkeys(layers))


def request_finished(
    connector: KVConnectorBase_V1, request: EngineRequest, block_ids: tuple[list[int], ...]
) -> tuple[bool, dict[str, object] | None]:
    """Call the connector's `request_finished`, or its call for groups where it has one.

    Raises `UsageError` for blocks of several groups where it has none.
    """
    if isinstance(connector, SupportsHMA):
        return connector.request_finished_all_groups(request, block_ids)
    if len(block_ids) != 1:
        taker = type(connector).__name__
        raise UsageError("block_ids", f"{len(block_ids)} groups", f"{taker} takes blocks of one")
    return connector.request_finished(request, block_ids[0])


class _Scheduled(NamedTuple):
    request: EngineRequest
    tokens: int
    table: Sequence[int]
    known: int | None
    """Blocks of the table that connectors know; None: the request is new to them."""
    resumed: bool
    """Whether it was preempted since, so that all of it is given again."""


class SchedulerStep(SimpleNamespace):
    """Stands for vLLM's `SchedulerOutput`. The lists of requests are made when they are read:
    the engine's thread makes a step, and `KVStoreConnector` reads neither."""

    scheduled: list[_Scheduled]

    @cached_property
    def scheduled_new_reqs(self) -> list[SimpleNamespace]:
        """Return what stands for vLLM's `NewRequestData`."""
        return [
            SimpleNamespace(
                req_id=request.request_id,
                prompt_token_ids=getattr(request, "prompt_token_ids", None),
                mm_features=getattr(request, "mm_features", []),
                sampling_params=getattr(request, "sampling_params", None),
                lora_request=getattr(request, "lora_request", None),
                block_ids=(list(table),),
                num_computed_tokens=request.num_computed_tokens,
            )
            for request, _, table, known, _ in self.scheduled
            if known is None
        ]

    @cached_property
    def scheduled_cached_reqs(self) -> SimpleNamespace:
        """Return what stands for vLLM's `CachedRequestData`."""
        cached = SimpleNamespace(
            req_ids=[],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[],
            num_computed_tokens=[],
            num_output_tokens=[],
        )
        for request, tokens, table, known, resumed in self.scheduled:
            if known is None:
                continue
            start = request.num_computed_tokens
            all_token_ids = getattr(request, "all_token_ids", ())
            added = list(table if resumed else table[known:])
            if resumed:
                cached.resumed_req_ids.add(request.request_id)
                cached.all_token_ids[request.request_id] = list(all_token_ids)
            cached.req_ids.append(request.request_id)
            cached.new_token_ids.append(list(all_token_ids[start : start + tokens]))
            cached.new_block_ids.append((added,) if added else None)
            cached.num_computed_tokens.append(start)
            cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
        cached.num_reqs = len(cached.req_ids)
        return cached


class SchedulerSteps:
    """Makes the steps of one scheduler, one after another."""

    def __init__(self) -> None:
        self._blocks_told: dict[str, int] = {}
        """Scheduled request -> number of its blocks that connectors know."""
        self._preempted: set[str] = set()

    def next(
        self,
        scheduled: Iterable[tuple[EngineRequest, int]],
        block_ids: Callable[[str], Sequence[int] | None],
        *,
        preempted: Iterable[str] = (),
        finished: Iterable[str] = (),
    ) -> SchedulerStep:
        """Tell what the engine's scheduler has decided for one step.

        `scheduled` has each request of the step and how many of its tokens the forward computes;
        `block_ids` gives a request's block table, in token order, or None when it has none.
        `preempted` are requests that have lost their blocks since the last step, `finished` those
        that have ended since.
        """
        gone, lost = set(finished), set(preempted)
        for request_id in gone:
            self._blocks_told.pop(request_id, None)
        waiting = {r for r in self._preempted | lost if r in self._blocks_told}
        counts: dict[str, int] = {}
        told: list[_Scheduled] = []
        for request, tokens in scheduled:
            request_id = request.request_id
            counts[request_id] = tokens
            table = block_ids(request_id) or ()
            known = self._blocks_told.get(request_id)
            told.append(_Scheduled(request, tokens, table, known, request_id in waiting))
            self._blocks_told[request_id] = len(table)
        self._preempted = waiting - counts.keys()

        def tables(request_id: str) -> tuple[list[int], ...] | None:
            table = block_ids(request_id)
            return None if table is None else (list(table),)

        return SchedulerStep(
            scheduled=told,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=gone,
            preempted_req_ids=lost,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=None,
            kv_connector_block_state=SimpleNamespace(
                req_ids=counts.keys(), get_block_ids=tables, boundary_state_offloads={}
            ),
        )
