"""Translates the connector calls of vLLM 0.32 and 0.33 to the core, and does nothing else.

Longer than other files: vLLM wants one class for both sides, and each call is a method of a few
lines.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from connector.adapters.vllm.plugin import of_vllm, register_vllm
from connector.build import scheduler_side, worker_side
from connector.layout.prompt_keys import PromptKeys
from connector.limits import IDLE_WAIT_S
from connector.messages import BlockTables, StateBlock, StepPlan, WorkerReport
from connector.scheduler.lockstep import LockstepScheduler
from connector.scheduler.scheduler import SchedulerCore
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.spi import EngineSocket, Tier

with of_vllm():
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.logger import init_logger
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from connector.adapters.vllm.asked import AskedPrompts
    from connector.adapters.vllm.bystander import Bystander
    from connector.adapters.vllm.engine_hooks import Watcher, watch_engine_core
    from connector.adapters.vllm.events import VllmEvents
    from connector.adapters.vllm.groups.states import completed_states
    from connector.adapters.vllm.hand_over import hand_over, within_multi_connector
    from connector.adapters.vllm.launcher import in_lock_step, lockstep_side
    from connector.adapters.vllm.request import COUNTED, HashedRequest, counts_media, takes_media
    from connector.adapters.vllm.shape import engine_shape, vllm_hash_tokens
    from connector.adapters.vllm.stats import KVStorePromMetrics, KVStoreStats
    from connector.adapters.vllm.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from connector.worker.worker import WorkerCore
    from kvstore import Explanation

logger = init_logger(f"vllm.{__name__}")  # only loggers below vLLM's own are written at INFO
register_vllm()  # for those who name the module: vLLM looks a child's statistics up by name


HIT_SOURCES = {
    Tier.VRAM: CacheHitSource.DEVICE,
    Tier.HOST: CacheHitSource.HOST,
    Tier.DISK: CacheHitSource.DISK,
    Tier.OTHER_HOST: CacheHitSource.P2P,
}
"""vLLM's names of tiers."""


