"""Defines what an engine asks of a connector: two protocols, the scheduler's and the worker's side.

The calls and their meaning are those of vLLM's `KVConnectorBase_V1`, split in
two: its scheduler-side half and its worker-side half share nothing but a name.
All that passes between the two is plain, picklable data. Methods with a body
have that answer by default; a class inherits it by naming the protocol as its
base. One thread calls a side.

One engine step:

1. scheduler: `get_num_new_matched_tokens`, `update_state_after_alloc` for new
   requests, then `build_connector_meta`;
2. each worker: `bind_connector_metadata`, `handle_preemptions`, `start_load_kv`,
   the forward (with `wait_for_layer_load` and `save_kv_layer` around each layer),
   `wait_for_save`, `get_finished` and what else there is to report
   (`connector.transfer.aggregate.worker_output` collects it), `clear_connector_metadata`;
3. `connector.transfer.aggregate.KVOutputAggregator` makes one output of all workers';
4. scheduler: `update_connector_output`, then `request_finished` for what is done.

(`KVStoreConnector` translates these to the calls of our own core: `connector.scheduler.scheduler`
and `connector.worker.worker`, which `connector.messages` has the words of.)
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from connector.messages import EngineRequest
    from connector.transfer.config import KVTransferConfig

StepMetadata: TypeAlias = Any
"""What a connector's scheduler side tells its workers for a step: of a class of the connector's
own, which nobody else reads."""
EngineDescription: TypeAlias = Any
"""What an engine says about itself: of a type agreed between it and its connectors."""


class KVConnectorRole(enum.Enum):
    """Names a side of a connector: an engine makes one for its scheduler, one in each worker."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorWorkerMetadata(Protocol):
    """Carries what one worker tells the scheduler side of its own connector about a step."""

    def aggregate(self, other: Self) -> Self:
        """Put both into one. May change and return `self`; `other` is of the same class."""
        ...


class KVConnectorStats(Protocol):
    """Carries what a connector has counted since it was last asked. Picklable."""

    def aggregate(self, other: Self) -> Self:
        """Put both into one. May change and return `self`; `other` is of the same class."""
        ...

    def is_empty(self) -> bool: ...
    def to_dict(self) -> dict[str, object]:
        """Return plain data, for logs and metrics."""
        ...


class KVCacheEvents(Protocol):
    """Collects events (block stored, block removed) that the workers of one engine have seen."""

    def add_events(self, events: list[Hashable]) -> None: ...
    def get_all_events(self) -> list[Hashable]:
        """Return all events that were added, as often as they were."""
        ...

    def increment_workers(self, count: int = 1) -> None:
        """Note that `count` more workers have added theirs."""
        ...


class TransferResults(NamedTuple):
    """Names the requests whose transfers ended on this worker since the last call."""

    finished_sending: frozenset[str] | set[str] = frozenset()
    finished_recving: frozenset[str] | set[str] = frozenset()
    failed_recving: frozenset[str] | set[str] = frozenset()
    """Those that failed, where block ids are not enough to say so; also in `finished_recving`."""


@dataclass(slots=True)
class KVConnectorOutput:
    """Carries what one worker, or after aggregation all of them, says about one step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: KVCacheEvents | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    """Engine blocks that hold no valid KV although a load into them was planned."""
    failed_recving: set[str] = field(default_factory=set)
    expected_finished_count: int = 0
    """Workers that must report a request's transfer before it counts as finished; 0: as before."""

    def is_empty(self) -> bool:
        """Return whether it says nothing; `expected_finished_count` alone is nothing."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
            or self.invalid_block_ids
            or self.failed_recving
        )


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """Tells what the engine's scheduler has decided for one step."""

    scheduled: Sequence[tuple[EngineRequest, int]]
    """Each request of the step, and how many of its tokens the forward computes."""
    block_ids: Callable[[str], Sequence[int] | None]
    """A request's block table, in token order; None when it has none."""
    preempted: Sequence[str] = ()
    """Requests that have lost their blocks since the last step."""


