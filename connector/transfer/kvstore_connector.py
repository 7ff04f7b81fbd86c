"""Offers our core to engines of one's own: `KVStoreConnector`. docs/connector.md has an example.

Nothing is decided here: `SchedulerCore` and `WorkerCore` do the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from connector.build import EngineShape, scheduler_side, worker_side
from connector.limits import IDLE_WAIT_S
from connector.messages import BlockEvent, EngineRequest, StepPlan, WorkerReport
from connector.settings import ConnectorSettings
from connector.stats import CountStats
from connector.transfer.base_v1 import (
    ConnectorOutput,
    ForwardContext,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SchedulerOutput,
    VllmConfig,
)
from connector.transfer.engine import EngineInfo
from kvstore import UsageError

if TYPE_CHECKING:
    import torch

    from connector.scheduler.scheduler import SchedulerCore
    from connector.transfer.config import KVTransferConfig
    from connector.worker.worker import WorkerCore


@dataclass(slots=True)
class StoreWorkerMetadata(KVConnectorWorkerMetadata):
    """Carries what the workers tell the scheduler side, once per step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreWorkerMetadata:
        assert isinstance(other, StoreWorkerMetadata)
        self.report.merge(other.report)
        return self


class KVStoreConnector(KVConnectorBase_V1):
    """Saves full KV blocks to the store and loads those that match a new request's prefix.

    A load between steps runs beside the forward, and so does a save. Layer tensors are strided
    `[B, H, N, C]` views: blocks, KV heads, tokens of a block, and the packed K and V of one token
    and head. `take_events` gives `BlockEvent`s, when `EngineShape.events` asks for them.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig = None
    ) -> None:
        """Make one side. `vllm_config.engine_info` is an `EngineInfo`. Raises `UsageError` for
        settings that cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer: KVTransferConfig = vllm_config.kv_transfer_config
        engine: EngineInfo = vllm_config.engine_info
        settings = ConnectorSettings.from_extra(transfer.kv_connector_extra_config)
        shape = _shape(engine, transfer, settings)
        self._between_steps = not settings.layerwise
        self._requests: dict[str, EngineRequest] = {}
        """Requests that the scheduler's side was asked about and that have not finished."""
        self._report = WorkerReport()
        self._scheduler: SchedulerCore | None = None
        self._worker: WorkerCore | None = None
        if role is KVConnectorRole.WORKER:
            if not 0 <= engine.rank < shape.workers:
                limit = f"must be from 0 to {shape.workers - 1}"
                raise UsageError("engine.rank", engine.rank, limit)
            self._worker = worker_side(settings, shape, engine.rank)
            return
        if shape.saves and (engine.pins is None or engine.num_blocks < 1):
            raise UsageError(
                "engine.pins, engine.num_blocks",
                (engine.pins, engine.num_blocks),
                f"must be given when kv_role is {transfer.kv_role}: blocks are saved after the "
                "step",
            )
        self._scheduler = scheduler_side(settings, shape)
        if engine.pins is not None:
            self._scheduler.bind_pins(engine.pins, shape.workers, engine.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a cache is best effort, and a dropped save is a future miss, not a lost
        hand-over."""
        return False

    # Scheduler side

    @property
    def _s(self) -> SchedulerCore:
        assert self._scheduler is not None, "a scheduler call on a worker's connector"
        return self._scheduler

    def on_new_request(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request
        self._s.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._requests[request.request_id] = request
        tokens = self._s.match(request, num_computed_tokens)
        return tokens, bool(tokens) and self._between_steps

    def update_state_after_alloc(
        self, request: EngineRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._s.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        counts = scheduler_output.num_scheduled_tokens
        unknown = sorted(counts.keys() - self._requests.keys())
        if unknown:
            raise UsageError("num_scheduled_tokens", unknown, "call on_new_request for them first")
        scheduled = ((self._requests[request_id], tokens) for request_id, tokens in counts.items())
        tables = scheduler_output.kv_connector_block_state.get_block_ids
        return self._s.plan_step(scheduled, scheduler_output.preempted_req_ids or (), tables)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StoreWorkerMetadata):
            self._s.report(meta.report)
        self._s.loads_ended(connector_output.finished_recving or ())

    def request_finished(
        self, request: EngineRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Note the end of a request. Never asks for the blocks to be kept: saves in flight have
        pinned theirs."""
        self._requests.pop(request.request_id, None)
        self._s.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[BlockEvent]:
        return self._s.take_events()

    def has_pending_push_work(self) -> bool:
        return self._s.has_pending_work()

    def reset_cache(self) -> bool | None:
        return self._s.reset()

    # Worker side

    @property
    def _w(self) -> WorkerCore:
        assert self._worker is not None, "a worker call on the scheduler's connector"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata()
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the transfer threads. Raises `UsageError` for tensors of another shape."""
        self._w.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        if not isinstance(connector_metadata, StepPlan):
            kind = type(connector_metadata).__name__
            raise UsageError("metadata", kind, "must be this connector's own")
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        self._w.cancel_loads(self._plan.dropped_loads)
        self._w.start_loads(self._plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._w.wait_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        self._w.layer_written(layer_name, self._plan.saves)

    def wait_for_save(self) -> None:
        self._w.start_saves(self._plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return what has ended; in a step without a forward, wait `IDLE_WAIT_S` for it."""
        self._w.cancel_loads(finished_req_ids)
        idle = self.has_connector_metadata() and self._plan.idle
        self._report = self._w.poll(IDLE_WAIT_S if idle else 0.0)
        return None, self._report.finished_loads

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._report.invalid_block_ids

    def build_connector_worker_meta(self) -> StoreWorkerMetadata | None:
        report = self._report
        self._report = WorkerReport(invalid_block_ids=report.invalid_block_ids)
        sent = report.for_scheduler()
        return None if sent is None else StoreWorkerMetadata(sent)

    # Both sides

    def get_kv_connector_stats(self) -> CountStats | None:
        return (self._scheduler or self._w).take_stats()

    def shutdown(self) -> None:
        (self._scheduler or self._w).close()


def _shape(
    engine: EngineInfo, transfer: KVTransferConfig, settings: ConnectorSettings
) -> EngineShape:
    """Return the engine's shape with what its role does."""
    shape = engine.shape
    if shape is None:
        raise UsageError("engine.shape", None, "must be an EngineShape")
    if len(shape.groups) != 1:
        raise UsageError(
            "engine.shape.groups",
            len(shape.groups),
            "must be 1: block ids of an engine of one's own name blocks of one table",
        )
    shape = replace(shape, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer)
    shape.layout(settings)  # wrong block sizes are said here, not at the first request
    return shape
