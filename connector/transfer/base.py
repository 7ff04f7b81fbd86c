"""Defines what a step's workers report, and the names that vLLM has beside its connectors' base.

What an engine asks of a connector is `connector.transfer.base_v1.KVConnectorBase_V1`: one class
for the scheduler's and for the worker's side, which share nothing but that. All that passes
between the two is plain, picklable data. One thread calls a side.

One engine step:

1. scheduler: `on_new_request`, `get_num_new_matched_tokens`, `update_state_after_alloc` for new
   requests, then `build_connector_meta`;
2. each worker: `bind_connector_metadata`, `handle_preemptions`, `start_load_kv`,
   the forward (with `wait_for_layer_load` and `save_kv_layer` around each layer),
   `wait_for_save`, `get_transfer_results` and what else there is to report
   (`connector.transfer.aggregate.worker_output` collects it), `clear_connector_metadata`;
3. `connector.transfer.aggregate.KVOutputAggregator` makes one output of all workers';
4. scheduler: `update_connector_output`, then `request_finished` for what is done.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol, Self

from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorWorkerMetadata
from connector.transfer.base_v1 import KVConnectorRole as KVConnectorRole

KVConnectorBase = KVConnectorBase_V1
KVConnectorBaseType = KVConnectorBase_V1
"""vLLM's name for the base of all versions of its connectors; there is one version."""


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
