"""Puts the store behind the host memory of vLLM's own offloading (`TieringOffloadingSpec`).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "connector.adapters.vllm.tier",
            "url": "redis://HOST:6379", "weights_id": "llama-3-2026-11"}]}}'

vLLM decides what is offloaded and when; a chunk of its host memory is one block of the store.
Its keys are vLLM's: hashes of tokens, cache salt and adapters' names. What else the bytes depend
on is in the namespace.

All of vLLM's calls come from its scheduling thread and only leave a task. Copies are done by a
thread of ours, in order, and each ends by the store's deadlines. The memory of a job's chunks is
vLLM's again once the job was reported (`get_finished_jobs`), never before (rule 5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from connector.adapters.vllm.hand_over import callers
from connector.adapters.vllm.identity import device, unusual_fields
from connector.adapters.vllm.request import COUNTED, counts_media, takes_media
from connector.build import open_store
from connector.layout.geometry import Field
from connector.layout.identity import digest_of
from connector.limits import DRAIN_TIMEOUT_S
from connector.pages.pages import Pages, is_there, scatter
from connector.settings import STORE_SETTINGS, ConnectorSettings
from connector.worker.tasks import TaskThreads
from kvstore import InternalError, Namespace, UsageError, tenant_salt
from kvstore.spi import Key

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

log = logging.getLogger(f"kvstore.{__name__}")

CHUNK_VERSION = 1
"""Grows when the same fields come to mean other bytes."""


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Implements a secondary tier of vLLM's offloading that other engines share, on this host and
    others.

    A peer's fault is a miss or a job that did not succeed, never an exception; wrong settings
    raise `UsageError`.
    """

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = ConnectorSettings.from_extra(
            settings, where="secondary_tiers", only=STORE_SETTINGS
        )
        if config.weights_id is None:
            raise UsageError(
                "weights_id",
                None,
                "must be a name that changes with the weights, their adapters and the attention "
                "backend: vLLM tells its tiers a model's name alone",
            )
        engine = _engine()
        self.locality = None if locality is None else Locality(locality)
        fields = chunk_fields(offloading_spec, self.block_size_bytes, config.weights_id)
        self._fields = fields | config.life | ({} if engine is None else unusual_fields(engine))
        self._memory = primary_kv_view.cast("B")
        self._store = open_store(config)
        self._lock = threading.Lock()
        self._pages: Pages | None = None
        self._ended: deque[JobResult] = deque()
        """Ended jobs that were not reported yet. vLLM bounds them, because it gives chunks of its
        memory to each job. A job that is never reported would keep its chunks, and a request that
        waits for it, forever."""
        self._failed: set[OffloadKey] = set()
        """Keys that could not be loaded; the request that asked must not find them again."""
        self._draining = threading.Event()
        """Whether queued jobs fail instead of beginning."""
        self._tasks = TaskThreads("kvstore-tier", lambda: None)
        self._lookups = _Lookups(self, tier_type)

    # Looked up by vLLM's own helper, on a thread of its own

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        there = self._lookups.lookup(key, req_context)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def are_there(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each chunk can be read from here; one round trip to the index at most."""
        return [found is not None for found in self._store.lookup(self._keys(keys))]

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Save each chunk; one that is there already, or is just being saved, is a success."""
        keys, chunks = list(job_metadata.keys), self._chunks(job_metadata)

        def store() -> Sequence[OffloadKey]:
            results = self._names().save(keys, [[chunk] for chunk in chunks])
            refused = next((result for result in results if not is_there(result)), None)
            if refused is not None:
                log.warning("kvstore: not all of %d chunks are stored: %s", len(keys), refused)
            return [k for k, result in zip(keys, results, strict=True) if is_there(result)]

        self._submit(job_metadata, store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy chunks into vLLM's memory; what a chunk that did not succeed holds is undefined."""
        keys, chunks = list(job_metadata.keys), self._chunks(job_metadata)

        def load() -> Sequence[OffloadKey]:
            found = self._store.lookup(self._keys(keys))
            wanted = [(k, f, c) for k, f, c in zip(keys, found, chunks, strict=True) if f]
            views = self._store.views([f for _, f, _ in wanted], None)
            loaded: list[OffloadKey] = []
            for (key, _, chunk), view in zip(wanted, views, strict=True):
                if view is not None and view.buffer.nbytes == chunk.nbytes:
                    scatter(view.buffer, [chunk])
                    if view.valid():
                        loaded.append(key)
            self.touch(loaded, job_metadata.req_context)
            return loaded

        self._submit(job_metadata, load)

    def _submit(self, job: TransferJob, work: Callable[[], Sequence[OffloadKey]]) -> None:
        job_id, keys = int(job.job_id), list(job.keys)

        def end(done: Sequence[OffloadKey], seconds: float | None) -> None:
            whole = len(done) == len(keys)
            moved_bytes = len(done) * self.block_size_bytes
            partly = tuple(done) if job.is_promotion and done and not whole else None
            if job.is_promotion and not whole:
                with self._lock:
                    self._failed.update(set(keys).difference(done))
            self._ended.append(JobResult(job_id, whole, partly, seconds, moved_bytes))

        def task() -> None:
            began = time.monotonic()
            done = () if self._draining.is_set() else work()
            end(done, time.monotonic() - began)

        self._tasks.submit(task, lambda: end((), None))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [self._ended.popleft() for _ in range(len(self._ended))]
        with self._lock:
            failed, self._failed = self._failed, set()
        self._lookups.mark_miss(failed)  # else vLLM asks for the same load for ever
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if keys:
            self._store.touch(self._keys(list(keys)))

    def drain_jobs(self) -> None:
        """Return once nothing of ours uses vLLM's memory: the running job ends, by its deadlines,
        and those that wait have failed. Raises `InternalError` when that takes longer than
        `DRAIN_TIMEOUT_S`: then nothing may be said of that memory, and vLLM must not empty it.
        """
        idle = threading.Event()
        self._draining.set()
        try:
            self._tasks.submit(idle.set, idle.set, urgent=True)
            if not idle.wait(DRAIN_TIMEOUT_S):
                raise InternalError(
                    f"a job still uses vLLM's memory {DRAIN_TIMEOUT_S:g} s after it was to end: "
                    "its cache is not emptied; try again, or restart the engine"
                )
        finally:
            self._draining.clear()

    def shutdown(self) -> None:
        self._draining.set()
        self._lookups.shutdown()
        if self._tasks.close():
            self._memory.release()
        self._store.close()

    # Keys and memory

    def _names(self) -> Pages:
        """Return the names of pages, made at the first use: only then vLLM has chosen how it
        hashes."""
        with self._lock:
            if self._pages is None:
                first_hash = getattr(kv_cache_utils, "NONE_HASH", b"")
                fields = {**self._fields, "first_hash": bytes(first_hash).hex()}
                self._pages = Pages(self._store, Namespace(fields, salt=tenant_salt()))
            return self._pages

    def _keys(self, keys: Sequence[OffloadKey]) -> list[Key]:
        return self._names().keys([bytes(key) for key in keys])

    def _chunks(self, job: TransferJob) -> list[memoryview]:
        size_bytes = self.block_size_bytes
        starts = [int(chunk) * size_bytes for chunk in job.chunk_ids]
        return [self._memory[start : start + size_bytes] for start in starts]


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store; vLLM's part remembers answers for as long as a request lasts."""

    def __init__(self, tier: KVStoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.are_there(keys)


def _engine() -> VllmConfig | None:
    """Return the configuration of the engine that is making the tier; vLLM hands on a part of it.

    Raises `UsageError` where names of media are unique in one process only: a tier is told none of
    a request's, so that it can leave none out."""
    found = (caller.f_locals.get("vllm_config") for caller in callers())
    config = next((one for one in found if isinstance(one, VllmConfig)), None)
    if config is not None and takes_media(config) and counts_media(config):
        raise UsageError(
            "mm_processor_cache_gb",
            0,
            f"must be above 0 with a KVStoreTier, or prefix caching on: {COUNTED}. Without media "
            "--language-model-only does, too; KVStoreConnector stores requests that have none",
        )
    return config


def chunk_fields(spec: OffloadingSpec, chunk_bytes: int, weights_id: str) -> dict[str, Field]:
    """Return what the bytes of a chunk depend on, beside the tokens and the hash they begin with.

    vLLM's own identity of a chunk on disk, and what that leaves out: how a device and a
    release of vLLM lay out a page is promised nowhere. Raises `UsageError` where neither vLLM's
    identity nor anything else that a tier is told names all of it.
    """
    dcp_size = spec.config.parallel.dcp_size
    if dcp_size > 1:
        raise UsageError(
            "decode_context_parallel_size",
            dcp_size,
            "must be 1 with a KVStoreTier: vLLM does not tell its tiers the "
            "cp_kv_cache_interleave_size, which decides whose tokens a chunk has. "
            "KVStoreConnector stores such KV",
        )
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    config = spec.config
    return {
        "engine": "vllm-offloading",
        "chunk_version": CHUNK_VERSION,
        "weights": f"id {weights_id}",
        "chunk": digest_of({**mapper.get_run_config(), "rank": mapper.rank}),
        "chunk_bytes": chunk_bytes,
        "kv_cache_layout": str(config.kv_cache_layout),
        "vllm": vllm_version,
        "platform": device(),
    }
