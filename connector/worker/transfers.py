"""Defines the transfers of a worker (`Load`, `Save`), and copies their blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from connector import metrics
from connector.copiers.base import Gather, HeadPart, KVCopier, Ready, Scatter
from connector.limits import Clock
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob, WorkerReport, job_name
from connector.worker import parts
from connector.worker.copy_guard import CopyGuard
from kvstore import DeadlineError, MissReason
from kvstore.spi import AnyReservation, BlockView, Key, NodeUnavailableError, in_batches

if TYPE_CHECKING:
    from connector.layout.shard_reads import GroupReads
    from connector.metrics import Counts

log = logging.getLogger(f"kvstore.{__name__}")

NAMES_MAX = 8
"""Requests that one log line names."""
Views = list[tuple[BlockView, HeadPart]]
"""All shards from which one store block is copied, and the heads that each has for us."""


class Load:
    """Holds a load job on this worker. `loaded` counts blocks that were copied and checked.

    `ready` stands for the work before it, which may still use the blocks; see
    `KVCopier.wait_ready`. `deadline` and `started_at` are of the worker's clock, in seconds.
    """

    tier = ""
    """The tier that it reads from at the moment; empty before it reads."""
    given_up = False
    """Whether the engine has given it up, so that it need not be reported."""

    def __init__(
        self, job: LoadJob, deadline: float, started_at: float, ready: Ready | None = None
    ) -> None:
        self.job = job
        self.deadline = deadline
        self.started_at = started_at
        self.ready = ready
        self.guard = CopyGuard()
        self.loaded = 0
        self.ended = False
        self.why: str = MissReason.DEADLINE
        """Why not all was loaded, if that is so."""


class Save:
    """Holds a save job on this worker. `ready` stands for the work that fills the blocks; see
    `KVCopier.wait_ready`."""

    __slots__ = ("deadline", "ended", "guard", "job", "ready", "started_at", "stored", "why")

    def __init__(
        self, job: SaveJob, deadline: float, started_at: float, ready: Ready | None = None
    ) -> None:
        self.job = job
        self.deadline = deadline
        self.started_at = started_at
        self.ready = ready
        self.guard = CopyGuard()
        self.ended = False
        self.stored: set[Key] = set()
        """Blocks whose shard of this worker is in the store: saved or found there. It may contain
        more than this save's own."""
        self.why = ""
        """Why it was given up; empty when it was not."""


Transfer = Load | Save


class Reserved(NamedTuple):
    """Names one block to save, and the slot that is to hold it."""

    task: Save
    block: SaveBlock
    reservation: AnyReservation


def block_views(
    groups: Sequence[GroupReads], block: LoadBlock, views: Iterator[BlockView | None]
) -> Views | None:
    """Take the block's own from `views`, one per shard that has some of this worker's heads.

    None when one is not there.
    """
    pieces = groups[block.group].pieces(block.split)
    if not (block.found and pieces):
        return None
    own_views: Views = []
    for piece, view in [(piece, next(views)) for piece in pieces]:
        if view is None:
            return None
        if len(view.buffer) != piece.payload_bytes:
            log.error("a stored block has %d bytes, not %d", len(view.buffer), piece.payload_bytes)
            return None
        own_views.append((view, piece.part))
    return own_views


def gather_all(
    groups: Sequence[KVCopier],
    reads: Sequence[GroupReads],
    entries: Sequence[Reserved],
    clock: Clock,
    layer: int | None = None,
) -> list[Reserved]:
    """Copy those of `entries`, all of one group, whose saves have not ended and are in time."""
    filled: list[Reserved] = []
    if not entries:
        return filled
    blocks = groups[entries[0].block.group]
    mine = reads[entries[0].block.group]
    for batch in in_batches(entries, blocks.batch_blocks):
        tasks = {entry.task for entry in batch}
        for task in tasks:
            blocks.wait_ready(task.ready)
        with ExitStack() as stack:
            allowed = {task: stack.enter_context(task.guard.copying()) for task in tasks}
            now = clock()
            for task in tasks:
                if not allowed[task] or now >= task.deadline:
                    allowed[task] = False
                    task.why = task.why or MissReason.DEADLINE
            copied = [entry for entry in batch if allowed[entry.task]]
            whole = not any(entry.block.tokens for entry in copied)
            if not whole:
                copied = [
                    entry
                    for entry in copied
                    if parts.can_be_saved(mine, entry.block, entry.reservation.buffer)
                ]
            if copied:
                blocks.gather_many(
                    [
                        Gather(entry.block.block_ids, entry.reservation.buffer)
                        if whole
                        else parts.gather_of(mine, entry.block, entry.reservation.buffer)
                        for entry in copied
                    ],
                    layer,
                )
            for entry in () if whole else copied:
                parts.clear_rest(mine, entry.block, entry.reservation.buffer, layer)
        filled += copied
    return filled


