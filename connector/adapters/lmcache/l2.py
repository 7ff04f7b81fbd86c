"""Keeps chunks of LMCache 0.5 in the store: an L2 adapter plug-in.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{
        "type": "plugin", "module_path": "connector.adapters.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"url": "redis://HOST:6379", "weights_id": "llama-3-2026-11"}}'

Settings are listed in docs/engines.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from connector.adapters.lmcache.interface import check_interface, names_of_lmcache
from connector.adapters.lmcache.inventory import Inventory, Stored
from connector.adapters.lmcache.objects import (
    FORMAT_BYTES,
    MemoryObject,
    ObjectKey,
    kind,
    names,
    namespace,
    parts,
)
from connector.build import open_store
from connector.limits import (
    INVENTORY_CHECK_KEYS,
    LIST_PAGE_KEYS_MAX,
    TASK_THREADS,
)
from connector.pages.locks import Locks
from connector.pages.pages import Pages, is_there
from connector.settings import STORE_SETTINGS, ConnectorSettings
from connector.worker.tasks import Results, TaskThreads
from kvstore import PeerError, PutStatus, UsageError

with names_of_lmcache():
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed import api
    from lmcache.v1.distributed.api import KeyEntry, KeyListPage
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

log = logging.getLogger(f"kvstore.{__name__}")

CAPACITY = "max_capacity_gb"
CAPACITY_GB_MAX = 1 << 20


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps chunks under LMCache's object keys. Locked chunks are pinned on the memory nodes of
    this host; those of other hosts are found and loaded too.

    One thread looks up, so that no lookup waits for bytes; others store and load, several tasks
    at a time. A peer's fault is a bit that is not set or a store that did not succeed, never an
    exception; wrong settings raise.
    """

    def __init__(self, params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        own = {name: params[name] for name in params if name != CAPACITY}
        config = ConnectorSettings.from_extra(own, where="adapter_params", only=STORE_SETTINGS)
        super().__init__(max_capacity_bytes=_capacity_bytes(params.get(CAPACITY, 0)))
        chunks = namespace(config, "lmcache")
        self._store = open_store(config)
        self._pages = Pages(self._store, chunks)
        self._locks = Locks(self._store)
        self._inventory: Inventory[ObjectKey] = Inventory()
        self._events = [create_event_notifier() for _ in range(3)]
        stored, looked_up, loaded = self._events
        self._stored: Results[L2StoreResult] = Results(_signal(stored))
        self._looked_up: Results[Bitmap] = Results(_signal(looked_up))
        self._loaded: Results[Bitmap] = Results(_signal(loaded))
        self._lookups = TaskThreads("kvstore-lmcache", self._clean_up)
        self._copies = TaskThreads("kvstore-lmcache-copy", lambda: None, TASK_THREADS)
        self._closed = False

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    def get_memory_tags(self) -> api.MemoryTags:
        """Return what LMCache (from 0.5.7 on) tells kinds of storage apart by: as its own adapters
        of stores that several hosts share."""
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.REMOTE)

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObject]) -> int:
        """Save each object; a key that is there already, or is just being saved, is a success."""
        number = self._copies.number()

        def store() -> None:
            pages = [parts(obj, bytearray(kind(obj))) for obj in objects]
            results = self._pages.save(names(keys), pages)
            fresh = [i for i, r in enumerate(results) if r.status is PutStatus.STORED]
            sizes_bytes = [int(objects[i].get_size()) for i in fresh]
            if fresh:
                self._count([keys[i] for i in fresh], sizes_bytes)
            refused = next((r for r in results if not is_there(r)), None)
            if refused is not None:
                log.warning("kvstore: not all of %d objects are stored: %s", len(keys), refused)
            self._stored.put(number, L2StoreResult(refused is None, sum(sizes_bytes)))

        self._copies.submit(store, lambda: self._stored.put(number, L2StoreResult(False, 0)))
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.pop_all()

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, object]
    ) -> int:
        """Find each key by itself: pinned by one request to the nodes of this host, or, by one to
        the index, on another host."""
        number = self._lookups.number()

        def look_up() -> None:
            locked = self._locks.lock(self._pages.keys(names(keys)))
            self._looked_up.put(number, _bitmap(locked))

        self._lookups.submit(look_up, lambda: self._looked_up.put(number, Bitmap(len(keys))))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Give each lock back once. A node that cannot be reached now hears of it when it is
        reached again."""
        self._lookups.submit(
            lambda: self._locks.unlock(self._pages.keys(names(keys))), lambda: None, urgent=True
        )

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObject]) -> int:
        """Copy chunks into `objects`; a bit is set when all of a chunk's bytes are in place.

        An object that is not exactly as large as the chunk, or of another shape
        or dtype, is not loaded; what it holds then is undefined.
        """
        number = self._copies.number()

        def load() -> None:
            chunks = self._pages.keys(names(keys))
            where, borrowed = self._locks.borrow(chunks)
            try:
                kinds = [bytearray(FORMAT_BYTES) for _ in objects]
                pages = [parts(obj, saved) for obj, saved in zip(objects, kinds, strict=True)]
                copied = self._pages.read(where, pages)
                loaded = [
                    ok and saved == kind(obj)
                    for ok, saved, obj in zip(copied, kinds, objects, strict=True)
                ]
                for chunk, ok in zip(chunks, loaded, strict=True):
                    if not ok:
                        self._locks.lost(chunk)
            finally:
                self._locks.give_back(borrowed)
            accessed = [key for key, ok in zip(keys, loaded, strict=True) if ok]
            if accessed:
                self._store.touch([c for c, ok in zip(chunks, loaded, strict=True) if ok])
                self._notify_keys_accessed(accessed)
            self._loaded.put(number, _bitmap(loaded))

        self._copies.submit(load, lambda: self._loaded.put(number, Bitmap(len(keys))))
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.pop(task_id)

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Tell the nodes and LMCache (from 0.5.7 on, which calls it) that chunks were used."""
        chunks = self._pages.keys(names(keys))
        self._lookups.submit(lambda: self._store.touch(chunks), lambda: None)
        self._notify_keys_accessed(keys)

    # What this server has stored: counted by LMCache's base class, by salt too (`get_usage`)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Drop chunks wherever they are, those of other servers too; what is locked here stays.

        Chunks of a node that could not be asked stay counted, so that LMCache asks again.
        """
        free = [
            (key, chunk)
            for key, chunk in zip(keys, self._pages.keys(names(keys)), strict=True)
            if chunk not in self._locks
        ]
        try:
            self._store.drop([chunk for _, chunk in free])
        except PeerError as e:
            log.warning("kvstore: %d chunks are not deleted: %s", len(free), e)
            self._check(self._inventory.of(key for key, _ in free))
            return
        self._uncount(self._inventory.remove(self._inventory.of(key for key, _ in free)))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return which chunks this server has stored, oldest first, as far as they are still
        there."""
        if page_size <= 0:
            raise UsageError("page_size", page_size, "must be greater than 0")
        count = min(page_size, LIST_PAGE_KEYS_MAX)
        page = self._inventory.page(model_name, count, cursor)
        there = self._check(page)
        entries = tuple(KeyEntry(c.key.to_encoded_object_key(), c.size_bytes) for c in there)
        return KeyListPage(entries, str(page[-1].number) if len(page) == count else None)

    def _count(self, keys: list[ObjectKey], sizes_bytes: list[int]) -> None:
        # In this order nothing is taken off before it was counted, and who evicts by age hears
        # of the end of a former life before the beginning of this one.
        self._uncount(self._inventory.remove(self._inventory.of(keys)))
        self._notify_keys_stored(keys, sizes_bytes)
        self._uncount(self._inventory.add(keys, sizes_bytes))

    def _uncount(self, dropped: Sequence[Stored[ObjectKey]]) -> None:
        if dropped:
            self._notify_keys_deleted([c.key for c in dropped], [c.size_bytes for c in dropped])

    def _check(self, chunks: Sequence[Stored[ObjectKey]]) -> list[Stored[ObjectKey]]:
        """Return which of `chunks` are still there. What the nodes have evicted is counted no more;
        while the index does not answer, nothing counts as evicted."""
        found = self._store.lookup(self._pages.keys(names([c.key for c in chunks])))
        dropped = [c for c, where in zip(chunks, found, strict=True) if where is None]
        if found.short is None:
            self._uncount(self._inventory.remove(dropped))
        return [c for c, where in zip(chunks, found, strict=True) if where is not None]

    # The rest

    def _clean_up(self) -> None:
        self._locks.expire()
        if len(self._inventory):
            self._check(self._inventory.next_to_check(INVENTORY_CHECK_KEYS))

    def report_status(self) -> dict[str, object]:
        return {
            "is_healthy": self._lookups.alive and self._copies.alive,
            "type": "kvstore",
            "locked": len(self._locks),
            "stored": len(self._inventory),
        }

    def close(self) -> None:
        """End all tasks and locks; the event descriptors are closed. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        copied = self._copies.close()
        if self._lookups.close() and copied:
            self._locks.close()
        self._store.close()
        for event in self._events:
            event.close()


class _Event(Protocol):
    def notify(self) -> object: ...


def _signal(event: _Event) -> Callable[[], None]:
    """Return what notifies `event`. A task that ends after `close` has nobody left to notify."""

    def signal() -> None:
        with suppress(OSError, ValueError):
            event.notify()

    return signal


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for i, bit in enumerate(bits):
        if bit:
            bitmap.set(i)
    return bitmap


def _capacity_bytes(gb: object) -> int:
    if not isinstance(gb, int | float) or isinstance(gb, bool) or not 0 <= gb <= CAPACITY_GB_MAX:
        raise UsageError(CAPACITY, gb, f"must be a number from 0 to {CAPACITY_GB_MAX}")
    return int(gb * (1 << 30))


check_interface(
    KVStoreL2Adapter,
    L2AdapterInterface,
    {
        "__init__": ("self", "max_capacity_bytes"),
        "_notify_keys_stored": ("self", "keys", "sizes"),
        "_notify_keys_accessed": ("self", "keys"),
        "_notify_keys_deleted": ("self", "keys", "sizes"),
    },
)
