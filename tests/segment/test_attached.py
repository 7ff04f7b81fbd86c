"""What a process sees of a segment that another one owns, and how it maps its pages."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from segment_bytes import head_of, hints_in_head

from kvstore.core.events import Fill, Seal
from kvstore.machine import Machine
from kvstore.segment import attached as module
from kvstore.segment.attached import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    AttachedHeads,
    AttachedShm,
    private_pages,
)
from kvstore.segment.header import LAYOUT_VERSION, Superblock
from kvstore.segment.shm import OwnedShm

PART = 16 << 10
SIZE = 8 * PART
STEP = 4 << 10
SMALLEST = 8 << 10


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "segment", Superblock(7, 3, 0, SIZE))
    yield segment
    segment.close()


@pytest.fixture
def shm(owned: OwnedShm) -> Iterator[AttachedShm]:
    attached = AttachedShm(owned.data_path, owned.head_path)
    yield attached
    attached.close()


def key_at(place: int, byte: int) -> bytes:
    """A key with that first place among the hints."""
    return bytes([byte]) * 8 + place.to_bytes(4, "little") + bytes([byte]) * 20


def test_a_key_is_looked_for_at_its_first_place_and_at_its_second(
    owned: OwnedShm, shm: AttachedShm
) -> None:
    """Alone or among many, which `hinted_each` asks for."""
    keys = [bytes(range(1, 33)), key_at(0x10, 1), key_at(0x10, 2), key_at(0x10203, 3)]
    for slot_id, key in enumerate(keys, 1):
        owned.apply(Seal(slot_id, 9, key, 7, 0, 1, 0, 0, 5))
    found = [(slot_id, owned.header(slot_id)) for slot_id in (1, 2, 3, 4)]
    assert [shm.hinted(key) for key in keys] == found
    assert list(shm.hinted_each(keys)) == found
    # Neither is the second place that of another key, nor the first of its neighbour.
    strange = key_at(0x14, 9)
    assert shm.hinted(strange) == (0, owned.header(0))
    assert list(shm.hinted_each([strange])) == [(0, owned.header(0))]


def test_the_first_place_is_looked_at_first(owned: OwnedShm, shm: AttachedShm) -> None:
    """Both may lead to a header of that key: the second to what it was before."""
    key = bytes(range(1, 33))
    place = 9
    for slot_id in (2, 3):
        owned.apply(Seal(slot_id, slot_id, key, 7, 0, 1, 0, 0, 5))
    hints_in_head(owned)[place], hints_in_head(owned)[place ^ 1] = 3, 2
    assert shm.hinted(key)[0] == 3
    assert next(shm.hinted_each([key]))[0] == 3


def test_a_file_of_another_layout_is_named_as_such_and_left(owned: OwnedShm) -> None:
    for version, words in ((99, "layout version 99"), (LAYOUT_VERSION, "no whole segment")):
        head_of(owned)[8:12] = version.to_bytes(4, "little")
        head_of(owned)[12] = 1  # so that its checksum is wrong
        with pytest.raises(ValueError, match=words):
            AttachedHeads(owned.head_path)


def test_a_header_file_that_was_cut_is_refused(owned: OwnedShm) -> None:
    whole = owned.head_path.stat().st_size
    os.truncate(owned.head_path, whole - 1)
    with pytest.raises(ValueError, match="no whole segment header file"):
        AttachedHeads(owned.head_path)
    os.truncate(owned.head_path, whole)


class Maps(Machine):
    """Keeps what was mapped."""

    def __init__(self) -> None:
        self.made: list[object] = []

    def map_memory(self, *place: object, **how: object) -> object:  # type: ignore[override]
        self.made.append(super().map_memory(*place, **how))  # type: ignore[arg-type]
        return self.made[-1]


def test_what_is_refused_or_closed_is_not_mapped_any_more(owned: OwnedShm, tmp_path: Path) -> None:
    maps = Maps()
    alien = tmp_path / "alien"
    alien.write_bytes(bytes(4096))
    for paths in (
        (owned.data_path, alien),
        (alien, owned.head_path),
        (tmp_path / "no", owned.head_path),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as held:
            AttachedShm(*paths, machine=maps)
        assert held.value is not None
    AttachedShm(owned.data_path, owned.head_path, machine=maps).close()
    assert len(maps.made) == 6
    assert all(mapped.closed for mapped in maps.made)  # type: ignore[attr-defined]


# --- pages ------------------------------------------------------------------------


class Pages:
    """The payload's mapping: notes which parts of it are to be mapped in one go."""

    def __init__(self, real: object) -> None:
        self.real = real
        self.asked: list[tuple[int, int, int]] = []
        self.fails: Exception | None = None

    def madvise(self, advice: int, start: int, size_bytes: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.asked.append((advice, start, size_bytes))

    def parts(self) -> list[tuple[int, int]]:
        asked, self.asked = self.asked, []
        return [part[1:] for part in asked]

    def close(self) -> None:
        self.real.close()  # type: ignore[attr-defined]


def noted(shm: AttachedShm, kind: type[Pages] = Pages) -> Any:
    """Have it map pages by way of one that notes what is asked."""
    pages = kind(shm._data)
    shm._data = pages  # type: ignore[assignment]
    return pages


class Later(Machine):
    """Starts threads when the test says so; sleeps are counted."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.slept = 0
        self.full = False

    def start_thread(self, run: Callable[[], None], name: str) -> None:  # type: ignore[override]
        if self.full:
            raise RuntimeError("can't start new thread")
        self.waiting.append(run)

    def sleep(self, seconds: float) -> None:
        self.slept += 1


@pytest.fixture
def mapped(
    owned: OwnedShm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AttachedShm, Pages, Later]]:
    monkeypatch.setattr(module, "LOCK_PART_BYTES", PART)
    monkeypatch.setattr(module, "POPULATE_BYTES_MIN", SMALLEST)
    monkeypatch.setattr(module, "POPULATE_STEP_BYTES", STEP)
    later = Later()
    attached = AttachedShm(owned.data_path, owned.head_path, machine=later)
    pages = noted(attached)
    yield attached, pages, later
    attached.close()


Mapped = tuple[AttachedShm, Pages, Later]


def test_the_parts_that_a_block_touches_are_mapped_once(mapped: Mapped) -> None:
    shm, pages, _ = mapped
    shm.populate(PART, PART)
    assert pages.parts() == [(PART, PART)]
    shm.populate(PART - SMALLEST, SMALLEST + 1)
    assert pages.parts() == [(0, PART)]
    shm.populate(PART, 2 * PART + 1)
    assert pages.parts() == [(2 * PART, PART), (3 * PART, PART)]
    shm.populate(0, 4 * PART)
    assert pages.parts() == []


def test_a_small_block_and_the_rest_of_the_last_part(mapped: Mapped) -> None:
    shm, pages, _ = mapped
    shm.populate(0, SMALLEST - 1)
    assert pages.parts() == []
    shm.superblock = shm.superblock._replace(size_bytes=2 * PART - 4096)
    shm.populate(PART, SMALLEST)
    assert pages.parts() == [(PART, PART - 4096)]


def test_a_writer_maps_pages_to_write_and_a_reader_to_read(owned: OwnedShm) -> None:
    for writable, advice in ((False, MADV_POPULATE_READ), (True, MADV_POPULATE_WRITE)):
        shm = AttachedShm(owned.data_path, owned.head_path, writable=writable)
        pages = noted(shm)
        shm.populate(0, SIZE)
        assert pages.asked == [(advice, 0, SIZE)]
        shm.close()


def test_what_lies_ahead_is_mapped_in_steps_with_pauses_and_once(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm, pages, later = mapped
    monkeypatch.setattr(module, "POPULATE_AHEAD_BYTES", 2 * PART + 1)
    shm.populate(4 * PART, PART)
    assert pages.parts() == [(4 * PART, PART)]
    shm.populate_ahead()
    (run,) = later.waiting
    shm.populate(4 * PART, PART)
    assert pages.parts() == [], "it is mapped"
    # While that is to come, a block's own pages alone: a part takes milliseconds.
    shm.populate(PART + 5000, SMALLEST)
    start = (PART + 5000) // mmap.PAGESIZE * mmap.PAGESIZE
    assert pages.parts() == [(start, PART + 5000 + SMALLEST - start)]
    run()
    assert pages.parts() == [(start, STEP) for start in range(0, 3 * PART, STEP)]
    assert later.slept == 3 * PART // STEP
    shm.populate(0, 3 * PART)
    assert pages.parts() == []
    shm.populate(3 * PART, PART)
    assert pages.parts() == [(3 * PART, PART)]


def test_what_is_beyond_is_mapped_when_used_and_then_all_of_it_is(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on nobody asks for a block of a large segment whether it is mapped."""
    shm, pages, later = mapped
    monkeypatch.setattr(module, "POPULATE_AHEAD_BYTES", 2 * PART)
    shm.superblock = shm.superblock._replace(size_bytes=4 * PART)
    shm.populate(PART, PART)
    shm.populate_ahead()
    later.waiting[0]()
    assert not shm.is_populated
    shm.populate(2 * PART, PART)
    assert not shm.is_populated
    pages.fails = OSError(errno.EFAULT, "away")
    assert not shm.populate(3 * PART, PART)
    assert not shm.is_populated
    pages.fails = None
    assert shm.populate(3 * PART, PART)
    assert shm.is_populated


def test_the_last_step_ends_with_the_segment(mapped: Mapped) -> None:
    shm, pages, later = mapped
    shm.superblock = shm.superblock._replace(size_bytes=PART + STEP + 100)
    shm.populate_ahead()
    later.waiting[0]()
    assert pages.parts()[-2:] == [(PART, STEP), (PART + STEP, 100)]


@pytest.mark.parametrize("fails", [None, ValueError("closed")], ids=["no thread", "closed"])
def test_where_nothing_is_mapped_ahead_a_block_has_its_part_mapped(
    mapped: Mapped, fails: Exception | None
) -> None:
    shm, pages, later = mapped
    later.full, pages.fails = fails is None, fails
    shm.populate_ahead()
    for run in later.waiting:
        run()
    pages.fails = None
    shm.populate(PART, SMALLEST)
    assert pages.parts() == [(PART, PART)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_a_kernel_that_maps_nothing_in_one_go_is_no_failure(mapped: Mapped, number: int) -> None:
    shm, pages, later = mapped
    pages.fails = OSError(number, "not now")
    assert shm.populate(0, PART)
    shm.populate_ahead()
    later.waiting[0]()
    assert shm.is_populated


@pytest.mark.parametrize("number", [errno.EFAULT, 133])
def test_pages_that_are_gone_are_told_each_time(mapped: Mapped, number: int) -> None:
    shm, pages, later = mapped
    pages.fails = OSError(number, "away")
    assert not shm.populate(PART, SMALLEST)
    assert not shm.populate(PART, 2 * PART)
    shm.populate_ahead()
    assert not shm.populate(PART, SMALLEST), "while a thread is about to map"
    later.waiting[0]()
    assert (later.slept, shm.is_populated) == (0, False)
    pages.fails = None
    assert shm.populate(PART, SMALLEST)
    assert pages.parts() == [(PART, PART)]


class Cut(Pages):
    """Pages of a file that ends there."""

    end = 0

    def madvise(self, advice: int, start: int, size_bytes: int) -> None:
        super().madvise(advice, start, size_bytes)
        if start + size_bytes > self.end:
            raise OSError(errno.EFAULT, "beyond the end")


def test_a_block_before_the_cut_of_its_part_is_there(mapped: Mapped) -> None:
    shm, pages, _ = mapped
    cut = noted(shm, Cut)
    cut.end = 2 * PART + SMALLEST
    assert shm.populate(2 * PART, SMALLEST)
    assert not shm.populate(2 * PART + 4096, SMALLEST)
    assert shm.populate(PART, PART)
    assert not shm.populate(PART, 2 * PART)
    pages.asked.clear()


# --- pages of one caller alone ----------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("offset", [0, 100, 4096 + 100])
def test_private_pages_are_the_segments_and_nobody_sees_what_is_written(
    owned: OwnedShm, offset: int
) -> None:
    owned.apply(Fill(0, bytes(range(250)) * 40))
    before = descriptors()
    pages = private_pages(str(owned.data_path), offset, 3000)
    payload = owned.data_path.read_bytes()
    assert bytes(pages) == payload[offset : offset + 3000]
    pages[:] = b"x" * 3000
    assert owned.data_path.read_bytes() == payload
    assert descriptors() <= before + 1, "the mapping's own alone"


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """As kernels for ARM have them; what is asked of the real one is right for its own as well."""
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    return mmap.PAGESIZE


def test_with_pages_of_64_kib_all_that_is_mapped_in_one_go_begins_with_one(
    owned: OwnedShm, large_pages: int
) -> None:
    assert module.LOCK_PART_BYTES % large_pages == module.POPULATE_STEP_BYTES % large_pages == 0
    later = Later()
    shm = AttachedShm(owned.data_path, owned.head_path, machine=later)
    shm.populate_ahead()  # so that blocks are mapped alone
    pages = noted(shm)
    for offset in (0, 4096, large_pages - 1024, large_pages, SIZE - large_pages):
        shm.populate(offset, large_pages)
        (part,) = pages.parts()
        assert part[0] % large_pages == 0
        assert part[0] <= offset < offset + large_pages == sum(part)
    shm.close()


@pytest.mark.parametrize("offset", [0, 4096, (64 << 10) + 100])
def test_with_pages_of_64_kib_private_ones_are_the_segments(
    owned: OwnedShm, large_pages: int, offset: int
) -> None:
    owned.apply(Fill(0, bytes(range(256)) * (SIZE // 256)))
    asked: list[int] = []

    class Strict(mmap.mmap):
        def __new__(cls, *args: int, offset: int) -> Strict:
            asked.append(offset)
            return super().__new__(cls, *args, offset=offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", Strict)
        pages = private_pages(str(owned.data_path), offset, 3000)
    assert bytes(pages) == owned.data_path.read_bytes()[offset : offset + 3000]
    assert asked == [offset // large_pages * large_pages]


def test_private_pages_of_a_link_or_beyond_the_end_are_refused(
    owned: OwnedShm, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(owned.data_path)
    with pytest.raises(OSError, match="link"):
        private_pages(str(link), 0, 100)
    with pytest.raises(ValueError, match="length"):
        private_pages(str(owned.data_path), SIZE - 100, 101)
    assert len(private_pages(str(owned.data_path), SIZE - 100, 100)) == 100
