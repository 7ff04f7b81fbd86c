"""Puts the parts together: settings and geometry in, scheduler side or worker side out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from connector.geometry import Field, KVGeometry, ShardTopology, StoreLayout, shard_namespaces
from connector.lazy_store import LazyStore
from connector.scheduler import SchedulerCore, SchedulerSettings
from connector.worker import WorkerCore
from kvstore import BlockSession, BlockStore, Limits

if TYPE_CHECKING:
    from connector.settings import ConnectorSettings


def open_store(config: ConnectorSettings) -> BlockStore:
    """The store these settings name. Raises `UsageError` for bad settings; contacts nobody yet."""
    return BlockSession(
        config.url,
        key_prefix=config.key_prefix,
        node=config.node,
        run_dir=Path(config.run_dir) if config.run_dir else None,
        verify=config.verify,
        limits=Limits(redis_timeout_s=config.lookup_timeout_s),
        node_size_bytes=config.node_size_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an adapter has read from its engine's configuration."""

    geometry: KVGeometry
    topology: ShardTopology
    model: dict[str, Field]
    """Namespace fields that only the engine knows."""
    group: int = 0
    null_block_id: int | None = None
    volatile_tokens: int = 0
    loads: bool = True
    saves: bool = True

    def layout(self, config: ConnectorSettings) -> StoreLayout:
        """The same on both sides, so that they agree on every key."""
        tokens = config.block_tokens or self.geometry.default_block_tokens()
        self.geometry.check_block_tokens(tokens)
        return StoreLayout(
            self.geometry.engine_block_tokens,
            tokens,
            shard_namespaces(self.model, self.geometry, self.topology, tokens, self.group),
        )


def scheduler_side(config: ConnectorSettings, shape: EngineShape) -> SchedulerCore:
    """The scheduler side; the store is opened when it is first needed."""
    settings = SchedulerSettings(
        loads=shape.loads,
        saves=shape.saves,
        save_decode=config.save_decode,
        lookup_timeout_s=config.lookup_timeout_s,
        volatile_tokens=shape.volatile_tokens,
        null_block_id=shape.null_block_id,
    )
    store = LazyStore(lambda: open_store(config))
    return SchedulerCore(store, shape.layout(config), settings)


def worker_side(config: ConnectorSettings, shape: EngineShape, rank: int) -> WorkerCore:
    """The worker side of worker `rank` (pipeline-major)."""
    layout = shape.layout(config)

    def open_to_save() -> BlockStore:
        store = open_store(config)
        store.introduce(layout.namespaces)
        return store

    return WorkerCore(
        LazyStore(open_to_save),
        layout,
        shape.geometry,
        shard=shape.topology.shard_of(rank),
        saves=shape.saves and shape.topology.saves(rank),
        load_timeout_s=config.load_timeout_s,
        save_timeout_s=config.save_timeout_s,
    )
