"""Makes several connectors one: loads from the first that offers tokens, saves to all of them.

Most calls are only forwarded (forwarding.py). How, is one line each in a table, and the
rules are those of vLLM's `MultiConnector`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from connector.limits import MULTI_CONNECTORS_MAX
from connector.transfer.base import (
    KVCacheEvents,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorScheduler,
    KVConnectorStats,
    KVConnectorWorker,
    KVConnectorWorkerMetadata,
    SchedulerStep,
    TransferResults,
)
from connector.transfer.config import KVTransferConfig
from connector.transfer.factory import KVConnectorFactory
from connector.transfer.forwarding import (
    any_of,
    each,
    each_whatever_happens,
    forwarding,
    none_refuses,
    one_after_another,
    the_same,
    the_same_of_all,
    united,
)
from kvstore import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from connector.messages import EngineRequest
    from connector.transfer.base import EngineDescription


class _Side(Protocol):
    def shutdown(self) -> None: ...


_Made = TypeVar("_Made", bound=_Side)


@dataclass(slots=True)
class MultiMetadata:
    """Carries what each child's scheduler side has made for the step, in order."""

    children: tuple[object, ...]
    extra_saves: dict[str, int]
    """Finished request -> how many children beyond the first still send it."""


@dataclass(slots=True)
class MultiWorkerMetadata:
    """Carries what each child's worker side says; None where it says nothing."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        self.children = tuple(
            theirs if mine is None else mine if theirs is None else mine.aggregate(theirs)
            for mine, theirs in zip(self.children, other.children, strict=True)
        )
        return self


class MultiStats:
    """Keeps each connector's statistics under its name; those of two of one name are added."""

    __slots__ = ("by_name",)

    def __init__(self, by_name: Mapping[str, KVConnectorStats] | None = None) -> None:
        self.by_name: dict[str, KVConnectorStats] = dict(by_name or {})

    def add(self, name: str, stats: KVConnectorStats) -> None:
        mine = self.by_name.get(name)
        self.by_name[name] = stats if mine is None else mine.aggregate(stats)

    def aggregate(self, other: MultiStats) -> MultiStats:
        for name, stats in other.by_name.items():
            self.add(name, stats)
        return self

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.by_name.values())

    def to_dict(self) -> dict[str, object]:
        return {name: stats.to_dict() for name, stats in self.by_name.items()}


def _stats_by_name(
    names: Sequence[str], children: Sequence[KVConnectorScheduler | KVConnectorWorker]
) -> MultiStats | None:
    merged = MultiStats()
    for name, child in zip(names, children, strict=True):
        stats = child.get_kv_connector_stats()
        if stats is not None:
            merged.add(name, stats)
    return merged if merged.by_name else None


