"""What is counted: the table of metrics, the counting, and what each transfer adds."""

from __future__ import annotations

import re
import threading

import pytest
from connector_parts import (
    BLOCK,
    GEOMETRY,
    Clock,
    FakeRequest,
    Hold,
    Side,
    Worker,
    hinder,
    load_job,
    loaded,
    save,
    save_job,
    taken,
    wait_for,
)

from connector import metrics
from connector.limits import LOOKUP_TTL_S, STATS_SAMPLES_MAX
from connector.messages import WorkerReport
from connector.metrics import METRICS, Counts, labelled, summary
from connector.stats import CountStats
from kvstore.testing.blockstore import MemoryBlockStore

BLOCK_BYTES = GEOMETRY.token_bytes * BLOCK


class TestTable:
    def test_names_are_prometheus_names_with_a_unit_and_no_suffix(self) -> None:
        units = ("blocks", "bytes", "tokens", "requests", "seconds", "loads", "saves")
        assert len({metric.name for metric in METRICS}) == len(METRICS) > 10
        for metric in METRICS:
            assert re.fullmatch(r"kvstore_[a-z_]+", metric.name)
            assert metric.name.endswith(units), metric.name
            assert metric.help

    def test_histograms_are_the_ones_in_seconds_and_have_no_label(self) -> None:
        for metric in METRICS:
            assert bool(metric.buckets) == metric.name.endswith("_seconds")
            assert list(metric.buckets) == sorted(set(metric.buckets))
            assert not (metric.buckets and metric.label)

    def test_values_of_labels_are_known_but_for_a_drivers_reasons(self) -> None:
        for metric in METRICS:
            known = bool(metric.label) and metric is not metrics.UNLOCKED_BYTES
            assert bool(metric.values) == known, metric.name
            assert len(set(metric.values)) == len(metric.values)


class TestCounts:
    def test_what_was_taken_is_not_taken_again(self) -> None:
        counts = Counts()
        assert counts.take() is None
        counts.add(metrics.SAVED_BLOCKS, 2)
        counts.add(metrics.SAVED_BLOCKS)
        counts.add(metrics.FAILED_LOADS, 1, "deadline")
        counts.observe(metrics.LOAD_SECONDS, 0.5)
        counts.observe(metrics.LOAD_SECONDS, 1.5)
        stats = counts.take()
        assert stats is not None
        assert stats.to_dict() == {
            "kvstore_saved_blocks": 3,
            "kvstore_failed_loads:deadline": 1,
            "kvstore_load_seconds": [0.5, 1.5],
        }
        assert counts.take() is None

    def test_counts_of_several_workers_add_up_and_samples_are_put_together(self) -> None:
        one = CountStats({"n": 1, "s": [1.0]})
        assert one.aggregate(CountStats({"n": 2, "s": [2.0], "m:x": 4})) is one
        assert one.to_dict() == {"n": 3, "s": [1.0, 2.0], "m:x": 4}

    def test_aggregating_leaves_what_was_handed_out_before_as_it_was(self) -> None:
        one, other = CountStats({"s": [1.0]}), CountStats({"s": [2.0]})
        before, added = one.to_dict(), other.to_dict()
        one.aggregate(other)
        assert (before, added) == ({"s": [1.0]}, {"s": [2.0]})

    def test_samples_are_bounded_and_the_last_ones_stay(self) -> None:
        counts = Counts()
        for i in range(STATS_SAMPLES_MAX + 10):
            counts.observe(metrics.LOAD_SECONDS, i)
        stats = counts.take()
        assert stats is not None
        samples = stats.to_dict()["kvstore_load_seconds"]
        assert (len(samples), samples[-1]) == (STATS_SAMPLES_MAX, STATS_SAMPLES_MAX + 9)

    def test_trap_counts_of_many_threads_are_not_lost(self) -> None:
        counts, seen = Counts(), [0]

        def count() -> None:
            for _ in range(2000):
                counts.add(metrics.SAVED_BLOCKS)

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen[0] += taken(counts.take).get("saved_blocks", 0)
        seen[0] += taken(counts.take).get("saved_blocks", 0)
        assert seen == [8000]

    def test_what_was_read_is_counted_once_by_transport(self) -> None:
        counts = Counts()
        counts.read({"shm": 5, "stream": 0})
        assert taken(counts.take) == {"read_bytes:shm": 5}
        counts.read({"shm": 5, "stream": 7})
        counts.read({"shm": 6, "stream": 8})
        assert taken(counts.take) == {"read_bytes:shm": 1, "read_bytes:stream": 8}
        counts.read({"shm": 6, "stream": 8})
        assert counts.take() is None

    def test_for_people_samples_are_summed_up(self) -> None:
        data = {"n": 3, "s": [1.0, 3.0], "none": []}
        assert summary(data) == {"n": 3, "s_count": 2, "s_mean": 2.0, "s_max": 3.0}

    def test_entries_are_taken_apart_as_they_were_counted(self) -> None:
        assert list(labelled({"n": 3, "m:a-b": 1})) == [("n", "", 3), ("m", "a-b", 1)]


