"""What disks do wrong costs misses: no byte that was not compared reaches a caller, and no call
that hangs keeps one."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import PlainDisk, pages_of
from stores import announcement

from kvstore.core.disk.base import DISK_PAGE
from kvstore.limits import DISK_PIECE_BYTES, DISK_THREADS
from kvstore.nodedir import Announcement
from kvstore.record import disk_location
from kvstore.segment.copying import copy
from kvstore.segment.disk.attached import DiskFile
from kvstore.segment.disk.table import DiskTable
from kvstore.transport import disk as disk_module
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.disk import SUSPECT_REASONS, UNREADABLE_REASON, DiskTransport
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.types import DiskBlock

WORD = announcement(node_id=7, epoch=3, disks={"0": ""})
PATIENCE_S = 20.0
SOON_S = 0.2
REGION_PAGES = 256


class Stubborn:
    """Implements `File` over a plain one: hangs, or fails, where it was told to."""

    def __init__(self, disk: PlainDisk) -> None:
        self._file = DiskFile(str(disk.path), disk.uuid.hex(), disk.path.stat().st_uid)
        self.path = str(disk.path)
        self.failing: Callable[[int], OSError | None] = lambda page: None
        self.go_on = threading.Event()
        self.go_on.set()
        self.before: Callable[[], None] = lambda: None
        self.calls = 0
        self.hanging = 0

    def region_of(self, page: int) -> int:
        return page // REGION_PAGES

    def read(self, offset: int, into: memoryview) -> None:
        self.calls += 1
        self.before()
        if not self.go_on.is_set():
            self.hanging += 1
            assert self.go_on.wait(PATIENCE_S)
            self.hanging -= 1
        if (error := self.failing(offset // DISK_PAGE)) is not None:
            raise error
        self._file.read(offset, into)


class Reads:
    """Two disks of a node, and a transport with so much memory."""

    def __init__(self, folder: Path, staging_bytes: int = 8 * DISK_PIECE_BYTES) -> None:
        self.table = DiskTable(folder / "t.table", 7, 3, 1000)
        self.disks = [PlainDisk(folder / f"{n}.disk", n, self.table, 64 << 20) for n in (0, 1)]
        self.stubborn = [Stubborn(disk) for disk in self.disks]
        self.files: dict[int, Stubborn | DiskFile] = dict(enumerate(self.stubborn))
        self.find = self.table.find
        self.copied = copy
        self.transport = DiskTransport(self.attach, lambda *both: self.copied(*both), staging_bytes)

    def attach(self, word: Announcement) -> Reads:
        return self

    def read(
        self, *blocks: DiskBlock, timeout_s: float = PATIENCE_S
    ) -> tuple[list[Outcome], list[bytes]]:
        rooms = [memoryview(bytearray(b"\xee" * block.length)) for block in blocks]
        wanted = [
            Wanted(block.key, disk_location(7, 3, block), (room,))
            for block, room in zip(blocks, rooms, strict=True)
        ]
        outcomes = self.transport.read(WORD, wanted, time.monotonic() + timeout_s)
        self.rooms = rooms
        return [*outcomes], [bytes(room) for room in rooms]

    def becomes_a_hit(self, block: DiskBlock) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while self.read(block)[0][0].read is not Read.HIT:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def close(self) -> None:
        for one in self.stubborn:
            one.go_on.set()
        self.transport.close()
        self.table.close()


@pytest.fixture
def reads(tmp_path: Path) -> Iterator[Reads]:
    made = Reads(tmp_path)
    yield made
    made.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are tried again soon, and hang soon."""
    monkeypatch.setattr(disk_module, "HUNG_S", SOON_S / 2)
    monkeypatch.setattr(disk_module, "RETRY_AFTER_S", 0.3)


def what(outcomes: list[Outcome]) -> list[Read]:
    return [outcome.read for outcome in outcomes]


def untouched(block: DiskBlock) -> bytes:
    return b"\xee" * block.length


# --- hanging -------------------------------------------------------------------


