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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from connector.adapters.sglang.shape import page_namespace, settings
from connector.build import open_store
from connector.layout.identity import config_digest, files_of, weights_or_unknown
from connector.pages.pages import Pages, Parts, is_there, memory_at, pages_at
from kvstore import PeerError, UsageError

if TYPE_CHECKING:
    from connector.layout.geometry import Field

log = logging.getLogger(__name__)

UNREADABLE_FORMATS = ("dummy", "remote", "remote_instance", "runai_streamer", "private")
"""`load_format`s whose weights are in no file of this host."""
_OF_THIS_PROCESS = f"of process {uuid4().hex}"
SAMPLES_MAX = 1024
"""Transfers whose figures wait for `get_stats`; beyond it the oldest are dropped."""


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages under SGLang's hashes, bound to the namespace of weights, dtype, pool and shard.

    Called by SGLang's prefetch and backup threads at the same time. A peer's
    fault is a miss or False here, never an exception; only wrong settings raise.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = settings(extra)
        self._storage = storage_config
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._store = open_store(self._config)
        self._v1: Pages | None = None
        self._flat: Pages | None = None
        self._prefetched: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)
        self._backed_up: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    # The pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose memory pages are copied from and to."""
        super().register_mem_pool_host(mem_pool_host)
        engine = _engine_fields(self._config.weights_id)
        self._v1, self._flat = (
            Pages(
                self._store,
                page_namespace(self._storage, mem_pool_host, self._config, engine, interface),
            )
            for interface in ("v1", "flat")
        )
        log.info("kvstore: namespace %s", self._pages.namespace)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises `UsageError` for a second pool: it is better not to attach than to lose half."""
        if str(host_pool_name) != str(PoolName.KV):
            raise UsageError(
                "host_pool_name",
                str(host_pool_name),
                "only a KV pool can be stored, not those of hybrid models or of a draft model",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def _pages(self) -> Pages:
        """Pages as the interface that SGLang was told to use writes them."""
        pages = self._v1 if self._zero_copy else self._flat
        if pages is None:
            raise UsageError("mem_pool_host", None, "must be registered first")
        return pages

    def _host_pages(self, host_indices: Any, count: int) -> list[Parts]:
        addresses, sizes_bytes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return pages_at(addresses, sizes_bytes, count)

    # Zero copy

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages from the store into the host pool; whether each is in place and whole.

        `host_indices` are `page_size` token slots a key. After the first page
        that the index does not know all are False, as SGLang stops there.
        """
        assert self._v1 is not None, "the host pool is registered before it is used"
        started = time.monotonic()
        loaded = self._v1.load_run(_names(keys), self._host_pages(host_indices, len(keys)))
        self._prefetched.append((sum(loaded), time.monotonic() - started))
        return loaded

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages of the host pool into the store; whether each is there."""
        assert self._v1 is not None, "the host pool is registered before it is used"
        started = time.monotonic()
        results = self._v1.save(_names(keys), self._host_pages(host_indices, len(keys)))
        saved = [is_there(result) for result in results]
        self._backed_up.append((sum(saved), time.monotonic() - started))
        return saved

    # Flat pages, for SGLang without interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """`target_location`, a contiguous CPU tensor, filled with the page; None on a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        targets = list(target_locations or ())
        if len(targets) != len(keys):
            raise UsageError("target_locations", len(targets), f"must be one for {len(keys)} keys")
        assert self._flat is not None, "the host pool is registered before it is used"
        loaded = self._flat.load_run(_names(keys), [_tensor(target) for target in targets])
        return [target if ok else None for target, ok in zip(targets, loaded, strict=True)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all of `values`, contiguous CPU tensors, are in the store now."""
        tensors = list(values or ())
        if len(tensors) != len(keys):
            raise UsageError("values", len(tensors), f"must be one for {len(keys)} keys")
        assert self._flat is not None, "the host pool is registered before it is used"
        results = self._flat.save(_names(keys), [_tensor(value) for value in tensors])
        return all(is_there(result) for result in results)

    # The rest

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Length of the leading run of pages that the index knows; one round trip."""
        return self._pages.run_length(_names(keys))

    def clear(self) -> None:
        """Drop this namespace's pages on every node."""
        ids = [pages.namespace.id for pages in (self._v1, self._flat) if pages is not None]
        try:
            result = self._store.reset(ids) if ids else True
        except PeerError as e:
            result, why = False, str(e)
        else:
            why = str(result)
        if not result:
            log.warning("kvstore: pages are not cleared everywhere: %s", why)

    def get_stats(self) -> Any:
        """Pages and GB/s of every transfer since the last call, if SGLang collects them."""
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


def _tensor(tensor: Any) -> Parts:
    """A flat page's bytes. Raises `UsageError` unless it is contiguous and in host memory."""
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError("page", type(tensor).__name__, "must be a contiguous CPU tensor")
    return [memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())]


def _engine_fields(weights_id: str | None) -> dict[str, Field]:
    """Namespace fields that SGLang's process knows."""
    fields: dict[str, Field] = {"version": str(sglang.__version__)}
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        model, revision = str(args.model_path), getattr(args, "revision", None)
    except (ImportError, ValueError, AttributeError, RuntimeError, AssertionError):
        if weights_id is None:
            why_not = "the server's arguments cannot be read"
            fields["weights"] = weights_or_unknown(None, why_not, _OF_THIS_PROCESS)
        return fields
    path, why_not = files_of(model, revision, getattr(args, "download_dir", None))
    if weights_id is None:
        if str(getattr(args, "load_format", "auto")) in UNREADABLE_FORMATS:
            path, why_not = None, f"load_format {args.load_format} reads no files of this host"
        fields["weights"] = weights_or_unknown(path, why_not, _OF_THIS_PROCESS)
    fields["forward"] = config_digest(path) if path is not None else ""
    for field, name in (
        ("overrides", "json_model_override_args"),
        ("weights_dtype", "dtype"),
        ("quantisation", "quantization"),
        ("kv_cache_dtype", "kv_cache_dtype"),
    ):
        fields[field] = str(getattr(args, name, None) or "")
    return fields
