"""Page-locking the store's memory: once, in parts, in the background, and let go in time."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_parts import wait_for

from connector.copiers.cuda.kernel_plan import HostPlace
from connector.copiers.cuda.page_lock import LockedPool, address_of
from kvstore import PoolMapping

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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.pool.close()


def test_memory_is_locked_once_and_part_by_part(world: World) -> None:
    world.there = [world.segment.map(writable=True)]
    start = address_of(world.there[0].memory)
    for _ in range(3):
        world.pool.look()
    assert world.registrar.log == [(start + i * PART, PART, True) for i in range(3)]
    assert world.counted == [(PART, "")] * 3


def test_a_read_only_mapping_of_locked_memory_is_reached_through_the_locked_one(
    world: World,
) -> None:
    written, read = world.segment.map(writable=True), world.segment.map(writable=False)
    world.there = [read, written]
    world.pool.look()
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
    world.pool.look()
    with world.pool.held() as memory:
        assert memory.address(read.memory) == address_of(read.memory)


def test_only_read_memory_is_locked_as_such(world: World) -> None:
    world.there = [world.segment.map(writable=False)]
    world.pool.look()
    assert {writable for _, _, writable in world.registrar.log} == {False}


def test_what_cannot_be_locked_is_counted_said_once_and_not_tried_again(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.there = [world.segment.map(writable=True)]
    second = address_of(world.there[0].memory) + PART
    world.registrar.refuse = lambda address, _: "out_of_memory" if address == second else ""
    world.pool.look()
    assert world.counted == [(PART, ""), (2 * PART, "out_of_memory")]
    world.registrar.refuse = lambda address, _: "out_of_memory"
    world.there.append(Segment(tmp_path / "two", 2).map(writable=True))
    world.pool.look()
    world.pool.look()
    assert world.counted[2:] == [(SIZE, "out_of_memory")]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "out_of_memory" in caplog.text


def test_trap_memory_stays_mapped_until_it_is_unlocked(world: World) -> None:
    """Else something new is mapped there while the device still knows what was there before."""
    mapping = world.segment.map(writable=True)
    mapped = mapping.memory.obj
    world.there = [mapping]
    world.pool.look()
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
    world.pool.look()
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
    wait_for(lambda: len(world.registrar.locked) == 3, "all to be locked")
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
        world.pool.look()
        assert world.registrar.log == []
    world.pool.look()
    assert len(world.registrar.log) == SIZE // PART
