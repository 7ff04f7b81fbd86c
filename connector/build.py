"""Builds a scheduler side or a worker side from settings and geometry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.copiers.base import Holding, nothing_held
from connector.layout.geometry import (
    Field,
    GroupLayout,
    KVGeometry,
    StoreLayout,
    check_block_tokens,
    default_block_tokens,
    splits_of,
)
from connector.layout.topology import TpKVTopology
from connector.limits import WINDOWS_OF_ATTENTION_MAX
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.vram import VramStore
from connector.worker.worker import WorkerCore
from kvstore import UsageError, tenant_salt
from kvstore.spi import BlockSession, BlockStore, CudaDevice, DeviceError, cuda_device

if TYPE_CHECKING:
    from connector.settings import ConnectorSettings

log = logging.getLogger(f"kvstore.{__name__}")


def open_store(
    config: ConnectorSettings,
    device: CudaDevice | None = None,
    *,
    sees_vram: Callable[[int, int], bool] | None = None,
    nixl_device: CudaDevice | None = None,
) -> BlockSession:
    """Return the store these settings name. Raises `UsageError` for bad settings; contacts nobody
    yet.

    The rest are those of `BlockSession`.
    """
    return BlockSession(
        config.url,
        key_prefix=config.key_prefix,
        node=config.node,
        run_dir=Path(config.run_dir) if config.run_dir else None,
        verify=config.verify,
        limits=replace(config.limits, redis_timeout_s=config.lookup_timeout_s),
        node_size_bytes=config.node_size_bytes,
        device=device,
        sees_vram=sees_vram,
        nixl_device=nixl_device,
    )


def open_in_vram(
    config: ConnectorSettings,
    ordinal: int | None,
    *,
    saves: bool,
    holding: Holding = nothing_held,
) -> BlockStore:
    """Do `open_store` for a worker whose copiers take memory of the device `ordinal`, if any.

    With `vram`, a worker that `saves` keeps recent blocks on the device, any other only reads those
    of others. `holding` is that of `KVMemory`. Raises `UsageError` as `open_store` does.
    """
    arrive = config.nixl_destination == "vram"
    if ordinal is None or not (config.vram or arrive):
        if arrive:
            log.warning("nixl_destination is vram, and this engine's KV is not on a CUDA device")
        return open_store(config)
    try:
        device = cuda_device(ordinal)
    except DeviceError as e:
        log.warning("blocks are neither kept in VRAM nor read there: %s", e)
        return open_store(config)
    store = open_store(
        config,
        device if config.vram else None,
        nixl_device=device if arrive else None,
    )
    size_bytes = config.vram_size_bytes if config.vram and saves else 0
    return VramStore(store, device, size_bytes, holding=holding)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Describes one KV cache group of the engine."""

    geometry: KVGeometry
    topology: TpKVTopology
    number: int = 0
    """The engine's own number of the group."""
    layers_of_default: int | None = None
    """Layers that the default block size is computed from, where workers have different ones."""
    window_tokens: int | None = None
    """Tokens of a sliding window; None: every token needs all before it."""
    chunk_tokens: int | None = None
    """Tokens of the chunks within which a token needs those before it; None: there are none."""
    opaque: bool = False
    """The bytes of an engine block do not lie token by token."""
    one_size: bool = False
    """Whether engines of other sizes split some layers' heads otherwise, so that they share
    nothing."""
    fields: dict[str, Field] = field(default_factory=dict)
    """Namespace fields that distinguish this group from others and from those of other models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Holds what an adapter has read from its engine's configuration."""

    groups: tuple[GroupShape, ...]
    """The groups that are stored."""
    workers: int
    model: dict[str, Field]
    """Namespace fields that only the engine knows."""
    hash_block_tokens: int | None = None
    """Tokens of one of the engine's own hashes; None: the adapter chains store blocks itself."""
    null_block_id: int | None = None
    volatile_tokens: int = 0
    loads: bool = True
    saves: bool = True
    events: bool = False
    """Whether somebody takes events about stored blocks."""
    loads_again: bool = True
    """Whether a request whose load failed may be offered another before it was computed."""
    engine_groups: int = 1
    """KV cache groups of the engine, at least those of `groups`."""
    boundary_tokens: int = 1
    """`boundary_tokens` of `StoreLayout`."""
    left_out: tuple[str, ...] = ()
    """Groups that are not stored, and why, for the log at start."""
    window_interval_tokens: int | None = None
    """Tokens between windows that the engine itself keeps, 0: only those at the ends of prompts and
    where they part; None: it keeps all, or does not say."""
    prompts_only: bool = False
    """Whether generated tokens are neither saved nor loaded, because their KV differs from that of
    the same tokens in a prompt."""

    @classmethod
    def of_one_group(
        cls, geometry: KVGeometry, topology: TpKVTopology, model: dict[str, Field], **more: Any
    ) -> EngineShape:
        """Return an engine whose layers all cache alike and which hashes every one of its
        blocks."""
        more.setdefault("hash_block_tokens", geometry.engine_block_tokens)
        groups = (GroupShape(geometry=geometry, topology=topology),)
        return cls(groups=groups, workers=topology.workers, model=model, **more)

    def layout(self, config: ConnectorSettings) -> StoreLayout:
        """Return the layout of this engine: the same on both sides, so that they agree on every
        key."""
        tokens = config.block_tokens or default_block_tokens(
            [
                (
                    replace(
                        group.geometry, layers=group.layers_of_default or group.geometry.layers
                    ),
                    group.topology,
                    group.window_tokens or group.chunk_tokens,
                )
                for group in self.groups
            ],
            self.boundary_tokens,
        )
        geometries = [group.geometry for group in self.groups]
        if config.payload_order == "tokens":
            geometries = [geometry.in_token_order() for geometry in geometries]
        hash_tokens = self.hash_block_tokens or tokens
        salt = tenant_salt()
        if tokens % hash_tokens:
            raise UsageError("block_tokens", tokens, f"must be a multiple of {hash_tokens}")
        layout = StoreLayout(
            block_tokens=tokens,
            hash_block_tokens=hash_tokens,
            groups=tuple(
                GroupLayout(
                    geometry=geometry,
                    topology=group.topology,
                    splits=splits_of(
                        {**self.model, **group.fields},
                        geometry,
                        group.topology,
                        tokens,
                        () if group.one_size else config.tp_sizes,
                        group.number,
                        hash_tokens,
                        salt,
                    ),
                    window_tokens=group.window_tokens,
                    chunk_tokens=group.chunk_tokens,
                    opaque=group.opaque,
                )
                for group, geometry in zip(self.groups, geometries, strict=True)
            ),
            engine_groups=max(self.engine_groups, len(self.groups)),
            boundary_tokens=self.boundary_tokens,
        )
        check_block_tokens(tokens, layout.engine_block_tokens)
        return layout