@dataclass
class KVStoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries what the scheduler side tells the workers, once per step."""

    plan: StepPlan


@dataclass
class KVStoreWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries what the workers tell the scheduler side, once per step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreWorkerMetadata)
        self.report.merge(other.report)
        return self


class PoolPins:
    """Holds a reference on blocks of vLLM's pool for each save, as one more request would."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[i] for i in block_ids])


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA, Watcher):  # type: ignore[misc]
    """Saves full KV blocks to the store and loads those that match a new request's prefix."""

    _socket: EngineSocket | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a cache is best effort, and a dropped save is a future miss, not a lost
        hand-over."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        """Return whether graphs must be cut by layer: with `layerwise`, Python runs between the
        layers, and a graph of all of them would skip it."""
        return bool(extra_config.get("layerwise"))

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorSettings.from_extra(transfer.kv_connector_extra_config or {})
        self._config = config
        self._scheduler: SchedulerCore | LockstepScheduler | None = None
        self._worker: WorkerCore | Bystander | None = None
        self._requests: dict[str, HashedRequest] = {}
        self._emptied = False
        """True while vLLM empties its own cache."""
        self._speculative = vllm_config.speculative_config is not None
        self._before_forward: Any = None
        """What loads of the step wait for."""
        self._report = WorkerReport()
        """This worker's report of the step."""
        self._shown = self._report
        """The part of the report that vLLM gets."""
        process = uuid4().hex
        self._numbers: tuple[int, ...] = ()
        """vLLM's numbers of the groups that are stored."""
        try:
            shape = engine_shape(vllm_config, kv_cache_config, config)
            layout = shape.layout(config)
        except UsageError as e:
            if role == KVConnectorRole.SCHEDULER:
                raise
            self._stand_aside(e)
            return
        self._shape = shape
        self._numbers = tuple(group.number for group in shape.groups)
        self._counts_media = counts_media(vllm_config)
        self._events = VllmEvents(vllm_config, kv_cache_config, self._numbers)
        self._hash_tokens = vllm_hash_tokens(vllm_config, kv_cache_config)
        self._block_tokens = layout.block_tokens
        self._prompt_keys = PromptKeys.of_layout(layout)
        if role == KVConnectorRole.SCHEDULER:
            watch_engine_core()
            if in_lock_step(vllm_config):
                self._scheduler = lockstep_side(config, shape)
                process = self._scheduler.engine_id
            else:
                self._scheduler = scheduler_side(config, shape)
            self._scheduler.say_with(logger.info)
            for group in layout.groups:
                logger.info(
                    "kvstore: blocks of %d tokens, %d shards, namespace %s",
                    self._block_tokens,
                    len(group.namespaces),
                    group.namespaces[0],
                )
            for which in shape.left_out:
                logger.info("kvstore: not stored: %s", which)
            if self._counts_media and takes_media(vllm_config):
                logger.warning("kvstore: requests with media are not stored: %s", COUNTED)
        else:
            # Where somebody else starts the processes, ranks count over all engines.
            rank = vllm_config.parallel_config.rank % shape.workers
            try:
                self._worker = worker_side(config, shape, rank)
            except UsageError as e:  # of layers of which the scheduler's side is not told
                self._stand_aside(e)
            if rank == 0:
                # A child of MultiConnector is given a policy of its own, which has no effect.
                _warn(get_current_vllm_config_or_none() or vllm_config)
        self._engine_id = process
        self._is_child = within_multi_connector()
        named = config.weights_id is not None
        self._weights = Weights(vllm_config, process, named=named)

    def _stand_aside(self, why: UsageError) -> None:
        """Let the engine run without this worker's part, or the scheduler's side refuse it."""
        logger.error("kvstore: this worker neither saves nor loads: %s", why)
        groups = self._kv_cache_config
        self._worker = Bystander(
            by_request=len(groups.kv_cache_groups) > 1 or groups.has_mamba_layers,
            layerwise=self._config.layerwise,
        )

    # Scheduler side

    @property
    def _s(self) -> SchedulerCore | LockstepScheduler:
        assert self._scheduler is not None, "a scheduler call on a worker's connector"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            pins, blocks = PoolPins(gpu_block_pool), gpu_block_pool.num_gpu_blocks
            self._s.bind_pins(pins, self._shape.workers, blocks, gpu_block_pool.evict_blocks)
            self._answer_commands(gpu_block_pool)

    def _answer_commands(self, pool: BlockPool) -> None:
        """Listen to `kvstore explain --engine`; in lock step there is no server, nor a question."""
        if self._socket is not None or not isinstance(self._scheduler, SchedulerCore):
            return
        # Else a prefix is in vLLM's own cache not just as far as its blocks are.
        one_group = len(self._kv_cache_config.kv_cache_groups) == 1
        plain = (
            one_group and not self._speculative and not self._shape.layout(self._config).forgetful
        )
        asked = AskedPrompts(
            self._scheduler,
            self._vllm_config,
            self._hash_tokens,
            self._hash_asked,
            pool if plain else None,
        )
        try:
            self._socket = EngineSocket(self._config.run_dir, asked.answer)
        except (UsageError, OSError) as e:
            logger.warning("kvstore: `kvstore explain --engine` finds no engine here: %s", e)

    def _hashed(self, request: Request) -> HashedRequest:
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._new_hashed(request, self._weights.of(request))
            self._requests[request.request_id] = known
        return known

    def _new_hashed(self, request: Request, computed_with: tuple[str, ...]) -> HashedRequest:
        return HashedRequest(
            request,
            self._block_tokens,
            self._hash_tokens,
            computed_with,
            prompts_only=self._shape.prompts_only,
            left_out=self._left_out,
        )

    def _hash_asked(self, request: Request) -> HashedRequest | None:
        computed_with = self._weights.seen_by(request)
        return None if computed_with is None else self._new_hashed(request, computed_with)

    def _left_out(self, request: Request) -> bool:
        """Return whether names of the request's media may stand for others elsewhere."""
        unsalted = self._config.media_needs_salt and not request.cache_salt
        return bool(request.mm_features) and (self._counts_media or unsalted)

    def on_new_request(self, request: Request) -> None:
        self._s.on_new_request(self._hashed(request), loads=not _wants_all_computed(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        hashed = self._hashed(request)
        if _wants_all_computed(request):
            return 0, False
        tokens = self._s.match(hashed, num_computed_tokens)
        return tokens, bool(tokens) and not self._config.layerwise

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._s.allocated(
            self._hashed(request),
            lambda: self._stored(blocks.get_block_ids()),
            num_external_tokens,
        )

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        hashed = self._hashed(request)
        tiers = self._s.hit_sources(hashed.request_id, num_external_tokens)
        sources = {HIT_SOURCES[tier]: tokens for tier, tokens in tiers.items()}
        untold = num_external_tokens - sum(sources.values())
        if untold:
            sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = untold
        return sources

    def _stored(self, tables: BlockTables) -> BlockTables:
        """Return the tables of those of vLLM's groups that are stored."""
        return tuple(tables[number] for number in self._numbers)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state

        def block_ids(request_id: str) -> BlockTables | None:
            tables = state.get_block_ids(request_id) if state is not None else None
            return None if tables is None else self._stored(tables)

        def states(request_id: str) -> Sequence[StateBlock]:
            return completed_states(
                state, self._requests[request_id], self._numbers, speculative=self._speculative
            )

        requests = self._requests
        scheduled = (
            (requests[request_id], tokens)
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
            if request_id in requests
        )
        # Resumed requests need nothing special: they are told from running
        # ones by neither runner's lists, only by having been preempted.
        preempted = scheduler_output.preempted_req_ids or ()
        return KVStoreMetadata(self._s.plan_step(scheduled, preempted, block_ids, states))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._s.report(meta.report)
        self._s.loads_ended(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        # Nothing to delay: saves in flight hold their own reference on the blocks.
        hashed = self._requests.pop(request.request_id, None)
        handed = None if self._is_child else hand_over(self._s, request, self._engine_id)
        self._s.finished(request.request_id)
        asked = self._keys_asked(request, hashed)
        return False, {**(handed or {}), **(asked or {})} or None

    def _keys_asked(
        self, request: Request, hashed: HashedRequest | None
    ) -> dict[str, object] | None:
        """Return what a router wants to know in the response (`connector.layout.prompt_keys`)."""
        params = request.kv_transfer_params
        # Taken out: vLLM allows an answer of one connector only, of several in a MultiConnector.
        if not params or params.pop(PromptKeys.ASKED, None) is not True:
            return None
        if hashed is None or self._prompt_keys is None:
            return None
        # Of the prompt alone: the KV of the last token generated is never computed.
        full = hashed.num_prompt_tokens // self._block_tokens
        return {PromptKeys.ASKED: self._prompt_keys.answer(hashed.block_hashes[:full])}

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.of(self._s.take_events())

    def explain(self, request_id: str) -> Explanation | None:
        """Return why a request of this engine did not hit more (docs/explain.md); None: not
        known."""
        return self._s.explain(request_id)

    def has_pending_push_work(self) -> bool:
        return self._s.has_pending_work()

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        if not self._emptied:
            return self._s.reset()
        # Sleep or pause: what other engines have stored is none of its business.
        self._s.own_cache_emptied()
        return True

    # What vLLM tells no connector (engine_hooks.py)

    @contextmanager
    def own_cache_emptied(self) -> Iterator[None]:
        self._emptied = True
        try:
            yield
        finally:
            self._emptied = False

    def weights_may_have_changed(self) -> None:
        self._weights.may_have_changed()
        self._new_weights("may be others from here on")

    def weights_named(self, version: str) -> None:
        self._weights.name(version)
        self._new_weights(f"are version {version!r} from here on")

    def _new_weights(self, what: str) -> None:
        self._requests.clear()  # their hashes are of other weights
        self._s.weights_changed()
        shared = "set weights_id and a weight version to share it"
        logger.info("kvstore: the weights %s: nothing older is loaded; %s", what, shared)

    def adapter_changes(self, lora_id: int) -> None:
        self._weights.adapter_changes(lora_id)

    @property
    def saves_in_flight(self) -> bool:
        return self._scheduler is not None and self._s.has_pending_work()

    def saves_ended(self, report: WorkerReport) -> None:
        self._s.report(report)
        if isinstance(self._s, LockstepScheduler):
            self._s.settle()

    def end_saves(self, timeout_s: float) -> WorkerReport:
        return self._w.end_saves(timeout_s)

    @property
    def loads_under_way(self) -> dict[str, int]:
        return self._s.loads_under_way if self._scheduler is not None else {}

    def ended_everywhere(self, job_ids: set[int]) -> set[int]:
        side = self._s
        return side.agreed(job_ids) if isinstance(side, LockstepScheduler) else job_ids

    def end_loads(self, job_ids: set[int], timeout_s: float) -> set[int]:
        return self._w.end_loads(job_ids, timeout_s)

    # Worker side

    @property
    def _w(self) -> WorkerCore | Bystander:
        assert self._worker is not None, "a worker call on the scheduler's connector"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVStoreMetadata)
        return metadata.plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        stored = (groups[number].layer_names for number in self._numbers)
        taken = [{name: kv_caches[name] for name in names} for names in stored]
        try:
            self._w.register_kv_caches(*taken)
        except UsageError as e:
            self._w.close()
            self._stand_aside(e)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # vLLM launches the forward before it starts loads, and that has nothing to do with them.
        self._before_forward = self._w.mark_ready() if self._plan.loads else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        self._w.cancel_loads(self._plan.dropped_loads)
        self._w.start_loads(self._plan.loads, self._before_forward)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._w.wait_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: object,
    ) -> None:
        self._w.layer_written(layer_name, self._plan.saves)

    def wait_for_save(self) -> None:
        self._w.start_saves(self._plan.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._w.cancel_loads(finished_req_ids)
        self._report = self._w.poll(IDLE_WAIT_S if self._plan.idle else 0.0)
        self._shown = self._plan.reported or self._report
        return KVConnectorTransferResults(
            finished_recving=self._shown.finished_loads,
            failed_recving=self._shown.failed_requests,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._shown.invalid_block_ids

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        own, self._report = self._report, WorkerReport()
        # In lock step vLLM was not told of the rest.
        sent = own.for_scheduler() if self._shown is own else own
        return None if sent is None else KVStoreWorkerMetadata(sent)

    # Both sides

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        side = self._scheduler or self._worker
        counts = side.take_stats() if side is not None else None
        return None if counts is None else KVStoreStats(counts.to_dict())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> KVStoreStats:
        return KVStoreStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVStorePromMetrics:
        return KVStorePromMetrics(*args)

    def shutdown(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def _wants_all_computed(request: Request) -> bool:
    """Return whether vLLM returns something of each prompt token, or does not say (pooling)."""
    pooled = request.pooling_params
    unsaid = pooled is not None and pooled.skip_reading_prefix_cache is None
    return bool(request.skip_reading_prefix_cache) or unsaid


def _warn(vllm_config: VllmConfig) -> None:
    """Log, once at start, settings with which the store works badly."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.error(
            "\n%s\nkvstore: kv_load_failure_policy is %r: a block that cannot be loaded FAILS its "
            'request.\nSet "kv_load_failure_policy": "recompute" at the top level of '
            "--kv-transfer-config, so that it is computed instead.\n%s",
            "!" * 78,
            policy,
            "!" * 78,
        )
