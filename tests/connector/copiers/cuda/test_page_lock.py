"""Page-locking the store's memory: once, in parts, in the background, and let go in time."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_parts import wait_for

from connector.copiers.cuda import page_lock
from connector.copiers.cuda.kernel_plan import HostPlace
from connector.copiers.cuda.page_lock import LockedPool, address_of
from kvstore.spi import PoolMapping

PART = 64 << 10
SIZE = 3 * PART


class Registrar:
    """Knows what is locked, and that nothing may be locked twice or let go unlocked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.log: list[tuple[int, int, bool]] = []
        self.refuse: Callable[[int, bool], str] = lambda address, writable: ""

    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        self.log.append((address, size_bytes, writable))
        failure = self.refuse(address, writable)
        if not failure:
            assert address not in self.locked
            self.locked[address] = size_bytes
        return failure

    def unlock(self, address: int) -> None:
        del self.locked[address]


class Segment:
    """A file of shared memory, mapped as often as it is asked for."""

    def __init__(self, path: Path, node_id: int = 1, epoch: int = 1) -> None:
        path.write_bytes(bytes(SIZE))
        self._path, self._who = path, (node_id, epoch)

    def map(self, *, writable: bool) -> PoolMapping:
        with self._path.open("r+b") as file:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped = mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED, access)
        return PoolMapping(memoryview(mapped), PART, writable, *self._who)


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.registrar = Registrar()
        self.there: list[PoolMapping] = []
        self.counted: list[tuple[int, str]] = []
        self.segment = Segment(tmp_path / "one")
        self.pool = LockedPool(self.registrar, self.mappings, self.count)

    def mappings(self) -> list[PoolMapping]:
        return [m._replace(memory=m.memory[:]) for m in self.there]

    def count(self, size_bytes: int, failure: str) -> None:
        self.counted.append((size_bytes, failure))


def use(pool: LockedPool, memory: memoryview) -> None:
    """As a copy from or to it does."""
    with pool.holding([memory]):
        pass


def lock(world: World) -> None:
    """Show what is there, use all of it, and lock it."""
    world.pool.look()
    for mapping in world.there:
        use(world.pool, mapping.memory)
    while world.pool.lock_next() is not None:
        pass


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.pool.close()


def test_memory_is_locked_once_and_part_by_part(world: World) -> None:
    world.there = [world.segment.map(writable=True)]
    start = address_of(world.there[0].memory)
    for _ in range(3):
        lock(world)
    assert world.registrar.log == [(start + i * PART, PART, True) for i in range(3)]
    assert world.counted == [(PART, "")] * 3


def test_a_read_only_mapping_of_locked_memory_is_reached_through_the_locked_one(
    world: World,
) -> None:
    written, read = world.segment.map(writable=True), world.segment.map(writable=False)
    world.there = [read, written]
    lock(world)
    assert {writable for _, _, writable in world.registrar.log} == {True}
    with world.pool.held() as memory:
        assert memory.address(read.memory[100:]) == address_of(written.memory) + 100
        assert memory.address(read.memory[SIZE - 1 :]) == address_of(written.memory) + SIZE - 1
        assert memory.address(written.memory[7:]) == address_of(written.memory) + 7
        elsewhere = bytearray(10)
        assert memory.address(memoryview(elsewhere)) == address_of(memoryview(elsewhere))


def test_trap_memory_of_another_start_of_the_node_is_no_alias(world: World, tmp_path: Path) -> None:
    read = Segment(tmp_path / "two", epoch=2).map(writable=False)
    world.there = [world.segment.map(writable=True), read]
    lock(world)
    with world.pool.held() as memory:
        assert memory.address(read.memory) == address_of(read.memory)


def test_only_read_memory_is_locked_as_such(world: World) -> None:
    world.there = [world.segment.map(writable=False)]
    lock(world)
    assert {writable for _, _, writable in world.registrar.log} == {False}


def test_a_part_is_locked_when_it_is_first_used(world: World) -> None:
    """A lock holds up everybody who talks to the driver: nothing is locked for nothing."""
    world.there = [world.segment.map(writable=True)]
    memory = world.there[0].memory
    world.pool.look()
    assert world.pool.lock_next() is None
    use(world.pool, memory[PART + 5 : PART + 9])
    use(world.pool, memory[PART + 50 : PART + 60])
    assert world.pool.lock_next() is not None
    assert world.pool.lock_next() is None
    assert list(world.registrar.locked) == [address_of(memory) + PART]
    use(world.pool, memory[PART - 1 : 2 * PART + 1])
    while world.pool.lock_next() is not None:
        pass
    assert len(world.registrar.locked) == 3
    assert len(world.registrar.log) == 3


