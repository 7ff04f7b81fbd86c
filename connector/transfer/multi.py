"""Makes several connectors one: loads from the first that offers tokens, saves to all of them.

The rules are those of vLLM's `MultiConnector`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from connector.limits import MULTI_CONNECTORS_MAX
from connector.transfer.base_v1 import (
    CacheHitSource,
    ConnectorOutput,
    HandshakeMetadata,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
)
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import request_finished
from connector.transfer.factory import KVConnectorFactory
from kvstore import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from connector.transfer.base import KVCacheEvents, KVConnectorStats

log = logging.getLogger(f"kvstore.{__name__}")
T = TypeVar("T")


@dataclass(slots=True)
class MultiMetadata(KVConnectorMetadata):
    """Carries what each child's scheduler side has made for the step, in order."""

    children: tuple[object, ...]
    extra_saves: dict[str, int]
    """Finished request -> how many children beyond the first still send it."""


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """Carries what each child's worker side says; None where it says nothing."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMetadata:
        assert isinstance(other, MultiWorkerMetadata)
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


def _each(name: str) -> Callable[..., None]:
    """Return a method that calls that of every child; the first that raises ends it."""

    def call(self: MultiConnector, *args: object, **kwargs: object) -> None:
        for child in self.children:
            getattr(child, name)(*args, **kwargs)

    return call


def _any(name: str) -> Callable[..., bool]:
    """Return a method that asks every child, for some answers change something."""

    def call(self: MultiConnector, *args: object) -> bool:
        return True in [bool(getattr(child, name)(*args)) for child in self.children]

    return call


def _same(name: str, answers: Sequence[T | None]) -> T | None:
    """Return what those say that say something. Raises `UsageError` when they differ."""
    said = {answer for answer in answers if answer is not None}
    if len(said) > 1:
        raise UsageError(name, answers, "must be the same for all connectors of a MultiConnector")
    return said.pop() if said else None


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Makes all connectors that `kv_connector_extra_config["connectors"]` lists.

    Each entry is a `KVTransferConfig` of its own; what it does not say about
    `engine_id` comes from the outer one. The order is the order of preference.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig = None
    ) -> None:
        """Raises what the children's constructors raise; those already made are shut down then."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.children: list[KVConnectorBase_V1] = []
        self._names: list[str] = []
        self._loading: dict[str, KVConnectorBase_V1] = {}
        """Request -> the child that offered tokens last time it was asked."""
        self._extra_saves: dict[str, int] = {}
        try:
            for kind, config in _kinds(vllm_config):
                self.children.append(kind(config, role, kv_cache_config))
                self._names.append(str(config.kv_transfer_config.kv_connector))
        except BaseException:
            with suppress(Exception):
                self.shutdown()
            raise

    def shutdown(self) -> None:
        """Shut every child down, also after one has raised; raise the first error at the end."""
        error: Exception | None = None
        for child in self.children:
            try:
                child.shutdown()
            except Exception as e:
                log.exception("shutdown of a connector failed")
                error = error or e
        if error is not None:
            raise error

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self.children)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        asked = [kind.get_required_kvcache_layout(config) for kind, config in _kinds(vllm_config)]
        return _same("get_required_kvcache_layout", asked)

    def get_kv_connector_stats(self) -> MultiStats | None:
        merged = MultiStats()
        for name, child in zip(self._names, self.children, strict=True):
            stats = child.get_kv_connector_stats()
            if stats is not None:
                merged.add(name, stats)
        return merged if merged.by_name else None

    # Scheduler side

    bind_kv_cache_manager = _each("bind_kv_cache_manager")
    bind_gpu_block_pool = _each("bind_gpu_block_pool")
    on_new_request = _each("on_new_request")
    set_xfer_handshake_metadata = _each("set_xfer_handshake_metadata")
    set_xfer_handshake_metadata_pp_aware = _each("set_xfer_handshake_metadata_pp_aware")
    has_pending_block_frees = _any("has_pending_block_frees")
    has_pending_push_work = _any("has_pending_push_work")
    register_finished_partial_tail = _any("register_finished_partial_tail")

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the offer of the first child that offers tokens. All are asked; while one needs
        more time, return (None, False)."""
        self._loading.pop(request.request_id, None)
        offer: tuple[int, bool] = (0, False)
        loading: KVConnectorBase_V1 | None = None
        for child in self.children:
            tokens, between_steps = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if loading is None and tokens > 0:
                loading, offer = child, (tokens, between_steps)
        if loading is not None:
            self._loading[request.request_id] = loading
        return offer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Have the child that offered tokens load them; the others hear of the blocks and load
        nothing."""
        loading = self._loading.get(request.request_id)
        for child in self.children:
            tokens = num_external_tokens if child is loading else 0
            child.update_state_after_alloc(request, blocks, tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._loading[request.request_id].get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        child = self._loading.get(request.request_id)
        if child is None:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return child.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        extra, self._extra_saves = self._extra_saves, {}
        parts = tuple(child.build_connector_meta(scheduler_output) for child in self.children)
        return MultiMetadata(parts, extra)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Give every child the output with its own part of the metadata."""
        meta = connector_output.kv_connector_worker_meta
        none = (None,) * len(self.children)
        parts = meta.children if isinstance(meta, MultiWorkerMetadata) else none
        for child, part in zip(self.children, parts, strict=True):
            child.update_connector_output(replace(connector_output, kv_connector_worker_meta=part))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """Have blocks kept until every child that asked for it has sent them.

        Raises `UsageError` when two children answer with the same parameter.
        """
        senders = 0
        merged: dict[str, object] | None = None
        for child in self.children:
            sends, params = request_finished(child, request, block_ids)
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

    def take_events(self) -> Iterable[object]:
        return [event for child in self.children for event in child.take_events()]

    def get_finished_count(self) -> int | None:
        counts = [child.get_finished_count() for child in self.children]
        return None if None in counts else _same("get_finished_count", counts)

    def reset_cache(self) -> bool:
        """Ask every child; None is no refusal."""
        return False not in [child.reset_cache() for child in self.children]

    # Worker side

    register_kv_caches = _each("register_kv_caches")
    unregister_kv_caches = _each("unregister_kv_caches")
    restore_kv_caches = _each("restore_kv_caches")
    set_host_xfer_buffer_ops = _each("set_host_xfer_buffer_ops")
    start_load_kv = _each("start_load_kv")
    finish_forward = _each("finish_forward")
    reset_capture_state = _each("reset_capture_state")
    wait_for_layer_load = _each("wait_for_layer_load")
    save_kv_layer = _each("save_kv_layer")
    wait_for_save = _each("wait_for_save")

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """Return the one child's that has some: the KV lies in one pool."""
        return _same("get_mem_pool_context", [c.get_mem_pool_context() for c in self.children])

    def bind_connector_metadata(self, connector_metadata: MultiMetadata) -> None:
        self._extra_saves.update(connector_metadata.extra_saves)
        for child, part in zip(self.children, connector_metadata.children, strict=True):
            child.bind_connector_metadata(part)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self.children:
            child.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: MultiMetadata) -> None:
        for child, part in zip(self.children, kv_connector_metadata.children, strict=True):
            child.handle_preemptions(part)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Merge the children's results. A request has been sent when every child that sends it has
        said so."""
        merged = KVConnectorTransferResults()
        for child in self.children:
            results = child.get_transfer_results(finished_req_ids)
            merged.finished_recving |= results.finished_recving
            merged.failed_recving |= results.failed_recving
            for request_id in results.finished_sending:
                left = self._extra_saves.pop(request_id, 0)
                if left == 0:
                    merged.finished_sending.add(request_id)
                elif left > 1:
                    self._extra_saves[request_id] = left - 1
        return merged

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*(child.get_block_ids_with_load_errors() for child in self.children))

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        said = (child.get_handshake_metadata() for child in self.children)
        return next((metadata for metadata in said if metadata is not None), None)

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        parts = tuple(child.build_connector_worker_meta() for child in self.children)
        return None if all(part is None for part in parts) else MultiWorkerMetadata(parts)

    def get_kv_connector_kv_cache_events(self) -> KVCacheEvents | None:
        """Return one worker's events: what several children have seen counts once."""
        merged: KVCacheEvents | None = None
        for child in self.children:
            events = child.get_kv_connector_kv_cache_events()
            if merged is None:
                merged = events
            elif events is not None:
                known = set(merged.get_all_events())
                merged.add_events([e for e in events.get_all_events() if e not in known])
        return merged


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


def _kinds(vllm_config: VllmConfig) -> Iterable[tuple[type[KVConnectorBase_V1], VllmConfig]]:
    """Give the children's classes, each with the configuration that it is made with."""
    for config in child_configs(vllm_config.kv_transfer_config):
        of_child = copy.copy(vllm_config)
        of_child.kv_transfer_config = config
        yield KVConnectorFactory.get_connector_class(config), of_child
