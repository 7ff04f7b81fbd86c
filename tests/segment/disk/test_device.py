"""A disk device: what is written comes back, it takes no more than its size, and whose it is."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from disk_parts import (
    LOG_BYTES,
    NODE,
    PAGE,
    REGION_BYTES,
    REGIONS,
    SIZE,
    block_of,
    file_of,
    open_device,
)

from kvstore.core.disk.base import RegionState
from kvstore.core.resets import Resets
from kvstore.errors import InternalError, UsageError
from kvstore.segment.disk import device as module
from kvstore.segment.disk.adopt import adopt, settle
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.file import open_file
from kvstore.segment.disk.format import ENTRIES_PER_PAGE, Geometry, pages_of
from kvstore.testing.sim.models.disk import SimDisk
from kvstore.types import DiskBlock, Kind

LENGTHS = [1, 4095, 4096, 4097, 8192, 3 * PAGE - 1]


def key(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(SIZE, random.Random(3))


def written(device: DiskDevice, region: int, lengths: list[int]) -> list[tuple[DiskBlock, bytes]]:
    """Begin a region and write a block of each length to it, each in a batch of its own."""
    lap, page = device.next_lap, device.geometry.first_page(region)
    device.begin(region, lap, 0)
    batch = []
    for number, length in enumerate(lengths):
        value = os.urandom(length)
        batch.append((block_of(key(number + 1), value, page, lap), value))
        device.write(region, lap, batch[-1:])
        page += pages_of(length)
    return batch


def adopted(device: DiskDevice) -> dict[bytes, DiskBlock]:
    found: dict[bytes, DiskBlock] = {}
    for _, blocks in adopt(device):
        for block in blocks:
            found.setdefault(block.key, block)
    return found


def started(*disks: SimDisk, run: int = 1, resets: Resets | None = None) -> list[DiskDevice]:
    devices = [open_device(disk, number) for number, disk in enumerate(disks)]
    return settle(devices, Resets() if resets is None else resets, run)


# --- writing and reading ----------------------------------------------------------------


@pytest.mark.parametrize("real", [False, True])
def test_what_is_written_is_read_and_found_by_the_next_start(disk_dir: Path, real: bool) -> None:
    file = file_of(disk_dir, SIZE) if real else SimDisk(SIZE, random.Random(1))
    device = open_device(file)
    batch = written(device, 2, LENGTHS)
    for block, value in batch:
        assert device.read(block) == value
    if real:
        device.close()
        file = file_of(disk_dir, SIZE)
    device = open_device(file)
    assert adopted(device) == {block.key: block for block, _ in batch}
    assert [state for state, _ in adopt(device)] == [RegionState(2, 1)]
    device.close()


def test_the_rest_of_a_last_page_is_zeros(disk: SimDisk) -> None:
    device = open_device(disk)
    stale = aligned(2 * PAGE)
    stale[:] = b"S" * len(stale)
    for length in (5000, 100):
        device.begin(1, device.next_lap, 0)
        page = device.geometry.first_page(1)
        for payload in (stale[:length], bytes(stale[:length]), stale[1 : length + 1]):
            block = block_of(key(1), bytes(payload), page, device.next_lap - 1)
            device.write(1, block.place.lap, [(block, payload)])
            pages = b"".join(disk.page(page + n) for n in range(pages_of(length)))
            assert pages == bytes(payload).ljust(len(pages), b"\0")
            page += pages_of(length)


def test_a_payload_with_another_checksum_is_a_miss(disk: SimDisk) -> None:
    device = open_device(disk)
    (first, _), (second, value) = written(device, 0, [5000, 5000])
    assert device.read(first._replace(place=second.place)) is None
    assert device.read(second._replace(length=4999)) is None
    assert device.read(second._replace(place=second.place._replace(page=1 << 31))) is None
    assert device.read(second) == value
    disk.flip(second.place.page + 1, 7)
    assert device.read(second) is None


def test_a_block_of_which_the_place_was_written_over_is_a_miss(disk: SimDisk) -> None:
    device = open_device(disk)
    ((block, _),) = written(device, 0, [5000])
    written(device, 0, [5000])
    assert device.read(block) is None


def test_entries_of_an_earlier_lap_do_not_count(disk: SimDisk) -> None:
    device = open_device(disk)
    written(device, 0, [PAGE] * 5)
    device.begin(0, device.next_lap, 0)
    assert adopted(open_device(disk)) == {}
    batch = written(open_device(disk), 0, [PAGE] * 2)
    assert adopted(open_device(disk)) == {block.key: block for block, _ in batch}


def test_the_newest_block_of_a_key_comes_first(disk: SimDisk) -> None:
    device = open_device(disk)
    written(device, 4, [PAGE])
    ((newest, _),) = written(device, 2, [PAGE])
    found = [block.place for _, blocks in adopt(device) for block in blocks]
    assert found[0] == newest.place
    assert len(found) == 2


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_region_takes_no_more_after_a_write_that_failed(disk: SimDisk, what: str) -> None:
    device = open_device(disk)
    batch = written(device, 0, [PAGE])
    disk.failing_writes = 1
    place = batch[0][0].place
    later = batch[0][0]._replace(place=place._replace(page=place.page + 1))
    for _ in range(2):
        with pytest.raises(OSError):
            device.write(0, 1, [(later, batch[0][1])])
    assert device.trouble() is None
    assert device.read(batch[0][0]) == batch[0][1]
    written(device, 1, [PAGE])


def test_what_the_core_may_not_ask_is_a_bug(disk: SimDisk) -> None:
    device = open_device(disk)
    value = bytes(PAGE)

    def begun(*, page: int = 0, lap: int = 0, **changed: int) -> tuple[DiskBlock, int]:
        own = device.next_lap
        device.begin(0, own, 0)
        block = block_of(key(1), value, device.geometry.first_page(0) + page, own + lap)
        return block._replace(**changed), own

    good, lap = begun()
    device.write(0, lap, [(good, value)])
    with pytest.raises(InternalError, match="cannot be begun as lap 1"):
        device.begin(1, lap, 0)
    for wrong in ({"page": -1}, {"page": 14}, {"lap": 1}, {"length": PAGE - 1}, {"checksum": 0}):
        block, lap = begun(**wrong)
        with pytest.raises(InternalError):
            device.write(0, lap, [(block, value)])
    block, lap = begun()
    with pytest.raises(InternalError):
        device.write(0, lap, [(block, value), (block, value)])


def test_a_region_has_as_many_entries_as_it_says() -> None:
    disk = SimDisk(40 << 20, random.Random(1))
    device = DiskDevice.open(disk, 0, NODE, region_bytes=1 << 20, log_bytes=LOG_BYTES)
    assert device.geometry.entries == 2 * ENTRIES_PER_PAGE
    batch = written(device, 0, [10] * device.geometry.entries)
    assert len(adopted(device)) == len(batch)
    last, value = batch[-1]
    later = last._replace(place=last.place._replace(page=last.place.page + 1))
    with pytest.raises(InternalError):
        device.write(0, 1, [(later, value)])


# --- its size ---------------------------------------------------------------------------


def used_bytes(where: Path) -> int:
    told = subprocess.run(["du", "-s", "-B1", where], capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0])


def test_ten_laps_of_mixed_sizes_and_restarts_take_no_byte_more_than_the_disk_size(
    disk_dir: Path,
) -> None:
    rng = random.Random(1)
    for disk_size in (12 << 20, 12 << 20, 20 << 20, 8 << 20):
        file = open_file(disk_dir, disk_size, forced=True)
        device = DiskDevice.open(file, 0, NODE, region_bytes=1 << 20, log_bytes=LOG_BYTES)
        settle([device], Resets(), 1)
        assert file.size_bytes > disk_size * 0.9
        for _ in range(5):
            for region in range(device.geometry.regions):
                lengths = [rng.randrange(1, 60_000) for _ in range(8)]
                batch = written(device, region, lengths)
                device.log.append([batch[0][0].key], None, 0, batch[0][0].place.lap << 32)
                device.log.commit()
                used = used_bytes(disk_dir)
                assert used <= disk_size
        device.close()
    assert [path.name for path in disk_dir.iterdir()] == ["kvstore.disk"]


def test_a_device_that_grows_or_shrinks_keeps_the_regions_that_it_has(disk_dir: Path) -> None:
    def opened(regions: int) -> DiskDevice:
        device = open_device(file_of(disk_dir, SIZE + (regions - REGIONS) * REGION_BYTES))
        assert device.geometry.regions == regions
        return device

    device = opened(REGIONS)
    values = {}
    for region in range(REGIONS):
        value = os.urandom(PAGE)
        lap, page = device.next_lap, device.geometry.first_page(region)
        device.begin(region, lap, 0)
        block = block_of(key(region + 1), value, page, lap)
        device.write(region, lap, [(block, value)])
        values[block] = value
    device.close()
    for regions, kept in (
        (REGIONS + 3, REGIONS),
        (REGIONS - 1, REGIONS - 1),
        (REGIONS, REGIONS - 1),
    ):
        device = opened(regions)
        found = adopted(device).values()
        assert set(found) == set(list(values)[:kept])
        assert all(device.read(block) == values[block] for block in found)
        device.close()


def test_a_device_that_is_too_small_is_refused_with_the_least_that_it_takes() -> None:
    least = SIZE - REGION_BYTES
    DiskDevice.open(
        SimDisk(least, random.Random()), 0, NODE, region_bytes=REGION_BYTES, log_bytes=LOG_BYTES
    )
    with pytest.raises(UsageError, match=f"must be at least {least} bytes"):
        open_device(SimDisk(least - PAGE, random.Random()))


# --- whose it is ------------------------------------------------------------------------


def test_another_programs_file_is_left_alone(disk: SimDisk) -> None:
    disk.pages[1] = b"mine".ljust(PAGE, b"\0")
    with pytest.raises(UsageError, match="no disk of kvstore's: move it away"):
        open_device(disk)
    assert list(disk.pages) == [1]
    assert not disk.pending


def test_another_version_is_refused_with_what_to_do(disk: SimDisk) -> None:
    open_device(disk)
    for page in (0, 1):
        disk.flip(page, 8 * 8 + 3)
    with pytest.raises(UsageError, match=r"another version than 1: .*--clean --disk"):
        open_device(disk)


def test_one_copy_of_the_superblock_is_enough(disk: SimDisk) -> None:
    batch = written(open_device(disk), 0, [PAGE])
    for page in (0, 1, 0):
        disk.flip(page, 300)
        assert adopted(open_device(disk)).keys() == {batch[0][0].key}
    for page in (0, 1):
        disk.unreadable = {page}
        assert adopted(open_device(disk)).keys() == {batch[0][0].key}
    disk.unreadable = {0, 1}
    with pytest.raises(OSError):
        open_device(disk)


def test_what_another_device_wrote_is_noise(disk: SimDisk) -> None:
    """The file was made anew over what is left of another device."""
    written(open_device(disk), 0, [PAGE])
    for page in (0, 1):
        disk.pages[page] = bytes(PAGE)
        disk.pending.pop(page, None)
    for page in range(2, 2 + LOG_BYTES // PAGE):
        disk.pages.pop(page, None)
        disk.pending.pop(page, None)
    assert adopted(open_device(disk)) == {}


def test_another_nodes_disk_brings_engines_blocks_and_no_values(disk: SimDisk) -> None:
    """Under a name the node may have had another value meanwhile; a block's key says what it is."""
    written(open_device(disk), 0, [PAGE] * 4)
    device = open_device(disk, node_id=NODE + 1)
    kinds = {block.kind for block in adopted(device).values()}
    assert kinds == {Kind.BLOCK}
    disk.sync()
    for node in (NODE + 1, NODE):
        assert {b.kind for b in adopted(open_device(disk, node_id=node)).values()} == {Kind.BLOCK}


