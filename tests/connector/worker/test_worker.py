"""The worker side against the model of a store: bytes, reports, deadlines, copy guards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from connector_parts import (
    BLOCK,
    ENGINE_BLOCK,
    GEOMETRY,
    PATIENCE_S,
    Clock,
    Hold,
    Worker,
    bits,
    blocks_of,
    keys,
    layout,
    load_job,
    loaded,
    save,
    save_job,
    wait_for,
)

from connector.layout.topology import TpKVTopology
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob, WorkerReport
from connector.scheduler.lazy_store import LazyStore
from connector.worker.worker import WorkerCore
from kvstore.spi import BlockRef, NodeUnavailableError
from kvstore.testing.blockstore import MemoryBlockStore, timed_out

torch = pytest.importorskip("torch")
PER_KEY = BLOCK // ENGINE_BLOCK


def test_what_one_worker_saves_another_loads(store: MemoryBlockStore) -> None:
    one, other = Worker(store, seed=1), Worker(store, seed=2)
    save(one, save_job(3))
    other.core.start_loads([load_job(store, 3)])
    report = loaded(other)
    assert report.invalid_block_ids == set()
    assert report.failed_requests == set()
    assert torch.equal(bits(other.kv)[:, 11:17], bits(one.kv)[:, 1:7])
    wait_for(lambda: store.touched == keys(3), "nodes hear what was used")
    one.core.close()
    other.core.close()


def test_a_part_of_a_store_block_is_loaded(store: MemoryBlockStore, worker: Worker) -> None:
    save(worker, save_job(1))
    (found,) = store.match(keys(1))
    before = bits(worker.kv)
    worker.core.start_loads([LoadJob(0, "q", (LoadBlock((found,), 1, (20,)),))])
    loaded(worker)
    after = bits(worker.kv)
    assert torch.equal(after[:, 20], before[:, 2])
    assert torch.equal(after[:, :20], before[:, :20])


def test_blocks_that_exist_are_not_written_again(store: MemoryBlockStore, worker: Worker) -> None:
    save(worker, save_job(2))
    first = [store.payload(key) for key in keys(2)]
    save(worker, save_job(3, first_block_id=10, job_id=1))
    assert [store.payload(key) for key in keys(2)] == first
    assert len(store.sealed()) == 3
    assert store.reserved() == 0


def test_a_replica_saves_nothing_and_says_so(store: MemoryBlockStore) -> None:
    worker = Worker(store, saves=False)
    save(worker, save_job(2))
    assert store.reserve_calls == 0
    worker.core.close()


def test_each_shard_uses_its_own_keys(store: MemoryBlockStore) -> None:
    topology = TpKVTopology.of(2)
    pair = tuple(keys(1, shard, topology)[0] for shard in (0, 1))
    workers = [Worker(store, rank=i, seed=i, topology=topology) for i in (0, 1)]
    for worker in workers:
        save(worker, SaveJob(0, "s", (SaveBlock(pair, (1, 2)),)))
    assert store.sealed() == list(pair)
    assert store.payload(pair[0]) != store.payload(pair[1])
    for worker in workers:
        worker.core.close()


class TestReports:
    def test_trap_each_load_is_reported_exactly_once(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(1))
        worker.core.start_loads(
            [load_job(store, 1, first_block_id=4 + 2 * i, name=f"q{i}", job_id=i) for i in range(8)]
        )
        seen: list[str] = []

        def all_seen() -> bool:
            seen.extend(worker.core.poll(0.01).finished_loads)
            return len(seen) >= 8

        wait_for(all_seen, "all loads")
        assert worker.core.poll(0.05).finished_loads == set()
        assert sorted(seen) == [f"q{i}" for i in range(8)]

    def test_trap_an_aborted_load_is_still_reported(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(2))
        hold = store.on_view = Hold()
        job = load_job(store, 2)
        worker.core.start_loads([job])
        hold.await_reached()
        before = bits(worker.kv)
        worker.core.cancel_loads(["q"])
        report = worker.core.poll()
        assert report.finished_loads == {"q"}
        hold.release()
        time.sleep(0.05)
        assert torch.equal(bits(worker.kv), before), "the blocks belong to somebody else now"
        assert worker.core.poll().finished_loads == set()

    def test_loads_that_the_engine_gives_up_have_no_block_that_could_be_invalid(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        """One under way, one that had failed already, and one of which it has not heard yet."""
        save(worker, save_job(2))
        gone = load_job(store, 1, first_block_id=12, name="failed", job_id=0)
        worker.core.start_loads([gone._replace(blocks=(gone.blocks[0]._replace(found=()),))])
        hold = store.on_view = Hold()
        worker.core.start_loads([load_job(store, 2, name="under way", job_id=1)])
        hold.await_reached()
        before = bits(worker.kv)
        assert worker.core.end_loads({0, 1, 2}, PATIENCE_S) == {0, 1}
        hold.release()
        report = worker.core.poll()
        assert report.finished_loads == {"failed", "under way"}
        assert report.failed_blocks == {0: 0, 1: 0}, "the scheduler side still hears of it"
        assert report.invalid_block_ids == report.failed_requests == set()
        assert torch.equal(bits(worker.kv), before)

    def test_poll_returns_as_soon_as_a_load_ends(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(1))
        worker.core.start_loads([load_job(store, 1)])
        started = time.monotonic()
        report = worker.core.poll(PATIENCE_S)
        assert report.finished_loads == {"q"}
        assert time.monotonic() - started < PATIENCE_S / 2

    def test_poll_does_not_wait_when_nothing_is_under_way(self, worker: Worker) -> None:
        started = time.monotonic()
        worker.core.poll(PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S / 2


class TestFailedLoads:
    def test_a_block_that_is_gone_and_those_behind_it_are_invalid(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(3))
        job = load_job(store, 3)
        store.evict(keys(3)[1])
        worker.core.start_loads([job])
        report = loaded(worker)
        assert report.invalid_block_ids == {13, 14, 15, 16}
        assert report.failed_blocks == {0: 1}
        assert report.failed_requests == set(), "block ids say it"

    def test_rule_4_a_block_that_changes_between_copy_and_check_is_invalid(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(1))
        job = load_job(store, 1)
        store.on_check = lambda: store.evict(keys(1)[0])
        worker.core.start_loads([job])
        assert loaded(worker).invalid_block_ids == {11, 12}

    def test_a_block_of_another_size_is_invalid(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        (key,) = keys(1)
        (reservation,) = store.reserve([key], GEOMETRY.token_bytes, 1)
        store.commit([reservation])
        before = bits(worker.kv)
        worker.core.start_loads([load_job(store, 1)])
        assert loaded(worker).invalid_block_ids == {11, 12}
        assert torch.equal(bits(worker.kv), before)

    def test_a_record_that_points_nowhere_is_invalid(self, worker: Worker) -> None:
        found = BlockRef(keys(1)[0], b"\0" * 44)
        worker.core.start_loads([LoadJob(0, "q", (LoadBlock((found,), 0, (11, 12)),))])
        assert loaded(worker).invalid_block_ids == {11, 12}

    def test_an_exception_in_the_store_costs_that_load_only(
        self, store: MemoryBlockStore, worker: Worker
    ) -> None:
        save(worker, save_job(1))
        job = load_job(store, 1)
        store.on_view = timed_out
        worker.core.start_loads([job])
        assert loaded(worker).invalid_block_ids == {11, 12}
        store.on_view = lambda: None
        worker.core.start_loads([load_job(store, 1, name="again", job_id=1)])
        assert loaded(worker, "again").invalid_block_ids == set()

    def test_without_a_store_every_load_fails(self) -> None:
        def nobody() -> MemoryBlockStore:
            raise NodeUnavailableError("nobody there")

        core = WorkerCore(
            LazyStore(nobody),
            layout(),
            rank=0,
            saves=True,
            load_timeout_s=PATIENCE_S,
            save_timeout_s=PATIENCE_S,
        )
        core.register_kv_caches(Worker(MemoryBlockStore()).kv)
        core.start_loads([LoadJob(0, "q", (LoadBlock((BlockRef(b"k" * 32, b""),), 0, (1, 2)),))])
        core.start_saves([save_job(1)])
        total = WorkerReport()
        wait_for(
            lambda: bool(total.merge(core.poll(0.01)).finished_loads and total.ended_saves),
            "both to end",
        )
        assert total.invalid_block_ids == {1, 2}
        core.close()


class TestLoadDeadline:
    def test_what_was_loaded_in_time_stays_valid(self, store: MemoryBlockStore) -> None:
        clock = Clock()
        worker = Worker(store, clock=clock, timeout_s=5.0)
        save(worker, save_job(2))
        job = load_job(store, 2)
        hold = Hold()
        calls: list[int] = []

        def second_hangs() -> None:
            calls.append(1)
            if len(calls) == 2:
                hold()

        store.on_view = second_hangs
        worker.core.start_loads([job])
        hold.await_reached()
        assert worker.core.poll().finished_loads == set()
        clock.now += 6
        report = worker.core.poll()
        assert report.finished_loads == {"q"}
        assert report.invalid_block_ids == {13, 14}
        hold.release()
        worker.core.close()

    def test_the_copy_guard_nothing_is_written_after_the_report(
        self, store: MemoryBlockStore
    ) -> None:
        clock = Clock()
        worker = Worker(store, clock=clock, timeout_s=5.0)
        save(worker, save_job(1))
        job = load_job(store, 1)
        hold = store.on_view = Hold()
        worker.core.start_loads([job])
        hold.await_reached()
        clock.now += 6
        assert worker.core.poll().invalid_block_ids == {11, 12}
        before = bits(worker.kv)
        clock.now -= 6  # even a thread that believes to be in time may not write any more
        hold.release()
        worker.core.start_loads([load_job(store, 1, 21, "next", 1)])
        loaded(worker, "next")
        assert torch.equal(bits(worker.kv)[:, 11:13], before[:, 11:13])
        worker.core.close()

    def test_the_copy_guard_no_report_while_a_copy_is_running(
        self, store: MemoryBlockStore
    ) -> None:
        clock = Clock()
        worker = Worker(store, clock=clock, timeout_s=5.0)
        save(worker, save_job(1))
        job = load_job(store, 1)
        hold = Hold()
        (blocks,) = blocks_of(worker)
        copy = blocks.scatter_many

        def slow(*args) -> None:
            hold()
            copy(*args)

        blocks.scatter_many = slow  # type: ignore[method-assign]
        worker.core.start_loads([job])
        hold.await_reached()
        clock.now += 6
        assert worker.core.poll().finished_loads == set(), "the copy may still write"
        hold.release()
        assert loaded(worker).finished_loads == {"q"}
        worker.core.close()


@pytest.mark.parametrize("saves", [True, False], ids=["save", "load"])
def test_a_copy_that_hangs_is_logged_and_counted_although_the_engine_takes_no_step(
    store: MemoryBlockStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saves: bool,
) -> None:
    for module in ("connector.worker.worker", "connector.worker.copy_guard"):
        monkeypatch.setattr(f"{module}.COPY_STUCK_S", 0.1)
    worker = Worker(store)
    if not saves:
        save(worker, save_job(1))
    hold = Hold()
    (blocks,) = blocks_of(worker)
    way = "gather_many" if saves else "scatter_many"
    monkeypatch.setattr(blocks, way, lambda *_: hold())
    if saves:
        worker.core.start_saves([save_job(1)])
    else:
        worker.core.start_loads([load_job(store, 1)])
    hold.await_reached()
    said = "a copy of a save" if saves else "a copy of a load"
    wait_for(lambda: any(said in record.message for record in caplog.records), said)
    hold.release()
    stats = worker.core.take_stats()
    assert stats is not None
    counted = {name: n for name, n in stats.to_dict().items() if "stuck" in name}
    assert counted == {"kvstore_stuck_saves" if saves else "kvstore_stuck_loads": 1}
    worker.core.close()


def test_close_ends_in_time_although_the_store_hangs(
    store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.worker.worker.SHUTDOWN_TIMEOUT_S", 0.2)
    worker = Worker(store)
    save(worker, save_job(1))
    hold = store.on_view = Hold()
    worker.core.start_loads([load_job(store, 1)])
    hold.await_reached()
    started = time.monotonic()
    worker.core.close()
    assert time.monotonic() - started < PATIENCE_S / 2
    hold.release()


def test_close_closes_the_store(store: MemoryBlockStore) -> None:
    worker = Worker(store)
    save(worker, save_job(1))
    worker.core.close()
    assert store.closed


class TestBeforeTheFirstLoad:
    def test_the_store_is_asked_and_connected_to_on_the_loading_thread(
        self, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, str]] = []
        for name in ("match", "touch"):
            real = getattr(store, name)

            def noted(*args: object, name: str = name, real: Any = real) -> object:
                calls.append((name, threading.current_thread().name))
                return real(*args)

            monkeypatch.setattr(store, name, noted)
        worker = Worker(store)
        wait_for(lambda: len(calls) == 2, "the warm-up")
        assert calls == [("match", "kvstore-load"), ("touch", "kvstore-load")]
        worker.core.close()

    def test_a_store_that_fails_then_costs_no_load(
        self, store: MemoryBlockStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(worker, save_job(1))
        job = load_job(store, 1)

        def failing(*args: object) -> None:
            failed.set()
            raise ZeroDivisionError

        failed = threading.Event()
        with monkeypatch.context() as patched:
            patched.setattr(store, "match", failing)
            other = Worker(store)
            assert failed.wait(PATIENCE_S)
        other.core.start_loads([job])
        assert loaded(other).invalid_block_ids == set()
        other.core.close()


def test_a_request_does_not_wait_for_nodes_to_hear_what_was_used(
    store: MemoryBlockStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(worker, save_job(1))
    held, touch = Hold(), store.touch

    def holding(used: Sequence[bytes]) -> None:
        if used:
            held()
        touch(used)

    monkeypatch.setattr(store, "touch", holding)
    worker.core.start_loads([load_job(store, 1)])
    assert loaded(worker).invalid_block_ids == set()
    assert store.touched == []
    held.release()
    wait_for(lambda: store.touched == keys(1), "the touch")
