"""Loads that take longer than computing end early, and come before whoever can wait."""

from __future__ import annotations

import math

import pytest
from connector_parts import (
    BLOCK,
    GEOMETRY,
    PATIENCE_S,
    PER_KEY,
    Clock,
    Hold,
    Worker,
    layout,
    load_job,
    loaded,
    save,
    save_job,
    taken,
    wait_for,
)

from connector.layout.shard_reads import GroupReads
from connector.limits import (
    LOAD_SOURCES_MAX,
    LOAD_TRY_BYTES,
    LOAD_WINDOW_S,
    READ_TIMEOUT_MIN_S,
    READS_MAX,
)
from connector.messages import BlockRead, WorkerReport
from connector.worker import worker as worker_module
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.load_pace import LoadPaces, takes_too_long
from kvstore.spi import Tier
from kvstore.testing.blockstore import MemoryBlockStore

pytest.importorskip("torch")
BLOCK_BYTES = GEOMETRY.token_bytes * BLOCK
MIB = 1 << 20
FAR = "other_host:1"
GROUPS = [GroupReads(group, 0, BLOCK) for group in layout().groups]


class SlowStore(MemoryBlockStore):
    """Takes time of a clock for each block of another host."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.block_s = 0.0
        self.viewed: list[bytes] = []
        self.timeouts_s: list[float | None] = []

    def views(self, found, staging, timeout_s=None):
        self.timeouts_s.append(timeout_s)
        return super().views(found, staging, timeout_s)

    def view(self, found):
        self.viewed.append(found.key)
        if self.elsewhere.get(found.key):
            self.clock.now += self.block_s
        return super().view(found)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slow(clock: Clock) -> SlowStore:
    return SlowStore(clock)


@pytest.fixture
def reader(slow: SlowStore, clock: Clock):
    """A worker whose store has 16 blocks, all of another host."""
    worker = Worker(slow, clock=clock, blocks=80)
    save(worker, save_job(16))
    slow.elsewhere.update(dict.fromkeys(slow.sealed(), Tier.OTHER_HOST))
    worker.core.take_stats()
    worker.core.poll()
    yield worker
    worker.core.close()


class TestPaces:
    def read(self, paces: LoadPaces, far: set[str], total: int = 100 * MIB) -> tuple[int, float]:
        return paces.next_read(far, total, 1.0, 64 * MIB)

    def told(self, paces: LoadPaces, slow: SlowStore, block_s: float) -> None:
        blocks = load_job(slow, 4).blocks
        paces.measured(slow, GROUPS, blocks, 4, 4 * block_s)

    def test_a_source_that_is_not_known_is_read_in_a_small_part_first(self) -> None:
        assert self.read(LoadPaces(), {FAR}) == (LOAD_TRY_BYTES, math.inf)
        assert self.read(LoadPaces(), {FAR}, 16 * MIB) == (MIB, math.inf)

    def test_memory_of_this_host_is_read_as_if_nothing_were_measured(self) -> None:
        assert self.read(LoadPaces(), set()) == (64 * MIB, math.inf)
        assert LoadPaces().next_read({FAR}, MIB, None, 64 * MIB) == (64 * MIB, math.inf)

    def test_a_read_is_as_large_as_its_time_allows(self, reader: Worker, slow: SlowStore) -> None:
        paces = LoadPaces()
        self.told(paces, slow, BLOCK_BYTES / 1e9)
        size_bytes, patience_s = self.read(paces, {FAR})
        assert size_bytes == pytest.approx(LOAD_WINDOW_S * 1e9, rel=0.01)
        assert patience_s == READ_TIMEOUT_MIN_S
        self.told(paces, slow, BLOCK_BYTES / 1e12)
        assert self.read(paces, {FAR})[0] == 64 * MIB
        self.told(paces, slow, 1.0)
        assert self.read(paces, {FAR})[0] == LOAD_TRY_BYTES
        assert paces.next_read({FAR}, 1, 0.0, MIB)[1] >= READ_TIMEOUT_MIN_S

    def test_what_waits_to_be_reported_and_what_is_remembered_are_bounded(
        self, reader: Worker, slow: SlowStore
    ) -> None:
        paces = LoadPaces()
        job = load_job(slow, 1)
        for number in range(READS_MAX + 5):
            slow.elsewhere[job.blocks[0].found[0].key] = f"tier{number}"  # type: ignore[assignment]
            paces.measured(slow, GROUPS, job.blocks, 1, 0.1)
        assert len(paces.take()) == READS_MAX
        assert paces.take() == []
        assert 0 < len(paces._byte_s) <= LOAD_SOURCES_MAX

    def test_two_hosts_share_the_time_and_memory_beside_them_takes_none(
        self, reader: Worker, slow: SlowStore
    ) -> None:
        job, paces = load_job(slow, 4), LoadPaces()
        keys = [block.found[0].key for block in job.blocks]
        slow.elsewhere[keys[0]] = Tier.HOST
        slow.elsewhere[keys[3]] = "disk"  # type: ignore[assignment]
        paces.measured(slow, GROUPS, job.blocks, 3, 3.0)
        assert sorted(paces.take()) == [
            BlockRead("disk:1", 0, pytest.approx(1.0)),
            BlockRead(FAR, 2 * BLOCK_BYTES, pytest.approx(2.0)),
        ]


@pytest.mark.parametrize(
    ("left", "took_s", "compute_s", "by_request", "expected"),
    [
        (0.5, 1.0, 1.0, False, True),
        (0.5, 1.0, 1.0, True, False),
        (0.5, 0.4, 1.0, False, False),
        (0.5, 9.0, None, False, False),
        (1.0, 9.0, 1.0, False, False),
        (0.0, 9.0, 1.0, False, False),
        (0.5, 0.01, 0.001, False, False),
    ],
)
def test_a_load_takes_too_long_when_the_rest_of_it_takes_longer_than_computing_that(
    left: float, took_s: float, compute_s: float | None, by_request: bool, expected: bool
) -> None:
    assert takes_too_long(left, took_s, compute_s, by_request=by_request) is expected


def test_a_load_that_turns_out_slow_keeps_what_has_come(reader: Worker, slow: SlowStore) -> None:
    slow.block_s = 0.5
    job = load_job(slow, 16)._replace(compute_s=1.0)
    reader.core.start_loads([job])
    report = loaded(reader)
    assert report.failed_blocks == {0: 1}
    assert report.invalid_block_ids == {i for b in job.blocks[1:] for i in b.block_ids}
    assert report.reads == [BlockRead(FAR, BLOCK_BYTES, 0.5)]
    assert len(set(slow.viewed)) == 1
    counts = taken(reader.core.take_stats)
    assert (counts["failed_loads:slower"], counts["cut_loads:other_host"]) == (1, 1)


def test_a_load_is_over_when_the_scheduler_side_says_so(
    reader: Worker, slow: SlowStore, clock: Clock
) -> None:
    hold = slow.on_view = Hold()
    reader.core.start_loads([load_job(slow, 4)._replace(timeout_s=0.25)])
    hold.await_reached()
    clock.now += 0.2
    assert not reader.core.poll().finished_loads
    clock.now += 0.1
    assert reader.core.poll().finished_loads == {"q"}
    hold.release()
    counts = taken(reader.core.take_stats)
    assert (counts["failed_loads:deadline"], counts["cut_loads:other_host"]) == (1, 1)


def test_a_read_has_a_share_of_the_time_that_computing_takes(
    reader: Worker, slow: SlowStore
) -> None:
    slow.block_s = 0.001
    reader.core.start_loads([load_job(slow, 4)._replace(compute_s=100.0)])
    assert not loaded(reader).invalid_block_ids
    job = load_job(slow, 16, name="late", job_id=1)
    reader.core.start_loads([job._replace(compute_s=8.0)])
    assert not loaded(reader, "late").invalid_block_ids
    assert slow.timeouts_s[0] == PATIENCE_S, "of a source that is not known yet"
    assert slow.timeouts_s[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["far", "near"])
def test_loads_from_memory_go_between_two_reads_of_a_load_from_elsewhere(
    reader: Worker, slow: SlowStore, kind: str
) -> None:
    first = load_job(slow, 16)._replace(compute_s=100.0)
    second = load_job(slow, 2, first_block_id=61, name="second", job_id=1)
    hold = slow.on_view = Hold()
    reader.core.start_loads([first])
    hold.await_reached()
    if kind == "near":
        for block in second.blocks:
            del slow.elsewhere[block.found[0].key]
    reader.core.start_loads([second])
    hold.release()
    reader.until(lambda report: {"q", "second"} <= report.finished_loads)
    end = slow.viewed.index(first.blocks[-1].found[0].key)
    assert (_last(slow.viewed, second.blocks[-1].found[0].key) < end) is (kind == "near")


def _last(keys: list[bytes], key: bytes) -> int:
    return len(keys) - 1 - keys[::-1].index(key)


def test_saves_wait_for_loads_under_way_a_moment(
    store: MemoryBlockStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SAVE_YIELD_S", 60.0)
    save(worker, save_job(2))
    hold = store.on_view = Hold()
    worker.core.start_loads([load_job(store, 2)])
    hold.await_reached()
    reserves = store.reserve_calls
    worker.core.start_saves([save_job(3, first_block_id=21, job_id=7)])
    wait_for(lambda: not worker.core._saving._items.qsize(), "the save to be taken up")
    assert store.reserve_calls == reserves
    hold.release()
    report = worker.until(lambda report: 7 in report.ended_saves)
    assert "q" in report.finished_loads
    assert len(report.stored_blocks[7]) == 3


def test_saves_go_on_beside_a_load_that_does_not_end(
    store: MemoryBlockStore, worker: Worker
) -> None:
    save(worker, save_job(2))
    hold = store.on_view = Hold()
    worker.core.start_loads([load_job(store, 2)])
    hold.await_reached()
    worker.core.start_saves([save_job(3, first_block_id=21, job_id=7)])
    worker.until(lambda report: 7 in report.ended_saves)
    hold.release()


def test_what_a_step_loads_layer_by_layer_is_measured(
    slow: SlowStore, clock: Clock, reader: Worker
) -> None:
    other = Worker(slow, clock=clock, kind=LayerwiseWorker)
    slow.block_s = 0.1
    other.core.start_loads([load_job(slow, 4)])
    for name in other.kv:
        other.core.wait_layer_load(name)
    report = WorkerReport()
    wait_for(lambda: bool(report.merge(other.core.poll()).reads), "the read")
    assert report.reads == [BlockRead(FAR, 4 * BLOCK_BYTES, pytest.approx(0.4))]
    other.core.close()


def test_a_step_waits_for_its_loads_as_long_as_the_scheduler_side_says(slow: SlowStore) -> None:
    save(one := Worker(slow), save_job(2))
    other = Worker(slow, kind=LayerwiseWorker)
    hold = slow.on_view = Hold()
    other.core.start_loads([load_job(slow, 2)._replace(timeout_s=0.05)])
    for name in other.kv:
        other.core.wait_layer_load(name)
    assert other.core.poll().failed_blocks == {0: 0}
    hold.release()
    for worker in (one, other):
        worker.core.close()


def test_reads_of_all_workers_reach_the_scheduler_side() -> None:
    one, other = BlockRead(FAR, 1, 1.0), BlockRead("host", PER_KEY, 2.0)
    told = WorkerReport(reads=[one]).merge(WorkerReport(reads=[other])).for_scheduler()
    assert told is not None
    assert told.reads == [one, other]
