"""Aggregates the reports of all workers of a step into the one that the scheduler sees."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from connector.limits import FINISHED_PENDING_MAX
from connector.transfer.base import KVConnectorOutput
from kvstore import UsageError

if TYPE_CHECKING:
    from connector.transfer.base import KVConnectorWorker

log = logging.getLogger(__name__)


def worker_output(worker: KVConnectorWorker, finished_req_ids: set[str]) -> KVConnectorOutput:
    """All that one worker's connector has to say at the end of a step."""
    results = worker.get_finished(finished_req_ids)
    return KVConnectorOutput(
        finished_sending=set(results.finished_sending) or None,
        finished_recving=set(results.finished_recving) or None,
        failed_recving=set(results.failed_recving),
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_cache_events=worker.get_kv_cache_events(),
    )


class KVOutputAggregator:
    """Counts transfers over workers and merges what else they report.

    A request has finished sending (receiving) when `expected_finished_count`
    workers have said so, in whichever steps. Everything else of a step passes on
    at once, merged.
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = _at_least_one(expected_finished_count)
        self._sending = _Countdown()
        self._recving = _Countdown()
        self._failed: dict[str, None] = {}
        """Failed on some worker, not yet reported by all of them."""

    @classmethod
    def from_connector(cls, worker: KVConnectorWorker, workers: int) -> KVOutputAggregator:
        """For `workers` workers, unless the connector says how many of them report."""
        return cls(worker.get_finished_count() or workers)

    @property
    def expected_finished_count(self) -> int:
        """For requests that no worker has reported yet; a count begun keeps its own."""
        return self._expected

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        """One step's outputs, one a worker, in worker order; None: it has nothing to say.

        Stats, events and worker metadata of the first worker that has some take
        in the others', so they are changed. Raises `UsageError` when two workers'
        are of different classes.
        """
        merged = KVConnectorOutput()
        sent: set[str] = set()
        received: set[str] = set()
        for output in outputs:
            if output is None:
                continue
            if output.expected_finished_count > 0:
                self._expected = output.expected_finished_count
            sent |= self._sending.count(output.finished_sending or (), self._expected)
            received |= self._recving.count(output.finished_recving or (), self._expected)
            self._failed.update(dict.fromkeys(output.failed_recving))
            merged.invalid_block_ids |= output.invalid_block_ids
            _merge_reports(merged, output)
        merged.finished_sending = sent or None
        merged.finished_recving = received or None
        merged.failed_recving = {r for r in received if r in self._failed}
        for request_id in merged.failed_recving:
            del self._failed[request_id]
        while len(self._failed) > FINISHED_PENDING_MAX:
            del self._failed[next(iter(self._failed))]
        merged.expected_finished_count = self._expected
        return merged


def _merge_reports(merged: KVConnectorOutput, output: KVConnectorOutput) -> None:
    for name in ("kv_connector_stats", "kv_connector_worker_meta"):
        mine, theirs = getattr(merged, name), getattr(output, name)
        if theirs is None:
            continue
        _same_class(name, mine, theirs)
        setattr(merged, name, theirs if mine is None else mine.aggregate(theirs))
    events = output.kv_cache_events
    if events is None:
        return
    _same_class("kv_cache_events", merged.kv_cache_events, events)
    if merged.kv_cache_events is None:
        merged.kv_cache_events = events
    else:
        merged.kv_cache_events.add_events(events.get_all_events())
        merged.kv_cache_events.increment_workers(1)


def _same_class(name: str, mine: object, theirs: object) -> None:
    if mine is not None and type(mine) is not type(theirs):
        raise UsageError(
            name, type(theirs).__name__, f"must be a {type(mine).__name__} on every worker"
        )


def _at_least_one(count: int) -> int:
    if count < 1:
        raise UsageError("expected_finished_count", count, "must be at least 1")
    return count


class _Countdown:
    """Counts workers that have not reported a request yet; at most `FINISHED_PENDING_MAX`
    requests."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def count(self, request_ids: Iterable[str], expected: int) -> set[str]:
        """One worker reports `request_ids`; gives those that every worker has reported now."""
        done: set[str] = set()
        for request_id in request_ids:
            left = self._left.pop(request_id, expected) - 1
            if left == 0:
                done.add(request_id)
            else:
                self._left[request_id] = left
        while len(self._left) > FINISHED_PENDING_MAX:
            # Long gone: the worker that did not report it ended, or it never will.
            request_id = next(iter(self._left))
            log.warning("not every worker has reported %s; it is given up", request_id)
            del self._left[request_id]
        return done


class WorkerEvents:
    """Implements `KVCacheEvents` of hashable events, counted: how many workers have seen each."""

    def __init__(self, events: Iterable[Hashable] = (), workers: int = 1) -> None:
        self._seen: Counter[Hashable] = Counter(events)
        self._workers = workers

    def add_events(self, events: list[Any]) -> None:
        self._seen.update(events)

    def get_all_events(self) -> list[Any]:
        return list(self._seen.elements())

    def increment_workers(self, count: int = 1) -> None:
        if count < 1:
            raise UsageError("count", count, "must be at least 1")
        self._workers += count

    def common_events(self) -> list[Any]:
        """Events that every worker has seen: a block is stored when all its shards are."""
        return [event for event, count in self._seen.items() if count == self._workers]