def test_disks_may_change_places() -> None:
    disks = [SimDisk(SIZE, random.Random(n)) for n in range(3)]
    for number, device in enumerate(started(*disks)):
        written(device, number, [PAGE] * (number + 1))
    devices = started(*reversed(disks), run=2)
    assert [len(adopted(device)) for device in devices] == [3, 2, 1]
    for number, device in enumerate(devices):
        assert {block.place.device for block in adopted(device).values()} == {number}
        assert all(device.read(block) is not None for block in adopted(device).values())


def test_a_disk_that_was_away_takes_part_in_the_resets_it_missed() -> None:
    away, stays = (SimDisk(SIZE, random.Random(n)) for n in range(2))
    for device in started(away, stays):
        written(device, 0, [PAGE] * 6)
    (device,) = started(stays, run=2)
    device.log.append((), [1], 5 << 20, device.end)
    device.log.commit()
    for known in (Resets(), None):
        devices = started(stays, away, run=3, resets=known)
        for device in devices:
            namespaces = {block.namespace_id for block in adopted(device).values()}
            assert namespaces == {0, 2}


def test_resets_that_the_node_heard_of_hold_on_its_disks_whatever_their_order() -> None:
    """One with a smaller number than another that the disk knew already is not known there."""
    disk = SimDisk(SIZE, random.Random(1))
    (device,) = started(disk)
    device.log.append((), [7], 9 << 20, device.end)
    written(device, 0, [PAGE] * 6)
    device.log.commit()
    resets = Resets()
    resets.add(9 << 20, [7])
    resets.add(8 << 20, [1])
    (device,) = started(disk, run=2, resets=resets)
    assert {block.namespace_id for block in adopted(device).values()} == {0, 2}
    batch = written(device, 1, [PAGE] * 6)
    (device,) = started(disk, run=3, resets=resets)
    assert {block.key for block, _ in batch} == adopted(device).keys()


