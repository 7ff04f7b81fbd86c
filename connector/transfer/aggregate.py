"""Aggregates the reports of all workers of a step into the one that the scheduler sees."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from connector.limits import FINISHED_PENDING_MAX
from connector.transfer.base import KVConnectorOutput
from kvstore import UsageError

if TYPE_CHECKING:
    from connector.transfer.base_v1 import KVConnectorBase_V1

log = logging.getLogger(f"kvstore.{__name__}")

_Output = TypeVar("_Output")


def worker_output(worker: KVConnectorBase_V1, finished_req_ids: set[str]) -> KVConnectorOutput:
    """Return all that one worker's connector has to say at the end of a step."""
    results = worker.get_transfer_results(finished_req_ids)
    return KVConnectorOutput(
        finished_sending=results.finished_sending or None,
        finished_recving=results.finished_recving or None,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_cache_events=worker.get_kv_connector_kv_cache_events(),
    )


class KVOutputAggregator:
    """Counts transfers over workers and merges what else they report.

    A request has finished sending (receiving) when `expected_finished_count`
    workers have said so, in whichever steps. Everything else of a step passes on
    at once, merged.

    It takes our `KVConnectorOutput`s, or an engine's own outputs that have one in
    `kv_connector_output` (vLLM's `ModelRunnerOutput`), of vLLM's class or of ours.
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = _at_least_one(expected_finished_count)
        self._sending = _Countdown()
        self._recving = _Countdown()
        self._failed: dict[str, None] = {}
        """Requests that failed on some worker and were not reported by all of them yet."""
        self._class = KVConnectorOutput
        """The class that an engine's outputs carry, as last seen, for steps in which none does."""

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> KVOutputAggregator:
        """Make one for `world_size` workers, unless the connector says how many of them report."""
        return cls(connector.get_finished_count() or world_size)

    @property
    def expected_finished_count(self) -> int:
        """Return how many workers must report a request that none has reported yet; a count that
        has begun keeps its own."""
        return self._expected

    @overload
    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput: ...

    @overload
    def aggregate(
        self, outputs: Sequence[_Output | None], output_rank: int = 0
    ) -> _Output | None: ...

    def aggregate(self, outputs: Sequence[Any], output_rank: int | None = None) -> Any:
        """Merge one step's outputs, one per worker in worker order; None means that a worker has
        nothing to say.

        Of our `KVConnectorOutput`s the answer is one. Of an engine's it is that of worker
        `output_rank` (0 unless given), its `kv_connector_output` replaced; None, and nothing is
        counted, when that worker has none: the step is not over. Where all are None, `output_rank`
        tells that they are an engine's.

        Stats, events and worker metadata of the first worker that has some take in the others', so
        they are changed. Raises `UsageError` when two workers' are of different classes, and for an
        `output_rank` that is no worker's.
        """
        ours = any(isinstance(output, KVConnectorOutput) for output in outputs)
        if ours or (output_rank is None and not any(o is not None for o in outputs)):
            return self._merged(outputs)
        rank = output_rank or 0
        if not 0 <= rank < len(outputs):
            raise UsageError("output_rank", rank, f"must be from 0 to {len(outputs) - 1}")
        if outputs[rank] is None:
            return None
        reports = [None if output is None else _report(output) for output in outputs]
        self._class = next((type(r) for r in reports if r is not None), self._class)
        merged, answer = self._merged(reports), outputs[rank]
        answer.kv_connector_output = self._class(
            **{f.name: getattr(merged, f.name) for f in fields(self._class) if f.name in _NAMES}
        )
        return answer

    def _merged(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        merged = KVConnectorOutput()
        sent: set[str] = set()
        received: set[str] = set()
        for output in outputs:
            if output is None:
                continue
            # An older engine's output lacks some of the fields.
            expected = getattr(output, "expected_finished_count", 0)
            if expected > 0:
                self._expected = expected
            sent |= self._sending.count(output.finished_sending or (), self._expected)
            received |= self._recving.count(output.finished_recving or (), self._expected)
            self._failed.update(dict.fromkeys(getattr(output, "failed_recving", ())))
            merged.invalid_block_ids |= getattr(output, "invalid_block_ids", set())
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


_NAMES = frozenset(f.name for f in fields(KVConnectorOutput))


def _report(output: object) -> KVConnectorOutput | None:
    """Return what an engine's output of one worker carries for connectors."""
    try:
        return cast("KVConnectorOutput | None", output.kv_connector_output)  # type: ignore[attr-defined]
    except AttributeError:
        raise UsageError(
            "outputs",
            type(output).__name__,
            "must be a KVConnectorOutput, or have one in kv_connector_output",
        ) from None


def _merge_reports(merged: KVConnectorOutput, output: KVConnectorOutput) -> None:
    for name in ("kv_connector_stats", "kv_connector_worker_meta"):
        mine, theirs = getattr(merged, name), getattr(output, name, None)
        if theirs is None:
            continue
        _same_class(name, mine, theirs)
        setattr(merged, name, theirs if mine is None else mine.aggregate(theirs))
    events = getattr(output, "kv_cache_events", None)
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
        """Count one worker's report of `request_ids`; return those that every worker has reported
        now."""
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

    def add_events(self, events: list[Hashable]) -> None:
        self._seen.update(events)

    def get_all_events(self) -> list[Hashable]:
        return list(self._seen.elements())

    def increment_workers(self, count: int = 1) -> None:
        if count < 1:
            raise UsageError("count", count, "must be at least 1")
        self._workers += count

    def common_events(self) -> list[Hashable]:
        """Return events that every worker has seen: a block is stored when all its shards are."""
        return [event for event, count in self._seen.items() if count == self._workers]
