"""The worker side's saves against the model of a store: drops, copy guards, batches."""

from __future__ import annotations

import pytest
from connector_parts import Clock, Hold, Worker, blocks_of, keys, save, save_job, wait_for

from connector.messages import SaveBlock, SaveJob
from kvstore.testing.blockstore import MemoryBlockStore

torch = pytest.importorskip("torch")


def test_an_unreachable_node_drops_the_save(store: MemoryBlockStore, worker: Worker) -> None:
    store.node_down = True
    save(worker, save_job(1))
    store.node_down = False
    save(worker, save_job(1, job_id=1))
    assert store.sealed() == keys(1)


def test_a_node_that_stays_down_is_logged_once_not_per_save(
    store: MemoryBlockStore, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    store.node_down = True
    for job_id in range(5):
        save(worker, save_job(1, job_id=job_id))
    said = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(said) == 1


def test_a_full_node_drops_what_does_not_fit() -> None:
    store = MemoryBlockStore(capacity_blocks=1)
    worker = Worker(store)
    save(worker, save_job(3))
    assert store.sealed() == keys(1)
    worker.core.close()


def test_an_error_while_copying_gives_the_slots_back(
    store: MemoryBlockStore, worker: Worker
) -> None:
    (blocks,) = blocks_of(worker)
    copy = blocks.gather_many

    def broken(items, layer) -> None:
        copy(items[:1], layer)
        raise RuntimeError("a bug in the copy")

    blocks.gather_many = broken  # type: ignore[method-assign]
    save(worker, save_job(3))
    assert store.reserved() == 0
    assert store.sealed() == []


@pytest.mark.parametrize("reported", [True, False])
def test_the_copy_guard_a_save_past_its_deadline_reads_and_publishes_nothing(
    store: MemoryBlockStore, reported: bool
) -> None:
    """Also one of which nobody has asked since, so that its guard lets it pass."""
    clock = Clock()
    worker = Worker(store, clock=clock, timeout_s=5.0)
    hold = store.on_reserve = Hold()
    worker.core.start_saves([save_job(2)])
    hold.await_reached()
    clock.now += 6
    if reported:
        assert worker.core.poll().ended_saves == {0: 1}
    reads: list[int] = []
    (blocks,) = blocks_of(worker)
    blocks.gather_many = lambda *args: reads.append(1)  # type: ignore[method-assign]
    if reported:
        clock.now -= 6  # the time would end it, too
    hold.release()
    wait_for(lambda: store.reserve_calls == 1 and store.reserved() == 0, "slots given back")
    assert reads == []
    assert store.sealed() == []
    worker.core.close()


def test_a_save_is_not_reported_while_its_commit_is_under_way(store: MemoryBlockStore) -> None:
    clock = Clock()
    worker = Worker(store, clock=clock, timeout_s=5.0)
    hold = store.on_commit = Hold()
    worker.core.start_saves([save_job(1)])
    hold.await_reached()
    clock.now += 6
    assert worker.core.poll().ended_saves == {}, "a reset would clear before it is published"
    hold.release()
    worker.until(lambda report: 0 in report.ended_saves)
    assert store.sealed() == keys(1)
    worker.core.close()


def test_many_small_jobs_share_a_reserve(store: MemoryBlockStore, worker: Worker) -> None:
    hold = store.on_reserve = Hold()
    worker.core.start_saves([save_job(1)])
    hold.await_reached()
    store.on_reserve = lambda: None
    jobs = [SaveJob(i, "s", (SaveBlock((key,), (1, 2)),)) for i, key in enumerate(keys(9)[1:], 1)]
    worker.core.start_saves(jobs)
    hold.release()
    worker.until(lambda report: len(report.ended_saves) == 9)
    assert store.reserve_calls == 2
    assert len(store.sealed()) == 9


def test_what_a_save_continues_was_used_before_it(store: MemoryBlockStore, worker: Worker) -> None:
    """The store keeps the head of what it is told of for longest."""
    run = tuple(keys(3))
    blocks = (SaveBlock((run[2],), (5, 6)),)
    save(worker, SaveJob(0, "s", blocks, ((run[:2],),)))
    wait_for(lambda: store.touched == list(run), "the run to be touched")