def test_a_read_that_hangs_ends_by_its_deadline_and_never_writes_to_its_caller(
    reads: Reads,
) -> None:
    """Also when the call returns at last, and the region was used for other blocks meanwhile."""
    disk, file = reads.disks[0], reads.stubborn[0]
    blocks = [disk.save(os.urandom(size)) for size in (5000, DISK_PIECE_BYTES + 1)]
    file.go_on.clear()
    began = time.monotonic()
    outcomes, got = reads.read(*blocks, timeout_s=SOON_S)
    assert time.monotonic() - began < SOON_S + 1
    assert what(outcomes) == [Read.FAILED] * 2
    rooms = reads.rooms
    for block in blocks:
        disk.drop(block.key)
        disk.save(os.urandom(block.length))
    file.go_on.set()
    reads.becomes_a_hit(disk.save(b"1" * 5000))
    assert [bytes(room) for room in rooms] == got == [untouched(block) for block in blocks]


def test_while_calls_that_hang_have_all_memory_reads_fail_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "FAILURES_MAX", 1000)
    reads = Reads(tmp_path, 2 * DISK_PIECE_BYTES)
    large, small = (reads.disks[0].save(os.urandom(DISK_PIECE_BYTES + i)) for i in (5, 0))
    other = reads.disks[1].save(os.urandom(100))
    reads.stubborn[0].go_on.clear()
    assert what(reads.read(large, timeout_s=0.05)[0]) == [Read.FAILED]
    for block in (small, other):
        began = time.monotonic()
        outcomes, _ = reads.read(block)
        assert time.monotonic() - began < 5
        assert what(outcomes) == [Read.FAILED]
        assert "hang" in outcomes[0].reason
    reads.stubborn[0].go_on.set()
    reads.becomes_a_hit(other)
    assert what(reads.read(large, small)[0]) == [Read.HIT] * 2
    reads.close()


