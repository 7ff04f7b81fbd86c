"""Transfers under way in one worker: what its engine's thread and its own threads share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from connector import metrics
from connector.base import LoadBlock, LoadJob, SaveBlock, SaveJob, WorkerReport
from connector.blocks import HeadPart
from connector.fence import Fence
from kvstore import BlockView, DeadlineError, Key, MissReason, NodeUnavailableError, Reservation

if TYPE_CHECKING:
    from connector.metrics import Counts
    from connector.pieces import GroupPieces

log = logging.getLogger(__name__)

Views = list[tuple[BlockView, HeadPart]]
"""All shards that one store block is copied from, and the heads that each has for us."""


class Load:
    """`loaded` counts blocks that were copied and checked."""

    __slots__ = ("deadline", "ended", "fence", "job", "loaded", "started_at", "why")

    def __init__(self, job: LoadJob, deadline: float, started_at: float) -> None:
        self.job = job
        self.deadline = deadline
        self.started_at = started_at
        self.fence = Fence()
        self.loaded = 0
        self.ended = False
        self.why: str = MissReason.DEADLINE
        """Why not all was loaded, should that be so."""


class Save:
    """`ready` stands for the work that fills the blocks; see `KVBlocks.wait_ready`."""

    __slots__ = ("deadline", "ended", "fence", "job", "ready", "started_at", "stored", "why")

    def __init__(self, job: SaveJob, deadline: float, started_at: float, ready: Any = None) -> None:
        self.job = job
        self.deadline = deadline
        self.started_at = started_at
        self.ready = ready
        self.fence = Fence()
        self.ended = False
        self.stored: set[Key] = set()
        """Of this worker's shard, what is in the store: saved or found there. May hold more
        than is this save's own."""
        self.why = ""
        """Why it was given up; empty when it was not."""


Transfer = Load | Save


class Reserved(NamedTuple):
    """One block to save, and the slot that is to hold it."""

    task: Save
    block: SaveBlock
    reservation: Reservation


def block_views(
    groups: Sequence[GroupPieces], block: LoadBlock, views: Iterator[BlockView | None]
) -> Views | None:
    """Take the block's own from `views`, one per shard that has some of this worker's heads.

    None when one is not there.
    """
    if not block.found:
        return None
    its: Views = []
    pieces = groups[block.group].pieces(block.split)
    for piece, view in [(piece, next(views)) for piece in pieces]:
        if view is None:
            return None
        if len(view.buffer) != piece.payload_bytes:
            log.error("a stored block has %d bytes, not %d", len(view.buffer), piece.payload_bytes)
            return None
        its.append((view, piece.part))
    return its


def why_of(error: Exception) -> str:
    """The reason that is counted for a save that ended so."""
    if isinstance(error, DeadlineError):
        return MissReason.DEADLINE
    return MissReason.NODE_DEAD if isinstance(error, NodeUnavailableError) else metrics.ERROR


def report_failures(task: Load, report: WorkerReport, *, by_request: bool) -> None:
    """Say what of a load that has ended holds no valid KV."""
    job, loaded = task.job, task.loaded
    if loaded == len(job.blocks):
        return
    report.failed_blocks[job.job_id] = loaded
    if by_request:
        report.failed_requests.add(job.request_id)
        return
    for block in job.blocks[loaded:]:
        report.invalid_block_ids.update(block.block_ids)


def report_save(task: Save, report: WorkerReport, groups: Sequence[GroupPieces]) -> None:
    """Say that the save has ended, and which of its blocks are stored."""
    report.ended_saves[task.job.job_id] = 1
    report.stored_blocks[task.job.job_id] = frozenset(
        position
        for position, block in enumerate(task.job.blocks)
        if not (mine := groups[block.group]).saves or block.keys[mine.shard] in task.stored
    )


def count(task: Transfer, counts: Counts, duration_s: float, groups: Sequence[GroupPieces]) -> None:
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
    else:
        counts.observe(metrics.LOAD_SECONDS, duration_s)
