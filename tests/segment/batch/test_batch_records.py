"""The compiled part makes records of what a header says (kvstore/segment/batch_read.py): those that
the node publishes, and none where a header is not plainly that of the key. Headers are found by the
code that reads blocks, so test_batch_read.py has what can be wrong with hints and headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from batch_parts import mapped
from batch_readers import reader_of
from segment_bytes import head_of

from kvstore.core.events import Mark, Seal
from kvstore.record import node_start, pack_record, unpack_record
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import MappedSegment
from kvstore.segment.header import FREE, SUPERBLOCK_BYTES, Superblock, pack
from kvstore.segment.shm import OwnedShm
from kvstore.types import Location

SIZE = 128 << 10
SLOTS = SIZE // 4096
HEADER = SUPERBLOCK_BYTES + 3 * 64
NODE_ID, EPOCH = 0xFEDCBA9876543210, 0x89ABCDEF
START = node_start(NODE_ID, EPOCH)
HERE = Location(NODE_ID, EPOCH, 0, 3, (1 << 48) - 2, 2, 1000, 0xF0E1D2C3B4A59687)
"""All that a location says, each of it large where it may be."""


def key_of(hint: int, name: bytes = b"a") -> bytes:
    return name.ljust(8) + hint.to_bytes(4, "little") + name.ljust(20)


KEY = key_of(9)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "s", Superblock(NODE_ID, EPOCH, 0, SIZE))
    yield segment
    segment.close()


def seal(owned: OwnedShm, key: bytes = KEY, at: Location = HERE, meta: int = 0) -> Location:
    checksum = at.checksum
    owned.apply(Seal(at.slot, at.generation, key, at.length, at.granule, 1, meta, checksum, 5))
    return at


def records(shm: AttachedShm, *keys: Any) -> list[bytes | None]:
    made = reader_of("compiled").records(mapped(shm), list(keys) or [KEY], START)
    assert made is not None
    return made


def test_a_record_is_the_one_that_the_node_publishes(owned: OwnedShm, shm: AttachedShm) -> None:
    locations = {
        key_of(i): seal(owned, key_of(i), HERE._replace(slot=i, generation=7 + i, granule=i % 4))
        for i in range(0, 20, 2)
    }
    keys = [key_of(i) for i in range(20)]
    for key, record in zip(keys, records(shm, *keys), strict=True):
        location = locations.get(key)
        assert record == (None if location is None else pack_record(key, location))
        assert location is None or unpack_record(key, record or b"") == location
    seal(owned)
    assert records(shm) == [pack_record(KEY, HERE)]
    assert reader_of("compiled").records(mapped(shm), [], START) == []


def test_the_one_in_python_leaves_them_to_who_keeps_what_was_made(
    owned: OwnedShm, shm: AttachedShm
) -> None:
    seal(owned)
    assert reader_of("Python").records(mapped(shm), [KEY], START) is None


def test_a_value_of_no_bytes_has_a_record_too(owned: OwnedShm, shm: AttachedShm) -> None:
    seal(owned, meta=1000)
    assert records(shm) == [pack_record(KEY, HERE)]


def test_a_slot_that_is_not_sealed_has_none(owned: OwnedShm, shm: AttachedShm) -> None:
    seal(owned)
    for state in (FREE, 1):
        owned.apply(Mark(3, state, 1))
        assert records(shm) == [None]
    # Its CRC right all the same: a header that says another state than SEALED.
    raw = bytes([FREE]) + pack((1, KEY, 1000, 0, 1, 0, 0, 0))[1:60]
    head_of(owned)[HEADER : HEADER + 64] = raw + crc32(raw).to_bytes(4, "little")
    assert records(shm) == [None]


def test_what_is_no_segment_no_key_or_no_start_is_an_error(
    owned: OwnedShm, shm: AttachedShm, tmp_path: Path
) -> None:
    reader, large = reader_of("compiled"), OwnedShm(tmp_path / "l", Superblock(7, 1, 0, 2 * SIZE))
    other = AttachedShm(large.data_path, large.head_path)
    mixed = MappedSegment(mapped(shm).head, mapped(other).data, *mapped(shm)[2:])
    with pytest.raises(ValueError, match="not of that segment"):
        reader.records(mixed, [KEY], START)
    other.close()
    large.close()
    for keys, start in (([KEY[:-1]], START), ([KEY + b"x"], START), ([KEY], START[1:])):
        with pytest.raises(ValueError, match=r"has (32|12) bytes"):
            reader.records(mapped(shm), keys, start)
    with pytest.raises(TypeError):
        reader.records(mapped(shm), ["text"], START)  # type: ignore[list-item]
    shm.close()
    assert mapped(shm).data.closed, "no buffer of it was kept"
    with pytest.raises(ValueError):
        records(shm)
