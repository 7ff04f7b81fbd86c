"""Keeps chunks of LMCache 0.5 in the store where LMCache runs inside an engine's process.

In LMCache's configuration file:

    remote_storage_plugins: ["kvstore"]
    extra_config:
      remote_storage_plugin.kvstore.module_path: connector.adapters.lmcache
      remote_storage_plugin.kvstore.class_name: KVStoreConnectorAdapter
      remote_storage_plugin.kvstore.url: redis://HOST:6379
      remote_storage_plugin.kvstore.weights_id: llama-3-2026-11

Settings are listed in docs/engines.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from connector.adapters.lmcache.interface import check_interface, names_of_lmcache
from connector.adapters.lmcache.inventory import Inventory, Stored
from connector.adapters.lmcache.objects import (
    EngineKey,
    MemoryObject,
    engine_names,
    namespace,
    parts,
)
from connector.build import open_store
from connector.limits import (
    LIST_PAGE_KEYS_MAX,
    LOAD_STAGING_BYTES,
    SAVE_BATCH_BLOCKS,
    TASK_THREADS,
)
from connector.pages.pages import Pages, is_there, scatter
from connector.settings import STORE_SETTINGS, ConnectorSettings
from connector.worker.tasks import TaskThreads
from kvstore import PeerError, PutStatus
from kvstore.spi import BlockRef, DaemonThreads, in_batches

with names_of_lmcache():
    from lmcache.v1.storage_backend.connector import ConnectorAdapter, extract_plugin_type
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    try:
        from lmcache.inprocess.v1.protocol import RemoteMetadata
    except ModuleNotFoundError:  # before 0.5.7
        from lmcache.v1.protocol import RemoteMetadata

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.connector import ConnectorContext

log = logging.getLogger(f"kvstore.{__name__}")

T = TypeVar("T")
PLUGIN = "kvstore"
_LOADER_SETTINGS = ("module_path", "class_name")
"""Settings of a plug-in that LMCache itself reads."""


class KVStoreConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes a connector for each of LMCache's plug-ins that is named `kvstore` or `kvstore.…`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        scheme, _, name = url.partition("://")
        return scheme == "plugin" and bool(extract_plugin_type(name) == PLUGIN)

    def create_connector(self, context: ConnectorContext) -> KVStoreRemoteConnector:
        prefix = f"remote_storage_plugin.{context.plugin_name or PLUGIN}."
        extra = context.config.extra_config or {}
        own = {
            name.removeprefix(prefix): value
            for name, value in extra.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _LOADER_SETTINGS
        }
        return KVStoreRemoteConnector(context, own)


class KVStoreRemoteConnector(RemoteConnector):  # type: ignore[misc]
    """Keeps chunks under LMCache's engine keys.

    LMCache's loop waits for nothing: threads of ours do what is asked for, several tasks at a
    time. A peer's fault is a miss; a put that failed raises, because that is how LMCache counts it.
    """

    def __init__(self, context: ConnectorContext, settings: dict[str, object]) -> None:
        super().__init__(context.config, context.metadata)
        config = ConnectorSettings.from_extra(
            settings, where="remote_storage_plugin", only=STORE_SETTINGS
        )
        chunks = namespace(
            config,
            "lmcache-engine",
            lmcache=version("lmcache"),
            serde=str(context.config.remote_serde),
            metadata_bytes=int(self.remote_metadata_bytes),
        )
        self._memory = context.local_cpu_backend
        self._store = open_store(config)
        self._pages = Pages(self._store, chunks)
        self._inventory: Inventory[EngineKey] = Inventory()
        self._tasks = TaskThreads("kvstore-lmcache", lambda: None, TASK_THREADS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    async def _do(
        self,
        work: Callable[[], T],
        otherwise: T,
        drop: Callable[[T], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> T:
        """Return what `work` returns on a thread of ours; `drop` it where nobody waits for it any
        more. `failed` is called when `work` raised or cannot be run, whoever waits."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(result: T) -> None:
            if not answer.cancelled():
                answer.set_result(result)
            elif drop is not None:
                drop(result)

        def tell(result: T) -> None:
            try:
                loop.call_soon_threadsafe(end, result)
            except RuntimeError:  # the loop has ended
                if drop is not None:
                    drop(result)

        def refuse() -> None:
            if failed is not None:
                failed()
            tell(otherwise)

        self._tasks.submit(lambda: tell(work()), refuse)
        return await answer

    # Whether a chunk is there

    async def exists(self, key: EngineKey) -> bool:
        return await self._do(lambda: self.exists_sync(key), False)

    def exists_sync(self, key: EngineKey) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[EngineKey]) -> int:
        """Return length of the leading run of chunks that can be read from here."""
        return self._pages.run_length(engine_names(keys))

    def support_batched_async_contains(self) -> bool:
        return True

    async def batched_async_contains(self, lookup_id: str, keys: list[EngineKey], pin: bool) -> int:
        """Do `batched_contains`. `pin` does nothing, as with all of LMCache's remote storage: a
        chunk that is evicted meanwhile is a miss."""
        return await self._do(lambda: self.batched_contains(keys), 0)

    # Loading

    async def get(self, key: EngineKey) -> MemoryObject | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[EngineKey]) -> list[MemoryObject | None]:
        """Return each chunk in memory of LMCache's, None for a miss."""
        return await self._do(lambda: self._load(keys), [None] * len(keys), _release)

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[EngineKey]
    ) -> list[MemoryObject | None]:
        """Return the leading run of `batched_get`."""
        loaded = await self.batched_get(keys)
        run = next((i for i, obj in enumerate(loaded) if obj is None), len(loaded))
        _release(loaded[run:])
        return loaded[:run]

    def _load(self, keys: list[EngineKey]) -> list[MemoryObject | None]:
        found = self._store.lookup(self._pages.keys(engine_names(keys)))
        loaded: list[MemoryObject | None] = [None] * len(keys)
        wanted = [(i, ref) for i, ref in enumerate(found) if ref is not None]

        def size_bytes(_: tuple[int, BlockRef]) -> int:
            return int(self.full_chunk_size_bytes + self.remote_metadata_bytes)

        with ExitStack() as undo:
            undo.callback(_release, loaded)
            for batch in in_batches(wanted, SAVE_BATCH_BLOCKS, size_bytes, LOAD_STAGING_BYTES):
                views = self._store.views([ref for _, ref in batch], None)
                for (i, _), view in zip(batch, views, strict=True):
                    loaded[i] = None if view is None else self._read(view.buffer, view.valid)
            undo.pop_all()
        self._store.touch([ref.key for i, ref in wanted if loaded[i] is not None])
        return loaded

    def _read(self, payload: memoryview, valid: Callable[[], bool]) -> MemoryObject | None:
        """Return a copy of a chunk in memory of LMCache's, of the shape that it was saved with."""
        size_bytes = payload.nbytes - int(self.remote_metadata_bytes)
        saved = bytes(payload[max(0, size_bytes) :])
        if size_bytes <= 0 or not valid():
            return None
        meta = RemoteMetadata.deserialize(saved)
        obj: MemoryObject | None = self._memory.allocate(meta.shapes, meta.dtypes, meta.fmt)
        if obj is None:
            return None
        memory = memoryview(obj.byte_array).cast("B")
        if memory.nbytes == size_bytes == meta.length:
            scatter(payload[:size_bytes], [memory])
            if valid():
                return obj
        obj.ref_count_down()
        return None

    # Saving

    async def put(self, key: EngineKey, memory_obj: MemoryObject) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[EngineKey], memory_objs: list[MemoryObject]) -> None:
        """Save each chunk; one that is there already, or is just being saved, is a success.

        Raises `PeerError` when some could not be saved. The memory is held until it was copied,
        whatever becomes of who waits.
        """
        began = False
        for obj in memory_objs:
            obj.ref_count_up()

        def save() -> str:
            nonlocal began
            began = True
            try:
                return self._save(keys, memory_objs)
            finally:
                _release(memory_objs)

        def never_began() -> None:
            if not began:
                _release(memory_objs)

        why = "the task failed, or too many are waiting"
        refused = await self._do(save, why, failed=never_began)
        if refused:
            raise PeerError(f"not all of {len(keys)} chunks are stored: {refused}")

    def _save(self, keys: Sequence[EngineKey], objs: Sequence[MemoryObject]) -> str:
        pages = [parts(obj, bytearray(_metadata(obj))) for obj in objs]
        results = self._pages.save(engine_names(keys), pages)
        fresh = [i for i, r in enumerate(results) if r.status is PutStatus.STORED]
        self._inventory.add([keys[i] for i in fresh], [int(objs[i].get_size()) for i in fresh])
        return next((str(result) for result in results if not is_there(result)), "")

    # The rest

    def remove_sync(self, key: EngineKey) -> bool:
        """Drop a chunk wherever it is. Return whether it was there."""
        try:
            (dropped,) = self._store.drop(self._pages.keys(engine_names([key])))
        except PeerError as e:
            log.warning("kvstore: %s is not removed: %s", key, e)
            return False
        self._inventory.remove(self._inventory.of([key]))
        return dropped

    async def list(self) -> Sequence[str]:
        """Return which chunks this process has stored, as far as they are still there."""
        return await self._do(self._list, [])

    def _list(self) -> Sequence[str]:
        there: list[Stored[EngineKey]] = []
        cursor = None
        while page := self._inventory.page(None, LIST_PAGE_KEYS_MAX, cursor):
            found = self._store.lookup(self._pages.keys(engine_names([c.key for c in page])))
            there += [c for c, ref in zip(page, found, strict=True) if ref is not None]
            cursor = str(page[-1].number)
        return [c.key.to_string() for c in there]

    async def close(self) -> None:
        """End all tasks and give everything back."""
        await asyncio.wrap_future(DaemonThreads(1, "kvstore-close").submit(self._tasks.close))
        self._store.close()


def _metadata(obj: MemoryObject) -> bytes:
    size_bytes = len(memoryview(obj.byte_array).cast("B"))
    meta = RemoteMetadata(size_bytes, obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format())
    return bytes(meta.serialize())


def _release(objs: Sequence[MemoryObject | None]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


check_interface(KVStoreConnectorAdapter, ConnectorAdapter, {"__init__": ("self", "schema")})
check_interface(
    KVStoreRemoteConnector, RemoteConnector, {"__init__": ("self", "config", "metadata")}
)
