"""What rests on loads that are part of a step, until every worker has reported them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from connector.base import BlockTables, LoadJob, SaveJob


class Unconfirmed:
    """Holds saves back while a load of their step, or of one before it, may turn out wrong.

    The forward has then computed on wrong KV, in every worker (an all-reduce
    carries one worker's attention to the others) and for every request that
    shares the blocks. The engine computes it again; the store must never see
    the first version (rule 1). The blocks of saves that are held stay pinned.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._loads: dict[int, int] = {}
        """Load job -> workers that have not reported it."""
        self._saves: list[SaveJob] = []
        self._tables: dict[str, Sequence[int]] = {}

    def step(
        self,
        loads: Iterable[LoadJob],
        saves: list[SaveJob],
        scheduled: Iterable[str],
        block_ids: Callable[[str], BlockTables | None],
    ) -> list[SaveJob]:
        """One step's plan; returns the saves that its workers may start."""
        ready: list[SaveJob] = []
        if not self._loads:
            ready, self._saves = self._saves, []
            self._tables.clear()
        self._loads.update((job.job_id, self._workers) for job in loads)
        if not self._loads:
            return ready + saves
        self._saves += saves
        for request_id in scheduled:
            for table in block_ids(request_id) or ():
                self._tables[request_id] = tuple(table)
        return ready

    def ended(self, loads: Mapping[int, int]) -> set[int]:
        """Workers have reported loads, so many each; returns those that all have reported."""
        done: set[int] = set()
        for job_id, workers in loads.items():
            self._loads[job_id] = self._loads.get(job_id, 0) - workers
            if self._loads[job_id] <= 0:
                del self._loads[job_id]
                done.add(job_id)
        return done

    def spoilt(self, invalid: set[int]) -> tuple[list[SaveJob], set[int]]:
        """Loads left `invalid` blocks behind: saves that must not be, and blocks that hold
        no valid KV, those computed from the invalid ones included."""
        saves, self._saves = self._saves, []
        blocks = set(invalid)
        for table in self._tables.values():
            bad = next((i for i, block in enumerate(table) if block in invalid), len(table))
            blocks.update(table[bad:])
        return saves, blocks
