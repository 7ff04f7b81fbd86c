"""Holds saves back while a load of their step, or of an earlier one, can still fail on a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from connector.messages import BlockTables, LoadJob, SaveJob


@dataclass(slots=True, eq=False)
class _Step:
    last_load: int
    """All loads up to this one must prove good."""
    saves: list[SaveJob]
    tables: list[tuple[int, ...]]
    """Engine blocks of each request that was scheduled, in token order."""


class SaveGate:
    """Holds saves back while a load of their step, or of one before it, may turn out wrong.

    The forward has then computed on wrong KV, in every worker (an all-reduce
    carries one worker's attention to the others) and for every request that
    shares the blocks. The engine computes it again; the store must never see
    the first version (rule 1). The blocks of saves that are held stay pinned.

    An engine bounds the steps held here: it plans no more of them ahead of its
    workers' reports than it has pipeline stages, and one.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._loads: dict[int, int] = {}
        """Load job -> workers that have not reported it, in the order of the jobs' numbers."""
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        """Return the steps that wait for loads."""
        return len(self._steps)

    def step(
        self,
        loads: Iterable[LoadJob],
        saves: list[SaveJob],
        scheduled: Iterable[str],
        block_ids: Callable[[str], BlockTables | None],
    ) -> list[SaveJob]:
        """Return one step's plan; returns the saves that its workers may start."""
        ready: list[SaveJob] = []
        oldest = next(iter(self._loads), None)
        while self._steps and (oldest is None or self._steps[0].last_load < oldest):
            ready += self._steps.popleft().saves
        self._loads.update((job.job_id, self._workers) for job in loads)
        if not self._loads:
            return ready + saves
        tables = [tuple(table) for name in scheduled for table in block_ids(name) or ()]
        self._steps.append(_Step(next(reversed(self._loads)), saves, tables))
        return ready

    def ended(self, loads: Mapping[int, int]) -> set[int]:
        """Count workers that have reported loads, so many each; return those that all have
        reported."""
        done: set[int] = set()
        for job_id, workers in loads.items():
            left = self._loads.get(job_id, 0) - workers
            if left > 0:
                self._loads[job_id] = left
            else:
                self._loads.pop(job_id, None)
                done.add(job_id)
        return done

    def spoilt(self, invalid: set[int]) -> tuple[list[SaveJob], set[int]]:
        """Drop what loads that left `invalid` blocks behind have spoilt. Return the saves that must
        not be made, and the blocks that hold no valid KV, those computed from the invalid ones
        included."""
        saves = [save for step in self._steps for save in step.saves]
        blocks = set(invalid)
        for table in (table for step in self._steps for table in step.tables):
            bad = next((i for i, block in enumerate(table) if block in invalid), len(table))
            blocks.update(table[bad:])
        for step in self._steps:
            step.saves = []
        return saves, blocks