@forwarding(
    KVConnectorScheduler,
    {
        "on_new_request": each,
        "take_events": one_after_another,
        "has_pending_work": any_of,
        "reset_cache": none_refuses,
        "shutdown": each_whatever_happens,
    },
)
class _MultiScheduler:
    def __init__(self, children: Sequence[KVConnectorScheduler], names: Sequence[str]) -> None:
        self._children = list(children)
        self._names = list(names)
        self._loading: dict[str, int] = {}
        """Request -> the child that offered tokens last time it was asked."""
        self._extra_saves: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The first child's that offers tokens. All are asked; one that needs time makes all."""
        self._loading.pop(request.request_id, None)
        offer: tuple[int, bool] = (0, False)
        loading = -1
        for i, child in enumerate(self._children):
            tokens, between_steps = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if offer[0] == 0 and tokens > 0:
                loading, offer = i, (tokens, between_steps)
        if loading >= 0:
            self._loading[request.request_id] = loading
        return offer

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The child that offered loads; the others hear of the blocks and load nothing."""
        loading = self._loading.get(request.request_id)
        for i, child in enumerate(self._children):
            tokens = num_external_tokens if i == loading else 0
            child.update_state_after_alloc(request, block_ids, tokens)

    def build_connector_meta(self, step: SchedulerStep) -> MultiMetadata:
        extra, self._extra_saves = self._extra_saves, {}
        return MultiMetadata(tuple(c.build_connector_meta(step) for c in self._children), extra)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Every child gets the output with its own part of the metadata."""
        meta = output.kv_connector_worker_meta
        parts = meta.children if isinstance(meta, MultiWorkerMetadata) else (None,) * self._count
        for child, part in zip(self._children, parts, strict=True):
            child.update_connector_output(replace(output, kv_connector_worker_meta=part))

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Blocks are kept until every child that asked for it has sent them.

        Raises `UsageError` when two children answer with the same parameter.
        """
        senders = 0
        merged: dict[str, object] | None = None
        for child in self._children:
            sends, params = child.request_finished(request, block_ids)
            senders += sends
            if params is None:
                continue
            clash = sorted(set(merged or ()) & set(params))
            if clash:
                raise UsageError("kv_transfer_params", clash, "come from more than one connector")
            merged = {**(merged or {}), **params}
        self._loading.pop(request.request_id, None)
        if senders > 1:
            self._extra_saves[request.request_id] = senders - 1
        return senders > 0, merged

    def get_kv_connector_stats(self) -> MultiStats | None:
        return _stats_by_name(self._names, self._children)

    @property
    def _count(self) -> int:
        return len(self._children)


@forwarding(
    KVConnectorWorker,
    {
        "get_required_kvcache_layout": the_same,
        "get_finished_count": the_same_of_all,
        "register_kv_caches": each,
        "start_load_kv": each,
        "wait_for_layer_load": each,
        "save_kv_layer": each,
        "wait_for_save": each,
        "get_block_ids_with_load_errors": united,
        "shutdown": each_whatever_happens,
    },
)
class _MultiWorker:
    def __init__(self, children: Sequence[KVConnectorWorker], names: Sequence[str]) -> None:
        self._children = list(children)
        self._names = list(names)
        self._extra_saves: dict[str, int] = {}
        self._bound = False

    def bind_connector_metadata(self, metadata: MultiMetadata) -> None:
        self._extra_saves.update(metadata.extra_saves)
        for child, part in zip(self._children, metadata.children, strict=True):
            child.bind_connector_metadata(part)
        self._bound = True

    def clear_connector_metadata(self) -> None:
        self._bound = False
        each("clear_connector_metadata", [c.clear_connector_metadata for c in self._children])

    def has_connector_metadata(self) -> bool:
        return self._bound

    def handle_preemptions(self, metadata: MultiMetadata) -> None:
        for child, part in zip(self._children, metadata.children, strict=True):
            child.handle_preemptions(part)

    def get_finished(self, finished_req_ids: set[str]) -> TransferResults:
        """A request has been sent when every child that sends it has said so."""
        sent: set[str] = set()
        received: set[str] = set()
        failed: set[str] = set()
        for child in self._children:
            results = child.get_finished(finished_req_ids)
            received |= results.finished_recving
            failed |= results.failed_recving
            for request_id in results.finished_sending:
                left = self._extra_saves.pop(request_id, 0)
                if left == 0:
                    sent.add(request_id)
                elif left > 1:
                    self._extra_saves[request_id] = left - 1
        return TransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        parts = tuple(child.build_connector_worker_meta() for child in self._children)
        return None if all(part is None for part in parts) else MultiWorkerMetadata(parts)

    def get_kv_connector_stats(self) -> MultiStats | None:
        return _stats_by_name(self._names, self._children)

    def get_kv_cache_events(self) -> KVCacheEvents | None:
        """Return one worker's events: what several children have seen counts once."""
        merged: KVCacheEvents | None = None
        for child in self._children:
            events = child.get_kv_cache_events()
            if merged is None:
                merged = events
            elif events is not None:
                known = set(merged.get_all_events())
                merged.add_events([e for e in events.get_all_events() if e not in known])
        return merged


class MultiConnector:
    """Makes all connectors that `kv_connector_extra_config["connectors"]` lists.

    Each entry is a `KVTransferConfig` of its own; what it does not say about
    `engine_id` comes from the outer one. The order is the order of preference.
    """

    @classmethod
    def make_scheduler(
        cls, config: KVTransferConfig, engine: EngineDescription
    ) -> KVConnectorScheduler:
        """Raises what the children's makers raise; those already made are shut down then."""

        def make(child: KVTransferConfig) -> KVConnectorScheduler:
            return KVConnectorFactory.create_connector(child, KVConnectorRole.SCHEDULER, engine)

        made, names = _make_all(config, make)
        return cast("KVConnectorScheduler", _MultiScheduler(made, names))

    @classmethod
    def make_worker(cls, config: KVTransferConfig, engine: EngineDescription) -> KVConnectorWorker:
        """As `make_scheduler`."""

        def make(child: KVTransferConfig) -> KVConnectorWorker:
            return KVConnectorFactory.create_connector(child, KVConnectorRole.WORKER, engine)

        made, names = _make_all(config, make)
        return cast("KVConnectorWorker", _MultiWorker(made, names))


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the children's configs, in order. Raises `UsageError` for a list that cannot work."""
    field = "kv_connector_extra_config.connectors"
    listed = config.get_from_extra_config("connectors", None)
    if not isinstance(listed, list | tuple) or not 0 < len(listed) <= MULTI_CONNECTORS_MAX:
        raise UsageError(field, listed, f"must list 1 to {MULTI_CONNECTORS_MAX} connectors")
    configs: list[KVTransferConfig] = []
    for i, values in enumerate(listed):
        if not isinstance(values, Mapping) or not values.get("kv_connector"):
            raise UsageError(f"{field}[{i}]", values, "must be an object with a kv_connector")
        configs.append(KVTransferConfig.from_dict({"engine_id": config.engine_id, **values}))
    return configs


def _make_all(
    config: KVTransferConfig, make: Callable[[KVTransferConfig], _Made]
) -> tuple[list[_Made], list[str]]:
    """Return the children and their names."""
    configs = child_configs(config)
    made: list[_Made] = []
    try:
        for config in configs:
            made.append(make(config))  # noqa: PERF401
    except BaseException:
        with suppress(Exception):
            each_whatever_happens("shutdown", [child.shutdown for child in made])
        raise
    return made, [str(config.kv_connector) for config in configs]