@pytest.mark.usefixtures("hurried")
def test_a_disk_that_hangs_is_left_alone_for_a_while_and_the_others_are_read(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    block, other = (disk.save(os.urandom(9000)) for disk in reads.disks)
    file = reads.stubborn[0]
    file.go_on.clear()
    assert what(reads.read(block, timeout_s=SOON_S)[0]) == [Read.FAILED]
    calls = file.calls
    began = time.monotonic()
    outcomes, _ = reads.read(block, other)
    assert time.monotonic() - began < 5
    assert what(outcomes) == [Read.FAILED, Read.HIT]
    assert file.path in outcomes[0].reason
    assert file.calls == calls, "it was not asked"
    file.go_on.set()
    reads.becomes_a_hit(block)
    assert caplog.text.count("cannot be read for now") == 1
    assert caplog.text.count("can be read again") == 1


def test_nothing_is_read_for_a_caller_who_has_gone(reads: Reads) -> None:
    disk, file = reads.disks[0], reads.stubborn[0]
    raws = [os.urandom(100) for _ in range(DISK_THREADS + 20)]
    reads.transport = DiskTransport(reads.attach, copy)
    blocks = [disk.save(raw) for raw in raws]
    file.go_on.clear()
    assert what(reads.read(*blocks, timeout_s=SOON_S)[0]) == [Read.FAILED] * len(blocks)
    assert 0 < file.hanging <= DISK_THREADS
    file.go_on.set()
    reads.becomes_a_hit(blocks[0])
    assert file.calls <= DISK_THREADS + 1, "what had not begun was left"


def test_what_is_there_after_the_deadline_is_too_late_and_no_fault_of_the_disk(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [reads.disks[0].save(os.urandom(9000)) for _ in range(3)]
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr(disk_module, "time", clock)

    def slow(target: memoryview, source: memoryview) -> None:
        nonlocal late_s
        copy(target, source)
        time.sleep(SOON_S)  # the others are there meanwhile
        late_s = 2 * PATIENCE_S

    for _ in range(disk_module.FAILURES_MAX + 1):
        late_s, reads.copied = 0.0, slow
        outcomes, got = reads.read(*blocks)
        assert sorted(what(outcomes)) == [Read.FAILED, Read.FAILED, Read.HIT]
        for outcome, mine, block in zip(outcomes, got, blocks, strict=True):
            assert (mine == untouched(block)) is (outcome.read is Read.FAILED)
    late_s, reads.copied = 0.0, copy
    assert what(reads.read(*blocks)[0]) == [Read.HIT] * 3


def test_a_read_that_waits_ends_when_the_transport_is_closed(reads: Reads) -> None:
    block = reads.disks[0].save(os.urandom(9000))
    reads.stubborn[0].go_on.clear()
    ended: list[Read] = []
    reader = threading.Thread(target=lambda: ended.extend(what(reads.read(block)[0])), daemon=True)
    reader.start()
    while not reads.stubborn[0].hanging:
        time.sleep(0.001)
    reads.transport.close()
    reader.join(PATIENCE_S)
    assert ended == [Read.FAILED]


def test_only_calls_that_hang_keep_memory_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that leaves a little later than its block does not."""
    kept: list[int] = []
    plainly = disk_module.DiskStaging.quarantine
    monkeypatch.setattr(
        disk_module.DiskStaging, "quarantine", lambda self, n: kept.append(n) or plainly(self, n)
    )
    reads = Reads(tmp_path)
    blocks = [reads.disks[i % 2].save(os.urandom(3 * DISK_PIECE_BYTES)) for i in range(4)]
    for _ in range(10):
        assert what(reads.read(*blocks)[0]) == [Read.HIT] * 4
    assert kept == []
    reads.stubborn[0].go_on.clear()
    assert what(reads.read(blocks[0], timeout_s=SOON_S)[0]) == [Read.FAILED]
    assert kept == [3]
    reads.close()


def test_an_interrupted_read_gives_its_memory_back(tmp_path: Path) -> None:
    reads = Reads(tmp_path, 3 * DISK_PIECE_BYTES)
    blocks = [reads.disks[0].save(os.urandom(DISK_PIECE_BYTES)) for _ in range(3)]

    def interrupted(*both: memoryview) -> None:
        raise KeyboardInterrupt

    for _ in range(4):
        reads.copied = interrupted
        with pytest.raises(KeyboardInterrupt):
            reads.read(*blocks)
        reads.copied = copy
        assert what(reads.read(*blocks)[0]) == [Read.HIT] * 3
    reads.close()


# --- errors ----------------------------------------------------------------------


def test_a_part_that_cannot_be_read_is_left_alone_until_it_is_written_anew(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    disk, file = reads.disks[0], reads.stubborn[0]
    bad, beside = disk.save(os.urandom(9000)), disk.save(os.urandom(100))
    far = [disk.save(os.urandom(DISK_PAGE * REGION_PAGES)) for _ in range(3)][-1]
    where = bad.place.page
    file.failing = lambda page: OSError(errno.EIO, "bad") if page == where else None
    (outcome,), got = reads.read(bad)
    assert (outcome.read, outcome.reason) == (Read.FAILED, UNREADABLE_REASON)
    assert outcome.reason in SUSPECT_REASONS
    assert got == [untouched(bad)]
    calls = file.calls
    assert what(reads.read(bad, far)[0]) == [Read.FAILED, Read.HIT]
    assert file.calls == calls + 1, "where it failed nothing was read again"
    disk.drop(bad.key)
    file.failing = lambda page: None
    anew = disk.save(os.urandom(9000))
    assert anew.place.page == where
    assert what(reads.read(anew, beside)[0])[0] is Read.HIT
    assert caplog.text.count("a part of disk") == 1
    assert "cannot be read for now" not in caplog.text


@pytest.mark.usefixtures("hurried")
def test_a_disk_that_fails_everywhere_is_left_alone_and_told_of_once(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    disk, file = reads.disks[0], reads.stubborn[0]
    blocks = [disk.save(os.urandom(DISK_PAGE * REGION_PAGES)) for _ in range(8)]
    other = reads.disks[1].save(os.urandom(100))
    file.failing = lambda page: OSError(errno.EIO, "Input/output error")
    for block in blocks[:5]:
        assert what(reads.read(block, other)[0]) == [Read.FAILED, Read.HIT]
    assert file.calls == disk_module.FAILURES_MAX
    messages = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 2, "of the first part, and of the disk"
    file.failing = lambda page: None
    reads.becomes_a_hit(blocks[-1])


def test_flipped_bits_are_misses_wherever_they_are(reads: Reads) -> None:
    raw = os.urandom(2 * DISK_PIECE_BYTES + 3 * DISK_PAGE + 5)
    disk = reads.disks[0]
    block = disk.save(raw)
    ends = [0, 1, DISK_PIECE_BYTES - 1, DISK_PIECE_BYTES, len(raw) - 6, len(raw) - 1]
    for at in (*ends, *range(77, len(raw), len(raw) // 10)):
        page, within = divmod(at, DISK_PAGE)
        whole = raw[page * DISK_PAGE : (page + 1) * DISK_PAGE]
        damaged = bytearray(whole)
        damaged[within] ^= 1 << at % 8
        disk.write(block.place.page + page, bytes(damaged))
        (outcome,), got = reads.read(block)
        assert (outcome.read, outcome.reason) == (Read.MISS, CHECKSUM_REASON), at
        assert got == [untouched(block)], "nothing that is wrong arrives"
        disk.write(block.place.page + page, whole)
    (outcome,), got = reads.read(block)
    assert (outcome.read, got) == (Read.HIT, [raw])


def test_a_payload_that_ends_within_a_page_brings_nothing_of_its_neighbour(reads: Reads) -> None:
    sizes = [1, DISK_PAGE - 1, DISK_PAGE, DISK_PAGE + 1, DISK_PIECE_BYTES + 1, 3 * DISK_PAGE + 7]
    payloads = [os.urandom(size) for size in sizes]
    blocks = [reads.disks[0].save(payload) for payload in payloads]
    for block, payload in zip(blocks, payloads, strict=True):
        around = bytearray(b"\xaa" * (block.length + 64))
        room = memoryview(around)[32:-32]
        wanted = Wanted(block.key, disk_location(7, 3, block), (room,))
        (outcome,) = reads.transport.read(WORD, [wanted], time.monotonic() + PATIENCE_S)
        assert outcome.read is Read.HIT
        assert around == b"\xaa" * 32 + payload + b"\xaa" * 32


# --- the table changes meanwhile -----------------------------------------------------


@pytest.mark.parametrize("change", ["dropped", "region reused", "another value"])
def test_what_changes_while_it_is_read_is_a_miss_and_not_damaged(reads: Reads, change: str) -> None:
    disk, file = reads.disks[0], reads.stubborn[0]
    block = disk.save(os.urandom(9000))

    def meanwhile() -> None:
        file.before = lambda: None
        disk.drop(block.key)
        if change != "dropped":
            disk.save(os.urandom(9000), block.key if change == "another value" else None)

    file.before = meanwhile
    (outcome,), got = reads.read(block)
    assert outcome.read is Read.MISS
    assert outcome.reason not in SUSPECT_REASONS
    assert got == [untouched(block)]


def test_a_block_that_was_moved_while_it_was_read_is_right_all_the_same(reads: Reads) -> None:
    disk, file, raw = reads.disks[0], reads.stubborn[0], os.urandom(9000)
    block = disk.save(raw)
    file.before = lambda: reads.disks[1].save(raw, block.key) and None
    assert what(reads.read(block)[0]) == [Read.HIT]


# --- much at a time ---------------------------------------------------------------------


def test_a_block_larger_than_all_memory_for_reads_is_read(tmp_path: Path) -> None:
    reads = Reads(tmp_path, 2 * DISK_PIECE_BYTES)
    raw = os.urandom(5 * DISK_PIECE_BYTES + 17)
    blocks = [reads.disks[0].save(raw), reads.disks[1].save(raw[:100])]
    for _ in range(3):
        outcomes, got = reads.read(*blocks)
        assert what(outcomes) == [Read.HIT] * 2
        assert got == [raw, raw[:100]]
    reads.close()


def test_many_threads_share_little_memory(tmp_path: Path) -> None:
    reads = Reads(tmp_path, 4 * DISK_PIECE_BYTES)
    sizes = [100, DISK_PIECE_BYTES, 2 * DISK_PIECE_BYTES + 1, 6 * DISK_PIECE_BYTES]
    blocks = [reads.disks[i % 2].save(os.urandom(size)) for i, size in enumerate(sizes)]
    missed: list[Outcome] = []

    def read(first: int) -> None:
        for i in range(6):
            turned = blocks[(first + i) % 4 :] + blocks[: (first + i) % 4]
            rooms = [memoryview(bytearray(block.length)) for block in turned]
            wanted = [
                Wanted(block.key, disk_location(7, 3, block), (room,))
                for block, room in zip(turned, rooms, strict=True)
            ]
            outcomes = reads.transport.read(WORD, wanted, time.monotonic() + PATIENCE_S)
            missed.extend(one for one in outcomes if one.read is not Read.HIT)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert missed == []
    reads.close()


def test_a_host_without_threads_costs_misses(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    block = reads.disks[0].save(os.urandom(DISK_PIECE_BYTES + 1))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert what(reads.read(block)[0]) == [Read.FAILED]
    reads.becomes_a_hit(block)


def test_a_child_reads_with_threads_and_memory_of_its_own(reads: Reads) -> None:
    block = reads.disks[0].save(os.urandom(9000))
    assert what(reads.read(block)[0]) == [Read.HIT]
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if what(reads.read(block)[0]) == [Read.HIT] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert what(reads.read(block)[0]) == [Read.HIT]


# --- the file of the disk ---------------------------------------------------------------


def plainly(reads: Reads, uuid: bytes | None = None) -> PlainDisk:
    """Read the first disk as a client does."""
    disk = reads.disks[0]
    owner = disk.path.stat().st_uid
    reads.files[0] = DiskFile(str(disk.path), (uuid or disk.uuid).hex(), owner)
    return disk


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    "there", ["another disk", "nothing", "a pipe", "an empty file", "a folder"]
)
def test_a_disk_that_is_not_the_announced_one_is_told_of_once_and_read_when_it_is_back(
    reads: Reads, tmp_path: Path, caplog: pytest.LogCaptureFixture, there: str
) -> None:
    disk = plainly(reads)
    block, other = disk.save(os.urandom(9000)), reads.disks[1].save(os.urandom(100))
    away = tmp_path / "away"
    disk.path.rename(away)
    if there == "another disk":
        PlainDisk(disk.path, 0, reads.table, 64 << 20)
    elif there == "a pipe":
        os.mkfifo(disk.path)
    elif there == "an empty file":
        disk.path.touch()
    elif there == "folder":
        disk.path.mkdir()
    for _ in range(3):
        assert what(reads.read(block, other)[0]) == [Read.FAILED, Read.HIT]
    assert caplog.text.count(f"{disk.path} cannot be read for now") == 1
    if there == "folder":
        disk.path.rmdir()
    away.rename(disk.path)
    reads.becomes_a_hit(block)


def test_a_disk_that_is_removed_or_replaced_while_it_is_read_gives_right_bytes_or_none(
    reads: Reads,
) -> None:
    disk = plainly(reads)
    raws = [os.urandom(9000) for _ in range(3)]
    blocks = [disk.save(raw) for raw in raws]
    assert what(reads.read(*blocks)[0]) == [Read.HIT] * 3
    disk.path.unlink()
    for _ in range(2):
        outcomes, got = reads.read(*blocks)
        for outcome, mine, raw in zip(outcomes, got, raws, strict=True):
            assert outcome.read is not Read.HIT or mine == raw
        PlainDisk(disk.path, 0, reads.table, 64 << 20)


def test_a_disk_that_was_cut_has_misses_behind_the_cut(reads: Reads) -> None:
    disk = plainly(reads)
    first, last = disk.save(os.urandom(9000)), disk.save(os.urandom(9000))
    assert what(reads.read(first, last)[0]) == [Read.HIT] * 2
    os.truncate(disk.path, (first.place.page + pages_of(9000)) * DISK_PAGE)
    outcomes, got = reads.read(last)
    assert what(outcomes) == [Read.FAILED]
    assert got == [untouched(last)]


def test_a_disk_that_was_not_announced_is_no_exception(reads: Reads) -> None:
    block = reads.disks[0].save(os.urandom(100))
    reads.table.put(block._replace(place=block.place._replace(device=9)))
    moved = reads.table.get(block.key)
    assert moved is not None
    outcomes, _ = reads.read(moved)
    assert what(outcomes) == [Read.FAILED]
    assert "disk 9" in outcomes[0].reason