def test_resets_that_a_node_has_forgotten_empty_a_disk_that_may_have_missed_them() -> None:
    disk = SimDisk(SIZE, random.Random(1))
    (device,) = started(disk)
    written(device, 0, [PAGE] * 6)
    resets = Resets()
    resets.floor = 1 << 40
    (device,) = started(disk, run=2, resets=resets)
    assert adopted(device) == {}


@pytest.mark.parametrize("deleted", [False, True])
def test_a_disk_that_was_away_while_a_key_was_deleted_is_emptied(deleted: bool) -> None:
    away, stays = (SimDisk(SIZE, random.Random(n)) for n in range(2))
    for device in started(away, stays):
        written(device, 0, [PAGE] * 3)
    (device,) = started(stays, run=2)
    if deleted:
        device.log.append([], None, 0, 0)
    device.log.commit()
    for run in (3, 4):
        found = [len(adopted(device)) for device in started(away, stays, run=run)]
        assert found == ([0, 3] if deleted else [3, 3])


@pytest.mark.parametrize("lost", [None, 0, 3, 16, 17, 20])
@pytest.mark.usefixtures("way")
def test_of_large_blocks_few_entry_pages_are_read_and_no_entry_is_missed(
    monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    """Also where a page of entries was lost: what is behind it may still be found."""
    monkeypatch.setattr(module, "ENTRY_PAGES_MIN", 1)
    file = SimDisk(Geometry(32 << 20, LOG_BYTES, 4).start(4) * PAGE, random.Random(1))
    device = DiskDevice.open(file, 0, NODE, region_bytes=32 << 20, log_bytes=LOG_BYTES)
    lap, shape = device.next_lap, device.geometry
    device.begin(1, lap, 0)
    count = 22 * 32
    lengths = [PAGE] * (count - 1) + [(shape.payload_pages - count + 1 - 20) * PAGE]
    page, batch = shape.first_page(1), []
    for length in lengths:
        value = bytes(length)
        batch.append((block_of(os.urandom(32), value, page, lap), value))
        page += pages_of(length)
    device.write(1, lap, batch)
    there = [block for block, _ in batch]
    if lost is not None:
        blank = aligned(PAGE)
        file.write((shape.start(1) + 1 + lost) * PAGE, [blank])
        del there[lost * 32 : lost * 32 + 32]
    read: list[int] = []
    bare = file.read

    def counted(at: int, into: memoryview) -> None:
        read.append(len(into))
        bare(at, into)

    monkeypatch.setattr(file, "read", counted)
    assert list(device.blocks(RegionState(1, lap)))[::-1] == there
    assert sum(read) < shape.entry_pages * PAGE