def scheduler_side(config: ConnectorSettings, shape: EngineShape) -> SchedulerCore:
    """Return the scheduler side; the store is opened when it is first needed.

    Raises `UsageError` for settings that cannot work.
    """
    own = config.checkpoint_interval_tokens
    layout = shape.layout(config)
    settings = SchedulerSettings(
        loads=shape.loads,
        saves=shape.saves,
        save_decode=config.save_decode,
        lookup_timeout_s=config.lookup_timeout_s,
        hand_over_wait_s=config.hand_over_wait_s,
        volatile_tokens=shape.volatile_tokens,
        null_block_id=shape.null_block_id,
        pinned_fraction=config.pinned_fraction,
        events=shape.events,
        layerwise=config.layerwise,
        loads_again=shape.loads_again,
        window_interval_tokens=window_interval(shape, layout) if own is None else own,
        state_interval_tokens=own,
    )
    _check_layerwise(config, shape)

    def seen(node_id: int, epoch: int) -> bool:
        return (node_id, epoch) in core.vram_open

    store = LazyStore(lambda: open_store(config, sees_vram=seen if config.vram else None))
    if config.payload_order == "tokens":
        _say_what_has_one_order(layout, shape)
    core = SchedulerCore(store, layout, settings)
    return core


def window_interval(shape: EngineShape, layout: StoreLayout) -> int | None:
    """Return the interval that the engine keeps windows at. 0 may be its default, which nobody
    meant for a store that others share: windows are then saved everywhere, but where they would
    leave no room for attention."""
    if shape.window_interval_tokens != 0:
        return shape.window_interval_tokens
    sizes = [(g.forgetful, g.geometry.payload_bytes(layout.block_tokens)) for g in layout.groups]
    attention = sum(size for forgetful, size in sizes if not forgetful)
    windows = sum(size for forgetful, size in sizes if forgetful)
    return 0 if attention and windows > WINDOWS_OF_ATTENTION_MAX * attention else None


def worker_side(config: ConnectorSettings, shape: EngineShape, rank: int) -> WorkerCore:
    """Return the worker side of worker `rank`, as `TpKVTopology.at` counts them."""
    _check_layerwise(config, shape)
    layout = shape.layout(config)

    def open_to_save() -> BlockStore:
        store = open_in_vram(config, lazy.device, saves=shape.saves, holding=lazy.holding)
        store.register_namespaces(tuple(layout.all_namespaces()))
        return store

    def vram_open() -> frozenset[tuple[int, int]]:
        store = lazy.opened
        return store.open_vram() if isinstance(store, VramStore) else frozenset()

    lazy = LazyStore(open_to_save)
    return (LayerwiseWorker if config.layerwise else WorkerCore)(
        lazy,
        layout,
        rank=rank,
        saves=shape.saves,
        load_timeout_s=config.load_timeout_s,
        save_timeout_s=config.save_timeout_s,
        page_lock_bytes_max=config.page_lock_bytes_max,
        vram_open=vram_open,
    )


def _say_what_has_one_order(layout: StoreLayout, shape: EngineShape) -> None:
    for group, its in zip(layout.groups, shape.groups, strict=True):
        if group.geometry.folded_heads == 1:
            log.warning(
                "payload_order tokens changes nothing for KV cache group %d: a worker has %s of it",
                its.number,
                "states" if group.geometry.recurrent else "one head",
            )


def _check_layerwise(config: ConnectorSettings, shape: EngineShape) -> None:
    if config.layerwise and any(group.geometry.runs for group in shape.groups):
        raise UsageError(
            "layerwise", True, "must be false where layers of one KV cache group differ in shape"
        )
    if config.layerwise and any(group.geometry.recurrent for group in shape.groups):
        raise UsageError(
            "layerwise",
            True,
            "must be false with state-space layers: engines do not tell when one of them has run",
        )
    engine_groups = max(shape.engine_groups, len(shape.groups))
    if config.layerwise and shape.loads and engine_groups > 1:
        raise UsageError(
            "layerwise",
            True,
            f"must be false where the engine has {engine_groups} KV cache groups: "
            "their ids do not tell the engine which block of a running request failed. "
            "It may be true with kv_role kv_producer",
        )
    if config.layerwise and shape.volatile_tokens:
        raise UsageError(
            "layerwise", True, "must be false with a draft model: its layers are written twice"
        )
