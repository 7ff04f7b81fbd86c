"""The worker side layer by layer, against the model of a store: bytes, lateness, faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_parts import (
    GEOMETRY,
    PATIENCE_S,
    Clock,
    Hold,
    Worker,
    bits,
    blocks_of,
    keys,
    load_job,
    save,
    save_job,
    wait_for,
)

from connector.limits import FORWARD_TIMEOUT_S
from connector.messages import LoadJob, WorkerReport
from connector.worker.layerwise_worker import LayerwiseWorker
from kvstore import InternalError
from kvstore.testing.blockstore import MemoryBlockStore, timed_out

torch = pytest.importorskip("torch")
LAYERS = [f"layer{i}" for i in range(GEOMETRY.layers)]
SOON_S = 0.1
"""A deadline that a test lets pass."""
Make = Callable[..., Worker]


@pytest.fixture
def make(store: MemoryBlockStore) -> Iterator[Make]:
    workers: list[Worker] = []

    def one(**settings: Any) -> Worker:
        workers.append(Worker(store, kind=LayerwiseWorker, **settings))
        return workers[-1]

    yield one
    for worker in workers:
        worker.core.close()


@pytest.fixture
def saved(store: MemoryBlockStore) -> Iterator[Worker]:
    """A worker, of the other kind, that has saved three blocks from engine blocks 1 to 6."""
    worker = Worker(store, seed=7)
    save(worker, save_job(3))
    yield worker
    worker.core.close()


def step(worker: Worker, *jobs: LoadJob) -> WorkerReport:
    worker.core.start_loads(jobs)
    for name in LAYERS:
        worker.core.wait_layer_load(name)
    return worker.core.poll()


def on_copy(worker: Worker, layer: int, act: Callable[[], None]) -> None:
    """Run `act` before each copy of `layer`, in either direction."""
    (blocks,) = blocks_of(worker)

    def acting(copy: Callable[..., None]) -> Callable[..., None]:
        def one(*args: Any) -> None:
            if args[-1] == layer:
                act()
            copy(*args)

        return one

    blocks.gather_many = acting(blocks.gather_many)  # type: ignore[method-assign]
    blocks.scatter_many = acting(blocks.scatter_many)  # type: ignore[method-assign]


def on_check(store: MemoryBlockStore, number: int, act: Callable[[], None]) -> None:
    """Run `act` between a copy and its check, the `number`th one."""
    calls: list[None] = []

    def checked() -> None:
        calls.append(None)
        if len(calls) == number:
            act()

    store.on_check = checked


class TestLoads:
    def test_the_bytes_are_those_of_whole_blocks(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        report = step(worker, load_job(store, 3))
        assert torch.equal(bits(worker.kv)[:, 11:17], bits(saved.kv)[:, 1:7])
        assert report.invalid_block_ids == set()
        assert report.ended_loads == {0: 1}
        assert report.finished_loads == set(), "an engine takes those for loads between steps"
        wait_for(lambda: store.touched == keys(3), "the blocks to be touched")
        assert worker.core.poll() == WorkerReport(), "reported once"

    @pytest.mark.parametrize("gone", [None, 0, 1, 2])
    def test_what_does_not_fit_the_memory_of_a_step_comes_before_in_whole_blocks(
        self,
        store: MemoryBlockStore,
        make: Make,
        saved: Worker,
        gone: int | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("connector.worker.layerwise_worker.STEP_LOAD_BYTES", 1)
        worker = make()
        job, other = load_job(store, 3), load_job(store, 1, 21, "other", 1)
        if gone is not None:
            store.evict(keys(3)[gone])
        report = step(worker, job, other)
        good = 3 if gone is None else gone
        assert report.invalid_block_ids == {
            *range(11 + 2 * good, 17),
            *((21, 22) if gone == 0 else ()),
        }
        assert torch.equal(
            bits(worker.kv)[:, 11 : 11 + 2 * good], bits(saved.kv)[:, 1 : 1 + 2 * good]
        )
        if gone != 0:
            assert torch.equal(bits(worker.kv)[:, 21:23], bits(saved.kv)[:, 1:3])

    def test_a_layer_can_be_read_while_the_next_is_copied(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker, hold = make(), Hold()
        on_copy(worker, 1, hold)
        worker.core.start_loads([load_job(store, 3)])
        worker.core.wait_layer_load(LAYERS[0])
        assert torch.equal(bits(worker.kv)[0, 11:17], bits(saved.kv)[0, 1:7])
        assert not torch.equal(bits(worker.kv)[1, 11:17], bits(saved.kv)[1, 1:7])
        hold.release()
        worker.core.wait_layer_load(LAYERS[1])
        assert worker.core.poll().invalid_block_ids == set()

    def test_layers_may_be_waited_for_in_any_order(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        worker.core.start_loads([load_job(store, 1)])
        for name in [*reversed(LAYERS), LAYERS[0], "no such layer"]:
            worker.core.wait_layer_load(name)
        assert worker.core.poll().invalid_block_ids == set()

    def test_a_step_without_loads_waits_for_nothing(self, make: Make) -> None:
        assert step(make()) == WorkerReport()

    def test_rule_4_a_block_that_goes_between_two_layers_is_invalid_and_those_behind_it(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        job = load_job(store, 3)
        # Three checks of the first layer, then the second block's second layer.
        on_check(store, 5, lambda: store.evict(keys(3)[1]) and None)
        report = step(worker, job)
        assert report.invalid_block_ids == {13, 14, 15, 16}
        assert report.failed_blocks == {0: 1}
        assert torch.equal(bits(worker.kv)[:, 11:13], bits(saved.kv)[:, 1:3])

    def test_a_block_that_is_gone_before_the_step_is_invalid(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        job = load_job(store, 3)
        store.evict(keys(3)[0])
        assert step(make(), job).invalid_block_ids == set(range(11, 17))

    def test_one_request_of_a_step_may_fail_and_another_not(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        good, bad = load_job(store, 2), load_job(store, 3, 21, "bad", 1)
        store.evict(keys(3)[2])
        report = step(make(), good, bad)
        assert report.invalid_block_ids == {25, 26}
        assert report.failed_blocks == {1: 2}
        assert report.ended_loads == {0: 1, 1: 1}

    def test_a_late_layer_is_invalid_and_nothing_is_written_after_the_report(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker, hold = make(timeout_s=SOON_S), Hold()
        on_check(store, 3, hold)  # the first layer is in place, of the second one block is copied
        worker.core.start_loads([load_job(store, 2)])
        worker.core.wait_layer_load(LAYERS[0])
        worker.core.wait_layer_load(LAYERS[1])
        report = worker.core.poll()
        assert report.invalid_block_ids == {11, 12, 13, 14}
        before = bits(worker.kv)
        hold.release()
        worker.core.close()  # the copying thread has come to its end
        assert torch.equal(bits(worker.kv), before)

    def test_a_thread_that_hangs_costs_one_step_its_deadline_and_the_next_nothing(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker, hold = make(timeout_s=SOON_S), Hold()
        job = load_job(store, 1)
        store.on_view = hold
        assert step(worker, job).invalid_block_ids == {11, 12}
        worker.core._load_timeout_s = PATIENCE_S
        started = time.monotonic()
        assert step(worker, job._replace(job_id=1)).failed_blocks == {1: 0}
        assert time.monotonic() - started < PATIENCE_S / 2
        store.on_view = lambda: None
        hold.release()
        again = iter(range(2, 1000))
        wait_for(
            lambda: not step(worker, job._replace(job_id=next(again))).failed_blocks,
            "the thread to be back",
        )

    def test_a_copy_that_hangs_is_an_error_because_its_blocks_cannot_be_given_back(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker, hold = make(timeout_s=SOON_S), Hold()
        on_copy(worker, 0, hold)
        worker.core.start_loads([load_job(store, 1)])
        for name in LAYERS:
            worker.core.wait_layer_load(name)
        with pytest.raises(InternalError, match="did not end within"):
            worker.core.poll()
        hold.release()

    def test_a_forward_that_does_not_wait_for_a_layer_has_loaded_nothing(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        worker.core.start_loads([load_job(store, 1)])
        worker.core.wait_layer_load(LAYERS[0])
        assert worker.core.poll().invalid_block_ids == {11, 12}

    def test_a_request_that_is_gone_is_still_reported_once(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        worker.core.start_loads([load_job(store, 1)])
        worker.core.cancel_loads(["q"])
        for name in LAYERS:
            worker.core.wait_layer_load(name)
        assert worker.core.poll().ended_loads == {0: 1}
        assert worker.core.poll() == WorkerReport()

    def test_an_exception_in_the_store_costs_that_load_only(
        self, store: MemoryBlockStore, make: Make, saved: Worker
    ) -> None:
        worker = make()
        job = load_job(store, 1)
        store.on_view = timed_out
        assert step(worker, job).invalid_block_ids == {11, 12}
        store.on_view = lambda: None
        assert step(worker, job._replace(job_id=1)).invalid_block_ids == set()


class TestSaves:
    def test_a_layer_is_copied_before_the_next_is_written_and_published_at_the_end(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        worker = make()
        jobs = [save_job(2)]
        worker.core.layer_written(LAYERS[0], jobs)
        wait_for(lambda: store.reserved() == 2, "slots")
        half = len(next(iter(store.slots())).payload) // 2

        def first_layer_is_there() -> bool:
            return all(any(slot.payload[:half]) for slot in store.slots())

        wait_for(first_layer_is_there, "the first layer")
        assert not any(any(slot.payload[half:]) for slot in store.slots())
        worker.kv[LAYERS[1]].view(torch.int16).add_(1)  # the forward goes on
        worker.core.layer_written(LAYERS[1], jobs)
        assert store.sealed() == [], "the forward may still break off"
        worker.core.start_saves(jobs)
        worker.until(lambda report: 0 in report.ended_saves)
        assert store.sealed() == keys(2)
        other = make(seed=1)
        assert step(other, load_job(store, 2)).invalid_block_ids == set()
        assert torch.equal(bits(other.kv)[:, 11:15], bits(worker.kv)[:, 1:5])

    def test_blocks_that_were_complete_before_the_step_are_saved_whole(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        """In a step without a forward no layer is named."""
        save(make(), save_job(3))
        assert store.sealed() == keys(3)

    def test_many_blocks_are_committed_in_batches(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        worker = make()
        worker.core._batch_blocks = 2
        commits: list[None] = []
        store.on_commit = lambda: commits.append(None)
        save(worker, save_job(5))
        assert store.sealed() == keys(5)
        assert (store.reserve_calls, len(commits)) == (3, 3)

    @pytest.mark.parametrize(
        "named", [LAYERS[:1], [*LAYERS, LAYERS[0]]], ids=["broke off", "wrote a layer twice"]
    )
    def test_of_a_forward_that_broke_off_or_wrote_a_layer_twice_nothing_is_saved(
        self, store: MemoryBlockStore, make: Make, named: list[str]
    ) -> None:
        worker = make()
        jobs = [save_job(2)]
        for name in named:
            worker.core.layer_written(name, jobs)
        worker.core.start_saves(jobs)
        worker.until(lambda report: 0 in report.ended_saves)
        assert (store.sealed(), store.reserved()) == ([], 0)
        save(worker, save_job(2, job_id=1))
        assert store.sealed() == keys(2), "the next step is not affected"

    def test_a_forward_that_never_ended_is_given_up_when_the_next_one_begins(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        worker = make()
        worker.core.layer_written(LAYERS[0], [save_job(1)])
        wait_for(lambda: store.reserved() == 1, "a slot")
        jobs = [save_job(3, job_id=1)]
        for name in LAYERS:
            worker.core.layer_written(name, jobs)
        worker.core.start_saves(jobs)
        report = worker.until(lambda report: 1 in report.ended_saves)
        assert report.ended_saves == {0: 1, 1: 1}
        assert set(store.sealed()) == set(keys(3))
        assert store.reserved() == 0

    def test_a_save_past_its_deadline_publishes_nothing(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        clock = Clock()
        worker = make(clock=clock, timeout_s=5.0)
        jobs = [save_job(2)]
        hold = store.on_reserve = Hold()
        for name in LAYERS:
            worker.core.layer_written(name, jobs)
        hold.await_reached()
        clock.now += 60
        assert worker.core.poll().ended_saves == {}, "the forward may take that long"
        worker.core.start_saves(jobs)
        clock.now += 6
        assert worker.core.poll().ended_saves == {0: 1}
        clock.now -= 6
        hold.release()
        wait_for(lambda: store.reserve_calls == 1 and store.reserved() == 0, "slots given back")
        assert store.sealed() == []

    def test_a_forward_has_a_deadline_too(self, store: MemoryBlockStore, make: Make) -> None:
        clock = Clock()
        worker = make(clock=clock)
        worker.core.layer_written(LAYERS[0], [save_job(1)])
        wait_for(lambda: store.reserved() == 1, "a slot")
        clock.now += FORWARD_TIMEOUT_S
        wait_for(lambda: 0 in worker.core.poll().ended_saves, "the save to end")

    def test_an_error_while_copying_gives_the_slots_back(
        self, store: MemoryBlockStore, make: Make
    ) -> None:
        worker = make()

        def broken() -> None:
            raise RuntimeError("a bug in the copy")

        on_copy(worker, 1, broken)
        save(worker, save_job(3))
        assert (store.sealed(), store.reserved()) == ([], 0)

    def test_an_unreachable_node_drops_the_save(self, store: MemoryBlockStore, make: Make) -> None:
        worker = make()
        store.node_down = True
        save(worker, save_job(1))
        store.node_down = False
        save(worker, save_job(1, job_id=1))
        assert store.sealed() == keys(1)

    def test_a_replica_saves_nothing_and_says_so(self, store: MemoryBlockStore, make: Make) -> None:
        worker = make(saves=False)
        jobs = [save_job(2)]
        for name in LAYERS:
            worker.core.layer_written(name, jobs)
        save(worker, jobs[0])
        assert store.reserve_calls == 0

    def test_close_ends_a_step_that_is_under_way(self, store: MemoryBlockStore, make: Make) -> None:
        worker = make()
        worker.core.layer_written(LAYERS[0], [save_job(1)])
        wait_for(lambda: store.reserved() == 1, "a slot")
        started = time.monotonic()
        worker.core.close()
        assert time.monotonic() - started < PATIENCE_S / 2
        assert store.reserved() == 0
