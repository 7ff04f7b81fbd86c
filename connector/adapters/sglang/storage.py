"""Keeps pages of SGLang's host pool in the store: a HiCacheStorage for SGLang 0.5.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
        --hicache-mem-layout page_first --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{
            "backend_name": "kvstore", "module_path": "connector.adapters.sglang",
            "class_name": "KVStoreHiCache", "interface_v1": 1,
            "url": "redis://HOST:6379"}'

Settings are those of `connector.settings.STORE_SETTINGS`; docs/engines.md describes them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from connector.adapters.sglang.engine import draft_fields, engine_fields
from connector.adapters.sglang.hashes import check_page_hashes
from connector.adapters.sglang.hits import Hits
from connector.adapters.sglang.pools import PoolPages, flat_size, page_form, tensor_parts
from connector.adapters.sglang.shape import KV, has_draft, page_namespaces, settings
from connector.build import open_store
from connector.pages.pages import Pages, is_there
from kvstore import PeerError, UsageError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolTransfer
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

    from kvstore import Namespace
    from kvstore.spi import Key

log = logging.getLogger(f"kvstore.{__name__}")

SAMPLES_MAX = 1024
"""Transfers whose figures wait for `get_stats`; beyond it the oldest are dropped."""


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages under SGLang's hashes, bound to the namespace of weights, dtype, pool and shard.

    Called by SGLang's prefetch and backup threads at the same time. A peer's
    fault is a miss or False here, never an exception; only wrong settings raise.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = settings(extra)
        check_page_hashes(str(sglang.__version__))
        self._storage = storage_config
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._store = open_store(self._config)
        self._v1: PoolPages | None = None
        self._flat: Pages | None = None
        self._pools: dict[str, PoolPages] = {}
        """Pools that hybrid and draft models have beside the KV pool."""
        self._prefetched: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)
        self._backed_up: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    # The pools

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Take the pool whose memory pages are copied from and to."""
        super().register_mem_pool_host(mem_pool_host)
        if not self._zero_copy and not flat_size(mem_pool_host):
            kind = type(mem_pool_host).__name__
            raise UsageError("interface_v1", 0, f"must be 1: pages of {kind} are in other pools")
        self._v1 = self._pool_pages(mem_pool_host, KV)
        flat = self._namespaces(mem_pool_host, KV, "flat", ())
        self._flat = Pages(self._store, flat[0])
        log.info("kvstore: namespaces %s", self._v1.namespaces)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Take a pool that a hybrid model or a draft model has beside the KV pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:
            self._pools[name] = self._pool_pages(host_pool, name)

    def _pool_pages(self, pool: HostKVCache, name: str) -> PoolPages:
        form = page_form(pool, torch.arange(pool.page_size))
        interface = "flat" if form.flat else "v1"
        return PoolPages(
            self._store, pool, self._namespaces(pool, name, interface, form.sizes_bytes), form
        )

    def _namespaces(
        self, pool: HostKVCache, name: str, interface: str, sizes_bytes: Sequence[int]
    ) -> list[Namespace]:
        engine = engine_fields(self._config.weights_id)
        if has_draft(pool, name):
            engine |= draft_fields(self._config.weights_id)
        return page_namespaces(
            self._storage, pool, self._config, engine, interface, name=name, sizes_bytes=sizes_bytes
        )

    def _of(self, name: object) -> PoolPages:
        pages = self._v1 if str(name) == KV else self._pools.get(str(name))
        if pages is None:
            raise UsageError("pool", str(name), "must be registered first")
        return pages

    # Several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> PoolTransferResult:
        """Return how much of a prefix can be restored, all pools together; one index round trip.

        Pools in groups of blocks, which SGLang never lets decide, have no verdict.
        """
        transfers = [t for t in pool_transfers or () if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        names = _names(keys)
        pools = {KV: self._kv_keys(names)}
        pools |= {str(t.name): self._of(t.name).keys(names) for t in transfers}
        found = iter(self._store.lookup([key for wanted in pools.values() for key in wanted]))
        there = {name: [next(found) is not None for _ in wanted] for name, wanted in pools.items()}
        hits = Hits(self._whole_kv(there[KV]))
        for transfer in transfers:
            pages = self._of(transfer.name).whole(there[str(transfer.name)])
            trailing = None
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or ()))
            hits.need(transfer.name, pages, trailing)
        counts = {PoolName.KV: hits.run, **hits.by_pool}
        reported = {name: count for name, count in counts.items() if count}
        return PoolTransferResult(hits.longest, reported, hits.restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: object = None
    ) -> dict[PoolName, list[bool]]:
        """Copy pages from the store into several pools. Return whether each is in place and
        whole."""
        return {
            t.name: self._each(t, lambda pages, *what: pages.load(*what, run=False))
            for t in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: object = None
    ) -> dict[PoolName, list[bool]]:
        """Copy pages of several pools into the store. Return whether each is there."""
        return {t.name: self._each(t, PoolPages.save) for t in transfers}

    def _each(
        self,
        transfer: PoolTransfer,
        do: Callable[[PoolPages, list[bytes], torch.Tensor], list[bool]],
    ) -> list[bool]:
        keys, pages = list(transfer.keys or ()), self._of(transfer.name)
        indices = transfer.host_indices
        if indices is None or len(indices) != len(keys) * pages.page_tokens:
            given = 0 if indices is None else len(indices)
            log.error(
                "kvstore: pool %s: %d host indices for %d pages of %d",
                *(transfer.name, given, len(keys), pages.page_tokens),
            )
            return [False] * len(keys)
        return do(pages, _names(keys), indices) if keys else []

    # Zero copy

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Copy pages from the store into the host pool. Return whether each is in place and whole.

        `host_indices` are `page_size` token slots a key. After the first page that the index does
        not know all are False, as SGLang stops there.
        """
        started = time.monotonic()
        loaded = self._of(KV).load(_names(keys), host_indices, run=True)
        self._prefetched.append((sum(loaded), time.monotonic() - started))
        return loaded

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Copy pages of the host pool into the store. Return whether each is there."""
        started = time.monotonic()
        saved = self._of(KV).save(_names(keys), host_indices)
        self._backed_up.append((sum(saved), time.monotonic() - started))
        return saved

    # Flat pages, for SGLang without interface_v1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Return `target_location`, a contiguous CPU tensor, filled with the page; None on a
        miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or ())
        if len(targets) != len(keys):
            raise UsageError("target_locations", len(targets), f"must be one for {len(keys)} keys")
        loaded = self._flat_pages.load_run(
            _names(keys), [tensor_parts(target) for target in targets]
        )
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Return whether all of `values`, contiguous CPU tensors, are in the store now."""
        tensors = list(values or ())
        if len(tensors) != len(keys):
            raise UsageError("values", len(tensors), f"must be one for {len(keys)} keys")
        results = self._flat_pages.save(_names(keys), [tensor_parts(value) for value in tensors])
        return all(is_there(result) for result in results)

    # The rest

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return length of the leading run of pages that the index knows; one round trip."""
        names = _names(keys)
        if self._zero_copy:
            return self._of(KV).run_length(names)
        return self._flat_pages.run_length(names)

    def _kv_keys(self, names: list[bytes]) -> list[Key]:
        """Return the keys of KV pages as the interface that SGLang was told to use writes them."""
        return self._of(KV).keys(names) if self._zero_copy else self._flat_pages.keys(names)

    def _whole_kv(self, pieces_there: list[bool]) -> list[bool]:
        return self._of(KV).whole(pieces_there) if self._zero_copy else pieces_there

    @property
    def _flat_pages(self) -> Pages:
        if self._flat is None:
            raise UsageError("mem_pool_host", None, "must be registered first")
        return self._flat

    def clear(self) -> None:
        """Drop the pages of all of these pools on every node."""
        ids = [] if self._flat is None else [self._flat.namespace.id]
        for pages in (self._v1, *self._pools.values()):
            ids += [] if pages is None else [namespace.id for namespace in pages.namespaces]
        try:
            result = self._store.reset(ids) if ids else True
        except PeerError as e:
            result, why = False, str(e)
        else:
            why = str(result)
        if not result:
            log.warning("kvstore: pages are not cleared everywhere: %s", why)

    def get_stats(self) -> StorageMetrics | None:
        """Return pages and GB/s of every transfer since the last call, if SGLang collects them."""
        if not self._storage.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        page_gb = self.mem_pool_host.size_per_token * self.mem_pool_host.page_size / 1e9
        for samples, counts, bandwidths in (
            (self._prefetched, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._backed_up, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            for _ in range(len(samples)):
                pages, seconds = samples.popleft()
                counts.append(pages)
                bandwidths.append(pages * page_gb / max(seconds, 1e-9))
        return metrics

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        self._store.close()


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
