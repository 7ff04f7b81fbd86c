"""Offers our core through the protocols of `connector.transfer.base`: `KVStoreConnector`.

For people who write their own engine; docs/connector.md has an example. Nothing
is decided here: `SchedulerCore` and `WorkerCore` do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from connector.build import EngineShape, scheduler_side, worker_side
from connector.limits import IDLE_WAIT_S
from connector.messages import BlockEvent, BlockPins, EngineRequest, StepPlan, WorkerReport
from connector.settings import ConnectorSettings
from connector.stats import CountStats
from connector.transfer.base import (
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerStep,
    TransferResults,
)
from kvstore import UsageError

if TYPE_CHECKING:
    import torch

    from connector.scheduler.scheduler import SchedulerCore
    from connector.transfer.config import KVTransferConfig
    from connector.worker.worker import WorkerCore


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Holds what an engine says about itself when it makes a side of `KVStoreConnector`."""

    shape: EngineShape
    """The same on every side and in every engine that is to share KV. Whether it
    loads and saves comes from the role in the config."""
    rank: int = 0
    """Worker side: this worker's number, pipeline-major."""
    pins: BlockPins | None = None
    """Scheduler side: how to keep blocks from being reused while a save reads them.
    Required unless the role is kv_consumer."""
    num_blocks: int = 0
    """Scheduler side: engine blocks there are; saves may pin a part of them."""


@dataclass(slots=True)
class StoreWorkerMetadata:
    """Carries what the workers tell the scheduler side, once per step."""

    report: WorkerReport

    def aggregate(self, other: StoreWorkerMetadata) -> StoreWorkerMetadata:
        self.report.merge(other.report)
        return self


class KVStoreConnector:
    """Saves full KV blocks to the store and loads those that match a new request's prefix."""

    @classmethod
    def make_scheduler(
        cls, config: KVTransferConfig, engine: EngineInfo
    ) -> KVStoreConnectorScheduler:
        """Return the scheduler side. Raises `UsageError` for settings that cannot work."""
        settings, shape = _read(config, engine)
        if shape.saves and (engine.pins is None or engine.num_blocks < 1):
            raise UsageError(
                "engine.pins, engine.num_blocks",
                (engine.pins, engine.num_blocks),
                f"must be given when kv_role is {config.kv_role}: blocks are saved after the step",
            )
        core = scheduler_side(settings, shape)
        if engine.pins is not None:
            core.bind_pins(engine.pins, shape.workers, engine.num_blocks)
        return KVStoreConnectorScheduler(core, between_steps=not settings.layerwise)

    @classmethod
    def make_worker(cls, config: KVTransferConfig, engine: EngineInfo) -> KVStoreConnectorWorker:
        """Return the worker side of worker `engine.rank`. Raises `UsageError` as
        `make_scheduler`."""
        settings, shape = _read(config, engine)
        if not 0 <= engine.rank < shape.workers:
            raise UsageError("engine.rank", engine.rank, f"must be from 0 to {shape.workers - 1}")
        return KVStoreConnectorWorker(worker_side(settings, shape, engine.rank))


def _read(config: KVTransferConfig, engine: EngineInfo) -> tuple[ConnectorSettings, EngineShape]:
    if not isinstance(engine, EngineInfo):
        raise UsageError("engine", type(engine).__name__, "must be an EngineInfo")
    settings = ConnectorSettings.from_extra(config.kv_connector_extra_config)
    if len(engine.shape.groups) != 1:
        raise UsageError(
            "engine.shape.groups",
            len(engine.shape.groups),
            "must be 1: block ids of this protocol name blocks of one table",
        )
    shape = replace(
        engine.shape,
        loads=config.is_kv_consumer,
        saves=config.is_kv_producer,
    )
    shape.layout(settings)  # wrong block sizes are said here, not at the first request
    return settings, shape


class KVStoreConnectorScheduler(KVConnectorScheduler):
    """Implements `KVConnectorScheduler` over a `SchedulerCore`."""

    def __init__(self, core: SchedulerCore, *, between_steps: bool = True) -> None:
        """`between_steps`: loads have steps of their own, else they are part of the forward's."""
        self._core = core
        self._between_steps = between_steps

    def on_new_request(self, request: EngineRequest) -> None:
        self._core.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._core.match(request, num_computed_tokens)
        return tokens, bool(tokens) and self._between_steps

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self._core.allocated(request, lambda: (block_ids,), num_external_tokens)

    def build_connector_meta(self, step: SchedulerStep) -> StepPlan:
        def tables(request_id: str) -> Sequence[Sequence[int]] | None:
            block_ids = step.block_ids(request_id)
            return None if block_ids is None else (block_ids,)

        return self._core.plan_step(step.scheduled, step.preempted, tables)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, StoreWorkerMetadata):
            self._core.report(meta.report)
        self._core.loads_ended(output.finished_recving or ())

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Never asks for the blocks to be kept: saves in flight have pinned theirs."""
        self._core.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[BlockEvent]:
        """`BlockEvent`s, when `EngineShape.events` asks for them."""
        return self._core.take_events()

    def get_kv_connector_stats(self) -> CountStats | None:
        return self._core.take_stats()

    def has_pending_work(self) -> bool:
        return self._core.has_pending_work()

    def reset_cache(self) -> bool | None:
        return self._core.reset()

    def shutdown(self) -> None:
        self._core.close()


class KVStoreConnectorWorker(KVConnectorWorker):
    """Implements `KVConnectorWorker` over a `WorkerCore`. Loads and saves run beside the
    forward."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._plan: StepPlan | None = None
        self._report = WorkerReport()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Layer tensors as strided `[B, H, N, C]` views: blocks, KV heads, tokens of a block,
        and the packed K and V of one token and head. Starts the transfer threads."""
        self._core.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, metadata: object) -> None:
        if not isinstance(metadata, StepPlan):
            raise UsageError("metadata", type(metadata).__name__, "must be this connector's own")
        self._plan = metadata

    def clear_connector_metadata(self) -> None:
        self._plan = None

    def has_connector_metadata(self) -> bool:
        return self._plan is not None

    def start_load_kv(self) -> None:
        self._core.cancel_loads(self._bound().dropped_loads)
        self._core.start_loads(self._bound().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._core.wait_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        self._core.layer_written(layer_name, self._bound().saves)

    def wait_for_save(self) -> None:
        self._core.start_saves(self._bound().saves)

    def get_finished(self, finished_req_ids: set[str]) -> TransferResults:
        """Return what has ended; in a step without a forward, wait `IDLE_WAIT_S` for it."""
        self._core.cancel_loads(finished_req_ids)
        idle = self._plan is not None and self._plan.idle
        self._report = self._core.poll(IDLE_WAIT_S if idle else 0.0)
        return TransferResults(finished_recving=self._report.finished_loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._report.invalid_block_ids

    def build_connector_worker_meta(self) -> StoreWorkerMetadata | None:
        report = self._report
        self._report = WorkerReport(invalid_block_ids=report.invalid_block_ids)
        said = report.for_scheduler()
        return None if said is None else StoreWorkerMetadata(said)

    def get_kv_connector_stats(self) -> CountStats | None:
        return self._core.take_stats()

    def shutdown(self) -> None:
        self._core.close()

    def _bound(self) -> StepPlan:
        if self._plan is None:
            raise UsageError("metadata", None, "call bind_connector_metadata first in every step")
        return self._plan
