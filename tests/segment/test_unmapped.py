"""Another user's segment is read by calls: what its owner does to the files costs bytes alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.events import Fill, Seal
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import SUPERBLOCK_BYTES, Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.segment.trusted_files import SegmentFiles
from kvstore.segment.unmapped import UnmappedShm, attach
from kvstore.system.memory_files import UnmappedFile

SIZE = 128 << 10
ME = os.geteuid()


def key_at(place: int, byte: int) -> bytes:
    """A key with that first place among the hints."""
    return bytes([byte]) * 8 + place.to_bytes(4, "little") + bytes([byte]) * 20


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "segment", Superblock(7, 3, 0, SIZE))
    yield segment
    segment.close()


def open_files() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def unmapped(owned: OwnedShm, *, writable: bool = False) -> UnmappedShm:
    return UnmappedShm(owned.data_path, owned.head_path, owner=ME, writable=writable)


def test_it_says_what_a_mapped_one_says(owned: OwnedShm) -> None:
    keys = [bytes(range(1, 33)), key_at(0x10, 1), key_at(0x10, 2), key_at(0x10203, 3)]
    for slot_id, key in enumerate(keys, 1):
        owned.apply(Seal(slot_id, 9, key, 7, 0, 1, 0, 0, 5))
        owned.apply(Fill(slot_id * 4096, bytes([slot_id]) * 7))
    shm, mapped = unmapped(owned), AttachedShm(owned.data_path, owned.head_path)
    asked = [*keys, key_at(0x14, 9)]
    assert (shm.superblock, shm.slots) == (mapped.superblock, mapped.slots)
    assert [shm.hinted(key) for key in asked] == [mapped.hinted(key) for key in asked]
    assert list(shm.hinted_each(asked)) == list(mapped.hinted_each(asked))
    assert [shm.header(i) for i in range(5)] == [mapped.header(i) for i in range(5)]
    assert shm.read(4096, 7) == bytes([1]) * 7
    target = memoryview(bytearray(7))
    assert shm.read_into(2 * 4096, target)
    assert target == bytes([2]) * 7


def test_what_is_cut_off_is_nothing(owned: OwnedShm) -> None:
    key = bytes(range(1, 33))
    owned.apply(Seal(3, 9, key, 7, 0, 1, 0, 0, 5))
    shm = unmapped(owned, writable=True)
    header = shm.header(3)
    os.truncate(owned.data_path, 3 * 4096 + 6)
    target = memoryview(bytearray(7))
    assert shm.read(3 * 4096, 6) == bytes(6)
    assert shm.read(3 * 4096, 7) is None
    assert not shm.read_into(3 * 4096, target)
    assert not shm.write(3 * 4096, target)
    assert owned.data_path.stat().st_size == 3 * 4096 + 6, "it did not grow"
    os.truncate(owned.head_path, SUPERBLOCK_BYTES + 3 * 64 + 63)
    assert shm.header(3) == bytes(64)
    assert shm.hinted(key) == (0, shm.header(0))
    assert header[8:40] == key
    os.truncate(owned.head_path, 0)
    assert list(shm.hinted_each([key])) == [(0, bytes(64))]


def test_a_slot_that_no_segment_has_is_a_whole_header_of_nothing(owned: OwnedShm) -> None:
    """A hint may name any slot; the file's last bytes are less than a header."""
    assert unmapped(owned).header((1 << 32) - 1) == bytes(64)


def test_what_root_writes_is_in_the_segment(owned: OwnedShm) -> None:
    shm = unmapped(owned, writable=True)
    assert shm.write(4096, memoryview(b"saved"))
    assert shm.read(4096, 5) == b"saved"
    assert not shm.write(SIZE - 4, memoryview(b"saved"))
    assert not unmapped(owned).write(4096, memoryview(b"other")), "it was opened for reading"
    assert shm.read(4096, 5) == b"saved"


def test_files_of_two_sizes_are_no_segment(owned: OwnedShm) -> None:
    os.truncate(owned.data_path, SIZE - 1)
    with pytest.raises(ValueError, match="does not have the size"):
        unmapped(owned)
    os.truncate(owned.data_path, 0)
    with pytest.raises(ValueError, match="is empty"):
        unmapped(owned)


def test_files_are_of_the_user_whose_they_must_be(owned: OwnedShm) -> None:
    with pytest.raises(ValueError, match=f"no plain file of user {ME + 1}"):
        UnmappedFile(owned.head_path, writable=False, owner=ME + 1)


def test_a_file_is_closed_with_its_last_user(owned: OwnedShm) -> None:
    """Not before: a thread that is about to read would read another file of that number."""
    before = open_files()
    shm = unmapped(owned)
    opened = open_files() - before
    shm.close()
    assert opened <= open_files()
    assert shm.read(0, 4) == bytes(4)
    del shm
    assert not opened & open_files()


@pytest.mark.parametrize(("mapped", "kind"), [(True, AttachedShm), (False, UnmappedShm)])
def test_it_is_mapped_where_its_owner_is_trusted(owned: OwnedShm, mapped: bool, kind: type) -> None:
    files = SegmentFiles(owned.data_path, owned.head_path, ME, True, mapped)
    assert type(attach(files)) is kind