class TestTransfers:
    """Of a worker. Durations are only counted here: their values are the clock's."""

    def test_a_save_and_a_load_count_blocks_bytes_and_durations(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(3))
        assert taken(worker.core.take_stats) == {
            "saved_blocks": 3,
            "saved_bytes": 3 * BLOCK_BYTES,
            "save_seconds": 1,
        }
        worker.core.start_loads([load_job(store, 2)])
        loaded(worker)
        assert taken(worker.core.take_stats) == {
            "loaded_blocks": 2,
            "loaded_bytes": 2 * BLOCK_BYTES,
            "load_seconds": 1,
        }
        assert worker.core.take_stats() is None

    def test_blocks_that_are_there_are_not_saved_again_but_are_stored(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(1))
        worker.core.take_stats()
        worker.core.start_saves([save_job(2, job_id=1)])
        report = worker.until(lambda report: 1 in report.ended_saves)
        assert report.stored_blocks == {1: frozenset({0, 1})}
        counts = taken(worker.core.take_stats)
        assert (counts["unsaved_blocks:exists"], counts["saved_blocks"]) == (1, 1)

    def test_a_duration_is_from_the_call_to_the_end(self, store: MemoryBlockStore) -> None:
        pytest.importorskip("torch")
        clock = Clock()
        worker = Worker(store, clock=clock)
        hold = Hold()
        store.on_commit = hold
        worker.core.start_saves([save_job(1)])
        hold.await_reached()
        clock.now += 3.0
        hold.release()
        worker.until(lambda report: bool(report.ended_saves))
        stats = worker.core.take_stats()
        assert stats is not None
        assert stats.to_dict()["kvstore_save_seconds"] == [3.0]
        worker.core.close()

    def test_trap_blocks_in_no_slot_are_not_said_to_be_stored(self) -> None:
        pytest.importorskip("torch")
        worker = Worker(MemoryBlockStore(capacity_blocks=1))
        worker.core.start_saves([save_job(3)])
        report = worker.until(lambda report: bool(report.ended_saves))
        assert report.stored_blocks == {0: frozenset({0})}
        counts = taken(worker.core.take_stats)
        assert (counts["unsaved_blocks:rejected"], counts["saved_blocks"]) == (2, 1)
        worker.core.close()

    def test_trap_two_saves_of_one_block_in_one_batch_are_both_stored(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        worker.core.start_saves([save_job(1), save_job(1, first_block_id=5, job_id=1)])
        report = worker.until(lambda report: len(report.ended_saves) == 2)
        assert report.stored_blocks == {0: frozenset({0}), 1: frozenset({0})}

    @pytest.mark.parametrize(
        "reason", ["load-failed", "error", "no-store", "too-busy", "deadline", "aborted"]
    )
    def test_a_load_that_fails_is_counted_with_its_reason(
        self, store: MemoryBlockStore, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch")
        clock = Clock()
        if reason == "too-busy":
            monkeypatch.setattr("connector.worker.worker.LOAD_JOBS_MAX", 1)
        worker = Worker(store, clock=clock)
        save(worker, save_job(2))
        worker.core.take_stats()
        job = load_job(store, 2)
        hold = hinder(store, worker, reason)
        worker.core.start_loads([job])
        if reason in ("deadline", "aborted"):
            hold.await_reached()
            if reason == "deadline":
                clock.now += 1000.0
            else:
                worker.core.cancel_loads(["q"])
        loaded(worker)
        hold.release()
        counts = taken(worker.core.take_stats)
        assert counts.pop(f"failed_loads:{reason}") == 1
        assert counts.pop("cut_loads:host", 0) == (reason == "deadline")
        good = 1 if reason == "load-failed" else 0
        assert counts == ({"loaded_blocks": 1, "loaded_bytes": BLOCK_BYTES} if good else {})
        worker.core.close()


class TestReports:
    def test_trap_a_block_is_stored_only_if_it_is_for_every_worker(self) -> None:
        one = WorkerReport(ended_saves={1: 1}, stored_blocks={1: frozenset({0, 1})})
        one.merge(WorkerReport(ended_saves={1: 1}, stored_blocks={1: frozenset({1, 2})}))
        one.merge(WorkerReport(ended_saves={2: 1}, stored_blocks={2: frozenset({0})}))
        assert one.stored_blocks == {1: frozenset({1}), 2: frozenset({0})}

    def test_the_engines_part_is_not_sent_to_the_scheduler_side(self) -> None:
        assert WorkerReport({"r"}, {"r"}, {5}).for_scheduler() is None
        rest = WorkerReport(
            failed_blocks={0: 1},
            ended_saves={2: 1},
            stored_blocks={2: frozenset({0})},
            ended_loads={0: 1},
        )
        assert WorkerReport({"r"}, {"r"}, {5}).merge(rest).for_scheduler() == rest
        only_loads = WorkerReport(ended_loads={0: 1})
        assert only_loads.for_scheduler() == only_loads


class TestRequests:
    """Of the scheduler side."""

    def test_a_request_counts_its_tokens_its_lookup_and_its_reason(self, side: Side) -> None:
        request = FakeRequest("r", list(range(3 * BLOCK + 2)))
        side.put(request, 2)
        assert side.match(request) == 2 * BLOCK
        wait_for(lambda: side.core._counts._counts.get("kvstore_lookup_blocks") == 3, "it")
        assert taken(side.core.take_stats) == {
            "block_tokens": BLOCK,
            "lookup_blocks": 3,
            "found_blocks": 2,
            "lookup_seconds": 1,
        }
        table = list(range(1, 8))
        side.core.allocated(request, lambda: (table,), 2 * BLOCK)
        side.step()
        side.core.loads_ended(["r"])
        side.core.finished("r")
        wait_for(lambda: side.core.stats()["requests"]["requests"] == 1, "the end of the request")
        assert taken(side.core.take_stats) == {
            "requests": 1,
            "possible_tokens": 3 * BLOCK,
            "hit_tokens": 2 * BLOCK,
            "missed_requests:never-stored": 1,
            "missed_tokens:never-stored": BLOCK,
        }
        assert side.core.take_stats() is None

    def test_a_request_counts_its_blocks_once_however_long_it_waits(
        self, store: MemoryBlockStore
    ) -> None:
        """It is looked up again and again, since an answer grows old."""
        clock = Clock()
        side = Side(store, clock=clock)
        request = FakeRequest("r", list(range(3 * BLOCK + 2)))
        side.put(request, 2)
        for _ in range(5):
            assert side.match(request) == 2 * BLOCK
            clock.now += LOOKUP_TTL_S + 0.1
        side.core.plan_step([], ["r"], lambda _: None)  # preempted
        assert side.match(request) == 2 * BLOCK
        counted = taken(side.core.take_stats)
        assert (counted["lookup_blocks"], counted["found_blocks"]) == (3, 2)
        assert counted["lookup_seconds"] > 1
        side.core.close()