@runtime_checkable
class KVConnectorScheduler(Protocol):
    """Decides, in the engine's scheduler. It may not wait."""

    def on_new_request(self, request: EngineRequest) -> None:
        """Note that a request has arrived: a good moment to start looking it up."""
        return

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` can be loaded, and if between steps.

        None: not known yet, ask again in a later step. The flag is False with 0
        tokens; with True the request waits until it is in `finished_recving`.
        May be called any number of times without anything coming of it.
        """
        ...

    @abstractmethod
    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Note that the request has its blocks; load `num_external_tokens` of what was offered.

        0 means that nothing is to be loaded, whatever `block_ids` holds: it is
        also called so when blocks were added after a load.
        """
        ...

    @abstractmethod
    def build_connector_meta(self, step: SchedulerStep) -> StepMetadata:
        """Return what workers do in this step; picklable, never None. Starts the next step's."""
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Take note of what came of a step, all workers together."""
        return

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Called once, before the request's blocks are freed.

        True: do not free them before the request is in `finished_sending`. The
        dict, if any, goes to the caller of the engine with the request's output.
        """
        return False, None

    def take_events(self) -> Iterable[object]:
        """Return the events since the last call."""
        return ()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side has counted since the last call; None: nothing."""
        return None

    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping although it has no request left."""
        return False

    def reset_cache(self) -> bool | None:
        """Forget what is stored. False: not possible now; None: nothing to forget here."""
        return None

    def shutdown(self) -> None:
        """Give everything back. Safe to call twice."""
        return


@runtime_checkable
class KVConnectorWorker(Protocol):
    """Moves bytes, in each worker. It never raises for what a peer did."""

    def get_required_kvcache_layout(self) -> str | None:
        """ "NHD" or "HND" when the KV must lie so, else None. Ask before allocating it."""
        return None

    def get_finished_count(self) -> int | None:
        """Return how many workers report each transfer; None: all of them."""
        return None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV tensors by layer, in layer order. Raises `UsageError` for their shape."""
        return

    @abstractmethod
    def bind_connector_metadata(self, metadata: StepMetadata) -> None:
        """Take what the scheduler side made for this step."""
        ...

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Forget it: the step is over."""
        ...

    @abstractmethod
    def has_connector_metadata(self) -> bool: ...

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Save what has to be, before the forward overwrites blocks that requests have lost."""
        return

    @abstractmethod
    def start_load_kv(self) -> None:
        """Start this step's loads."""
        ...

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's KV that this forward needs is in place."""
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        """Note that the forward has written this layer's KV."""
        return

    @abstractmethod
    def wait_for_save(self) -> None:
        """Start what is left to save: the forward is done. Blocks that are still read after
        this call are the connector's to protect."""
        ...

    @abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> TransferResults:
        """Return the transfers that ended; `finished_req_ids` are requests done or aborted.

        A load that failed is among the finished ones, and its blocks are in
        `get_block_ids_with_load_errors` in the same step at the latest.
        """
        ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the engine blocks that could not be loaded, as of the last `get_finished`."""
        return set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return something for the scheduler side of this connector; None: nothing."""
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last call; None: nothing."""
        return None

    def get_kv_cache_events(self) -> KVCacheEvents | None:
        """Return the events of this worker since the last call; None: nothing."""
        return None

    def shutdown(self) -> None:
        """End transfers and give everything back. Safe to call twice."""
        return


class KVConnectorBase(Protocol):
    """Describes what is registered under a name: a class that makes either side.

    `engine` is what the engine has to say about itself (`KVStoreConnector` takes an
    `EngineInfo`).
    """

    @classmethod
    def make_scheduler(
        cls, config: KVTransferConfig, engine: EngineDescription
    ) -> KVConnectorScheduler: ...

    @classmethod
    def make_worker(
        cls, config: KVTransferConfig, engine: EngineDescription
    ) -> KVConnectorWorker: ...


KVConnectorBaseType = KVConnectorBase
"""What vLLM calls the base of all versions of its connectors; there is one here."""
