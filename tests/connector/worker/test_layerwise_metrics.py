"""What transfers layer by layer add to the counts, and say about what they stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from connector_parts import (
    BLOCK,
    GEOMETRY,
    PATIENCE_S,
    Clock,
    Hold,
    Worker,
    hinder,
    load_job,
    save,
    save_job,
    taken,
)

from connector.messages import SaveJob
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.worker import WorkerCore
from kvstore.testing.blockstore import MemoryBlockStore

pytest.importorskip("torch")
BLOCK_BYTES = GEOMETRY.token_bytes * BLOCK
LAYERS = [f"layer{i}" for i in range(GEOMETRY.layers)]
SOON_S = 0.1
"""A deadline that a test lets pass."""


@pytest.fixture
def worker(store: MemoryBlockStore) -> Iterator[Worker]:
    worker = Worker(store, kind=LayerwiseWorker)
    yield worker
    worker.core.close()


def forward(worker: Worker, *jobs: SaveJob) -> None:
    """Wait for and write each layer."""
    for name in LAYERS:
        worker.core.wait_layer_load(name)
        worker.core.layer_written(name, jobs)
    worker.core.start_saves(jobs)


def test_a_save_and_a_load_count_what_they_count_between_steps(
    store: MemoryBlockStore, worker: Worker
) -> None:
    forward(worker, save_job(3))
    report = worker.until(lambda report: bool(report.ended_saves))
    assert report.stored_blocks == {0: frozenset({0, 1, 2})}
    assert taken(worker.core.take_stats) == {
        "saved_blocks": 3,
        "saved_bytes": 3 * BLOCK_BYTES,
        "save_seconds": 1,
    }
    worker.core.start_loads([load_job(store, 2)])
    forward(worker)
    assert worker.core.poll().ended_loads == {0: 1}
    assert taken(worker.core.take_stats) == {
        "loaded_blocks": 2,
        "loaded_bytes": 2 * BLOCK_BYTES,
        "load_seconds": 1,
    }


def test_blocks_that_are_there_or_that_another_save_of_the_step_has_are_stored(
    store: MemoryBlockStore, worker: Worker
) -> None:
    save(worker, save_job(1))
    worker.core.take_stats()
    jobs = (save_job(2, job_id=1), save_job(3, first_block_id=7, job_id=2))
    forward(worker, *jobs)
    report = worker.until(lambda report: len(report.ended_saves) == 2)
    assert report.stored_blocks == {1: frozenset({0, 1}), 2: frozenset({0, 1, 2})}
    counts = taken(worker.core.take_stats)
    assert (counts["unsaved_blocks:exists"], counts["saved_blocks"]) == (1, 2)


def test_durations_are_from_the_end_of_the_forward_and_until_the_last_layer_is_in_place(
    store: MemoryBlockStore,
) -> None:
    clock, hold = Clock(), Hold()
    worker = Worker(store, clock=clock, kind=LayerwiseWorker)
    store.on_commit = hold
    jobs = [save_job(1)]
    for name in LAYERS:
        worker.core.layer_written(name, jobs)
    clock.now += 5.0  # the forward
    worker.core.start_saves(jobs)
    hold.await_reached()
    clock.now += 3.0
    hold.release()
    worker.until(lambda report: bool(report.ended_saves))
    store.on_view = hold = Hold()
    worker.core.start_loads([load_job(store, 1)])
    hold.await_reached()
    clock.now += 2.0
    hold.release()
    for name in LAYERS:
        worker.core.wait_layer_load(name)
    clock.now += 5.0  # the rest of the forward
    worker.core.poll()
    stats = worker.core.take_stats()
    assert stats is not None
    counts = stats.to_dict()
    assert (counts["kvstore_save_seconds"], counts["kvstore_load_seconds"]) == ([3.0], [2.0])
    worker.core.close()


REASONS = ("node-dead", "error", "no-store", "too-busy", "deadline")
GIVEN_UP = [(kind, reason) for kind in (WorkerCore, LayerwiseWorker) for reason in REASONS]


@pytest.mark.parametrize(("kind", "reason"), [*GIVEN_UP, (LayerwiseWorker, "incomplete")])
def test_a_save_that_is_given_up_is_counted_with_its_reason(
    store: MemoryBlockStore, reason: str, kind: type[WorkerCore]
) -> None:
    clock = Clock()
    worker = Worker(store, clock=clock, kind=kind)
    hold = hinder(store, worker, reason)
    jobs = [save_job(2)]
    if isinstance(worker.core, LayerwiseWorker):
        for name in LAYERS[:1] if reason == "incomplete" else LAYERS:
            worker.core.layer_written(name, jobs)
    worker.core.start_saves(jobs)
    if reason == "deadline":
        hold.await_reached()
        clock.now += 1000.0
    report = worker.until(lambda report: bool(report.ended_saves))
    hold.release()
    assert report.stored_blocks == {0: frozenset()}
    assert taken(worker.core.take_stats) == {f"dropped_saves:{reason}": 1}
    worker.core.close()


@pytest.mark.parametrize(
    "reason", ["load-failed", "error", "no-store", "too-busy", "deadline", "incomplete"]
)
def test_a_load_that_fails_is_counted_with_its_reason(store: MemoryBlockStore, reason: str) -> None:
    worker = Worker(
        store, kind=LayerwiseWorker, timeout_s=SOON_S if reason == "deadline" else PATIENCE_S
    )
    other = Worker(store)
    save(other, save_job(2))
    other.core.close()
    job = load_job(store, 2)
    hold = hinder(store, worker, reason)
    worker.core.start_loads([job])
    for name in LAYERS[:1] if reason == "incomplete" else LAYERS:
        worker.core.wait_layer_load(name)
    assert worker.core.poll().ended_loads == {0: 1}
    hold.release()
    counts = taken(worker.core.take_stats)
    assert counts.pop(f"failed_loads:{reason}") == 1
    good = {"loaded_blocks": 1, "loaded_bytes": BLOCK_BYTES}
    assert counts == (good if reason == "load-failed" else {})
    worker.core.close()
