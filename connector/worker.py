"""The worker side: moves one worker's bytes between engine blocks and the store.

Knows no engine. One thread loads, one saves; the engine's thread only hands
jobs over and polls. Nothing that happens here may raise into the engine: a load
that fails is a recompute, a save that fails is a future miss.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from connector.base import LoadBlock, LoadJob, SaveBlock, SaveJob, WorkerReport
from connector.blocks import KVBlocks, kv_blocks
from connector.limits import (
    LOAD_JOBS_MAX,
    LOAD_STAGING_BYTES,
    SAVE_BATCH_BLOCKS,
    SAVE_BATCH_BYTES,
    SAVE_JOBS_MAX,
    SAY_EVERY_S,
    SHUTDOWN_TIMEOUT_S,
    Clock,
)
from connector.pieces import GroupPieces, found_in, windows
from connector.transfer import Load, Save, Transfer, Views
from kvstore import BlockStore, BlockView, KVStoreError, Reservation

if TYPE_CHECKING:
    from connector.geometry import StoreLayout
    from connector.lazy_store import LazyStore

log = logging.getLogger(__name__)


class Reserved(NamedTuple):
    """One block to save, and the slot that is to hold it."""

    task: Save
    block: SaveBlock
    reservation: Reservation


class WorkerCore:
    """Implements `WorkerSide` for one worker over a `BlockStore`."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        *,
        rank: int,
        saves: bool,
        load_timeout_s: float,
        save_timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._layout = layout
        self._groups = [GroupPieces(group, rank, layout.block_tokens) for group in layout.groups]
        self._saves = saves and any(group.saves for group in self._groups)
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._clock = clock
        largest = max(group.block_bytes for group in self._groups)
        largest_read = max(group.read_bytes_max for group in self._groups)
        self._batch_blocks = max(1, min(SAVE_BATCH_BLOCKS, SAVE_BATCH_BYTES // largest))
        self._blocks: list[KVBlocks] = []
        """Per group; empty before the engine has given its memory."""
        self._staging = memoryview(bytearray(max(LOAD_STAGING_BYTES, largest_read)))
        """Where blocks of other hosts arrive; only the loading thread uses it, and none of its
        pages exist before it does."""
        self._wake = threading.Condition()
        self._active: dict[Transfer, None] = {}
        self._done: list[Transfer] = []
        self._load_queue: queue.Queue[Any] = queue.Queue(LOAD_JOBS_MAX)
        self._save_queue: queue.Queue[Any] = queue.Queue(SAVE_JOBS_MAX)
        """What the threads do next; None is their end."""
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._dropped = 0
        self._said_at = float("-inf")

    def register_kv_caches(self, *groups: Mapping[str, Any]) -> None:
        """Take the layer tensors of every group and start the transfer threads.

        Raises `UsageError` when the shapes are not those of the namespace.
        """
        self._blocks = [
            kv_blocks(kv_caches, pieces.geometry, self._layout.block_tokens)
            for kv_caches, pieces in zip(groups, self._groups, strict=True)
        ]
        loops: list[tuple[str, Callable[[], None]]] = [
            ("kvstore-load", self._load_loop),
            ("kvstore-save", self._save_loop),
        ]
        for name, target in loops:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    # Called by the engine's thread

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Queue loads; one that finds the queue full ends at once, failed."""
        deadline = self._clock() + self._load_timeout_s
        for job in jobs:
            self._start(Load(job, deadline), self._load_queue)

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Queue saves of blocks that the forward before this call has filled."""
        if not jobs:
            return
        ready = self._mark_ready()
        deadline = self._clock() + self._save_timeout_s
        for job in jobs:
            task = Save(job, deadline, ready)
            if self._saves:
                self._start(task, self._save_queue)
            else:  # a replica: another worker saves these heads
                self._end(task)

    def wait_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: a step never waits for one (`LayerwiseWorker` does)."""

    def layer_written(self, layer_name: str, jobs: Sequence[SaveJob]) -> None:
        """Saves start when the whole forward is done (those of `LayerwiseWorker` do not)."""

    def _mark_ready(self) -> Any:
        """One token for all groups: it stands for all work submitted to the device."""
        return self._blocks[0].mark_ready() if self._blocks else None

    def _start(self, task: Any, to: queue.Queue[Any]) -> None:
        with self._wake:
            self._active[task] = None
        try:
            if not self._blocks:
                raise queue.Full
            to.put_nowait(task)
        except queue.Full:
            self._end(task)

    def cancel_loads(self, request_ids: Iterable[str]) -> None:
        """End the loads of requests that are gone; each is still reported once."""
        gone = set(request_ids)
        if not gone:
            return
        with self._wake:
            for task in list(self._active):
                if isinstance(task, Load) and task.job.request_id in gone:
                    # From now on late: the next poll between two copies ends it.
                    task.deadline = self._clock()

    def poll(self, wait_s: float = 0.0) -> WorkerReport:
        """What ended since the last call, each job exactly once.

        Waits up to `wait_s` seconds for a first one while any job is active.
        A job past its deadline is ended here if no copy of it is running.
        """
        with self._wake:
            if wait_s > 0 and self._active and not self._done:
                self._wake.wait(wait_s)
            now = self._clock()
            late = [task for task in self._active if now >= task.deadline]
            for task in late:
                if task.fence.try_end():
                    self._end_locked(task)
            done, self._done = self._done, []
        report = WorkerReport()
        for task in done:
            if isinstance(task, Load):
                _report_load(task, report)
            else:
                report.ended_saves[task.job.job_id] = 1
        return report

    def close(self) -> None:
        """Stop both threads and close the store; waits at most `SHUTDOWN_TIMEOUT_S`."""
        if self._closing:
            return
        self._closing = True
        deadline = self._clock() + SHUTDOWN_TIMEOUT_S
        with self._wake:
            tasks = list(self._active)
        for task in tasks:
            task.fence.try_end()
        for stop in (self._load_queue.put, self._save_queue.put):
            try:
                stop(None, timeout=max(0.0, deadline - self._clock()))
            except queue.Full:
                log.warning("a transfer thread hangs at shutdown and is left behind")
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()

    def _end(self, task: Transfer) -> None:
        with self._wake:
            self._end_locked(task)

    def _end_locked(self, task: Transfer) -> None:
        if not task.ended:
            task.ended = True
            self._active.pop(task, None)
            self._done.append(task)
            self._wake.notify_all()

    # The loading thread

    def _load_loop(self) -> None:
        while (task := self._load_queue.get()) is not None:
            try:
                self._run_load(task)
            except Exception:
                log.exception("load failed")
            finally:
                self._end(task)

    def _run_load(self, task: Load) -> None:
        store = self._store.get()
        if store is None:
            return
        for window in windows(self._groups, task.job.blocks, LOAD_STAGING_BYTES):
            timeout_s = task.deadline - self._clock()
            views = store.views(found_in(self._groups, window), self._staging, timeout_s)
            for block in window:
                # A block after a failed one is of no use: the engine recomputes from there.
                if task.fence.ended or self._clock() >= task.deadline:
                    return
                if not self._load_block(task, block, self._views(block, views)):
                    return
                task.loaded += 1
        self._touch(task, store)

    def _touch(self, task: Load, store: BlockStore) -> None:
        store.touch([found.key for found in found_in(self._groups, task.job.blocks)])

    def _load_block(self, task: Load, block: LoadBlock, views: Views | None) -> bool:
        if views is None:
            return False
        with task.fence.copying() as allowed:
            if not allowed:
                return False
            for view, part in views:
                self._blocks[block.group].scatter(view.buffer, block.skip, block.block_ids, part)
        return all(view.valid() for view, _ in views)

    def _views(self, block: LoadBlock, its_views: Iterator[BlockView | None]) -> Views | None:
        """Every shard that has some of this worker's heads; None when one is not there."""
        if not block.found:
            return None
        views: Views = []
        pieces = self._groups[block.group].pieces(block.split)
        for piece, view in [(piece, next(its_views)) for piece in pieces]:
            if view is None:
                return None
            if len(view.buffer) != piece.payload_bytes:
                log.error(
                    "a stored block has %d bytes, not %d", len(view.buffer), piece.payload_bytes
                )
                return None
            views.append((view, piece.part))
        return views

    # The saving thread

    def _save_loop(self) -> None:
        stop = False
        while not stop and (first := self._save_queue.get()) is not None:
            tasks = [first]
            while not stop and sum(len(t.job.blocks) for t in tasks) < self._batch_blocks:
                try:
                    task = self._save_queue.get_nowait()
                except queue.Empty:
                    break
                if task is None:
                    stop = True
                else:
                    tasks.append(task)
            try:
                self._run_saves(tasks)
            except KVStoreError as e:
                self._say_dropped(len(tasks), e)
            except Exception:
                log.exception("%d saves dropped", len(tasks))
            finally:
                for task in tasks:
                    self._end(task)

    def _say_dropped(self, jobs: int, why: Exception | str) -> None:
        self._dropped += jobs
        now = self._clock()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning("%d save jobs dropped so far, the last one because: %s", self._dropped, why)

    def _run_saves(self, tasks: Sequence[Save]) -> None:
        store = self._store.get()
        if store is None:
            return
        for group, blocks in self._batches(tasks):
            self._save_batch(store, group, blocks)

    def _batches(
        self, tasks: Sequence[Save]
    ) -> Iterator[tuple[GroupPieces, list[tuple[Save, SaveBlock]]]]:
        """What this worker saves, in parts that one reserve and one commit carry."""
        for number, group in enumerate(self._groups):
            blocks = [
                (task, block)
                for task in tasks
                for block in task.job.blocks
                if block.group == number and group.saves
            ]
            for start in range(0, len(blocks), self._batch_blocks):
                yield group, blocks[start : start + self._batch_blocks]

    def _save_batch(
        self, store: BlockStore, group: GroupPieces, blocks: Sequence[tuple[Save, SaveBlock]]
    ) -> None:
        """One reserve, one copy per block that the store does not have, one commit."""
        reserved = self._reserve(store, group, blocks)
        filled: list[tuple[Save, Reservation]] = []
        left: list[Reservation] = []
        try:
            for task, block, reservation in reserved:
                if self._save_block(task, block, reservation):
                    filled.append((task, reservation))
                else:
                    left.append(reservation)
        except BaseException:
            store.abort([reservation for _, _, reservation in reserved])
            raise
        if left:
            store.abort(left)
        self._commit(store, filled)

    def _reserve(
        self, store: BlockStore, group: GroupPieces, blocks: Sequence[tuple[Save, SaveBlock]]
    ) -> list[Reserved]:
        """Slots for those of the blocks that the store does not have; one request."""
        wanted = {
            block.keys[group.shard]: (task, block) for task, block in blocks if not task.fence.ended
        }
        if not wanted:
            return []
        answers = store.reserve(list(wanted), group.block_bytes, group.namespace.id)
        return [Reserved(*wanted[a.key], a) for a in answers if isinstance(a, Reservation)]

    def _save_block(self, task: Save, block: SaveBlock, reservation: Reservation) -> bool:
        blocks = self._blocks[block.group]
        blocks.wait_ready(task.ready)
        with task.fence.copying() as allowed:
            if not allowed or self._clock() >= task.deadline:
                return False
            blocks.gather(block.block_ids, reservation.buffer)
        return True

    def _commit(self, store: BlockStore, filled: Sequence[tuple[Save, Reservation]]) -> None:
        """Commit under the fences: a job that was reported as ended publishes nothing later.

        A reset relies on it: it clears the store once no job is in flight.
        """
        with ExitStack() as stack:
            tasks = {task for task, _ in filled}
            alive = {t for t in tasks if stack.enter_context(t.fence.copying())}
            dropped = [r for task, r in filled if task not in alive]
            kept = [r for task, r in filled if task in alive]
            if dropped:
                store.abort(dropped)
            if kept:
                store.commit(kept)


def _report_load(task: Load, report: WorkerReport) -> None:
    report.finished_loads.add(task.job.request_id)
    report_failures(task, report)


def report_failures(task: Load, report: WorkerReport) -> None:
    """Add what of an ended load holds no valid KV."""
    job, loaded = task.job, task.loaded
    if loaded < len(job.blocks):
        report.failed_requests.add(job.request_id)
        report.failed_blocks[job.job_id] = loaded
        for block in job.blocks[loaded:]:
            report.invalid_block_ids.update(block.block_ids)
