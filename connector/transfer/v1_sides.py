"""Runs a connector of vLLM's kind in an engine of ours: two sides over one `KVConnectorBase_V1`.

Each call of `connector.transfer.base` becomes the call of vLLM's interface that means the same,
with stand-ins of what vLLM's scheduler and model runner hand over: blocks, the scheduler's
output, the forward's context. They have what a connector reads of a step with one KV cache
group; a connector that reads more of vLLM's objects fails with an AttributeError that names it.
The engine's requests go through as they are: `prompt_token_ids`, `mm_features` and whatever else
a connector reads of one is the engine's to have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

from connector.transfer.base import (
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerStep,
    TransferResults,
)
from connector.transfer.base_v1 import SupportsHMA
from kvstore import UsageError

if TYPE_CHECKING:
    import torch

    from connector.messages import EngineRequest
    from connector.transfer.base import (
        KVCacheEvents,
        KVConnectorRole,
        KVConnectorStats,
        KVConnectorWorkerMetadata,
        StepMetadata,
    )
    from connector.transfer.base_v1 import KVCacheConfig, KVConnectorBase_V1, VllmConfig
    from connector.transfer.config import KVTransferConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class V1EngineInfo:
    """Holds what a connector of vLLM's kind is constructed with."""

    vllm_config: VllmConfig
    """Any object that has what the connector reads of vLLM's configuration, such as
    `cache_config.block_size`; its `kv_transfer_config` is set in a copy."""
    kv_cache_config: KVCacheConfig = None

    def arguments(
        self, config: KVTransferConfig, role: KVConnectorRole
    ) -> tuple[VllmConfig, KVConnectorRole, KVCacheConfig]:
        """Return the arguments of the connector's constructor."""
        vllm_config = copy.copy(self.vllm_config)
        vllm_config.kv_transfer_config = config
        return vllm_config, role, self.kv_cache_config


@dataclass(frozen=True, slots=True)
class _Block:
    block_id: int
    is_null: bool = False


class _Blocks:
    """Stands for vLLM's `KVCacheBlocks` of one group."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.blocks = ([_Block(block_id) for block_id in block_ids],)

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        if allow_none and not self.blocks[0]:
            return None
        return ([block.block_id for block in self.blocks[0]],)


@dataclass(slots=True)
class _CachedRequests:
    """Stands for vLLM's `CachedRequestData`: scheduled before, or resumed after a preemption."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


class V1Scheduler(KVConnectorScheduler):
    """Implements `KVConnectorScheduler` over a connector of vLLM's kind."""

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self.connector = connector
        self._blocks_told: dict[str, int] = {}
        """By request that has been scheduled: of how many blocks the connector knows."""
        self._preempted: set[str] = set()
        self._finished: set[str] = set()
        """Since the last step."""

    def on_new_request(self, request: EngineRequest) -> None:
        self.connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.connector.update_state_after_alloc(request, _Blocks(block_ids), num_external_tokens)

    def build_connector_meta(self, step: SchedulerStep) -> StepMetadata:
        self._preempted.update(r for r in step.preempted if r in self._blocks_told)
        new: list[SimpleNamespace] = []
        cached = _CachedRequests()
        for request, tokens in step.scheduled:
            request_id = request.request_id
            table = list(step.block_ids(request_id) or ())
            known = self._blocks_told.get(request_id)
            self._blocks_told[request_id] = len(table)
            if known is None:
                new.append(_new_request(request, table))
            else:
                self._add_cached(cached, request, tokens, table, known)
        counts = {request.request_id: tokens for request, tokens in step.scheduled}
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self._finished,
            preempted_req_ids=set(step.preempted),
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=None,
        )
        self._finished = set()
        return self.connector.build_connector_meta(output)

    def _add_cached(
        self,
        cached: _CachedRequests,
        request: EngineRequest,
        tokens: int,
        table: list[int],
        known: int,
    ) -> None:
        request_id = request.request_id
        resumed = request_id in self._preempted
        self._preempted.discard(request_id)
        added = table if resumed else table[known:]
        everything = list(getattr(request, "all_token_ids", ()))
        start = request.num_computed_tokens
        if resumed:
            cached.resumed_req_ids.add(request_id)
            cached.all_token_ids[request_id] = everything
        cached.req_ids.append(request_id)
        cached.new_token_ids.append(everything[start : start + tokens])
        cached.new_block_ids.append((added,) if added else None)
        cached.num_computed_tokens.append(start)
        cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.connector.update_connector_output(output)

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, object] | None]:
        request_id = request.request_id
        self._blocks_told.pop(request_id, None)
        self._preempted.discard(request_id)
        self._finished.add(request_id)
        if isinstance(self.connector, SupportsHMA):  # as vLLM does
            return self.connector.request_finished_all_groups(request, (list(block_ids),))
        return self.connector.request_finished(request, list(block_ids))

    def take_events(self) -> Iterable[object]:
        return self.connector.take_events()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.connector.get_kv_connector_stats()

    def has_pending_work(self) -> bool:
        return self.connector.has_pending_push_work()

    def reset_cache(self) -> bool | None:
        return self.connector.reset_cache()

    def shutdown(self) -> None:
        self.connector.shutdown()


def _new_request(request: EngineRequest, table: list[int]) -> SimpleNamespace:
    """Stands for vLLM's `NewRequestData`."""
    return SimpleNamespace(
        req_id=request.request_id,
        prompt_token_ids=getattr(request, "prompt_token_ids", None),
        mm_features=getattr(request, "mm_features", []),
        sampling_params=getattr(request, "sampling_params", None),
        lora_request=getattr(request, "lora_request", None),
        block_ids=(table,),
        num_computed_tokens=request.num_computed_tokens,
    )


class V1Worker(KVConnectorWorker):
    """Implements `KVConnectorWorker` over a connector of vLLM's kind."""

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self.connector = connector
        self._layers: dict[str, SimpleNamespace] = {}

    def get_required_kvcache_layout(self) -> str | None:
        return type(self.connector).get_required_kvcache_layout(self.connector._vllm_config)

    def get_finished_count(self) -> int | None:
        return self.connector.get_finished_count()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Layer tensors as `[B, H, N, C]` views, which is what vLLM gives its connectors."""
        self._layers = {name: SimpleNamespace(kv_cache=kv) for name, kv in kv_caches.items()}
        self.connector.register_kv_caches(dict(kv_caches))

    def bind_connector_metadata(self, metadata: StepMetadata) -> None:
        self.connector.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        self.connector.clear_connector_metadata()

    def has_connector_metadata(self) -> bool:
        return self.connector.has_connector_metadata()

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        self.connector.handle_preemptions(metadata)

    def start_load_kv(self) -> None:
        if not self.connector.has_connector_metadata():
            raise UsageError("metadata", None, "call bind_connector_metadata first in every step")
        context = SimpleNamespace(
            no_compile_layers=self._layers, attn_metadata=dict.fromkeys(self._layers)
        )
        self.connector.start_load_kv(context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.connector.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        self.connector.save_kv_layer(layer_name, kv_layer, None)

    def wait_for_save(self) -> None:
        self.connector.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> TransferResults:
        results = self.connector.get_transfer_results(finished_req_ids)
        return TransferResults(
            results.finished_sending, results.finished_recving, results.failed_recving
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.connector.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.connector.build_connector_worker_meta()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.connector.get_kv_connector_stats()

    def get_kv_cache_events(self) -> KVCacheEvents | None:
        return self.connector.get_kv_connector_kv_cache_events()

    def shutdown(self) -> None:
        self.connector.shutdown()
