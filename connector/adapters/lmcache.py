"""Keeps chunks of LMCache 0.5 in the store: an L2 adapter plug-in.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{
        "type": "plugin", "module_path": "connector.adapters.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"url": "redis://HOST:6379", "weights_id": "llama-3-2026-11"}}'

Settings are listed in docs/engines.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from connector.build import open_store
from connector.layout.geometry import Field
from connector.limits import LOCK_TIMEOUT_S, LOCKED_KEYS_MAX, TIMEOUT_S_MAX
from connector.pages.locks import Locks
from connector.pages.pages import Pages, Parts, is_there
from connector.settings import STORE_SETTINGS, ConnectorSettings
from connector.worker.tasks import Results, TaskThread
from kvstore import Namespace, PutStatus, UsageError, tenant_salt

log = logging.getLogger(__name__)

OBJECT_VERSION = 1
"""Grows when the same fields come to mean other bytes."""
FORMAT_BYTES = 16
"""At the end of each payload: what kind of object it is. LMCache's keys do not tell dtypes apart,
and at a lookup it may not know them; so objects of another kind are found but not loaded."""


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps chunks under LMCache's object keys. Locked chunks are pinned on the memory node of this
    host.

    One thread does all tasks in their order. A peer's fault is a bit that is not
    set or a store that did not succeed, never an exception; wrong settings raise.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=0)  # the node evicts by itself
        own = {name: params[name] for name in params if name not in _LOCK_SETTINGS}
        config = ConnectorSettings.from_extra(own, where="adapter_params", only=STORE_SETTINGS)
        most, timeout_s = _lock_settings(params)
        if config.weights_id is None:
            raise UsageError(
                "weights_id",
                None,
                "must be a name that changes with the weights or dtype of any model: LMCache's "
                "keys have a model's name alone, and its server does not see the weights",
            )
        fields: dict[str, Field] = {
            "engine": "lmcache",
            "object_version": OBJECT_VERSION,
            "weights": f"id {config.weights_id}",
            **config.life,
        }
        namespace = Namespace(fields, salt=tenant_salt())
        self._store = open_store(config)
        self._pages = Pages(self._store, namespace)
        self._locks = Locks(self._store, most=most, timeout_s=timeout_s)
        self._events = [create_event_notifier() for _ in range(3)]
        stored, looked_up, loaded = self._events
        self._stored: Results[L2StoreResult] = Results(_signal(stored))
        self._looked_up: Results[Bitmap] = Results(_signal(looked_up))
        self._loaded: Results[Bitmap] = Results(_signal(loaded))
        self._tasks = TaskThread("kvstore-lmcache", self._locks.expire)
        self._closed = False

    def get_store_event_fd(self) -> int:
        return int(self._events[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events[2].fileno())

    # Store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Save each object; a key that is there already, or is just being saved, is a success."""
        number = self._tasks.number()

        def store() -> None:
            pages = [_parts(obj, bytearray(_format(obj))) for obj in objects]
            results = self._pages.save(_names(keys), pages)
            fresh = [i for i, r in enumerate(results) if r.status is PutStatus.STORED]
            sizes_bytes = [int(objects[i].get_size()) for i in fresh]
            if fresh:
                self._notify_keys_stored([keys[i] for i in fresh], sizes_bytes)
            refused = next((r for r in results if not is_there(r)), None)
            if refused is not None:
                log.warning("kvstore: not all of %d objects are stored: %s", len(keys), refused)
            self._stored.put(number, L2StoreResult(refused is None, sum(sizes_bytes)))

        self._tasks.submit(store, lambda: self._stored.put(number, L2StoreResult(False, 0)))
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.pop_all()

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Find and pin what the node of this host has; one request to it, none to the index."""
        number = self._tasks.number()

        def look_up() -> None:
            locked = self._locks.lock(self._pages.keys(_names(keys)))
            self._looked_up.put(number, _bitmap(locked))

        self._tasks.submit(look_up, lambda: self._looked_up.put(number, Bitmap(len(keys))))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Give each lock back once. What the node cannot be told now it learns when it is
        reached again."""
        names = _names(keys)
        self._tasks.submit(
            lambda: self._locks.unlock(self._pages.keys(names)), lambda: None, urgent=True
        )

    # Load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Copy chunks into `objects`; a bit is set when all of a chunk's bytes are in place.

        An object that is not exactly as large as the chunk, or of another shape
        or dtype, is not loaded; what it holds then is undefined.
        """
        number = self._tasks.number()

        def load() -> None:
            names = self._pages.keys(_names(keys))
            where, borrowed = self._locks.borrow(names)
            try:
                loaded = [
                    found is not None and self._read(found, obj)
                    for found, obj in zip(where, objects, strict=True)
                ]
                for name, ok in zip(names, loaded, strict=True):
                    if not ok:
                        self._locks.lost(name)
            finally:
                self._locks.give_back(borrowed)
            accessed = [key for key, ok in zip(keys, loaded, strict=True) if ok]
            if accessed:
                self._notify_keys_accessed(accessed)
            self._loaded.put(number, _bitmap(loaded))

        self._tasks.submit(load, lambda: self._loaded.put(number, Bitmap(len(keys))))
        return number

    def _read(self, found: Any, obj: Any) -> bool:
        saved_format = bytearray(FORMAT_BYTES)
        return self._pages.read(found, _parts(obj, saved_format)) and saved_format == _format(obj)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.pop(task_id)

    # The rest

    def get_usage(self) -> AdapterUsage:
        """The usage, which is unknown: the node evicts by itself and says so to nobody."""
        return AdapterUsage(total_bytes_used=0, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._tasks.alive, "type": "kvstore", "locked": len(self._locks)}

    def close(self) -> None:
        """End all tasks and locks; the event descriptors are closed. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._tasks.close():
            self._locks.close()
        self._store.close()
        for event in self._events:
            event.close()


def _signal(event: Any) -> Callable[[], None]:
    """A task that ends after `close` has nobody left to tell."""

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


def _names(keys: Sequence[Any]) -> list[bytes]:
    """Each object key in bytes that no other object key has."""
    return [
        blake2b(
            json.dumps(
                [k.chunk_hash.hex(), k.model_name, k.kv_rank, k.object_group_id, k.cache_salt]
            ).encode(),
            digest_size=32,
        ).digest()
        for k in keys
    ]


def _parts(obj: Any, trailer: bytearray) -> Parts:
    return [memoryview(obj.byte_array).cast("B"), memoryview(trailer)]


def _format(obj: Any) -> bytes:
    """What an object of LMCache's is, beside its size: shapes and dtypes, one or a list of each."""
    meta = obj.metadata
    shapes = [list(shape) for shape in meta.shapes or [meta.shape]]
    kind = json.dumps([shapes, [str(dtype) for dtype in meta.dtypes or [meta.dtype]]])
    return blake2b(kind.encode(), digest_size=FORMAT_BYTES).digest()


_LOCK_SETTINGS = {
    "locked_keys_max": (LOCKED_KEYS_MAX, LOCKED_KEYS_MAX),
    "lock_timeout_s": (LOCK_TIMEOUT_S, TIMEOUT_S_MAX),
}
"""Name: default, most."""


def _lock_settings(params: Mapping[str, Any]) -> tuple[int, float]:
    values: list[float] = []
    for name, (default, most) in _LOCK_SETTINGS.items():
        value = params.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise UsageError(name, value, f"must be a number greater than 0, at most {most:g}")
        values.append(value)
    return int(values[0]), float(values[1])
