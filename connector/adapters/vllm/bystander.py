"""Implements a worker side that takes part in nothing: saves end without being stored, loads fail.

vLLM makes its workers' connectors before its scheduler's. What a worker's cannot work with must not
end the worker: where the scheduler's sees it too, it refuses to start, by name, and where it cannot
(it is told the spec of one layer of a group, the workers those of all), the engine runs as if the
store had nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from connector.messages import LoadJob, SaveJob, WorkerReport

if TYPE_CHECKING:
    import torch

    from connector.stats import CountStats


class Bystander:
    """Answers what the adapter asks of a `WorkerCore`, without any KV."""

    def __init__(self, *, by_request: bool, layerwise: bool) -> None:
        """`by_request` is `StoreLayout.fails_by_request`, as far as it is known."""
        self._by_request = by_request
        self._layerwise = layerwise
        self._report = WorkerReport()

    def register_kv_caches(self, *groups: Mapping[str, torch.Tensor]) -> None:
        return

    def mark_ready(self) -> None:
        return None

    def start_loads(self, jobs: Sequence[LoadJob], ready: object = None) -> None:
        for job in jobs:
            self._report.failed_blocks[job.job_id] = 0
            if self._layerwise:
                self._report.ended_loads[job.job_id] = 1
            else:
                self._report.finished_loads.add(job.request_id)
            if self._by_request:
                self._report.failed_requests.add(job.request_id)
            else:
                ids = (block_id for block in job.blocks for block_id in block.block_ids)
                self._report.invalid_block_ids.update(ids)

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        for job in jobs:
            self._report.ended_saves[job.job_id] = 1
            self._report.stored_blocks[job.job_id] = frozenset()

    def wait_layer_load(self, layer_name: str) -> None:
        return

    def layer_written(self, layer_name: str, jobs: Sequence[SaveJob]) -> None:
        return

    def cancel_loads(self, request_ids: Iterable[str]) -> None:
        return

    def end_saves(self, timeout_s: float) -> WorkerReport:
        return self.poll()

    def end_loads(self, job_ids: set[int], timeout_s: float) -> set[int]:
        return job_ids

    def poll(self, wait_s: float = 0.0) -> WorkerReport:
        """Return what was asked for since the last call, all of it ended."""
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> CountStats | None:
        return None

    def close(self) -> None:
        return