def scatter_all(
    blocks: KVCopier,
    opened: Sequence[tuple[Load, LoadBlock, Views]],
    layer: int | None = None,
) -> list[bool]:
    """Copy blocks of one group, and say of each whether it was right.

    One batch. What belongs to a load that has ended is not copied and not right.
    """
    tasks = {task for task, _, _ in opened}
    with ExitStack() as stack:
        allowed = {task: stack.enter_context(task.guard.copying()) for task in tasks}
        items = [
            Scatter(view.buffer, block.skip, block.block_ids, part)
            for task, block, views in opened
            if allowed[task]
            for view, part in views
        ]
        if items:
            blocks.scatter_many(items, layer)
    return [allowed[task] and all(view.valid() for view, _ in views) for task, _, views in opened]


def load_blocks(
    groups: Sequence[GroupReads],
    copiers: Sequence[KVCopier],
    task: Load,
    batch: Sequence[LoadBlock],
    views: Iterator[BlockView | None],
) -> int:
    """Return how many leading blocks of `batch`, all of one group, were copied and right."""
    opened: list[tuple[Load, LoadBlock, Views]] = []
    for block in batch:
        own_views = block_views(groups, block, views)
        if own_views is None:
            break
        opened.append((task, block, own_views))
    good = scatter_all(copiers[batch[0].group], opened)
    return next((i for i, right in enumerate(good) if not right), len(good))


def why_of(error: Exception) -> str:
    """Return the reason that is counted for a save which ended with that error."""
    if isinstance(error, DeadlineError):
        return MissReason.DEADLINE
    return MissReason.NODE_DEAD if isinstance(error, NodeUnavailableError) else metrics.ERROR


def report_failures(task: Load, report: WorkerReport, *, by_request: bool) -> None:
    """Say what of a load that has ended holds no valid KV."""
    job, loaded = task.job, task.loaded
    if loaded == len(job.blocks):
        return
    report.failed_blocks[job.job_id] = loaded
    if task.given_up:
        return
    if by_request:
        report.failed_requests.add(job.request_id)
        return
    for block in job.blocks[loaded:]:
        report.invalid_block_ids.update(block.block_ids)


def report_save(task: Save, report: WorkerReport, groups: Sequence[GroupReads]) -> None:
    """Say that the save has ended, and which of its blocks are stored."""
    report.ended_saves[task.job.job_id] = 1
    report.stored_blocks[task.job.job_id] = frozenset(
        position
        for position, block in enumerate(task.job.blocks)
        if not (mine := groups[block.group]).saves or block.keys[mine.shard] in task.stored
    )


def names(jobs: Iterable[LoadJob | SaveJob]) -> str:
    """Return the requests of these, the first few of many, for the log."""
    known = list(dict.fromkeys(map(job_name, jobs)))
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return ", ".join(known[:NAMES_MAX]) + more


def report_stuck(task: Transfer, took_s: float, counts: Counts) -> None:
    """Log and count a transfer with a copy that has been under way for `took_s`."""
    is_load = isinstance(task, Load)
    counts.add(metrics.STUCK_LOADS if is_load else metrics.STUCK_SAVES)
    log.error(
        "a copy of a %s of request %s has been under way for %.1f s and cannot be ended; its "
        "blocks stay in use. "
        "Where a CUDA driver hangs in its call for many copies, KVSTORE_CUDA_COPIES=single "
        "makes each a call of its own, from the engine's next start on",
        "load" if is_load else "save",
        job_name(task.job),
        took_s,
    )


def count(task: Transfer, counts: Counts, duration_s: float, groups: Sequence[GroupReads]) -> None:
    """Count a transfer that has ended after `duration_s`."""
    if isinstance(task, Save):
        if task.why:
            counts.add(metrics.DROPPED_SAVES, 1, task.why)
        else:
            counts.observe(metrics.SAVE_SECONDS, duration_s)
        return
    blocks = task.job.blocks[: task.loaded]
    counts.add(metrics.LOADED_BLOCKS, len(blocks))
    counts.add(
        metrics.LOADED_BYTES,
        sum(groups[block.group].engine_block_bytes * len(block.block_ids) for block in blocks),
    )
    if len(blocks) < len(task.job.blocks):
        counts.add(metrics.FAILED_LOADS, 1, task.why)
        if task.tier and task.why in (MissReason.SLOWER, MissReason.DEADLINE):
            counts.add(metrics.CUT_LOADS, 1, task.tier)
    else:
        counts.observe(metrics.LOAD_SECONDS, duration_s)
