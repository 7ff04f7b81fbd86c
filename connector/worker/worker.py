"""Moves one worker's bytes between engine blocks and the store: the worker side.

It knows no engine. A job of the scheduler side becomes a `Load` or `Save` (transfers.py):

    queued -> running -> ended -> reported, once (`poll`, `end_saves`)

    queued     in one of two bounded queues; a job that finds its queue full ends at once
    running    on the one thread that loads or the one that saves. Every copy from or to engine
               blocks is made inside the job's copy guard (copy_guard.py)
    ended      by its thread, or by the engine's thread when its deadline has passed, when it was
               cancelled, or at the end: but only between two copies, by the guard. From then on
               no copy of it starts, nothing of it is committed, and the engine may use the blocks
    reported   a load with the first block that is not in place, a save with what is stored

`_lock` guards which jobs are active and which are done; the queues are what passes from the
engine's thread to the others. Only `_end_locked` ends a job, and only once.

Must never happen:

- a job reported while a copy of it runs or may start: its blocks are somebody else's by then;
- a block counted as loaded before its view was checked after the copy (rule 4);
- a reservation that is neither committed nor aborted;
- an exception in the engine's thread for the store's sake: a load that fails is a recompute, a
  save that fails is a future miss.

One class, because loads and saves end by the same few lines under the same lock.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from connector import metrics
from connector.copiers.base import KVCopier, Ready
from connector.copiers.registered import kv_memory
from connector.layout.shard_reads import GroupReads, alike, bytes_of, found_in, windows
from connector.limits import (
    COPY_STUCK_S,
    LOAD_JOBS_MAX,
    LOAD_STAGING_BYTES,
    PAGE_LOCK_BYTES_MAX,
    SAVE_BATCH_BLOCKS,
    SAVE_BATCH_BYTES,
    SAVE_JOBS_MAX,
    SAVE_YIELD_S,
    SAY_EVERY_S,
    SHUTDOWN_TIMEOUT_S,
    Clock,
)
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob, WorkerReport, job_name
from connector.metrics import Counts
from connector.work_thread import WorkThread
from connector.worker import transfers
from connector.worker.load_pace import LoadPaces, far_of, takes_too_long
from connector.worker.transfers import Load, Reserved, Save, Transfer, gather_all
from kvstore import InternalError, KVStoreError, MissReason, PutResult, PutStatus
from kvstore.spi import BlockStore, Key, PoolMapping, Tier, in_batches

if TYPE_CHECKING:
    import torch

    from connector.layout.geometry import StoreLayout
    from connector.scheduler.lazy_store import LazyStore
    from connector.stats import CountStats

log = logging.getLogger(f"kvstore.{__name__}")


class WorkerCore:
    """Moves the bytes of one shard, over a `BlockStore`. One per engine worker; called by one
    thread."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        *,
        rank: int,
        saves: bool,
        load_timeout_s: float,
        save_timeout_s: float,
        page_lock_bytes_max: int = PAGE_LOCK_BYTES_MAX,
        vram_open: Callable[[], frozenset[tuple[int, int]]] = frozenset,
        clock: Clock = time.monotonic,
    ) -> None:
        """`vram_open` says, without waiting, which nodes' VRAM can be read here."""
        self._store = store
        self._rank = rank
        self._vram_open = vram_open
        self._vram_reported: frozenset[tuple[int, int]] = frozenset()
        self._layout = layout
        self._groups = [GroupReads(group, rank, layout.block_tokens) for group in layout.groups]
        self._saves = saves and any(group.saves for group in self._groups)
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._page_lock_bytes_max = page_lock_bytes_max
        self._clock = clock
        largest = max(group.block_bytes for group in self._groups)
        largest_read = max(group.read_bytes_max for group in self._groups)
        self._batch_blocks = max(1, min(SAVE_BATCH_BLOCKS, SAVE_BATCH_BYTES // largest))
        self._blocks: list[KVCopier] = []
        """Copiers per group; empty before the engine has given its memory."""
        self._close_memory: Callable[[], None] = lambda: None
        self._staging = memoryview(mmap.mmap(-1, max(LOAD_STAGING_BYTES, largest_read)))
        """Where blocks of other hosts arrive; only the loading thread uses it, and none of its
        pages exist before it does."""
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._active: dict[Transfer, None] = {}
        self._done: list[Transfer] = []
        self._loading: WorkThread[Any] = WorkThread("kvstore-load", self._load, LOAD_JOBS_MAX)
        self._saving: WorkThread[Any] = WorkThread("kvstore-save", self._save, SAVE_JOBS_MAX)
        self._closing = threading.Event()
        self._counts = Counts()
        self._paces = LoadPaces()
        self._far: deque[Load] = deque()
        """Loads from elsewhere that were taken from the queue and wait for one that runs."""
        self._last_load = -1
        self._dropped = 0
        self._said_at = float("-inf")

    def register_kv_caches(self, *groups: Mapping[str, torch.Tensor]) -> None:
        """Take the layer tensors of every group and start the transfer threads.

        Raises `UsageError` when the shapes are not those of the namespace.
        """
        memory = kv_memory(
            [
                (kv_caches, pieces.geometry)
                for kv_caches, pieces in zip(groups, self._groups, strict=True)
            ],
            self._layout.block_tokens,
            self._mappings,
            self._counts.page_locked,
            self._page_lock_bytes_max,
        )
        self._close_memory = memory.close
        self._store.device, self._store.holding = memory.device, memory.holding
        self._blocks = memory.groups
        self._loading.start(
            partial(self._store.warm_up, self._layout.groups[0].namespaces[0], connect=True)
        )
        self._saving.start()
        watch = threading.Thread(target=self._watch, name="kvstore-watch", daemon=True)
        watch.start()

    def _watch(self) -> None:
        """Report copies that are stuck, from a thread that never calls a driver: one that hangs may
        hold up the engine's thread, too."""
        while not self._closing.wait(COPY_STUCK_S / 4):
            with self._lock:
                active = list(self._active)
            for task in active:
                if took_s := task.guard.stuck_s():
                    transfers.report_stuck(task, took_s, self._counts)

    def _mappings(self) -> Sequence[PoolMapping]:
        """Return memory that payloads are copied from and to: the store's, and where they arrive
        from other hosts. Nothing before the device is known: asking opens the store."""
        if not self._blocks:
            return ()
        # In one part, which readers of other memory know nothing of and copy across.
        staging = PoolMapping(self._staging[:], len(self._staging), True, 0, 0)
        return [staging, *self._store.mappings()]

    # Called by the engine's thread

    def mark_ready(self) -> Ready | None:
        """Return what stands for all work that the engine has submitted so far, in all groups; see
        `KVCopier.mark_ready`. It is None before the engine has given its memory."""
        return self._blocks[0].mark_ready() if self._blocks else None

    def start_loads(self, jobs: Sequence[LoadJob], ready: Ready | None = None) -> None:
        """Queue loads; one that finds the queue full ends at once, failed.

        They wait for what `ready` stands for, which `mark_ready` gave before a forward that has
        nothing to do with them; without it for all that is submitted by now.
        """
        if not jobs:
            return
        ready = self.mark_ready() if ready is None else ready
        now = self._clock()
        for job in jobs:
            self._last_load = job.job_id
            self._start(Load(job, now + self._timeout_of(job), now, ready), self._loading)

    def _timeout_of(self, job: LoadJob) -> float:
        most_s = self._load_timeout_s
        return most_s if job.timeout_s is None else min(most_s, job.timeout_s)

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Queue saves of blocks that the forward before this call has filled."""
        if not jobs:
            return
        ready = self.mark_ready()
        now = self._clock()
        for job in jobs:
            task = Save(job, now + self._save_timeout_s, now, ready)
            if self._saves:
                self._start(task, self._saving)
            else:  # a replica: another worker saves these heads
                self._end(task)

    def wait_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end between steps, and a step never waits for one (`LayerwiseWorker`
        does)."""

    def layer_written(self, layer_name: str, jobs: Sequence[SaveJob]) -> None:
        """Do nothing: saves start when the whole forward is done (those of `LayerwiseWorker` do
        not)."""

    def _start(self, task: Any, on: WorkThread[Any]) -> None:
        with self._lock:
            self._active[task] = None
        if not (self._blocks and on.put(task)):
            task.why = MissReason.TOO_BUSY
            self._end(task)

    def cancel_loads(self, request_ids: Iterable[str]) -> None:
        """End the loads of requests that have ended; each is still reported once."""
        ended_ids = set(request_ids)
        if not ended_ids:
            return
        with self._lock:
            for task in list(self._active):
                if isinstance(task, Load) and task.job.request_id in ended_ids:
                    # From now on late: the next poll between two copies ends it.
                    task.deadline = self._clock()
                    task.why = metrics.ABORTED

    def end_saves(self, timeout_s: float) -> WorkerReport:
        """End all saves in flight, each after the copy of it that is running; those that ended.

        For an engine that is about to empty its cache. A save whose copy goes on for longer is
        not among them.
        """
        with self._lock:
            saves = [task for task in self._active if isinstance(task, Save)]
        self._end_after_copies(saves, timeout_s)
        report = WorkerReport()
        with self._lock:
            ended = [task for task in self._done if isinstance(task, Save)]
            self._done = [task for task in self._done if not isinstance(task, Save)]
        for task in ended:
            transfers.report_save(task, report, self._groups)
        return report

    def end_loads(self, job_ids: set[int], timeout_s: float) -> set[int]:
        """End these loads, each after the copy of it that is running. Return those that have ended,
        now or before: no copy of them runs or will start.

        Each is still reported once, but no block as invalid: it may be another request's by then.
        """
        asked = {job_id for job_id in job_ids if job_id <= self._last_load}
        with self._lock:
            loads = [t for t in self._active if isinstance(t, Load) and t.job.job_id in asked]
        self._end_after_copies(loads, timeout_s)
        with self._lock:
            for task in self._done:
                if isinstance(task, Load) and task.job.job_id in asked:
                    task.given_up = True
        return asked - {task.job.job_id for task in loads if not task.ended}

    def _end_after_copies(self, tasks: Sequence[Transfer], timeout_s: float) -> None:
        give_up_at = self._clock() + timeout_s
        for task in tasks:
            try:
                task.guard.end(max(0.0, give_up_at - self._clock()))
            except InternalError as e:
                log.warning("a transfer of request %s goes on: %s", job_name(task.job), e)
                continue
            task.why = metrics.ABORTED
            self._end(task)

    def poll(self, wait_s: float = 0.0) -> WorkerReport:
        """Return what ended since the last call, each job exactly once.

        Waits up to `wait_s` seconds for a first one while any job is active.
        A job past its deadline is ended here if no copy of it is running.
        """
        with self._lock:
            if wait_s > 0 and self._active and not self._done:
                self._wake.wait(wait_s)
            now = self._clock()
            late = [task for task in self._active if now >= task.deadline]
            for task in late:
                if task.guard.try_end():
                    task.why = task.why or MissReason.DEADLINE
                    self._end_locked(task)
            done, self._done = self._done, []
        report = WorkerReport()
        for task in done:
            if isinstance(task, Load):
                report.finished_loads.add(task.job.request_id)
                self._report_failures(task, report)
            else:
                transfers.report_save(task, report, self._groups)
        report.reads = self._paces.take()
        there = self._vram_open()
        if there != self._vram_reported:
            self._vram_reported = report.vram[self._rank] = there
        return report

    def _report_failures(self, task: Load, report: WorkerReport) -> None:
        transfers.report_failures(task, report, by_request=self._layout.fails_by_request)

    def take_stats(self) -> CountStats | None:
        """Return what was counted since the last call; None: nothing."""
        store = self._store.opened
        if store is not None:
            self._counts.read(store.read_bytes())
        return self._counts.take()

    def close(self) -> None:
        """Stop both threads and close the store; waits at most `SHUTDOWN_TIMEOUT_S`."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = self._clock() + SHUTDOWN_TIMEOUT_S
        with self._lock:
            tasks = list(self._active)
        for task in tasks:
            task.guard.try_end()
        threads = (self._loading, self._saving)
        for thread in threads:
            thread.end()
        if all(thread.join(max(0.0, deadline - self._clock())) for thread in threads):
            # Blocks in VRAM go down to host memory meanwhile, through what is page-locked.
            self._store.close()
            self._close_memory()
        else:
            log.warning(
                "a transfer thread did not end within %g s: the store stays open until the "
                "process ends",
                SHUTDOWN_TIMEOUT_S,
            )

    def _end(self, task: Transfer) -> None:
        with self._lock:
            self._end_locked(task)

    def _end_locked(self, task: Transfer) -> None:
        if not task.ended:
            task.ended = True
            self._active.pop(task, None)
            self._done.append(task)
            if isinstance(task, Load) or self._saves:
                transfers.count(task, self._counts, self._clock() - task.started_at, self._groups)
            self._wake.notify_all()

    # The loading thread

    def _load(self, task: Any) -> None:
        self._load_one(task)
        while self._far:
            self._load_one(self._far.popleft())

    def _load_near(self, store: BlockStore) -> None:
        """Carry out loads from this host's memory that wait behind one from elsewhere."""
        while len(self._far) < LOAD_JOBS_MAX:
            task = self._loading.next_waiting()
            if task is None:
                return
            if far_of(store, self._groups, task.job.blocks):
                self._far.append(task)
            else:
                self._load_one(task)

    def _load_one(self, task: Load) -> None:
        store: BlockStore | None = None
        try:
            store = self._run_load(task)
        except Exception:
            task.why = metrics.ERROR
            log.exception("a load of request %s failed", job_name(task.job))
        finally:
            self._end(task)
        if store is not None:  # behind the end: the request need not wait for it
            self._touch(task, store)

    def _run_load(self, task: Load) -> BlockStore | None:
        """Return the store, when all of the load came from there."""
        store = self._store.get()
        if store is None:
            task.why = MissReason.NO_STORE
            return None
        self._blocks[0].wait_ready(task.ready)
        blocks, groups, paces = task.job.blocks, self._groups, self._paces
        sizes = [bytes_of(groups, block) for block in blocks]
        far = far_of(store, groups, blocks)
        took_s = 0.0
        while task.loaded < len(blocks):
            task.tier = min(far, default=Tier.HOST).partition(":")[0]
            room, patience_s = paces.next_read(
                far, sum(sizes), task.job.compute_s, LOAD_STAGING_BYTES
            )
            window = next(windows(groups, blocks[task.loaded :], room))
            before, began = task.loaded, self._clock()
            until = min(task.deadline, began + patience_s)
            whole = self._load_window(task, window, store, until)
            window_s = self._clock() - began
            loaded, took_s = task.loaded - before, took_s + window_s
            late = began + window_s >= until
            if whole or late:
                paces.measured(store, groups, window, loaded, window_s)
            if not whole:
                if not task.guard.ended and self._clock() < task.deadline:
                    task.why = MissReason.SLOWER if late else MissReason.LOAD_FAILED
                return None
            left, by_request = sum(sizes[task.loaded :]) / sum(sizes), self._layout.fails_by_request
            if far and takes_too_long(left, took_s, task.job.compute_s, by_request=by_request):
                task.why = MissReason.SLOWER
                return None
            if far:
                self._load_near(store)
        return store

    def _load_window(
        self, task: Load, window: Sequence[LoadBlock], store: BlockStore, until: float
    ) -> bool:
        """Load blocks whose views may be open at the same time. Return whether all came by then."""
        timeout_s = until - self._clock()
        views = store.views(found_in(self._groups, window), self._staging, timeout_s)
        for batch in alike(window, self._blocks[0].batch_blocks):
            # A block after a failed one is of no use: the engine recomputes from there.
            if task.guard.ended or self._clock() >= until:
                return False
            loaded = transfers.load_blocks(self._groups, self._blocks, task, batch, views)
            task.loaded += loaded
            if loaded < len(batch):
                return False
        return True

    def _touch(self, task: Load, store: BlockStore) -> None:
        store.touch([found.key for found in found_in(self._groups, task.job.blocks)])

    # The saving thread

    def _save(self, first: Any) -> None:
        tasks = [first]
        while sum(len(t.job.blocks) for t in tasks) < self._batch_blocks:
            task = self._saving.next_waiting()
            if task is None:
                break
            tasks.append(task)
        why = ""
        try:
            why = self._run_saves(tasks)
        except KVStoreError as e:
            why = transfers.why_of(e)
            self._say_dropped([task.job for task in tasks], e)
        except Exception as e:
            why = transfers.why_of(e)
            log.exception("saves dropped, of requests %s", transfers.names(t.job for t in tasks))
        finally:
            for task in tasks:
                task.why = task.why or why
                self._end(task)

    def _say_dropped(self, jobs: Sequence[SaveJob], why: Exception | str) -> None:
        self._dropped += len(jobs)
        now = self._clock()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            text = "%d save jobs dropped so far, the last ones, of requests %s, because: %s"
            log.warning(text, self._dropped, transfers.names(jobs), why)

    def _run_saves(self, tasks: Sequence[Save]) -> str:
        """Return why all of them were given up; empty when they were not."""
        store = self._store.get()
        if store is None:
            return MissReason.NO_STORE
        for group, blocks in self._batches(tasks):
            with self._lock:  # loads first: a request waits for each
                self._wake.wait_for(self._loads_ended, SAVE_YIELD_S)
            self._save_batch(store, group, blocks)
        self._touch_runs(tasks, store)
        return ""

    def _loads_ended(self) -> bool:
        return not any(isinstance(task, Load) for task in self._active)

    def _touch_runs(self, tasks: Sequence[Save], store: BlockStore) -> None:
        """Touch the blocks before each save together with its own. If the end of a prefix were used
        last, its head would be evicted first, and the rest would be worth nothing."""
        for task in tasks:
            for number, group in enumerate(self._groups if task.job.before else ()):
                own = (block for block in task.job.blocks if block.group == number)
                before = task.job.before[number][group.shard]
                keys = [*before, *(block.keys[group.shard] for block in own)]
                store.touch(keys, saved=True)
            saved = {block.keys[self._groups[block.group].shard] for block in task.job.blocks}
            # Else the former end is still the last that can be loaded.
            ends = task.job.left if saved <= task.stored else ()
            for group, left in zip(self._groups, ends, strict=False):
                store.touch(left[group.shard], left=True)

    def _batches(
        self, tasks: Sequence[Save]
    ) -> Iterator[tuple[GroupReads, Sequence[tuple[Save, SaveBlock]]]]:
        """Yield what this worker saves, in parts that one reserve and one commit carry."""
        for number, group in enumerate(self._groups):
            blocks = [
                (task, block)
                for task in tasks
                for block in task.job.blocks
                if block.group == number and group.saves
            ]
            for batch in in_batches(blocks, self._batch_blocks):
                yield group, batch

    def _save_batch(
        self, store: BlockStore, group: GroupReads, blocks: Sequence[tuple[Save, SaveBlock]]
    ) -> None:
        """Save a batch by one reserve, one copy per block that the store does not have, and one
        commit."""
        reserved = self._reserve(store, group, blocks)
        with ExitStack() as undo:
            undo.callback(store.abort, [entry.reservation for entry in reserved])
            filled = gather_all(self._blocks, self._groups, reserved, self._clock)
            undo.pop_all()
        kept = set(map(id, filled))
        left = [entry.reservation for entry in reserved if id(entry) not in kept]
        if left:
            store.abort(left)
        self._commit(store, filled, {task for task, _ in blocks})

    def _reserve(
        self, store: BlockStore, group: GroupReads, blocks: Sequence[tuple[Save, SaveBlock]]
    ) -> list[Reserved]:
        """Reserve slots, in one request, for those of the blocks that the store does not have."""
        wanted = {
            block.keys[group.shard]: (task, block) for task, block in blocks if not task.guard.ended
        }
        if not wanted:
            return []
        answers = store.reserve(list(wanted), group.block_bytes, group.namespace.id)
        reserved: list[Reserved] = []
        there: set[Key] = set()
        for key, answer in zip(wanted, answers, strict=True):
            if not isinstance(answer, PutResult):
                reserved.append(Reserved(*wanted[key], answer))
                continue
            self._counts.add(metrics.UNSAVED_BLOCKS, 1, answer.status)
            if answer:
                there.add(key)
        for task, _ in blocks if there else ():
            task.stored |= there
        return reserved

    def _commit(self, store: BlockStore, filled: Sequence[Reserved], tasks: Iterable[Save]) -> None:
        """Commit under the copy guards: a job that was reported as ended publishes nothing later.

        A reset relies on it: it clears the store once no job is in flight. `tasks` learn
        what is in the store then: some may save the same blocks.
        """
        with ExitStack() as stack:
            filling = {entry.task for entry in filled}
            alive = {t for t in filling if stack.enter_context(t.guard.copying())}
            dropped = [entry.reservation for entry in filled if entry.task not in alive]
            kept = [entry.reservation for entry in filled if entry.task in alive]
            if dropped:
                store.abort(dropped)
            results = store.commit(kept) if kept else []
            there = (PutStatus.STORED, PutStatus.EXISTS)
            committed = [r for r, one in zip(kept, results, strict=True) if one.status in there]
            stored = {reservation.key for reservation in committed}
            for task in tasks if stored else ():
                task.stored |= stored
        self._counts.add(metrics.SAVED_BLOCKS, len(committed))
        self._counts.add(metrics.SAVED_BYTES, sum(len(r.buffer) for r in committed))
