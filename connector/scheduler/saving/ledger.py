"""Keeps save jobs in flight, and the engine blocks pinned for each until all workers ended it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.limits import SAVE_JOBS_MAX
from connector.messages import BlockPins, Runs, SaveBlock, SaveJob


@dataclass(slots=True)
class _Job:
    block_ids: list[int]
    workers_left: int
    stored: frozenset[int]


class SaveLedger:
    """Pins a save's engine blocks from planning until every worker has let go of them.

    Without the pin a preemption in the same step frees the blocks, the next
    forward fills them with somebody else's tokens, and the save stores those
    under this prefix's keys (rule 1).
    """

    def __init__(self, pins: BlockPins, workers: int, pinned_blocks_max: int) -> None:
        self._pins = pins
        self._workers = workers
        self._pinned_blocks_max = pinned_blocks_max
        self._pinned_blocks = 0
        self._next_job_id = 0
        self._jobs: dict[int, _Job] = {}

    def __len__(self) -> int:
        """Return the jobs in flight."""
        return len(self._jobs)

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs in flight."""
        return list(self._jobs)

    @property
    def room_blocks(self) -> int:
        """Return the engine blocks that one more job may hold now; 0 when it must wait."""
        if len(self._jobs) >= SAVE_JOBS_MAX:
            return 0
        return max(0, self._pinned_blocks_max - self._pinned_blocks)

    def open(
        self,
        request_id: str,
        blocks: tuple[SaveBlock, ...],
        before: Runs = (),
        trace_id: str = "",
        left: Runs = (),
    ) -> SaveJob:
        """Open a job for `blocks`, which are pinned from now on."""
        job = SaveJob(self._next_job_id, request_id, blocks, before, trace_id, left)
        self._next_job_id += 1
        block_ids = [block_id for block in blocks for block_id in block.block_ids]
        self._pins.pin(block_ids)
        self._pinned_blocks += len(block_ids)
        self._jobs[job.job_id] = _Job(block_ids, self._workers, frozenset(range(len(blocks))))
        return job

    def drop(self, job_id: int) -> None:
        """End a job that was given to no worker."""
        self.ended(job_id, self._workers)

    def ended(
        self, job_id: int, workers: int, stored: frozenset[int] = frozenset()
    ) -> frozenset[int] | None:
        """Note that `workers` more workers have ended the job; the last one frees its blocks.

        `stored` are positions in the job that these workers know to be stored. The answer is None
        before the last worker; then it is the positions that all workers know to be stored.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.workers_left -= workers
        job.stored &= stored
        if job.workers_left > 0:
            return None
        del self._jobs[job_id]
        self._pinned_blocks -= len(job.block_ids)
        # Back to front: the engine reuses the first one given back first, and
        # the head of a prefix is worth most.
        self._pins.unpin(job.block_ids[::-1])
        return job.stored


class NoPins:
    """Stands for the pins of a side that never saves, and of any side until its engine has given
    its pool."""

    def pin(self, block_ids: Sequence[int]) -> None:
        raise RuntimeError("no block pool was bound: a save would read unprotected blocks")

    def unpin(self, block_ids: Sequence[int]) -> None:
        raise RuntimeError("nothing was pinned")