def test_what_fails_is_tried_again_later_each_time_and_holds_up_nothing_else(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    world.pool = LockedPool(world.registrar, world.mappings, world.count, clock=lambda: now[0])
    world.there = [world.segment.map(writable=True)]
    start = address_of(world.there[0].memory)
    world.registrar.refuse = lambda address, _: "out_of_memory" if address == start else ""
    lock(world)
    assert world.counted == [(PART, "out_of_memory")]
    world.there.append(Segment(tmp_path / "two", 2).map(writable=True))
    lock(world)
    assert len(world.registrar.locked) == 3, "memory of another node"
    now[0] += page_lock.PAGE_LOCK_RETRY_S
    lock(world)
    assert len(world.registrar.locked) == 5, "the other parts, and that one last"
    tried = [address for address, _, _ in world.registrar.log].count(start)
    assert tried == 2
    now[0] += page_lock.PAGE_LOCK_RETRY_S
    lock(world)
    assert [address for address, _, _ in world.registrar.log].count(start) == tried, "too early"
    world.registrar.refuse = lambda *_: ""
    now[0] += page_lock.PAGE_LOCK_RETRY_S
    lock(world)
    assert len(world.registrar.locked) == 6
    assert world.counted.count((PART, "out_of_memory")) == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "out_of_memory" in caplog.text
    assert "ulimit" not in caplog.text, "the driver does not read it"


def test_no_more_is_locked_than_the_limit_says(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.pool = LockedPool(
        world.registrar, world.mappings, world.count, bytes_max=2 * PART + PART // 2
    )
    world.there = [world.segment.map(writable=True)]
    lock(world)
    lock(world)
    assert world.counted == [(PART, ""), (PART, ""), (PART, "limit")]
    assert len(world.registrar.locked) == 2
    assert "page_lock_bytes_max" in caplog.text
    world.there = []
    world.pool.look()
    world.there = [world.segment.map(writable=True)]
    lock(world)
    assert len(world.registrar.locked) == 2, "what was let go counts no more"


def test_it_rests_after_a_part_for_as_long_as_that_took(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call keeps the driver from all its users; they get at least every other moment."""
    rests: list[float] = []
    now = [1000.0]
    world.pool = LockedPool(world.registrar, world.mappings, world.count, clock=lambda: now[0])
    waited = world.pool._changed.wait_for

    def rest(closing: Callable[[], bool], timeout_s: float) -> bool:
        rests.append(timeout_s)
        return waited(closing, 0)

    monkeypatch.setattr(world.pool._changed, "wait_for", rest)

    def slow(address: int, writable: bool) -> str:
        now[0] += 0.25
        return ""

    world.registrar.refuse = slow
    world.there = [world.segment.map(writable=True)]
    world.pool.look()
    use(world.pool, world.there[0].memory)
    world.pool.start()
    wait_for(lambda: len(rests) == 3, "a rest after each part")
    assert rests == [0.25] * 3


def test_trap_memory_stays_mapped_until_it_is_unlocked(world: World) -> None:
    """Else something new is mapped there while the device still knows what was there before."""
    mapping = world.segment.map(writable=True)
    mapped = mapping.memory.obj
    world.there = [mapping]
    lock(world)
    world.there = []
    mapping.memory.release()
    with pytest.raises(BufferError):
        mapped.close()  # the store forgets a node that is gone; we have not yet
    world.pool.look()
    assert not world.registrar.locked
    mapped.close()


def test_trap_nothing_is_unlocked_under_a_copy(world: World) -> None:
    written, read = world.segment.map(writable=True), world.segment.map(writable=False)
    world.there = [written]
    lock(world)
    with world.pool.held() as early:
        world.there = [written, read]
        world.pool.look()  # another table from here on
        with world.pool.held() as later:
            world.there = []
            world.pool.look()
            assert len(world.registrar.locked) == 3
            assert later.address(read.memory) == address_of(written.memory)
        world.pool.look()
        assert len(world.registrar.locked) == 3, "the first one still copies"
        assert early.address(written.memory) == address_of(written.memory)
    with world.pool.held():  # one that began later holds nothing up
        world.pool.look()
        assert not world.registrar.locked


def test_it_looks_in_the_background_and_closing_unlocks_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.copiers.cuda.page_lock.POOL_LOOK_EVERY_S", 0.01)
    world.pool.start()
    world.there = [world.segment.map(writable=True)]

    def all_locked() -> bool:
        use(world.pool, world.there[0].memory)
        return len(world.registrar.locked) == 3

    wait_for(all_locked, "all to be locked")
    world.pool.close()
    assert not world.registrar.locked
    world.pool.close()


def test_a_copy_waits_for_no_registration_and_closing_ends_it(world: World) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(address: int, writable: bool) -> str:
        reached.set()
        assert go_on.wait(30)
        return ""

    world.registrar.refuse = slow
    world.there = [world.segment.map(writable=True)]
    world.pool.look()
    use(world.pool, world.there[0].memory)
    world.pool.start()
    assert reached.wait(30)
    with world.pool.held() as memory:
        assert memory.address(world.there[0].memory) == address_of(world.there[0].memory)
    go_on.set()
    world.pool.close()
    assert not world.registrar.locked


def test_a_copy_over_the_border_of_two_parts_is_made_in_two(world: World) -> None:
    written = world.segment.map(writable=True)
    world.there = [written]
    world.pool.look()
    start = address_of(written.memory)
    with world.pool.held() as memory:
        over = HostPlace(start + PART - 100, 300, 1, 300)
        assert [(at, p.address, p.row_bytes) for at, p in memory.apart(over)] == [
            (0, start + PART - 100, 100),
            (100, start + PART, 200),
        ]
        within = HostPlace(start + PART, PART, 1, PART)
        assert list(memory.apart(within)) == [(0, within)]
        elsewhere = HostPlace(start + SIZE, 2 * PART, 1, 2 * PART)
        assert list(memory.apart(elsewhere)) == [(0, elsewhere)]


def test_nothing_is_locked_under_a_copy_that_does_not_know_of_the_parts(world: World) -> None:
    """It may go over a border that was none when it looked."""
    world.there = [world.segment.map(writable=True)]
    with world.pool.held():
        lock(world)
        assert world.registrar.log == []
    lock(world)
    assert len(world.registrar.log) == SIZE // PART
