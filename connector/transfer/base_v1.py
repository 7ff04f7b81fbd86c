"""Defines what an engine asks of a connector: the base class of vLLM's connectors, without vLLM.

`KVConnectorBase_V1` has the constructor, the calls and the answers by default of the class of
that name in vLLM 0.32 and 0.33; a connector that imports it and its neighbours from here instead
of from `vllm.distributed.kv_transfer.kv_connector.v1.base` is otherwise unchanged. In which order
an engine makes the calls stands in `connector.transfer.base`. What engines have of their own
(requests, blocks, configuration) has vLLM's names here, and no type: a connector reads of it what
it likes. `connector.transfer.engine` makes them for an engine without vLLM.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore import UsageError

if TYPE_CHECKING:
    import torch

    from connector.transfer.base import KVCacheEvents, KVConnectorStats

# An engine's own. A connector narrows them in its signatures, so they can be no protocols.
VllmConfig: TypeAlias = Any
KVCacheConfig: TypeAlias = Any
KVCacheManager: TypeAlias = Any
KVCacheBlocks: TypeAlias = Any
BlockPool: TypeAlias = Any
Request: TypeAlias = Any
SchedulerOutput: TypeAlias = Any
ConnectorOutput: TypeAlias = Any
ForwardContext: TypeAlias = Any
AttentionMetadata: TypeAlias = Any
HandshakeMetadata: TypeAlias = Any
CacheHitSource: TypeAlias = Any
StepMetadata: TypeAlias = Any
"""What a connector's scheduler side sends its workers for a step: an object of a class of the
connector's own, picklable, which nobody else reads."""

CopyBlocksOp = Callable[..., None]
"""Copies blocks between host and device: source, destination, ids in each, direction."""


class KVConnectorRole(enum.Enum):
    """Names a side of a connector: an engine makes one for its scheduler, one in each worker."""

    SCHEDULER = 0
    WORKER = 1


@dataclass
class KVConnectorTransferResults:
    """Names the requests whose transfers ended on a worker; those that failed to be received
    are in `finished_recving` too."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024  # as in vLLM: only a name
    """Carries what workers of two engines exchange before the first transfer."""


class KVConnectorMetadata(ABC):  # noqa: B024  # as in vLLM: only a name
    """Carries what the scheduler side tells its workers for one step."""


class KVConnectorWorkerMetadata(ABC):
    """Carries what one worker tells the scheduler side about a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Put both into one. May change and return `self`; `other` is of the same class."""


class SupportsHMA(ABC):
    """Marks connectors that take block ids of several KV cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """Do as `request_finished`, with one list of blocks a group."""


def supports_hma(connector: object) -> bool:
    """Return whether a connector, or a class of connectors, takes several KV cache groups."""
    kind = connector if isinstance(connector, type) else type(connector)
    return issubclass(kind, SupportsHMA)


class KVConnectorBase_V1(ABC):  # noqa: N801  # vLLM's name
    """Base of connectors of vLLM's kind: one class for both sides, told its role.

    The abstract calls are those a connector must have; the others have vLLM's answers.
    """

    _cache_hit_source: CacheHitSource = "external_unspecified"

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig = None
    ) -> None:
        """`vllm_config` is the engine's configuration, `kv_cache_config` what its KV cache is
        made of; the first releases of vLLM did not give the latter."""
        if getattr(vllm_config, "kv_transfer_config", None) is None:
            raise UsageError("vllm_config.kv_transfer_config", None, "must be set for a connector")
        self._connector_metadata: StepMetadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._kv_cache_manager: KVCacheManager = None
        self._role = role

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    # Worker side

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Start this step's loads."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's KV that this forward needs is in place."""

    @abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: object,
    ) -> None:
        """Note that the forward has written this layer's KV."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Start what is left to save: the forward is done. Blocks that are still read after
        this call are the connector's to protect."""

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        return None

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Take what the scheduler side made for this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget it: the step is over."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> StepMetadata:
        if self._connector_metadata is None:
            raise UsageError("metadata", None, "call bind_connector_metadata first in every step")
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors by layer, in layer order."""
        return

    def unregister_kv_caches(self) -> None:
        return

    def restore_kv_caches(self) -> None:
        return

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        return

    def finish_forward(self) -> None:
        return

    def reset_capture_state(self) -> None:
        return

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Save what has to be, before the forward overwrites blocks that requests have lost."""
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that were sent, and received, since the last call."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the transfers that ended; `finished_req_ids` are requests done or aborted.

        A load that failed is among the finished ones, and its blocks are in
        `get_block_ids_with_load_errors` in the same step at the latest.
        """
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(set(sending or ()), set(recving or ()))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the engine blocks that could not be loaded, as of the last transfer results."""
        return set()

    def shutdown(self) -> None:
        """End transfers and give everything back. Safe to call twice."""
        return

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side has counted since the last call; None: nothing."""
        return None

    def get_kv_connector_kv_cache_events(self) -> KVCacheEvents | None:
        """Return the events of this worker since the last call; None: nothing."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return something for the scheduler side of this connector; None: nothing."""
        return None

    # Scheduler side

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` can be loaded, and if between steps.

        None: not known yet, ask again in a later step. The flag is False with 0
        tokens; with True the request waits until it is in `finished_recving`.
        May be called any number of times without anything coming of it.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note that the request has its blocks; load `num_external_tokens` of what was offered.

        0 means that nothing is to be loaded, whatever blocks there are: it is
        also called so when blocks were added after a load.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what workers do in this step, never None. Starts the next step's."""

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        return

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._kv_cache_config.prefix_cacheable_group_ids
        return ids

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return {self._cache_hit_source: num_external_tokens} if num_external_tokens else {}

    def on_new_request(self, request: Request) -> None:
        """Note that a request has arrived: a good moment to start looking it up."""
        return

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Take note of what came of a step, all workers together."""
        return

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Say once, before the request's blocks are freed, whether they are to stay.

        True: do not free them before the request is in `finished_sending`. The
        dict, if any, goes to the caller of the engine with the request's output.
        """
        return False, None

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        return False

    def take_events(self) -> Iterable[object]:
        """Return the events since the last call."""
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping although it has no request left."""
        return False

    def get_finished_count(self) -> int | None:
        """Return how many workers report each transfer; None: all of them."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, HandshakeMetadata]) -> None:
        return

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], HandshakeMetadata]
    ) -> None:
        if any(pp_rank != 0 for pp_rank, _ in metadata):
            raise UsageError(
                "pp_rank", sorted(metadata), f"{type(self).__name__} knows rank 0 only"
            )
        self.set_xfer_handshake_metadata({tp: meta for (_, tp), meta in metadata.items()})

    def reset_cache(self) -> bool | None:
        """Forget what is stored. False: not possible now; None: nothing to forget here."""
        return None

    # Of the class

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return "NHD" or "HND" when the KV must lie so. Ask before allocating it."""
        if cls is KVConnectorBase_V1:
            raise TypeError("get_required_kvcache_layout is asked of a connector, not of the base")
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> object:
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> object:
        return None
